"""Latency as a resource: a few measurements on this device become cost terms.

``latency_ms = t0 + tF * share of FLOPs + tA * share of activation bytes`` with non-negative coefficients: a fixed part
(the gate, the always-dense layers, the overhead of every call), a part that computes and a part that moves memory. The
fit is scaled up until no measured point is above it, so that a budget holds at every point that was measured.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pfedgate.gating.selection.budget import Budget, InfeasibleBudget
from pfedgate.gating.selection.costs import CostModel, Floats, Term

if TYPE_CHECKING:
    from pfedgate.gating.model import GatedModel

POINTS = 6  # shares of kept blocks that are measured, from all to none
REPEATS = 7
TRIES = 6  # selections that are measured for a speedup


def latency_terms(gated: GatedModel, cache_dir: Path | None = None) -> tuple[tuple[Term, ...], float]:
    """Cost terms in milliseconds of forward and backward pass, gate included, on batches like the example.

    Also the milliseconds of the dense model. Measured on a copy of the model, or read from the cache when the same was
    measured on this device before.
    """
    plan = gated.plan
    if gated.execution != "sliced" or plan.wiring is None:
        raise ValueError(f"a latency budget needs execution that saves time, but: {gated.explain()}")
    twin: list[GatedModel] = []  # a copy, made only if there is something to measure

    def measure(counts: Sequence[int] | None) -> float:
        if not twin:
            twin.append(copy.deepcopy(gated).train())
        if counts is None:
            return _milliseconds(twin[0].model, plan.wiring.batch(gated.model))
        mask = plan.keep.copy()
        start = 0
        for group, count in zip(plan.costs.groups, counts, strict=True):
            mask[plan.optional[start : start + count]] = True
            start += group.count
        return _milliseconds(partial(twin[0].forced, mask), plan.wiring.batch(gated.model))

    parameter = next(gated.model.parameters())
    device = parameter.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    terms = sorted((t.resource, t.coef, t.groups) for t in plan.costs.terms if t.resource != "latency_ms")
    layout = repr((plan.costs.groups, terms, sorted(plan.shapes.items())))
    depends_on = {
        "device": f"{device.type} {name} {platform.node()}",
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "dtype": str(parameter.dtype),
        "batch": list(plan.wiring.shape),
        "gate": gated.gate.size,
        "plan": hashlib.sha256(layout.encode()).hexdigest(),
    }
    return profile(measure, plan.costs, json.dumps(depends_on, sort_keys=True), cache_dir)


def as_fast(gated: GatedModel, budget: Budget) -> Budget:
    """A budget in milliseconds under which the gated model is measured to be `budget.speedup` times the dense one.

    The fit says where to begin; what is measured then, in turn with the dense model, says how far it is off.
    """
    assert budget.speedup is not None
    plan, twin = gated.plan, copy.deepcopy(gated).train()
    x, limit = plan.wiring.batch(gated.model), plan.costs.dense_ms / budget.speedup
    most = plan.costs.dense()["latency_ms"]
    best = 0.0
    for _ in range(TRIES):
        bound = min(limit, most)
        if bound < plan.costs.smallest()["latency_ms"]:
            break
        found = replace(budget, speedup=None, latency_ms=bound)
        twin.selector = plan.selector(found)
        dense, sparse = _in_turn((twin.model, twin), x)
        best = max(best, dense / sparse)
        if dense / sparse >= budget.speedup:
            return found
        limit = bound * min(0.95, dense / sparse / budget.speedup)
    raise InfeasibleBudget(
        f"a speedup of {budget.speedup:g} is out of reach on this device with this batch: "
        + (f"measured {best:.2f} at most. " if best else "the fitted latency of what is always kept is above it. ")
        + "Ask for less, keep less always (smallest=...), or use larger batches: the gate costs every batch the same",
        {"latency_ms": plan.costs.smallest()["latency_ms"]},
    )


def _milliseconds(run: Callable[[Tensor], Any], x: Tensor) -> float:
    return _in_turn((run,), x)[0]


def _in_turn(runs: Sequence[Callable[[Tensor], Any]], x: Tensor) -> list[float]:
    """Median milliseconds of a forward and backward pass of each, called in turn: others of the machine slow all."""

    def now() -> float:
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
        return time.perf_counter()

    times: list[list[float]] = [[] for _ in runs]
    with torch.enable_grad():
        for _ in range(REPEATS + 2):
            for run, each in zip(runs, times, strict=True):
                start = now()
                result = run(x)
                sum(t.sum() for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad).backward()  # type: ignore[union-attr]
                each.append(now() - start)
    return [1e3 * statistics.median(each[2:]) for each in times]


def profile(
    measure: Callable[[Sequence[int] | None], float], costs: CostModel, key: str, cache_dir: Path | None = None
) -> tuple[tuple[Term, ...], float]:
    """Latency terms for `costs`, from `measure`: milliseconds when these numbers of optional blocks stay per group.

    Also those of the dense model without a gate, `measure(None)`.

    The coefficients are cached under `key`, which must name all that they depend on: device, threads, versions, batch
    size and model. `cache_dir` defaults to ``$PFEDGATE_CACHE`` or ``~/.cache/pfedgate/latency``.

    >>> from pfedgate.gating.selection.costs import Group
    >>> costs = CostModel((Group("hidden", 8, 2, 1, 6),), (Term("flops", 80.0, (0,)),))
    >>> folder = Path(tempfile.mkdtemp())
    >>> terms, dense = profile(lambda k: 2 + 0.5 * (2 + k[0]) if k else 5.0, costs, "this laptop, one thread", folder)
    >>> [(term.groups, round(term.coef, 6)) for term in terms], dense
    ([((), 2.0), ((0,), 4.0)], 5.0)
    """
    folder = cache_dir or os.environ.get("PFEDGATE_CACHE") or Path.home() / ".cache" / "pfedgate" / "latency"
    path = Path(folder) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    dense = costs.dense()
    coefficients = _load(path, key)
    if coefficients is None:
        # The same share of the optional blocks of every group, from all to none.
        steps = [
            tuple(round(float(share) * group.count) for group in costs.groups)
            for share in np.linspace(1.0, 0.0, POINTS)
        ]
        shares, times = [], []
        for counts in dict.fromkeys(steps):
            milliseconds, cost = measure(counts), costs.cost(counts)
            if not math.isfinite(milliseconds) or milliseconds <= 0:
                raise ValueError(f"a measured latency must be positive, got {milliseconds!r} ms at counts {counts}")
            times.append(float(milliseconds))
            shares.append([1.0, *(cost[r] / dense[r] if dense.get(r) else 0.0 for r in ("flops", "activation_bytes"))])
        coefficients = [*_fit(np.array(shares), np.array(times)), measure(None)]
        _save(path, key, coefficients)
    terms = [Term("latency_ms", coefficients[0])]
    for resource, milliseconds in zip(("flops", "activation_bytes"), coefficients[1:3], strict=True):
        if milliseconds > 0 and dense.get(resource):
            scale = milliseconds / dense[resource]
            terms += [Term("latency_ms", t.coef * scale, t.groups) for t in costs.terms if t.resource == resource]
    return tuple(terms), coefficients[3]


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


def _load(path: Path, key: str) -> list[float] | None:
    """The cached coefficients; None if there are none or the file is not one of ours (it is then measured anew)."""
    try:
        stored = json.loads(path.read_text())
        values = [float(value) for value in stored["milliseconds"]]
        valid = stored["key"] == key and len(values) == 4 and all(math.isfinite(v) and v >= 0 for v in values)
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
