"""Measured costs are the same every time."""

import torch
from torch import nn

from pfedgate.core import measure


def test_what_a_call_frees_of_others_makes_its_peak_no_smaller() -> None:
    model, x = nn.Linear(200, 300), torch.randn(50, 200)

    def step() -> None:
        model.zero_grad()  # frees what the last step left
        model(x).sum().backward()

    peaks = {measure.peak_bytes(step) for _ in range(4)}
    assert len(peaks) == 1
    assert peaks.pop() >= 4 * (200 * 300 + 50 * 300)  # gradients, and what the layer writes


def test_the_peak_is_not_the_sum() -> None:
    def turns() -> None:
        for _ in range(10):
            torch.ones(1000, 100)

    assert 4e5 <= measure.peak_bytes(turns) < 9e5
