"""A cell of a study: one run, in a folder named by its settings and by the version of the results.

Two studies that need the same run share it. What cannot change a result (workers, folders) is no part of the name, and
neither is an option at its default: a new option leaves finished cells as they are.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pfedgate import algorithms, experiment
from pfedgate.config import options as catalogue
from pfedgate.config.recipe import Recipe, Tables, essence, resolve
from pfedgate.core.mergers import merge
from pfedgate.core.types import Round
from pfedgate.core.version import RESULTS
from pfedgate.engine import metrics
from pfedgate.engine.checkpoint import FolderBusy
from pfedgate.engine.endpoint import Endpoint, Scored
from pfedgate.engine.files import write_atomically
from pfedgate.engine.metrics import Record
from pfedgate.engine.roster import Roster, clock_of
from pfedgate.engine.server import one_thread
from pfedgate.engine.store import MemoryStore
from pfedgate.report import paired
from pfedgate.runs import folder as runfolder
from pfedgate.runs import gates
from pfedgate.runs.folder import Run

WAIT = 5.0  # seconds between two looks at a cell that another process is at
STATE = ("checkpoint.safetensors", "best.safetensors", "private")  # files of a run's folder that looks read
RATES, EPOCHS = (0.003, 0.01, 0.03, 0.05), (1, 3)  # of a client's own epochs, the best on validation for each method
FARTHER = 2  # steps of a factor 3 beyond either end of the rates, while the best one is at that end


@dataclass(frozen=True)
class Cell:
    """A run, by its recipe; several studies may show it."""

    recipe: Recipe

    @cached_property
    def key(self) -> str:
        """The name of the run, wherever it is made."""
        content = json.dumps(self.tables, sort_keys=True).encode()
        kind = f"{self.recipe.data.name}-{self.recipe.algorithm.name}"
        return f"{kind}-{hashlib.blake2b(content, digest_size=6).hexdigest()}"

    @cached_property
    def tables(self) -> Tables:
        """All settings that its result depends on and that are not the defaults."""
        tables: Tables = {}
        for section, table in essence(self.recipe.tables()).items():
            options = catalogue.options_of(section, str(table.get("name", "")))
            usual = {key: json.loads(json.dumps(option.default, default=str)) for key, option in options.items()}
            tables[section] = {key: value for key, value in table.items() if usual.get(key, "name") != value}
        return tables

    def folder(self, root: Path) -> Path:
        """The folder in which this version of the results is, or is to be."""
        return root / f"{self.key}-v{RESULTS}"


def finished(folder: Path, looks: Sequence[str] = ()) -> bool:
    """Whether a folder holds a finished cell, and these looks at it."""
    return (folder / "summary.json").exists() and all((folder / f"look-{name}.json").exists() for name in looks)


def usable(folder: Path, looks: Sequence[str] = ()) -> bool:
    """Whether a finished cell was looked at or still can be: the states of models are large and may be deleted."""
    return finished(folder, looks) or (finished(folder) and (folder / STATE[0]).exists())


@dataclass(frozen=True)
class Job:
    """What a worker process needs to run a cell."""

    label: str
    folder: Path
    recipe: Tables
    looks: tuple[str, ...] = ()


def work(job: Job, tick: Callable[[], None] = lambda: None) -> float:
    """Run a cell, or go on with it, and look at it; returns its seconds. `tick` is called after every round."""
    folder = job.folder

    def hear(event: Record) -> None:
        tick()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if finished(folder) and not usable(folder, job.looks):
            (folder / "summary.json").unlink()  # first: the rest that a kill leaves must not count as finished
            shutil.rmtree(folder)
        if not (folder / runfolder.CONFIG).exists():
            runfolder.create(folder, resolve(job.recipe))
        run = runfolder.load(folder)
        while not run.finished:
            try:
                experiment.resume(folder, callbacks=[hear])
            except FolderBusy:  # Another command is at it.
                time.sleep(WAIT)
                tick()
        for name in dict.fromkeys([*job.looks, *(ALWAYS if gated(run) and usable(folder, ALWAYS) else ())]):
            look(run, name)
            tick()
    if messages := sorted({str(warning.message) for warning in caught}):
        # Beside the run: nobody would read them on a screen that shows hundreds of cells.
        write_atomically(folder / "warnings.json", json.dumps(messages, indent=1).encode())
    if not gated(run):  # States that no study looks at: of some methods they are gigabytes.
        for path in (folder / name for name in STATE):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return seconds_of(run)


def seconds_of(run: Run) -> float:
    """The time of all rounds, evaluation included."""
    return float(sum(line["seconds"] + line["seconds_evaluation"] for line in run.timing))


def gated(run: Run) -> bool:
    """Whether its method has gates to look at."""
    return callable(getattr(algorithms.get(run.recipe.algorithm.name), "inspect", None))


def look(run: Run, name: str) -> Record:
    """A look at a trained cell, taken once and then read from its folder."""
    path = run.path / f"look-{name}.json"
    if not path.exists():
        write_atomically(path, json.dumps(metrics.clean(LOOKS[name](run))).encode())
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def points(run: Run) -> Record:
    """Scores of all clients at every point, with the models that were best on validation.

    "a": as received; "b": after epochs of its own, at the rate and number best on validation; "batch_1" and
    "per_client": as received, one sample at a time and with one decision per client.
    """
    plan = experiment.plan(run.recipe)
    which = "best" if (run.path / "best.safetensors").exists() else "last"
    server, store, roster = run.server(which), run.store(which), Roster.of(plan.federation, "clients", plan.options)
    done = int(run.summary.get("best_round") or len(run.metrics))
    round = Round(done - 1, plan.options.rounds, plan.options.seed)

    def score(point: str, lr: float | None = None, epochs: int | None = None) -> Record:
        task = replace(plan.algorithm.task, local_lr=lr, local_epochs=epochs)
        reach = Endpoint(replace(plan.algorithm, task=task), plan.federation, store)
        scores = list(reach.evaluate(server, round, roster, [point]))
        return {"lr": lr, "epochs": epochs, **summary(scores)}

    with one_thread():
        record: Record = {"round": done, "a": score("after_broadcast")}
        if plan.algorithm.reads_batches:
            record |= {point: score(point) for point in ("batch_1", "per_client")}
        grid = [score("after_local", lr, epochs) for lr in RATES for epochs in EPOCHS]
        for _ in range(FARTHER):
            best = max(grid, key=lambda entry: entry["val_accuracy"] or 0.0)
            rates = sorted(entry["lr"] for entry in grid)
            beyond = {rates[0]: rates[0] / 3, rates[-1]: rates[-1] * 3}.get(best["lr"])
            if beyond is None:
                break
            grid += [score("after_local", float(f"{beyond:.2g}"), epochs) for epochs in EPOCHS]
    best = max(grid, key=lambda entry: entry["val_accuracy"] or 0.0)
    tried = [{name: value for name, value in entry.items() if name != "clients"} for entry in grid]
    return {**record, "b": best, "tried": tried}


def summary(scores: Sequence[Scored]) -> Record:
    """The numbers of a point, and every client's."""
    record = metrics.summarise(scores)
    clients = {s.client: [s.test.n, round(s.test.accuracy, 6)] for s in scores if s.test.n}
    names = ("accuracy", "bottom_decile", "worst_tenth", "val_accuracy", "density", "flops")
    return {**{name: record[name] for name in names if name in record}, "clients": clients}


