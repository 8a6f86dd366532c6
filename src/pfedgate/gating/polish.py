"""From counts near the optimum to good ones that fit: drop what does not fit, fill what is left, exchange.

The exchange tries, at the exact cost, thousands of sets of small changes at once. Changes are ranked by what they
lose at the current prices; a set is tried if its ranks add up to little, since the best one loses little in all.
"""

from __future__ import annotations

import numpy as np

from .costs import Floats, Ints
from .lagrange import Quadratic

RANK_SUMS = (16, 20)  # of the changes with odd ranks and of those with even ranks: 169 sets of each, or 371
SPANS = ((0, 1), (1, 2), (2, 4))  # a change adds or drops the blocks from the first to the second next to the count


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

    def exchange(self, kept: Ints, prefix: Floats, prices: Floats, tried: Floats) -> Ints | None:
        """The best set of changes tried that still fits, if any is better than none."""
        costs, group = self._costs, self._group
        marginal = costs.marginal(kept.astype(float))
        most = costs.most[group]
        near = np.clip(kept[group] + self._near, 0, most)
        far = np.clip(kept[group] + self._far, 0, most)
        change = far - near
        value = prefix[group, far] - prefix[group, near]
        loss = np.where(change != 0, (prices @ marginal)[group] * change - value, np.inf)
        chosen = np.argsort(loss, kind="stable")[: 2 * tried.shape[1]]
        chosen = chosen[change[chosen] != 0]
        group, step, value = group[chosen], change[chosen].astype(float), value[chosen]
        room = costs.limits - costs.cost(kept.astype(float))
        linear = marginal[:, group] * step
        curve = self._curve[:, group[:, None], group] * (0.5 * step[:, None] * step)
        halves = slice(0, None, 2), slice(1, None, 2)  # any set of one half of the changes with any of the other
        sets = [tried[:, : len(chosen[half])] for half in halves]
        gain = np.add.outer(*(part @ value[half] for part, half in zip(sets, halves, strict=True)))
        fits = gain > 0
        for r, left in enumerate(room.tolist()):
            own = [part @ linear[r, half] for part, half in zip(sets, halves, strict=True)]
            if r in self._bent:
                own = [
                    cost + ((part @ curve[r, half, half]) * part).sum(1)
                    for cost, part, half in zip(own, sets, halves, strict=True)
                ]
            added = np.add.outer(*own)
            if r in self._bent:
                added += (sets[0] @ (2 * curve[r, halves[0], halves[1]])) @ sets[1].T
            fits &= added <= left
        gain *= fits
        first, second = divmod(int(gain.argmax()), gain.shape[1])
        if gain[first, second] <= 0:
            return None
        moves = np.zeros(len(chosen))
        moves[halves[0]], moves[halves[1]] = sets[0][first], sets[1][second]
        return kept + np.bincount(group, moves * step, len(self._groups)).astype(np.int64)
