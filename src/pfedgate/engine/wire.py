"""What travels: bytes without pickle, a versioned header, checked on arrival.

A message is a small frame (magic, version, round, weight, client, numbers) and a safetensors body. Sizes are those
of real serialisation: a length depends on names, shapes and types alone, so it is measured once for each.

>>> update = Update({"w": torch.ones(3)}, weight=20.0, metrics={"loss": 0.5})
>>> message = encode(update, client="anna", round=7)
>>> len(message) == size(update, client="anna")
True
>>> arrived = decode(message)
>>> arrived.client, arrived.round, arrived.update.weight, arrived.update.shared["w"].tolist()
('anna', 7, 20.0, [1.0, 1.0, 1.0])
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import torch
from safetensors.torch import load

from pfedgate.core.state import Form, form, form_of
from pfedgate.core.types import State, Update
from pfedgate.engine.boundary import Refused, words
from pfedgate.engine.store import pack_file

MAGIC = b"pfg1"
VERSION = 1
# magic, version, round, weight, length of the client's id, length of the names of numbers, how many numbers
_FRAME = struct.Struct("<4sHqdHIH")
_BETWEEN = "\x1f"
FORBIDDEN = (torch.bfloat16,)  # not every machine can compute with it, and Flower cannot carry it


class WireError(Refused):
    """A message that cannot be what it claims to be."""


@dataclass(frozen=True)
class Arrived:
    """A decoded message: who sent what in which round."""

    client: str
    round: int
    update: Update


def pack(state: State) -> bytes:
    """A State as safetensors bytes."""
    for name, value in state.items():
        if value.dtype in FORBIDDEN:
            raise WireError(f"{name!r} is {value.dtype}: send float32 or float16")
    return pack_file(state)


def unpack(body: bytes) -> State:
    """The State in safetensors bytes."""
    try:
        return load(body)
    except Exception as error:  # sizes that overflow, types this torch does not have, …
        raise WireError(f"the body is not a State: {words(error)}") from error


def packed_size(state: State) -> int:
    """Length of `pack(state)`; an empty State is not sent at all."""
    if not state:
        return 0
    return _packed_size(form_of(state))


@lru_cache(maxsize=4096)
def _packed_size(known: Form) -> int:
    return len(pack({name: torch.zeros(shape, dtype=dtype) for name, dtype, shape in known}))


def encode(update: Update, *, client: str, round: int) -> bytes:
    """An update as one message."""
    name, labels = client.encode(), _labels(tuple(update.metrics))
    frame = _FRAME.pack(MAGIC, VERSION, round, update.weight, len(name), len(labels), len(update.metrics))
    numbers = struct.pack(f"<{len(update.metrics)}d", *update.metrics.values())
    return b"".join([frame, name, labels, numbers, pack(update.shared)])


def size(update: Update, *, client: str) -> int:
    """Length of `encode(update)`; a client that shares nothing sends nothing."""
    if not update.shared:
        return 0
    numbers = len(_labels(tuple(update.metrics))) + 8 * len(update.metrics)
    return _FRAME.size + len(client.encode()) + numbers + _packed_size(form(update))


@lru_cache(maxsize=4096)
def _labels(names: tuple[str, ...]) -> bytes:
    if any(_BETWEEN in name for name in names):
        raise WireError(f"a metric's name must not contain {_BETWEEN!r}: {names}")
    return _BETWEEN.join(names).encode()


def decode(message: bytes) -> Arrived:
    """The update in a message; anything unexpected is a WireError that says what."""
    if len(message) < _FRAME.size:
        raise WireError(f"{len(message)} bytes are too few for a message")
    magic, version, round, weight, client_length, label_length, count = _FRAME.unpack_from(message)
    if magic != MAGIC:
        raise WireError(f"starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"version {version}; this side speaks {VERSION}: install the same pfedgate on both")
    start, middle = _FRAME.size, _FRAME.size + client_length
    labelled = middle + label_length
    end = labelled + 8 * count
    if len(message) < end:
        raise WireError(f"cut short: {len(message)} bytes of at least {end}")
    try:
        client = message[start:middle].decode()
        names = message[middle:labelled].decode().split(_BETWEEN) if label_length else []
    except ValueError as error:
        raise WireError(f"unreadable header: {error}") from error
    if len(names) != count:
        raise WireError(f"{len(names)} names for {count} numbers")
    metrics = dict(zip(names, struct.unpack_from(f"<{count}d", message, labelled), strict=True))
    return Arrived(client, round, Update(unpack(message[end:]), weight, metrics))
