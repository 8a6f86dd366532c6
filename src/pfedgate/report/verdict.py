"""The two sentences that a report begins with: what was learnt, and how sure that is.

Runs that differ in their seed only are one contender, others are one each. Only contenders on the same data and of the
same length are compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Content = Mapping[str, Any]


class Contender(NamedTuple):
    """A setting with its runs, one for each seed, in the order of seeds."""

    name: str
    runs: Sequence[Content]
    league: Any  # contenders of one league can be compared; None: in no league

    def mean(self, key: str) -> float | None:
        """A number of the summary over seeds; None if a run does not have it."""
        values = [run["summary"].get(key) for run in self.runs]
        return None if None in values else statistics.fmean(values)


def sentences(contenders: Sequence[Contender]) -> list[str]:
    """What was learnt, and how sure; nothing before the first evaluation."""
    scored = [c for c in contenders if c.league is not None and c.mean("accuracy") is not None]
    if not scored:
        return []
    if len(scored) == 1:
        return list(_alone(scored[0]))
    if len({c.league for c in scored}) > 1:
        return ["These runs are on different data or of different length, so that none is better than another."]
    metric = _metric(scored[0])
    ranked = sorted(scored, key=lambda c: (-1 if metric["higher"] else 1) * (c.mean("accuracy") or 0))
    best, second = ranked[:2]
    gap, name = _score(best) - _score(second), metric["name"]
    if round(100 * gap, 1) if metric["times"] == 100 else gap:
        most = "highest" if metric["higher"] else "lowest"
        first = f"{best.name} ends with the {most} {name}, {_show(best)}, {_points(gap, metric)} {second.name}"
    else:
        first = f"{best.name} and {second.name} end with the same {name}, {_show(best)}"
    return [_so_far(scored) + f"{first}{_cheapest(ranked)}.", _sure(best, second)]


def percent(value: float) -> str:
    """One digit behind the point: more is never sure.

    >>> percent(0.8523)
    '85.2 %'
    """
    return f"{100 * value:.1f} %"


def _score(contender: Contender) -> float:
    return contender.mean("accuracy") or 0.0


def _metric(contender: Contender) -> Content:
    """The main metric: its name, what it is multiplied with, whether more is better."""
    metric: Content = contender.runs[0].get("metric", {"name": "accuracy", "times": 100, "higher": True})
    return metric


def _show(contender: Contender) -> str:
    score = _score(contender)
    return percent(score) if _metric(contender)["times"] == 100 else f"{score:.4g}"


def _points(gap: float, metric: Content) -> str:
    amount = f"{abs(100 * gap):.1f} points" if metric["times"] == 100 else f"{abs(gap):.4g}"
    return f"{amount} {'above' if gap >= 0 else 'below'}"


def _so_far(contenders: Sequence[Contender]) -> str:
    return "" if all(run["finished"] for c in contenders for run in c.runs) else "So far, "


def _cheapest(ranked: Sequence[Contender]) -> str:
    """What the least compute costs in accuracy; nothing where all compute about the same."""
    flops = {c.name: c.mean("flops") for c in ranked}
    if None in flops.values() or not all(flops.values()):
        return ""
    best, least = ranked[0], min(ranked, key=lambda c: flops[c.name] or 0)
    most = max(ranked, key=lambda c: flops[c.name] or 0)
    saved = (flops[least.name] or 0) / (flops[best.name if least is not best else most.name] or 1)
    if saved > 0.95:
        return ""
    if least is best:
        return f"; it also computes least, {saved:.2f} of the FLOPs of {most.name}"
    if least is ranked[1]:
        return f", which computes {saved:.2f} of its FLOPs"
    return f"; {least.name}, {_points(_score(least) - _score(best), _metric(best))}, computes {saved:.2f} of its FLOPs"


def _alone(only: Contender) -> tuple[str, str]:
    run = only.runs[0]
    summary, samples = run["summary"], sum(row["n"] for row in run["clients"])
    accuracy, decile = _score(only), only.mean("bottom_decile")
    metric = _metric(only)
    share, name = metric["times"] == 100, metric["name"]
    shown = "" if decile is None else percent(decile) if share else f"{decile:.4g}"
    worst = "" if decile is None else f", and {shown} for the client at the worst tenth"
    amount = f"{_show(only)} {name}" if share else f"{name} {_show(only)}"
    first = f"{only.name} ends with {amount} over {summary.get('clients', 0)} clients{worst}."
    if len(only.runs) > 1:
        deviation = statistics.stdev([one["summary"]["accuracy"] for one in only.runs])
        moved = f"{100 * deviation:.1f} points" if share else f"{deviation:.4g}"
        return first, f"Over {len(only.runs)} seeds the {name} deviates by {moved}."
    if not samples:
        return _so_far([only]) + first, "How sure that is shows when the run has ended."
    if name != "accuracy":
        return _so_far([only]) + first, f"These are {samples} test samples and one seed, and another moves the number."
    chance = 1.96 * math.sqrt(accuracy * (1 - accuracy) / samples)
    return (
        _so_far([only]) + first,
        f"These are {samples} test samples and one seed: the choice of samples alone moves the number by up to "
        f"{100 * chance:.1f} points (95 %), and another seed moves it, too.",
    )


def _sure(best: Contender, second: Contender) -> str:
    """The interval of the first two's difference: over seeds if there are some, else over clients."""
    seeds = min(len(best.runs), len(second.runs))
    if seeds > 1:
        scores = [[run["summary"]["accuracy"] for run in c.runs] for c in (best, second)]
        gaps = [ours - theirs for ours, theirs in zip(*scores, strict=False)]
        mean, half = interval(gaps, [1.0] * len(gaps))
        return f"Over {seeds} seeds {_range(best, second, mean, half)}."
    theirs = {row["client"]: row for row in second.runs[0]["clients"] if row.get("accuracy") is not None}
    both = [row for row in best.runs[0]["clients"] if row.get("accuracy") is not None and row["client"] in theirs]
    if len(both) < 2:
        return "How sure that is shows when the runs have ended."
    gaps = [row["accuracy"] - theirs[row["client"]]["accuracy"] for row in both]
    mean, half = interval(gaps, [row["n"] for row in both])
    return (
        f"Over the {len(both)} clients {_range(best, second, mean, half)}; "
        "this is one seed, and another may change the order."
    )


def _range(best: Contender, second: Contender, mean: float, half: float) -> str:
    share = _metric(best)["times"] == 100
    ends = (f"{100 * end:+.1f}" if share else f"{end:+.4g}" for end in (mean - half, mean + half))
    low, high = (end.replace("-", "−") for end in ends)
    chance = "it may be chance" if abs(mean) <= half else "it is more than chance"
    both, unit = f"{best.name} and {second.name}", " points" if share else ""
    return f"the difference between {both} is {low} to {high}{unit} (95 % interval): {chance}"


def interval(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """The weighted mean and half the width of its 95 % interval, by Student's t.

    >>> mean, half = interval([0.1, 0.2, 0.3], [1, 1, 1])
    >>> round(mean, 3), round(half, 3)
    (0.2, 0.248)
    """
    from scipy.stats import t

    n, total = len(values), sum(weights)
    shares = [weight / total for weight in weights]
    mean = sum(share * value for share, value in zip(shares, values, strict=True))
    spread = sum((share * (value - mean)) ** 2 for share, value in zip(shares, values, strict=True))
    return mean, float(t.ppf(0.975, n - 1)) * math.sqrt(spread * n / (n - 1))
