"""Whatever a node says, the server either refuses it in a few words or can use it: nothing else happens."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import fuzz
from tests.support.world import ALGORITHMS, example, federation

from pfedgate.algorithms.fedpac import mixture
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.kinds import METRICS
from pfedgate.core.state import finite
from pfedgate.core.types import Card, Round, State, Update
from pfedgate.deploy.messages import NodeInfo, Roll
from pfedgate.engine import boundary, wire
from pfedgate.engine.boundary import Refused
from pfedgate.engine.endpoint import Endpoint
from pfedgate.engine.store import MemoryStore, pack_file

pytestmark = pytest.mark.filterwarnings("ignore:the gate has")

ROLL = {
    "clients": {"anna": 40, "ben": 3}, "novel": {"eve": 9}, "budget": 0.5,
    "data": {"shape": [1, 8, 8], "dtype": "float32", "classes": 10, "task": "classification", "class_names": None},
}  # fmt: skip
SCORE = {"test": [12, 0.7, 0.8, []], "val": [8, 0.6, 0.9, []], "stats": {"bytes_down": 812.0, "density": 0.4}}
CARD = Card("anna", 40)
FIRST = Round(0, 3, 0, 1.0, None)


def said(error: Refused) -> None:
    """The law of a refusal: one short line."""
    text = str(error)
    assert text
    assert text.isprintable()
    assert len(text) <= boundary.TEXT + 60, len(text)


def hear_roll(about: Any) -> bool:
    """Read an answer to the roll call as the server does, up to the cards of its clients."""
    try:
        info = NodeInfo.read(about)
    except Refused as error:
        said(error)
        return False
    cards = Roll([info]).cards(1.0, 0)
    assert all(0 <= card.n_train <= boundary.SAMPLES for card in (*cards.clients, *cards.novel))
    assert 0 < len(info.ids) <= boundary.CLIENTS
    assert NodeInfo.read(json.loads(json.dumps(info.plain()))) == info  # as a journal keeps it
    return True


def hear_score(entry: Any) -> bool:
    """Read a score; one that is believed has numbers within their bounds."""
    try:
        with boundary.reading("its scores"):
            test, val, stats = boundary.score(CARD, entry, [METRICS["accuracy"]])
    except Refused as error:
        said(error)
        return False
    for part in (test, val):
        assert part.n == 0 or (0 <= part.score <= 1.001 and math.isfinite(part.loss))
        assert part.n <= 10 * CARD.n_train + 1000
    assert all(math.isfinite(value) for value in stats.values())
    assert not {"accuracy", "loss", "val_accuracy"} & stats.keys()
    return True


@cache
def honest(name: str, model: str) -> tuple[Algorithm, State, list[tuple[Card, State, Update]]]:
    """The first round of a method in the small world: what three clients got and sent."""
    algorithm, fed = example(name, model), federation()
    server, endpoint = algorithm.init_server(0), Endpoint(algorithm, fed, MemoryStore())
    cards = [Card(client, fed.part(client, "train").n) for client in list(fed.clients)[:3]]
    replies = [next(iter(endpoint.train(server, FIRST, [[card]]))) for card in cards]
    sent = [(c, algorithm.send(server, c, FIRST), r.update) for c, r in zip(cards, replies, strict=True) if r.update]
    assert len(sent) == 3
    return algorithm, server, sent


def hear_update(name: str, model: str, chance: random.Random) -> bool:
    """One spoilt update beside two honest ones; what is admitted can be merged, and the result is finite."""
    algorithm, server, sent = honest(name, model)
    card, got, update = sent[0]
    spoilt = fuzz.spoilt(update, chance)
    try:
        frame = wire.encode(Update({}, spoilt.weight, spoilt.metrics), client=card.id, round=0)
        message = frame[: -len(wire.pack({}))] + pack_tensors(spoilt.shared)
        if chance.random() < 0.2:
            message = fuzz.damaged(message, chance)
        admitted = boundary.admit(algorithm, got, card, wire.decode(message).update)
    except Refused as error:
        said(error)
        return False
    assert 0 < admitted.weight <= card.n_train
    assert all(math.isfinite(value) for value in admitted.metrics.values())
    assert not admitted.metrics.keys() & boundary.RESERVED - {"loss", "flops"}
    with torch.random.fork_rng():
        merger = algorithm.merger(server, FIRST)
        for one, what in ((card, admitted), *((c, u) for c, _, u in sent[1:])):
            merger.add(one, what)
        merged = merger.result()
    assert finite(merged), [n for n, v in merged.items() if not finite({n: v})]
    assert {n: (v.shape, v.dtype) for n, v in merged.items() if n in server} == {
        n: (v.shape, v.dtype) for n, v in server.items()
    }
    return True


def pack_tensors(shared: State) -> bytes:
    """A State of any types as bytes: torch's own writer knows those that numpy lacks."""
    from safetensors.torch import save

    try:
        return pack_file(shared)
    except (TypeError, KeyError, ValueError):
        return save({name: value.contiguous() for name, value in shared.items()})


