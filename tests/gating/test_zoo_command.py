"""The command that measures architectures, on small ones: rows, and the page that is made of them."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import zoo


def row(architecture: str) -> dict[str, Any]:
    return zoo.measure(architecture, quick=True)


@pytest.mark.filterwarnings("ignore")
def test_a_small_architecture_is_sliced_exactly_within_its_budget() -> None:
    measured = row("torch/gru")
    assert zoo.usable(measured)
    assert all(cell["error"] < zoo.WRONG for cell in zoo.cells(measured))
    assert all(cell["flops"] <= share + 0.02 for cell, share in zip(zoo.cells(measured), zoo.BUDGETS, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_an_architecture_of_hugging_face() -> None:
    pytest.importorskip("transformers", reason="the extra zoo is not installed")
    assert zoo.usable(row("transformers/resnet"))


def test_the_page_counts_what_it_lists() -> None:
    rows: dict[str, dict[str, Any]] = {
        "torch/gru": {
            "commit": "abc", "execution": "sliced", "front end": "fx", "gate": 0.01,
            "sliced": {"flops": 1, "params": 1}, "smallest": {"flops": 0.1, "params": 0.1},
            "s=0.5": {"flops": 0.5, "error": 1e-3}, "s=0.3": {"flops": 0.3},
        },
        "torch/lstm": {"commit": "abc", "execution": "masked", "reason": "why | not"},
        "timm/resnet": {"commit": "def", "failed": "KeyError: 'x'"},
    }  # fmt: skip
    page = zoo.table(rows)
    assert "2 rows at abc, 1 rows at def" in page
    assert f"{len(zoo.architectures()) - 3} of {len(zoo.architectures())} architectures have no row yet" in page
    assert "1 have a wrong output" in page
    assert "0 are masked without a reason, and 1 end in an" in page
    assert "| torch | 2 | 1 | 1 |" in page
    assert "why / not" in page
