"""Inputs and gates that the tests of the gate share."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pfedgate.gating.gate.network import Gate, GateConfig, GateOutput

SHAPES: dict[str, tuple[int, ...]] = {
    "flat": (10,),
    "long flat": (300,),
    "sequence": (4, 20),
    "image": (3, 8, 8),
    "volume": (2, 4, 4, 4),
    "tokens": (12,),
}
BLOCKS, CLASSES = 9, 5


def batch(kind: str = "image", n: int = 6, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    shape = (n, *SHAPES[kind])
    if kind == "tokens":
        return torch.randint(1000, shape, generator=rng)
    contrast = 0.5 + torch.rand(n, *[1] * (len(shape) - 1), generator=rng)
    return torch.randn(shape, generator=rng) * contrast + contrast


def make_gate(config: GateConfig | None = None, kind: str = "image", seed: int = 0, **options: Any) -> Gate:
    options = {"model_size": 10**6, "classes": CLASSES, **options}
    rng = torch.Generator().manual_seed(seed)
    gate = Gate(batch(kind), BLOCKS, config, generator=rng, **options)
    if gate.config.scope == "client":
        gate.remember([batch(kind, seed=11), batch(kind, n=3, seed=12)])
    return gate


def weighed_loss(out: GateOutput) -> Tensor:
    rng = torch.Generator().manual_seed(7)
    return torch.stack([(t * torch.randn(t.shape, generator=rng)).sum() for t in out if t is not None]).sum()


def changed_entries(gate: Gate, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in gate.state_dict().items() if not torch.equal(value, before[name])}


def milliseconds(run: Any, x: Tensor) -> float:
    """In place of `latency._milliseconds`: what is measured must not decide whether a test passes."""
    if isinstance(run, partial):  # a gated model with its blocks forced
        return 1 + float(run.func.__self__.plan.live(run.args[0]).density)
    return 2.0