def loop(count: int, seed: int, names: list[str]) -> dict[str, int]:
    """So many spoilt inputs of each kind; how many were believed all the same."""
    believed = dict.fromkeys(("roll", "score", "update"), 0)
    for at in range(count):
        chance = random.Random(seed * 10**9 + at)
        believed["roll"] += hear_roll(fuzz.changed(ROLL, chance))
        believed["score"] += hear_score(fuzz.changed(SCORE, chance))
        believed["update"] += hear_update(names[at % len(names)], ("plain", "norms")[at // len(names) % 2], chance)
    return believed


def test_honest_words_are_believed() -> None:
    assert hear_roll(ROLL)
    assert hear_score(SCORE)
    for name in ALGORITHMS:
        algorithm, _, sent = honest(name, "norms")
        for card, got, update in sent:
            assert boundary.admit(algorithm, got, card, update) is update


def test_spoilt_words_are_refused_or_harmless() -> None:
    believed = loop(1500, 1, list(ALGORITHMS))
    assert all(0 < count < 1500 for count in believed.values()), believed  # both happen


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_a_million_spoilt_words(part: int) -> None:
    believed = loop(35_000, 2 + part, list(ALGORITHMS))
    print(f"part {part}: 3 × 35,000 inputs, believed {believed}")


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(fuzz.NUMBERS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=200)
@given(
    VALUES, st.sampled_from([*ROLL, "data/shape", "data/classes", "data/class_names", "data/dtype", "data/task", ""])
)
def test_any_value_anywhere_in_an_answer_to_the_roll_call(value: Any, place: str) -> None:
    outer, _, inner = place.partition("/")
    about: Any = {**ROLL, outer: {**ROLL["data"], inner: value} if inner else value}  # type: ignore[dict-item]
    hear_roll(about if place else value)


@settings(max_examples=200)
@given(VALUES, st.sampled_from(["test", "val", "stats", ""]))
def test_any_value_anywhere_in_a_score(value: Any, place: str) -> None:
    hear_score({**SCORE, place: value} if place else value)


@given(st.text(max_size=2000), st.integers(1, 500))
def test_words_are_one_short_line(text: str, most: int) -> None:
    short = boundary.words(text, most)
    assert short.isprintable()
    assert len(short) <= most + 30
    assert boundary.words(short, 10**6) == short


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_weights_must_be_positive(weight: float) -> None:
    algorithm, _, [(card, got, update), *_] = honest("fedavg", "plain")
    with pytest.raises(Refused, match="weight"):
        boundary.admit(algorithm, got, card, Update(update.shared, weight))


def test_statistics_far_apart_end_no_run() -> None:
    """FedPAC: their squares lose more to rounding than the spreads are (found among a million fuzzed updates)."""
    stream = torch.Generator().manual_seed(0)
    for size in (1e6, 1e9):
        apart = [size * torch.randn(3, 4, generator=stream, dtype=torch.float64) for _ in range(4)]
        weights = mixture(1, [*apart, apart[0] * (1 - 1e-16), apart[1]], [1e-12] * 6)
        assert sum(weights) == pytest.approx(1)
        assert min(weights) >= 0


@pytest.mark.parametrize("model", ["plain", "norms"])
@pytest.mark.parametrize(
    ("name", "part", "change", "reason"),
    [
        ("fedpac", "counts", lambda counts: counts * 1e6, "nor more than"),
        ("fedpac", "counts", lambda counts: -counts, "must not be negative"),
        ("pfedfda", "covariance", torch.zeros_like, "no covariance"),
        ("pfedfda", "covariance", lambda value: -value, "no covariance"),
        ("pfedfda", "covariance", lambda value: value + 100 * torch.ones_like(value).triu(1), "no covariance"),
    ],
)
def test_statistics_that_cannot_be_are_refused(name: str, part: str, change: Any, reason: str, model: str) -> None:
    """They would outweigh all other clients, or fail on every client that computes a head from them."""
    algorithm, _, [(card, got, update), *_] = honest(name, model)
    (key,) = (key for key in update.shared if key.endswith(f"/{part}"))
    spoilt = {**update.shared, key: change(update.shared[key])}
    for weight in (update.weight, 1e9):
        with pytest.raises(Refused, match=reason):
            boundary.admit(algorithm, got, card, replace(update, shared=spoilt, weight=weight))


def test_a_number_that_says_nothing_is_left_out() -> None:
    algorithm, _, [(card, got, update), *_] = honest("fedavg", "plain")
    admitted = boundary.admit(algorithm, got, card, Update(update.shared, 1.0, {"loss": math.nan, "q": 0.5}))
    assert admitted.metrics == {"q": 0.5}
