from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.test_local import MLP, Noisy, Samples
from torch import nn

from pfedgate.algorithms.fedavg import FedAvg
from pfedgate.core.modules import initial
from pfedgate.core.state import floating, form
from pfedgate.core.types import Card, Local, Optim, Round, Task, Update
from pfedgate.models import build
from pfedgate.training import stacked
from pfedgate.training.fit import fit
from pfedgate.training.stacked import fit_many, group_size, stackable


def clients(sizes: list[int], index: int = 1) -> list[Local]:
    return [Local(Card(f"c{at}", n), Samples(n, at), Samples(0), Round(index)) for at, n in enumerate(sizes)]


@given(
    st.lists(st.integers(0, 23), min_size=1, max_size=6),
    st.sampled_from([Optim(), Optim(clip=0.05), Optim("adamw", lr=0.01), Optim(momentum=0, weight_decay=0)]),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([None, 5]),
)
def test_stacked_is_one_by_one(sizes: list[int], optim: Optim, epochs: int, drop: bool, steps: int | None) -> None:
    """Ragged clients, the empty one included, in any order: the same batches, the same result."""
    task = Task(MLP, optim=optim, batch=7, epochs=epochs, drop_last=drop, steps=steps)
    states = [initial(task, at) for at in range(len(sizes))]
    together = fit_many(task, states, clients(sizes))
    for state, local, many in zip(states, clients(sizes), together, strict=True):
        one = fit(task, state, local)
        for name, value in one.state.items():
            torch.testing.assert_close(many.state[name], value, atol=1e-5, rtol=1e-4)
        assert (many.steps, many.samples, many.flops) == (one.steps, one.samples, one.flops)
        assert many.loss == pytest.approx(one.loss, rel=1e-4, nan_ok=True)


class Twice(nn.Module):
    """A layer that is used twice, one with a norm, one without bias, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(5, 16), nn.Linear(16, 16)
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 10, bias=False)
        self.spare = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        hidden = self.again(self.first(x.flatten(1)).tanh()).relu()
        logits: torch.Tensor = self.out(self.norm(self.again(hidden)))
        return logits


class Scaled(nn.Module):
    """A parameter outside any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 10), nn.Parameter(torch.ones(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.layer(x.flatten(1)) * self.scale
        return logits


class Centred(nn.Module):
    """Samples of a batch that see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.layer((x - x.mean(0)).flatten(1))
        return logits


@pytest.mark.parametrize(("model", "mapped"), [(Twice, 1), (Scaled, 2), (Centred, 3)])
def test_any_forward_pass_is_stacked_right(
    model: type[nn.Module], mapped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side where a layer holds every parameter and samples are alone, by vmap elsewhere."""
    calls: list[Any] = []
    made = stacked.vmap

    def counted(function: Any) -> Any:
        each = made(function)
        return lambda *given: calls.append(None) or each(*given)

    monkeypatch.setattr(stacked, "vmap", counted)
    stacked._gradients.cache_clear()
    task = Task(model, optim=Optim(clip=0.5), batch=5)
    states = [initial(task, at) for at in range(3)]
    together = fit_many(task, states, clients([10, 10, 10]))
    for state, local, many in zip(states, clients([10, 10, 10]), together, strict=True):
        for name, value in fit(task, state, local).state.items():
            torch.testing.assert_close(many.state[name], value, atol=1e-5, rtol=1e-4)
    stacked._gradients.cache_clear()
    assert len(calls) == mapped, "the first batch is compared; of two batches none, or both, are left to vmap"


def test_a_stacked_update_is_the_vector_that_it_says() -> None:
    algorithm = FedAvg(Task(MLP, batch=7))
    state = initial(algorithm.task, 0)
    for update, _ in algorithm.train_many([state, state], [{}, {}], clients([9, 12])):
        plain = Update(dict(update.shared), update.weight)
        assert form(update) == form(plain)
        assert [*floating(update)[0]] == [*floating(plain)[0]]
        known, found = floating(update)[1], floating(plain)[1]
        assert known is not None
        assert found is not None
        assert torch.equal(known, found)


def test_given_states_are_not_changed() -> None:
    task = Task(MLP, batch=7)
    state = initial(task, 0)
    fit_many(task, [state, state], clients([9, 12]))
    assert all(torch.equal(value, initial(task, 0)[name]) for name, value in state.items())


def test_which_models_are_stacked() -> None:
    assert stackable(partial(build, "mlp", (64,), 10))
    assert not stackable(partial(build, "mlp", (64,), 10, dropout=0.1))
    assert not stackable(Noisy)
    assert not stackable(partial(build, "cnn_cifar10"))
    assert not stackable(partial(build, "mlp", (784,), 10, hidden=(200,)))


def test_groups_depend_on_the_model_alone() -> None:
    small, large = Task(MLP), Task(partial(build, "mlp", (64,), 10, hidden=(256,)))
    assert group_size(small) == 256
    assert 2 <= group_size(large) < 256
    assert group_size(replace(large, batch=1)) == group_size(large)
