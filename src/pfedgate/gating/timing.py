"""How long a step takes on this device with so many blocks kept: what a latency budget is measured by."""

from __future__ import annotations

import copy
import hashlib
import json
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pfedgate.gating.latency import profile
from pfedgate.gating.selection.costs import Term
from pfedgate.gating.slicing.execute import Program, Sliced, cut
from pfedgate.gating.slicing.live import Bools

if TYPE_CHECKING:
    from pfedgate.gating.model import GatedModel

REPEATS = 7


def latency_terms(gated: GatedModel, cache_dir: Path | None = None) -> tuple[Term, ...]:
    """Cost terms in milliseconds of forward and backward pass, gate included, on batches like the example.

    Measured on a copy of the model, or read from the cache when the same was measured on this device before.
    """
    plan = gated.plan
    if gated.execution != "sliced" or plan.recipe is None:
        raise ValueError(f"a latency budget needs execution that saves time, but: {gated.explain()}")
    twin: list[nn.Module] = []  # model and gate, copied only if there is something to measure

    def measure(kept: Sequence[int]) -> float:
        if not twin:
            twin.extend(part.train() for part in copy.deepcopy((gated.model, gated.gate)))
        mask = plan.keep.copy()
        start = 0
        for group, count in zip(plan.costs.groups, kept, strict=True):
            mask[plan.optional[start : start + count]] = True
            start += group.count
        return _milliseconds(Program(twin[0], plan, gated.compensate), twin[1], mask, _batch(gated))

    return profile(measure, plan.costs, _key(gated), cache_dir)


def _milliseconds(program: Program, gate: Any, kept: Bools, x: Tensor) -> float:
    live = program.plan.live(kept)
    times = []
    for _ in range(REPEATS + 2):
        start = _now(x.device)
        with torch.enable_grad():
            weights = gate.per_sample(x).weights.mean(0) * torch.from_numpy(kept).to(x.device)
            result = Sliced(program, live, weights, lambda name, p: cut(p, name, live))(x)
            sum(t.sum() for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad).backward()  # type: ignore[union-attr]
        times.append(_now(x.device) - start)
        program.model.zero_grad()
        gate.zero_grad()
    return 1e3 * statistics.median(times[2:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _batch(gated: GatedModel) -> Tensor:
    recipe, device = gated.plan.recipe, next(gated.model.parameters()).device
    dtype = recipe.dtype_for(gated.model)
    if not dtype.is_floating_point:
        return torch.zeros(recipe.shape, dtype=dtype, device=device)
    noise = torch.randn(recipe.shape, generator=torch.Generator().manual_seed(0))
    return noise.to(device, dtype)


def _key(gated: GatedModel) -> str:
    """All that a measured time depends on."""
    plan, parameter = gated.plan, next(gated.model.parameters())
    device = parameter.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    terms = sorted((t.resource, t.coef, t.groups) for t in plan.costs.terms if t.resource != "latency_ms")
    layout = repr((plan.costs.groups, terms, sorted(plan.shapes.items())))
    return json.dumps(
        {
            "device": f"{device.type} {name} {platform.node()}",
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "dtype": str(parameter.dtype),
            "batch": list(plan.recipe.shape),
            "gate": gated.gate.size,
            "plan": hashlib.sha256(layout.encode()).hexdigest(),
        },
        sort_keys=True,
    )


__all__ = ["latency_terms"]
