"""pFedGate with layers of the client's own: FedPer and LG-FedAvg when gates are one; they never travel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pfedgate import algorithms, data, models
from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms.pfedgate import PFedGate
from pfedgate.algorithms.pfedgate.tiles import BLOCKS
from pfedgate.core.mergers import merge
from pfedgate.core.modules import initial
from pfedgate.core.state import clone, equal, flat, inside, pick
from pfedgate.core.types import Card, Local, Optim, Round, Task
from pfedgate.engine import server as engine
from pfedgate.engine import wire

FIRST, REST = ("conv1",), ("conv2", "fc1", "out")


@pytest.fixture(scope="module")
def federation() -> data.Federation:
    return data.load("digits", clients=5, samples=400)


@pytest.fixture(scope="module")
def task(federation: data.Federation) -> Task:
    model = partial(models.build, "cnn_digits", federation.input_shape, federation.classes)
    return _task(model, federation)


def _task(model: Any, federation: data.Federation) -> Task:
    example = federation.prepare(federation.part(federation.clients[0], "train").x[:8])
    return Task(model=model, example=example, optim=Optim(lr=0.05, momentum=0.9, weight_decay=5e-4), batch=32)


def make(task: Task, **options: Any) -> PFedGate:
    algorithm = algorithms.build("pfedgate", task, **options)
    assert isinstance(algorithm, PFedGate)
    return algorithm


def local(federation: data.Federation, client: int = 0, budget: float = 0.5) -> Local:
    name = federation.clients[client]
    train, val = federation.part(name, "train"), federation.part(name, "val")
    return Local(Card(name, train.n, budget), train, val, Round(), prepare=federation.prepare)


@pytest.mark.parametrize(
    ("other", "options", "own"),
    [("fedper", {}, ("out",)), ("lg_fedavg", {"global_part": REST}, "first")],
    ids=["FedPer", "LG-FedAvg"],
)
def test_with_gates_of_one_it_is_the_method_with_that_part_private(
    task: Task, federation: data.Federation, other: str, options: dict[str, Any], own: Sequence[str]
) -> None:
    how = engine.Options(rounds=3, sample=0.6, budget=1.0)
    plain = engine.run(algorithms.build(other, task, **options), federation, how)
    gated = engine.run(make(task, own=own, gate_lr=0.0, gate_ones=True), federation, how)
    assert equal(plain.server, gated.server)
    assert plain.store is not None
    assert gated.store is not None
    seen = 0
    for client in federation.clients:
        theirs, ours = plain.store.get(client), gated.store.get(client)
        if theirs and ours:
            assert equal(inside(parts.OWN, theirs), inside(parts.OWN, ours)), client
            seen += 1
    assert seen


@pytest.mark.parametrize("options", [{}, {"upload": 0.2}, {"half": True}, {"microbatches": 2}], ids=str)
def test_own_layers_are_trained_kept_and_never_sent(
    task: Task, federation: data.Federation, options: dict[str, Any]
) -> None:
    algorithm, one = make(task, own="first", **options), local(federation)
    server = algorithm.init_server(0)
    assert not any(name.startswith("conv1.") for name in server)
    private = algorithm.init_client(server, one)
    assert equal(inside(parts.OWN, private), pick(initial(task, 0), ["conv1.weight", "conv1.bias"]))
    update, after = algorithm.train(server, private, one)
    kept = inside(parts.OWN, after)
    assert set(kept) == {"conv1.weight", "conv1.bias"}
    assert not torch.equal(kept["conv1.weight"], private["own/conv1.weight"])
    message = wire.encode(update, client=one.card.id, round=0)
    for value in kept.values():
        assert value.numpy().tobytes() not in message
    assert algorithm.check(server, update) is None
    merged = merge(algorithm.merger(server, Round()), iter([(one.card, update)]))
    assert set(merged) == set(server)
    model = algorithm.predictor(merged, after, one.card)
    assert equal(pick(dict(model.gated.model.state_dict()), list(kept)), kept)


def test_what_is_sent_is_what_was_live_of_the_rest(task: Task, federation: data.Federation) -> None:
    """The same blocks as without own layers in the first step; only that their tiles are not counted."""
    algorithm, one = make(task, own="first"), local(federation)
    server = algorithm.init_server(0)
    update, _ = algorithm.train(server, algorithm.init_client(server, one), one)
    personal = algorithm._workspace()
    moved = (personal.vector(algorithm._own) != flat(pick(server, algorithm.names))).nonzero()[:, 0]
    assert set(algorithm.tiles.owner[moved].tolist()) <= set(update.shared[BLOCKS].tolist())
    own = sum(initial(task, 0)[name].numel() for name in algorithm._own)
    assert algorithm.tiles.length == personal.size - own
    assert update.metrics["q"] <= 0.5
    assert update.metrics["density"] <= 0.5


def test_a_novel_client_trains_its_own_layers_and_nothing_shared(task: Task, federation: data.Federation) -> None:
    algorithm, one = make(task, own="first"), local(federation)
    server = algorithm.init_server(0)
    before, private = clone(server), algorithm.init_client(server, one)
    after = algorithm.adapt(server, private, one)
    assert equal(server, before)
    assert not torch.equal(after["own/conv1.weight"], private["own/conv1.weight"])
    assert any(not torch.equal(after[name], private[name]) for name in private if name.startswith("gate/"))
    personal = algorithm._workspace()
    assert torch.equal(personal.vector(algorithm._own), flat(pick(server, algorithm.names)))


def test_statistics_of_own_norms_are_private_too(federation: data.Federation) -> None:
    task = _task(_normed, federation)
    algorithm, one = make(task, own=["0", "1"]), local(federation, budget=0.6)
    server = algorithm.init_server(0)
    assert {name.split(".")[0] for name in server} == {"4", "5", "9"}
    update, after = algorithm.train(server, algorithm.init_client(server, one), one)
    assert {name.split(".")[0] for name in update.shared if "running" in name} == {"5"}
    assert {"running_mean", "running_var"} <= {name.split(".")[-1] for name in inside(parts.OWN, after)}


def _normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64),
        nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10),
    )  # fmt: skip


def test_wrong_names_and_the_literal_variants_fail(task: Task) -> None:
    with pytest.raises(ValueError, match="unknown layer 'covn1': did you mean 'conv1'"):
        make(task, own="covn1")
    with pytest.raises(ValueError, match="nothing would be shared"):
        make(task, own=(*FIRST, *REST))
    with pytest.raises(ValueError, match="private layers are ours"):
        make(task, own="first", variant="paper")
