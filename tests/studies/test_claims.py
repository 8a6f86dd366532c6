"""What was to be shown: which rows are compared, client by client, and how sure it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfedgate.report.paired import paired, student
from pfedgate.runs.folder import Run
from pfedgate.studies.declare import Claim, Row, Study
from pfedgate.studies.outcome import Outcomes, claims

Rows = Mapping[str, tuple[float, float, float]]  # accuracy on validation and test data, and FLOPs


def outcomes(rows: Rows, claim: Claim, seeds: int = 3) -> Outcomes:
    """Rows with three clients whose accuracies scatter around the row's."""
    methods = {"gate": "pfedgate", "FedAvg": "fedavg", "still": "pfedgate"}
    declared = tuple(Row(name, methods.get(name.split()[0], "ditto"), control=name == "still") for name in rows)
    result = Outcomes(Study("t", "T", declared, claims=(claim,), point="a"))
    for name, (val, test, flops) in rows.items():
        for seed in range(seeds):
            run = result.runs[name, "data", seed] = Run(Path(f"{name}-{seed}"))
            clients = {str(at): (10.0, test + at / 100 + seed / 1000 * len(name)) for at in range(3)}
            result._read[run.path] = {"a_val_accuracy": val, "flops": flops, "clients": clients}
    return result


ROWS = {"FedAvg": (0.5, 0.5, 1.0), "gate a": (0.7, 0.6, 0.4), "gate b": (0.6, 0.9, 0.3), "narrow": (0.4, 0.55, 0.3),
        "dear": (0.9, 0.8, 4.0), "still": (0.99, 0.99, 0.1)}  # fmt: skip


@pytest.mark.parametrize(
    ("claim", "ours", "other", "kept"),
    [
        (Claim("any"), "gate a", "dear", False),  # best on validation, hardest on test
        (Claim("cheap", ours_flops=0.4, others_flops=0.45), "gate a", "narrow", True),
        (Claim("cheaper", ours_flops=0.3, others_flops=0.45, must=-0.3), "gate b", "narrow", True),
        (Claim("control", ("gate b",), ("still",)), "gate b", "still", False),
    ],
)
def test_ours_is_chosen_on_validation_and_the_opponent_on_test(claim: Claim, ours: str, other: str, kept: bool) -> None:
    (record,) = claims(outcomes(ROWS, claim), "data")
    assert (record["ours"], record["other"], record["kept"]) == (ours, other, kept)
    assert record["low"] <= record["points"] <= record["high"]
    assert record["seeds"] == 3


def test_without_an_opponent_there_is_no_claim() -> None:
    only = {name: ROWS[name] for name in ("gate a", "dear")}
    assert claims(outcomes(only, Claim("cheap", ours_flops=0.4, others_flops=0.45)), "data") == []


def test_a_must_of_nothing_needs_the_whole_interval() -> None:
    near = {"FedAvg": (0.5, 0.6, 1.0), "gate a": (0.7, 0.601, 0.4)}
    (record,) = claims(outcomes(near, Claim("any"), seeds=1), "data")
    assert record["points"] > 0
    assert not record["kept"] or record["low"] > 0


Accuracies = st.lists(st.floats(0, 1), min_size=2, max_size=6)


@given(Accuracies, Accuracies)
def test_a_difference_changes_its_sign_with_its_sides(ours: list[float], others: list[float]) -> None:
    def clients(values: list[float]) -> Any:
        return {0: {str(at): (float(at + 1), value) for at, value in enumerate(values)}}

    there, back = paired(clients(ours), clients(others)), paired(clients(others), clients(ours))
    assert there is not None
    assert back is not None
    assert (there.mean, there.low, there.high) == pytest.approx((-back.mean, -back.high, -back.low))
    assert there.clients == min(len(ours), len(others))


def test_only_shared_seeds_and_clients_count() -> None:
    one = {0: {"a": (10, 0.5), "b": (30, 0.9)}, 1: {"a": (10, 0.1)}}
    other = {0: {"a": (10, 0.4), "c": (10, 0.0)}, 2: {"a": (10, 1.0)}}
    gap = paired(one, other)
    assert gap is not None
    assert (gap.mean, gap.seeds, gap.clients) == (pytest.approx(0.1), 1, 1)
    assert gap.high == float("inf")  # one client of one seed says nothing of others
    assert paired({0: {"a": (10, 0.5)}}, {1: {"a": (10, 0.5)}}) is None


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    random, inside = np.random.default_rng(0), 0
    for _ in range(400):
        seeds = random.normal(0.02, 0.01, 5)
        ours = {s: {str(c): (10, 0.5 + d + random.normal(0, 0.02)) for c in range(20)} for s, d in enumerate(seeds)}
        gap = paired(ours, {s: {str(c): (10, 0.5) for c in range(20)} for s in range(5)})
        assert gap is not None
        inside += gap.low <= 0.02 <= gap.high
    assert 0.92 <= inside / 400 <= 0.99


def test_students_factor() -> None:
    assert student(4) == pytest.approx(2.776, abs=1e-3)


def test_attacks_have_a_row_for_each_rule_and_three_seeds(tmp_path: Path) -> None:
    """The study is run only when it is named; here one cell of it."""
    from pfedgate.studies import attacks, declare, paper
    from pfedgate.studies.sweep import Campaign

    study = paper.get("attacks")
    assert study not in paper.STUDIES
    mine = Campaign(declare.TINY, tmp_path)
    places = mine.all_places(study)
    assert len(places) == 3 * len(attacks.METHODS) * len(attacks.RULES) * len(attacks.KINDS)
    asked = Campaign(declare.TINY, tmp_path, ("cifar10",)).all_places(study)
    assert {place.column.what for place in asked} == set(attacks.WANTED["cifar10"])
    assert {place.cell.recipe.server.robust for place in places} == set(attacks.RULES)
    kinds = {place.column.what: place.cell.recipe.attack for place in places}
    assert kinds[attacks.FLIP].kind == "sign_flip"
    assert (kinds[attacks.ONE].number, kinds[attacks.ONE].strength) == (1, 100.0)
