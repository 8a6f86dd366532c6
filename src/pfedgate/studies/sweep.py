"""Running the cells of studies, each once and several at a time; and how long that will take."""

from __future__ import annotations

import fnmatch
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pfedgate import models
from pfedgate.config import methods
from pfedgate.config.recipe import Recipe
from pfedgate.core.seeds import seeded
from pfedgate.engine.server import choose_device, one_thread
from pfedgate.engine.workers import completed
from pfedgate.runs import folder as runfolder
from pfedgate.studies import cells
from pfedgate.studies.cells import Cell, finished, usable
from pfedgate.studies.declare import Scale, Study, World, columns_of, recipe_of
from pfedgate.studies.outcome import Outcomes, Place, close

MOST_GATES = 3  # among the rows that get more seeds, so that the best baselines get them too
TRAINING = 0.6  # share of a client's samples
SCORING = 1.25  # evaluation every few rounds, on top of training
BATCH, STEPS = 128, 3  # in the training step that estimates rest on


@dataclass
class Campaign:
    """What to run, where and how."""

    scale: Scale
    out: Path
    worlds: tuple[str, ...] = ()
    over: Sequence[Mapping[str, Any]] = ()
    recipes: Path | None = None
    any_version: bool = False
    part: str = ""  # see `share`
    workers: int = 1
    _cells: dict[tuple[str, ...], Cell] = field(default_factory=dict, repr=False)  # recipes take a while to resolve

    @property
    def root(self) -> Path:
        """The folder of all cells, whichever study they belong to."""
        return self.out / "cells"

    def folder(self, place: Place) -> Path:
        """The folder of a place's cell."""
        return place.cell.folder(self.root, any_version=self.any_version, looks=place.study.looks)

    def has(self, place: Place) -> bool:
        """Whether a place's cell is finished, with all looks that its study needs."""
        return finished(self.folder(place), place.study.looks)

    def places(self, study: Study, seed: int = 0, rows: Sequence[str] | None = None) -> list[Place]:
        """The cells of a study with one seed."""
        places = []
        for column, world in columns_of(study, self.scale, self.worlds):
            for row in study.rows:
                if rows is None or row.name in rows:
                    key = (study.name, column.name, row.name, str(seed))
                    if key not in self._cells:
                        self._cells[key] = Cell(
                            recipe_of(row, column, world, self.scale, seed=seed, over=self.over, recipes=self.recipes)
                        )
                    places.append(Place(study, row, column, seed, self._cells[key]))
        return places

    def outcomes(self, study: Study, places: Sequence[Place]) -> Outcomes:
        """The finished cells among some places of a study."""
        outcomes = Outcomes(study)
        for place in places:
            if self.has(place):
                outcomes.runs[place.row.name, place.column.name, place.seed] = runfolder.load(self.folder(place))
            else:
                outcomes.missing.append(place)
        return outcomes

    def all_places(self, study: Study) -> list[Place]:
        """Those with the first seed, other seeds of the rows that are repeated, and other seeds that are finished."""
        first = self.places(study)
        if not study.more_seeds:
            return first
        places = list(first)
        outcomes = self.outcomes(study, first)
        for column, _ in columns_of(study, self.scale, self.worlds):
            rows = repeated(study, outcomes, column.name, self.scale.best)
            for seed in range(1, self.scale.seeds):
                others = [place for place in self.places(study, seed) if place.column.name == column.name]
                places += [place for place in others if place.row.name in rows or self.has(place)]
        return places


def repeated(study: Study, outcomes: Outcomes, column: str, best: int | None) -> list[str]:
    """Rows of a column that get more seeds; none until all are there.

    The best on validation data, FedAvg, and both sides of what must be shown where one seed cannot tell.
    """
    rows = [row.name for row in study.rows]
    if best is None:
        return rows
    if {*outcomes.rows(column)} != {*rows}:
        return []
    gates = {row.name for row in study.rows if row.method == "pfedgate"}
    names: list[str] = []
    often = [row.name for row in study.rows if not row.once]
    for name in sorted(often, key=lambda name: -outcomes.validation(name, column)):
        if len(names) < best and (name not in gates or sum(other in gates for other in names) < MOST_GATES):
            names.append(name)
    names += [row.name for row in study.rows if row.method == "fedavg"] + close(outcomes, column)
    return list(dict.fromkeys(names))


