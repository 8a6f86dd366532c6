"""The table of algorithms: complete, measured, and the page in docs/ says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pfedgate import algorithms
from pfedgate.config.methods import COLUMNS, Cost, Method, markdown, measured, methods, rows

PAGE = Path(__file__).resolve().parent.parent / "docs" / "algorithms.md"
EVERY = methods(measure=False)


def told(page: str) -> list[tuple[str, ...]]:
    """Names, what is shared and kept, options and their defaults: all but prose and what is measured."""
    found: list[tuple[str, ...]] = [("##", name) for name in re.findall(r"^## (.*)$", page, re.MULTILINE)]
    found += re.findall(r"^\| \[(\S+)\]\(#\S+\) \| (.*?) \| (.*?) \|", page, re.MULTILINE)
    found += re.findall(r"^\| `(.*?)` \| `(.*?)` \|", page, re.MULTILINE)
    return found


def committed(name: str) -> Cost:
    found = re.search(rf"^\| \[{name}\]\(.*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    cells = found.group().rstrip(" |").split(" | ")[-3:]
    return Cost(*(float(cell.lstrip("×")) for cell in cells))


@pytest.mark.parametrize("method", EVERY, ids=lambda method: method.name)
def test_every_algorithm_says_what_it_is(method: Method) -> None:
    assert method.paper
    assert method.what
    assert method.shares
    assert method.keeps
    assert len(method.about) > 100
    assert set(method.grid) <= set(method.options)


def test_all_algorithms_are_listed() -> None:
    assert [method.name for method in EVERY] == list(algorithms.names())
    table = rows(EVERY)
    assert all(len(row) == len(COLUMNS) for row in table)
    assert [row[0] for row in table] == list(algorithms.names())


def test_the_page_is_up_to_date() -> None:
    """To write it anew: python -m pfedgate.config.methods docs/algorithms.md"""
    page = told(PAGE.read_text(encoding="utf-8"))
    assert page == told(markdown(EVERY))
    assert len(page) > 4 * len(EVERY)


# What the methods cost by their definitions (down, up, compute); None: whatever it is.
EXPECTED = {
    "fedavg": (1, 1, 1),
    "local_only": (0, 0, 1),
    "fedem": (3, 3, 4),  # three models, and their forward passes over all samples
    "ditto": (1, 1, 2),
    "fedrep": (0.975, 0.975, 1.34),  # all but the last layer; a head epoch is a forward pass
    "heterofl": (0.5, 0.5, None),
    "fedmask": (1 / 32 * 1280 / 53000, None, None),  # a bit for each weight of the last layer, and little else
}


@pytest.mark.parametrize("name", EXPECTED)
def test_measured_costs_are_those_of_the_definitions(name: str) -> None:
    found = measured(name)
    for value, expected in zip((found.down, found.up, found.compute), EXPECTED[name], strict=True):
        assert expected is None or value == pytest.approx(expected, rel=0.05, abs=1e-3)


@pytest.mark.parametrize("name", ["fedem", "fedmask", "heterofl"])
def test_the_numbers_on_the_page_are_those_that_are_measured(name: str) -> None:
    page, found = committed(name), measured(name)
    assert (page.down, page.up, page.compute) == pytest.approx((found.down, found.up, found.compute), rel=0.05)
