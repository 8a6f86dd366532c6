"""What a node may say, changed at random: updates, scores, answers to the roll call, and the bytes that carry them."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import torch

from pfedgate.core.types import Update

NUMBERS: list[Any] = [
    0, 1, -1, 2, 7, 40, 255, 2**31, 2**33, 2**53 + 1, 2**63 - 1, 2**63, 10**400, -(10**400), 0.0, -0.0, 0.5, 1.0, 1.5,
    1e9, 1.1e9, 1e18, 1e30, -1e30, 1.7e308, 5e-324, math.nan, math.inf, -math.inf, True, False, None,
]  # fmt: skip
TEXTS = [
    "", "a", "loss", "q", "round", "after_local", "val_accuracy", "refusals", "blocks", "values", "../../etc/passwd",
    "=1+1", "\x00", "\x1b[2J", "\n", "\u202e", "\ud800", "é" * 200, "x" * 5000, "float32", "float8_e4m3fn", "__proto__",
]  # fmt: skip
KINDS = [
    torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def plain(random: random.Random, depth: int = 3) -> Any:
    """A value such as JSON may hold."""
    kind = random.randrange(6 if depth else 3)
    if kind < 2:
        return random.choice(NUMBERS)
    if kind == 2:
        return random.choice(TEXTS)
    if kind == 3:
        return [plain(random, depth - 1) for _ in range(random.randrange(4))]
    names = [random.choice(TEXTS) for _ in range(random.randrange(4))]
    return {name: plain(random, depth - 1) for name in names}


def changed(value: Any, random: random.Random) -> Any:
    """A copy with one to three places changed, wherever they are."""
    value = copy.deepcopy(value)
    for _ in range(random.randint(1, 3)):
        places: list[tuple[Any, Any]] = []
        _collect(value, places)
        if not places:
            return plain(random)
        holder, key = random.choice(places)
        turn = random.randrange(4)
        if turn == 0 and isinstance(holder, dict):
            del holder[key]
        elif turn == 1 and isinstance(holder, dict):
            holder[random.choice(TEXTS)] = holder.pop(key)
        elif turn == 2 and isinstance(holder, dict):
            holder[random.choice(TEXTS)] = plain(random)
        else:
            holder[key] = plain(random)
    return value


def _collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            _collect(value[key], places)


def spoilt(update: Update, random: random.Random) -> Update:
    """The update with one to three things wrong with it; sometimes with nothing wrong that could be seen."""
    shared, weight, metrics = dict(update.shared), update.weight, dict(update.metrics)
    for _ in range(random.randint(1, 3)):
        name = random.choice([*shared, "?"])
        turn = random.randrange(10)
        if name in shared and turn < 8:
            shared[name] = _tensor(shared[name], random)
        elif turn == 8:
            shared.pop(name, None)
            shared[random.choice(TEXTS[:-8])] = torch.zeros(random.randrange(4))
        elif random.random() < 0.5:
            weight = float(random.choice([n for n in NUMBERS if n is not None and abs(n) < 10**300]))
        else:
            metrics[random.choice([text for text in TEXTS if text.isprintable()])] = float(
                random.choice([n for n in NUMBERS if n is not None and (n != n or abs(n) < 10**300)])
            )
    return Update(shared, weight, metrics)


def _tensor(value: torch.Tensor, random: random.Random) -> torch.Tensor:
    changes: list[Callable[[], torch.Tensor]] = [
        lambda: (value.real if value.is_complex() else value).to(random.choice(KINDS)),
        lambda: value[: value.shape[0] // 2] if value.ndim else value[None],
        lambda: value.reshape(-1),
        lambda: value[None],
        lambda: torch.zeros(0, dtype=value.dtype),
        lambda: torch.zeros(random.choice([(2**33, 0), (0, 2**33), (1,) * 30, ()]), dtype=value.dtype),
        lambda: value[1:] if value.ndim else value,
        lambda: _filled(value, random),
        lambda: _filled(value, random),
    ]
    return random.choice(changes)()


def _filled(value: torch.Tensor, random: random.Random) -> torch.Tensor:
    value, number = value.clone(), random.choice([n for n in NUMBERS if isinstance(n, int | float)])
    try:
        if value.numel() and random.random() < 0.5:
            value.view(-1)[random.randrange(value.numel())] = number
        else:
            value.fill_(number)
    except (OverflowError, RuntimeError, ValueError):  # a value that this type does not have
        return value
    return value


def damaged(message: bytes, random: random.Random) -> bytes:
    """Bytes with some flipped, cut off or put in."""
    piece = bytearray(message)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(piece) + 1)
        turn = random.randrange(3)
        if turn == 0 and at < len(piece):
            piece[at] ^= 1 << random.randrange(8)
        elif turn == 1:
            del piece[at : at + random.choice([1, 8, 10**6])]
        else:
            piece[at:at] = random.choice([b"\x00" * 8, b"\xff" * 8, b"{}", b"NaN"])
    return bytes(piece)
