"""Selection for many groups: Lagrangian prices by column generation, then an exchange at the exact cost.

1. The dual problem (see `dual`): prices at which the best choice needs about the budget, from choices that were useful
   for made-up importances when the selector was built.
2. The optimal mix of choices, rounded, and its parts are made to fit, filled and improved (see `polish`).

It stops when the value is close to the dual bound. Where importances are nearly equal, that bound is the value of more
blocks than can be had; then it stops close to the value of the most important n blocks, n being the largest number
that a long search found for equal importances when the selector was built.

Compared with HiGHS on 446 instances of plain, residual and concatenated networks and of independent groups (6 to 51
groups, two or three resources; random, skewed, nearly equal, equal and tied importances, equal ones per layer, and
ones in proportion to cost): HiGHS solved 367 of them to .1 % in 8 to 20 seconds each, and there the mean loss was
.03 % and the largest .37 %. In the other 79 the loss against the best choice HiGHS had found by then was .45 % at most,
and 65 were within .5 % of its upper bound; for 14 that bound is too loose to tell. The constants below were chosen on
other instances. Of those, 426, an earlier version lost more than .5 % (1.1 % at most) on two, against a much longer
search of the same kind; that was not measured again.
"""

from __future__ import annotations

import math

import numpy as np

from pfedgate.gating.selection.costs import Floats, Ints
from pfedgate.gating.selection.dual import Dual, Known
from pfedgate.gating.selection.lagrange import Quadratic
from pfedgate.gating.selection.polish import SETS, Polish, steps
from pfedgate.gating.selection.problem import Problem

EVEN, UNEVEN = 3, 5  # made-up importances for which useful choices are collected: (nearly) equal, and different
STEPS_BEFORE = 14  # exact steps of the dual problem for each of them
SWEEPS, STEPS = 5, 3  # sweeps and then exact steps of the dual problem, with one more sweep between them
STEPS_ALONE = 8  # without sweeps, where groups share no cost: then exact steps are as cheap
STEPS_MORE = 3  # while the bound is too loose to tell what is close enough, and again while it may tell that
POOL = 64
CLOSE_ENOUGH = 2e-3  # relative gap at which the dual problem is solved
NEAR = 4e-3  # relative gap to the upper bound above which exchanges are tried
CANDIDATES = 3  # starting points of exchanges
TIED = 1e-6  # differences below this are rounding
ROUNDINGS, STARTS, EXCHANGES_BEFORE = 20, 4, 6  # for equal and nearly equal importances, when the selector is built


