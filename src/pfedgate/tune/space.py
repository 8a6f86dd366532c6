"""What a search may try: a list of values or a range for each setting, named as in a recipe (train.lr, algorithm.lam).

Without anything said, a method is searched over the model's learning rate and what its own paper searched
(`Algorithm.grid`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pfedgate import algorithms
from pfedgate.config import options as schema
from pfedgate.config import toml
from pfedgate.config.options import options_of
from pfedgate.config.recipe import Recipe
from pfedgate.core.errors import RecipeError, unknown

RATES = (0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5)  # the paper's grid for the model's learning rate
MOST_POINTS = 20_000  # grids beyond this are drawn from, not listed


@dataclass(frozen=True)
class Choices:
    """One of these values. Numbers are in order, so that a search can tell near from far."""

    values: tuple[Any, ...]

    @property
    def ordered(self) -> bool:
        """Whether its values are numbers."""
        return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in self.values)

    def nearest(self, value: Any) -> int:
        """The place of a value, or of the nearest number; the first if nothing is near."""
        if value in self.values:
            return self.values.index(value)
        if not self.ordered or not isinstance(value, (int, float)):
            return 0
        return min(range(len(self.values)), key=lambda at: abs(_log(self.values[at]) - _log(value)))

    def value(self, place: int) -> Any:
        """The value at a place; beyond an end it goes on in the ratio of the last two.

        >>> Choices((0.03, 0.1)).value(2), Choices((5, 10)).value(-1)
        (0.333, 2)
        """
        if 0 <= place < len(self.values):
            return self.values[place]
        edge, inner = self.values[:2] if place < 0 else self.values[:-3:-1]
        value = edge * (edge / inner) ** (-place if place < 0 else place - len(self.values) + 1)
        return round(value) if isinstance(edge, int) else float(f"{value:.3g}")

    def reaches(self, place: int) -> bool:
        """Whether there is a value beyond an end: two positive numbers make a ratio, and whole ones must differ."""
        if len(self.values) < 2 or not min(self.values) > 0:
            return False
        return bool(0 < self.value(place) != self.value(place + 1 if place < 0 else place - 1))

    def __str__(self) -> str:
        return ", ".join(map(toml.dump, self.values))


@dataclass(frozen=True)
class Range:
    """A number between two ends, both included; `log`: by its logarithm; `whole`: without fractions."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def nearest(self, value: Any) -> float:
        """A value, or the end that is nearer."""
        inside = min(max(float(value), self.low), self.high) if isinstance(value, (int, float)) else self.low
        return round(inside) if self.whole else inside

    def value(self, number: float) -> float:
        """A number of the range with at most three digits."""
        return number if self.whole else float(f"{number:.3g}")

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}" + (", logarithmic" if self.log else "")


Axis = Choices | Range
Space = dict[str, Axis]
# A point as a search handles it: the place in a list, or the number from a range; `values` makes settings of it.
Point = dict[str, Any]


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf if value < 0 else -1e3


def axis(text: str) -> Axis:
    """What is written for one setting: values with commas, or log:LOW:HIGH, lin:LOW:HIGH, int:LOW:HIGH.

    >>> axis("0.1,0.02"), axis("log:0.01:1")
    (Choices(values=(0.02, 0.1)), Range(low=0.01, high=1.0, log=True, whole=False))
    """
    kind, colon, ends = text.partition(":")
    if colon and kind in ("log", "lin", "int"):
        try:
            low, high = (float(end) for end in ends.split(":"))
        except ValueError:
            raise RecipeError(f"{text!r}: a range is written {kind}:LOW:HIGH, such as log:0.01:1") from None
        if low >= high or (kind == "log" and low <= 0):
            raise RecipeError(f"{text!r}: a range goes from low to high" + (", both above 0" if kind == "log" else ""))
        return Range(low, high, kind == "log", kind == "int")
    return choices([toml.value(part) for part in toml.split(text)])


def choices(values: Sequence[Any]) -> Choices:
    """Values without repeats, numbers in order."""
    distinct = Choices(tuple(dict.fromkeys(tuple(v) if isinstance(v, list) else v for v in values)))
    if not distinct.values:
        raise RecipeError("nothing to choose from: give at least one value")
    return Choices(tuple(sorted(distinct.values))) if distinct.ordered else distinct


