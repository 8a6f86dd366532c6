from __future__ import annotations

import math

import numpy as np
import pytest

from pfedgate.engine.endpoint import Scored
from pfedgate.engine.metrics import best_round, rounds_to, summarise
from pfedgate.training.fit import Score


def scored(accuracies: list[float], sizes: list[int]) -> list[Scored]:
    pairs = zip(accuracies, sizes, strict=True)
    return [
        Scored(str(at), "after_broadcast", Score(n, 1.0, a), Score(n, 1.0, a / 2), {"density": a})
        for at, (a, n) in enumerate(pairs)
    ]


def test_summary_numbers() -> None:
    summary = summarise(scored([0.9, 0.5, 0.7], [10, 10, 20]))
    assert summary["accuracy"] == pytest.approx(0.7)
    assert summary["spread"] == pytest.approx(np.std([0.9, 0.5, 0.7]))
    assert summary["val_accuracy"] == pytest.approx(0.35)
    assert summary["density"] == pytest.approx(0.7)


@pytest.mark.parametrize(("count", "index"), [(1, 0), (9, 0), (10, 1), (19, 1), (25, 2), (100, 10)])
def test_bottom_decile_index(count: int, index: int) -> None:
    values = [at / count for at in range(count)]
    assert summarise(scored(values[::-1], [5] * count))["bottom_decile"] == values[index]


def test_clients_without_test_data_do_not_count() -> None:
    summary = summarise(
        [
            *scored([0.5], [4]),
            Scored("x", "after_broadcast", Score(0, math.nan, math.nan), Score(0, math.nan, math.nan)),
        ]
    )
    assert (summary["clients"], summary["accuracy"]) == (1, 0.5)
    assert summarise([])["accuracy"] is None


def test_best_is_chosen_on_validation_alone() -> None:
    history = [
        {"round": at, "after_broadcast": {"val_accuracy": val, "accuracy": acc}}
        for at, (val, acc) in enumerate([(0.1, 0.9), (0.3, 0.2), (0.3, 0.8), (None, 1.0)])
    ]
    assert best_round(history) == 1
    assert best_round([{"round": 1}]) is None
    assert rounds_to(0.8, [(5, 0.2), (10, None), (15, 0.5)]) == 15
    assert rounds_to(0.8, []) is None
