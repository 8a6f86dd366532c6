"""Two kinds of clients who give the same things different names: personal methods must be right, shared ones cannot."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tests.support.toys import run

from pfedgate import data, models
from pfedgate.algorithms import build
from pfedgate.core.types import Optim, Task

FEDERATION = data.conflicting(clients=6, samples_per_client=60, novel=0.0)
TASK = Task(partial(models.build, "mlp", (16,), 2, hidden=[16]), optim=Optim(lr=0.1), batch=12)


def accuracy(name: str, rounds: int = 12, **options: Any) -> float:
    found = run(build(name, TASK, **options), FEDERATION, rounds=rounds, evaluate_every=rounds).summary["accuracy"]
    return float(found)


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_one_model_for_all_is_right_half_of_the_time(name: str) -> None:
    assert 0.35 < accuracy(name) < 0.65


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("local_only", {}),
        ("fedavg_ft", {}),
        ("ditto", {"lam": 0.05}),
        ("fedrep", {}),
        ("fedper", {}),
        ("lg_fedavg", {}),
        ("apfl", {}),
        ("mean_reg_mtl", {"mu": 0.1}),
        ("pfedme", {"lam": 0.5}),
        ("knn_per", {}),
        ("per_fedavg", {"alpha": 0.3, "adapt_steps": 5}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_personal_methods_are_right(name: str, options: dict[str, Any]) -> None:
    assert accuracy(name, **options) > 0.9


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "ditto", "fedrep", "fedper", "lg_fedavg", "apfl", "knn_per"])
def test_on_clients_alike_all_are_good(name: str) -> None:
    alike = data.synthetic(clients=6, samples_per_client=60, features=16, classes=3, classes_per_client=3)
    task = Task(partial(models.build, "mlp", (16,), 3, hidden=[16]), optim=Optim(lr=0.1), batch=12)
    found = run(build(name, task), alike, rounds=10, evaluate_every=10).summary["accuracy"]
    assert found > 0.9