# What the task offers to every method alike: see `core.prior` and [train].
CARE = {
    "train.schedule": ("constant", "cosine"),
    "train.correction": ("none", "training"),
    "train.initial_scale": (1.0, 1.4, 2.0),
}


SERVER = {"server.lr": (0.01, 0.03, 0.1, 0.3, 1.0)}  # where the server has an optimiser of its own


def space_of(recipe: Recipe, params: Mapping[str, Axis] | None = None, *, care: bool = False) -> Space:
    """The space for the method of a recipe: the usual one, with what the task offers (`care`), `params` over it.

    Settings of [algorithm] that another method has are left out here; `checked` sees to it that some method has them.

    >>> from pfedgate.config.recipe import resolve
    >>> {name: str(values) for name, values in space_of(resolve({"algorithm": "fedprox"})).items()}
    {'train.lr': '0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5', 'algorithm.mu': '0.01, 0.05, 0.1, 0.5, 1.0'}
    """
    method = recipe.algorithm.name
    grid = {f"algorithm.{name}": values for name, values in algorithms.get(method).grid.items() if len(values) > 1}
    if care:  # numbers alone are in order, and only an order has edges to go beyond
        numbers = {name: tuple(v for v in values if v is not None) for name, values in grid.items()}
        grid = {name: values if len(numbers[name]) < 2 else numbers[name] for name, values in grid.items()}
    space: Space = {
        name: choices(values)
        for name, values in {
            "train.lr": RATES,
            **grid,
            **(SERVER if recipe.server.optimiser != "none" else {}),
            **(CARE if care else {}),
        }.items()
    }
    for name, axis in (params or {}).items():
        section, _, key = name.partition(".")
        if section != "algorithm" or key in options_of("algorithm", method):
            space[name] = axis
    return space


def checked(params: Mapping[str, Axis], recipes: Sequence[Recipe]) -> None:
    """An error unless every setting exists, for at least one of the methods, and takes these values."""
    for name, axis in params.items():
        section, _, key = name.partition(".")
        options: dict[str, schema.Option] = {}
        for recipe in recipes:
            kind = recipe.algorithm.name if section == "algorithm" else recipe.model.name
            options |= options_of(section, recipe.data.name if section == "data" else kind)
        if key not in options:
            raise RecipeError(f"--param {name}: {unknown('key', key, options)}")
        for value in axis.values if isinstance(axis, Choices) else (axis.low, axis.high):
            whole = isinstance(axis, Range) and axis.whole
            toml.convert(int(value) if whole else value, options[key].type, name)


def values(space: Space, point: Point) -> dict[str, Any]:
    """The settings of a point, by name; numbers from a range have three digits, to be read and written down.

    >>> values({"train.lr": Choices((0.1, 0.5)), "train.batch": Choices((8,))}, {"train.lr": 1, "train.batch": 0})
    {'train.lr': 0.5, 'train.batch': 8}
    """
    return {name: axis.value(point[name]) for name, axis in space.items()}


def default(space: Space, recipe: Recipe) -> Point:
    """The point nearest to what a recipe says."""
    tables, parts = recipe.tables(), {name: name.partition(".") for name in space}
    return {name: axis.nearest(tables[parts[name][0]].get(parts[name][2])) for name, axis in space.items()}


def listed(space: Space) -> list[Point] | None:
    """All points, the last setting changing first; None if there are too many, or a range among them."""
    lists = [axis.values for axis in space.values() if isinstance(axis, Choices)]
    if len(lists) < len(space) or math.prod(map(len, lists)) > MOST_POINTS:
        return None
    return [dict(zip(space, point, strict=True)) for point in itertools.product(*(range(len(v)) for v in lists))]


def settings_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a layer of a recipe, lists as TOML has them.

    >>> settings_of({"train.lr": 0.1, "train.milestones": (1, 2)})
    {'train.lr': 0.1, 'train.milestones': [1, 2]}
    """
    return {name: list(value) if isinstance(value, tuple) else value for name, value in params.items()}
