"""Gated models under the tools of torch: compilation, mixed precision, checkpointing, several processes."""

from __future__ import annotations

import copy
import socket
from pathlib import Path

import pytest
import torch
from tests.support.zoo import build
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pfedgate
from pfedgate import GatedModel

NETWORKS = ("cnn_cifar10", "residual", "vit", "text_gru")


def random_gate(name: str) -> tuple[GatedModel, Tensor]:
    model, x = build(name)
    gate = {"max_share": 9.0, "pool": 1, "ranking": "random"}
    return pfedgate.gate(model, x, 0.5, gate=gate, generator=torch.Generator().manual_seed(0)).eval(), x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["cnn_cifar10", "residual"])
def test_a_compiled_gated_model_keeps_the_same_blocks(name: str, backend: str) -> None:
    gated, x = random_gate(name)
    y = gated(x)
    assert gated.last is not None
    kept = gated.last.kept
    assert torch.equal(torch.compile(gated, backend=backend)(x), y)
    assert (gated.last.kept == kept).all()


def test_a_compiled_module_is_gated_as_it_was_before() -> None:
    model, x = build("mlp")
    gated = pfedgate.gate(torch.compile(model, backend="eager"), x, 0.5)  # type: ignore[arg-type]
    assert gated.execution == "sliced"
    assert gated.model is model


@pytest.mark.parametrize("name", NETWORKS)
def test_autocast_and_half_precision_keep_the_same_blocks(name: str) -> None:
    gated, x = random_gate(name)
    y = gated(x)
    assert gated.last is not None
    kept = gated.last.kept
    with torch.autocast("cpu", torch.bfloat16):
        mixed = gated(x)
    assert (gated.last.kept == kept).all()
    assert torch.allclose(mixed.float(), y, atol=0.05 * float(y.detach().abs().max()))
    half = copy.deepcopy(gated).bfloat16()
    half.gate.float()  # as `gate` makes it for a model in half precision
    small = half(x.bfloat16() if x.is_floating_point() else x)
    assert small.dtype == torch.bfloat16
    assert half.last is not None
    assert half.last.density <= 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NETWORKS)
def test_models_in_half_precision_train_and_keep_to_their_budget(name: str, dtype: torch.dtype) -> None:
    model, x = build(name)
    x = x.to(dtype) if x.is_floating_point() else x
    gated = pfedgate.gate(model.to(dtype), x, 0.5, gate={"max_share": 9.0, "pool": 1})
    if dtype == torch.bfloat16:  # float16 without a scaled loss overflows, gated or not
        optimizer = gated.optimizer("sgd", lr=0.01, momentum=0.9)
        before = [p.detach().clone() for p in model.parameters()]
        gated(x).float().square().mean().backward()
        optimizer.step()
        assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert all(p.dtype == dtype and p.isfinite().all() for p in model.parameters())
    result = gated.verify(x)
    assert result["counted"] <= result["claimed"] + 1e-9 < 0.52 + gated.gate.flops / gated.plan.costs.dense()["flops"]


@pytest.mark.parametrize("name", ["cnn_cifar10", "residual"])
def test_a_checkpointed_gated_model_has_the_same_gradients(name: str) -> None:
    gated, x = random_gate(name)
    gradients = []
    for run in (gated, lambda x: checkpoint(gated, x, use_reentrant=False)):
        gated.zero_grad()
        run(x).square().sum().backward()
        gradients.append([p.grad for p in gated.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def together(rank: int, port: int, folder: str) -> None:
    """One of two processes that train the same gated model in step."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    gated = pfedgate.gate(model, (8, 16), 0.5, gate={"max_share": 9.0, "ranking": "random"})
    parallel = nn.parallel.DistributedDataParallel(gated)
    optimizer = gated.optimizer("sgd", lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)  # other data in each
    kept = []
    for _ in range(4):
        optimizer.zero_grad()
        parallel(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        assert gated.last is not None
        kept.append(torch.from_numpy(gated.last.kept))
    torch.save({"kept": torch.stack(kept), **gated.state_dict()}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_processes_in_step_choose_and_train_alike(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(together, (port, str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    trained = [name for name in one if not name.startswith("gate.") or name.endswith(("weight", "bias", "mixture"))]
    assert all(torch.equal(one[name], two[name]) for name in trained)
