"""The table of algorithms: what each one is and what a round of it costs.

    methods()            all algorithms: paper, what is shared, what is private, options, costs
    rows(methods())      the same as lines of a table
    markdown(methods())  the same as a page, docs/algorithms.md

Costs lie in `costs.json`, which ships with the package. `scripts/measure_methods.py` measures them and writes that file
and the page.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from pfedgate import algorithms
from pfedgate.config import toml
from pfedgate.config.options import Option, options_of

BUDGET = 0.5  # budget of the measured clients: the savings of sparse methods depend on it
ROUNDS, CLIENTS, SAMPLES = 4, 3, 100
COLUMNS = ("name", "shares", "keeps private", "down", "up", "compute", "hyper-parameters", "paper")

HEAD = f"""# Algorithms

<!-- written by `python scripts/measure_methods.py`; do not edit -->

`pfedgate run --set algorithm.name=ditto --set algorithm.lam=0.5` trains one of these, and so does a recipe with the
same in its section `[algorithm]`. To add one, see [Add an algorithm](how-to/add-an-algorithm.md).

Traffic and compute of a round are measured, relative to FedAvg: a small convolutional network (53,000 parameters),
{CLIENTS} clients of {SAMPLES * 4 // 5} samples, default options, every client at a budget of {BUDGET}; of {ROUNDS}
rounds the last is counted. Compute is that of clients in training; what a method does when it is scored (fine-tuning,
nearest neighbours) or on the server (pFedHN) comes on top.

| algorithm | shared | private | down | up | compute |
|---|---|---|---|---|---|
"""


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
    what: str
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
    return [_method(name) for name in names or algorithms.names()]


def _method(name: str) -> Method:
    kind = algorithms.get(name)
    module = inspect.getmodule(kind)
    return Method(
        name,
        inspect.cleandoc(kind.__doc__ or "").partition("\n")[0],
        kind.paper,
        kind.shares,
        kind.keeps,
        options_of("algorithm", name),
        kind.grid,
        inspect.cleandoc((module and module.__doc__) or ""),
        cost_of(name),
    )


@lru_cache(maxsize=1)
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


def rows(listed: Sequence[Method]) -> list[tuple[str, ...]]:
    """Lines of a table whose columns are `COLUMNS`."""
    return [(m.name, m.shares, m.keeps, *cells(m.cost), _groups(m), m.paper) for m in listed]


def _groups(method: Method) -> str:
    """The options in a line; fields of one option count as one: gate."""
    return ", ".join(dict.fromkeys(name.partition(".")[0] for name in method.options)) or "-"


def cells(cost: Cost | None) -> tuple[str, ...]:
    """Down, up and compute as text."""
    if cost is None:
        return ("-",) * 3
    return tuple("0" if not v else f"×{v:.2f}" if v >= 0.1 else f"×{v:.2g}" for v in astuple(cost))


def markdown(listed: Sequence[Method]) -> str:
    """A page: a table of all, then a section for each."""
    lines = HEAD.splitlines()
    for m in listed:
        lines.append(f"| [{m.name}](#{m.name}) | {m.shares} | {m.keeps} | {' | '.join(cells(m.cost))} |")
    for m in listed:
        lines += ["", f"## {m.name}", "", m.about]
        if m.options:
            lines += ["", "| option | default | why | the paper's values |", "|---|---|---|---|"]
        for option in m.options.values():
            tried, why = m.grid.get(option.name, ()), option.why.replace("|", "\\|")
            values = ", ".join(map(toml.dump, tried))
            lines.append(f"| `{option.name}` | `{toml.dump(option.default)}` | {why} | {values} |")
    return "\n".join(lines) + "\n"
