from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pfedgate.algorithms.pfedgate.tiles import TileMean, Tiles, cap_upload, fault_in_tiles, pack_tiles, unpack_tiles
from pfedgate.core.mergers import WeightedMean, merge
from pfedgate.core.types import Card, State, Update

OWNER = torch.tensor([2, 0, 0, 1, 2, 1, 1, 3])
TILES = Tiles.of(OWNER)


def random(seed: int, size: int = 8) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def packed_tiles(ids: list[int], seed: int = 0) -> State:
    return pack_tiles(random(seed), torch.tensor(ids), TILES)


@given(st.sets(st.integers(0, 3)))
def test_there_and_back(ids: set[int]) -> None:
    chosen = torch.tensor(sorted(ids), dtype=torch.int64)
    update = pack_tiles(random(1), chosen, TILES)
    assert fault_in_tiles(update, TILES) is None
    back = unpack_tiles(update, TILES, torch.zeros(8))
    live = torch.isin(OWNER, chosen)
    assert torch.equal(back[live], random(1)[live])
    assert not back[~live].any()


def test_tiles_may_be_empty() -> None:
    tiles = Tiles.of(torch.tensor([0, 0, 2]), count=4)
    assert tiles.sizes.tolist() == [2, 0, 1, 0]
    update = pack_tiles(torch.arange(3.0), torch.tensor([1, 2, 3]), tiles)
    assert update["values"].tolist() == [2]
    assert fault_in_tiles(update, tiles) is None


def merged_tiles(mean: TileMean, sent: Iterable[tuple[float, State]]) -> torch.Tensor:
    for weight, update in sent:
        mean.add(update, weight)
    return mean.result()


def test_the_papers_four_clients() -> None:
    """Appendix: block 0 is averaged over clients 1, 3 and 4, and so on; weights renormalised over them."""
    tiles = Tiles.of(torch.tensor([0, 0, 1, 2]))
    server = torch.tensor([10.0, 10.0, 20.0, 30.0])
    blocks = [[0, 2], [1, 2], [0, 1], [0, 1, 2]]
    weights = [1.0, 2.0, 3.0, 4.0]
    deltas = [random(seed, 4) for seed in range(4)]
    sent = [pack_tiles(d, torch.tensor(b), tiles) for d, b in zip(deltas, blocks, strict=True)]
    merged = merged_tiles(TileMean(server, tiles, delta=True), zip(weights, sent, strict=True))
    who = {0: (0, 2, 3), 1: (1, 2, 3), 2: (0, 1, 3)}
    for block, positions in {0: slice(0, 2), 1: slice(2, 3), 2: slice(3, 4)}.items():
        total = sum(weights[at] for at in who[block])
        step = sum(weights[at] / total * deltas[at][positions] for at in who[block])
        torch.testing.assert_close(merged[positions], server[positions] + step)


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=5))
def test_a_block_nobody_sent_keeps_its_bits(sets: list[set[int]]) -> None:
    server = random(9)
    sent = [(float(at + 1), packed_tiles(sorted(ids), at)) for at, ids in enumerate(sets)]
    merged = merged_tiles(TileMean(server, TILES), sent)
    unsent = ~torch.isin(OWNER, torch.tensor(sorted(set().union(*sets))))
    assert torch.equal(merged[unsent], server[unsent])
    assert merged.isfinite().all()


@pytest.mark.parametrize("total", [None, 20.0])
def test_all_blocks_from_all_clients_is_the_plain_mean_bit_for_bit(total: float | None) -> None:
    states = [random(seed, 1000) for seed in range(4)]
    tiles = Tiles.of(torch.arange(1000) % 7)
    everything = torch.arange(7)
    sent = [(float(3 + at), pack_tiles(s, everything, tiles)) for at, s in enumerate(states)]
    updates = [(Card("", 1), Update({"w": s}, float(3 + at))) for at, s in enumerate(states)]
    plain = merge(WeightedMean({"w": random(8, 1000)}, total), updates)["w"]
    assert torch.equal(merged_tiles(TileMean(random(8, 1000), tiles, total=total), sent), plain)


def test_over_all_clients_the_others_count_as_unchanged() -> None:
    server, new = torch.zeros(8), torch.ones(8)
    sent = [(2.0, pack_tiles(new, torch.tensor([0]), TILES))]
    for delta in (False, True):
        merged = merged_tiles(TileMean(server, TILES, total=8.0, delta=delta), sent)
        assert merged[OWNER == 0].tolist() == [0.25, 0.25]
        assert not merged[OWNER != 0].any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"blocks": torch.tensor([0, 4], dtype=torch.int32)}, "0 … 3"),
        ({"blocks": torch.tensor([-1, 2], dtype=torch.int32)}, "from -1"),
        ({"blocks": torch.tensor([2, 2], dtype=torch.int32)}, "twice"),
        ({"blocks": torch.tensor([0, 2])}, "int32"),
        ({"blocks": torch.tensor([[0, 2]], dtype=torch.int32)}, "list of int32"),
        ({"values": torch.zeros(3)}, "3 values for blocks of 4"),
        ({"values": torch.zeros(4, dtype=torch.float64)}, "float32"),
        ({"values": torch.zeros(2, 2)}, "float32"),
    ],
)
def test_a_bad_update_says_why(change: State, says: str) -> None:
    assert says in str(fault_in_tiles({**packed_tiles([0, 2]), **change}, TILES))


def test_a_missing_array_is_named() -> None:
    assert "'values'" in str(fault_in_tiles({"blocks": torch.zeros(1, dtype=torch.int32)}, TILES))


@given(st.integers(0, 80), st.integers(0, 50))
def test_the_cap_is_hard_and_nothing_is_lost(room: int, seed: int) -> None:
    delta, live = random(seed), torch.tensor([3, 0, 2])
    ids, rest = cap_upload(delta, live, TILES, room)
    assert sum(4 + 4 * int(TILES.sizes[at]) for at in ids.tolist()) <= room
    assert set(ids.tolist()) <= set(live.tolist())
    kept = unpack_tiles(pack_tiles(delta, ids, TILES), TILES, torch.zeros(8))
    assert torch.equal(kept + rest, delta)


def test_the_largest_change_per_byte_goes_first() -> None:
    delta = torch.tensor([1.0, 3.0, 3.0, 2.0, 1.0, 2.0, 2.0, 5.0])
    ids, _ = cap_upload(delta, torch.arange(4), TILES, room=8)
    assert ids.tolist() == [3]
    ids, _ = cap_upload(delta, torch.arange(4), TILES, room=8 + 12)
    assert ids.tolist() == [0, 3]


def test_error_feedback_sends_everything_in_the_end() -> None:
    """What did not fit is not lost: with no new change it arrives within a few rounds."""
    target, arrived, residual = random(3), torch.zeros(8), torch.zeros(8)
    for turn in range(4):
        delta = (target if turn == 0 else torch.zeros(8)) + residual
        ids, residual = cap_upload(delta, torch.arange(4), TILES, room=16)
        arrived += unpack_tiles(pack_tiles(delta, ids, TILES), TILES, torch.zeros(8))
    torch.testing.assert_close(arrived, target)
