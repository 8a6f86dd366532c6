"""What a run leaves on disk, and how to read it again.

code/              the files of code that the recipe names, if it does
config.toml        the resolved recipe: `pfedgate run config.toml` repeats the run
environment.json   machine, versions, commit and command; one entry per start and resume
metrics.jsonl      one line per round
timing.jsonl       seconds per round
clients.csv        one line per client and evaluation point, at the end
summary.json       the numbers of a table row, at the end
trackers.json      ids of the runs that trackers made of it, if there are any
checkpoint.safetensors, best.safetensors, private/    state: see `checkpoint` and `store`

run = load("runs/digits-pfedgate")
run.summary["accuracy"], run.curve("accuracy"), run.clients[0]["client"]
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pfedgate.config import code, toml
from pfedgate.config import recipe as config
from pfedgate.config.recipe import Recipe
from pfedgate.core.errors import unknown, warn
from pfedgate.core.kinds import METRICS, Metric, right
from pfedgate.core.state import digest
from pfedgate.core.types import State
from pfedgate.engine import files
from pfedgate.engine.checkpoint import header, unmarked
from pfedgate.engine.files import DamagedError, write_atomically
from pfedgate.engine.store import DiskStore
from pfedgate.runs.environment import environment, other_bits

# A folder has every option, so one that lacks these was trained without them.
BEFORE = {"train": {"correction": "none", "initial_scale": 1.0}}
CONFIG, ENVIRONMENT, COMPARISON = "config.toml", "environment.json", "comparison.json"


@dataclass(frozen=True)
class Run:
    """A run's folder, read when asked: a run that is still going shows what it has so far."""

    path: Path

    @property
    def name(self) -> str:
        """The folder's own name: what tables and legends call the run."""
        return self.path.name

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved recipe of the run."""
        plain = code.beside(self.config, self.path)
        plain.get("algorithm", {}).pop("start", None)  # older gates hold what they started from
        return config.resolve(BEFORE, plain)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved recipe as plain tables."""
        tables = toml.read(self.path / CONFIG)
        if not tables:
            raise DamagedError(
                f"{self.path / CONFIG} is empty, so nothing says what was run: restore it from a copy, or begin anew"
            )
        return tables

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Where it ran: one entry for the start and one for every resume."""
        entries: list[dict[str, Any]] = files.plain(self.path / ENVIRONMENT)
        return entries

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One record per round, without seconds."""
        return _lines(self.path / "metrics.jsonl")

    @property
    def participation(self) -> list[dict[str, Any]]:
        """One record per round and sampled client."""
        return _lines(self.path / "participation.jsonl")

    @property
    def timing(self) -> list[dict[str, Any]]:
        """Seconds of every round: "seconds" for training, "seconds_evaluation"."""
        return _lines(self.path / "timing.jsonl")

    @property
    def seconds(self) -> float:
        """All rounds together, evaluation not counted."""
        return float(sum(line["seconds"] for line in self.timing))

    def curve(self, name: str, point: str = "after_broadcast") -> list[tuple[int, float]]:
        """(round, value) of a number: one of an evaluation point, else one recorded every round."""
        records = self.metrics
        scored = [(r["round"], r[point][name]) for r in records if name in r.get(point, {})]
        values = scored or [(r["round"], r[name]) for r in records if name in r]
        if records and not values:
            names = {key for r in records for part in (r, r.get(point, {})) for key in part}
            raise KeyError(f"{self.path}: {unknown('metric', name, names)}")
        return values

    @property
    def clients(self) -> list[dict[str, Any]]:
        """One row per client and evaluation point (also "novel"); empty until the run has ended."""
        path = self.path / "clients.csv"
        if not path.exists():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            return [{name: _number(name, cell) for name, cell in row.items()} for row in csv.DictReader(file)]

    @property
    def finished(self) -> bool:
        """Whether it ran to its end."""
        return (self.path / "summary.json").exists()

    @property
    def summary(self) -> dict[str, Any]:
        """The numbers of a table row; empty until the run has ended."""
        if not self.finished:
            return {}
        summary: dict[str, Any] = files.plain(self.path / "summary.json")
        if "peak_bytes" in summary:  # its name in folders of earlier versions
            summary["resident_bytes"] = summary.pop("peak_bytes")
        return summary

    @cached_property
    def metric(self) -> Metric:
        """The main metric: what its scores are, and whether more is better."""
        scores: dict[str, Any] = next((r["after_broadcast"] for r in self.metrics if "after_broadcast" in r), {})
        noted = next((key.removeprefix("val_") for key in scores if key.startswith("val_")), "accuracy")
        name = self.summary.get("metric", noted)
        if name in METRICS:
            return METRICS[name]
        return Metric(name, right, higher=self.summary.get("higher", name != "loss"), share=False)

    def server(self, which: str = "last") -> State:
        """The server's State: of the last checkpoint, or the one that was "best" on validation."""
        path = self._state(which)
        state, about = files.tensors(path)
        sums = header(path)["digests"].get("server", "") if which == "last" else about.get("digest", "")
        if sums not in ("", digest(state)):
            raise DamagedError(f"{path} is damaged: its tensors are not those that were written")
        return state

    def store(self, which: str = "last") -> DiskStore:
        """The private states that belong to it, by client; for reading."""
        if which == "best":
            store = DiskStore(self.path / "private" / "best")
            store.verify(files.metadata(self._state(which)).get("private", ""))  # earlier versions noted nothing
            return store
        return DiskStore(self.path / "private", header(self._state(which))["commit"])

    def _state(self, which: str) -> Path:
        names = {"last": "checkpoint.safetensors", "best": "best.safetensors"}
        if which not in names:
            raise ValueError(unknown("state", which, names))
        path = self.path / names[which]
        if not path.exists():
            raise FileNotFoundError(f"{self.path} holds no {which} state yet")
        return path


