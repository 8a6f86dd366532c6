from __future__ import annotations

import math

import pytest

from pfedgate.core.types import Schedule


def test_constant() -> None:
    assert {Schedule().factor(at, 10) for at in range(10)} == {1.0}


def test_multi_step_by_global_round() -> None:
    steps = [Schedule("multi_step", milestones=(0.5, 0.75), gamma=0.1).factor(at, 400) for at in range(400)]
    assert steps[:200] == [1.0] * 200
    assert steps[200:300] == [0.1] * 100
    assert steps[300:] == [0.01] * 100


def test_cosine_falls_from_one_to_the_floor() -> None:
    values = [Schedule("cosine", floor=0.1).factor(at, 50) for at in range(50)]
    assert values[0] == 1.0
    assert values == sorted(values, reverse=True)
    assert 0.1 < values[-1] < 0.102
    assert math.isclose(values[25], 0.55)


def test_warm_up() -> None:
    assert [Schedule(warmup=3).factor(at, 9) for at in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_plateau_reads_validation_only_and_needs_no_memory() -> None:
    schedule = Schedule("plateau", patience=2, factor_plateau=0.5)
    scores = [0.1, 0.2, 0.2, 0.2, 0.2, 0.3, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2]
    factors = [schedule.factor(at, 99, scores[:at]) for at in range(len(scores) + 1)]
    assert factors == [1, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        Schedule("cosin")
