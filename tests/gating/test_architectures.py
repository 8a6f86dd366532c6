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


def test_a_table_says_what_is_not_sliced(zoo: Any) -> None:
    row = {
        "execution": "sliced", "front end": "export", "gate": 0.01, "sliced": {"params": 0.9, "flops": 0.8},
        "smallest": {"params": 0.1, "flops": 0.2}, "s=0.5": {"flops": 0.49, "error": 1e-7},
        "s=0.3": {"infeasible": "too small"},
    }  # fmt: skip
    rows = {"timm/one": row, "timm/two": {"failed": "TypeError: a | b"}}
    page = zoo.table(rows)
    assert "1 of 2 are sliced (at least half of their FLOPs), 1 of them feasible at s = .5." in page
    assert "| one | export | 80% (90%) | 0.20 | 0.49 | – |" in page
    assert "| two | fails | TypeError: a / b |" in page
    assert torch.is_tensor(zoo.loss({"logits": torch.ones(2), "state": None}))