def global_model(run: Run) -> Record:
    """How the shared model does without gates: as it is, and after a round of FedAvg with it."""
    plan = experiment.plan(run.recipe)
    plain = algorithms.build("fedavg", plan.algorithm.task)
    server, roster = run.server(), Roster.of(plan.federation, "clients", plan.options, plan.algorithm)
    done = len(run.metrics)
    round = Round(done, done + 1, plan.options.seed)
    reach = Endpoint(plain, plan.federation, MemoryStore())
    record: Record = {}
    with one_thread():
        for name in ("global", "global_trained"):
            scores = metrics.summarise(list(reach.evaluate(server, round, roster)))
            record |= {name: scores["accuracy"], f"{name}_bottom_decile": scores["bottom_decile"]}
            if name == "global":
                replies = reach.train(server, round, [[card] for card in roster])
                updates = ((reply.card, reply.update) for reply in replies if reply.update is not None)
                server = merge(plain.merger(server, round), updates)
    return record


def gate_tree(run: Run) -> Record:
    """Which gates are alike, and the classes of their clients. Fewer than three gates make no tree."""
    from pfedgate.report.gate_facts import tree  # scipy and all: not in every worker

    recipe, plan = run.recipe, experiment.plan(run.recipe)
    seen = list(gates.look(plan.algorithm, plan.federation, run.server(), run.store(), plan.options, len(run.metrics)))
    if len(seen) < 3:
        return {"tree": None}
    data = catalogue.federation(recipe.data.name, recipe.data.options, novel=recipe.clients.novel, seed=recipe.run.seed)
    counts = dict(zip(data.ids, data.histogram().tolist(), strict=True))
    record: Record = {"clients": [s.client for s in seen], "counts": [counts[s.client] for s in seen]}
    record["classes"] = [str(name) for name in data.class_names or range(data.classes)]
    return {"tree": {**record, **tree([s.gate for s in seen])}}


def weakest(run: Run) -> Record:
    """The accuracy of the third of the clients whose devices compute slowest, after the last round."""
    plan = experiment.plan(run.recipe)
    fleet, clients = clock_of(plan.federation, plan.options).fleet, paired.scores(run)
    slow = sorted(clients, key=lambda client: (fleet.device(client).gflops, client))[: -(-len(clients) // 3)]
    hits = sum(clients[client][0] * clients[client][1] for client in slow)
    return {"weakest_third": hits / max(1.0, sum(clients[client][0] for client in slow))}


LOOKS: Mapping[str, Callable[[Run], Record]] = {
    "points": points, "global": global_model, "tree": gate_tree, "weakest": weakest,
}  # fmt: skip
ALWAYS = ("tree",)  # Every gated cell is looked at so when it ends. The others cost more, so studies ask for them.
