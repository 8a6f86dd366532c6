"""ServerApp and ClientApp for Flower: two lines each in an app's own files.

    app = server_app("recipe.toml")                       # server.py
    app = client_app("recipe.toml")                       # client.py
    app = client_app("recipe.toml", data=my_function)     # a node's own data, made by a function of its --node-config

Run config (`flwr run . fleet -c '…'`): `set` = settings over the recipe, separated by semicolons; `folder` = where the
server keeps metrics and checkpoints, and from where a new run goes on; `state-dir` = where nodes without a setting of
their own keep private states. The server loop is `pfedgate.engine.server.run`, as for `pfedgate run`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfedgate import experiment
from pfedgate.config import code
from pfedgate.config import recipe as config
from pfedgate.config.recipe import Recipe, RecipeError
from pfedgate.deploy import need_flower
from pfedgate.deploy.fleet import Fleet
from pfedgate.deploy.grid import GridExchange
from pfedgate.deploy.messages import NodeInfo, Roll, from_records, to_records
from pfedgate.deploy.node import Data, Node
from pfedgate.engine import server as engine
from pfedgate.engine.files import write_atomically
from pfedgate.engine.metrics import Record
from pfedgate.engine.server import Result
from pfedgate.runs import folder as runfolder

JOURNAL = "deploy.json"
Source = str | Path | Mapping[str, Any]
log = logging.getLogger("flwr")


def read(source: Source, run_config: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of an app with the settings of a run over it.

    >>> recipe = read({"train": {"rounds": 5}}, {"set": "train.rounds=2; deploy.quorum=1"})
    >>> recipe.train.rounds, recipe.deploy.quorum
    (2, 1.0)
    """
    settings = [text.strip() for text in str((run_config or {}).get("set", "")).split(";")]
    layer = config.settings([text for text in settings if text])
    if given := code.named(layer):  # whoever starts a run would choose what a node executes
        raise RecipeError(
            f"code is named in the recipe that a node holds, not in the run's settings: {', '.join(given)}"
        )
    return config.resolve(source, layer)


def server_app(recipe: Source, *, model: Any = None) -> Any:
    """A ServerApp that runs this recipe."""
    need_flower()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator, unused-ignore]
    def main(grid: Any, context: Any) -> None:
        serve(grid, read(recipe, context.run_config), str(context.run_config.get("folder", "")), model=model)

    return app


def client_app(recipe: Source, *, data: Data | None = None, model: Any = None) -> Any:
    """A ClientApp for the same recipe; `data` makes a node's federation of its --node-config."""
    need_flower()
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @functools.lru_cache(maxsize=8)  # a process that serves several messages loads data and plans the model once
    def node(node_config: str, run_config: str) -> Node:
        settings = json.loads(run_config)
        return Node(read(recipe, settings), json.loads(node_config), settings, data=data, model=model)

    def answer(message: Any, context: Any) -> Any:
        configs = (json.dumps(dict(config)) for config in (context.node_config, context.run_config))
        return Message(to_records(node(*configs).answer(from_records(message.content))), reply_to=message)

    for kind in (app.query, app.train, app.evaluate):
        kind()(answer)
    return app


def serve(grid: Any, recipe: Recipe, folder: str = "", *, model: Any = None, fleet: Fleet | None = None) -> Result:
    """The server of a deployed run: roll call, then the engine's rounds over the grid."""
    if recipe.attack.kind != "none":
        raise RecipeError("[attack] is for simulated runs: `pfedgate run` knows it, nodes do not")
    fleet = fleet or Fleet(grid, recipe.deploy)
    place = Path(folder).expanduser() if folder else None
    if place is None:
        log.warning("no folder is set: if this server dies, the run starts anew")
    else:
        _open(place, recipe)
    journal = Journal.read(place)
    fleet.owners.update(journal.owners)
    nodes = fleet.assemble()
    roll = Roll(nodes, journal.roll.data if journal.roll else None).joined(journal.roll)
    fleet.refusals += roll.refusals
    algorithm, options = experiment.build(recipe, roll.shape, model), recipe.options()
    cards = roll.cards(options.budget, options.seed)
    log.info("%s clients on %s nodes, %s", len(cards.clients), len(nodes), recipe.algorithm.name)

    def reach(algorithm: Any, federation: Any, store: Any, device: Any) -> GridExchange:
        number = store.tag.partition("-")[0]
        start = journal.begun(int(number) if number.isdigit() else 0, roll, fleet.owners)
        start.write(place)
        return GridExchange(algorithm, federation, store, fleet=fleet, experiment=start.experiment, starts=start.starts)

    return engine.run(algorithm, cards, options, exchange=reach, folder=place, resume=True, callbacks=[_report])


def _open(folder: Path, recipe: Recipe) -> None:
    """The run's folder: new, or one of the same recipe to go on with; deadlines and quorum may change on the way."""
    if (folder / runfolder.CONFIG).exists():
        before = dataclasses.replace(runfolder.load(folder).recipe, deploy=recipe.deploy)
        if before != recipe and runfolder.pinned(before)[0] != runfolder.pinned(recipe)[0]:
            raise ValueError(f"{folder} holds a run of another recipe: choose another folder, or the same recipe")
    else:
        runfolder.create(folder, recipe)
    runfolder.note_environment(runfolder.load(folder))


@dataclasses.dataclass(frozen=True)
class Journal:
    """The server's memory beside its checkpoint: the experiment, its own starts, and everyone it has met."""

    experiment: str
    starts: tuple[int, ...] = ()  # the commit at which each start of the server took up work
    roll: Roll | None = None
    owners: Mapping[str, int] = dataclasses.field(default_factory=dict)  # client -> the node that first held it

    @classmethod
    def read(cls, folder: Path | None) -> Journal:
        """The journal in a run's folder; a new one if there is none."""
        path = None if folder is None else folder / JOURNAL
        if path is None or not path.exists():
            return cls(uuid.uuid4().hex)
        entry = json.loads(path.read_text(encoding="utf-8"))
        roll = Roll([NodeInfo.read(node) for node in entry["roll"]])
        return cls(entry["experiment"], tuple(entry["starts"]), roll, entry.get("owners", {}))

    def begun(self, commit: int, roll: Roll, owners: Mapping[str, int]) -> Journal:
        """The journal with one more start."""
        return Journal(self.experiment, (*self.starts, commit), roll, dict(owners))

    def write(self, folder: Path | None) -> None:
        """Write it into a run's folder, before the first message of a start is sent."""
        if folder is not None and self.roll is not None:
            nodes = [node.plain() for node in self.roll.nodes]
            entry = {"experiment": self.experiment, "starts": self.starts, "roll": nodes, "owners": self.owners}
            write_atomically(folder / JOURNAL, json.dumps(entry, indent=1).encode(), sync=True)


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
