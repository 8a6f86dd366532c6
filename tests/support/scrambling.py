"""Federations whose labels in one part are random: a result must not change that must not read them."""

from __future__ import annotations

import copy

import torch

from pfedgate.core.seeds import generator
from pfedgate.data.federation import Federation
from pfedgate.data.pool import ArrayPool, Rows


def scrambled(federation: Federation, part: str, seed: int = 0) -> Federation:
    """A copy with random labels in this part of every client."""
    assert isinstance(federation.pool, ArrayPool)
    labels = federation.pool.y(torch.arange(len(federation.pool))).clone()
    rows = torch.cat([federation.part(client, part).rows for client in federation.ids])
    stream = generator(seed, "scramble", part)
    labels[rows] = torch.randint(federation.classes, (len(rows), *labels.shape[1:]), generator=stream)
    other = copy.copy(federation)
    other.pool = ArrayPool(federation.pool._x, Rows(labels), image=federation.pool.image)
    return other
