"""Law 4: with the whole model and M = 1 the gated model is the wrapped one, bit for bit; wrapping changes nothing."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.compare import loss
from tests.support.zoo import OURS, SMALL, build
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import pfedgate
from pfedgate import GateConfig

ONES = GateConfig(init="ones", pool=1, max_share=10.0)


def outputs_and_gradients(module: nn.Module, x: Tensor) -> tuple[list[Any], dict[str, Tensor]]:
    module.zero_grad()
    y = module(x)
    torch.autograd.backward(loss(y))
    return tree_leaves(y), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def check_identical(model: nn.Module, x: Tensor, **options: Any) -> None:
    alone, model = copy.deepcopy(model), copy.deepcopy(model)
    gated = pfedgate.gate(model, x, 1.0, gate=ONES, **options)
    for training in (True, False):
        alone.train(training)
        gated.train(training)
        (y, grads), (z, found) = outputs_and_gradients(alone, x), outputs_and_gradients(gated, x)
        assert all(torch.equal(a, b) for a, b in zip(y, z, strict=True))
        for name, grad in grads.items():
            assert torch.equal(grad, found[f"model.{name}"]), name
        for (name, a), (_, b) in zip(alone.named_buffers(), gated.model.named_buffers(), strict=True):
            assert torch.equal(a, b), name
        with torch.no_grad():  # attention has a path of its own for inference
            assert all(torch.equal(a, b) for a, b in zip(tree_leaves(alone(x)), tree_leaves(gated(x)), strict=True))
    assert gated.last is not None
    assert gated.last.density == 1.0


@pytest.mark.parametrize("name", [*OURS, *SMALL])
def test_whole_model_with_weights_of_one(name: str) -> None:
    check_identical(*build(name))


@pytest.mark.parametrize("name", ["cnn_cifar10", "resnet"])
def test_channels_last(name: str) -> None:
    model, x = build(name)
    check_identical(model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("split", ["flat", "channel", "head"])
def test_other_splitters(split: str) -> None:
    check_identical(*build("cnn_cifar10"), split=split)


def test_masked() -> None:
    check_identical(*build("resnet"), execution="masked")


def test_large_batch_scales_weights_instead_of_results() -> None:
    model, _ = build("mlp")
    check_identical(model, torch.randn(100, 64))


@pytest.mark.parametrize("name", ["resnet", "text_gru", "shared"])
def test_state_dict_goes_back_into_the_plain_model(name: str) -> None:
    model, x = build(name)
    keys = list(model.state_dict())
    plain = copy.deepcopy(model)
    gated = pfedgate.gate(model, x, 0.5, gate={"max_share": 9.0, "pool": 1})
    optimizer = gated.optimizer(lr=0.1)
    loss(gated(x)).backward()
    optimizer.step()
    state = gated.model.state_dict()
    assert list(state) == keys
    assert plain.load_state_dict(state).missing_keys == []
    x = x[:1]
    gated.model.eval()
    assert torch.equal(plain.eval()(x), gated.model(x))
    assert {key.partition(".")[0] for key in gated.state_dict()} == {"model", "gate"}


def picture(model: nn.Module) -> dict[str, Any]:
    """All that a caller could notice of a module."""
    found: dict[str, Any] = {}
    for place, module in model.named_modules():
        found[place] = (type(module), id(module), module.training, sorted(vars(module)))
        for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks"):
            found[f"{place}/{table}"] = len(getattr(module, table))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[f"{name} tensor"] = (id(tensor), tensor._version, tensor.requires_grad, tensor.detach().clone().tolist())
        found[f"{name} grad"] = tensor.grad
    return found


@pytest.mark.parametrize("name", ["residual", "lstm", "attention", "two_results", "not_zero"])
@pytest.mark.parametrize("split", ["unit", "flat"])
def test_wrapping_leaves_the_model_and_random_numbers_alone(name: str, split: str) -> None:
    model, x = build(name)
    model.train()
    next(iter(model.children())).eval()
    before, example = picture(model), x.clone()
    state, others, numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()
    generator = torch.Generator().manual_seed(1)
    gated = pfedgate.gate(model, x, 1.0, split=split, generator=generator, gate={"max_share": 9.0})
    assert picture(model) == before
    assert torch.equal(x, example)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == others
    assert str(np.random.get_state()) == str(numbers)
    assert gated.model is model
    again = pfedgate.gate(
        model, x, 1.0, split=split, generator=torch.Generator().manual_seed(1), gate={"max_share": 9.0}
    )
    for key, value in gated.gate.state_dict().items():
        assert torch.equal(value, again.gate.state_dict()[key]), key


def test_running_the_gated_model_leaves_no_trace_but_statistics() -> None:
    model, x = build("cnn_cifar10")
    before = picture(model)
    gated = pfedgate.gate(model, x, 0.3)
    with torch.no_grad():
        gated(x)
    assert picture(model) == before
