"""From scores of clients to the numbers of a table."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pfedgate.engine.endpoint import Scored

Record = dict[str, Any]


def summarise(scores: Sequence[Scored]) -> Record:
    """Numbers over clients: accuracy weighted by test size, bottom decile, spread, validation, statistics.

    Bottom decile: the accuracy at 0-based index ⌊C/10⌋ of the ascending list (the paper says "the ⌊C/10⌋-th
    worst", its code and this take the next one). Spread: standard deviation over clients. Clients without
    test data do not count.
    """
    tested = [s for s in scores if s.test.n]
    checked = [s for s in scores if s.val.n]
    accuracies = sorted(s.test.accuracy for s in tested)
    mean = math.fsum(accuracies) / len(accuracies) if accuracies else math.nan
    spread = math.fsum((a - mean) ** 2 for a in accuracies) / len(accuracies) if accuracies else math.nan
    record: Record = {
        "clients": len(tested),
        "accuracy": _mean([(s.test.n, s.test.accuracy) for s in tested]),
        "loss": _mean([(s.test.n, s.test.loss) for s in tested]),
        "bottom_decile": accuracies[len(accuracies) // 10] if accuracies else math.nan,
        "spread": math.sqrt(spread),
        "val_accuracy": _mean([(s.val.n, s.val.accuracy) for s in checked]),
        "val_loss": _mean([(s.val.n, s.val.loss) for s in checked]),
    }
    for name in sorted({name for s in scores for name in s.stats}):
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


def rounds_to(share: float, curve: Sequence[tuple[int, float | None]]) -> int | None:
    """The first round whose accuracy reaches this share of the best one.

    >>> rounds_to(0.9, [(1, 0.3), (2, 0.55), (3, 0.6)])
    2
    """
    best = max((value for _, value in curve if value is not None), default=math.nan)
    return next((round for round, value in curve if value is not None and value >= share * best), None)


def overall(history: Sequence[Record]) -> Record:
    """The last lines of a run: final and best-on-validation accuracy, rounds to 80/90 %, totals."""
    summary: Record = {"rounds": len(history)}
    evaluated = [record for record in history if "after_broadcast" in record]
    if evaluated:
        scores = {record["round"]: record["after_broadcast"] for record in evaluated}
        last, best = evaluated[-1]["after_broadcast"], best_round(history)
        at_best = last if best is None else scores[best]
        summary |= {name: value for name, value in last.items() if not name.startswith("val_")}
        summary |= {"best_round": best, "best_accuracy": at_best["accuracy"]}
        summary["best_bottom_decile"] = at_best["bottom_decile"]
        curve = [(round, score["accuracy"]) for round, score in scores.items()]
        summary["rounds_to_80"], summary["rounds_to_90"] = rounds_to(0.8, curve), rounds_to(0.9, curve)
        if "after_local" in evaluated[-1]:
            summary["accuracy_after_local"] = evaluated[-1]["after_local"]["accuracy"]
    for name in ("bytes_up", "bytes_down", "flops", "refused"):
        summary[name] = sum(record.get(name) or 0 for record in history)
    for name in ("q", "density"):
        values = [record[name] for record in history if record.get(name) is not None]
        if values:
            summary[f"{name}_training"] = math.fsum(values) / len(values)
    return summary


def best_round(history: Sequence[Record]) -> int | None:
    """The round with the best validation accuracy (the earliest of equals); never looks at test."""
    best: tuple[float, int] | None = None
    for record in history:
        value = record.get("after_broadcast", {}).get("val_accuracy")
        if value is not None and (best is None or value > best[0]):
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
