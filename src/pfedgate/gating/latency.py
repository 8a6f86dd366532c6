"""Latency as a resource: a few measurements on this device become cost terms.

``latency_ms = t0 + tF * share of FLOPs + tA * share of activation bytes`` with non-negative coefficients: a fixed part
(the gate, the always-dense layers, the overhead of every call), a part that computes and a part that moves memory. The
fit is scaled up until no measured point is above it, so that a budget holds at every point that was measured.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pfedgate.gating.selection.costs import CostModel, Floats, Term

POINTS = 6  # kept shares from all to none


def profile(
    measure: Callable[[Sequence[int]], float], costs: CostModel, key: str, cache_dir: Path | None = None
) -> tuple[Term, ...]:
    """Latency terms for `costs`, from `measure`: milliseconds when these numbers of optional blocks stay per group.

    The coefficients are cached under `key`, which must name all that they depend on: device, threads, versions, batch
    size and model. `cache_dir` defaults to ``$PFEDGATE_CACHE`` or ``~/.cache/pfedgate/latency``.

    >>> from pfedgate.gating.selection.costs import Group
    >>> costs = CostModel((Group("hidden", 8, 2, 1, 6),), (Term("flops", 80.0, (0,)),))
    >>> folder = Path(tempfile.mkdtemp())
    >>> terms = profile(lambda kept: 2.0 + 0.5 * (2 + kept[0]), costs, "this laptop, one thread", folder)
    >>> [(term.groups, round(term.coef, 6)) for term in terms]
    [((), 2.0), ((0,), 4.0)]
    """
    path = _folder(cache_dir) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    coefficients = _load(path, key)
    if coefficients is None:
        kept = _points(costs)
        times = np.array([_checked(measure(counts), counts) for counts in kept])
        coefficients = _fit(np.array([_shares(costs, counts) for counts in kept]), times)
        _save(path, key, coefficients)
    return _terms(costs, coefficients)


def _points(costs: CostModel) -> list[tuple[int, ...]]:
    """The same share of the optional blocks of every group, from all to none."""
    shares = np.linspace(1.0, 0.0, POINTS)
    kept = [tuple(round(float(share) * group.count) for group in costs.groups) for share in shares]
    return list(dict.fromkeys(kept))


def _shares(costs: CostModel, kept: Sequence[int]) -> list[float]:
    cost, dense = costs.cost(kept), costs.dense()
    return [1.0, *(cost[r] / dense[r] if dense.get(r) else 0.0 for r in ("flops", "activation_bytes"))]


def _checked(milliseconds: float, kept: Sequence[int]) -> float:
    if not math.isfinite(milliseconds) or milliseconds <= 0:
        raise ValueError(f"a measured latency must be positive, got {milliseconds!r} ms at counts {tuple(kept)}")
    return float(milliseconds)


def _fit(shares: Floats, times: Floats) -> list[float]:
    """Non-negative least squares on relative errors, then scaled so that no measured time is above the fit.

    With three columns every subset can be tried: the best fit whose coefficients are not negative is the solution.
    """
    best, error = np.zeros(shares.shape[1]), math.inf
    weighted = shares / times[:, None]
    for size in range(1, shares.shape[1] + 1):
        for columns in itertools.combinations(range(shares.shape[1]), size):
            solution = np.linalg.lstsq(weighted[:, columns], np.ones(len(times)), rcond=None)[0]
            residual = float(((weighted[:, columns] @ solution - 1.0) ** 2).sum())
            if (solution >= 0).all() and residual < error - 1e-15:
                best, error = np.zeros(shares.shape[1]), residual
                best[list(columns)] = solution
    short = float((times / (shares @ best)).max())
    return [float(value) for value in best * max(1.0, short)]


def _terms(costs: CostModel, coefficients: Sequence[float]) -> tuple[Term, ...]:
    dense = costs.dense()
    terms = [Term("latency_ms", coefficients[0])]
    for resource, milliseconds in zip(("flops", "activation_bytes"), coefficients[1:], strict=True):
        if milliseconds > 0 and dense.get(resource):
            scale = milliseconds / dense[resource]
            terms += [Term("latency_ms", t.coef * scale, t.groups) for t in costs.terms if t.resource == resource]
    return tuple(terms)


def _folder(cache_dir: Path | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    root = os.environ.get("PFEDGATE_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "pfedgate" / "latency"


def _load(path: Path, key: str) -> list[float] | None:
    """The cached coefficients; None if there are none or the file is not one of ours (it is then measured anew)."""
    try:
        stored = json.loads(path.read_text())
        values = [float(value) for value in stored["milliseconds"]]
        valid = stored["key"] == key and len(values) == 3 and all(math.isfinite(v) and v >= 0 for v in values)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return values if valid else None


def _save(path: Path, key: str, coefficients: Sequence[float]) -> None:
    """Written beside and renamed: a reader in another process sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"key": key, "milliseconds": list(coefficients)}, file)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
