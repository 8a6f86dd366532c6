"""One small generated data set for every kind of task that has no classes of whole samples, for trying and testing.

    tags      multilabel      which of a few patterns a signal contains; clients call them by different names
    meters    regression      a quantity from sensor readings; every client's sensors are off in their own way
    shapes    segmentation    discs and squares on noise; some clients see them dark on bright
    babble    language        tokens by a rule of which each client has its own variant

In all of them one model for everybody must be worse than a personal one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pfedgate.core.seeds import numpy_generator
from pfedgate.data.federation import Federation
from pfedgate.data.own import from_arrays
from pfedgate.data.partition import numbered

Array = np.ndarray[Any, Any]


def _owned(name: str, task: str, x: Array, y: Array, clients: int, options: dict[str, Any]) -> Federation:
    owners = np.repeat(numbered(clients), len(x) // clients)
    return from_arrays(x, y, owners=owners, task=task, **{"name": name, **options})


def tags(
    clients: int = 10, samples_per_client: int = 60, features: int = 16, labels: int = 6, **options: Any
) -> Federation:
    """Signals that contain some of `labels` patterns; a client's names of the patterns are rotated.

    >>> tags(clients=3)
    Federation('tags', 3 clients, 180 samples of shape (16,), multilabel of 6)
    """
    rng = numpy_generator(int(options.get("seed") or 0), "tags")
    client = np.repeat(np.arange(clients), samples_per_client)
    patterns = rng.normal(size=(labels, features))
    present = rng.random((len(client), labels)) < 0.35
    x = present @ patterns + 0.3 * rng.normal(size=(len(client), features))
    places = (np.arange(labels) + (client % 2)[:, None]) % labels
    return _owned("tags", "multilabel", x.astype(np.float32), np.take_along_axis(present, places, 1), clients, options)


def meters(clients: int = 10, samples_per_client: int = 60, features: int = 8, **options: Any) -> Federation:
    """A number from sensor readings; half of the clients' sensors count the other way round.

    >>> meters(clients=3)
    Federation('meters', 3 clients, 180 samples of shape (8,), regression of 1)
    """
    rng = numpy_generator(int(options.get("seed") or 0), "meters")
    client = np.repeat(np.arange(clients), samples_per_client)
    x = rng.normal(size=(len(client), features))
    weights = rng.normal(size=features) / np.sqrt(features)
    sign = np.where(client % 2 == 0, 1.0, -1.0)
    y = np.tanh(x @ weights) * sign + 0.5 * rng.normal(size=clients)[client] + 0.05 * rng.normal(size=len(client))
    return _owned("meters", "regression", x.astype(np.float32), y.astype(np.float32), clients, options)


def shapes(clients: int = 8, samples_per_client: int = 40, size: int = 16, **options: Any) -> Federation:
    """Images of a disc and a square on noise, and for every pixel what it shows: nothing, disc or square.

    >>> shapes(clients=3)
    Federation('shapes', 3 clients, 120 samples of shape (1, 16, 16), segmentation of 3)
    """
    rng = numpy_generator(int(options.get("seed") or 0), "shapes")
    total = clients * samples_per_client
    down, across = np.mgrid[:size, :size]
    centres, radii = rng.uniform(0.2, 0.8, (2, 2, total, 1, 1)) * size, rng.uniform(0.1, 0.25, (2, total, 1, 1)) * size
    offsets = [(down - one[0], across - one[1]) for one in centres]
    disc = np.hypot(*offsets[0]) < radii[0]
    square = np.maximum(*np.abs(offsets[1])) < radii[1]
    y = np.where(square, 2, np.where(disc, 1, 0))
    client = np.repeat(np.arange(clients), samples_per_client)
    ink = np.where(client % 2 == 0, 0.35, -0.35)[:, None, None] * np.array([0.0, 1.0, 0.8])[y]
    x = np.clip(0.5 + ink + 0.15 * rng.normal(size=y.shape), 0, 1)
    return _owned("shapes", "segmentation", (255 * x).astype(np.uint8), y, clients, options)


def babble(
    clients: int = 10, samples_per_client: int = 40, length: int = 12, tokens: int = 12, **options: Any
) -> Federation:
    """Sequences in which a token is followed by its successor, two or three places on, depending on the client.

    >>> babble(clients=3)
    Federation('babble', 3 clients, 120 samples of shape (12,), language of 12)
    """
    rng = numpy_generator(int(options.get("seed") or 0), "babble")
    total = clients * samples_per_client
    step = 2 + np.repeat(np.arange(clients), samples_per_client) % 2
    slips = rng.random((total, length + 1)) < 0.1
    text = np.empty((total, length + 1), dtype=np.int64)
    text[:, 0] = rng.integers(0, tokens, total)
    for at in range(1, length + 1):
        text[:, at] = np.where(slips[:, at], rng.integers(0, tokens, total), (text[:, at - 1] + step) % tokens)
    return _owned("babble", "language", text[:, :-1], text[:, 1:], clients, {"classes": tokens, **options})
