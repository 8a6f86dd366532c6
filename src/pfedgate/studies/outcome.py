"""The outcome of a study: numbers by row, column and seed, their means, and the differences that matter."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pfedgate.engine.metrics import Record, rounds_to
from pfedgate.report.paired import Clients, Difference, paired, scores
from pfedgate.runs.folder import Run
from pfedgate.studies.cells import Cell, look, seconds_of
from pfedgate.studies.declare import VALIDATION, Claim, Column, Number, Row, Study


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
    untuned: list[str] = field(default_factory=list)  # rows that wait for a search
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
            self._read[run.path] = _numbers(run, self.study)
        return self._read[run.path]

    def values(self, row: str, column: str, number: Number) -> list[float]:
        """One number of one cell of the table, in the order of seeds."""
        return list(self.by_seed(row, column, number).values())

    def by_seed(self, row: str, column: str, number: Number) -> dict[int, float]:
        """The same with the seeds."""
        values = {}
        for seed in sorted(seed for r, c, seed in self.runs if (r, c) == (row, column)):
            first = self.runs.get((self.study.rows[0].name, column, seed))
            value = self._value(self.runs[row, column, seed], first, number)
            if number.key == "rounds_to_90":
                value = self._rounds_to_90(row, column, seed)
            if value is not None and number.over_first:
                base = self._value(first, first, number)
                value = value / base if base else None
            if value is not None:
                values[seed] = value
        return values

    def _value(self, run: Run | None, first: Run | None, number: Number) -> float | None:
        if run is None or (number.reach and first is None):
            return None
        if number.reach and first is not None:
            return reach(run.metrics, number.key, self.numbers(first)["val"])
        return _value(self.numbers(run), number)

    def _rounds_to_90(self, row: str, column: str, seed: int) -> float | None:
        """Rounds to 90 % of the best accuracy that any row reaches on the same data: one target for all."""
        curves = {r: run.curve("accuracy") for (r, c, s), run in self.runs.items() if (c, s) == (column, seed)}
        return rounds_to(0.9, curves[row], best=max(score for curve in curves.values() for _, score in curve))

    def validation(self, row: str, column: str) -> float:
        """Mean over seeds of the best accuracy on validation data: what rows may be ranked by."""
        return statistics.fmean(self.values(row, column, self.study.validation) or [math.nan])

    def clients(self, row: str, column: str) -> dict[int, Clients]:
        """Every client's accuracy by seed, at the study's point."""
        return {s: self.numbers(run)["clients"] for (r, c, s), run in self.runs.items() if (r, c) == (row, column)}

    def difference(self, ours: str, other: str, column: str) -> Difference | None:
        """Two rows, seed by seed and client by client."""
        return paired(self.clients(ours, column), self.clients(other, column))

    def table(self) -> list[dict[str, Any]]:
        """Everything as plain data: a record for every row and column."""
        return [self._record(row, column) for column in self.columns for row in self.rows(column)]

    def _record(self, row: str, column: str) -> dict[str, Any]:
        runs = self.seeds(row, column)
        recipe = runs[0].recipe
        settings: dict[str, Any] = {"model": recipe.model.name, "clients.budget": recipe.clients.budget}
        for name in ("lr", "rounds", "schedule", "correction", "initial_scale", "shift"):
            settings[f"train.{name}"] = getattr(recipe.train, name)
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
        }


def _value(numbers: Mapping[str, Any], number: Number) -> float | None:
    value, other = numbers.get(number.key), numbers.get(number.minus) if number.minus else 0.0
    return None if value is None or other is None else float(value) - float(other)


def _numbers(run: Run, study: Study) -> Record:
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
    numbers["late"] = sum(record.get("dropped", 0) for record in records) / clients
    curve = [r["after_broadcast"].get("val_accuracy") for r in records if "after_broadcast" in r]
    numbers["val"] = max((score for score in curve if score is not None), default=math.nan)
    seen = look(run, study.look) if study.look else {}
    if not study.point:
        return numbers | {"clients": scores(run)} | seen
    for point, entry in seen.items():
        if isinstance(entry, dict):
            numbers |= {f"{point}_{name}": value for name, value in entry.items() if name != "clients"}
    return numbers | {"clients": seen[study.point]["clients"]}


CUMULATIVE = ("virtual_seconds",)  # the rest of a round's numbers are of that round alone


def reach(records: Sequence[Record], key: str, target: float) -> float:
    """What a run needs of something until its accuracy on validation data is the target; infinity if never.

    >>> score = {"after_broadcast": {"val_accuracy": 0.5}}
    >>> reach([{"bytes_up": 3}, {"bytes_up": 4, **score}], "bytes_up", 0.5), reach([score], "bytes_up", 0.6)
    (7.0, inf)
    """
    used = 0.0
    for record in records:
        if key in CUMULATIVE:
            used = float(record.get(key, 0.0))
        else:
            used += record.get(key, 0.0)
        score = record.get("after_broadcast", {}).get("val_accuracy")
        if score is not None and score >= target:
            return used
    return math.inf


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean, deviation (of a sample) and the values.

    >>> spread([1.0, 2.0])["mean"], spread([1.0])["std"], spread([])
    (1.5, None, None)
    """
    if not values:
        return None
    finite = len(values) > 1 and all(map(math.isfinite, values))
    deviation = statistics.stdev(values) if finite else None
    return {"mean": statistics.fmean(values), "std": deviation, "values": list(values)}