def load(path: str | Path) -> Run:
    """The run in a folder."""
    folder = Path(path)
    if not (folder / CONFIG).exists():
        if (folder / COMPARISON).exists():
            names = ", ".join(str(run.path) for run in load_all(folder))
            raise FileNotFoundError(f"{folder} is a comparison of several runs; choose one: {names}")
        inner = sorted({file.parent for name in (CONFIG, COMPARISON) for file in folder.glob(f"*/{name}")})
        hint = f"; it has the runs {', '.join(map(str, inner[:5]))}{', …' if len(inner) > 5 else ''}" if inner else ""
        raise FileNotFoundError(f"{folder} holds no run: there is no {CONFIG} in it{hint}")
    return Run(folder)


def load_all(path: str | Path) -> list[Run]:
    """The runs of a comparison, in its order; of a single run, that one."""
    folder = Path(path)
    if not (folder / COMPARISON).exists():
        return [load(folder)]
    names: list[str] = files.plain(folder / COMPARISON)
    if any(Path(name).name != name for name in names):
        raise DamagedError(f"{folder / COMPARISON} names runs outside its folder")
    return [load(folder / name) for name in names]


def create(path: str | Path, recipe: Recipe) -> Run:
    """A new run's folder with its recipe; one that holds a run already is left alone."""
    folder = vacant(path)
    text, sources = pinned(recipe)
    try:
        for name, source in sources.items():
            write_atomically(folder / name, source.read_bytes(), sync=True)
        write_atomically(folder / CONFIG, text.encode(), sync=True)
    except OSError as error:
        raise OSError(f"cannot write a run into {folder}: {error.strerror or error}") from error
    return Run(folder)


def pinned(recipe: Recipe) -> tuple[str, dict[str, Path]]:
    """The recipe as its folder keeps it, and the files of code to copy there, which it names with their digests."""
    text, (names, sources) = recipe.toml(), copies(recipe)
    for named, name in names.items():
        text = text.replace(toml.dump(named), toml.dump(name))
    return text, sources


def copies(recipe: Recipe) -> tuple[dict[str, str], dict[str, Path]]:
    """What a folder calls each function that a recipe names, and the files to copy there."""
    names, sources = dict[str, str](), dict[str, Path]()
    for named in code.named(recipe.tables()):
        source = code.Code.of(named)
        digest, name = code.digest(source.file), f"code/{Path(source.file).name}"
        if sources.setdefault(name, Path(source.file)) != Path(source.file):
            name = f"code/{digest}-{Path(source.file).name}"
            sources[name] = Path(source.file)
        names[named] = f"{name}:{source.name}#{digest}"
    return names, sources


def create_comparison(path: str | Path, recipes: Mapping[str, Recipe]) -> list[Run]:
    """A folder for several runs, one below it for each, all with their recipes."""
    folder = vacant(path)
    runs = [create(folder / name, recipe) for name, recipe in recipes.items()]
    write_atomically(folder / COMPARISON, json.dumps(list(recipes)).encode(), sync=True)
    return runs


def vacant(path: str | Path) -> Path:
    """A folder that holds no run yet; one that does is an error."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: a run needs a folder of its own")
    if (folder / CONFIG).exists() or (folder / COMPARISON).exists():
        raise FileExistsError(
            f"{folder} already holds a run: `pfedgate resume {folder}` goes on with it; or choose another folder"
        )
    return folder


def extend(run: Run, rounds: int) -> None:
    """Let a run go on up to another number of rounds; what it has learnt stays."""
    recipe, done = run.recipe, len(run.metrics)
    if rounds < done:
        raise ValueError(f"{run.path} has {done} rounds already: it cannot go on to {rounds}")
    if rounds == recipe.train.rounds:
        return
    if recipe.train.schedule in ("multi_step", "cosine"):
        raise ValueError(f"train.schedule={recipe.train.schedule} depends on the number of rounds: start a new run")
    longer = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, rounds=rounds))
    write_atomically(run.path / CONFIG, pinned(longer)[0].encode(), sync=True)
    for name in ("summary.json", "clients.csv"):  # both belong to an end that is no longer one
        (run.path / name).unlink(missing_ok=True)
    run.__dict__.pop("recipe", None)
    run.__dict__.pop("config", None)


def free(root: str | Path, name: str) -> Path:
    """A folder that does not exist yet: root/name, or root/name-2, root/name-3, …"""
    path, number = Path(root) / name, 2
    while path.exists():
        path, number = Path(root) / f"{name}-{number}", number + 1
    return path


def note_environment(run: Run) -> None:
    """Add where and with what the run starts or goes on; warns if it cannot go on with the same bits here."""
    before = run.environments if (run.path / ENVIRONMENT).exists() else []
    now = environment()
    with files.naming(run.path / ENVIRONMENT):  # it may hold anything
        other = other_bits(before[-1], now) if before else []
    if other:
        warn(
            f"{run.path} goes on elsewhere ({'; '.join(other)}): rounding differs, so the result will not be, bit for "
            "bit, that of an uninterrupted run",
        )
    write_atomically(run.path / ENVIRONMENT, json.dumps([*before, now], indent=2).encode(), sync=True)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    with files.naming(path):  # The last line may be half written: the run may still be going.
        return [json.loads(line) for line in lines[:-1] if line]


def _number(name: str, cell: str) -> Any:
    if name in ("client", "point"):
        return unmarked(cell)
    return float(cell) if cell else None
