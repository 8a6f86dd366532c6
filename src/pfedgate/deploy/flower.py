"""ServerApp and ClientApp for Flower: two lines each in an app's own files.

    app = server_app("recipe.toml")                       # server.py
    app = client_app("recipe.toml")                       # client.py
    app = client_app("recipe.toml", data=my_function)     # a node's own data, made by a function of its --node-config

Run config (`flwr run . fleet -c '…'`): set = settings over the recipe; folder = where the server keeps metrics and
checkpoints, and from where a new run goes on; state-dir = where nodes without a setting of their own keep private
states. The server loop is `pfedgate.engine.server.run`, the algorithms are those of `pfedgate run`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfedgate import experiment
from pfedgate.config.recipe import GIVEN, Named, Recipe
from pfedgate.deploy import need_flower, settings
from pfedgate.deploy.fleet import Fleet
from pfedgate.deploy.grid import GridExchange
from pfedgate.deploy.node import Data, Node
from pfedgate.deploy.parcels import from_records, to_records
from pfedgate.deploy.roll import Roll, Told
from pfedgate.engine import server as engine
from pfedgate.engine.metrics import Record
from pfedgate.engine.server import Result
from pfedgate.engine.store import write_atomically
from pfedgate.runs import folder as runfolder

JOURNAL = "deploy.json"
log = logging.getLogger("flwr")


def server_app(recipe: str | Path | Mapping[str, Any], *, model: Any = None) -> Any:
    """A ServerApp that runs this recipe."""
    need_flower()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator, unused-ignore]
    def main(grid: Any, context: Any) -> None:
        serve(grid, settings.read(recipe, context.run_config), str(context.run_config.get("folder", "")), model=model)

    return app


def client_app(recipe: str | Path | Mapping[str, Any], *, data: Data | None = None, model: Any = None) -> Any:
    """A ClientApp for the same recipe; `data` makes a node's federation of its --node-config."""
    need_flower()
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def answer(message: Any, context: Any) -> Any:
        chosen = settings.read(recipe, context.run_config)
        node = Node(chosen, context.node_config, context.run_config, data=data, model=model)
        return Message(to_records(node.answer(from_records(message.content))), reply_to=message)

    for kind in (app.query, app.train, app.evaluate):
        kind()(answer)
    return app


def serve(grid: Any, recipe: Recipe, folder: str = "", *, model: Any = None, fleet: Fleet | None = None) -> Result:
    """The server of a deployed run: roll call, then the engine's rounds over the grid."""
    fleet = fleet or Fleet(grid, recipe.deploy)
    keep = Path(folder).expanduser() if folder else None
    if keep is None:
        log.warning("no folder is set: if this server dies, the run starts anew")
    else:
        _open(keep, recipe)
    roll = fleet.assemble()
    journal = Journal.read(keep)
    roll = roll.joined(journal.roll)
    made = experiment.plan(dataclasses.replace(recipe, data=Named(GIVEN)), data=roll, model=model)
    cards = roll.cards(made.options.budget, made.options.seed)
    log.info("%s clients on %s nodes, %s", len(cards.clients), len(fleet.told), recipe.algorithm.name)

    def reach(algorithm: Any, federation: Any, store: Any, device: Any) -> GridExchange:
        number = store.tag.partition("-")[0]
        started = journal.begun(int(number) if number.isdigit() else 0, roll)
        started.write(keep)
        return GridExchange(
            algorithm, federation, store, fleet=fleet, experiment=started.experiment, starts=started.starts
        )

    return engine.run(
        made.algorithm, cards, made.options, exchange=reach, folder=keep, resume=True, callbacks=[_report]
    )


def _open(folder: Path, recipe: Recipe) -> None:
    """The run's folder: new, or one of the same recipe to go on with; deadlines and quorum may change on the way."""
    if (folder / runfolder.CONFIG).exists():
        if dataclasses.replace(runfolder.load(folder).recipe, deploy=recipe.deploy) != recipe:
            raise ValueError(f"{folder} holds a run of another recipe: choose another folder, or the same recipe")
    else:
        runfolder.create(folder, recipe)
    runfolder.note_environment(runfolder.load(folder))


@dataclasses.dataclass(frozen=True)
class Journal:
    """What a server must remember beside its checkpoint: the experiment, its own starts, and everyone it has met."""

    experiment: str
    starts: tuple[int, ...] = ()  # the commit at which each start of the server took up work
    roll: Roll | None = None

    @classmethod
    def read(cls, folder: Path | None) -> Journal:
        """From a run's folder; a new one if there is none."""
        path = None if folder is None else folder / JOURNAL
        if path is None or not path.exists():
            return cls(uuid.uuid4().hex)
        kept = json.loads(path.read_text(encoding="utf-8"))
        return cls(kept["experiment"], tuple(kept["starts"]), Roll([Told.read(told) for told in kept["roll"]]))

    def begun(self, commit: int, roll: Roll) -> Journal:
        """With one more start."""
        return Journal(self.experiment, (*self.starts, commit), roll)

    def write(self, folder: Path | None) -> None:
        """Into a run's folder, before the first message of a start is sent."""
        if folder is not None and self.roll is not None:
            kept = {
                "experiment": self.experiment,
                "starts": self.starts,
                "roll": [t.plain() for t in self.roll.answers],
            }
            write_atomically(folder / JOURNAL, json.dumps(kept, indent=1).encode(), sync=True)


def _report(event: Record) -> None:
    """A line per round in Flower's log."""
    if event["event"] == "start" and event["round"]:
        log.info("going on after round %s of %s", event["round"], event["rounds"])
    if event["event"] == "round":
        scored = event.get("after_broadcast", {})
        accuracy = f", accuracy {scored['accuracy']:.4f}" if scored.get("accuracy") is not None else ""
        log.info(
            "round %s/%s: %s clients, %s refused, loss %.4f%s, %s bytes up, %.1f s",
            event["round"], event["rounds"], event["sampled"], event["refused"], event.get("loss", float("nan")),
            accuracy, event["bytes_up"], event["seconds"],
        )  # fmt: skip
        for refusal in event.get("refusals", ()):
            log.warning("%s", refusal)
