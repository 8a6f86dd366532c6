"""Running the cells of studies: each once, finished ones never again, several at a time."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pfedgate.engine import jobs
from pfedgate.studies import cells, scales
from pfedgate.studies.cells import Cell, there
from pfedgate.studies.claims import close
from pfedgate.studies.declare import Study
from pfedgate.studies.outcome import Outcomes, Place
from pfedgate.studies.scales import Scale

MOST_GATES = 3  # of the rows that get more seeds, so that the best baselines get them too


@dataclass
class Order:
    """What to run, where and how."""

    scale: Scale
    out: Path
    worlds: tuple[str, ...] = ()
    over: Sequence[Mapping[str, Any]] = ()
    recipes: Path | None = None
    any_code: bool = False
    part: str = ""  # of --cells
    workers: int = 1
    _cells: dict[tuple[str, ...], Cell] = field(default_factory=dict, repr=False)  # recipes take a while to resolve

    @property
    def root(self) -> Path:
        """Where cells are kept, whichever study they belong to."""
        return self.out / "cells"

    def has(self, place: Place) -> bool:
        """Whether a place's cell is finished, and what its study wants to know of it is known."""
        looks = place.study.looks
        return there(place.cell.folder(self.root, any_code=self.any_code, looks=looks), looks)

    def places(self, study: Study, seed: int = 0, rows: Sequence[str] | None = None) -> list[Place]:
        """The cells of a study with one seed."""
        found = []
        for column, world in scales.columns_of(study, self.scale, self.worlds):
            for row in study.rows:
                if rows is None or row.name in rows:
                    key = (study.name, column.name, row.name, str(seed))
                    if key not in self._cells:
                        recipe = scales.recipe_of(
                            row, column, world, self.scale, seed=seed, over=self.over, recipes=self.recipes
                        )
                        self._cells[key] = Cell(recipe)
                    found.append(Place(study, row, column, seed, self._cells[key]))
        return found

    def all_places(self, study: Study) -> list[Place]:
        """Those with the first seed, others as far as it is known which are repeated, and whatever else is there."""
        first = self.places(study)
        if not study.more_seeds:
            return first
        found = list(first)
        outcomes = Outcomes.of(study, first, self.root, any_code=self.any_code)
        for column, _ in scales.columns_of(study, self.scale, self.worlds):
            chosen = repeated(study, outcomes, column.name, self.scale.best)
            for seed in range(1, self.scale.seeds):
                others = [p for p in self.places(study, seed) if p.column.name == column.name]
                found += [p for p in others if p.row.name in chosen or self.has(p)]
        return found


def repeated(study: Study, outcomes: Outcomes, column: str, best: int | None) -> list[str]:
    """Rows of a column that get more seeds; none until all are there.

    The best on validation data, FedAvg, and both sides of what must be shown where one seed cannot tell.
    """
    rows = [row.name for row in study.rows]
    if best is None:
        return rows
    there = outcomes.rows(column)
    if set(there) != set(rows):
        return []
    gates = {row.name for row in study.rows if row.method == "pfedgate"}
    chosen: list[str] = []
    often = [row.name for row in study.rows if not row.once]
    for name in sorted(often, key=lambda name: -outcomes.validation(name, column)):
        if len(chosen) < best and (name not in gates or sum(c in gates for c in chosen) < MOST_GATES):
            chosen.append(name)
    chosen += [row.name for row in study.rows if row.method == "fedavg"] + close(outcomes, column)
    return list(dict.fromkeys(chosen))


def select(places: Sequence[Place], part: str) -> list[Place]:
    """The places that `--cells` asks for: "2/4" is every fourth cell from the second on, anything else a pattern.

    >>> select([], "1/2")
    []
    """
    share = re.fullmatch(r"(\d+)/(\d+)", part)
    if not share:
        found = [place for place in places if fnmatch.fnmatchcase(place.label.lower(), f"*{part.lower()}*")]
        if places and not found:
            some = ", ".join(repr(place.label) for place in places[:3])
            raise ValueError(f"--cells {part}: no cell is called so; there are {some}, …")
        return found
    index, of = int(share[1]), int(share[2])
    if not 1 <= index <= of:
        raise ValueError(f"--cells {part}: the first number goes from 1 to the second")
    order = {key: at for at, key in enumerate(dict.fromkeys(place.cell.key for place in places))}
    return [place for place in places if order[place.cell.key] % of == index - 1]


@dataclass
class Cells:
    """A host of jobs: all cells that are not finished."""

    order: Order
    watch: Callable[[Cells, str | None], None] = lambda host, told: None  # None: nothing has ended
    later: Callable[[], Sequence[Place]] = tuple  # places to come when all is done; asked once
    waiting: list[tuple[Cell, list[str], str]] = field(default_factory=list)  # cell, looks, label
    running: dict[str, int] = field(default_factory=dict)  # rounds done, by key
    done: int = 0
    total: int = 0
    rounds: int = 0  # of all that is to be done
    rounds_done: int = 0
    failed: dict[str, jobs.Failed] = field(default_factory=dict)

    def add(self, places: Sequence[Place]) -> None:
        """Cells of places; those that are finished, and looked at, are counted as done."""
        wanted: dict[str, tuple[Cell, list[str], str]] = {}
        done: dict[str, bool] = {}
        for place in places:
            cell, looks, _ = wanted.setdefault(place.cell.key, (place.cell, [], place.label))
            if not self.order.has(place):
                done[cell.key] = False
                looks += [name for name in place.study.looks if name not in looks]
        self.total = len(wanted)
        self.waiting = [
            told for key, told in wanted.items() if not done.get(key, True) and told[2] not in self.failed
        ]  # fmt: skip
        self.done = self.total - len(self.waiting)
        self.rounds += sum(cell.recipe.train.rounds for cell, _, _ in self.waiting)

    def run(self) -> None:
        """All of them."""
        self.watch(self, "")
        jobs.run(cells.work, self, workers=self.order.workers)

    def next(self) -> jobs.Job | None:
        """The next cell; when all are done those that come later."""
        if not self.waiting and not self.running and self.later is not tuple:
            later, self.later = self.later, tuple
            self.add(later())
        if not self.waiting:
            return None
        cell, looks, label = self.waiting.pop(0)
        self.running[label] = 0
        folder = cell.folder(self.order.root, any_code=self.order.any_code, looks=looks)
        return {
            "folder": str(folder), "own": str(cell.folder(self.order.root)), "recipe": cell.recipe.tables(),
            "looks": looks, "label": label, "rounds": cell.recipe.train.rounds,
        }  # fmt: skip

    def said(self, job: jobs.Job, message: Any) -> None:
        """A round of a cell has ended."""
        self.running[job["label"]] = int(message)
        self.watch(self, None)

    def ended(self, job: jobs.Job, result: Any) -> None:
        """A cell is on disk, or failed: then the others go on."""
        self.running.pop(job["label"])
        self.done += 1
        self.rounds_done += job["rounds"]
        told = job["label"]
        if isinstance(result, jobs.Failed):
            self.failed[job["label"]] = result
            told += f" failed: {result.error}"
        self.watch(self, told)

    @property
    def share(self) -> float:
        """How much of this session's work is done."""
        return (self.rounds_done + sum(self.running.values())) / max(1, self.rounds)


def run(studies: Sequence[Study], order: Order, watch: Callable[[Cells, str | None], None]) -> Cells:
    """All cells of some studies; when the first seeds are there, those that are repeated."""

    def places() -> list[Place]:
        return select([place for study in studies for place in order.all_places(study)], order.part)

    host = Cells(order, watch, places)
    host.add(places())
    host.run()
    return host