def share(places: Sequence[Place], part: str) -> list[Place]:
    """The places that `--cells` asks for: "2/4" is every fourth cell from the second on, anything else a pattern.

    >>> share([], "1/2")
    []
    """
    numbers = re.fullmatch(r"(\d+)/(\d+)", part)
    if not numbers:
        matches = [place for place in places if fnmatch.fnmatchcase(place.label.lower(), f"*{part.lower()}*")]
        if places and not matches:
            some = ", ".join(repr(place.label) for place in places[:3])
            raise ValueError(f"--cells {part}: no cell is called so; there are {some}, …")
        return matches
    index, of = int(numbers[1]), int(numbers[2])
    if not 1 <= index <= of:
        raise ValueError(f"--cells {part}: the first number goes from 1 to the second")
    order = {key: at for at, key in enumerate(dict.fromkeys(place.cell.key for place in places))}
    return [place for place in places if order[place.cell.key] % of == index - 1]


@dataclass
class Sweep:
    """The cells of a campaign: those that wait, those that run, and how many have ended or failed."""

    campaign: Campaign
    watch: Callable[[Sweep, str | None], None] = lambda sweep, label: None  # None: no cell has ended
    waiting: list[cells.Job] = field(default_factory=list)
    running: list[cells.Job] = field(default_factory=list)
    failed: dict[str, BaseException] = field(default_factory=dict)  # by label
    done: int = 0
    total: int = 0
    rounds: int = 0  # in all cells that are to be run
    rounds_done: int = 0

    def add(self, places: Sequence[Place]) -> None:
        """Cells of places; finished ones with all looks count as done."""
        looks: dict[str, dict[str, None]] = {}
        ahead: dict[str, Place] = {}
        for place in places:
            wanted = looks.setdefault(place.cell.key, {})
            if not self.campaign.has(place):
                wanted.update(dict.fromkeys(place.study.looks))
                ahead.setdefault(place.cell.key, place)
        for key, place in ahead.items():
            if place.label not in self.failed:
                root, any_version, needed = self.campaign.root, self.campaign.any_version, tuple(looks[key])
                folder = place.cell.folder(root, any_version=any_version, looks=needed)
                recipe = place.cell.recipe
                self.waiting.append(cells.Job(place.label, folder, place.cell.own(root), recipe.tables(), needed))
                self.rounds += recipe.train.rounds
        self.total = len(looks)
        self.done = self.total - len(self.waiting)

    def run(self, work: Callable[..., float] = cells.work) -> None:
        """All cells that wait. One that fails does not stop the others."""
        ended = completed(work, self._draw, workers=self.campaign.workers, tick=lambda: self.watch(self, None))
        for job, future in ended:
            self.running.remove(job)
            self.done += 1
            self.rounds_done += job.recipe["train"]["rounds"]
            label, error = job.label, future.exception()
            if error is not None:
                self.failed[job.label] = error
                label += f" failed: {type(error).__name__}: {error}"
            self.watch(self, label)

    def _draw(self) -> cells.Job | None:
        if not self.waiting:
            return None
        self.running.append(self.waiting.pop(0))
        return self.running[-1]

    @property
    def share(self) -> float:
        """How much of this session's work is done."""
        return (self.rounds_done + sum(len(_timing(job)) for job in self.running)) / max(1, self.rounds)

    def check(self) -> None:
        """An error if cells have failed: the first of them, with its origin."""
        for label, error in self.failed.items():
            trace = "".join(traceback.format_exception(error))
            text = f"{len(self.failed)} of {self.total} cells failed; {label}: {type(error).__name__}: {error}"
            raise RuntimeError(f"{text}\n{trace}") from error


