"""Sliced against masked: outputs, gradients of theta and phi, and running statistics."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import pfedgate
from pfedgate import GatedModel
from pfedgate.gating.gate.network import GateOutput


def gated_pair(
    model: nn.Module, x: Tensor, budget: Any, seed: int = 0, **options: Any
) -> tuple[GatedModel, GatedModel]:
    """The same gated model twice, sliced and masked."""
    generator = torch.Generator().manual_seed(seed)
    # A small gate also for small networks, where a warning would otherwise say that it is relatively large.
    # Random choices: live blocks with gaps between them.
    small = {"pool": 1, "max_share": 10.0, "ranking": "random"}
    options = {"execution": "sliced", "straight_through": "kept", "gate": small, **options}
    sliced = pfedgate.gate(model, x, budget, generator=generator, **options)
    masked = copy.deepcopy(sliced)
    masked.execution = "masked"
    return sliced, masked


def pretend(gated: GatedModel, importance: Any, weights: Any = None) -> None:
    """Make the gate say what a test wants; it still runs, so that its cost counts."""
    own = type(gated.gate).forward

    def forward(x: Tensor) -> GateOutput:
        out = own(gated.gate, x)
        said = torch.as_tensor(importance).to(out.importance)
        return GateOutput(out.weights if weights is None else torch.as_tensor(weights).to(out.weights), said, out.shift)

    gated.gate.forward = forward  # type: ignore[method-assign]


def loss(result: Any) -> Tensor:
    """Weighs every output differently."""
    generator = torch.Generator().manual_seed(1)
    tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    return sum((t * torch.randn(t.shape, generator=generator).to(t)).sum() for t in tensors)  # type: ignore[return-value]


def distance(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Relative difference, of vectors; `floor` keeps rounding noise of a vanishing gradient from counting."""
    a, b = a.detach(), b.detach()
    scale = max(float(b.norm()), floor)
    return float((a - b).norm()) / scale if scale else float((a - b).norm())


def check_sliced(sliced: GatedModel, masked: GatedModel, x: Tensor, *, out: float = 1e-5, grad: float = 1e-4) -> None:
    results = []
    for gated in (sliced, masked):
        gated.zero_grad()
        y = gated(x)
        torch.autograd.backward(loss(y))
        results.append(y)
    assert sliced.last is not None
    assert masked.last is not None
    assert (sliced.last.kept == masked.last.kept).all(), "the two chose different blocks"
    for a, b in zip(tree_leaves(results[0]), tree_leaves(results[1]), strict=True):
        assert a.shape == b.shape
        assert distance(a, b) <= out, f"outputs differ by {distance(a, b)}"
    for gated in (sliced, masked):
        for parameter in gated.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
    pairs = list(zip(sliced.named_parameters(), masked.named_parameters(), strict=True))
    total = torch.cat([q.grad.flatten() for _, (_, q) in pairs if q.grad is not None]).norm().item()
    for (name, p), (_, q) in pairs:
        if q.grad is None or p.grad is None:
            assert q.grad is None or not q.grad.any(), name
            assert p.grad is None or not p.grad.any(), name
        else:
            found = distance(p.grad, q.grad, floor=1e-3 * total)
            assert found <= grad, f"gradients of {name} differ by {found}"
    for (name, p), (_, q) in zip(sliced.named_buffers(), masked.named_buffers(), strict=True):
        assert torch.allclose(p.double(), q.double(), rtol=1e-5, atol=1e-6), name
