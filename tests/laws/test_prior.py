"""A client's own part of the task, for every method: frequencies of labels and a shift, which never leave it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.world import (
    ALGORITHMS,
    OPTIONS,
    Outcome,
    Reordered,
    Serialised,
    check_same,
    example,
    federation,
    go,
    private_digests,
    small_task,
)

from pfedgate.algorithms import get
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.modules import initial, module
from pfedgate.core.prior import SHIFT, Added, Own, log_frequencies
from pfedgate.core.types import Card, Local, Round, Task
from pfedgate.data import from_arrays
from pfedgate.engine.endpoint import Endpoint
from pfedgate.engine.processes import Processes
from pfedgate.engine.store import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:the gate has")
every = pytest.mark.parametrize("name", ALGORITHMS)
ALL = {"correction": "training", "shift": True, "classes": 3, "shift_lr": 0.2}
POINTS = ("after_broadcast", "after_local", "batch_1", "per_client")


def method(name: str, model: str = "plain", **care: Any) -> Algorithm:
    plain = example(name, model)
    return replace(plain, task=replace(plain.task, **care))


def skewed(seed: int = 0) -> Any:
    """Clients of whom each has one class far more often than the others."""
    x = torch.randn(8 * 40, 8, generator=torch.Generator().manual_seed(seed))
    owner = torch.arange(8).repeat_interleave(40)
    y = torch.where(
        torch.rand(len(x), generator=torch.Generator().manual_seed(seed + 1)) < 0.9, owner % 3, x.argmax(1) % 3
    )
    return from_arrays(x.numpy(), y.numpy(), owners=[f"c{at}" for at in owner.tolist()], novel=0.25, seed=seed)


@every
def test_order_workers_and_interruption_change_nothing(name: str, tmp_path: Path) -> None:
    options = replace(OPTIONS, evaluate_every=3, novel=True, points=("after_broadcast", "after_local"), stack=2)
    here = go(method(name, **ALL), options=options)
    check_same(here, go(method(name, **ALL), Reordered(federation()), options))
    there = go(method(name, **ALL), options=options, exchange=partial(Processes, workers=2))
    check_same(here, there)
    assert here.result.scores == there.result.scores
    go(method(name, **ALL), options=replace(options, rounds=2), folder=tmp_path / "cut")
    check_same(here, go(method(name, **ALL), options=options, folder=tmp_path / "cut", resume=True))
    assert private_digests(tmp_path / "cut") == here.private


@every
def test_frequencies_that_tell_nothing_change_nothing(name: str) -> None:
    """Clients with every class equally often: their correction is 0, and so is its effect, bit for bit."""
    x, y = torch.randn(8 * 30, 8, generator=torch.Generator().manual_seed(3)).numpy(), torch.arange(240).numpy() % 3
    fed = from_arrays(x, y, owners=[f"c{at}" for at in range(8) for _ in range(30)], novel=0.25, seed=3)
    for client in fed.ids:
        assert log_frequencies(fed.part(client, "train").y, 3).count_nonzero() == 0
    options = replace(OPTIONS, evaluate_every=1, novel=True, points=("after_broadcast", "after_local"), stack=0)
    plain = go(example(name), fed, options)
    for correction in ("prediction", "training"):
        other = go(method(name, correction=correction, classes=3), fed, options)
        check_same(plain, other)
        assert plain.result.scores == other.result.scores
        assert plain.result.novel == other.result.novel


@every
def test_at_prediction_alone_training_notices_nothing(name: str) -> None:
    options = replace(OPTIONS, evaluate_every=3)
    plain, other = (
        go(example(name), skewed(), options),
        go(method(name, correction="prediction", classes=3), skewed(), options),
    )
    check_same(plain, other)
    assert plain.result.scores != other.result.scores


@every
def test_nothing_of_it_is_sent(name: str) -> None:
    """No tensor of the client's part occurs in a message, byte for byte, and names and sizes stay what they were."""
    ups: dict[bool, list[bytes]] = {}
    for own in (False, True):
        messages: list[bytes] = ups.setdefault(own, [])

        def tap(client: str, direction: str, message: bytes, messages: list[bytes] = messages) -> None:
            messages.extend([message] if direction == "up" else [])

        algorithm = method(name, **ALL) if own else example(name)
        done = go(algorithm, skewed(), replace(OPTIONS, rounds=2), exchange=partial(Serialised, tap=tap))
    store = done.result.store
    assert store is not None
    sent = b"".join(ups[True])
    for client in store.clients():
        shift = (store.get(client) or {})[SHIFT]
        assert shift.count_nonzero()
        assert shift.numpy().tobytes() not in sent
        assert log_frequencies(skewed().part(client, "train").y, 3).float().numpy().tobytes() not in sent
    if name not in ("fedmask", "pfedgate"):  # whose masks depend on what is learnt
        assert list(map(len, ups[True])) == list(map(len, ups[False]))


