"""Prices of resources from a set of known choices: a small linear programme.

Every known choice i, feasible or not, has a value and a slack per resource. For prices p >= 0 the best value minus
priced cost is at least max_i (value_i + p @ slack_i), and the prices that make this smallest are the best guess. The
dual programme mixes choices so that their mean slack is not negative (Dantzig and Wolfe). It has one row per resource
and one more, so a dense simplex does.
"""

from __future__ import annotations

import numpy as np

from pfedgate.gating.selection.costs import Floats, Ints

PIVOTS = 40


class Pool:
    """Choices known from the start, in terms of a basis: the part of the programme that no importances change.

    Choice 0 must be feasible: with the surplus variables it is the basis if none is given.
    """

    def __init__(self, slacks: Floats, basis: list[int] | None = None) -> None:
        rows = slacks.shape[1] + 1
        self.size = len(slacks)
        # Variables: one per row (they hold the inverse of the basis), one surplus per resource, then the choices.
        self.first = 2 * rows - 1
        columns = np.zeros((rows, self.first + self.size))
        columns[:, :rows] = np.eye(rows)
        columns[1:, rows : self.first] = -np.eye(rows - 1)
        columns[0, self.first :] = 1.0
        columns[1:, self.first :] = slacks.T
        self.basis = list(basis) if basis else [self.first, *range(rows, self.first)]
        self.columns: Floats = np.linalg.solve(columns[:, self.basis], columns)
        mix = np.zeros(self.first + self.size)
        mix[self.basis] = np.maximum(self.columns[:, 0], 0.0)
        self.mix: Floats = mix[self.first :]  # weights of the choices in this basis


class Master:
    """Simplex over mixes of choices; choices can be added, and the last basis starts the next solve.

    The whole table is kept: per variable what it would gain (first row) and its column in terms of the basis.
    """

    def __init__(self, values: Floats, pool: Pool, more: int) -> None:
        self._first, self._rows = pool.first, len(pool.columns)
        self._end = self._first + pool.size
        self._table = np.zeros((self._rows + 1, self._end + more))
        self._table[1:, : self._end] = pool.columns
        self._table[0, self._first : self._end] = values
        self.basis = list(pool.basis)
        self._table[0, : self._end] -= self._table[0, self.basis] @ pool.columns

    def add(self, values: Floats, slacks: Floats) -> None:
        """More choices, at most as many as there is room for."""
        start, self._end = self._end, self._end + len(values)
        inverse = self._table[:, : self._rows]
        new = self._table[:, start : self._end]
        np.matmul(inverse[:, 1:], slacks.T, out=new)
        new += inverse[:, :1]
        new[0] += values

    def solve(self) -> tuple[float, Floats]:
        """The bound and the prices."""
        table, rows = self._table[:, : self._end], self._rows  # few pivots in all: too few for rounding to matter
        for _ in range(PIVOTS):
            enter = rows + int(table[0, rows:].argmax())
            column = table[:, enter].copy()
            gain, *direction = column.tolist()
            upper, *amounts = table[:, 0].tolist()
            if gain <= 1e-9 * abs(upper):
                break
            ratio = [a / d if d > 1e-12 else np.inf for a, d in zip(amounts, direction, strict=True)]
            leave = ratio.index(min(ratio))
            if ratio[leave] == np.inf:
                break
            self.basis[leave] = enter
            pivot = table[leave + 1] / direction[leave]
            table -= np.multiply.outer(column, pivot)
            table[leave + 1] = pivot
        return -float(table[0, 0]), np.maximum(table[0, 1:rows], 0.0)

    def best(self, count: int) -> Ints:
        """The choices of the largest value minus priced cost at the last prices."""
        gains = self._table[0, self._first : self._end]
        count = min(count, len(gains))
        result: Ints = gains.argpartition(-count)[-count:]
        return result

    def mix(self) -> tuple[Ints, Floats]:
        """Indices of the choices in the optimal mix, and their weights."""
        basis = np.array(self.basis)
        weights = np.maximum(self._table[1:, 0], 0.0)
        real = basis >= self._first
        return basis[real] - self._first, weights[real]
