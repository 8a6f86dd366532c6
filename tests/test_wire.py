from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pfedgate.core.state import equal
from pfedgate.core.types import State, Update
from pfedgate.engine import wire
from pfedgate.engine.wire import WireError, decode, encode

STATES: list[State] = [
    {"w": torch.randn(3, 4), "b": torch.tensor(2.5), "n": torch.tensor(7)},
    {"blocks": torch.tensor([1, 5], dtype=torch.int32), "values": torch.randn(9).half()},
    {"mask": torch.tensor([True, False]), "a/b é": torch.randn(2, 2).t(), "empty": torch.zeros(0)},
    {},
]


@pytest.mark.parametrize("state", STATES)
def test_there_and_back(state: State) -> None:
    update = Update(state, 12.5, {"loss": 0.1, "q": math.inf})
    message = encode(update, client="writer/7 é", round=300)
    arrived = decode(message)
    assert (arrived.client, arrived.round) == ("writer/7 é", 300)
    assert arrived.update.weight == 12.5
    assert arrived.update.metrics == {"loss": 0.1, "q": math.inf}
    assert equal(arrived.update.shared, state)
    assert wire.size(update, client="writer/7 é") == (len(message) if state else 0)
    assert wire.packed_size(state) == (len(wire.pack(state)) if state else 0)


def test_no_metrics() -> None:
    assert decode(encode(Update({"w": torch.ones(1)}, 1.0), client="", round=0)).update.metrics == {}


def test_sparse_update_is_small() -> None:
    """257 blocks in two arrays: their bytes and a header, not one array each."""
    values, ids = torch.randn(5000), torch.arange(257, dtype=torch.int32)
    message = encode(Update({"blocks": ids, "values": values}, 1.0), client="c", round=0)
    assert len(message) < 4 * (5000 + 257) + 300


@given(st.data())
def test_damage_is_noticed_or_harmless(data: st.DataObject) -> None:
    """Cut or changed anywhere, a message either fails with a WireError or decodes to tensors of the same shapes."""
    good = bytearray(encode(Update({"w": torch.ones(3, 2)}, 3.0, {"loss": 1.0}), client="anna", round=1))
    if data.draw(st.booleans()):
        bad = bytes(good[: data.draw(st.integers(0, len(good) - 1))])
    else:
        at = data.draw(st.integers(0, len(good) - 1))
        good[at] ^= data.draw(st.integers(1, 255))
        bad = bytes(good)
    try:
        arrived = decode(bad)
    except WireError:
        return
    assert all(isinstance(value, torch.Tensor) for value in arrived.update.shared.values())


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"", "too few"),
        (b"\x80\x04pickled" + bytes(40), "starts with"),
        (struct.pack("<4sHqdHIH", b"pfg1", 2, 0, 1.0, 0, 0, 0), "same pfedgate on both"),
        (struct.pack("<4sHqdHIH", b"pfg1", 1, 0, 1.0, 50, 0, 0), "cut short"),
        (struct.pack("<4sHqdHIH", b"pfg1", 1, 0, 1.0, 2, 0, 0) + b"\xff\xff", "unreadable"),
        (struct.pack("<4sHqdHIH", b"pfg1", 1, 0, 1.0, 0, 3, 2) + b"abc" + bytes(16), "1 names for 2"),
        (struct.pack("<4sHqdHIH", b"pfg1", 1, 0, 1.0, 0, 0, 0) + b"{}", "not a State"),
    ],
)
def test_what_is_no_message_says_why(message: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode(message)


def test_what_cannot_travel() -> None:
    with pytest.raises(WireError, match="float32 or float16"):
        wire.pack({"w": torch.ones(1, dtype=torch.bfloat16)})
    with pytest.raises(WireError, match="must not contain"):
        encode(Update({}, 1.0, {"a\x1fb": 1.0}), client="", round=0)
