"""Claims of a study: which rows are compared, and on which seeds."""

from typing import Any

import pytest
from tests.support.studies import Scores, made_up

from pfedgate.studies.declare import ACC, FIRST_SEED, Claim, Row, Study
from pfedgate.studies.outcome import Outcomes, claims, close
from pfedgate.studies.page import _winners
from pfedgate.studies.sweep import repeated

GATES, OTHERS = ("gate a", "gate b"), ("weak", "strong")


def outcomes(scores: Scores, **claim: Any) -> Outcomes:
    """Rows with accuracies on (validation, test) data, by seed."""
    rows = tuple(Row(name, "pfedgate" if name in GATES else "fedavg") for name in scores)
    return made_up(Study("t", "T", rows, claims=(Claim("ours minus theirs", GATES, **claim),)), scores)


def one_seed(*scores: tuple[float, float], **claim: Any) -> Outcomes:
    """The two gates, weak and strong, with one seed each."""
    rows = dict(zip((*GATES, *OTHERS), scores, strict=True))
    return outcomes({name: {0: score} for name, score in rows.items()}, **claim)


THREE = {"gate a": [0.6, 0.7, 0.8], "gate b": [0.5, 0.5, 0.5], "strong": [0.5, 0.7, 0.6]}
CASES = {
    "ours is chosen on validation, the opponent on test": (
        one_seed((0.7, 0.6), (0.6, 0.9), (0.9, 0.3), (0.0, 0.5), aim=11), 1, 10,
    ),
    # Seeds 1 and 2 are easy: a mean over all of them would make "weak" the best opponent and "gate b" the best gate.
    "rows are compared on the seeds they share": (
        outcomes({
            "gate a": {0: (0.7, 0.6)},
            "gate b": {0: (0.6, 0.7), 1: (0.9, 0.9), 2: (0.9, 0.9)},
            "weak": {0: (0.5, 0.5), 1: (0.8, 0.95), 2: (0.8, 0.95)},
            "strong": {0: (0.5, 0.65)},
        }, aim=0), 1, -5,
    ),
    "a difference is the mean over shared seeds": (
        outcomes({
            **{name: dict(enumerate(zip(v, v, strict=True))) for name, v in THREE.items()}, "weak": {0: (0, 0)},
        }, aim=11), 3, 10,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("result", "seeds", "points"), CASES.values(), ids=CASES)
def test_the_best_of_ours_is_compared_with_the_hardest_opponent(result: Outcomes, seeds: int, points: float) -> None:
    (claim,) = claims(result, "data")
    assert (claim["ours"], claim["other"], claim["seeds"]) == ("gate a", "strong", seeds)
    assert claim["points"] == pytest.approx(points)
    assert claim["kept"] == (points > 0)
    assert not claim["reached"]


def test_no_verdict_before_every_row_is_there() -> None:
    some = outcomes({"gate a": {0: (0.7, 0.6)}, "gate b": {0: (0.6, 0.9)}, "weak": {0: (0.9, 0.3)}, "strong": {}})
    assert claims(some, "data") == []


@pytest.mark.parametrize(
    ("ours", "chance", "close_by"), [(0.508, 1, True), (0.492, 1, True), (0.52, 1, False), (0.52, 3, True)]
)
def test_what_one_seed_cannot_tell_is_repeated(ours: float, chance: float, close_by: bool) -> None:
    """On either side: a narrow success as much as a narrow miss."""
    result = one_seed((0.9, ours), (0.1, 0.1), (0.2, 0.2), (0.3, 0.5), chance=chance)
    assert close(result, "data") == (["gate a", "strong"] if close_by else [])
    assert set(repeated(result.study, result, "data", 0)) == {"weak", "strong"} | ({"gate a"} if close_by else set())


@pytest.mark.parametrize(("weak", "rival"), [(0.498, True), (0.493, False)])
def test_so_is_every_opponent_that_may_be_the_hardest(weak: float, rival: bool) -> None:
    """Who is a point behind the hardest one will not decide, even if it is within a point of ours."""
    assert close(one_seed((0.9, 0.5), (0, 0), (0, weak), (0, 0.505)), "data") == ["gate a", *["weak"] * rival, "strong"]


def test_the_first_seed_is_what_all_rows_have() -> None:
    result = outcomes({"gate a": {0: (0.1, 0.2), 1: (0.3, 0.4)}, "weak": {0: (0.5, 0.6)}})
    assert result.values("gate a", "data", ACC) == [0.2, 0.4]
    assert [result.values(name, "data", FIRST_SEED) for name in ("gate a", "weak")] == [[0.2], [0.6]]


def test_the_best_mark_compares_rows_of_the_same_seeds() -> None:
    """Other seeds are other data: a mean over easy ones is no victory over a row that was never run on them."""
    seeds = {"gate a": (0.5, 0.9), "gate b": (0.4, 0.7), "weak": (0.3, 0.3), "strong": (0.8,)}
    result = outcomes({name: {seed: (0, test) for seed, test in enumerate(tests)} for name, tests in seeds.items()})
    assert _winners(result, "data", ACC) == {"gate a"}
    assert _winners(result, "data", FIRST_SEED) == {"strong"}
