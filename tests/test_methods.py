"""The table of algorithms: complete, measured, and the page in docs/ says the same."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from pfedgate import algorithms
from pfedgate.config.methods import COLUMNS, Method, cost_of, methods, rows, shipped

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "algorithms.md"
EVERY = methods()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_methods", ROOT / "scripts" / "measure_methods.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def facts(page: str) -> list[tuple[str, ...]]:
    """Names, what is shared and private, costs, options and their defaults: all but prose."""
    lines: list[tuple[str, ...]] = [("##", name) for name in re.findall(r"^## (.*)$", page, re.MULTILINE)]
    lines += re.findall(r"^\| \[(\S+)\]\(#\S+\) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|", page, re.MULTILINE)
    lines += re.findall(r"^\| `(.*?)` \| `(.*?)` \|", page, re.MULTILINE)
    return lines


@pytest.mark.parametrize("method", EVERY, ids=lambda method: method.name)
def test_every_algorithm_says_what_it_is(method: Method) -> None:
    assert method.paper
    assert algorithms.get(method.name).__doc__
    assert method.shares
    assert method.keeps
    assert len(method.about) > 100
    assert set(method.grid) <= set(method.options)
    assert all(option.why for option in method.options.values() if not option.name.startswith("gate."))


def test_all_algorithms_are_listed_and_measured() -> None:
    assert [method.name for method in EVERY] == list(algorithms.names()) == list(shipped())
    table = rows(EVERY)
    assert all(len(row) == len(COLUMNS) for row in table)
    assert [row[0] for row in table] == list(algorithms.names())


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    """To write it anew: python scripts/measure_methods.py --page"""
    page = facts(PAGE.read_text(encoding="utf-8"))
    assert page == facts(script.markdown())
    assert len(page) > 4 * len(EVERY)


# Costs of a round by the methods' definitions (down, up, compute); None: any.
EXPECTED = {
    "fedavg": (1, 1, 1),
    "local_only": (0, 0, 1),
    "fedem": (3, 3, 4),  # three models, and their forward passes over all samples
    "ditto": (1, 1, 2),
    "fedrep": (0.975, 0.975, 1.34),  # all but the last layer; a head epoch is a forward pass
    "heterofl": (0.5, 0.5, None),
    "fedrolex": (0.5, 0.5, None),
    "fjord": (0.5, 0.5, None),
    "fedmask": (1 / 32 * 1280 / 53000, None, None),  # a bit for each weight of the last layer, and little else
}


@pytest.mark.parametrize("name", EXPECTED)
def test_measured_costs_are_those_of_the_definitions(name: str) -> None:
    cost = cost_of(name)
    assert cost is not None
    for value, expected in zip((cost.down, cost.up, cost.compute), EXPECTED[name], strict=True):
        assert expected is None or value == pytest.approx(expected, rel=0.05, abs=1e-3)


@pytest.mark.parametrize("name", ["fedavg", "fedmask"])
def test_shipped_costs_are_those_of_a_fresh_measurement(script: ModuleType, name: str) -> None:
    assert script.measure(name) == shipped()[name]
