"""What the cells of a study came to: numbers by row, column and seed, and their means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pfedgate.engine.metrics import Record
from pfedgate.runs import folder as runfolder
from pfedgate.runs.folder import Run
from pfedgate.studies.cells import Cell, code_of, look, seconds_of, there
from pfedgate.studies.declare import VALIDATION, Column, Number, Row, Study


@dataclass(frozen=True)
class Place:
    """A cell's place in a study."""

    study: Study
    row: Row
    column: Column
    seed: int
    cell: Cell

    @property
    def label(self) -> str:
        """What `--cells` looks at."""
        return f"{self.study.name}/{self.column.name}/{self.row.name}/seed {self.seed}"


@dataclass
class Outcomes:
    """Finished cells of a study."""

    study: Study
    runs: dict[tuple[str, str, int], Run] = field(default_factory=dict)  # row, column, seed
    missing: list[Place] = field(default_factory=list)
    _read: dict[Path, Record] = field(default_factory=dict)

    @classmethod
    def of(cls, study: Study, places: Sequence[Place], root: Path, *, any_code: bool = False) -> Outcomes:
        """What is on disk of a study's cells."""
        found = cls(study)
        for place in places:
            folder = place.cell.folder(root, any_code=any_code, looks=study.looks)
            if there(folder, study.looks):
                found.runs[place.row.name, place.column.name, place.seed] = runfolder.load(folder)
            else:
                found.missing.append(place)
        return found

    @cached_property
    def columns(self) -> list[str]:
        """Names of columns that have something."""
        return list(dict.fromkeys(column for _, column, _ in self.runs))

    def rows(self, column: str) -> list[str]:
        """Names of rows that a column has something of, in the study's order."""
        there = {row for row, where, _ in self.runs if where == column}
        return [row.name for row in self.study.rows if row.name in there]

    def seeds(self, row: str, column: str) -> list[Run]:
        """The runs of one cell of the table."""
        return [run for (r, c, _), run in sorted(self.runs.items()) if (r, c) == (row, column)]

    def numbers(self, run: Run) -> Record:
        """All numbers of a run, by key."""
        if run.path not in self._read:
            self._read[run.path] = _numbers(run, self.study.look)
        return self._read[run.path]

    def values(self, row: str, column: str, number: Number) -> list[float]:
        """One number of one cell of the table, in the order of seeds."""
        return list(self.by_seed(row, column, number).values())

    def by_seed(self, row: str, column: str, number: Number) -> dict[int, float]:
        """The same with the seeds."""
        found = {}
        seeds = sorted(seed for r, c, seed in self.runs if (r, c) == (row, column))
        for seed in seeds[: 1 if number.first_seed else None]:
            value = _value(self.numbers(self.runs[row, column, seed]), number)
            if value is not None and number.over_first:
                first = self.runs.get((self.study.rows[0].name, column, seed))
                base = _value(self.numbers(first), number) if first is not None else None
                value = value / base if base else None
            if value is not None:
                found[seed] = value
        return found

    def validation(self, row: str, column: str) -> float:
        """Mean over seeds of the best accuracy on validation data: what rows may be ranked by."""
        return statistics.fmean(self.values(row, column, VALIDATION))

    def code(self, row: str | None = None, column: str | None = None) -> list[str]:
        """Digests of the code that made its cells, or those of a row and a column."""
        asked = [run for (r, c, _), run in self.runs.items() if row in (None, r) and column in (None, c)]
        return sorted({code_of(run) for run in asked})

    def table(self) -> list[dict[str, Any]]:
        """Everything as plain data: a record for every row and column."""
        return [self._record(row, column) for column in self.columns for row in self.rows(column)]

    def _record(self, row: str, column: str) -> dict[str, Any]:
        runs = self.seeds(row, column)
        recipe = runs[0].recipe
        settings: dict[str, Any] = {"train.lr": recipe.train.lr, "train.rounds": recipe.train.rounds}
        settings |= {"clients.budget": recipe.clients.budget, "model": recipe.model.name}
        settings |= {f"algorithm.{name}": value for name, value in recipe.algorithm.options.items()}
        return {
            "row": row,
            "column": column,
            "method": recipe.algorithm.name,
            "numbers": {n.name: spread(self.values(row, column, n)) for n in self.study.numbers},
            "validation": self.validation(row, column),
            "seeds": [run.recipe.run.seed for run in runs],
            "settings": settings,
            "cells": [run.path.name for run in runs],
            "code": self.code(row, column),
        }


def _value(numbers: Mapping[str, Any], number: Number) -> float | None:
    value, other = numbers.get(number.key), numbers.get(number.minus) if number.minus else 0.0
    return None if value is None or other is None else float(value) - float(other)


def _numbers(run: Run, looked: str) -> Record:
    found: Record = dict(run.summary)
    records = run.metrics
    taken = sum(record["sampled"] for record in records) or 1
    novel = found.pop("novel", None) or {}
    found["novel"], found["novel_bottom_decile"] = novel.get("accuracy"), novel.get("bottom_decile")
    found["up"], found["down"] = found["bytes_up"] / taken, found["bytes_down"] / taken
    found["flops"] = found["flops"] / taken
    found["q"] = found.get("q_training")
    # A method that says nothing uses the whole model.
    found["density"] = found.get("density") or found.get("density_training") or 1.0
    found["seconds"] = seconds_of(run)
    scored = [r["after_broadcast"].get("val_accuracy") for r in records if "after_broadcast" in r]
    found["val"] = max((value for value in scored if value is not None), default=math.nan)
    if looked:
        found |= look(run, looked)
    return found


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean, deviation (of a sample) and the values.

    >>> spread([1.0, 2.0])["mean"], spread([1.0])["std"], spread([])
    (1.5, None, None)
    """
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": deviation, "values": list(values)}
