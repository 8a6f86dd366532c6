"""Running the searches and cells of studies, each once and several at a time; and how long that will take."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pfedgate import models
from pfedgate.config import methods
from pfedgate.config.recipe import Recipe
from pfedgate.core.seeds import seeded
from pfedgate.engine.files import write_atomically
from pfedgate.engine.metrics import Record
from pfedgate.engine.server import choose_device, one_thread
from pfedgate.engine.workers import completed
from pfedgate.runs import folder as runfolder
from pfedgate.studies import cells
from pfedgate.studies.cells import Cell, finished, usable
from pfedgate.studies.declare import Column, Row, Scale, Settings, Study, World, columns_of, recipe_of
from pfedgate.studies.outcome import Outcomes, Place, claims
from pfedgate.tune.search import Search, SearchSpec, base
from pfedgate.tune.space import space_of

TRAINING = 0.6  # share of a client's samples
SCORING = 1.25  # evaluation every few rounds, on top of training
BATCH, STEPS = 128, 3  # in the training step that estimates rest on


@dataclass(frozen=True)
class Tuning:
    """A search whose best settings the rows of a name take, on one data set."""

    name: str
    recipe: Recipe
    folder: Path
    trials: int
    fixed: tuple[str, ...] = ()  # settings that rows hold fast, so they are not searched

    @property
    def file(self) -> Path:
        """What is kept of it: small, and all that cells need."""
        return self.folder.with_suffix(".json")

    @property
    def label(self) -> str:
        """The words that `--cells` looks at."""
        return f"tuning/{self.recipe.data.name}/{self.name}"

    def best(self) -> Settings | None:
        """The settings that were best on validation data; None before it has ended."""
        if not self.file.exists():
            return None
        settings: Settings = json.loads(self.file.read_text(encoding="utf-8"))["best"]
        return settings


@dataclass
class Campaign:
    """What to run, where and how."""

    scale: Scale
    out: Path
    worlds: tuple[str, ...] = ()
    over: Sequence[Mapping[str, Any]] = ()
    recipes: Path | None = None
    part: str = ""  # see `share`
    workers: int = 1
    on: str = ""  # "ray": jobs run on the nodes of a cluster, and their files come back
    _cells: dict[tuple[str, ...], Cell] = field(default_factory=dict, repr=False)  # recipes take a while to resolve

    def folder(self, place: Place) -> Path:
        """The folder of a place's cell, among all cells, whichever study they belong to."""
        return place.cell.folder(self.out / "cells")

    def has(self, place: Place) -> bool:
        """Whether a place's cell is finished, with all looks that its study needs."""
        return finished(self.folder(place), place.study.looks)

    def _recipe(self, row: Row, column: Column, world: World, tuned: Settings, seed: int = 0) -> Recipe:
        return recipe_of(row, column, world, self.scale, tuned, seed=seed, over=self.over, recipes=self.recipes)

    def tuning(self, row: Row, column: Column, world: World) -> Tuning | None:
        """The search that a row's settings come from; None where the recipe's own are taken."""
        if not self.scale.trials and not self.scale.tuned_at:
            return None
        name = row.tuned or row.method
        # The row's own settings hold in its search, but for the budget: one search serves all rows of its name.
        settings = {k: v for k, v in row.settings.items() if row.tuned or k in TUNED_WITH.get(row.method, {})}
        settings = {**TUNED_WITH.get(row.method, {}), **settings}
        plain = replace(column, settings={}, what="")
        recipe = self._recipe(Row(row.name, row.method, settings), plain, world, {})
        if self.scale.trial_rounds:
            recipe = replace(recipe, train=replace(recipe.train, rounds=self.scale.trial_rounds))
        out = self.out.parent / self.scale.tuned_at if self.scale.tuned_at else self.out
        tuning = Tuning(name, recipe, out / "tuning" / f"{column.data}-{name}", self.scale.trials, tuple(settings))
        return tuning if self.scale.trials or tuning.best() is not None else None

    def tunings(self, study: Study) -> list[Tuning]:
        """The searches that a study's rows need, each once."""
        if not self.scale.trials:
            return []
        columns = columns_of(study, self.scale, self.worlds)
        searches = [self.tuning(row, column, world) for column, world in columns for row in study.rows]
        return list({search.folder: search for search in searches if search is not None}.values())

    def places(self, study: Study, seed: int = 0, rows: Sequence[str] | None = None) -> list[Place]:
        """The cells of a study with one seed; without those whose settings are still to be searched."""
        places = []
        for column, world in columns_of(study, self.scale, self.worlds):
            for row in (row for row in study.rows if rows is None or row.name in rows):
                key = (study.name, column.name, row.name, str(seed))
                if key not in self._cells:
                    tuning = self.tuning(row, column, world)
                    settings = {} if tuning is None else tuning.best()
                    if settings is None:
                        continue
                    self._cells[key] = Cell(self._recipe(row, column, world, settings, seed))
                places.append(Place(study, row, column, seed, self._cells[key]))
        return places

    def outcomes(self, study: Study, places: Sequence[Place]) -> Outcomes:
        """The finished cells among some places of a study."""
        outcomes = Outcomes(study, untuned=[t.label for t in self.tunings(study) if t.best() is None])
        for place in places:
            if self.has(place):
                outcomes.runs[place.row.name, place.column.name, place.seed] = runfolder.load(self.folder(place))
            else:
                outcomes.missing.append(place)
        return outcomes

    def all_places(self, study: Study) -> list[Place]:
        """Those with the first seed, other seeds of the rows that are repeated, and other seeds that are finished."""
        first = self.places(study)
        if study.seeds:
            return [place for seed in range(study.seeds) for place in self.places(study, seed)]
        if not study.more_seeds:
            return first
        places = list(first)
        outcomes = self.outcomes(study, first)
        for column, _ in columns_of(study, self.scale, self.worlds):
            rows = repeated(outcomes, column.name, self.scale.within)
            for seed in range(1, self.scale.seeds):
                others = [place for place in self.places(study, seed) if place.column.name == column.name]
                places += [place for place in others if place.row.name in rows or self.has(place)]
        return places


