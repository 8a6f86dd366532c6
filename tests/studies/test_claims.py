"""Claims of a study: which rows are compared, and on which seeds."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pfedgate.studies.declare import ACC, FIRST_SEED, Claim, Row, Study
from pfedgate.studies.outcome import Outcomes, claims, close
from pfedgate.studies.page import _winners
from pfedgate.studies.sweep import repeated

GATES, OTHERS = ("gate a", "gate b"), ("weak", "strong")


def outcomes(told: dict[str, dict[int, tuple[float, float]]], **claim: Any) -> Outcomes:
    """Rows with accuracies on (validation, test) data, by seed."""
    methods = {**dict.fromkeys(GATES, "pfedgate"), **dict.fromkeys(OTHERS, "fedavg")}
    rows = tuple(Row(name, methods[name]) for name in told)
    found = Outcomes(Study("t", "T", rows, claims=(Claim("ours minus theirs", GATES, **claim),)))
    for name, seeds in told.items():
        for seed, (val, test) in seeds.items():
            path = Path(f"{name}-{seed}")
            run: Any = SimpleNamespace(path=path)
            found.runs[name, "data", seed] = run
            found._read[path] = {"val": val, ACC.key: test}
    return found


def test_ours_is_chosen_on_validation_and_the_opponent_on_test() -> None:
    (told,) = claims(
        outcomes(
            {"gate a": {0: (0.7, 0.6)}, "gate b": {0: (0.6, 0.9)}, "weak": {0: (0.9, 0.3)}, "strong": {0: (0, 0.5)}}
        ),
        "data",
    )
    assert (told["ours"], told["other"], told["seeds"]) == ("gate a", "strong", 1)
    assert told["points"] == pytest.approx(10)
    assert told["kept"]


def test_rows_are_compared_on_the_seeds_they_share() -> None:
    # Seeds 1 and 2 are easy: a mean over all of them would make "weak" the best opponent and "gate b" the best gate.
    (told,) = claims(
        outcomes(
            {
                "gate a": {0: (0.7, 0.6)},
                "gate b": {0: (0.6, 0.7), 1: (0.9, 0.9), 2: (0.9, 0.9)},
                "weak": {0: (0.5, 0.5), 1: (0.8, 0.95), 2: (0.8, 0.95)},
                "strong": {0: (0.5, 0.65)},
            }
        ),
        "data",
    )
    assert (told["ours"], told["other"], told["seeds"]) == ("gate a", "strong", 1)
    assert told["points"] == pytest.approx(-5)
    assert not told["kept"]


def test_a_difference_is_the_mean_over_shared_seeds() -> None:
    three = {"gate a": [0.6, 0.7, 0.8], "gate b": [0.5, 0.5, 0.5], "strong": [0.5, 0.7, 0.6]}
    (told,) = claims(
        outcomes(
            {**{name: dict(enumerate(zip(v, v, strict=True))) for name, v in three.items()}, "weak": {0: (0, 0)}},
            aim=11,
        ),
        "data",
    )
    assert (told["other"], told["seeds"]) == ("strong", 3)
    assert told["points"] == pytest.approx(10)
    assert told["kept"]
    assert not told["reached"]


def test_no_verdict_before_every_row_is_there() -> None:
    found = outcomes({"gate a": {0: (0.7, 0.6)}, "gate b": {0: (0.6, 0.9)}, "weak": {0: (0.9, 0.3)}, "strong": {}})
    assert claims(found, "data") == []


@pytest.mark.parametrize(
    ("ours", "chance", "found"), [(0.508, 1, True), (0.492, 1, True), (0.52, 1, False), (0.52, 3, True)]
)
def test_what_one_seed_cannot_tell_is_repeated(ours: float, chance: float, found: bool) -> None:
    """On either side: a narrow success as much as a narrow miss."""
    told = {"gate a": {0: (0.9, ours)}, "gate b": {0: (0.1, 0.1)}, "weak": {0: (0.2, 0.2)}, "strong": {0: (0.3, 0.5)}}
    rows = outcomes(told, chance=chance)
    assert close(rows, "data") == (["gate a", "strong"] if found else [])
    assert set(repeated(rows.study, rows, "data", 0)) == {"weak", "strong"} | ({"gate a"} if found else set())


@pytest.mark.parametrize(("weak", "found"), [(0.498, True), (0.493, False)])
def test_so_is_every_opponent_that_may_be_the_hardest(weak: float, found: bool) -> None:
    """Who is a point behind the hardest one will not decide, even if it is within a point of ours."""
    rows = outcomes(
        {"gate a": {0: (0.9, 0.5)}, "gate b": {0: (0, 0)}, "weak": {0: (0, weak)}, "strong": {0: (0, 0.505)}}
    )
    assert close(rows, "data") == ["gate a", *["weak"] * found, "strong"]


def test_the_first_seed_is_what_all_rows_have() -> None:
    found = outcomes({"gate a": {0: (0.1, 0.2), 1: (0.3, 0.4)}, "weak": {0: (0.5, 0.6)}})
    assert found.values("gate a", "data", ACC) == [0.2, 0.4]
    assert [found.values(name, "data", FIRST_SEED) for name in ("gate a", "weak")] == [[0.2], [0.6]]


def test_the_best_mark_compares_rows_of_the_same_seeds() -> None:
    """Other seeds are other data: a mean over easy ones is no victory over a row that was never run on them."""
    told = outcomes(
        {
            "gate a": {0: (0, 0.5), 1: (0, 0.9)},
            "gate b": {0: (0, 0.4), 1: (0, 0.7)},
            "weak": {0: (0, 0.3), 1: (0, 0.3)},
            "strong": {0: (0, 0.8)},
        }
    )
    assert _winners(told, "data", ACC) == {"gate a"}
    assert _winners(told, "data", FIRST_SEED) == {"strong"}
