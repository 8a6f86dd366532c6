"""Laws of merging with crooked clients: identical, in any order, bounded; and nothing changes when all are honest."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.world import ALGORITHMS, OPTIONS, check_same, example, federation, go

from pfedgate.algorithms.pfedgate.tiles import BLOCKS, VALUES, SparseMean, TileMean, Tiles, pack_tiles
from pfedgate.core import robust
from pfedgate.core.mergers import Merger, WeightedMean
from pfedgate.core.robust import FOR_ALL, geometric, krum, middle
from pfedgate.core.state import floating
from pfedgate.core.types import ROBUST, Card, Round, ServerOptim, State, Update
from pfedgate.engine.endpoint import Endpoint
from pfedgate.engine.server import run
from pfedgate.engine.store import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:the gate has")

RULES = [name for name in ROBUST if name != "off"]
COMPARE = [name for name in RULES if name not in FOR_ALL]
rules = pytest.mark.parametrize("rule", RULES)
kinds = pytest.mark.parametrize("kind", ["dense", "sparse", "differences"])
TILES = Tiles.of(torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3]))
NAMES = ("a", "b")
SERVER: State = {"a": torch.linspace(0, 1, 6).view(2, 3), "b": torch.linspace(1, 2, 4), "count": torch.tensor(3)}


def merger(kind: str, rule: str, **more: Any) -> Merger:
    inner: Merger = WeightedMean(SERVER)
    if kind != "dense":
        vector = torch.cat([SERVER["a"].flatten(), SERVER["b"]])
        mean = TileMean(vector, TILES, delta=kind == "differences")
        inner = SparseMean(SERVER, NAMES, mean, WeightedMean({"count": SERVER["count"]}))
    return robust.robust(ServerOptim(robust=rule, **more), inner)


def update(kind: str, vector: torch.Tensor, ids: tuple[int, ...] = (0, 1, 2, 3), weight: float = 1.0) -> Update:
    """A client that ended at this vector, and sent these tiles of it."""
    count = {"count": torch.tensor(7)}
    if kind == "dense":
        return Update({"a": vector[:6].view(2, 3), "b": vector[6:], **count}, weight)
    if kind == "differences":
        vector = vector - torch.cat([SERVER["a"].flatten(), SERVER["b"]])
    return Update({**pack_tiles(vector, torch.tensor(ids), TILES), **count}, weight)


def merged(kind: str, rule: str, updates: list[Update], order: list[int] | None = None, **more: Any) -> torch.Tensor:
    one = merger(kind, rule, **more)
    for at in order or range(len(updates)):
        assert one.add(Card(f"{at:03}", 5), updates[at]) is None
    state = one.result()
    assert int(state["count"]) == 7
    assert {n: (v.shape, v.dtype) for n, v in state.items()} == {n: (v.shape, v.dtype) for n, v in SERVER.items()}
    return torch.cat([state["a"].flatten(), state["b"]])


def honest(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Vectors around a common one, some way from the server's."""
    stream = torch.Generator().manual_seed(seed)
    centre = 2 + torch.randn(10, generator=stream)
    return [centre + 0.1 * torch.randn(10, generator=stream) for _ in range(count)]


@rules
@kinds
def test_the_merge_of_the_same_is_the_same(rule: str, kind: str) -> None:
    vector = honest(1)[0]
    result = merged(kind, rule, [update(kind, vector) for _ in range(7)])
    torch.testing.assert_close(result, vector, atol=1e-6, rtol=0)
    if rule == "median" and kind != "differences":
        assert torch.equal(result, vector)


@rules
@kinds
@given(seed=st.integers(0, 10**6))
def test_the_order_of_clients_does_not_matter(rule: str, kind: str, seed: int) -> None:
    chance = random.Random(seed)
    sent = [tuple(sorted(chance.sample(range(4), chance.randint(1, 4)))) for _ in range(6)]
    updates = [update(kind, v, ids, chance.randint(1, 9)) for v, ids in zip(honest(6, seed), sent, strict=True)]
    one, other = merged(kind, rule, updates), merged(kind, rule, updates, chance.sample(range(6), 6))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    if rule in COMPARE:
        assert torch.equal(one, other)


@rules
@kinds
@given(seed=st.integers(0, 10**6), size=st.sampled_from([1.0, 100.0, 1e6, 1e9]), where=st.integers(0, 9))
def test_one_client_moves_the_result_by_little(rule: str, kind: str, seed: int, size: float, where: int) -> None:
    """However far away it is and however heavy it says it is: about as far as the others are from each other."""
    good = honest(9, seed)
    start = torch.cat([SERVER["a"].flatten(), SERVER["b"]])
    step = torch.stack([(v - start).norm() for v in good]).max()
    updates = [update(kind, v) for v in good]
    updates.insert(where, update(kind, start - size * (good[0] - start), weight=1e3))
    result = merged(kind, rule, updates)
    moved = (result - torch.stack(good).mean(0)).norm()
    if rule == "guard":  # at most ten usual steps, with a weight of at most a hundred usual ones
        assert (result - start).norm() <= 10.5 * step
    elif rule == "clip":
        assert (result - start).norm() <= 1.01 * step
    else:
        assert moved <= 1.0


