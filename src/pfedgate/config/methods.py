"""What every registered algorithm is and costs: for `pfedgate algorithms` and for docs/algorithms.md.

    methods()            all algorithms: paper, what is shared, what is private, options, costs
    rows(methods())      the same as lines of a table
    markdown(methods())  the same as a page; `python -m pfedgate.config.methods docs/algorithms.md` writes it

Costs are measured, not typed in: a few rounds of every algorithm on a small made-up federation, of which the last is
counted (the first ones may differ: a warm-up, a model that is sent once) and divided by FedAvg's. Bytes are those of
real messages, compute is the clients' floating-point operations in training.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pfedgate import algorithms
from pfedgate.config import toml
from pfedgate.config.options import Option, options_of
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.types import Optim, Task
from pfedgate.data import from_arrays
from pfedgate.engine import server as engine
from pfedgate.models import build

BUDGET = 0.5  # of the clients that are measured: what sparse methods save depends on it
ROUNDS, CLIENTS, SAMPLES = 4, 3, 100
COLUMNS = ("name", "shares", "keeps private", "down", "up", "compute", "hyper-parameters", "paper")

HEAD = f"""# Algorithms

<!-- written by `python -m pfedgate.config.methods docs/algorithms.md`; do not edit -->

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
    """What a round costs relative to FedAvg."""

    down: float  # bytes to clients
    up: float  # bytes from clients
    compute: float  # floating-point operations of training, on clients


@dataclass(frozen=True)
class Method:
    """One algorithm."""

    name: str
    what: str
    paper: str
    shares: str
    keeps: str
    options: Mapping[str, Option]
    grid: Mapping[str, Sequence[Any]]  # what the paper searched, by option
    about: str  # the module's own words: departures, ambiguities
    cost: Cost | None = None


def methods(names: Sequence[str] | None = None, *, measure: bool = True) -> list[Method]:
    """All algorithms, sorted by name, or these; `measure=False` leaves their costs out, which take seconds.

    >>> ditto = next(method for method in methods(measure=False) if method.name == "ditto")
    >>> ditto.keeps, ditto.options["lam"].default, ditto.grid["lam"]
    ('a whole model of its own', 0.1, (0.05, 0.1, 0.5, 0.8))
    """
    return [_method(name, measured(name) if measure else None) for name in names or algorithms.names()]


def _method(name: str, cost: Cost | None) -> Method:
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
        cost,
    )


@lru_cache(maxsize=64)
def measured(name: str) -> Cost:
    """Costs of an algorithm with its default options, every client at a budget of one half."""
    mine, fedavg = _last_round(name), _last_round("fedavg")
    return Cost(*(mine.get(key, 0.0) / fedavg[key] for key in ("bytes_down", "bytes_up", "flops")))


@lru_cache(maxsize=64)
def _last_round(name: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    total = CLIENTS * SAMPLES
    x = rng.integers(0, 256, (total, 8, 8, 1), dtype=np.uint8)
    federation = from_arrays(x, rng.integers(0, 10, total), owners=np.arange(total) % CLIENTS, val=False)
    task = Task(
        partial(build, "cnn_digits", (1, 8, 8), 10),
        optim=Optim(lr=0.01),
        batch=20,
        example=torch.zeros(4, 1, 8, 8),
    )
    options = engine.Options(rounds=ROUNDS, evaluate_every=0, novel=False, budget=BUDGET, stack=0, device="cpu")
    kind: type[Algorithm] = algorithms.get(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(engine.run(kind(task), federation, options).history[-1])


def rows(found: Sequence[Method]) -> list[tuple[str, ...]]:
    """Lines of a table whose columns are `COLUMNS`."""
    return [(m.name, m.shares, m.keeps, *cells(m.cost), ", ".join(m.options) or "-", m.paper) for m in found]


def cells(cost: Cost | None) -> tuple[str, ...]:
    """Down, up and compute as text."""
    if cost is None:
        return ("-",) * 3
    return tuple("0" if not v else f"×{v:.2f}" if v >= 0.1 else f"×{v:.2g}" for v in dataclasses.astuple(cost))


def markdown(found: Sequence[Method]) -> str:
    """A page: a table of all, then a section for each."""
    lines = HEAD.splitlines()
    for m in found:
        lines.append(f"| [{m.name}](#{m.name}) | {m.shares} | {m.keeps} | {' | '.join(cells(m.cost))} |")
    for m in found:
        lines += ["", f"## {m.name}", "", m.about]
        if m.options:
            lines += ["", "| option | default | why | the paper's values |", "|---|---|---|---|"]
        for option in m.options.values():
            tried = ", ".join(_text(value) for value in m.grid.get(option.name, ()))
            lines.append(f"| `{option.name}` | `{_text(option.default)}` | {_safe(option.why)} | {tried} |")
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    return toml.dump(value)


def _safe(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/algorithms.md").write_text(markdown(methods()), encoding="utf-8")
