"""From counts near the optimum to good ones that fit: drop what does not fit, fill what is left, exchange.

The exchange tries, at the exact cost, tens of thousands of sets of small changes at once. Changes are ranked by what
they lose at the current prices; a set is tried if its ranks add up to little, since the best one loses little in all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pfedgate.gating.selection.costs import Floats, Ints
from pfedgate.gating.selection.lagrange import Quadratic

RANK_SUMS = (16, 20)  # of the changes with odd ranks and of those with even ranks: 169 or 371 sets of each
SPANS = ((0, 1), (1, 2), (2, 4))  # a change adds or drops the blocks from the first to the second next to the count
NEVER = 1e30  # loss of a change that changes nothing: such sets are never tried
PIECE = 30_000  # pairs of sets tried at once: their numbers stay in the cache
ONE_THREAD = 200_000  # multiplications of a product of matrices up to which BLAS wakes no other threads: on a busy
# machine waiting for them takes a thousand times as long as the product
BOLD = 0.5  # share of what is over, or of what is left, to drop or add at once in one group


class Half(NamedTuple):
    """Sets of changes: what they lose at the prices (ascending), gain and cost per resource."""

    sets: Floats
    lost: Floats
    gain: Floats
    added: Floats


class Sets:
    """All sets of different ranks 1, 2, ... with a sum of at most `total`, as rows of zeros and ones."""

    def __init__(self, total: int) -> None:
        rows: list[list[int]] = [[]]
        for row in rows:
            rows.extend([*row, rank] for rank in range(row[-1] + 1 if row else 1, total - sum(row) + 1))
        self.each: Floats = np.zeros((len(rows), total))
        for i, row in enumerate(rows):
            self.each[i, np.array(row, dtype=int) - 1] = 1.0
        self._pairs = np.triu_indices(total)
        self._both: Floats = self.each[:, self._pairs[0]] * self.each[:, self._pairs[1]]
        self._twice = np.where(self._pairs[0] == self._pairs[1], 1.0, 2.0)

    def halves(self, loss: Floats, value: Floats, added: Floats, curve: Floats, bent: list[int]) -> list[Half]:
        """The sets of the changes of each half: [half, change], costs [resource, half, change] and their curvature."""
        columns = np.concatenate([loss[..., None], value[..., None], added.transpose(1, 2, 0)], axis=2)
        totals = self.each @ columns
        result = []
        for half, total in enumerate(totals):
            if bent:
                within = curve[:, half, :, half][:, self._pairs[0], self._pairs[1]] * self._twice
                total[:, [2 + r for r in bent]] += self._both @ within.T
            order = np.argsort(total[:, 0], kind="stable")
            total = total[order]
            result.append(Half(self.each[order], total[:, 0], total[:, 1], total[:, 2:]))
        return result


SETS = tuple(Sets(total) for total in RANK_SUMS)


def steps(prefix: Floats) -> Floats:
    """Value of the last block kept, for every count: infinite where none is kept, 0 beyond the last."""
    result = np.zeros((len(prefix), prefix.shape[1] + 1))
    result[:, 0] = np.inf
    np.subtract(prefix[:, 1:], prefix[:, :-1], out=result[:, 1:-1])
    return result


class Polish:
    """Improves vectors of counts of one cost model."""

    def __init__(self, costs: Quadratic) -> None:
        self._costs = costs
        self._half = costs.own / 2
        self._bold = np.where(self._half.any(0), 0.0, BOLD)  # one by one where a block costs more than the last
        size = len(costs.most)
        width = int(costs.most.max()) + 1
        self._levels, self._steps = np.arange(size) * width, np.arange(size) * (width + 1)  # where groups start
        self._square = 1.0 / costs.limits**2
        self._bent = [r for r, part in enumerate(costs.curve) if part.any()]
        self._curve = costs.curve[self._bent]
        self._per_group = np.ascontiguousarray(costs.curve.transpose(2, 0, 1))  # [group, resource, group]
        # All changes: group, direction, and the blocks it spans; and some that change nothing, to be enough for a set.
        signs = np.repeat(np.tile([1, -1], len(SPANS)), size)
        near = signs * np.repeat([lo for lo, _ in SPANS for _ in (0, 1)], size)
        far = signs * np.repeat([hi for _, hi in SPANS for _ in (0, 1)], size)
        none = max(0, 2 * max(RANK_SUMS) - len(signs))
        self._group = np.append(np.tile(np.arange(size), 2 * len(SPANS)), np.zeros(none, dtype=np.int64))
        self._most, self._first = costs.most[self._group], self._levels[self._group]
        self._ends = np.array([np.append(near, np.zeros(none)), np.append(far, np.zeros(none))]).astype(np.int64)

    def fit(self, kept: Ints, steps: Floats) -> Ints:
        """Drops blocks until all vectors of counts fit: little value lost for much of what is over the limits."""
        costs, loss = self._costs, steps.ravel()
        kept, each = kept.copy(), np.arange(len(kept))
        exact = kept.astype(float)
        over = costs.cost(exact) - costs.limits
        saved = costs.marginal(exact) - self._half  # by the next block dropped
        while (over > 0).any():
            excess = np.maximum(over, 0.0)
            weight = ((excess * self._square)[:, None] @ saved)[:, 0]
            score = np.where(weight > 0, loss[self._steps + kept] / np.maximum(weight, 1e-300), np.inf)
            g = score.argmin(1)
            first = saved[each, :, g]
            needed = (excess / np.maximum(first, 1e-300)).max(1)
            less = np.floor(np.minimum(np.maximum(needed * BOLD, needed > 0), kept[each, g]))
            if not less.any():  # what is over is rounding
                break
            over -= less[:, None] * first - (less * (less - 1))[:, None] * self._half.T[g]
            saved -= less[:, None, None] * self._per_group[g]
            kept[each, g] -= less.astype(np.int64)
        return kept

    def fill(self, kept: Ints, steps: Floats) -> Ints:
        """Adds blocks to all vectors of counts while any fits: much value for little of the room that is left."""
        costs, gain = self._costs, steps.ravel()[1:]
        kept, each = kept.copy(), np.arange(len(kept))
        exact = kept.astype(float)
        room = costs.limits - costs.cost(exact)
        needed = costs.marginal(exact) + self._half  # for the next block added
        while True:
            share = (needed / np.maximum(room, 1e-300)[:, :, None]).max(1)
            fits = (share <= 1) & (kept < costs.most)
            if not fits.any():
                return kept
            g = np.where(fits, gain[self._steps + kept] / (share + 0.05), -1.0).argmax(1)
            here = each, g
            most = np.where(fits[here], (costs.most - kept)[here], 0)
            more = np.floor(np.minimum(np.maximum(self._bold[g] / np.maximum(share[here], 1e-9), 1.0), most))
            room -= more[:, None] * needed[each, :, g] + (more * (more - 1))[:, None] * self._half.T[g]
            needed += more[:, None, None] * self._per_group[g]
            kept[here] += more.astype(np.int64)

    def exchange(self, kept: Ints, prefix: Floats, prices: Floats, tried: Sets) -> Ints | None:
        """The best set of changes tried that still fits, if any is better than none."""
        costs = self._costs
        exact = kept.astype(float)
        marginal = costs.marginal(exact)
        near, far = np.minimum(np.maximum(kept[self._group] + self._ends, 0), self._most)
        change = far - near
        values = prefix.ravel()
        value = values[self._first + far] - values[self._first + near]
        loss = np.where(change != 0, (prices @ marginal)[self._group] * change - value, NEVER)
        # Of the least losses every other one belongs to the one half, the rest to the other: [half, change].
        chosen = np.argsort(loss, kind="stable")[: 2 * tried.each.shape[1]].reshape(-1, 2).T
        group, step = self._group[chosen], change[chosen].astype(float)
        room = costs.limits - costs.cost(exact)
        flat_group, flat_step = group.ravel(), step.ravel()
        curve = self._curve[:, flat_group[:, None], flat_group] * (0.5 * flat_step[:, None] * flat_step)
        curve = curve.reshape(-1, *group.shape, *group.shape)
        added = marginal[:, group] * step
        one, two = tried.halves(loss[chosen], value[chosen], added, curve, self._bent)
        # Any set of one half of the changes with any of the other. What sets gain together is what their cost is worth
        # at the prices less what they lose, so pairs that lose more than the room is worth need not be tried.
        between = 2 * curve[:, 0, :, 1]
        left = float(prices @ room)
        if self._bent:
            together = prices[self._bent] @ between.reshape(len(between), -1)
            left -= float(np.minimum(together, 0.0).reshape(between.shape[1:]).min(1).sum())
        best = _best_pair(one, two, between, room, self._bent, left)
        if best is None:
            return None
        moves = np.array([one.sets[best[0]], two.sets[best[1]]]) * step
        better: Ints = kept + np.bincount(flat_group, moves.ravel(), len(kept)).astype(np.int64)
        return better if (costs.cost(better.astype(float)) <= costs.limits).all() else None


def _best_pair(
    one: Half, two: Half, between: Floats, room: Floats, bent: list[int], worth: float
) -> tuple[int, int] | None:
    """The pair of the largest gain that fits; `between` is the cost of two changes together beyond that of each.

    In single precision, which leaves a little room unused, and in pieces that stay in the cache.
    """
    unused = 4e-7 * (np.abs(one.added).max(0) + np.abs(two.added).max(0))
    left = (room - unused).astype(np.float32)
    gains = [half.gain.astype(np.float32) for half in (one, two)]
    costs = [half.added.T.astype(np.float32) for half in (one, two)]
    # Where costs bend, the sum of the two costs is part of the same product of matrices.
    size, changes = one.sets.shape
    bends = {}
    for r, part in zip(bent, between, strict=True):
        rows, columns = np.ones((size, changes + 2), np.float32), np.ones((changes + 2, size), np.float32)
        rows[:, :changes], rows[:, changes] = one.sets @ part, costs[0][r]
        columns[:changes], columns[changes + 1] = two.sets.T, costs[1][r]
        bends[r] = rows, columns
    best, most = None, np.float32(0.0)
    piece = max(1, min(PIECE, ONE_THREAD // (changes + 2)) // size)
    for start in range(0, size, piece):
        width = int(np.searchsorted(two.lost, worth - one.lost[start], side="right"))
        if not width:
            break
        here = slice(start, start + piece)
        gain = np.add.outer(gains[0][here], gains[1][:width])
        fits = gain > most
        for r, limit in enumerate(left):
            if r in bends:
                cost = bends[r][0][here] @ bends[r][1][:, :width]
            else:
                cost = np.add.outer(costs[0][r, here], costs[1][r, :width])
            fits &= cost <= limit
        gain *= fits
        first, second = divmod(int(gain.argmax()), width)
        if gain[first, second] > most:
            best, most = (start + first, second), gain[first, second]
    return best
