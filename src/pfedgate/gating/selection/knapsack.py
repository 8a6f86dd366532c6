"""Exact selection for one resource without products of groups: a 0/1 knapsack whose items come in classes.

The fractional optimum gives a price per unit of cost and an upper bound; a greedy filling gives a lower one. A count
that loses more than the gap between them at that price is in no better solution, which leaves few blocks undecided.
Up to a dozen go to OR-Tools' branch and bound. It is exponential, and with nearly equal importances (a gate at the
start of training) takes seconds for 40 blocks; so more are left to a dynamic programme over classes, which keeps only
partial choices that no other beats in both value and cost: with equal costs within a class these stay few.
"""

from __future__ import annotations

import numpy as np
from ortools.algorithms.python import knapsack_solver

from pfedgate.gating.selection.costs import Floats, Ints
from pfedgate.gating.selection.problem import Problem

METHOD = knapsack_solver.SolverType.KNAPSACK_MULTIDIMENSION_BRANCH_AND_BOUND_SOLVER
FEW = 12
FEW_STATES = 1_000  # enough for most; else the choice found narrows the gap and a second run is complete
MOST_STATES = 10_000  # needed only if importances are all but proportional to costs; beyond, close but not exact


class Knapsack:
    """Exact for one resource with linear costs."""

    def __init__(self, problem: Problem) -> None:
        self._counts = problem.counts
        self._groups = problem.costly
        self._cost = problem.linear[0, self._groups] * problem.step[self._groups]
        units = problem.first + problem.step * problem.counts
        units[self._groups] = problem.first[self._groups]
        self._room = float(problem.limits[0] - problem.const[0] - problem.linear[0] @ units)
        self._most = problem.counts[self._groups]
        self._width = int(self._most.max())
        self._item_group, self._item_rank = np.nonzero(np.arange(self._width) < self._most[:, None])
        self._item_cost = self._cost[self._item_group]
        self._levels = np.arange(self._width + 1)
        self._whole = bool(np.all(self._cost == np.rint(self._cost)))

    def solve(self, prefix: Floats) -> Ints:
        prefix = prefix[self._groups, : self._width + 1]
        value = np.diff(prefix, axis=1)[self._item_group, self._item_rank]
        taken, price, upper = self._bounds(value)
        kept = np.bincount(self._item_group[taken], minlength=len(self._groups))
        worth = prefix - price * self._cost[:, None] * self._levels
        loss = np.where(self._levels <= self._most[:, None], worth.max(1, keepdims=True) - worth, np.inf)
        for most_states in (FEW_STATES, MOST_STATES):
            gap = upper - self._value(prefix, kept)
            if gap <= 0:
                break
            open_ = loss <= gap + 1e-9 * upper
            low = open_.argmax(1)
            high = self._width - open_[:, ::-1].argmax(1)
            if self._whole and int((high - low).sum()) <= FEW:
                found, done = self._branch(prefix, low, high), True
            else:
                found, done = self._programme(prefix, low, high, loss, price, gap, most_states)
            if found is not None and self._value(prefix, found) > self._value(prefix, kept):
                kept = found
            if done:
                break
        result = self._counts.copy()
        result[self._groups] = kept
        return result

    def maximal(self) -> None:
        return None

    def _bounds(self, value: Floats) -> tuple[Ints, float, float]:
        """A greedy filling, the price at the fractional optimum, and its value, an upper bound."""
        order = np.argsort(-value / self._item_cost, kind="stable")
        used = np.cumsum(self._item_cost[order])
        split = int(np.searchsorted(used, self._room, side="right"))
        room = self._room - (float(used[split - 1]) if split else 0.0)
        price = float(value[order[split]] / self._item_cost[order[split]])
        upper = float(value[order[:split]].sum()) + price * room
        taken = order[:split].tolist()
        rest = order[split:]
        for item, cost in zip(rest.tolist(), self._item_cost[rest].tolist(), strict=True):
            if cost <= room:
                room -= cost
                taken.append(item)
        return np.array(taken, dtype=np.int64), price, upper

    def _value(self, prefix: Floats, kept: Ints) -> float:
        return float(prefix[np.arange(len(kept)), kept].sum())

    def _branch(self, prefix: Floats, low: Ints, high: Ints) -> Ints | None:
        """OR-Tools on the blocks between the least and the most that each group can keep."""
        free = (self._item_rank >= low[self._item_group]) & (self._item_rank < high[self._item_group])
        groups = self._item_group[free]
        room = int(self._room - float(self._cost @ low))
        if room < 0:
            return None
        value = np.diff(prefix, axis=1)[groups, self._item_rank[free]]
        solver = knapsack_solver.KnapsackSolver(METHOD, "blocks")
        solver.init(value.astype(np.int64).tolist(), [self._item_cost[free].astype(np.int64).tolist()], [room])
        solver.solve()
        taken = [group for i, group in enumerate(groups.tolist()) if solver.best_solution_contains(i)]
        return low + np.bincount(np.array(taken, dtype=np.int64), minlength=len(low))

    def _programme(
        self, prefix: Floats, low: Ints, high: Ints, loss: Floats, price: float, gap: float, most_states: int
    ) -> tuple[Ints | None, bool]:
        """Partial choices, group by group; one is dropped when it can no longer fit or beat the greedy filling.

        Also says whether all that matter were kept.
        """
        every = np.arange(len(low))
        rest = every[high > low]
        # Groups that lose much by any change first: they prune most.
        change = np.array([np.partition(loss[g, low[g] : high[g] + 1], 1)[1] for g in rest])
        rest = rest[np.argsort(-change, kind="stable")]
        cost = np.array([float(self._cost @ low)])
        worth = np.array([self._value(prefix, low)])
        lost = np.array([float(loss[every, low].sum() - loss[rest, low[rest]].sum())])
        ahead = np.append(np.cumsum((self._cost * (high - low))[rest][::-1])[::-1][1:], 0.0)
        history: list[tuple[int, Ints, int]] = []
        done = True
        for g, more in zip(rest.tolist(), ahead.tolist(), strict=True):
            k = np.arange(low[g], high[g] + 1)
            new_cost = (cost[:, None] + self._cost[g] * (k - low[g])).ravel()
            new_worth = (worth[:, None] + (prefix[g, k] - prefix[g, low[g]])).ravel()
            new_lost = (lost[:, None] + loss[g, k]).ravel()
            idle = np.maximum(self._room - more - new_cost, 0.0)
            alive = np.flatnonzero((new_cost <= self._room) & (new_lost + price * idle <= gap * (1 + 1e-9)))
            if not alive.size:
                return None, done
            alive = alive[np.argsort(new_cost[alive], kind="stable")]
            best = np.maximum.accumulate(new_worth[alive])
            alive = alive[np.append(True, best[1:] > best[:-1])]
            if alive.size > most_states:
                done = False
                alive = alive[np.sort(np.argpartition(new_lost[alive], most_states)[:most_states])]
            history.append((g, alive, len(k)))
            cost, worth, lost = new_cost[alive], new_worth[alive], new_lost[alive]
        kept = low.copy()
        state = int(worth.argmax())
        for g, alive, width in reversed(history):
            state, k_more = divmod(int(alive[state]), width)
            kept[g] += k_more
        return kept, done
