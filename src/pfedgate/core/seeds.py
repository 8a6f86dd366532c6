"""Randomness by path: every draw has a name, so nothing depends on what was drawn before it.

A path such as `(seed, "batches", round, client)` leads to the same numbers in any process, in any order of
clients, with or without evaluation in between. Ways to use a path:

    generator(...)   a torch.Generator of its own; numpy_generator(...) is numpy's
    orders(...)      the order of samples in an epoch, for one client or for many at once
    seeded(...)      torch's global generator, for code that reads it (new modules, dropout), put back after
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

Words = np.ndarray[Any, np.dtype[np.uint64]]
Word = str | int


def key(seed: int, *path: Word) -> int:
    """A number of 64 bits for a path.

    >>> key(0, "batches", 3, "anna") == key(0, "batches", 3, "anna")
    True
    >>> key(0, "batches", 31) == key(0, "batches", 3, 1)
    False
    """
    text = "\x1f".join([str(int(seed)), *map(str, path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(seed: int, *path: Word) -> torch.Generator:
    """A generator for one purpose.

    >>> a, b = generator(0, "masks", 1), generator(0, "masks", 1)
    >>> bool((torch.rand(3, generator=a) == torch.rand(3, generator=b)).all())
    True
    """
    # The CPU generator keeps 32 bits of a seed; the path is spread over all of them already.
    return torch.Generator().manual_seed(key(seed, *path) >> 1)


def numpy_generator(seed: int, *path: str | int) -> np.random.Generator:
    """A numpy generator for one purpose.

    The same seed and path give the same stream in every process and on every machine; two different paths
    give independent streams.

    >>> bool(numpy_generator(0, "split").random() == numpy_generator(0, "split").random())
    True
    >>> bool(numpy_generator(0, "split").random() == numpy_generator(0, "novel").random())
    False
    """
    text = "\x1f".join([str(int(seed)), *(f"{type(step).__name__}:{step}" for step in path)])
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def orders(keys: Sequence[int], sizes: Sequence[int], epoch: int = 0) -> list[np.ndarray[Any, Any]]:
    """A permutation of `range(size)` for every key: the order of a client's samples in one epoch.

    Stateless, so hundreds of clients are ordered in one call, each exactly as it would be alone.

    >>> a, b = orders([7, 8], [4, 5])
    >>> sorted(a.tolist()), bool((b == orders([8], [5])[0]).all())
    ([0, 1, 2, 3], True)
    """
    longest = max(sizes, default=0)
    if len(set(sizes)) == 1:
        ranks = np.argsort(_hash(keys, longest, epoch), axis=1, kind="stable")
        return list(ranks)
    words = _hash(keys, longest, epoch)
    return [np.argsort(row[:size], kind="stable") for row, size in zip(words, sizes, strict=True)]


def _hash(keys: Sequence[int], size: int, epoch: int) -> Words:
    """SplitMix64 of (key, epoch, position): one row of pseudo-random words for every key."""
    rows = np.array(keys, dtype=np.uint64)[:, None]
    with np.errstate(over="ignore"):
        rows = _mix(rows + np.uint64(epoch + 1) * np.uint64(0x9E3779B97F4A7C15))
        steps = np.arange(1, size + 1, dtype=np.uint64)[None, :] * np.uint64(0x9E3779B97F4A7C15)
        return _mix(rows + steps)


def _mix(z: Words) -> Words:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@contextmanager
def seeded(seed: int, *path: Word) -> Iterator[None]:
    """Torch's global generators seeded by a path, and put back afterwards whatever happens.

    Building a module, dropout and the like read the global generator; inside this block what they read
    depends on the path only, and outside nobody notices.

    >>> before = torch.get_rng_state()
    >>> with seeded(0, "init"): a = torch.rand(1)
    >>> with seeded(0, "init"): b = torch.rand(1)
    >>> bool(a == b), bool((before == torch.get_rng_state()).all())
    (True, True)
    """
    value = key(seed, *path) >> 1
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        device = "cuda" if torch.cuda.is_available() else "mps"
        with torch.random.fork_rng(device_type=device):
            torch.random.manual_seed(value)
            yield
        return
    # The same as fork_rng without its search for accelerators, which costs more than a small client's batch.
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(value)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
