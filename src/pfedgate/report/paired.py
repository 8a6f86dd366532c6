"""The difference of two methods, with an interval over seeds and clients: what a table says instead of bold type.

Seeds are other partitions of the data and other initial models, so methods are compared seed by seed and client by
client. The interval is Student's over seeds. It is never narrower than clients alone make it: a few seeds that happen
to agree prove nothing about other clients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from pfedgate.runs.folder import Run

Clients = Mapping[str, tuple[float, float]]  # client -> (test samples, accuracy)


@dataclass(frozen=True)
class Difference:
    """A mean difference of accuracy, weighted by test samples, and its 95 % interval."""

    mean: float
    low: float
    high: float
    seeds: int
    clients: int

    def __str__(self) -> str:
        low, high = 100 * self.low, 100 * self.high
        return f"{100 * self.mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def paired(ours: Mapping[int, Clients], others: Mapping[int, Clients]) -> Difference | None:
    """Ours minus others on the seeds that both have; None if there is none.

    With one seed the interval is over clients alone, and says nothing about other seeds.

    >>> ours = {0: {"a": (10, 0.9), "b": (10, 0.7)}, 1: {"a": (10, 0.8), "b": (10, 0.8)}}
    >>> str(paired(ours, {seed: {"a": (10, 0.7), "b": (10, 0.7)} for seed in ours}))
    '+10.00 [-53.53, +73.53]'
    """
    means, errors, count = [], [], 0
    for seed in sorted({*ours} & {*others}):
        pairs = [(n, a - others[seed][c][1]) for c, (n, a) in ours[seed].items() if n and c in others[seed]]
        total = math.fsum(n for n, _ in pairs)
        if not total:
            continue
        mean = math.fsum(n * gap for n, gap in pairs) / total
        spread = math.fsum((n * (gap - mean)) ** 2 for n, gap in pairs) / total**2
        means.append(mean)
        errors.append(spread * len(pairs) / max(1, len(pairs) - 1))
        count += len(pairs)
    if not means:
        return None
    seeds, mean = len(means), statistics.fmean(means)
    variance = statistics.fmean(errors) / seeds
    if seeds > 1:
        variance = max(variance, statistics.variance(means) / seeds)
    freedom = seeds - 1 if seeds > 1 else count - 1
    half = student(freedom) * math.sqrt(variance) if freedom else math.inf
    return Difference(mean, mean - half, mean + half, seeds, count)


def student(freedom: int) -> float:
    """The factor of a 95 % interval with so many degrees of freedom.

    >>> round(student(4), 2), round(student(1000), 2)
    (2.78, 1.96)
    """
    from scipy import stats  # slow to load

    return float(stats.t.ppf(0.975, freedom))


def scores(run: Run, point: str = "after_broadcast") -> Clients:
    """Every client's score, its accuracy or another main metric, after the last round."""
    rows = (row for row in run.clients if row["point"] == point and row["n_test"])
    return {row["client"]: (row["n_test"], row[run.metric.name]) for row in rows}
