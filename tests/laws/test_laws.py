"""Laws for every registered algorithm: a new one is tested by being registered."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.world import (
    ALGORITHMS,
    MODELS,
    OPTIONS,
    Reordered,
    Serialised,
    check_same,
    example,
    federation,
    go,
    private_digests,
    scrambled,
)

from pfedgate.core.mergers import merge
from pfedgate.core.state import digest
from pfedgate.core.types import Card, Round, State
from pfedgate.engine.endpoint import Endpoint
from pfedgate.engine.processes import Processes
from pfedgate.engine.server import run
from pfedgate.engine.store import MemoryStore

# The networks here are so small that a gate is large beside them.
pytestmark = pytest.mark.filterwarnings("ignore:the gate has")

every = pytest.mark.parametrize("name", ALGORITHMS)
both = pytest.mark.parametrize("model", MODELS)

# The method's own definition is to send what it keeps; the reason is in its module.
SENDS_WHAT_IT_KEEPS = {"mean_reg_mtl", "fedala"}


@every
@both
def test_order_of_clients_changes_nothing(name: str, model: str) -> None:
    check_same(go(example(name, model)), go(example(name, model), Reordered(federation())))


@every
def test_workers_change_nothing(name: str) -> None:
    options = replace(OPTIONS, evaluate_every=3, novel=True, points=("after_broadcast", "after_local"), stack=2)
    here = go(example(name, "plain"), options=options)
    there = go(example(name, "plain"), options=options, exchange=partial(Processes, workers=2))
    check_same(here, there)
    assert here.result.history == there.result.history
    assert here.result.scores == there.result.scores
    assert here.result.novel == there.result.novel


@every
@both
def test_evaluation_changes_nothing(name: str, model: str) -> None:
    on = replace(OPTIONS, evaluate_every=1, novel=True, points=("after_broadcast", "after_local"))
    evaluated = go(example(name, model), options=on)
    check_same(evaluated, go(example(name, model)))
    assert all(0 <= record["after_local"]["accuracy"] <= 1 for record in evaluated.result.history)
    assert len(evaluated.result.scores) == 2 * 6
    assert len(evaluated.result.novel) == 2


@every
def test_global_generators_are_neither_read_nor_changed(name: str) -> None:
    first = go(example(name, "norms"))
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    before = torch.get_rng_state()
    second = go(example(name, "norms"), options=replace(OPTIONS, evaluate_every=2))
    assert torch.equal(before, torch.get_rng_state())
    check_same(first, second)


@every
def test_test_labels_are_never_read_in_training(name: str) -> None:
    options = replace(OPTIONS, evaluate_every=1)
    fed = federation()
    true, other = go(example(name), fed, options), go(example(name), scrambled(fed, "test"), options)
    check_same(true, other)
    for a, b in zip(true.result.history, other.result.history, strict=True):
        assert a["after_broadcast"]["val_accuracy"] == b["after_broadcast"]["val_accuracy"]
        assert a["after_broadcast"]["loss"] != b["after_broadcast"]["loss"], "the scores did not notice: no test"
    assert true.result.summary["best_round"] == other.result.summary["best_round"]


@every
@pytest.mark.parametrize("at", [0, 1])
def test_resuming_changes_nothing(name: str, at: int, tmp_path: Path) -> None:
    """Stopped between two rounds, and in the middle of one with some private states already written."""
    options = replace(OPTIONS, rounds=4, evaluate_every=2)
    whole = go(example(name), options=options, folder=tmp_path / "whole")

    class Crash(Exception):
        pass

    class Stops(Endpoint):
        def train(self, server: State, round: Round, chunks: Any) -> Iterator[Any]:
            for place, reply in enumerate(super().train(server, round, chunks)):
                if round.index == 2 and place == at:
                    raise Crash
                yield reply

    with pytest.raises(Crash):
        run(example(name), federation(), options, folder=tmp_path / "cut", exchange=Stops)
    again = go(example(name), options=options, folder=tmp_path / "cut", resume=True)
    check_same(whole, again)
    for file in ("metrics.jsonl", "participation.jsonl", "clients.csv"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert private_digests(tmp_path / "cut") == private_digests(tmp_path / "whole")


@every
@both
def test_nothing_private_is_on_the_wire(name: str, model: str) -> None:
    """Byte for byte: no tensor that a client keeps, once it was trained, occurs in anything a client sends."""
    messages: list[bytes] = []

    def tap(client: str, direction: str, message: bytes) -> None:
        if direction == "up":
            messages.append(message)

    algorithm, fed = example(name, model), federation()
    options = replace(OPTIONS, rounds=2)
    done = go(algorithm, fed, options, exchange=partial(Serialised, tap=tap))
    counted = go(algorithm, fed, options)
    check_same(done, counted)  # sizes are those of the real messages, too
    assert messages
    if name in SENDS_WHAT_IT_KEEPS:
        return
    store = done.result.store
    assert store is not None
    traffic = b"\0".join(messages)
    for client in store.clients():
        known = _first_private(algorithm, done.result.server, client)
        for tensor, value in (store.get(client) or {}).items():
            raw = value.contiguous().numpy().tobytes()
            trained = tensor not in known or not torch.equal(known[tensor], value)
            if trained and value.is_floating_point() and value.numel() >= 3 and len(value.unique()) > 2:
                assert raw not in traffic, f"{tensor} of {client}"


def _first_private(algorithm: Any, server: State, client: str) -> State:
    endpoint = Endpoint(algorithm, federation(), MemoryStore())
    local = endpoint.local(Card(client, 20), Round(seed=OPTIONS.seed, rounds=2))
    private: State = algorithm.init_client(algorithm.send(server, local.card, local.round), local)
    return private


@every
def test_private_state_of_unsampled_clients_is_untouched(name: str, tmp_path: Path) -> None:
    options = replace(OPTIONS, rounds=4, sample=2, evaluate_every=1)
    seen: list[dict[str, str]] = []

    def look(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            seen.append(private_digests(tmp_path))

    run(example(name), federation(), options, folder=tmp_path, callbacks=[look])
    rounds: list[set[str]] = [set() for _ in seen]
    for line in (tmp_path / "participation.jsonl").read_text().splitlines():
        entry = json.loads(line)
        rounds[entry["round"] - 1].add(entry["client"])
    for now in range(1, len(seen)):
        for client in seen[now - 1]:
            if client not in rounds[now]:
                assert seen[now][client] == seen[now - 1][client]
        assert set(seen[now]) <= set().union(*rounds[: now + 1])


@every
@both
def test_methods_are_pure(name: str, model: str) -> None:
    """Same in, same out; what was given is not changed; training an exported model does not change it either."""
    algorithm, fed = example(name, model), federation()
    card, round = Card(fed.clients[0], fed.part(fed.clients[0], "train").n), Round(1, 3, OPTIONS.seed)
    endpoint = Endpoint(algorithm, fed, MemoryStore())
    local = endpoint.local(card, round)
    server = algorithm.init_server(OPTIONS.seed)
    got = algorithm.send(server, card, round)
    private = algorithm.init_client(got, local)
    before = digest(server), digest(got), digest(private)
    update, kept = algorithm.train(got, private, local)
    again, kept_again = algorithm.train(got, private, local)
    assert (digest(update.shared), digest(kept)) == (digest(again.shared), digest(kept_again))
    assert (update.weight, dict(update.metrics)) == (again.weight, dict(again.metrics))
    merged = merge(algorithm.merger(server, round), [(card, update)])
    algorithm.personalise(got, kept, local)
    algorithm.adapt(got, private, local)
    algorithm.landed(got, update)
    model_of = algorithm.predictor(got, kept, card)
    with torch.no_grad():
        for value in model_of.parameters():
            value.add_(1)
    assert (digest(server), digest(got), digest(private)) == before
    assert (digest(update.shared), digest(kept)) == (digest(again.shared), digest(kept_again))
    assert set(merged) >= set(server)


@every
def test_a_novel_client_leaves_server_and_clients_alone(name: str) -> None:
    without = go(example(name))
    with_novel = go(example(name), options=replace(OPTIONS, novel=True))
    check_same(without, with_novel)
    assert {score.client for score in with_novel.result.novel} == set(federation().novel)
    assert not set(with_novel.private) & set(federation().novel)


@every
def test_stacked_clients_agree_with_one_by_one(name: str) -> None:
    algorithm = example(name)
    if not algorithm.stacks:
        assert type(algorithm).train_many is not None
        pytest.skip(f"{name} trains clients one by one")
    one, many = (go(algorithm, options=replace(OPTIONS, stack=stack)) for stack in (0, 3))
    for tensor, value in one.result.server.items():
        assert torch.allclose(value, many.result.server[tensor], atol=1e-5)
    assert set(one.private) == set(many.private)
