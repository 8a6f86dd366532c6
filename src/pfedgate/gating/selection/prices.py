"""Selection for many groups under several resources or products of groups: prices, then repair.

1. Every resource has a price. From several starting points, each group takes its best count at the
   prices, and the price of a resource rises while it is overused and falls while it is not.
2. The most promising counts drop blocks until they fit, and are filled up greedily.
3. The best of them exchange blocks: thousands of sets of small changes are tried at the exact cost.

Where importances are nearly equal, prices say little. A new solver therefore searches thoroughly
for such importances; the results are starting points of step 2 for every batch.
`benchmarks/selection.py` measures the loss against a MILP solver.
"""

from __future__ import annotations

import numpy as np

from pfedgate.gating.selection.costs import Bools, Floats, Ints, Problem

STARTS = 28  # counts from which prices are followed
ROUNDS = 12  # changes of the prices
LAST = 3  # rounds whose counts may be repaired
RATE = 0.6  # exponent with which use changes a price at first; it falls linearly
SLOWEST = 0.1
QUICK = (8, 2, 5)  # starting points to repair, those of them to exchange in, exchanges of each
THOROUGH = (16, 12, 20)
EXAMPLES = 4  # nearly equal importances that are searched thoroughly
BOLD = 0.5  # share of an excess that one step may drop, or of the room that it may fill
CHANGES = 14  # changes in each half of an exchange
# A change adds or drops the blocks from the first to the second next to the count.
SPANS = ((0, 1), (1, 2), (2, 4), (0, -1), (-1, -2), (-2, -4))


