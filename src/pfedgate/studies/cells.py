"""A cell of a study: one run, kept in a folder named by what was run and by the code that ran it.

Two studies that need the same run share it. What cannot change a result (workers, folders, the parts of this package
that only show things) is no part of the name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pfedgate
from pfedgate import algorithms, experiment
from pfedgate.config import options as catalogue
from pfedgate.config.options import SECTIONS, options_of
from pfedgate.config.recipe import Recipe, Tables, essence, resolve
from pfedgate.core.mergers import merge
from pfedgate.core.types import Round
from pfedgate.engine import jobs, metrics
from pfedgate.engine.checkpoint import FolderBusy
from pfedgate.engine.endpoint import Endpoint
from pfedgate.engine.metrics import Record
from pfedgate.engine.roster import Roster
from pfedgate.engine.server import one_thread
from pfedgate.engine.store import MemoryStore, write_atomically
from pfedgate.runs import folder as runfolder
from pfedgate.runs import gates
from pfedgate.runs.folder import Run

# Parts of the package that no result depends on.
SHOWING = (
    "cli",
    "studies",
    "report",
    "tune",
    "deploy",
    "export",
    "methods",
    "progress",
    "watch",
    "trackers",
    "demo",
    "theory",
    "environment",
    "jobs",
    "names",
    "runfolder",
)
WAIT = 5.0  # seconds between two looks at a cell that another process is at
STATE = ("checkpoint.safetensors", "private")  # of a run's folder: what looking takes


@lru_cache(maxsize=1)
def code_version() -> str:
    """A digest of the source that results depend on.

    >>> len(code_version())
    8
    """
    root, digest = Path(pfedgate.__file__).parent, hashlib.blake2b(digest_size=4)
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root)
        if inner.with_suffix("").parts[0] not in SHOWING:
            digest.update(str(inner).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True)
class Cell:
    """One run."""

    recipe: Recipe

    @cached_property
    def key(self) -> str:
        """The name of what is run, whoever runs it where."""
        told = json.dumps(self.tables, sort_keys=True).encode()
        return f"{self._kind}-{hashlib.blake2b(told, digest_size=6).hexdigest()}"

    @property
    def _kind(self) -> str:
        return f"{self.recipe.data.name}-{self.recipe.algorithm.name}"

    @cached_property
    def tables(self) -> Tables:
        """All that its result depends on."""
        return essence(self.recipe.tables())

    def folder(self, root: Path, *, any_code: bool = False, looks: Sequence[str] = ()) -> Path:
        """Where it is kept: by this code or, if that is allowed and there is one, by other code.

        One that was looked at comes first, then one that still can be; else it is to be run, in this code's folder.
        """
        own = root / f"{self.key}-{code_version()}"
        if not any_code or there(own, looks):
            return own
        others = [path for path in root.glob(f"{self._kind}-*") if path != own and there(path) and self.like(path)]
        others.sort(key=lambda path: (path / "summary.json").stat().st_mtime, reverse=True)
        known = [own, *others]
        looked = (path for path in known if there(path, looks))
        return next(looked, next((path for path in known if usable(path, looks)), own))

    def like(self, folder: Path) -> bool:
        """Whether a folder holds this run, perhaps of code that knew fewer or other options with their defaults."""
        before = essence(_read(folder / runfolder.CONFIG))
        for section in self.tables.keys() | before.keys():
            mine, theirs = self.tables.get(section, {}), before.get(section, {})
            known = options_of(section, mine.get("name", "")) if section in SECTIONS else {}
            for key in mine.keys() | theirs.keys():
                usual = json.loads(json.dumps(known[key].default, default=str)) if key in known else None
                if mine.get(key, usual) != theirs.get(key, usual):
                    return False
        return True


@lru_cache(maxsize=4096)
def _read(path: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # keys of earlier versions are no news here
        return resolve(path).tables()


def there(folder: Path, looks: Sequence[str] = ()) -> bool:
    """Whether a folder holds a finished cell, and what is to be known about it."""
    return (folder / "summary.json").exists() and all((folder / f"look-{name}.json").exists() for name in looks)


def usable(folder: Path, looks: Sequence[str] = ()) -> bool:
    """Whether a finished cell was looked at or still can be: the states of models are large and not always kept."""
    return there(folder, looks) or (there(folder) and all((folder / name).exists() for name in STATE))


def work(job: jobs.Job, tell: jobs.Tell) -> float:
    """Run a cell, or go on with it, and find out what studies want to know about it; returns its seconds."""
    folder, own = Path(job["folder"]), Path(job["own"])

    def hear(event: Record) -> None:
        if event["event"] in ("start", "round"):
            tell(event["round"])

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if folder != own and not able(folder, job["looks"]):
            folder = own
        clear(folder, job["looks"])
        if not (folder / runfolder.CONFIG).exists():
            runfolder.create(folder, resolve(job["recipe"]))
        run = runfolder.load(folder)
        while not run.finished:
            try:
                experiment.resume(folder, callbacks=[hear])
            except FolderBusy:  # the worker of a command that was killed stops only after its round
                time.sleep(WAIT)
                tell(len(run.metrics))
        for name in dict.fromkeys([*job["looks"], *(ALWAYS if gated(run) and usable(folder, ALWAYS) else ())]):
            look(run, name)
    told = sorted({str(warning.message) for warning in heard})
    if told:  # kept beside the run: on a screen that shows hundreds of cells nobody would read them
        write_atomically(folder / "warnings.json", json.dumps(told, indent=1).encode())
    tidy(run)
    return seconds_of(run)


def able(folder: Path, looks: Sequence[str]) -> bool:
    """Whether a cell that other code has finished can be looked at by this code: its state may be of another form."""
    try:
        for name in looks:
            look(runfolder.load(folder), name)
    except gates.UNREADABLE as error:
        warnings.warn(f"{folder.name}: this code cannot read its state ({error}), so it is run anew", stacklevel=2)
        return False
    return True


def clear(folder: Path, looks: Sequence[str]) -> None:
    """Make room for a finished cell of this code that can no longer be looked at; what other code made is kept."""
    if there(folder) and not usable(folder, looks) and folder.name.endswith(f"-{code_version()}"):
        (folder / "summary.json").unlink()  # first: what a kill leaves of it must not count as finished
        shutil.rmtree(folder)


def seconds_of(run: Run) -> float:
    """All of it, evaluation included."""
    return float(sum(line["seconds"] + line["seconds_evaluation"] for line in run.timing))


def code_of(run: Run) -> str:
    """The digest of the code that ran a cell.

    >>> code_of(Run(Path("cells/digits-fedavg-0123456789ab-89abcdef")))
    '89abcdef'
    """
    return run.path.name.rpartition("-")[2]


def tidy(run: Run) -> None:
    """Drop the states of a finished run that no study looks at: of some methods they are gigabytes."""
    if run.finished and not gated(run):
        for name in STATE:
            path = run.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def gated(run: Run) -> bool:
    """Whether its gates can still be looked at."""
    return callable(getattr(algorithms.get(run.recipe.algorithm.name), "inspect", None))


def look(run: Run, name: str) -> Record:
    """Something about a trained cell, found out once."""
    path = run.path / f"look-{name}.json"
    if not path.exists():
        write_atomically(path, json.dumps(LOOKS[name](run)).encode())
    found: Record = json.loads(path.read_text(encoding="utf-8"))
    return found


def global_model(run: Run) -> Record:
    """How the shared model does without gates: as it is, and after a round of FedAvg with it."""
    made = experiment.plan(run.recipe)
    plain = algorithms.build("fedavg", made.algorithm.task)
    server, roster = run.server(), Roster.of(made.federation, "clients", made.options)
    done = len(run.metrics)
    round = Round(done, done + 1, made.options.seed)
    reach = Endpoint(plain, made.federation, MemoryStore())
    found: Record = {}
    with one_thread():
        for name in ("global", "global_trained"):
            scores = metrics.summarise(list(reach.evaluate(server, round, roster)))
            found |= {name: scores["accuracy"], f"{name}_bottom_decile": scores["bottom_decile"]}
            if name == "global":
                replies = reach.train(server, round, [[card] for card in roster])
                server = merge(
                    plain.merger(server, round), ((r.card, r.update) for r in replies if r.update is not None)
                )
    return found


def gate_tree(run: Run) -> Record:
    """Which gates are alike, and the classes of their clients; nothing of fewer than three, which make no tree."""
    from pfedgate.report.gates import tree  # scipy and all: not in every worker

    recipe, made = run.recipe, experiment.plan(run.recipe)
    seen = list(gates.look(made.algorithm, made.federation, run.server(), run.store(), made.options, len(run.metrics)))
    if len(seen) < 3:
        return {"tree": None}
    data = catalogue.federation(recipe.data.name, recipe.data.options, novel=recipe.clients.novel, seed=recipe.run.seed)
    counts = dict(zip(data.ids, data.histogram().tolist(), strict=True))
    told: Record = {"clients": [s.client for s in seen], "counts": [counts[s.client] for s in seen]}
    told["classes"] = [str(name) for name in data.class_names or range(data.classes)]
    return {"tree": {**told, **tree([s.gate for s in seen])}}


LOOKS: dict[str, Callable[[Run], Record]] = {"global": global_model, "tree": gate_tree}
ALWAYS = ("tree",)  # of every gated cell when it ends; the others cost more, so studies ask for them
