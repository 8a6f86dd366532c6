"""From counts near the optimum to good ones that fit: drop what does not fit, fill what is left, exchange.

The exchange tries, at the exact cost, thousands of sets of small changes at once. Changes are ranked by what they
lose at the current prices; a set is tried if its ranks add up to little, since the best one loses little in all.
"""

from __future__ import annotations

import numpy as np

from .costs import Floats, Ints
from .lagrange import Quadratic

RANKS = 24  # small changes considered together
RANK_SUM = 32  # largest sum of ranks of a set: 2,703 sets
SPANS = ((0, 1), (1, 2), (2, 4))  # a change adds or drops the blocks from the first to the second next to the count


def _sets(total: int, width: int) -> Floats:
    """All sets of distinct ranks 1..width with a sum of at most `total`, as rows of zeros and ones."""
    rows: list[list[int]] = [[]]
    for row in rows:
        start = row[-1] + 1 if row else 1
        rows.extend([*row, rank] for rank in range(start, min(width, total - sum(row)) + 1))
    result = np.zeros((len(rows) - 1, width))
    for i, row in enumerate(rows[1:]):
        result[i, np.array(row) - 1] = 1.0
    return result


SETS = _sets(RANK_SUM, RANKS)


class Polish:
    """Improves vectors of counts of one cost model."""

    def __init__(self, costs: Quadratic) -> None:
        self._costs = costs
        self._half = costs.own / 2
        self._groups = np.arange(len(costs.most))
        self._bent = [r for r, part in enumerate(costs.curve.reshape(*costs.slope.shape, -1)) if part.any()]
        self._curve = costs.curve.reshape(*costs.slope.shape, -1)
        # All changes: group, direction, and the blocks it spans.
        self._group = np.tile(self._groups, 2 * len(SPANS))
        signs = np.repeat(np.tile([1, -1], len(SPANS)), len(self._groups))
        self._near = signs * np.repeat([lo for lo, _ in SPANS for _ in (0, 1)], len(self._groups))
        self._far = signs * np.repeat([hi for _, hi in SPANS for _ in (0, 1)], len(self._groups))

    def fit(self, kept: Ints, prefix: Floats) -> Ints:
        """Drops blocks until the counts are feasible: little value lost for much of what is over the limit."""
        costs, groups, kept = self._costs, self._groups, kept.copy()
        over = costs.cost(kept.astype(float)) - costs.limits
        while (over > 0).any():
            saved = costs.marginal(kept.astype(float)) - self._half
            lost = prefix[groups, kept] - prefix[groups, np.maximum(kept - 1, 0)]
            weight = np.maximum(over, 0.0) / costs.limits**2
            with np.errstate(divide="ignore", invalid="ignore"):
                score = np.where((kept > 0) & (weight @ saved > 0), lost / (weight @ saved), np.inf)
            g = int(score.argmin())
            kept[g] -= 1
            over -= saved[:, g]
        return kept

    def fill(self, kept: Ints, prefix: Floats) -> Ints:
        """Adds blocks while any fits: much value for a small share of the room that is left."""
        costs, groups, kept = self._costs, self._groups, kept.copy()
        room = costs.limits - costs.cost(kept.astype(float))
        while True:
            needed = costs.marginal(kept.astype(float)) + self._half
            fits = (kept < costs.most) & (needed <= room[:, None]).all(0)
            if not fits.any():
                return kept
            gain = prefix[groups, np.minimum(kept + 1, costs.most)] - prefix[groups, kept]
            share = (needed / np.maximum(room, 1e-300)[:, None]).max(0)
            g = int(np.where(fits, gain / (share + 0.05), -1.0).argmax())
            kept[g] += 1
            room -= needed[:, g]

    def exchange(self, kept: Ints, prefix: Floats, prices: Floats) -> Ints | None:
        """The best set of changes tried that still fits, if any is better than none."""
        costs, group = self._costs, self._group
        marginal = costs.marginal(kept.astype(float))
        most = costs.most[group]
        near = np.clip(kept[group] + self._near, 0, most)
        far = np.clip(kept[group] + self._far, 0, most)
        change = far - near
        value = prefix[group, far] - prefix[group, near]
        loss = np.where(change != 0, (prices @ marginal)[group] * change - value, np.inf)
        chosen = np.argsort(loss, kind="stable")[:RANKS]
        chosen = chosen[change[chosen] != 0]
        group, step, value = group[chosen], change[chosen].astype(float), value[chosen]
        gain = SETS[:, : len(chosen)] @ value
        better = np.flatnonzero(gain > 0)
        if not better.size:
            return None
        sets, gain = SETS[better, : len(chosen)], gain[better]
        added = sets @ (marginal[:, group] * step).T
        for r in self._bent:
            curve = self._curve[r, group[:, None], group] * (0.5 * step[:, None] * step)
            added[:, r] += np.einsum("ij,ij->i", sets @ curve, sets)
        room = costs.limits - costs.cost(kept.astype(float))
        gain = np.where((added <= room).all(1), gain, 0.0)
        best = int(gain.argmax())
        if gain[best] <= 0:
            return None
        moves = np.bincount(group, sets[best] * step, len(self._groups))
        return kept + moves.astype(np.int64)
