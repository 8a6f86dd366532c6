"""The dual problem behind `Deep`: prices at which the best choice needs about the budget.

Every choice of counts seen gives a linear lower bound of the dual function; the lowest point of all bounds (see
`master`) is where to look next. Choices that were useful for other importances are known from the start, and are first
adapted to the importances at hand by cheap sweeps, so that few exact steps suffice.
"""

from __future__ import annotations

import numpy as np

from pfedgate.gating.selection.costs import Floats, Ints
from pfedgate.gating.selection.lagrange import Quadratic, Sweeps, inner
from pfedgate.gating.selection.master import Master, Pool

SMOOTH = 0.3  # each exact step looks at the new prices, and this much at the best ones so far
SWEPT = 4  # a sweep goes over the so many choices that are best at the prices


class Known:
    """Choices to start from, for one cost model: at first only the one that keeps nothing."""

    def __init__(self, costs: Quadratic) -> None:
        self.costs, self.inner, self.sweeps = costs, inner(costs), Sweeps(costs)
        self._start = np.arange(len(costs.most)) * costs.levels.shape[1]  # of each group in the values of counts
        self.choices: Ints = np.zeros((1, len(costs.most)), dtype=np.int64)
        self._pools = [Pool(self.slacks(self.choices))]
        self._mixes = np.array([pool.mix for pool in self._pools])

    def learn(self, choices: Ints, examples: list[Floats]) -> None:
        """Starts from these choices too, and from the mix of them that is best for one of these importances."""
        self.choices = np.concatenate([self.choices[:1], choices])
        slacks = self.slacks(self.choices)
        first, bases = Pool(slacks), {}
        for prefix in examples:
            master = Master(self.values(prefix, self.choices), first, 0)
            master.solve()
            bases[tuple(sorted(master.basis))] = master.basis
        # Whether a basis is feasible does not depend on the importances.
        self._pools = [Pool(slacks, basis) for basis in bases.values()]
        self._mixes = np.array([pool.mix for pool in self._pools])

    def master(self, prefix: Floats, more: int) -> Master:
        """The master problem at these importances, with room for more choices."""
        values = self.values(prefix, self.choices)
        return Master(values, self._pools[int((self._mixes @ values).argmax())], more)

    def slacks(self, kept: Ints) -> Floats:
        return 1.0 - self.costs.cost(kept.astype(float)) / self.costs.limits

    def values(self, prefix: Floats, kept: Ints) -> Floats:
        result: Floats = prefix.ravel()[self._start + kept].sum(1)
        return result


class Dual:
    """For one set of importances: `prefix` holds the value of the k best blocks of each group.

    The optimum of the dual problem, and so that of the selection, is at most `upper`; the former is at least `lower`.
    """

    def __init__(self, known: Known, prefix: Floats, sweeps: int, steps: int) -> None:
        """With room for so many sweeps and exact steps."""
        self._known, self._prefix = known, prefix
        more = sweeps * SWEPT + steps
        self._end = len(known.choices)
        self._choices = np.empty((self._end + more, known.choices.shape[1]), dtype=np.int64)
        self._choices[: self._end] = known.choices
        self._master = known.master(prefix, more)
        self._scale = 1.0 / known.costs.limits
        self._best = np.zeros(len(self._scale))
        self.lower, self.upper = -np.inf, np.inf

    @property
    def prices(self) -> Floats:
        """The best ones so far, per unit of cost."""
        return self._best * self._scale

    @property
    def choices(self) -> Ints:
        """All that were seen, the last ones last."""
        return self._choices[: self._end]

    def sweep(self) -> None:
        """Adapts the choices that are best at the prices."""
        _, prices = self._master.solve()
        starts = self._choices[self._master.best(SWEPT)]
        self._add(self._known.sweeps.better(starts, self._prefix, prices * self._scale))

    def step(self, gap: float) -> bool:
        """Looks at the best choice at the prices; true if the dual problem is solved up to this relative gap."""
        self.lower, prices = self._master.solve()
        if self.upper < np.inf:
            prices = SMOOTH * self._best + (1 - SMOOTH) * prices
        value, slack = self._add(self._known.inner.best(self._prefix, prices * self._scale)[None])
        bound = float(value[0] + prices @ slack[0])
        if bound < self.upper:
            self._best, self.upper = prices, bound
        return self.upper - self.lower <= gap * self.upper

    def mix(self) -> tuple[Ints, Floats]:
        """The choices in the optimal mix of those seen, and their weights."""
        self._master.solve()
        chosen, weights = self._master.mix()
        return self._choices[chosen], weights

    def _add(self, kept: Ints) -> tuple[Floats, Floats]:
        value, slack = self._known.values(self._prefix, kept), self._known.slacks(kept)
        self._master.add(value, slack)
        self._choices[self._end : self._end + len(kept)] = kept
        self._end += len(kept)
        return value, slack