class Prices:
    """Within half a percent of the optimum on the networks measured, and never over the budget.

    The cost is base + slope @ k + k @ curve @ k / 2, k being the counts of costly groups.
    """

    def __init__(self, problem: Problem) -> None:
        self._counts, self._groups = problem.counts, problem.costly
        self._most = problem.counts[self._groups]
        units, step = problem.least, problem.step
        inner = np.ix_(self._groups, self._groups)
        base = np.array([cost(units) for cost in problem.costs])
        self._limits = problem.limits
        self._room = np.maximum(problem.limits - base, 0.0)
        self._slope = np.array([((c.linear + c.both @ units) * step)[self._groups] for c in problem.costs])
        self._curve = np.array([(c.both * step[:, None] * step)[inner] for c in problem.costs])
        self._own = np.diagonal(self._curve, axis1=1, axis2=2) / 2
        self._flat_curve = self._curve.transpose(1, 0, 2).reshape(len(self._most), -1)
        self._levels = np.minimum(np.arange(int(self._most.max()) + 1), self._most[:, None]).astype(float)
        self._each = np.arange(len(self._most))
        self._turns = self._coupling_by_colour()
        self._subsets = _subsets(CHANGES)
        none = max(0, 2 * CHANGES - len(SPANS) * len(self._most))  # empty changes fill a small exchange
        self._change_group = np.append(np.tile(self._each, len(SPANS)), np.zeros(none, dtype=np.int64))
        ends = np.repeat(np.array(SPANS).T, len(self._most), axis=1)
        self._change_ends = np.pad(ends, ((0, 0), (0, none)))
        random = np.random.default_rng(0)
        waves = [np.where(np.isin(self._each, groups), self._most, 0) for groups, _ in self._turns[:2]]
        mixed = random.integers(0, self._most + 1, (4 * STARTS, len(self._most)))
        starts = np.concatenate([[0 * self._most, self._most / 2, self._most], waves, mixed])
        self._starts, self._elite = starts[:STARTS], starts[:0]
        examples = [self._nearly_equal(0.1 * random.random(self._levels.shape) * (i > 0)) for i in range(EXAMPLES)]
        self._elite = np.array([self._search(prefix, starts, *THOROUGH) for prefix in examples])

    def solve(self, prefix: Floats) -> Ints:
        """Good counts; `prefix[g, k]` is the value of the k best blocks of group g."""
        prefix = prefix[self._groups, : self._levels.shape[1]]
        top = prefix[:, 1].max()
        prefix = prefix / top if top > 0 else self._levels
        result = self._counts.copy()
        result[self._groups] = self._search(prefix, self._starts, *QUICK).astype(np.int64)
        return result

    def _coupling_by_colour(self) -> list[tuple[Ints, Floats]]:
        """Groups that share no cost, and their coupling: [group, resource * group of the colour]."""
        coupling = self._curve.copy()
        coupling[:, self._each, self._each] = 0.0
        colours = _colours(np.asarray(coupling.any(0)))
        members = [np.flatnonzero(colours == colour) for colour in range(int(colours.max()) + 1)]
        return [(groups, coupling[:, :, groups].transpose(1, 0, 2).reshape(len(colours), -1)) for groups in members]

    def _nearly_equal(self, noise: Floats) -> Floats:
        gains = -np.sort(-1 - noise[:, 1:], axis=1) * (self._levels[:, 1:] > self._levels[:, :-1])
        prefix: Floats = np.pad(gains.cumsum(axis=1), ((0, 0), (1, 0)))
        return prefix

    def _search(self, prefix: Floats, starts: Floats, repaired: int, improved: int, exchanges: int) -> Floats:
        """The best counts that a search of this effort reaches."""
        gains = np.full((len(prefix), prefix.shape[1] + 1), np.inf)  # of the last block, per count
        gains[:, 1:] = np.diff(prefix, axis=1, append=prefix[:, -1:])
        counts, prices = self._follow(prefix, starts, repaired)
        counts = self._fill(self._fit(np.concatenate([counts, self._elite]), gains), gains)
        prices = np.concatenate([prices, np.repeat(prices[:1], len(self._elite), axis=0)])
        order = np.argsort(-self._values(prefix, counts), kind="stable")
        distinct: dict[bytes, int] = {}
        for i in order.tolist():
            distinct.setdefault(counts[i].tobytes(), i)
        best: Floats = counts[order[0]]
        for i in list(distinct.values())[:improved]:
            row = counts[i]
            for _ in range(exchanges):
                better = self._exchange(row, prefix, prices[i])
                if better is None:
                    break
                row = self._fill(better[None], gains)[0]
            if self._values(prefix, row) > self._values(prefix, best):
                best = row
        return best

    def _follow(self, prefix: Floats, starts: Floats, number: int) -> tuple[Floats, Floats]:
        """The most promising counts near prices at which the room is just used, and their prices."""
        counts = starts.astype(float)
        room = np.maximum(self._room, 1e-12 * self._limits)
        most = self._most.astype(float)
        dense = self._room - self._left(most, self._marginal(most))
        prices = np.tile(prefix[:, -1].sum() / (dense * len(room)), (len(starts), 1))
        history: list[tuple[Floats, Floats, Floats]] = []
        for i in range(ROUNDS):
            for groups, coupling in self._turns:
                shape = len(counts), len(room), len(groups)
                slope = self._slope[:, groups] + (counts @ coupling).reshape(shape)
                levels = self._levels[groups]
                score = prefix[groups] - np.einsum("sr,srg->sg", prices, slope)[:, :, None] * levels
                if self._own.any():
                    score -= (prices @ self._own[:, groups])[:, :, None] * levels**2
                counts[:, groups] = score.argmax(2)
            use = (self._room - self._left(counts, self._marginal(counts))) / room
            promise = self._values(prefix, counts) / np.maximum(use.max(1), 1.0)
            prices = prices * np.clip(use, 0.3, 3.0) ** (SLOWEST + RATE * (1 - i / ROUNDS))
            history.append((counts.copy(), prices, promise))
        counts, prices, promise = (np.concatenate(parts) for parts in zip(*history[-LAST:], strict=True))
        distinct: dict[int, int] = {}  # one per start
        for row in np.argsort(-promise, kind="stable").tolist():
            distinct.setdefault(row % len(starts), row)
        rows = list(distinct.values())[:number]
        return counts[rows], prices[rows]

    def _fit(self, counts: Floats, gains: Floats) -> Floats:
        """Drops blocks until all rows fit: little value lost for much of the excess."""
        counts, rows = counts.astype(float), np.arange(len(counts))
        while True:
            marginal = self._marginal(counts)
            excess = np.maximum(-self._left(counts, marginal), 0.0)
            over = excess.any(1)
            if not over.any():
                return counts
            saved = marginal - self._own
            weight = np.einsum("sr,srg->sg", excess / self._limits**2, saved)
            possible = (weight > 0) & (counts > 0)
            loss = gains[self._each, counts.astype(np.int64)]
            g = np.where(possible, loss / np.where(possible, weight, 1.0), np.inf).argmin(1)
            needed = (excess / np.maximum(saved[rows, :, g], 1e-300)).max(1)
            counts[rows, g] -= over * np.clip(np.floor(BOLD * needed), 1, counts[rows, g])

    def _fill(self, counts: Floats, gains: Floats) -> Floats:
        """Adds blocks to all rows while any fits: much value for little of the room left."""
        counts, rows = counts.copy(), np.arange(len(counts))
        bold = np.where(self._own.any(0), 0.0, BOLD)  # one by one where costs rise from block to block
        while True:
            marginal = self._marginal(counts)
            room = np.maximum(self._left(counts, marginal), 1e-300)
            share = ((marginal + self._own) / room[:, :, None]).max(1)
            fits = (share <= 1.0) & (counts < self._most)
            if not fits.any():
                return counts
            gain = gains[self._each, counts.astype(np.int64) + 1]
            g = np.where(fits, gain / (share + 0.05), -1.0).argmax(1)
            number = np.clip(np.floor(bold[g] / np.maximum(share[rows, g], 1e-9)), 1, self._most[g] - counts[rows, g])
            counts[rows, g] += fits[rows, g] * number

    def _exchange(self, counts: Floats, prefix: Floats, prices: Floats) -> Floats | None:
        """The counts after the best set of changes that still fits, if any is worth more.

        Changes are ranked by their loss at the prices; odd ranks form one half, even ranks the
        other. Any small set of one half is tried with any of the other.
        """
        marginal = self._marginal(counts)
        group, most = self._change_group, self._most[self._change_group]
        near, far = np.minimum(np.maximum(counts[group] + self._change_ends, 0), most).astype(np.int64)
        change, value = (far - near).astype(float), prefix[group, far] - prefix[group, near]
        loss = np.where(change != 0, (prices @ marginal)[group] * change - value, np.inf)
        least = np.argsort(loss, kind="stable")[: 2 * CHANGES].reshape(-1, 2).T
        group, change, sets = group[least], change[least], self._subsets  # [half, change]
        one, two = (value[least] @ sets.T)[:, :, None]
        flat, step = group.ravel(), change.ravel()
        curve = self._curve[:, flat[:, None], flat] * (step[:, None] * step)
        curve = curve.reshape(-1, 2, CHANGES, 2, CHANGES)
        cost = (marginal[:, group] * change) @ sets.T  # [resource, half, set]
        if curve.any():
            cost += np.einsum("rhsc,sc->rhs", sets @ np.einsum("rhchd->rhcd", curve), sets, optimize=False) / 2
        gain = one + two.T
        fits = gain > 1e-9
        ones = np.ones((len(sets), 1))
        for room, (first, second), between in zip(self._left(counts, marginal), cost, curve[:, 0, :, 1], strict=True):
            rows = np.hstack([sets @ between, first[:, None], ones])
            fits &= rows @ np.hstack([sets, ones, second[:, None]]).T <= room
        gain *= fits
        first, second = divmod(int(gain.argmax()), len(sets))
        if not fits[first, second]:
            return None
        moves = sets[[first, second]] * change
        return counts + np.bincount(flat, moves.ravel(), len(counts))

    def _values(self, prefix: Floats, counts: Floats) -> Floats:
        values: Floats = prefix[self._each, counts.astype(np.int64)].sum(-1)
        return values

    def _marginal(self, counts: Floats) -> Floats:
        """Derivative of the cost: [..., group] -> [..., resource, group]."""
        bent = counts @ self._flat_curve
        marginal: Floats = self._slope + bent.reshape(*counts.shape[:-1], *self._slope.shape)
        return marginal

    def _left(self, counts: Floats, marginal: Floats) -> Floats:
        """Room left by counts, less than nothing where they do not fit: [..., resource]."""
        left: Floats = self._room - ((marginal + self._slope) @ counts[..., None])[..., 0] / 2
        return left


def _subsets(total: int) -> Floats:
    """All sets of different ranks 1, 2, ... with a sum of at most `total`: rows of zeros and ones."""
    ranks: list[list[int]] = [[]]
    for row in ranks:
        ranks.extend([*row, rank] for rank in range(row[-1] + 1 if row else 1, total - sum(row) + 1))
    return np.array([[float(rank in row) for rank in range(1, total + 1)] for row in ranks])


def _colours(linked: Bools) -> Ints:
    """A colour per group, different for linked groups; greedy, groups with many links first."""
    colours = np.full(len(linked), -1)
    for g in np.argsort(-linked.sum(1), kind="stable"):
        colours[g] = np.setdiff1d(np.arange(len(linked)), colours[linked[g]])[0]
    return colours
