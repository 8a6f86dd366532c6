"""What a method costs: counted FLOPs are those really done, and stand to FedAvg's as its paper says."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.support.toys import Rows, Toy, first, local

from pfedgate import models
from pfedgate.algorithms import build
from pfedgate.core import measure
from pfedgate.core.types import Local, Optim, Task
from pfedgate.engine.wire import packed_size, size


def image_client() -> Local:
    rows = Rows(torch.randn(12, 3, 32, 32), torch.arange(12) % 10)
    return local(Toy({"c0": {"train": rows, "val": rows, "test": rows}}))


TASK = Task(partial(models.build, "cnn_cifar10"), optim=Optim(lr=0.01), batch=4)

# Units of one forward and backward pass per batch, from each method's line in the specification.
UNITS: list[tuple[str, dict[str, Any], float]] = [
    ("fedprox", {}, 1.0),
    ("pfedme", {}, 5.0),
    ("pfedme", {"inner_steps": 2}, 2.0),
    ("mean_reg_mtl", {}, 1.0),
    ("lg_fedavg", {}, 1.0),
    ("ditto", {}, 2.0),
    ("fedrep", {}, 1.33),
    ("fedrep", {"head_epochs": 10}, 4.65),  # a forward pass is 0.365 of a unit: the first layer needs no input gradient
    ("fedper", {}, 1.0),
    ("fedbn", {}, 1.0),
    ("apfl", {}, 2.0),
    ("knn_per", {}, 1.0),
    ("per_fedavg", {}, 2.0),
    ("per_fedavg", {"order": "hf"}, 4.0),
    ("feddbe", {}, 1.0),
    ("fedrod", {}, 1.0),
    ("fedbabu", {}, 1.0),
    ("ifca", {"clusters": 1}, 1.0),
    ("ifca", {}, 2.46),  # four forward passes, and one model trained
    ("fedala", {}, 1.0),  # a client's first round has nothing to mix
]
ids = [f"{name}{options or ''}" for name, options, _ in UNITS]


def flops_said_and_spent(name: str, **options: Any) -> tuple[float, int]:
    """FLOPs a client says it spent in a round, and those it really did."""
    algorithm, one = build(name, TASK, **options), image_client()
    got, private = first(algorithm, one)
    algorithm.train(got, private, one)  # what is measured once per model must not be counted
    said: list[float] = []
    really = measure.flops(lambda: said.append(algorithm.train(got, private, one)[0].metrics["flops"]))
    return said[0], really


@pytest.fixture(scope="module")
def unit() -> int:
    said, really = flops_said_and_spent("fedavg")
    assert said == pytest.approx(really, rel=0.01)
    return really


@pytest.mark.parametrize(("name", "options", "units"), UNITS, ids=ids)
def test_compute_is_counted_and_is_what_the_method_promises(
    name: str, options: dict[str, Any], units: float, unit: int
) -> None:
    said, really = flops_said_and_spent(name, **options)
    assert said == pytest.approx(really, rel=0.05)
    assert really / unit == pytest.approx(units, rel=0.05)


@pytest.mark.parametrize(
    "name", ["fedprox", "ditto", "per_fedavg", "pfedme", "knn_per", "apfl", "fedbn", "mean_reg_mtl"]
)
def test_methods_that_share_the_model_send_exactly_the_model(name: str) -> None:
    algorithm, one = build(name, TASK), image_client()
    got, private = first(algorithm, one)
    update, _ = algorithm.train(got, private, one)
    whole = packed_size(build("fedavg", TASK).init_server(0))
    assert packed_size(got) == whole
    assert size(update, client="c0") == pytest.approx(whole, rel=0.001)
    assert whole == pytest.approx(4 * 256_830, rel=0.005)
