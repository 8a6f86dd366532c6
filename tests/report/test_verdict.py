"""A report begins with what was learnt and how sure that is, and claims nothing that the runs do not show."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfedgate.report import html
from pfedgate.report.verdict import Contender, interval, sentences


def entry(accuracy: float, *, flops: float = 1e9, finished: bool = True, clients: int = 20, noise: float = 0) -> dict:
    """A run whose clients deviate from its accuracy by so much at most."""
    draw = random.Random(0 if noise == 0 else 1)
    rows = [{"client": str(at), "n": 30, "accuracy": accuracy + draw.uniform(-noise, noise)} for at in range(clients)]
    summary = {"accuracy": accuracy, "bottom_decile": accuracy - 0.1, "flops": flops, "clients": clients}
    return {"summary": summary, "clients": rows, "finished": finished}


def setting(name: str, *runs: dict, league: Any = 0) -> Contender:
    return Contender(name, runs, league)


def test_the_best_is_named_with_its_gap_and_what_the_cheapest_costs() -> None:
    runs = [setting("dense", entry(0.9)), setting("small-net", entry(0.8)), setting("gated", entry(0.85, flops=1e8))]
    first, second = sentences(runs)
    assert first == (
        "dense ends with the highest accuracy, 90.0 %, 5.0 points above gated, which computes 0.10 of its FLOPs."
    )
    assert "between dense and gated is +5.0 to +5.0 points (95 % interval): it is more than chance" in second
    assert "one seed" in second
    cheap, _ = sentences([setting("a", entry(0.9, flops=1e8)), setting("b", entry(0.8))])
    assert cheap.endswith("10.0 points above b; it also computes least, 0.10 of the FLOPs of b.")
    third, _ = sentences([*runs[:1], setting("c", entry(0.89)), setting("gated", entry(0.85, flops=1e8))])
    assert third.endswith("1.0 points above c; gated, 5.0 points below, computes 0.10 of its FLOPs.")


def test_a_gap_within_the_noise_may_be_chance() -> None:
    _, second = sentences([setting("a", entry(0.81, noise=0.15)), setting("b", entry(0.80))])
    assert "it may be chance" in second
    same, _ = sentences([setting("a", entry(0.8)), setting("b", entry(0.8))])
    assert same == "a and b end with the same accuracy, 80.0 %."


def test_seeds_go_before_clients() -> None:
    ours = setting("ours", entry(0.90), entry(0.80), entry(0.84))
    theirs = setting("theirs", entry(0.80), entry(0.81), entry(0.80))
    first, second = sentences([ours, theirs])
    assert first.startswith("ours ends with the highest accuracy, 84.7 %, 4.3 points above theirs")
    assert second.startswith("Over 3 seeds")
    assert "it may be chance" in second


def test_what_cannot_be_compared_is_not() -> None:
    (said,) = sentences([setting("a", entry(0.9)), setting("b", entry(0.8), league=1)])
    assert "none is better than another" in said
    assert sentences([setting("a", {"summary": {}, "clients": [], "finished": False})]) == []
    first, second = sentences([setting("a", entry(0.9, finished=False, clients=0))])
    assert first.startswith("So far, a ends")
    assert second == "How sure that is shows when the run has ended."
    alone, sure = sentences([setting("a", entry(0.9))])
    assert alone == "a ends with 90.0 % accuracy over 20 clients, and 80.0 % for the client at the worst tenth."
    assert "600 test samples and one seed" in sure
    assert "up to 2.4 points" in sure


@given(st.lists(st.tuples(st.floats(-1, 1), st.integers(1, 99)), min_size=2, max_size=30), st.floats(-1, 1))
def test_intervals_shift_with_their_values(rows: list[tuple[float, int]], by: float) -> None:
    values, weights = [value for value, _ in rows], [weight for _, weight in rows]
    mean, half = interval(values, weights)
    moved, same = interval([value + by for value in values], weights)
    assert moved == pytest.approx(mean + by, abs=1e-9)
    assert same == pytest.approx(half, abs=1e-9)
    again, scaled = interval([-value for value in values], [3 * weight for weight in weights])
    assert (again, scaled) == pytest.approx((-mean, half), abs=1e-9)
    assert min(values) - 1e-9 <= mean <= max(values) + 1e-9


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    draw = random.Random(3)
    samples = [[draw.gauss(0.1, 1) for _ in range(12)] for _ in range(400)]
    covered = sum(abs(mean - 0.1) <= half for mean, half in (interval(one, [1.0] * 12) for one in samples))
    assert 0.92 <= covered / 400 <= 0.98
    assert math.isclose(interval([0.5, 0.5], [1, 2])[1], 0, abs_tol=1e-12)


def test_the_page_begins_with_it(content: dict) -> None:
    assert len(content["verdict"]) == 2
    page = html.render({**content, "verdict": ["<b> wins", "sure"]})
    assert '<div class="verdict"><p>&lt;b&gt; wins</p><p>sure</p></div>' in page
