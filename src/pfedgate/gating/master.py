"""Prices of resources from a set of known choices: a small linear programme.

Every known choice i, feasible or not, has a value and a slack per resource. For prices p >= 0 the best value minus
priced cost is at least max_i (value_i + p @ slack_i), and the prices that make this smallest are the best guess. The
dual programme mixes choices so that their mean slack is not negative (Dantzig and Wolfe). It has one row per resource
and one more, so a dense simplex does.
"""

from __future__ import annotations

import numpy as np

from .costs import Floats, Ints

PIVOTS = 40


class Master:
    """Simplex over mixes of choices; choices can be added, and the last basis starts the next solve.

    Choice 0 must be feasible: with the surplus variables it is the first basis if none is given.
    """

    def __init__(self, values: Floats, slacks: Floats, more: int, basis: list[int] | None = None) -> None:
        rows = slacks.shape[1] + 1
        # Columns: one surplus variable per resource, then the choices; room for `more` of them.
        self._first = rows - 1
        self._end = self._first + len(values)
        self._columns = np.zeros((self._end + more, rows))
        self._columns[: self._first, 1:] = -np.eye(self._first)
        self._columns[self._first :, 0] = 1.0
        self._columns[self._first : self._end, 1:] = slacks
        self._values = np.zeros(self._end + more)
        self._values[self._first : self._end] = values
        self.basis = list(basis) if basis else [self._first, *range(self._first)]
        self._inverse = np.linalg.inv(self._columns[self.basis])

    def add(self, values: Floats, slacks: Floats) -> None:
        end = self._end + len(values)
        self._columns[self._end : end, 1:] = slacks
        self._values[self._end : end] = values
        self._end = end

    def solve(self) -> tuple[float, Floats]:
        """The bound and the prices."""
        columns, values = self._columns[: self._end], self._values[: self._end]
        inverse = self._inverse  # a few dozen pivots in all: too few for rounding to matter
        for _ in range(PIVOTS):
            dual = inverse @ values[self.basis]
            gain = values - columns @ dual
            enter = int(gain.argmax())
            if gain[enter] <= 1e-9 * abs(dual[0]):
                break
            direction = columns[enter] @ inverse
            pairs = zip(inverse[0].tolist(), direction.tolist(), strict=True)
            ratio = [amount / d if d > 1e-12 else np.inf for amount, d in pairs]
            leave = ratio.index(min(ratio))
            if ratio[leave] == np.inf:
                break
            self.basis[leave] = enter
            column = inverse[:, leave] / direction[leave]
            inverse = inverse - np.multiply.outer(column, direction)
            inverse[:, leave] = column
        self._inverse = inverse
        return float(dual[0]), np.maximum(-dual[1:], 0.0)

    def mix(self) -> tuple[Ints, Floats]:
        """Indices of the choices in the optimal mix, and their weights."""
        basis = np.array(self.basis)
        weights = np.maximum(self._inverse[0], 0.0)
        real = basis >= self._first
        return basis[real] - self._first, weights[real]
