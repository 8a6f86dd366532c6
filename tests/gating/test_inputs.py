"""Models that take more than one tensor: masks, keyword arguments, pairs; and what the gate reads of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.compare import check_sliced, gated_pair
from torch import Tensor, nn

import pfedgate
from pfedgate import Budget

WIDTH, STEPS = 32, 6


class Pair(nn.Module):
    """Tokens with a mask, and numbers beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.beside = nn.Embedding(50, WIDTH), nn.Linear(5, WIDTH)
        self.hidden, self.back, self.head = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.Linear(WIDTH, 4)

    def forward(
        self, ids: Tensor, mask: Tensor | None = None, numbers: Tensor | None = None, scale: float = 1.0
    ) -> dict[str, Any]:
        x = self.words(ids)
        if numbers is not None:
            x = x + self.beside(numbers)[:, None]
        x = x + self.back(F.gelu(self.hidden(x))) * scale
        weights = torch.ones_like(ids) if mask is None else mask
        pooled = (x * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
        return {"logits": self.head(pooled), "pooled": pooled}


def inputs(n: int = 3) -> dict[str, Any]:
    mask = torch.ones(n, STEPS)
    mask[0, 4:] = 0
    return {"ids": torch.randint(50, (n, STEPS)), "mask": mask.double(), "numbers": torch.randn(n, 5).double()}


class Together(nn.Module):
    """The same as a function of one batch, for the helper that compares."""

    def __init__(self, gated: pfedgate.GatedModel) -> None:
        super().__init__()
        self.gated = gated

    @property
    def last(self) -> Any:
        return self.gated.last

    def forward(self, x: dict[str, Any]) -> Any:
        return self.gated(**x)


def test_keyword_arguments_are_sliced_exactly() -> None:
    x = inputs()
    sliced, masked = gated_pair(Pair().double(), x, Budget(params=0.5, flops=0.5))  # type: ignore[arg-type]
    for training in (True, False):
        for gated in (sliced, masked):
            gated.train(training)
        for batch in (x, inputs(5), dict(reversed(inputs(4).items()))):
            check_sliced(Together(sliced), Together(masked), batch, out=1e-9, grad=1e-8)  # type: ignore[arg-type]
    assert sliced.verify(**x)["counted"] < 0.55


def test_arguments_by_place_may_be_a_tuple() -> None:
    x = inputs()
    gated = pfedgate.gate(Pair().double(), (x["ids"], x["mask"]), 0.7, gate={"pool": 1, "max_share": 10.0})
    assert gated(x["ids"], x["mask"])["logits"].shape == (3, 4)
    assert gated.execution == "sliced"


def test_other_inputs_than_those_of_the_example_are_refused() -> None:
    x = inputs()
    gated = pfedgate.gate(Pair().double(), {**x, "scale": 2.0}, 0.7, gate={"pool": 1, "max_share": 10.0})
    with pytest.raises(ValueError, match="wrapped for ids, mask, numbers, scale, and is given ids, mask"):
        gated(ids=x["ids"], mask=x["mask"])
    with pytest.raises(ValueError, match=r"captured with 2\.0 where it is given 3\.0"):
        gated(**x, scale=3.0)
    single = pfedgate.gate(Pair().double(), x["ids"], 0.7, gate={"pool": 1, "max_share": 10.0})
    with pytest.raises(TypeError, match="wrap it with an example of all"):
        single(x["ids"], x["mask"])


def test_the_gate_reads_tokens_or_what_features_makes() -> None:
    x = inputs()
    options: dict[str, Any] = {"gate": {"pool": 1, "max_share": 10.0}}
    assert pfedgate.gate(Pair().double(), x, 0.7, **options).gate.reader.tokens
    gated = pfedgate.gate(Pair().double(), x, 0.7, features=lambda ids, mask, numbers: numbers, **options)
    assert gated.gate.reader.kind == "flat"
    first, _ = gated.select(pfedgate.gating.inputs.given((), x))
    changed = {**x, "ids": (x["ids"] + 1) % 50}
    second, _ = gated.eval().select(pfedgate.gating.inputs.given((), changed))
    assert (first.kept == second.kept).all()


def test_copies_parts_and_compact_networks_of_them() -> None:
    x = inputs(4)
    gated = pfedgate.gate(Pair().double(), x, Budget(params=0.5), gate={"pool": 1, "max_share": 10.0}).eval()
    expected = gated(**x)["logits"]
    for twin in (copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))):
        assert torch.allclose(twin(**x)["logits"], expected)
    both = pfedgate.gating.inputs.given((), x)
    parts = [output["logits"] for _, output in gated.microbatches(both, 2)]
    assert torch.allclose(torch.cat(parts), expected)
    compact = pfedgate.compact(gated, both)
    results = compact(x["ids"], x["mask"], x["numbers"])
    assert torch.allclose(results["logits"], expected)
    assert sum(p.numel() for p in compact.parameters()) < 0.52 * gated.plan.size
