"""From scores of clients to the numbers of a table."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pfedgate.core.kinds import METRICS, Metric
from pfedgate.engine.endpoint import Scored

Record = dict[str, Any]
ACCURACY = METRICS["accuracy"]


def summarise(scores: Sequence[Scored], metrics: Sequence[Metric] = (ACCURACY,)) -> Record:
    """Numbers over clients: the main metric weighted by test size, bottom decile, spread, validation, statistics.

    Bottom decile: the score at 0-based index ⌊C/10⌋ of the list that begins with the worst (the paper says "the
    ⌊C/10⌋-th worst", its code and this take the next one). Spread: standard deviation over clients. Clients without
    test data do not count.
    """
    tested = [s for s in scores if s.test.n]
    checked = [s for s in scores if s.val.n]
    main, *others = metrics
    ranked = sorted((s.test.score for s in tested), reverse=not main.higher)
    worst = ranked[: -(-len(ranked) // 10)]
    mean = math.fsum(ranked) / len(ranked) if ranked else math.nan
    spread = math.fsum((a - mean) ** 2 for a in ranked) / len(ranked) if ranked else math.nan
    record: Record = {
        "clients": len(tested),
        main.name: _mean([(s.test.n, s.test.score) for s in tested]),
        "loss": _mean([(s.test.n, s.test.loss) for s in tested]),
        "bottom_decile": ranked[len(ranked) // 10] if ranked else math.nan,
        "worst_tenth": math.fsum(worst) / len(worst) if worst else math.nan,
        "spread": math.sqrt(spread),
        f"val_{main.name}": _mean([(s.val.n, s.val.score) for s in checked]),
        "val_loss": _mean([(s.val.n, s.val.loss) for s in checked]),
    }
    for at, metric in enumerate(others):
        record[metric.name] = _mean([(s.test.n, s.test.more[at]) for s in tested])
        record[f"val_{metric.name}"] = _mean([(s.val.n, s.val.more[at]) for s in checked])
    for name in sorted({name for s in scores for name in s.stats} - record.keys()):
        record[name] = _mean([(1, s.stats[name]) for s in scores if name in s.stats])
    return clean(record)  # type: ignore[no-any-return]


def clean(value: Any) -> Any:
    """None instead of NaN and infinity, which JSON does not have, at any depth.

    >>> clean({"a": math.nan, "b": 1.0, "c": {"d": [math.inf, 2]}})
    {'a': None, 'b': 1.0, 'c': {'d': [None, 2]}}
    """
    if isinstance(value, dict):
        return {name: clean(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return list(map(clean, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    weight = math.fsum(w for w, _ in pairs)
    return math.fsum(w * v for w, v in pairs) / weight if weight else math.nan


def rounds_to(
    share: float, curve: Sequence[tuple[int, float | None]], metric: Metric = ACCURACY, best: float | None = None
) -> int | None:
    """The first round whose score reaches this share of the best one (or of another `best`, common to several runs).

    >>> rounds_to(0.9, [(1, 0.3), (2, 0.55), (3, 0.6)]), rounds_to(0.9, [(1, 0.3), (2, 0.55)], best=0.9)
    (2, None)
    """
    values = [value for _, value in curve if value is not None]
    if not values:
        return None
    target = (metric.best(values) if best is None else best) * (share if metric.higher else 1 / share)
    return next((round for round, v in curve if v is not None and (v == target or metric.better(v, target))), None)


def overall(history: Sequence[Record], metric: Metric = ACCURACY) -> Record:
    """The last lines of a run: final and best-on-validation score, rounds to 80/90 %, totals."""
    summary: Record = {"rounds": len(history)}
    if metric.name != "accuracy":  # so that readers of the summary know what to look for
        summary |= {"metric": metric.name, "higher": metric.higher}
    evaluated = [record for record in history if "after_broadcast" in record]
    if evaluated:
        scores = {record["round"]: record["after_broadcast"] for record in evaluated}
        last, best = evaluated[-1]["after_broadcast"], best_round(history, metric)
        at_best = last if best is None else scores[best]
        summary |= {name: value for name, value in last.items() if not name.startswith("val_")}
        summary |= {"best_round": best, f"best_{metric.name}": at_best[metric.name]}
        summary["best_bottom_decile"] = at_best["bottom_decile"]
        curve = [(round, score[metric.name]) for round, score in scores.items()]
        summary["rounds_to_80"], summary["rounds_to_90"] = rounds_to(0.8, curve, metric), rounds_to(0.9, curve, metric)
        if "after_local" in evaluated[-1]:
            summary[f"{metric.name}_after_local"] = evaluated[-1]["after_local"][metric.name]
    for name in ("bytes_up", "bytes_down", "flops", "refused"):
        summary[name] = sum(record.get(name) or 0 for record in history)
    for name in ("q", "density"):
        values = [record[name] for record in history if record.get(name) is not None]
        if values:
            summary[f"{name}_training"] = math.fsum(values) / len(values)
    return summary


def best_round(history: Sequence[Record], metric: Metric = ACCURACY) -> int | None:
    """The round with the best validation score (the earliest of equals); never looks at test."""
    best: tuple[float, int] | None = None
    for record in history:
        value = record.get("after_broadcast", {}).get(f"val_{metric.name}")
        if value is not None and (best is None or metric.better(value, best[0])):
            best = (value, record["round"])
    return None if best is None else best[1]


def means(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of the numbers that came with updates, by name; FLOPs are summed."""
    columns: dict[str, list[float]] = {}
    for numbers in updates:
        for name, value in numbers.items():
            columns.setdefault(name, []).append(float(value))
    record = {}
    for name, values in sorted(columns.items()):
        record[name] = math.fsum(values) / (1 if name == "flops" else len(values))
    return clean(record)  # type: ignore[no-any-return]


def resident_bytes() -> int:
    """The most memory this process ever held, code and libraries included (`measure.peak_bytes`: tensors of a call)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
