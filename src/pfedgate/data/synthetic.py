"""Made-up data: very many clients without memory, and a task on which one model for all must fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedgate.core.ids import Ids
from pfedgate.core.seeds import numpy_generator
from pfedgate.data.federation import Federation
from pfedgate.data.partition import Partition, numbered
from pfedgate.data.pool import ArrayPool, Rows
from pfedgate.data.sharing import VAL, Sharing, assemble, carve, hold_out, read


class SyntheticPool:
    """Samples made when they are asked for, from the seed and the number of the client: nothing is stored."""

    def __init__(self, clients: int, samples: int, features: int, classes: int, labels: int, seed: int) -> None:
        self.clients, self.samples, self.features = clients, samples, features
        self.classes, self.labels, self.seed = classes, labels, seed

    @cached_property
    def _centres(self) -> np.ndarray[Any, Any]:
        drawn = numpy_generator(self.seed, "synthetic", "centres").normal(size=(self.classes, self.features))
        centres: np.ndarray[Any, Any] = (drawn * 4 / np.sqrt(self.features)).astype(np.float32)
        return centres

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input as a model sees it."""
        return (self.features,)

    def __len__(self) -> int:
        return self.clients * self.samples

    def _client(self, client: int) -> tuple[np.ndarray[Any, Any], np.random.Generator]:
        rng = numpy_generator(self.seed, "synthetic", client)
        mine = rng.permutation(self.classes)[: self.labels]
        return mine[rng.integers(0, len(mine), self.samples)], rng

    def x(self, rows: Tensor) -> Tensor:
        """Inputs: the centre of the class, a shift of the client, noise."""

        def made(client: int) -> np.ndarray[Any, Any]:
            y, rng = self._client(client)
            drawn = rng.standard_normal((self.samples + 1, self.features), dtype=np.float32)
            inputs: np.ndarray[Any, Any] = self._centres[y] + 0.2 * drawn[0] + 0.5 * drawn[1:]
            return inputs

        return self._gather(rows, made, np.empty((len(rows), self.features), np.float32))

    def y(self, rows: Tensor) -> Tensor:
        """Labels: each client has a few of the classes."""
        return self._gather(rows, lambda client: self._client(client)[0], np.empty(len(rows), np.int64))

    def _gather(self, rows: Tensor, made: Callable[[int], np.ndarray[Any, Any]], out: np.ndarray[Any, Any]) -> Tensor:
        """These rows of what is made client by client."""
        clients, inside = np.divmod(rows.numpy(), self.samples)
        order = np.argsort(clients, kind="stable")
        names, starts = np.unique(clients[order], return_index=True)
        for client, places in zip(names.tolist(), np.split(order, starts[1:]), strict=True):
            out[places] = made(client)[inside[places]]
        return torch.from_numpy(out)

    def share(self) -> None:
        """Nothing is stored, so nothing is to be shared."""


def synthetic(
    clients: int = 100_000,
    samples_per_client: int = 20,
    features: int = 64,
    classes: int = 10,
    *,
    classes_per_client: int = 3,
    seed: int = 0,
    novel: float = 0.0,
    val: bool = True,
) -> Federation:
    """Any number of clients in a few megabytes: samples are made when asked for.

    >>> federation = synthetic(clients=1000)
    >>> part = federation.part("007", "train")
    >>> part.x.shape, bool((part.x == federation.part("007", "train").x).all())
    (torch.Size([12, 64]), True)
    """
    least = 3 if val else 2
    if clients < 1 or samples_per_client < least:
        raise ValueError(f"need at least 1 client and {least} samples each, got {clients}, {samples_per_client}")
    if not 1 <= classes_per_client <= classes:
        raise ValueError(f"classes_per_client must be between 1 and {classes}, got {classes_per_client}")
    pool = SyntheticPool(clients, samples_per_client, features, classes, classes_per_client, seed)
    # Samples of a client are independent draws, so any fixed cut is a random one and no shuffle is stored.
    sizes = np.array([samples_per_client])
    n_test = int(carve(sizes, 0.2)[0])
    n_val = int(carve(sizes - n_test, VAL)[0]) if val else 0
    cuts = np.array([0, samples_per_client - n_test - n_val, samples_per_client - n_test])
    bounds = np.empty(3 * clients + 1, dtype=np.int32 if len(pool) < 2**31 else np.int64)
    for at, cut in enumerate(cuts):
        bounds[at:-1:3] = np.arange(cut, len(pool), samples_per_client, dtype=bounds.dtype)
    bounds[-1] = len(pool)
    return Federation(
        "synthetic",
        pool,
        Ids(numbered(clients)),
        None,
        Rows(bounds),
        hold_out(clients, novel, seed),
        classes=classes,
        about={"dataset": "synthetic", "partition": "synthetic", "seed": seed},
    )


def conflicting(
    clients: int = 10, samples_per_client: int = 100, features: int = 16, classes: int = 2, **options: Any
) -> Federation:
    """Two kinds of clients who name the same things differently: no single model can exceed about one half.

    Inputs of all clients come from the same clusters; even clients call cluster k class k, odd clients call
    it k + 1. Personal models can be right everywhere; the best shared one is right for one kind only.

    >>> federation = conflicting(clients=4)
    >>> federation
    Federation('conflicting', 4 clients, 400 samples of shape (16,), 2 classes)
    """
    if classes < 2:
        raise ValueError(f"a conflict needs at least 2 classes, got {classes}")
    sharing = read(Sharing, options, "conflicting")
    rng = numpy_generator(sharing.seed, "conflicting")
    total = clients * samples_per_client
    centres = rng.normal(size=(classes, features))
    centres *= 4 / np.linalg.norm(centres, axis=1, keepdims=True)
    cluster = np.arange(total) % classes
    x = (centres[cluster] + rng.normal(size=(total, features)) * 0.5).astype(np.float32)
    client = np.arange(total) // samples_per_client
    y = (cluster + client % 2) % classes
    partition = Partition(
        numbered(clients),
        np.arange(total),
        np.arange(clients + 1) * samples_per_client,
        {"partition": "owner"},
    )
    pool = ArrayPool(Rows(x), Rows(y.astype(np.int64)), image=False)
    return assemble("conflicting", pool, partition, sharing, classes=classes, about={"dataset": "conflicting"})
