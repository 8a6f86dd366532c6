"""Prices of resources from a set of known choices: a small linear programme.

Every known choice i, feasible or not, has a value and a slack per resource. For prices p >= 0 the best achievable value
is at least max_i (value_i + p @ slack_i) in the relaxation, and the prices that make this smallest are the best guess.
Its dual mixes choices so that their mean slack is not negative (Dantzig-Wolfe); a few rows, so a small dense simplex.
"""

from __future__ import annotations

import numpy as np

from .costs import Floats, Ints

PIVOTS = 40


class Master:
    """Simplex over mixes of choices; choices can be added and the last basis is the start of the next solve.

    Choice 0 must be feasible: it is the first basis.
    """

    def __init__(self, values: Floats, slacks: Floats) -> None:
        size = slacks.shape[1]
        # Columns: one per choice, after one surplus variable per resource.
        self._columns = np.zeros((size + len(values), size + 1))
        self._columns[:size, 1:] = -np.eye(size)
        self._columns[size:, 0] = 1.0
        self._columns[size:, 1:] = slacks
        self._gains = np.concatenate([np.zeros(size), values])
        self._basis = [size, *range(size)]
        self._size = size

    def add(self, values: Floats, slacks: Floats) -> None:
        self._columns = np.concatenate([self._columns, np.insert(slacks, 0, 1.0, axis=1)])
        self._gains = np.concatenate([self._gains, values])

    def solve(self) -> tuple[float, Floats]:
        """The bound and the prices."""
        right = np.zeros(self._size + 1)
        right[0] = 1.0
        for _ in range(PIVOTS):
            inverse = np.linalg.inv(self._columns[self._basis])  # rows of the transposed basis
            dual = inverse @ self._gains[self._basis]
            reduced = self._gains - self._columns @ dual
            enter = int(reduced.argmax())
            if reduced[enter] <= 1e-9 * abs(dual[0]):
                break
            amount = right @ inverse
            direction = self._columns[enter] @ inverse
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(direction > 1e-12, amount / direction, np.inf)
            leave = int(ratio.argmin())
            if ratio[leave] == np.inf:
                break
            self._basis[leave] = enter
        return float(dual[0]), np.maximum(-dual[1:], 0.0)

    def mix(self) -> tuple[Ints, Floats]:
        """Indices of the choices in the optimal mix, and their weights."""
        inverse = np.linalg.inv(self._columns[self._basis])
        basis = np.array(self._basis)
        weight = inverse[0]
        real = basis >= self._size
        return basis[real] - self._size, np.maximum(weight[real], 0.0)
