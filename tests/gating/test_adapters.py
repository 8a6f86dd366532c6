"""LoRA by `peft`: what it wraps is frozen, and gated all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pfedgate
from pfedgate import Budget


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 40), nn.Linear(40, 30), nn.Linear(30, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.b(torch.relu(self.a(x)))))


@pytest.mark.filterwarnings("ignore")
def test_wrapped_models_are_gated_and_their_frozen_parameters_never_step() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    model = peft.get_peft_model(Net(), peft.LoraConfig(r=4, target_modules=["a", "b"], lora_dropout=0.0)).double()
    x, y = torch.randn(16, 8, dtype=torch.float64), torch.randint(5, (16,))
    gated = pfedgate.gate(model, x, Budget(params=0.8), gate={"pool": 1, "max_share": 10.0})
    gated.eval()
    sliced = gated(x)
    assert gated.last is not None
    assert gated.last.density <= 0.8
    if gated.execution == "sliced":
        gated.execution = "masked"
        assert torch.allclose(gated(x), sliced, rtol=0, atol=1e-10)
        gated.execution = "sliced"
    before = {name: p.detach().clone() for name, p in gated.model.named_parameters()}
    optimizer = gated.train().optimizer("sgd", lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(gated(x), y).backward()
        optimizer.step()
    moved = {name for name, p in gated.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