def claims(outcomes: Outcomes, column: str) -> list[Record]:
    """The differences that matter, in points; without those that lack a side."""
    records = []
    rows = [row for row in outcomes.study.rows if row.name in outcomes.rows(column)]
    for claim in outcomes.study.claims:
        ours = [row.name for row in rows if _counts(claim, row, outcomes, column, ours=True)]
        others = [row.name for row in rows if _counts(claim, row, outcomes, column, ours=False)]
        if not ours or not others:
            continue
        best = _best(outcomes, ours, column)
        gaps = {name: gap for name in others if (gap := outcomes.difference(best, name, column)) is not None}
        if not gaps:
            continue
        # Ours is chosen on validation and the opponent on test data: the hardest fair comparison.
        hardest = min(gaps, key=lambda name: gaps[name].mean)
        gap = gaps[hardest]
        low, mean = 100 * gap.low, 100 * gap.mean
        met = None if claim.must is None else low > 0 if claim.must == 0 else mean >= claim.must
        records.append({
            "column": column, "claim": claim.title, "ours": best, "other": hardest, "seeds": gap.seeds, "points": mean,
            "low": low, "high": 100 * gap.high, "must": claim.must, "aim": claim.aim, "kept": met,
            "reached": None if claim.aim is None else mean >= claim.aim, "rivals": list(gaps),
        })  # fmt: skip
    return records


def _counts(claim: Claim, row: Row, outcomes: Outcomes, column: str, *, ours: bool) -> bool:
    """Whether a row is on a side of a claim: by its name, or by its kind and its FLOPs relative to the first row's."""
    names, most = (claim.ours, claim.ours_flops) if ours else (claim.others, claim.others_flops)
    if names:
        return row.name in names
    if (row.method == "pfedgate") != ours or row.control:
        return False
    if most is None:
        return True
    base = next((r for r in outcomes.study.rows if r.method == "fedavg"), None)
    flops = [spread(outcomes.values(name, column, FLOPS)) for name in (row.name, base.name if base else "")]
    return all(flops) and flops[0]["mean"] <= most * flops[1]["mean"] + 1e-9  # type: ignore[index]


FLOPS = Number("flops", "")


def _best(outcomes: Outcomes, names: Iterable[str], column: str) -> str:
    """The best of some rows on validation data, on the seeds that all of them have."""
    by_seed = {name: outcomes.by_seed(name, column, outcomes.study.validation) for name in names}
    shared = set.intersection(*({*values} for values in by_seed.values()))
    return max(by_seed, key=lambda name: statistics.fmean(by_seed[name][seed] for seed in shared) if shared else 0.0)


__all__ = ["VALIDATION", "Outcomes", "Place", "claims", "spread"]
