"""Architectures of libraries, by the command that measures all of them (benchmarks/zoo.py), on small configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import zoo

    zoo.vision_library()
    return zoo


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "convnext"])
def test_transformers(zoo: Any, name: str) -> None:
    pytest.importorskip("transformers", reason="pip install pfedgate[zoo]")
    row = zoo.measure(f"transformers/{name}", quick=True)
    assert row["execution"] == "sliced"
    assert zoo.usable(row)
    for share in zoo.BUDGETS:
        cell = row[f"s={share}"]
        assert "infeasible" in cell or (cell["flops"] <= share + 0.02 and cell["error"] < 1e-5)


def test_the_command_has_sixty_architectures_or_more(zoo: Any) -> None:
    assert len(list(zoo.architectures())) >= 60
    model, x = zoo.build("torch/transformer_encoder")
    assert model(x).shape == (4, 16, 64)


def test_a_small_architecture_is_sliced_exactly_within_its_budget(zoo: Any) -> None:
    row = zoo.measure("torch/gru", quick=True)
    assert zoo.usable(row)
    assert all(cell["error"] < zoo.WRONG for cell in zoo.cells(row))
    assert all(cell["flops"] <= share + 0.02 for cell, share in zip(zoo.cells(row), zoo.BUDGETS, strict=True))


def test_a_table_says_what_is_not_sliced_and_what_is_not_measured(zoo: Any) -> None:
    row = {
        "execution": "sliced", "front end": "export", "gate": 0.01, "sliced": {"params": 0.9, "flops": 0.8},
        "smallest": {"params": 0.1, "flops": 0.2}, "s=0.5": {"flops": 0.49, "error": 1e-3},
        "s=0.3": {"infeasible": "too small"}, "commit": "abc",
    }  # fmt: skip
    page = zoo.table(
        {
            "timm/one": row,
            "timm/two": {"failed": "TypeError: a | b", "commit": "abc"},
            "timm/three": {"execution": "masked", "reason": "why", "commit": "def"},
        }
    )
    assert "2 rows at abc, 1 rows at def" in page
    assert f"{len(zoo.architectures()) - 3} of {len(zoo.architectures())} architectures have no row yet" in page
    assert "1 have a wrong output" in page
    assert "0 are masked without a reason, and 1 end in an" in page
    assert "| timm | 3 | 1 | 1 |" in page
    assert "| one | export | 80% (90%) | 0.20 | 0.49 | – |" in page
    assert "| two | fails at abc | TypeError: a / b |" in page
    assert "| three | masked at def | why |" in page
    assert torch.is_tensor(zoo.loss({"logits": torch.ones(2), "state": None}))
