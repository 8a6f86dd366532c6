"""Law: a batch in parts has the gradient of the whole, of theta and of the gate, and the activations of a part."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pfedgate
from pfedgate import GatedModel, models
from pfedgate.core import measure

CLASSES = 62


def gated_cnn(samples: int, **options: Any) -> tuple[GatedModel, torch.Tensor, torch.Tensor]:
    """FEMNIST's network: its wide layer is copied when it is live, and the copy freed after each part."""
    torch.manual_seed(0)
    model = models.build("cnn_femnist", (1, 28, 28), CLASSES)
    x, y = torch.randn(samples, 1, 28, 28), torch.randint(CLASSES, (samples,))
    return pfedgate.gate(model, x, 0.5, gate={"shift": True}, **options), x, y


def whole_step(gated: GatedModel, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer = gated.optimizer("sgd", lr=0.1, gate_lr=0.1, momentum=0.9, clip=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(gated(x), y).backward()
        optimizer.step()


def step_in_parts(gated: GatedModel, x: torch.Tensor, y: torch.Tensor, size: int) -> None:
    optimizer = gated.optimizer("sgd", lr=0.1, gate_lr=0.1, momentum=0.9, clip=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        for rows, output in gated.microbatches(x, size):
            (F.cross_entropy(output, y[rows], reduction="sum") / len(x)).backward()
        optimizer.step()


@pytest.mark.parametrize("execution", ["sliced", "masked"])
@pytest.mark.parametrize("size", [1, 3, 4, 20])
def test_parts_have_the_gradient_of_the_whole(size: int, execution: str) -> None:
    gated, x, y = gated_cnn(10, execution=execution)
    twin = copy.deepcopy(gated)
    whole_step(gated, x, y)
    step_in_parts(twin, x, y, size)
    assert gated.gate.fc.weight.grad is not None
    for (name, a), b in zip(gated.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), name


def test_without_an_optimiser_gradients_are_in_the_parameters() -> None:
    gated, x, y = gated_cnn(6)
    twin = copy.deepcopy(gated)
    F.cross_entropy(gated(x), y).backward()
    for rows, output in twin.microbatches(x, 2):
        (F.cross_entropy(output, y[rows], reduction="sum") / len(x)).backward()
    for (name, a), b in zip(gated.named_parameters(), twin.parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6), name


def test_outputs_are_those_of_the_whole_batch_also_without_gradients() -> None:
    gated, x, _ = gated_cnn(7)
    with torch.no_grad():
        parts = [output for _, output in gated.microbatches(x, 3)]
        assert torch.allclose(torch.cat(parts), gated(x), atol=1e-5)


@given(st.integers(1, 50), st.integers(1, 60))
def test_parts_cover_the_batch_and_are_even(samples: int, size: int) -> None:
    gated = pfedgate.gate(nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 2)), (4, 8), 0.5,
                          gate={"max_share": 1.0})  # fmt: skip
    with torch.no_grad():
        found = [(rows.start, rows.stop) for rows, _ in gated.microbatches(torch.zeros(samples, 8), size)]
    lengths = [stop - start for start, stop in found]
    assert [row for start, stop in found for row in range(start, stop)] == list(range(samples))
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1
    assert len(lengths) == -(-samples // size)


def test_a_part_has_its_share_of_the_activations() -> None:
    """On a network whose activations are most of a step's memory."""
    model = models.build("cnn_cifar10", (3, 32, 32), 10)
    x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    gated = pfedgate.gate(model, x, 0.5)
    optimizer = gated.optimizer(lr=0.1)

    def peak(size: int) -> int:
        def step() -> None:
            optimizer.zero_grad()
            for rows, output in gated.microbatches(x, size):
                (F.cross_entropy(output, y[rows], reduction="sum") / len(x)).backward()
            optimizer.step()

        step()
        return measure.peak_bytes(step)

    assert peak(32) < 0.6 * peak(64)
    assert peak(16) < 0.4 * peak(64)


def test_what_cannot_be_split_is_said() -> None:
    gated, x, _ = gated_cnn(4)
    with pytest.raises(ValueError, match="at least one sample"):
        next(gated.microbatches(x, 0))
    with pytest.raises(ValueError, match="the batch is empty"):
        next(gated.microbatches(x[:0], 2))
    single = pfedgate.gate(models.build("cnn_digits"), (4, 1, 8, 8), 0.5, gate={"scope": "sample"})
    with pytest.raises(ValueError, match="every sample has its own blocks"):
        next(single.microbatches(torch.zeros(4, 1, 8, 8), 2))
