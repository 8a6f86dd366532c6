"""A cell of a study: one run, in a folder named by its recipe and by the version of the results.

Two studies that need the same run share it. Settings that cannot change a result (workers, folders) are no part of the
name. Folders from before results had versions end with a digest of the code that made them; they count as version 0.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from pfedgate import algorithms, experiment
from pfedgate.config import options as catalogue
from pfedgate.config import toml
from pfedgate.config.recipe import Recipe, Tables, essence, resolve
from pfedgate.core.errors import RecipeError
from pfedgate.core.mergers import merge
from pfedgate.core.types import Round
from pfedgate.core.version import RESULTS
from pfedgate.engine import metrics
from pfedgate.engine.checkpoint import FolderBusy
from pfedgate.engine.endpoint import Endpoint
from pfedgate.engine.files import write_atomically
from pfedgate.engine.metrics import Record
from pfedgate.engine.roster import Roster
from pfedgate.engine.server import one_thread
from pfedgate.engine.store import MemoryStore
from pfedgate.runs import folder as runfolder
from pfedgate.runs import gates
from pfedgate.runs.folder import Run

WAIT = 5.0  # seconds between two looks at a cell that another process is at
STATE = ("checkpoint.safetensors", "private")  # files of a run's folder that looks read


@dataclass(frozen=True)
class Cell:
    """A run, by its recipe; several studies may show it."""

    recipe: Recipe

    @cached_property
    def key(self) -> str:
        """The name of the run, wherever and by whatever version it is made."""
        content = json.dumps(self.tables, sort_keys=True).encode()
        return f"{self._kind}-{hashlib.blake2b(content, digest_size=6).hexdigest()}"

    @property
    def _kind(self) -> str:
        return f"{self.recipe.data.name}-{self.recipe.algorithm.name}"

    @cached_property
    def tables(self) -> Tables:
        """All settings that its result depends on."""
        return essence(self.recipe.tables())

    def own(self, root: Path) -> Path:
        """The folder in which this code runs it."""
        return root / f"{self.key}-v{RESULTS}"

    def folder(self, root: Path, *, any_version: bool = False, looks: Sequence[str] = ()) -> Path:
        """Where it is, whether its options were named like today or not; else the folder in which it is to be run.

        A folder that has all looks comes first, then one that can still be looked at.
        """
        own = self.own(root)
        if finished(own, looks):
            return own
        others = [
            path for path in root.glob(f"{self._kind}-*")
            if path != own and (any_version or version_of(path) == RESULTS) and finished(path) and self.like(path)
        ]  # fmt: skip
        others.sort(key=lambda path: (path / "summary.json").stat().st_mtime, reverse=True)
        folders = [own, *others]
        looked = (path for path in folders if finished(path, looks))
        return next(looked, next((path for path in folders if usable(path, looks)), own))

    def like(self, folder: Path) -> bool:
        """Whether a folder holds this run; options added since it was made count with their defaults."""
        return _essence(folder / runfolder.CONFIG) == self.tables


@lru_cache(maxsize=4096)
def _essence(path: Path) -> Tables:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A renamed option is no news here.
            return essence(resolve(toml.read(path)).tables())
    except (RecipeError, ValueError):
        return {}


def version_of(folder: Path) -> int:
    """The version of the results that a cell's folder holds.

    >>> version_of(Path("cells/digits-fedavg-0123456789ab-v1")), version_of(Path("digits-fedavg-0123456789ab-89abcdef"))
    (1, 0)
    """
    version = re.fullmatch(r"v(\d+)", folder.name.rpartition("-")[2])
    return int(version[1]) if version else 0


def finished(folder: Path, looks: Sequence[str] = ()) -> bool:
    """Whether a folder holds a finished cell, and these looks at it."""
    return (folder / "summary.json").exists() and all((folder / f"look-{name}.json").exists() for name in looks)


def usable(folder: Path, looks: Sequence[str] = ()) -> bool:
    """Whether a finished cell was looked at or still can be: the states of models are large and may be deleted."""
    return finished(folder, looks) or (finished(folder) and all((folder / name).exists() for name in STATE))


@dataclass(frozen=True)
class Job:
    """What a worker process needs to run a cell."""

    label: str
    folder: Path  # the one to go on with or to look at
    own: Path  # and the one to run in if that cannot be looked at
    recipe: Tables
    looks: tuple[str, ...] = ()


def work(job: Job, tick: Callable[[], None] = lambda: None) -> float:
    """Run a cell, or go on with it, and look at it; returns its seconds. `tick` is called after every round."""
    folder = job.folder

    def hear(event: Record) -> None:
        tick()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if folder != job.own and not _readable(folder, job.looks):
            folder = job.own
        if folder == job.own and finished(folder) and not usable(folder, job.looks):
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
    messages = sorted({str(warning.message) for warning in caught})
    if messages:  # Beside the run: nobody would read them on a screen that shows hundreds of cells.
        write_atomically(folder / "warnings.json", json.dumps(messages, indent=1).encode())
    tidy(run)
    return seconds_of(run)


def _readable(folder: Path, looks: Sequence[str]) -> bool:
    """Whether this code can look at a cell that other code has finished: its state may be of another form."""
    try:
        for name in looks:
            look(runfolder.load(folder), name)
    except gates.UNREADABLE as error:
        warnings.warn(f"{folder.name}: this code cannot read its state ({error}), so it is run anew", stacklevel=2)
        return False
    return True


def seconds_of(run: Run) -> float:
    """The time of all rounds, evaluation included."""
    return float(sum(line["seconds"] + line["seconds_evaluation"] for line in run.timing))


def tidy(run: Run) -> None:
    """Drop the states of a finished run that no study looks at: of some methods they are gigabytes."""
    if run.finished and not gated(run):
        for name in STATE:
            path = run.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def gated(run: Run) -> bool:
    """Whether its method has gates to look at."""
    return callable(getattr(algorithms.get(run.recipe.algorithm.name), "inspect", None))


def look(run: Run, name: str) -> Record:
    """A look at a trained cell, taken once and then read from its folder."""
    path = run.path / f"look-{name}.json"
    if not path.exists():
        write_atomically(path, json.dumps(LOOKS[name](run)).encode())
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


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


LOOKS: dict[str, Callable[[Run], Record]] = {"global": global_model, "tree": gate_tree}
ALWAYS = ("tree",)  # Every gated cell is looked at so when it ends. The others cost more, so studies ask for them.
