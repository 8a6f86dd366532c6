"""Kinds of task: every loss and metric against its definition, and labels that do not fit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pfedgate.core.kinds import KINDS, LOSSES, METRICS, NOTHING, check, loss_of, metric_of
from pfedgate.core.types import Task

N, C, L, T, H = 12, 4, 3, 5, 6


def sample(kind: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs and labels of some samples."""
    rng = torch.Generator().manual_seed(seed)
    shape, labels = {
        "classification": ((N, C), (N,)),
        "multilabel": ((N, L), (N, L)),
        "regression": ((N, L), (N, L)),
        "segmentation": ((N, C, H, H), (N, H, H)),
        "language": ((N, T, C), (N, T)),
    }[kind]
    output = torch.randn(shape, generator=rng)
    if kind == "regression":
        return output, torch.randn(labels, generator=rng)
    y = torch.randint(2 if kind == "multilabel" else C, labels, generator=rng)
    if KINDS[kind].positions:
        y[torch.rand(labels, generator=rng) < 0.2] = NOTHING
    return output, y


EXPECTED: dict[str, tuple[str, Any]] = {
    "accuracy": ("classification", lambda o, y: (o.argmax(1) == y).mean()),
    "exact": ("multilabel", lambda o, y: ((o > 0) == y).all(1).mean()),
    "f1": ("multilabel", lambda o, y: 2 * ((o > 0) & (y == 1)).sum() / ((o > 0).sum() + y.sum())),
    "mae": ("regression", lambda o, y: np.abs(o - y).mean()),
    "rmse": ("regression", lambda o, y: np.sqrt(((o - y) ** 2).mean())),
    "r2": ("regression", lambda o, y: (1 - ((o - y) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)).mean()),
    "iou": (
        "segmentation",
        lambda o, y: np.mean(
            [
                ((o.argmax(1) == c) & (y == c)).sum() / (((o.argmax(1) == c) | (y == c)) & (y != NOTHING)).sum()
                for c in range(C)
            ]
        ),
    ),
    "pixel_accuracy": (
        "segmentation",
        lambda o, y: np.mean([(a.argmax(0) == b)[b != NOTHING].mean() for a, b in zip(o, y, strict=True)]),
    ),
    "perplexity": (
        "language",
        lambda o, y: np.exp(float(F.cross_entropy(torch.tensor(o).flatten(0, 1), torch.tensor(y).flatten()))),
    ),
}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("batch", [1, 5, N])
def test_a_metric_is_its_definition_however_samples_are_batched(name: str, batch: int) -> None:
    kind, definition = EXPECTED[name]
    output, y = sample(kind)
    metric = METRICS[name]
    sums = torch.stack([metric.sums(o, own) for o, own in zip(output.split(batch), y.split(batch), strict=True)]).sum(0)
    assert metric.value(sums, N) == pytest.approx(float(definition(output.numpy(), y.numpy())), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_is_one_number_per_sample_and_sees_only_its_sample(kind: str) -> None:
    output, y = sample(kind)
    whole = loss_of(kind)(output, y)
    assert whole.shape == (N,)
    alone = torch.cat([loss_of(kind)(output[at : at + 1], y[at : at + 1]) for at in range(N)])
    torch.testing.assert_close(whole, alone)
    check(KINDS[kind], loss_of(kind), output, y)


@pytest.mark.parametrize("loss", ["squared", "absolute", "huber"])
def test_regression_takes_a_column_for_a_row_of_labels(loss: str) -> None:
    output, y = torch.tensor([[1.0], [4.0]]), torch.tensor([0.5, 1.0])
    expected = {"squared": [0.25, 9.0], "absolute": [0.5, 3.0], "huber": [0.125, 2.5]}[loss]
    assert LOSSES[loss](output, y).tolist() == pytest.approx(expected)


def test_a_task_takes_names_and_functions() -> None:
    def shy(output: Tensor, y: Tensor) -> Tensor:
        return output.abs().mean(1)

    shy.higher = False  # type: ignore[attr-defined]
    task = Task(torch.nn.Identity, kind="regression", loss="huber", metrics=(shy, "rmse"))  # type: ignore[arg-type]
    assert (task.loss, task.metric.name, task.metric.higher) == (LOSSES["huber"], "shy", False)
    assert [metric.name for metric in task.metrics] == ["shy", "rmse"]
    output, y = sample("regression")
    loss = metric_of("loss", task.loss)
    assert loss.value(loss.sums(output, y), N) == pytest.approx(float(task.loss(output, y).mean()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "regresion"}, "unknown kind of task 'regresion': did you mean 'regression'"),
        ({"loss": "sqared"}, "unknown loss 'sqared': did you mean 'squared'"),
        ({"metrics": ("acuracy",)}, "unknown metric 'acuracy': did you mean 'accuracy'"),
        ({"metrics": (3,)}, "a metric is a name"),
        ({"loss": 3}, "a loss is a name"),
    ],
)
def test_wrong_names_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Task(torch.nn.Identity, **settings)


@pytest.mark.parametrize(
    ("kind", "output", "y", "message"),
    [
        ("classification", (4, 3), torch.rand(4), "type float32.*set task.kind to regression"),
        ("classification", (4, 3), torch.tensor([0, 1, 2, 3]), "3 outputs, but a label of the data is 3"),
        ("classification", (4, 3), torch.tensor([0, -1, 2, 0]), "some are below 0"),
        ("classification", (4, 3), torch.zeros(4, 2).long(), "has the labels' shape and one number for each class"),
        ("classification", (4,), torch.zeros(4).long(), "has the labels' shape and one number for each class"),
        ("multilabel", (4, 3), torch.full((4, 3), 0.5), "they are not all 0 or 1; set task.kind to regression"),
        ("multilabel", (4, 3), torch.zeros(4, 2), "one output for each of 2 labels"),
        ("regression", (4, 3), torch.zeros(4), "one output for each of 1 labels"),
        ("regression", (4, 1), torch.tensor([1.0, math.nan, 1.0, 1.0]), "some are not finite"),
        ("segmentation", (4, 3), torch.zeros(4).long(), r"shape \(4,\); set task.kind to classification"),
        ("segmentation", (4, 3, 8, 8), torch.zeros(4, 4, 4).long(), "one number for each class in the second"),
        ("language", (4, 7, 5), torch.zeros(4, 6).long(), "one number for each class in the last"),
    ],
)
def test_labels_that_do_not_fit_are_refused_in_words(
    kind: str, output: tuple[int, ...], y: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(KINDS[kind], loss_of(kind), torch.zeros(output), y)


def test_a_loss_that_is_a_mean_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"returned the shape \(\) for 12 samples: it must return one number per sample"
    ):
        check(KINDS["classification"], F.cross_entropy, *sample("classification"))
