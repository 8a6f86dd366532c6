"""Selection for many groups: Lagrangian prices by column generation, then an exchange at the exact cost.

1. The dual problem: prices such that the best choice at these prices (see `lagrange`) needs about the budget. Every
   choice seen gives a linear lower bound of the dual function; the lowest point of all bounds (see `master`) is where
   to look next. Choices that were useful for made-up importances when the selector was built are known from the start,
   so two to four steps suffice.
2. The optimal mix of choices, rounded, and the best choice that fits are made to fit, filled and improved (`polish`).
"""

from __future__ import annotations

import numpy as np

from .costs import Floats, Ints
from .lagrange import Quadratic, inner
from .master import Master
from .polish import Polish
from .problem import Problem

DRAWS = 6  # made-up importances for which useful choices are collected
STEPS_BEFORE = 14  # steps of the dual problem for each of them
STEPS = 4
POOL = 64
CLOSE_ENOUGH = 1e-3  # relative gap at which the dual problem is solved
CANDIDATES = 2
EXCHANGES = 2


class Deep:
    """Within a fraction of a percent of the optimum, and never over the budget."""

    def __init__(self, problem: Problem) -> None:
        self._counts = problem.counts
        self._costs = Quadratic.of(problem)
        self._inner = inner(self._costs)
        self._polish = Polish(self._costs)
        self._groups = np.arange(len(self._costs.most))
        self._width = int(self._costs.most.max()) + 1
        self._pool: Ints = np.zeros((1, len(self._groups)), dtype=np.int64)
        self._slack = self._slacks(self._pool)
        useful: dict[bytes, Ints] = {}
        for prefix in self._made_up():
            known, master, _ = self._dual(prefix, STEPS_BEFORE)
            for kept in (*known[master.mix()[0]], *known[-4:]):
                useful.setdefault(kept.tobytes(), kept)
        self._pool = np.array([self._pool[0], *list(useful.values())[:POOL]])
        self._slack = self._slacks(self._pool)

    def solve(self, prefix: Floats) -> Ints:
        prefix = prefix[self._costs.groups, : self._width]
        top = prefix[:, 1].max()
        prefix = prefix / top if top > 0 else self._even()
        known, master, prices = self._dual(prefix, STEPS)
        best, most = self._pool[0], -1.0
        for kept in self._candidates(known, master, prefix, prices):
            kept = self._polish.fill(self._polish.fit(kept, prefix), prefix)
            for _ in range(EXCHANGES):
                better = self._polish.exchange(kept, prefix, prices)
                if better is None:
                    break
                kept = self._polish.fill(better, prefix)
            value = float(prefix[self._groups, kept].sum())
            if value > most:
                best, most = kept, value
        result = self._counts.copy()
        result[self._costs.groups] = best
        return result

    def maximal(self) -> None:
        return None

    def _dual(self, prefix: Floats, steps: int) -> tuple[Ints, Master, Floats]:
        """Choices seen, the master problem over them, and the best prices per unit of cost."""
        scale = 1.0 / self._costs.limits
        known = self._pool
        master = Master(prefix[self._groups, known].sum(1), self._slack)
        best, upper = np.zeros(len(scale)), np.inf
        for step in range(steps):
            lower, prices = master.solve()
            points = prices[None] if not step else np.array([prices, (prices + best) / 2])
            kept = self._inner.best(prefix, points * scale)
            value, slack = prefix[self._groups, kept].sum(1), self._slacks(kept)
            bound = value + (points * slack).sum(1)
            lowest = int(bound.argmin())
            if bound[lowest] < upper:
                best, upper = points[lowest], float(bound[lowest])
            known = np.concatenate([known, kept])
            master.add(value, slack)
            if upper - lower <= CLOSE_ENOUGH * upper:
                break
        master.solve()
        return known, master, best * scale

    def _candidates(self, known: Ints, master: Master, prefix: Floats, prices: Floats) -> Ints:
        """Starting points, those first that lose least at the prices for what they use too little or too much."""
        chosen, weights = master.mix()
        mixed = weights @ known[chosen]
        several = np.concatenate([np.rint(mixed)[None], np.floor(mixed + 1e-9)[None], known[chosen], known[-2:]])
        slack = np.abs(self._slacks(several.astype(np.int64)) * self._costs.limits) @ prices
        order = np.argsort(slack, kind="stable")
        unique = np.unique(several[order[: CANDIDATES + 2]], axis=0, return_index=True)[1]
        result: Ints = several[order[np.sort(unique)[:CANDIDATES]]].astype(np.int64)
        return result

    def _slacks(self, kept: Ints) -> Floats:
        return 1.0 - self._costs.cost(kept.astype(float)) / self._costs.limits

    def _even(self) -> Floats:
        """Values of counts when all blocks are equally important."""
        result: Floats = np.minimum(np.arange(self._width), self._costs.most[:, None]).astype(float)
        return result

    def _made_up(self) -> list[Floats]:
        """Equal importances, and draws that differ within and between groups."""
        random = np.random.default_rng(0)
        result = [self._even()]
        shape = (len(self._groups), self._width - 1)
        for _ in range(DRAWS - 1):
            level = random.normal(size=(shape[0], 1))
            value = 1 / (1 + np.exp(-level - 0.7 * random.normal(size=shape)))
            value[np.arange(shape[1]) >= self._costs.most[:, None]] = 0.0
            prefix = np.zeros((shape[0], self._width))
            np.cumsum(-np.sort(-value, axis=1), axis=1, out=prefix[:, 1:])
            result.append(prefix)
        return result