class Deep:
    """Within a fraction of a percent of the optimum, and never over the budget."""

    def __init__(self, problem: Problem) -> None:
        self._counts = problem.counts
        self._costs = Quadratic.of(problem)
        self._width = int(self._costs.most.max()) + 1
        self._polish = Polish(self._costs)
        self._known = Known(self._costs)
        self._sweeps, self._exact = (SWEEPS, STEPS) if self._costs.coupling.any() else (0, STEPS_ALONE)
        useful: dict[bytes, Ints] = {}
        fitting: dict[bytes, Ints] = {}
        made_up = self._made_up()
        for number, prefix in enumerate(made_up):
            dual = Dual(self._known, prefix, 0, STEPS_BEFORE)
            for _ in range(STEPS_BEFORE):
                if dual.step(CLOSE_ENOUGH):
                    break
            for kept in (*dual.mix()[0], *dual.choices[-4:]):
                useful.setdefault(kept.tobytes(), kept)
            for kept in self._thorough(dual, prefix) if number < EVEN else ():
                fitting.setdefault(kept.tobytes(), kept)
        self._known.learn(np.array(list(useful.values())[:POOL]), made_up)
        self._elite = np.array(list(fitting.values()))  # choices that fit
        self._most_blocks = int(self._elite.sum(1).max())

    def solve(self, prefix: Floats) -> Ints:
        prefix = prefix[self._costs.groups, : self._width]
        top = prefix[:, 1].max()
        prefix = prefix / top if top > 0 else self._costs.levels
        result = self._counts.copy()
        result[self._costs.groups] = self._best(prefix)
        return result

    def maximal(self) -> None:
        return None

    def _best(self, prefix: Floats) -> Ints:
        best, value = self._first(prefix, self._elite)
        gains = steps(prefix)
        ranked = -np.sort(-gains[:, 1:], axis=None)
        most = float(ranked[: self._most_blocks].sum())
        if value >= (1 - NEAR) * most:
            return best
        dual = self._dual(prefix)
        made = self._polish.fill(self._polish.fit(self._candidates(dual), gains), gains)
        made = made[np.argsort(-self._known.values(prefix, made), kind="stable")]
        made[0] = best = self._first(prefix, np.array([made[0], best]))[0]
        value = float(self._known.values(prefix, made[:1])[0])
        enough = (1 - NEAR) * min(dual.upper, most)
        if value < enough:
            enough = (1 - NEAR) * min(self._bound(dual, value, ranked), most)
        for kept in made:
            if value >= enough:
                break
            better = self._polish.exchange(kept, prefix, dual.prices, SETS[0])
            if better is not None:
                better = self._polish.fill(better[None], gains)
                best, value = self._first(prefix, np.array([best, better[0]]))
        return best

    def _first(self, prefix: Floats, several: Ints) -> tuple[Ints, float]:
        """The best of several choices and its value."""
        values = self._known.values(prefix, several)
        first = int(values.argmax())
        return several[first], float(values[first])

    def _dual(self, prefix: Floats) -> Dual:
        exact = self._exact + 2 * STEPS_MORE
        dual = Dual(self._known, prefix, self._sweeps + exact, exact)
        for _ in range(self._sweeps):
            dual.sweep()
        if not dual.step(CLOSE_ENOUGH) and not self._solved(dual, self._exact - 1, CLOSE_ENOUGH):
            self._solved(dual, STEPS_MORE, NEAR)
        return dual

    def _solved(self, dual: Dual, exact: int, gap: float) -> bool:
        """Takes further steps; true as soon as the relative gap is that small."""
        for _ in range(exact):
            if self._sweeps:
                dual.sweep()
            if dual.step(gap):
                return True
        return False

    def _bound(self, dual: Dual, value: float, ranked: Floats) -> float:
        """A better upper bound, after further steps as long as they may show that the value is close enough."""
        unit = _unit(ranked)
        for _ in range(STEPS_MORE):
            low, high = (_down(bound, unit) for bound in (dual.lower, dual.upper))
            if value >= (1 - NEAR) * high or value < (1 - NEAR) * low or self._solved(dual, 1, 0.0):
                break
        return _down(dual.upper, unit)

    def _thorough(self, dual: Dual, prefix: Floats) -> list[Ints]:
        """Good choices that fit, at any price: from many roundings of the mix, by many exchanges."""
        chosen, weights = dual.mix()
        offsets = np.random.default_rng(0).random((ROUNDINGS, chosen.shape[1]))
        starts = np.concatenate([chosen, np.floor(weights @ chosen + offsets).astype(np.int64)])
        gains = steps(prefix)
        made = self._polish.fill(self._polish.fit(starts, gains), gains)
        order = np.argsort(-self._known.values(prefix, made), kind="stable")
        different = {made[i].tobytes(): made[i] for i in order}
        found = []
        for kept in list(different.values())[:STARTS]:
            found.append(kept)
            for _ in range(EXCHANGES_BEFORE):
                better = self._polish.exchange(kept, prefix, dual.prices, SETS[1])
                if better is None:
                    break
                kept = self._polish.fill(better[None], gains)[0]
                found.append(kept)
        return found

    def _candidates(self, dual: Dual) -> Ints:
        """Starting points, those first that lose least at the prices for what they use too little or too much."""
        chosen, weights = dual.mix()
        mixed = weights @ chosen
        rounded = np.array([np.rint(mixed), np.floor(mixed + 1e-9)]).astype(np.int64)
        several = np.concatenate([rounded, chosen, dual.choices[-2:]])
        unused = np.abs(self._known.slacks(several) * self._costs.limits) @ dual.prices
        different = {several[i].tobytes(): several[i] for i in np.argsort(unused, kind="stable")}
        return np.array(list(different.values())[:CANDIDATES])

    def _made_up(self) -> list[Floats]:
        """Equal importances, nearly equal ones, and draws that differ within and between groups."""
        random = np.random.default_rng(0)
        result = [self._costs.levels]
        shape = (len(self._costs.most), self._width - 1)
        for number in range(1, EVEN + UNEVEN):
            level = random.normal(size=(shape[0], 1))
            value = 1 / (1 + np.exp(-level - 0.7 * random.normal(size=shape)))
            if number < EVEN:
                value = 1 + 0.1 * value
            value[np.arange(shape[1]) >= self._costs.most[:, None]] = 0.0
            prefix = np.zeros((shape[0], self._width))
            np.cumsum(-np.sort(-value, axis=1), axis=1, out=prefix[:, 1:])
            result.append(prefix)
        return result


def _unit(gains: Floats) -> float:
    """The unit of which all gains (descending) are multiples; 0 if there is none."""
    apart = gains[:-1] - gains[1:]
    unit = float(apart.min(initial=1.0, where=apart > TIED))
    parts = gains / unit
    return unit if np.abs(parts - np.rint(parts)).max() < TIED else 0.0


def _down(value: float, unit: float) -> float:
    """Rounded down to a multiple of the unit."""
    return unit * math.floor(value / unit + TIED) if unit else value
