"""Per-FedAvg on a network: both orders, independent batches, adaptation on training data only."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.toys import CLASSES, FEATURES, PLAIN, Rows, Toy, clusters, first, local, normed_mlp, run, task
from torch import Tensor, nn

from pfedgate.algorithms import build
from pfedgate.algorithms.per_fedavg import PerFedAvg
from pfedgate.core.kinds import cross_entropy
from pfedgate.core.state import digest, equal
from pfedgate.core.types import CPU, Task
from pfedgate.training.fit import Batch, workspace


def per_fedavg(given: Task, **options: Any) -> PerFedAvg:
    algorithm = build("per_fedavg", given, **options)
    assert isinstance(algorithm, PerFedAvg)
    return algorithm


def _smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def _cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)).double()


@pytest.mark.parametrize(("model", "shape"), [(_smooth, (FEATURES,)), (_cnn, (1, 6, 6))])
def test_hessian_free_and_exact_products_agree_in_double_precision(model: Any, shape: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(1)
    batch = Batch(
        torch.randn(20, *shape, generator=rng).double(), torch.randint(CLASSES, (20,), generator=rng), torch.arange(20)
    )
    algorithm = per_fedavg(Task(model), order="hf", delta=1e-6)
    work = workspace(model, None, CPU)
    work.load(algorithm.init_server(0))
    w = work.flat.clone()
    work.gradient(batch, cross_entropy)
    g = work.grad.clone()
    quotient = algorithm._hessian(work, w, g, batch)
    work.flat.copy_(w)
    parameters = [value for name, value in work.module.named_parameters()]
    loss = cross_entropy(work.module(batch.x), batch.y).mean()
    slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    columns = torch.autograd.grad(torch.cat([slope.flatten() for slope in slopes]) @ g, parameters)
    exact = torch.cat([column.flatten() for column in columns])
    assert torch.cosine_similarity(quotient, exact, dim=0) > 0.999
    torch.testing.assert_close(quotient, exact, rtol=1e-3, atol=1e-6)


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES)).double()


def test_both_sides_of_the_difference_drop_the_same_units() -> None:
    one = replace(local(clusters()), prepare=torch.Tensor.double)
    sent = []
    for delta in (1e-6, 1e-4):  # the noise of two unlike masks would grow a hundredfold
        algorithm = per_fedavg(Task(_dropout, optim=PLAIN, batch=8), order="hf", alpha=0.5, delta=delta)
        sent.append(algorithm.train(*first(algorithm, one), one)[0].shared)
    for name, value in sent[0].items():
        torch.testing.assert_close(value, sent[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("order", ["first", "hf"])
def test_the_batches_of_a_meta_step_differ(order: str) -> None:
    """Each sample carries its number; D, D' and D″ must be three draws, D' the batches of every method."""
    seen: list[list[int]] = []

    def loss(output: Tensor, y: Tensor) -> Tensor:
        seen.append(y.tolist())
        return output.square().sum(-1)

    n = 40
    rows = Rows(torch.randn(n, FEATURES), torch.arange(n))
    federation = Toy({"c0": {"train": rows, "val": rows, "test": rows}})
    given = Task(partial(nn.Linear, FEATURES, 2), optim=PLAIN, loss=loss, batch=8)
    algorithm, one = per_fedavg(given, order=order), local(federation)
    algorithm.train(*first(algorithm, one), one)
    passes = {"first": 2, "hf": 4}[order]
    steps = [seen[at : at + passes] for at in range(0, len(seen), passes)]
    assert len(steps) == 5
    for inner, outer, *curvature in steps:
        assert set(inner) != set(outer)
        assert all(set(rows) not in (set(inner), set(outer)) for rows in curvature)
        assert all(rows == curvature[0] for rows in curvature), "both sides of a difference see one batch"
    assert sorted(row for step in steps for row in step[1]) == list(range(n)), "D' are an epoch"
    seen.clear()
    build("fedavg", given).train(*first(algorithm, one), one)
    assert seen == [step[1] for step in steps], "D' are the batches of every method"


def test_the_scored_model_is_one_plain_step_on_training_data() -> None:
    federation = clusters()
    given = replace(task(lambda: nn.Linear(FEATURES, CLASSES)), batch=100)
    algorithm, one = per_fedavg(given, alpha=0.2), local(federation)
    got = algorithm.init_server(0)
    model = nn.Linear(FEATURES, CLASSES)
    model.load_state_dict(got)
    nn.functional.cross_entropy(model(one.train.x), one.train.y).backward()
    private = algorithm.personalise(got, {}, one)
    for name, value in model.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(private[f"personal/{name}"], value.detach() - 0.2 * value.grad)
    assert not equal(algorithm.predictor(got, private, one.card).state_dict(), got)


def test_orders_differ_and_running_statistics_stay_finite() -> None:
    servers = {
        order: run(per_fedavg(task(normed_mlp), order=order, alpha=0.3), clusters((24, 18, 30, 10, 20))).server
        for order in ("first", "hf")
    }
    assert len({digest(server) for server in servers.values()}) == 2
    assert all(value.isfinite().all() for server in servers.values() for value in server.values())


@pytest.mark.parametrize("options", [{"order": "second"}, {"alpha": -1.0}, {"delta": 0.0}])
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"unknown order 'second': Known|alpha is not negative"):
        per_fedavg(task(), **options)
