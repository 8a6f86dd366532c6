"""Selection for many groups and several resources."""

from __future__ import annotations

import numpy as np

from .costs import Floats, Ints
from .problem import Problem


class Deep:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._caps = np.where(np.isin(np.arange(len(problem.counts)), problem.costly), 0, problem.counts)

    def solve(self, prefix: Floats) -> Ints:
        """Greedy by value per largest share of the budget used; first version."""
        problem = self._problem
        kept = self._caps.copy()
        gain = np.diff(prefix, axis=1, append=prefix[:, -1:])
        groups = np.arange(len(kept))
        while True:
            base = problem.cost(kept)
            options = kept + np.eye(len(kept), dtype=np.int64)
            cost = problem.cost(options)
            ok = (cost <= problem.limits).all(1) & (kept < problem.counts)
            if not ok.any():
                return kept
            share = ((cost - base) / (problem.limits - base + 1e-300)).max(1)
            score = np.where(ok, gain[groups, kept] / (share + 1e-300), -1.0)
            kept[int(score.argmax())] += 1

    def maximal(self) -> None:
        return None