# What holds while a method is tuned, where its rows differ: the budget in the middle of ours.
TUNED_WITH: Mapping[str, Settings] = {
    "pfedgate": {"clients.budget": 0.5, "algorithm.resources": "all"},
    "heterofl": {"clients.budget": 0.5, "algorithm.level": "none"},
    "fedmask": {"algorithm.density": 0.5},
    **{name: {"clients.budget": 0.5} for name in ("fedrolex", "fjord", "fiarse", "dispfl")},
}


def repeated(outcomes: Outcomes, column: str, within: float | None) -> list[str]:
    """Rows of a column that get more seeds; none until all are there.

    Those near the best on validation data, FedAvg's, and both sides of what must be shown.
    """
    study = outcomes.study
    names = [row.name for row in study.rows]
    if within is None:
        return names
    if {*outcomes.rows(column)} != {*names}:
        return []
    scores = {name: outcomes.validation(name, column) for name in names}
    named = {name for claim in claims(outcomes, column) for name in (claim["ours"], claim["other"])}
    named |= {row.name for row in study.rows if row.method == "fedavg" and "model.widths" not in row.settings}
    return [name for name in names if name in named or scores[name] >= max(scores.values()) - within]


def share(labels: Sequence[tuple[str, str]], part: str) -> set[str]:
    """The keys that `--cells` asks for among (label, key): "2/4" is every fourth, anything else a pattern of labels.

    >>> sorted(share([("a/FedAvg", "x"), ("a/Ditto", "y"), ("b/FedAvg", "x")], "2/2"))
    ['y']
    """
    numbers = re.fullmatch(r"(\d+)/(\d+)", part)
    keys = list(dict.fromkeys(key for _, key in labels))
    if not numbers:
        matches = {key for label, key in labels if fnmatch.fnmatchcase(label.lower(), f"*{part.lower()}*")}
        if labels and not matches:
            some = ", ".join(repr(label) for label, _ in labels[:3])
            raise ValueError(f"--cells {part}: no cell is called so; there are {some}, …")
        return matches
    index, of = int(numbers[1]), int(numbers[2])
    if not 1 <= index <= of:
        raise ValueError(f"--cells {part}: the first number goes from 1 to the second")
    return {key for at, key in enumerate(keys) if at % of == index - 1}


Work = cells.Job | Tuning


def work(job: Work, tick: Callable[[], None] = lambda: None) -> float:
    """A search or a cell, or what is left of it; returns its seconds."""
    if isinstance(job, cells.Job):
        return cells.work(job, tick)
    began, recipe = time.perf_counter(), job.recipe
    space = {name: axis for name, axis in space_of(recipe, care=True).items() if name not in job.fixed}
    spec = SearchSpec(job.name, base(recipe), space)
    search = Search(spec, job.folder, job.trials, lambda _: tick(), extend=True)
    search.run()
    if search.best is None:
        raise RuntimeError(f"{job.label}: no trial ended well; the first: {search.trials[0].error}")
    trials = [{"params": t.params, "val": t.value, "state": t.state, "round": t.best_round} for t in search.trials]
    record: Record = {
        "best": search.best.params, "val": search.best.value, "rounds": recipe.train.rounds,
        "seed": spec.recipe.run.seed, "space": spec.plain()["space"], "trials": trials,
    }  # fmt: skip
    write_atomically(job.file, json.dumps(record, indent=1).encode())
    return time.perf_counter() - began


