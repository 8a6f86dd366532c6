from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.test_local import MLP, Noisy, Samples

from pfedgate.core.modules import initial
from pfedgate.core.types import Card, Local, Optim, Round, Task
from pfedgate.models import build
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
