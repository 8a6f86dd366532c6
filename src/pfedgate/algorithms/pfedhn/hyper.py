"""A hypernetwork as plain functions over a State: vectors in, all parameters of a model out."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from pfedgate.core.state import flat
from pfedgate.core.types import Optim, State
from pfedgate.training.steppers import Stepper


def new_hyper(model: State, vector: int, hidden: list[int], spread: float, rng: torch.Generator) -> State:
    """A hypernetwork whose models start around `model`.

    Every parameter differs from the given one by about `spread` times the spread of the tensor it belongs to.

    >>> hyper = new_hyper({"w": torch.arange(4.0)}, 3, [5], 0.0, torch.Generator())
    >>> generate(hyper, torch.randn(3)).tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    hyper: State = {}
    widths = [vector, *hidden]
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        bound = (3 / inputs) ** 0.5 * 2**0.5  # He: the size of what passes through stays the same
        hyper[f"{layer}.weight"] = torch.empty(outputs, inputs).uniform_(-bound, bound, generator=rng)
        hyper[f"{layer}.bias"] = torch.zeros(outputs)
    sizes = [float(value.std(correction=0)) or 0.01 for value in model.values()]
    scale = torch.cat([torch.full((v.numel(),), size) for v, size in zip(model.values(), sizes, strict=True)])
    last = torch.randn(len(scale), widths[-1], generator=rng) * (spread * widths[-1] ** -0.5)
    return {**hyper, "out.weight": last * scale[:, None], "out.bias": flat(model).clone()}


def settled(hyper: State) -> State:
    """The same, with the same bits of results wherever it came from: names in order, memory aligned.

    A product of matrix and vector is rounded otherwise where the matrix begins in the middle of a cache line, as it may
    when it was read from a file or is a piece of a longer vector.
    """
    return {name: v if v.data_ptr() % 64 == 0 else v.clone() for name, v in sorted(hyper.items())}


def generate(hyper: State, vector: Tensor) -> Tensor:
    """H(v): all parameters of a model, one after the other."""
    for layer in range(len(hyper) // 2 - 1):
        vector = torch.relu(F.linear(vector, hyper[f"{layer}.weight"], hyper[f"{layer}.bias"]))
    return F.linear(vector, hyper["out.weight"], hyper["out.bias"])


def pull_back(hyper: State, vector: Tensor, difference: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of H (as one vector) and of v: the vector-Jacobian product of `generate` with `difference`."""
    leaves = {name: value.detach().requires_grad_() for name, value in hyper.items()}
    v = vector.detach().requires_grad_()
    *of_hyper, of_vector = torch.autograd.grad(generate(leaves, v), [*leaves.values(), v], difference)
    return torch.cat([gradient.reshape(-1) for gradient in of_hyper]), of_vector


def descend(value: Tensor, gradient: Tensor, optim: Optim, slots: State) -> tuple[Tensor, State]:
    """One step of an optimiser: the new value, and its buffers for the next one."""
    moved, stepper = value.clone(), Stepper(optim, slots=slots)
    stepper.clip(gradient)
    stepper.step(moved, gradient)
    return moved, stepper.slots()
