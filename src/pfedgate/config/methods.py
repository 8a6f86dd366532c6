"""The table of algorithms: what each one is and what a round of it costs.

Costs lie in `costs.json`, which ships with the package. `scripts/measure_methods.py` measures them and writes that file
and the page docs/algorithms.md.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from importlib import resources
from typing import Any

from pfedgate import algorithms
from pfedgate.config.options import Option, options_of

BUDGET = 0.5  # budget of the measured clients: the savings of sparse methods depend on it
COLUMNS = ("name", "shares", "keeps private", "down", "up", "compute", "hyper-parameters", "paper")


@dataclass(frozen=True)
class Cost:
    """A round's costs as multiples of FedAvg's."""

    down: float  # bytes to clients
    up: float  # bytes from clients
    compute: float  # floating-point operations of training, on clients


@dataclass(frozen=True)
class Method:
    """One line of the table of algorithms."""

    name: str
    paper: str
    shares: str
    keeps: str
    options: Mapping[str, Option]
    grid: Mapping[str, Sequence[Any]]  # values that the paper searched, by option
    about: str  # the module's own words: departures, ambiguities
    cost: Cost | None  # None for an algorithm from outside the package, which nobody has measured


def methods(names: Sequence[str] | None = None) -> list[Method]:
    """All algorithms, sorted by name, or these.

    >>> (ditto,) = methods(["ditto"])
    >>> ditto.keeps, ditto.options["lam"].default, ditto.grid["lam"], ditto.cost.compute
    ('a whole model of its own', 0.1, (0.05, 0.1, 0.5, 0.8), 2.0)
    """
    listed = []
    for name in names or algorithms.names():
        kind, options = algorithms.get(name), options_of("algorithm", name)
        about = inspect.getdoc(inspect.getmodule(kind)) or ""
        listed.append(Method(name, kind.paper, kind.shares, kind.keeps, options, kind.grid, about, cost_of(name)))
    return listed


@cache
def shipped() -> dict[str, dict[str, float]]:
    """The last round's bytes and operations of every algorithm, as they were measured."""
    text = resources.files("pfedgate.config").joinpath("costs.json").read_text(encoding="utf-8")
    measured: dict[str, dict[str, float]] = json.loads(text)
    return measured


def cost_of(name: str) -> Cost | None:
    """The measured costs of an algorithm with default options at a budget of one half, or None.

    >>> cost_of("fedavg")
    Cost(down=1.0, up=1.0, compute=1.0)
    """
    if (own := shipped().get(name)) is None:
        return None
    return Cost(*(own[key] / value for key, value in shipped()["fedavg"].items()))


def cells(cost: Cost | None) -> tuple[str, ...]:
    """Down, up and compute as text."""
    if cost is None:
        return ("-",) * 3
    return tuple("0" if not v else f"×{v:.2f}" if v >= 0.1 else f"×{v:.2g}" for v in astuple(cost))


def rows(listed: Sequence[Method]) -> list[tuple[str, ...]]:
    """Lines of a table whose columns are `COLUMNS`; fields of one option count as one: gate."""
    lines = []
    for m in listed:
        groups = dict.fromkeys(name.partition(".")[0] for name in m.options)
        lines.append((m.name, m.shares, m.keeps, *cells(m.cost), ", ".join(groups) or "-", m.paper))
    return lines