@every
def test_it_helps_where_labels_differ(name: str) -> None:
    """Most of a client's labels are of one class, which a shared model cannot know."""
    options = replace(OPTIONS, rounds=1, sample=1.0, evaluate_every=1)
    before, after = (
        go(method(name, correction=correction, classes=3), skewed(), options).result.summary["accuracy"]
        for correction in ("none", "training")
    )
    assert after >= before - 0.05
    assert after > 0.8


def test_the_loss_adds_what_the_model_adds() -> None:
    """Also a component of a mixture, and the model's share beside neighbours: p ∝ softmax(h + added)."""
    fed, task = skewed(), replace(small_task(), **ALL)
    local = local_of(fed, task, "c1")
    own = Own(task, {SHIFT: torch.tensor([0.5, 0.0, -0.5])}, local)
    for name in ("fedavg", "fedem", "knn_per"):
        algorithm = get(name).example(task)
        mine = own.method(algorithm)
        got, private = algorithm.init_server(0), algorithm.init_client({}, local)
        model = own.model(mine, mine.predictor(got, private, local.card))
        x = local.prepare(local.train.x[:5])
        part = {key.removeprefix("0/"): value for key, value in got.items() if not key.startswith(("1/", "2/"))}
        plain = module(task, part)(x) + own.added
        if name == "fedem":
            one = replace(algorithm, components=1)
            model = own.method(one).predictor(got, {"pi": torch.ones(1)}, local.card)
        assert torch.allclose(model(x).softmax(-1), plain.softmax(-1), atol=1e-6)
        losses = mine.task.loss(module(task, part)(x), local.train.y[:5])
        assert torch.allclose(losses, -plain.log_softmax(-1).gather(1, local.train.y[:5, None])[:, 0], atol=1e-5)


def local_of(fed: Any, task: Task, client: str) -> Local:
    endpoint = Endpoint(get("fedavg").example(task), fed, MemoryStore())
    return endpoint.local(Card(client, fed.part(client, "train").n), Round(seed=3))


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedper", "pfedgate"])
def test_a_shift_learns_at_its_own_rate(name: str) -> None:
    def shifts(lr: float) -> dict[str, torch.Tensor]:
        algorithm = method(name, shift=True, classes=3, shift_lr=lr)
        return _shifts(go(algorithm, skewed(), replace(OPTIONS, rounds=2, sample=1.0)))

    still, learnt = shifts(0.0), shifts(0.3)
    assert all(not shift.count_nonzero() for shift in still.values())
    assert all(int(shift.argmax()) == int(client[1:]) % 3 for client, shift in learnt.items())


def _shifts(done: Outcome) -> dict[str, torch.Tensor]:
    store = done.result.store
    assert store is not None
    return {client: (store.get(client) or {})[SHIFT] for client in store.clients()}


def test_hidden_layers_start_larger_and_outputs_do_not() -> None:
    task = small_task()
    plain, large = initial(task, 0), initial(replace(task, initial_scale=1.4), 0)
    for name, value in plain.items():
        assert torch.equal(large[name], value if name.startswith("out") else value * 1.4), name
    norms = small_task("norms")
    assert all(
        torch.equal(a, b)
        for a, b in zip(initial(norms, 0).values(), initial(replace(norms, initial_scale=2.0), 0).values(), strict=True)
    )


@every
def test_own_epochs_have_a_rate_and_a_number_of_their_own(name: str) -> None:
    """At rate 0 they change nothing (buffers and masks aside); training itself never notices."""
    options = replace(OPTIONS, evaluate_every=3, points=("after_broadcast", "after_local"))
    usual = go(example(name), options=options)
    for care in ({"local_lr": 0.001, "local_epochs": 3}, {"local_lr": 0.0}):
        other = go(method(name, **care), options=options)
        check_same(usual, other)
        scores = {(s.client, s.point): s.test for s in other.result.scores}
        if care["local_lr"] == 0.0 and name not in CHANGES_WITHOUT_A_RATE and not get(name).tunes:
            for client in {client for client, _ in scores}:
                assert scores[client, "after_local"] == scores[client, "after_broadcast"]


# Distillation, masks, mixtures and statistics of gates are made anew in every round, whatever the rate.
CHANGES_WITHOUT_A_RATE = {"fedmd", "fedmask", "fedem", "pfedme", "pfedhn", "mean_reg_mtl", "pfedgate", "pfedfda"}


def test_points_of_a_gate_differ_and_of_others_do_not() -> None:
    options = replace(OPTIONS, evaluate_every=3, points=POINTS)

    def losses(name: str) -> dict[str, float]:
        return {point: go(example(name), options=options).result.history[-1][point]["loss"] for point in POINTS}

    gate, plain = losses("pfedgate"), losses("fedavg")
    assert len({gate[point] for point in ("after_broadcast", "batch_1", "per_client")}) == 3
    assert len({plain[point] for point in ("after_broadcast", "batch_1", "per_client")}) == 1


def test_a_wrapped_model_says_what_the_model_says() -> None:
    class Counts(torch.nn.Identity):
        def stats(self) -> dict[str, float]:
            return {"density": 0.5}

    assert Added(Counts(), torch.zeros(3)).stats() == {"density": 0.5}
    assert Added(torch.nn.Identity(), torch.zeros(3)).stats() == {}