Files = dict[str, bytes]  # by their paths within the folder that holds a job's own


def _files(root: Path, folder: Path) -> Files:
    """A job's folder, and the file of its name that a search leaves."""
    paths = [*folder.rglob("*"), folder.with_suffix(".json")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths if path.is_file()}


def _write(root: Path, files: Files) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _away(packed: tuple[Work, Files]) -> tuple[float, Files]:
    """On a node of a cluster: a job in a folder there, and the files that it leaves."""
    job, files = packed
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        _write(root, files)
        there = replace(job, folder=root / job.folder.name)
        return work(there), _files(root, there.folder)


def _home(job: Work, future: Future[tuple[float, Files]]) -> Future[float]:
    """The files of a job that ended elsewhere are written here."""
    done: Future[float] = Future()
    try:
        seconds, files = future.result()
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=job.folder.parent) as place:
            _write(Path(place), files)
            shutil.rmtree(job.folder, ignore_errors=True)  # of an earlier attempt, whose files have been there and back
            for path in sorted(Path(place).iterdir(), key=lambda path: path.is_file()):  # a search's file comes last
                path.replace(job.folder.parent / path.name)
        done.set_result(seconds)
    except Exception as error:
        done.set_exception(error)
    return done


@dataclass
class Sweep:
    """The work of a campaign: what waits, what runs, and how much has ended or failed."""

    campaign: Campaign
    watch: Callable[[Sweep, str | None], None] = lambda sweep, label: None  # None: nothing has ended
    waiting: list[Work] = field(default_factory=list)
    running: list[Work] = field(default_factory=list)
    failed: dict[str, BaseException] = field(default_factory=dict)  # by label
    done: int = 0
    total: int = 0
    rounds: int = 0  # in all that is to be run
    rounds_done: int = 0

    def add(self, places: Sequence[Place], tunings: Sequence[Tuning] = ()) -> None:
        """Searches, and cells of places; finished ones with all looks count as done."""
        looks: dict[str, dict[str, None]] = {}
        ahead: dict[str, Place] = {}
        for place in places:
            wanted = looks.setdefault(place.cell.key, {})
            if not self.campaign.has(place):
                wanted.update(dict.fromkeys(place.study.looks))
                ahead.setdefault(place.cell.key, place)
        searches = [tuning for tuning in tunings if tuning.best() is None and tuning.label not in self.failed]
        self.waiting += searches
        for key, place in ahead.items():
            if place.label not in self.failed:
                recipe = place.cell.recipe.tables()
                self.waiting.append(cells.Job(place.label, self.campaign.folder(place), recipe, tuple(looks[key])))
        self.rounds += sum(map(_rounds, self.waiting))
        self.total = len(looks) + len(tunings)
        self.done = self.total - len(self.waiting)

    def run(self, work: Callable[..., float] = work) -> None:
        """All that waits. A cell that fails does not stop the others."""
        ended: Iterator[tuple[Work, Future[float]]]
        if self.campaign.on == "ray":
            from pfedgate.engine.cluster import spread  # Ray, only where it is asked for

            ended = (
                (job, _home(job, future))
                for (job, _), future in spread(_away, self._packed, lambda: self.watch(self, None))
            )
        else:
            ended = completed(work, self._draw, workers=self.campaign.workers, tick=lambda: self.watch(self, None))
        for job, future in ended:
            self.running.remove(job)
            self.done += 1
            self.rounds_done += _rounds(job)
            label, error = job.label, future.exception()
            if error is not None:
                self.failed[job.label] = error
                label += f" failed: {type(error).__name__}: {error}"
            self.watch(self, label)

    def _draw(self) -> Work | None:
        if not self.waiting:
            return None
        self.running.append(self.waiting.pop(0))
        return self.running[-1]

    def _packed(self) -> tuple[Work, Files] | None:
        """The next job, with the files that an earlier attempt has left."""
        job = self._draw()
        return None if job is None else (job, _files(job.folder.parent, job.folder))

    @property
    def share(self) -> float:
        """How much of this session's work is done."""
        begun = [job.folder / "timing.jsonl" for job in self.running if isinstance(job, cells.Job)]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in begun if path.exists())
        return (self.rounds_done + lines) / max(1, self.rounds)

    def check(self) -> None:
        """An error if cells have failed: the first of them, with its origin."""
        for label, error in self.failed.items():
            trace = "".join(traceback.format_exception(error))
            text = f"{len(self.failed)} of {self.total} cells failed; {label}: {type(error).__name__}: {error}"
            raise RuntimeError(f"{text}\n{trace}") from error


