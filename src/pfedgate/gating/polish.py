"""From counts near the optimum to good ones that fit: drop what does not fit, fill what is left, exchange.

The exchange tries, at the exact cost, tens of thousands of sets of small changes at once. Changes are ranked by what
they lose at the current prices; a set is tried if its ranks add up to little, since the best one loses little in all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .costs import Floats, Ints
from .lagrange import Quadratic

RANK_SUMS = (16, 20)  # of the changes with odd ranks and of those with even ranks: 169 or 371 sets of each
SPANS = ((0, 1), (1, 2), (2, 4))  # a change adds or drops the blocks from the first to the second next to the count
PIECE = 30_000  # pairs of sets tried at once: their numbers stay in the cache
ONE_THREAD = 200_000  # multiplications of a product of matrices up to which BLAS wakes no other threads: on a busy
# machine waiting for them takes a thousand times as long as the product
BOLD = 0.5  # share of what is over, or of what is left, to drop or add at once in one group


def _sets(total: int) -> Floats:
    """All sets of different ranks 1, 2, ... with a sum of at most `total`, as rows of zeros and ones."""
    rows: list[list[int]] = [[]]
    for row in rows:
        rows.extend([*row, rank] for rank in range(row[-1] + 1 if row else 1, total - sum(row) + 1))
    result = np.zeros((len(rows), total))
    for i, row in enumerate(rows):
        result[i, np.array(row, dtype=int) - 1] = 1.0
    return result


SETS = tuple(_sets(total) for total in RANK_SUMS)


class Polish:
    """Improves vectors of counts of one cost model."""

    def __init__(self, costs: Quadratic) -> None:
        self._costs = costs
        self._half = costs.own / 2
        self._scale = 1.0 / costs.limits
        self._bold = np.where(self._half.any(0), 0.0, BOLD)  # one by one where a block costs more than the last
        self._groups = np.arange(len(costs.most))
        self._curve = costs.curve.reshape(*costs.slope.shape, -1)
        self._bent = [r for r, part in enumerate(self._curve) if part.any()]
        # All changes: group, direction, and the blocks it spans.
        self._group = np.tile(self._groups, 2 * len(SPANS))
        signs = np.repeat(np.tile([1, -1], len(SPANS)), len(self._groups))
        self._near = signs * np.repeat([lo for lo, _ in SPANS for _ in (0, 1)], len(self._groups))
        self._far = signs * np.repeat([hi for _, hi in SPANS for _ in (0, 1)], len(self._groups))

    def fit(self, kept: Ints, prefix: Floats) -> Ints:
        """Drops blocks until all vectors of counts fit: little value lost for much of what is over the limits."""
        costs, groups = self._costs, self._groups
        kept = kept.copy()
        rows = np.arange(len(kept))
        while True:
            over = costs.cost(kept[rows].astype(float)) - costs.limits
            high = (over > 0).any(1)
            if not high.any():
                return kept
            rows, over = rows[high], over[high]
            k, each = kept[rows], np.arange(len(rows))
            saved = costs.marginal(k.astype(float)) - self._half
            lost = prefix[groups, k] - prefix[groups, np.maximum(k - 1, 0)]
            weight = ((np.maximum(over, 0.0) * self._scale**2)[:, None] @ saved)[:, 0]
            score = np.where((k > 0) & (weight > 0), lost / np.maximum(weight, 1e-300), np.inf)
            g = score.argmin(1)
            needed = (np.maximum(over, 0.0) / np.maximum(saved[each, :, g], 1e-300)).max(1)
            kept[rows, g] -= np.minimum(np.maximum(needed * BOLD, 1.0), k[each, g]).astype(np.int64)

    def fill(self, kept: Ints, prefix: Floats) -> Ints:
        """Adds blocks to all vectors of counts while any fits: much value for little of the room that is left."""
        costs, groups = self._costs, self._groups
        kept = kept.copy()
        rows = np.arange(len(kept))
        while True:
            k = kept[rows]
            room = costs.limits - costs.cost(k.astype(float))
            needed = costs.marginal(k.astype(float)) + self._half
            fits = (k < costs.most) & (needed <= room[:, :, None]).all(1)
            some = fits.any(1)
            if not some.any():
                return kept
            if not some.all():
                rows, k, room, needed, fits = rows[some], k[some], room[some], needed[some], fits[some]
            gain = prefix[groups, np.minimum(k + 1, costs.most)] - prefix[groups, k]
            share = (needed / np.maximum(room, 1e-300)[:, :, None]).max(1)
            g = np.where(fits, gain / (share + 0.05), -1.0).argmax(1)
            here = np.arange(len(rows)), g
            more = np.minimum(np.maximum(self._bold[g] / np.maximum(share[here], 1e-9), 1.0), (costs.most - k)[here])
            kept[rows, g] += more.astype(np.int64)

    def exchange(self, kept: Ints, prefix: Floats, prices: Floats, tried: Floats) -> Ints | None:
        """The best set of changes tried that still fits, if any is better than none."""
        costs, group = self._costs, self._group
        marginal = costs.marginal(kept.astype(float))
        most = costs.most[group]
        near = np.minimum(np.maximum(kept[group] + self._near, 0), most)
        far = np.minimum(np.maximum(kept[group] + self._far, 0), most)
        change = far - near
        value = prefix[group, far] - prefix[group, near]
        loss = np.where(change != 0, (prices @ marginal)[group] * change - value, np.inf)
        chosen = np.argsort(loss, kind="stable")[: 2 * tried.shape[1]]
        chosen = chosen[change[chosen] != 0]
        group, step, value, loss = group[chosen], change[chosen].astype(float), value[chosen], loss[chosen]
        room = costs.limits - costs.cost(kept.astype(float))
        linear = marginal[:, group] * step
        curve = self._curve[:, group[:, None], group] * (0.5 * step[:, None] * step)
        # Any set of one half of the changes with any of the other. What sets gain together is what their cost is worth
        # at the prices less what they lose, so pairs that lose more than the room is worth need not be tried.
        parts = [
            self._sorted(tried, value[half], loss[half], linear[:, half], curve[:, half, half])
            for half in (slice(0, None, 2), slice(1, None, 2))
        ]
        between = 2 * curve[:, 0::2, 1::2]
        worth = float(prices @ room)
        if self._bent and between.size:
            worth -= float(np.minimum(np.tensordot(prices, between, 1), 0.0).min(1).sum())
        best = _best_pair(parts[0], parts[1], between, room, self._bent, worth)
        if best is None:
            return None
        moves = np.zeros(len(chosen))
        moves[0::2], moves[1::2] = parts[0].sets[best[0]], parts[1].sets[best[1]]
        better: Ints = kept + np.bincount(group, moves * step, len(self._groups)).astype(np.int64)
        return better if (costs.cost(better.astype(float)) <= costs.limits).all() else None

    def _sorted(self, tried: Floats, value: Floats, loss: Floats, linear: Floats, curve: Floats) -> Half:
        """All sets of some changes by what they lose, with their gains and costs."""
        sets = tried[:, : len(value)]
        lost = sets @ loss
        order = np.argsort(lost, kind="stable")
        sets = sets[order]
        added = sets @ linear.T
        for r in self._bent:
            added[:, r] += ((sets @ curve[r]) * sets).sum(1)
        return Half(sets, lost[order], sets @ value, added)


class Half(NamedTuple):
    """Sets of changes: what they lose at the prices (ascending), gain and cost."""

    sets: Floats
    lost: Floats
    gain: Floats
    added: Floats


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
    mixed = {r: (one.sets @ between[r]).astype(np.float32) for r in bent}
    right = two.sets.T.astype(np.float32)
    best, most = None, np.float32(0.0)
    piece = max(1, min(PIECE, ONE_THREAD // max(1, len(right))) // len(two.lost))
    for start in range(0, len(one.lost), piece):
        width = int(np.searchsorted(two.lost, worth - one.lost[start], side="right"))
        if not width:
            break
        rows = slice(start, start + piece)
        gain = np.add.outer(gains[0][rows], gains[1][:width])
        fits = gain > most
        for r in range(len(room)):
            cost = np.add.outer(costs[0][r, rows], costs[1][r, :width])
            if r in mixed:
                cost += mixed[r][rows] @ right[:, :width]
            fits &= cost <= left[r]
        gain *= fits
        first, second = divmod(int(gain.argmax()), width)
        if gain[first, second] > most:
            best, most = (start + first, second), gain[first, second]
    return best
