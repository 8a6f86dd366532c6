"""Exact selection for one resource without products of groups: an ordinary 0/1 knapsack, solved by OR-Tools."""

from __future__ import annotations

import math

import numpy as np
from ortools.algorithms.python import knapsack_solver

from .costs import Floats, Ints
from .problem import Problem

METHOD = knapsack_solver.SolverType.KNAPSACK_MULTIDIMENSION_BRANCH_AND_BOUND_SOLVER


class Knapsack:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        weights = problem.linear[0] * problem.step
        room = float(problem.limits[0] - problem.const[0] - problem.linear[0] @ problem.first)
        # OR-Tools wants whole weights. Those of parameters and FLOPs are; others are rounded up on a fine grid.
        scale = 1.0 if np.all(weights == np.rint(weights)) else 2.0**40 / max(room, float(weights.max()))
        self._weights = np.ceil(weights * scale).astype(np.int64)
        self._room = math.floor(room * scale)

    def solve(self, prefix: Floats) -> Ints:
        gain = np.diff(prefix, axis=1).astype(np.int64)
        groups, ranks = np.nonzero(np.arange(gain.shape[1]) < self._problem.counts[:, None])
        solver = knapsack_solver.KnapsackSolver(METHOD, "blocks")
        solver.init(gain[groups, ranks].tolist(), [self._weights[groups].tolist()], [self._room])
        solver.solve()
        taken = np.array([solver.best_solution_contains(i) for i in range(groups.size)], dtype=bool)
        return np.bincount(groups[taken], minlength=len(self._problem.counts)).astype(np.int64)

    def maximal(self) -> None:
        return None