@kinds
def test_a_block_is_merged_over_those_that_sent_it(kind: str) -> None:
    """Tile 1 comes from three clients, of which one is crooked; tile 3 from nobody."""
    vectors = honest(6)
    vectors[5] = torch.full((10,), 1e9)
    sent = [(0, 1), (0, 1), (0, 2), (0, 2), (0, 2), (0, 1, 2)]
    start = torch.cat([SERVER["a"].flatten(), SERVER["b"]])
    for rule in ("median", "trimmed", "geometric", "krum"):
        updates = [update(kind, v, ids) for v, ids in zip(vectors, sent, strict=True)]
        result = merged(kind, rule, updates, crooked=0.34)
        if kind == "dense":
            continue
        assert torch.equal(result[6:], start[6:])
        assert float((result[:6] - torch.stack(vectors[:5]).mean(0)[:6]).abs().max()) < 0.5
    if kind == "sparse":
        result = merged(kind, "median", [update(kind, v, ids) for v, ids in zip(vectors, sent, strict=True)])
        expected = torch.stack([vectors[0], vectors[1], vectors[5]]).median(0).values[3]
        assert torch.equal(result[3], expected)


@pytest.mark.parametrize("ids", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_what_is_laid_out_can_be_lifted_again(ids: tuple[int, ...]) -> None:
    inner = merger("sparse", "off")
    assert isinstance(inner, SparseMean)
    there = update("sparse", honest(1)[0], ids)
    back = inner.lift(inner.lay(there))
    assert {n: v.tolist() for n, v in back.items()} == {n: v.tolist() for n, v in there.shared.items()}
    around = inner.around(Card("a", 1), there)
    start = torch.cat([SERVER["a"].flatten(), SERVER["b"]])
    assert torch.equal(around[VALUES], pack_tiles(start, there.shared[BLOCKS].long(), TILES)[VALUES])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_around_an_update_lies_what_its_client_got(name: str) -> None:
    algorithm, fed, first = example(name, "norms"), federation(), Round(0, 3, 0, 1.0, None)
    server, endpoint = algorithm.init_server(0), Endpoint(algorithm, fed, MemoryStore())
    card = Card(fed.clients[0], 20)
    sent = next(iter(endpoint.train(server, first, [[card]]))).update
    inner: Any = algorithm.merger(server, first)
    if sent is None or not hasattr(inner, "around"):
        return
    got, around = algorithm.send(server, card, first), inner.around(card, sent)
    assert {n: v.shape for n, v in around.items()} == {n: v.shape for n, v in floating(sent)[0].items()}
    assert all(torch.equal(value, got[n]) for n, value in around.items() if n in got)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_guard_changes_nothing_when_all_are_honest(name: str) -> None:
    off = replace(OPTIONS, server=ServerOptim(robust="off"))
    here = go(example(name, "norms"))
    check_same(here, go(example(name, "norms"), options=off))
    assert not [record for record in here.result.history if "clipped" in record]


@pytest.mark.parametrize("rule", COMPARE)
def test_methods_whose_updates_cannot_be_compared_say_why(rule: str) -> None:
    options = replace(OPTIONS, server=ServerOptim(robust=rule))
    apart = [name for name in ALGORITHMS if example(name).apart]
    assert {"fedmask", "heterofl", "pfedhn"} <= {*apart}
    for name in apart:
        with pytest.raises(ValueError, match=f"server.robust = '{rule}' is not for {name}: .*Take one of guard, clip"):
            run(example(name), federation(), options)
    with pytest.raises(ValueError, match=r"agg_norm = 'all' counts absent clients"):
        run(example("fedavg"), federation(), replace(options, agg_norm="all"))


@pytest.mark.parametrize("rule", COMPARE)
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not example(name).apart])
def test_every_other_method_learns_under_every_rule(name: str, rule: str) -> None:
    result = run(example(name, "norms"), federation(), replace(OPTIONS, server=ServerOptim(robust=rule)))
    assert all(bool(v.isfinite().all()) for v in result.server.values() if v.is_floating_point())
    assert [record["refused"] for record in result.history] == [0, 0, 0]


def test_more_updates_than_are_held_are_clipped_as_they_come() -> None:
    vectors = honest(3 * robust.HELD)
    vectors[5], vectors[-1] = 1e6 * vectors[5], 1e6 * vectors[-1]
    one = merger("dense", "guard")
    for at, vector in enumerate(vectors):
        assert one.add(Card(f"{at:03}", 5), update("dense", vector)) is None
        assert len(one._held or ()) <= robust.HELD  # type: ignore[attr-defined]
    assert one.result()["a"].abs().max() < 20
    assert one.clipped == 2  # type: ignore[attr-defined]


def test_a_fixed_norm_is_kept() -> None:
    start = torch.cat([SERVER["a"].flatten(), SERVER["b"]])
    result = merged("dense", "clip", [update("dense", v) for v in honest(4)], norm=0.25)
    assert float((result - start).norm()) <= 0.2501


def test_where_everybody_stands_still_nobody_is_clipped() -> None:
    start = torch.cat([SERVER["a"].flatten(), SERVER["b"]])
    result = merged("dense", "clip", [update("dense", v) for v in [start] * 4 + honest(2)])
    assert not torch.equal(result, start)


def test_shapes_that_differ_are_refused() -> None:
    one = robust.robust(ServerOptim(robust="median"), WeightedMean({}))
    assert one.add(Card("a", 1), Update({"w": torch.zeros(3)}, 1.0)) is None
    assert "of others (3,)" in str(one.add(Card("b", 1), Update({"w": torch.zeros(4)}, 1.0)))
    assert one.result()["w"].tolist() == [0.0] * 3


def test_the_rules_themselves() -> None:
    rows = torch.tensor([[1.0, math.nan], [2.0, math.nan], [3.0, 4.0], [1e9, -1e9]])
    assert middle(rows).tolist() == pytest.approx([2.5, -5e8])
    assert middle(rows, 0.25).tolist()[0] == 2.5
    assert middle(torch.tensor([[3], [1], [2], [9]])).tolist() == [2]
    assert geometric(torch.tensor([[0.0], [4.0]])) == [0.5, 0.5]
    assert krum(torch.tensor([[1.0], [5.0]]), 0.0) == [1.0, 1.0]