def _rounds(job: Work) -> int:
    if isinstance(job, Tuning):
        return job.trials * job.recipe.train.rounds
    rounds: int = job.recipe["train"]["rounds"]
    return rounds


def run(studies: Sequence[Study], campaign: Campaign, watch: Callable[[Sweep, str | None], None]) -> Sweep:
    """Searches first, then the cells of some studies; when the first seeds are there, those that are repeated."""
    sweep = Sweep(campaign, watch)
    first = True
    while first or sweep.waiting:
        sweep.run()
        tunings = list({t.folder: t for study in studies for t in campaign.tunings(study)}.values())
        places = [place for study in studies for place in campaign.all_places(study)]
        labels = [(t.label, str(t.folder)) for t in tunings] + [(p.label, p.cell.key) for p in places]
        keys = share(labels, campaign.part)
        sweep.add([p for p in places if p.cell.key in keys], [t for t in tunings if str(t.folder) in keys])
        if first:
            watch(sweep, "")
        first = False
    return sweep


@dataclass(frozen=True)
class Estimate:
    """Of what is not finished, within a factor of two."""

    cells: int
    seconds: float  # with the workers asked for
    disk: float  # bytes while cells run


def estimate(studies: Sequence[Study], campaign: Campaign) -> Estimate:
    """How long some studies will take and how much room they need; seeds to come are those of all rows."""
    places = [place for study in studies for place in campaign.all_places(study)]
    tunings = {t.folder: t for study in studies for t in campaign.tunings(study) if t.best() is None}
    keys = share(
        [(p.label, p.cell.key) for p in places] + [(t.label, str(t.folder)) for t in tunings.values()], campaign.part
    )
    ahead = {p.cell.key: p for p in places if not usable(campaign.folder(p), p.study.looks) and p.cell.key in keys}
    seconds, largest = 0.0, 0.0
    worlds = {world.settings.get("data.name", name): world for name, world in campaign.scale.worlds.items()}
    work = [(p.cell.recipe, 1) for p in ahead.values()]
    work += [(t.recipe, t.trials) for folder, t in tunings.items() if str(folder) in keys]
    for recipe, times in work:
        world = worlds[recipe.data.name]
        size, step = _network(
            recipe.model.name,
            world.shape,
            world.classes,
            tuple(sorted(recipe.model.options.items())),
            recipe.run.device,
        )
        seconds += times * step * _batches(recipe, world)
        largest = max(largest, 3 * size * world.clients)  # some methods have a whole model per client: old, new, best
    return Estimate(len(work), seconds / campaign.workers, 1e6 * len(work) + largest * campaign.workers)


def long(seconds: float) -> str:
    """A long time in words.

    >>> long(90), long(7200), long(400_000)
    ('2 minutes', '2.0 hours', '4.6 days')
    """
    if seconds < 3600:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


def _batches(recipe: Recipe, world: World) -> float:
    """How many dense training steps a run is worth."""
    clients = recipe.clients.fraction if recipe.clients.number is None else recipe.clients.number / world.clients
    batches = TRAINING * world.images / BATCH * clients * recipe.train.epochs * recipe.train.rounds
    if recipe.algorithm.name == "pfedgate":  # its gate, and the share of the model that it uses
        budget = recipe.clients.budget
        return SCORING * batches * (0.15 + (float(budget) if isinstance(budget, (int, float)) else 0.5))
    cost = methods.cost_of(recipe.algorithm.name)
    return SCORING * batches * (1.0 if cost is None else cost.compute)


@lru_cache(maxsize=16)
def _network(
    name: str, shape: tuple[int, ...], classes: int, options: tuple[Any, ...], device: str
) -> tuple[float, float]:
    """Bytes of a model, and seconds of its dense training step on this machine, one thread or one accelerator."""
    where = choose_device(device)
    # Other work on this machine does not count in processor time, so the estimate does not depend on it.
    clock = time.process_time if where.type == "cpu" else time.perf_counter
    with seeded(0, "estimate"), one_thread():
        model = models.build(name, shape, classes, **dict(options)).to(where)
        x = torch.zeros(BATCH, *shape, device=where)
        seconds = []
        for _ in range(1 + STEPS):
            began = clock()
            model(x).sum().backward()
            if where.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(clock() - began)
    return 4.0 * sum(p.numel() for p in model.parameters()), min(seconds[1:])
