"""The selection problem as arrays: what the solvers see, and what they give back.

Only resources that can be exceeded are left in, and groups whose blocks cost the same are joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from pfedgate.gating.selection.costs import Bools, CostModel, Floats, Ints, Polynomial


class Solver(Protocol):
    """Finds how many blocks to keep per group."""

    def solve(self, prefix: Floats) -> Ints:
        """Counts per group; `prefix[g, k]` is the value of the k best blocks of group g."""
        ...

    def maximal(self) -> Ints | None:
        """All maximal feasible vectors of counts, one per row, if they are known."""
        ...


@dataclass(frozen=True)
class Problem:
    """Bound resources r and groups g in arrays; live units are ``first + step * kept``.

    cost[r] = const[r] + linear[r] @ u + sum over g <= h of pairs[r, g, h] u_g u_h, to be at most limits[r].
    """

    counts: Ints
    first: Floats
    step: Floats
    const: Floats
    linear: Floats
    pairs: Floats
    limits: Floats
    places: Ints  # [group, block] -> index in the importance vector; the size of that vector where there is no block
    size: int

    @classmethod
    def of(cls, costs: CostModel, limits: Mapping[str, float]) -> Problem:
        """Only resources whose limit can be exceeded are bound; groups that cost the same are one."""
        dense = costs.dense()
        bound = [(costs.polynomials[r], limit) for r, limit in limits.items() if dense.get(r, 0.0) > limit]
        size = len(costs.groups)
        first = np.array([group.first for group in costs.groups], dtype=float)
        blocks = np.array([group.count for group in costs.groups], dtype=np.int64)
        linear = np.array([p.linear for p, _ in bound]).reshape(-1, size)
        pairs = np.array([p.pairs for p, _ in bound]).reshape(-1, size, size)
        step = np.array([group.step for group in costs.groups], dtype=float)
        classes = _alike(step, linear, pairs)
        one = [members[0] for members in classes]
        both = pairs + np.triu(pairs, 1).transpose(0, 2, 1)
        starts = np.cumsum(blocks) - blocks
        counts = np.array([blocks[members].sum() for members in classes], dtype=np.int64)
        places = np.full((len(classes), max(1, int(counts.max(initial=0)))), int(blocks.sum()))
        for row, members in zip(places, classes, strict=True):
            inside = [np.arange(starts[g], starts[g] + blocks[g]) for g in members]
            row[: sum(map(len, inside))] = np.concatenate(inside)
        return cls(
            counts=counts,
            first=np.array([first[members].sum() for members in classes]),
            step=step[one],
            const=np.array([p.const for p, _ in bound]),
            linear=linear[:, one],
            pairs=np.triu(both[:, one][:, :, one]),
            # Sums of fractions depend on their order; a hair below the limit no order can exceed it.
            limits=np.array([limit if p.whole else max(limit * (1 - 1e-12), p(first)) for p, limit in bound]),
            places=places,
            size=int(blocks.sum()),
        )

    @cached_property
    def _rows(self) -> Ints:
        return np.arange(len(self.places))[:, None]

    @property
    def costly(self) -> Ints:
        """Groups with optional blocks that cost something; the others are free to keep whole."""
        touched = self.linear.any(0) | self.pairs.any((0, 1)) | self.pairs.any((0, 2))
        return np.flatnonzero(touched & (self.counts > 0))

    def cost(self, kept: Ints) -> Floats:
        """Cost per bound resource of vectors of counts: [..., group] -> [..., resource]."""
        units = self.first + self.step * kept
        bent = np.einsum("...g,rgh,...h->...r", units, self.pairs, units, optimize=True)
        result: Floats = self.const + units @ self.linear.T + bent
        return result

    def feasible(self, kept: Ints) -> bool:
        return bool(np.all(self.cost(kept) <= self.limits))

    def polynomial(self, resource: int) -> Polynomial:
        return Polynomial(float(self.const[resource]), self.linear[resource], self.pairs[resource])

    def rank(self, importance: Floats) -> Ranked:
        """Checks the importances and sorts them within each group."""
        values = np.asarray(importance, dtype=np.float64)
        if values.shape != (self.size,):
            raise ValueError(f"importances of shape {values.shape}, expected one per optional block: ({self.size},)")
        # Once per batch on small arrays: what takes time here are calls, numpy's reductions above all.
        if not math.isfinite(values.dot(values)) and not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(f"importance of block {bad} is {values[bad]}: the gate diverged; lower its learning rate")
        padded = np.empty(self.size + 1)
        padded[:-1], padded[-1] = values, -1.0
        order = (-padded[self.places]).argsort(axis=1, kind="stable")
        places = self.places[self._rows, order]
        gain = np.maximum(padded[places], 0.0)
        prefix = np.zeros((gain.shape[0], gain.shape[1] + 1))
        # On a grid of whole numbers below 2^52 every sum of values is exact, so that ties are ties for every solver.
        top = max(gain[:, 0].tolist(), default=0.0)  # the most important blocks come first
        bits = 51 - max(1, self.size).bit_length() - math.frexp(top)[1] if top else 0
        np.rint(np.ldexp(gain, bits)).cumsum(axis=1, out=prefix[:, 1:])
        return Ranked(prefix, places, values >= 0.0)

    def reachable(self, maximal: Ints | None, limit: int) -> int:
        """Number of masks whose counts are one of the `maximal` vectors, up to `limit`."""
        vectors: Iterable[Ints] = self._some_maximal() if maximal is None else maximal
        total = 0
        for kept in vectors:
            ways = 1
            for n, k in zip(self.counts, kept, strict=True):
                ways = min(limit, ways * math.comb(int(n), int(k)))
            total += ways
            if total >= limit:
                return limit
        return total

    def _some_maximal(self) -> Iterator[Ints]:
        """Maximal vectors found by filling one group first: a single one exactly if there is no other at all."""
        found = set()
        for lead in range(len(self.counts)):
            kept = np.zeros_like(self.counts)
            for g in [lead, *range(len(self.counts))]:
                while kept[g] < self.counts[g] and self.feasible(kept + (np.arange(len(kept)) == g)):
                    kept[g] += 1
            if kept.tobytes() not in found:
                found.add(kept.tobytes())
                yield kept


def _alike(step: Floats, linear: Floats, pairs: Floats) -> list[list[int]]:
    """Groups in classes: the cost of a class depends only on how many blocks are kept in it altogether.

    So it is for groups with the same step, the same cost per unit and the same coupling to every other group (which
    leaves none between them): the inner layers of equal residual blocks, the heads of equal transformer layers.
    """
    both = pairs + pairs.transpose(0, 2, 1)
    classes: dict[tuple[object, ...], list[int]] = {}
    for g in range(len(step)):
        itself = g if both[:, g, g].any() else -1  # a squared share is not a function of the sum
        key = (itself, step[g], linear[:, g].tobytes(), both[:, g].tobytes())
        classes.setdefault(key, []).append(g)
    return list(classes.values())


@dataclass(frozen=True)
class Ranked:
    """Importances sorted within each group."""

    prefix: Floats
    places: Ints  # as in the problem, but the most important block first
    welcome: Bools

    def mask(self, kept: Ints) -> Bools:
        """The mask that keeps the best `kept[g]` blocks of each group, save those of negative importance."""
        chosen = np.arange(self.places.shape[1]) < kept[:, None]
        mask = np.zeros(self.welcome.size + 1, dtype=bool)
        mask[self.places[chosen]] = True
        result: Bools = mask[:-1] & self.welcome
        return result