def _timing(job: cells.Job) -> list[str]:
    path = job.folder / "timing.jsonl"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def run(studies: Sequence[Study], campaign: Campaign, watch: Callable[[Sweep, str | None], None]) -> Sweep:
    """All cells of some studies; when the first seeds are there, those that are repeated."""

    def places() -> list[Place]:
        return share([place for study in studies for place in campaign.all_places(study)], campaign.part)

    sweep = Sweep(campaign, watch)
    sweep.add(places())
    watch(sweep, "")
    sweep.run()
    sweep.add(places())
    sweep.run()
    return sweep


@dataclass(frozen=True)
class Estimate:
    """Of the cells that are not finished, within a factor of two."""

    cells: int
    seconds: float  # with the workers asked for
    disk: float  # bytes in the end
    peak: float  # bytes while cells run


def estimate(studies: Sequence[Study], campaign: Campaign) -> Estimate:
    """How long some studies will take and how much room they need."""
    places = share([place for study in studies for place in _repeats(study, campaign)], campaign.part)
    return estimate_of(places, campaign)


def estimate_of(places: Sequence[Place], campaign: Campaign) -> Estimate:
    """The same for some places."""
    ahead = {place.cell.key: place for place in places if not usable(campaign.folder(place), place.study.looks)}
    seconds, disk, largest = 0.0, 0.0, 0.0
    for place in ahead.values():
        recipe, world = place.cell.recipe, campaign.scale.worlds[place.column.data]
        options = tuple(sorted(recipe.model.options.items()))
        size = 4.0 * _size(recipe.model.name, world.shape, world.classes, options)
        seconds += _seconds(recipe, world)
        disk += 1e6 + (size * (1 + 0.063 * world.clients) if recipe.algorithm.name == "pfedgate" else 0.0)
        largest = max(largest, 2 * size * world.clients)  # some methods have a whole model per client, old and new
    return Estimate(len(ahead), seconds / campaign.workers, disk, disk + largest * campaign.workers)


def long(seconds: float) -> str:
    """A long time in words.

    >>> long(90), long(7200), long(400_000)
    ('2 minutes', '2.0 hours', '4.6 days')
    """
    if seconds < 3600:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


def _repeats(study: Study, campaign: Campaign) -> list[Place]:
    """Places of all seeds: until it is clear which rows are repeated, the last ones stand for them."""
    places, scale = campaign.all_places(study), campaign.scale
    if study.more_seeds and scale.best is not None and len({place.seed for place in places}) < scale.seeds:
        rows = [row.name for row in study.rows][-scale.best - 1 :]
        places += [place for seed in range(1, scale.seeds) for place in campaign.places(study, seed, rows)]
    return places


def _seconds(recipe: Recipe, world: World) -> float:
    options = tuple(sorted(recipe.model.options.items()))
    step = _step(recipe.model.name, world.shape, world.classes, options, recipe.run.device)
    clients = recipe.clients.fraction if recipe.clients.number is None else recipe.clients.number / world.clients
    batches = TRAINING * world.images / BATCH * clients * recipe.train.epochs * recipe.train.rounds
    budget = recipe.clients.budget
    if recipe.algorithm.name == "pfedgate":  # its gate, and the share of the model that it uses
        passes = 0.15 + (float(budget) if isinstance(budget, (int, float)) else 0.5)
    else:
        cost = methods.cost_of(recipe.algorithm.name)
        passes = 1.0 if cost is None else cost.compute
    return step * batches * passes * SCORING


@lru_cache(maxsize=16)
def _size(name: str, shape: tuple[int, ...], classes: int, options: tuple[Any, ...]) -> int:
    with seeded(0, "estimate"):
        return sum(p.numel() for p in models.build(name, shape, classes, **dict(options)).parameters())


@lru_cache(maxsize=16)
def _step(name: str, shape: tuple[int, ...], classes: int, options: tuple[Any, ...], device: str) -> float:
    """Seconds of a dense training step on this machine, one thread or one accelerator."""
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
    return min(seconds[1:])
