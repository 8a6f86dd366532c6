"""The outcome of a study: numbers by row, column and seed, their means, and the differences that matter."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pfedgate.engine.metrics import Record
from pfedgate.runs.folder import Run
from pfedgate.studies.cells import Cell, look, seconds_of, version_of
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
        """The words that `--cells` looks at."""
        return f"{self.study.name}/{self.column.name}/{self.row.name}/seed {self.seed}"


@dataclass
class Outcomes:
    """Finished cells of a study."""

    study: Study
    runs: dict[tuple[str, str, int], Run] = field(default_factory=dict)  # row, column, seed
    missing: list[Place] = field(default_factory=list)
    _read: dict[Path, Record] = field(default_factory=dict)

    @cached_property
    def columns(self) -> list[str]:
        """Names of columns that have something."""
        return list(dict.fromkeys(column for _, column, _ in self.runs))

    def rows(self, column: str) -> list[str]:
        """Names of rows that a column has something of, in the study's order."""
        names = {row for row, where, _ in self.runs if where == column}
        return [row.name for row in self.study.rows if row.name in names]

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
        values = {}
        seeds = sorted(seed for r, c, seed in self.runs if (r, c) == (row, column))
        for seed in seeds[: 1 if number.first_seed else None]:
            value = _value(self.numbers(self.runs[row, column, seed]), number)
            if value is not None and number.over_first:
                first = self.runs.get((self.study.rows[0].name, column, seed))
                base = _value(self.numbers(first), number) if first is not None else None
                value = value / base if base else None
            if value is not None:
                values[seed] = value
        return values

    def validation(self, row: str, column: str) -> float:
        """Mean over seeds of the best accuracy on validation data: what rows may be ranked by."""
        return statistics.fmean(self.values(row, column, VALIDATION))

    def versions(self, row: str | None = None, column: str | None = None) -> list[int]:
        """Versions of the results that its cells hold, or those of a row and a column."""
        runs = [run for (r, c, _), run in self.runs.items() if row in (None, r) and column in (None, c)]
        return sorted({version_of(run.path) for run in runs})

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
            "versions": self.versions(row, column),
        }


def _value(numbers: Mapping[str, Any], number: Number) -> float | None:
    value, other = numbers.get(number.key), numbers.get(number.minus) if number.minus else 0.0
    return None if value is None or other is None else float(value) - float(other)


def _numbers(run: Run, look_name: str) -> Record:
    numbers: Record = dict(run.summary)
    records = run.metrics
    clients = sum(record["sampled"] for record in records) or 1
    novel = numbers.pop("novel", None) or {}
    numbers["novel"], numbers["novel_bottom_decile"] = novel.get("accuracy"), novel.get("bottom_decile")
    numbers["up"], numbers["down"] = numbers["bytes_up"] / clients, numbers["bytes_down"] / clients
    numbers["flops"] = numbers["flops"] / clients
    numbers["q"] = numbers.get("q_training")
    # A method without a density uses the whole model.
    numbers["density"] = numbers.get("density") or numbers.get("density_training") or 1.0
    numbers["seconds"] = seconds_of(run)
    scores = [r["after_broadcast"].get("val_accuracy") for r in records if "after_broadcast" in r]
    numbers["val"] = max((score for score in scores if score is not None), default=math.nan)
    return numbers | (look(run, look_name) if look_name else {})


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean, deviation (of a sample) and the values.

    >>> spread([1.0, 2.0])["mean"], spread([1.0])["std"], spread([])
    (1.5, None, None)
    """
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": deviation, "values": list(values)}


def claims(outcomes: Outcomes, column: str) -> list[Record]:
    """The differences that matter, in points; without those whose rows are not finished yet."""
    records = []
    for claim in outcomes.study.claims:
        names = outcomes.rows(column)
        ours = [name for name in claim.ours if name in names]
        baselines = [row.name for row in outcomes.study.rows if row.method != "pfedgate"]
        others = [name for name in claim.others or baselines if name in names]
        if len(ours) < len(claim.ours) or len(others) < len(claim.others or baselines):
            continue
        best = _best(ours, {name: outcomes.by_seed(name, column, VALIDATION) for name in ours})
        scores = {name: outcomes.by_seed(name, column, claim.number) for name in [best, *others]}
        gaps = {name: [scores[best][s] - scores[name][s] for s in scores[best] if s in scores[name]] for name in others}
        if not any(gaps.values()):
            continue
        hardest = min((name for name in others if gaps[name]), key=lambda name: statistics.fmean(gaps[name]))
        points, seeds = 100 * statistics.fmean(gaps[hardest]), len(gaps[hardest])
        met = None if claim.must is None else points > 0 if claim.must == 0 else points >= claim.must
        reached = None if claim.aim is None else points >= claim.aim
        rivals: list[str] = []
        if claim.must is not None and abs(points - claim.must) < claim.chance:  # other seeds may say otherwise
            decisive = min(claim.must, points) + claim.chance  # who is farther behind will not be the hardest
            rivals = [name for name in others if gaps[name] and 100 * statistics.fmean(gaps[name]) < decisive]
        records.append({
            "column": column, "claim": claim.title, "ours": best, "other": hardest, "seeds": seeds, "points": points,
            "must": claim.must, "aim": claim.aim, "kept": met, "reached": reached, "rivals": rivals,
        })  # fmt: skip
    return records


def _best(names: Sequence[str], scores: Mapping[str, Mapping[int, float]]) -> str:
    """The best of some rows on the seeds that all of them have."""
    shared = set.intersection(*({*scores[name]} for name in names))
    return max(names, key=lambda name: statistics.fmean(scores[name][seed] for seed in shared))


def close(outcomes: Outcomes, column: str) -> list[str]:
    """Rows of what must be shown and is so close, either way, that one seed cannot tell."""
    pairs = [[claim["ours"], *claim["rivals"]] for claim in claims(outcomes, column) if claim["rivals"]]
    return list(dict.fromkeys(name for names in pairs for name in names))
