"""Differential privacy of clients: updates are shortened to one norm, and the server adds Gaussian noise to their sum.

    noisy = NoisyMean(algorithm, server, privacy, expected, key)      a merger for methods whose merging is a plain sum
    noisy.add(card, update) …; server = noisy.result()

The next State is `server + (sum of shortened moves + noise) / expected`. A client's move is the difference between its
own copy after training (`Algorithm.landed`) and the server's State over *all* entries, zero where it sent nothing:
which blocks a client sends is information about its data, so these count towards one norm and all get noise. The number
`expected` is known before anybody answers. A mean over those that sent a block would divide by a number that one
client changes, and by one where it is alone.

One client more or less changes the sum by at most `clip` (`McMahan, Ramage, Talwar, Zhang: Learning Differentially
Private Recurrent Language Models, ICLR 2018`); what that costs over rounds is counted in `engine.private`.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pfedgate.core.state import flat, shapes, unflat
from pfedgate.core.types import Card, Privacy, State, Update

if TYPE_CHECKING:
    from pfedgate.core.algorithm import Algorithm

COUNTER = "num_batches_tracked"  # of a norm: a whole number that the model can do without


def normal(key: bytes, path: str, size: int) -> Tensor:
    """Normal numbers (float64) that follow from a secret key and a path, and tell nothing of the key.

    >>> normal(b"key", "noise/0", 100_000).std().round(decimals=1), normal(b"key", "a", 3).equal(normal(b"key", "a", 3))
    (tensor(1., dtype=torch.float64), True)
    """
    pairs = -(-size // 2)
    words = np.frombuffer(_stream(key, path, 16 * pairs), "<u8") >> np.uint64(11)
    first, second = words.reshape(2, pairs) * 2.0**-53  # uniform in [0, 1)
    radius, angle = np.sqrt(-2 * np.log1p(-first)), 2 * np.pi * second  # Box and Muller
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size])


def uniforms(key: bytes, path: str, size: int) -> Tensor:
    """Numbers in [0, 1) of a key and a path."""
    words = np.frombuffer(_stream(key, path, 8 * size), "<u8") >> np.uint64(11)
    return torch.from_numpy(words * 2.0**-53)


def uniform(key: bytes, path: str) -> float:
    """A number in [0, 1) of a key and a path."""
    return (int.from_bytes(_stream(key, path, 8), "little") >> 11) * 2.0**-53


def _stream(key: bytes, path: str, length: int) -> bytes:
    return hashlib.shake_256(len(key).to_bytes(8, "little") + key + path.encode()).digest(length)


def shorten(move: Tensor, clip: float) -> tuple[Tensor, float]:
    """A vector at most `clip` long in the same direction, and how long it was.

    >>> shorten(torch.tensor([3.0, 4.0]), 1.0)
    (tensor([0.6000, 0.8000]), 5.0)
    """
    length = float(move.norm())
    return (move if length <= clip else move * (clip / length)), length


class NoisyMean:
    """What clients moved by, each shortened, summed, noised and divided by a number that no client changes."""

    def __init__(
        self, algorithm: Algorithm, server: State, privacy: Privacy, expected: float, key: bytes, round: int
    ) -> None:
        self.algorithm, self.server, self.privacy, self.expected = algorithm, server, privacy, expected
        self.key, self.round = key, round
        whole = [name for name, value in server.items() if not value.is_floating_point() and not name.endswith(COUNTER)]
        if whole:
            raise ValueError(
                f"privacy.level={privacy.level!r} is not possible with {algorithm.name or type(algorithm).__name__}: "
                f"clients share {whole[0]!r}, a whole number or a switch, to which noise cannot be added"
            )
        self.norms: list[float] = []
        # In the order of names: a State that comes from a file may list them in another, and noise would go elsewhere.
        self._like = {name: server[name] for name in sorted(server) if server[name].is_floating_point()}
        self._start = self._vector(server)
        self._sum = torch.zeros_like(self._start)

    def _vector(self, state: State) -> Tensor:
        if not self._like:
            return torch.zeros(0, dtype=torch.float64)
        return flat({name: state[name].detach().cpu().double() for name in self._like})

    def add(self, card: Card, update: Update) -> str | None:
        """Add a client's move. Its weight does not count: a client's number of samples is private, too."""
        move, length = shorten(
            self._vector(self.algorithm.landed(self.server, update)) - self._start, self.privacy.clip
        )
        if not math.isfinite(length):
            return "its update is not finite"
        self.norms.append(length)
        self._sum += move
        return None

    def result(self) -> State:
        """The server's next State. Counters stay as they are: the largest of all clients would tell of one."""
        total = self._sum
        if self.privacy.noise > 0:
            noise = normal(self.key, f"noise/{self.round}", len(total))
            total = total + self.privacy.noise * self.privacy.clip * noise
        after = dict(self.server)
        if self._like:
            for name, value in unflat(self._start + total / self.expected, shapes(self._like)).items():
                if name.endswith("running_var"):  # noise may take it below zero, which no variance is
                    value = value.clamp(min=0)
                after[name] = value.to(self.server[name])
        return after
