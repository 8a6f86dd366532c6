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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pfedgate.gating.selection.costs import CostModel, Floats, Term
from pfedgate.gating.slicing.execute import Program, Sliced, cut
from pfedgate.gating.slicing.live import Bools

if TYPE_CHECKING:
    from pfedgate.gating.model import GatedModel

POINTS = 6  # shares of kept blocks that are measured, from all to none
REPEATS = 7


def latency_terms(gated: GatedModel, cache_dir: Path | None = None) -> tuple[Term, ...]:
    """Cost terms in milliseconds of forward and backward pass, gate included, on batches like the example.

    Measured on a copy of the model, or read from the cache when the same was measured on this device before.
    """
    plan = gated.plan
    if gated.execution != "sliced" or plan.wiring is None:
        raise ValueError(f"a latency budget needs execution that saves time, but: {gated.explain()}")
    twin: list[nn.Module] = []  # model and gate, copied only if there is something to measure

    def measure(counts: Sequence[int]) -> float:
        if not twin:
            twin.extend(module.train() for module in copy.deepcopy((gated.model, gated.gate)))
        mask = plan.keep.copy()
        start = 0
        for group, count in zip(plan.costs.groups, counts, strict=True):
            mask[plan.optional[start : start + count]] = True
            start += group.count
        return _milliseconds(Program(twin[0], plan, gated.compensate), twin[1], mask, plan.wiring.batch(gated.model))

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


def _milliseconds(program: Program, gate: Any, mask: Bools, x: Tensor) -> float:
    def now() -> float:
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
        return time.perf_counter()

    live = program.plan.live(mask)
    times = []
    for _ in range(REPEATS + 2):
        start = now()
        with torch.enable_grad():
            weights = gate.per_sample(x).weights.mean(0) * torch.from_numpy(mask).to(x.device)
            result = Sliced(program, live, weights, lambda name, p: cut(p, name, live))(x)
            sum(t.sum() for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad).backward()  # type: ignore[union-attr]
        times.append(now() - start)
        program.model.zero_grad()
        gate.zero_grad()
    return 1e3 * statistics.median(times[2:])


def profile(
    measure: Callable[[Sequence[int]], float], costs: CostModel, key: str, cache_dir: Path | None = None
) -> tuple[Term, ...]:
    """Latency terms for `costs`, from `measure`: milliseconds when these numbers of optional blocks stay per group.

    The coefficients are cached under `key`, which must name all that they depend on: device, threads, versions, batch
    size and model. `cache_dir` defaults to ``$PFEDGATE_CACHE`` or ``~/.cache/pfedgate/latency``.

    >>> from pfedgate.gating.selection.costs import Group
    >>> costs = CostModel((Group("hidden", 8, 2, 1, 6),), (Term("flops", 80.0, (0,)),))
    >>> folder = Path(tempfile.mkdtemp())
    >>> terms = profile(lambda counts: 2.0 + 0.5 * (2 + counts[0]), costs, "this laptop, one thread", folder)
    >>> [(term.groups, round(term.coef, 6)) for term in terms]
    [((), 2.0), ((0,), 4.0)]
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
        coefficients = _fit(np.array(shares), np.array(times))
        _save(path, key, coefficients)
    terms = [Term("latency_ms", coefficients[0])]
    for resource, milliseconds in zip(("flops", "activation_bytes"), coefficients[1:], strict=True):
        if milliseconds > 0 and dense.get(resource):
            scale = milliseconds / dense[resource]
            terms += [Term("latency_ms", t.coef * scale, t.groups) for t in costs.terms if t.resource == resource]
    return tuple(terms)


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
