"""What can be learnt: kinds of supervised task, with the losses and metrics that they take by name.

    kind            output of the model        labels                       loss           metrics, the main one first
    classification  [n, classes]               whole numbers [n]            cross_entropy  accuracy
    multilabel      [n, labels]                0 or 1, [n, labels]          binary         f1, exact
    regression      [n] or [n, targets]        numbers, as the output       squared        mae, rmse, r2
    segmentation    [n, classes, height, …]    whole numbers [n, height …]  pixels         iou, pixel_accuracy
    language        [n, t, tokens]             whole numbers [n, t]         cross_entropy  accuracy, perplexity

A loss is a function (output, labels) -> one number per sample. A metric adds sums over batches and turns them into one
number, so that it does not depend on how samples are cut into batches. Labels of -100 are left out, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pfedgate.core.errors import RecipeError, unknown

Loss = Callable[[Tensor, Tensor], Tensor]  # (output, labels) -> one loss per sample
NOTHING = -100  # a label that does not count: padding, a pixel that nobody has drawn


def _per_sample(losses: Tensor, y: Tensor) -> Tensor:
    """Losses of positions as one mean per sample, over the labels that count."""
    counted = y.ne(NOTHING).flatten(1).sum(1).clamp_min(1)
    return losses.view(y.shape).flatten(1).sum(1) / counted


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy per sample; sequences (output [n, t, classes], labels [n, t]) are averaged over t."""
    if output.ndim == 2:
        return F.cross_entropy(output, y, reduction="none")
    return _per_sample(F.cross_entropy(output.flatten(0, -2), y.flatten(), reduction="none"), y)


def pixels(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of every pixel (output [n, classes, height, width]), the mean per image."""
    return _per_sample(F.cross_entropy(output, y, reduction="none"), y)


def binary(output: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy of logits, the mean over a sample's labels."""
    return F.binary_cross_entropy_with_logits(output, y.to(output.dtype), reduction="none").flatten(1).mean(1)


def _errors(output: Tensor, y: Tensor) -> Tensor:
    return (output.reshape(y.shape) - y).reshape(len(y), -1)


def squared(output: Tensor, y: Tensor) -> Tensor:
    """Squared error, the mean over a sample's targets."""
    return _errors(output, y).square().mean(1)


def absolute(output: Tensor, y: Tensor) -> Tensor:
    """Absolute error, the mean over a sample's targets."""
    return _errors(output, y).abs().mean(1)


def huber(output: Tensor, y: Tensor) -> Tensor:
    """Huber's loss: squared up to an error of 1, then absolute."""
    return F.huber_loss(output.reshape(y.shape), y.to(output.dtype), reduction="none").reshape(len(y), -1).mean(1)


LOSSES: dict[str, Loss] = {
    loss.__name__: loss for loss in (cross_entropy, pixels, binary, squared, absolute, huber)
}  # fmt: skip


# -- metrics: sums over a batch, and the number that sums over all batches come to
def _mean(sums: Tensor, n: int) -> float:
    return float(sums) / n


@dataclass(frozen=True)
class Metric:
    """A number that says how good a model is on some samples."""

    name: str
    sums: Callable[[Tensor, Tensor], Tensor]  # (output, labels) of a batch -> what is added up
    value: Callable[[Tensor, int], float] = _mean  # (the sums of all batches, samples) -> the number
    higher: bool = True  # whether more is better
    share: bool = True  # between 0 and 1, shown in per cent

    def better(self, a: float, b: float) -> bool:
        """Whether `a` is better than `b`.

        >>> METRICS["mae"].better(0.1, 0.2)
        True
        """
        return a > b if self.higher else a < b

    @property
    def best(self) -> Callable[..., Any]:
        """`max` or `min`."""
        return max if self.higher else min

    def show(self, value: float | None) -> str:
        """The number to be read.

        >>> METRICS["accuracy"].show(0.834), METRICS["mae"].show(0.0123456), METRICS["mae"].show(None)
        ('83.4 %', '0.01235', '-')
        """
        if value is None or not math.isfinite(value):
            return "-"
        return f"{100 * value:.1f} %" if self.share else f"{value:.4g}"


def right(output: Tensor, y: Tensor) -> Tensor:
    """How many samples are right, by the largest output; a sequence counts by its share of right positions."""
    hits = output.argmax(-1).eq(y).float()
    if hits.ndim == 1:
        return hits.sum()
    return (hits.flatten(1).sum(1) / y.ne(NOTHING).flatten(1).sum(1).clamp_min(1)).sum()


def _right_pixels(output: Tensor, y: Tensor) -> Tensor:
    return right(output.movedim(1, -1), y)


def _confusion(output: Tensor, y: Tensor) -> Tensor:
    """Over all labels: true positives, false positives, false negatives."""
    predicted, true = output > 0, y > 0.5
    return torch.stack([(predicted & true).sum(), (predicted & ~true).sum(), (~predicted & true).sum()]).double()


def _f1(sums: Tensor, n: int) -> float:
    hits, false, missed = sums.tolist()
    return 2 * hits / (2 * hits + false + missed) if hits + false + missed else 1.0


def _exact(output: Tensor, y: Tensor) -> Tensor:
    return (output > 0).eq(y > 0.5).flatten(1).all(1).float().sum()


def _moments(output: Tensor, y: Tensor) -> Tensor:
    """Per target: squared errors, labels, squared labels."""
    labels = y.reshape(len(y), -1).double()
    return torch.stack([_errors(output, y).double().square().sum(0), labels.sum(0), labels.square().sum(0)])


def _rmse(sums: Tensor, n: int) -> float:
    return math.sqrt(float(sums[0].mean()) / n)


def _r2(sums: Tensor, n: int) -> float:
    spread = sums[2] - sums[1].square() / n
    return float((1 - sums[0] / spread.clamp_min(1e-12)).mean())


def _overlap(output: Tensor, y: Tensor) -> Tensor:
    """Per class: pixels where prediction and label agree, and those of either."""
    classes, counted = output.shape[1], y.ne(NOTHING)
    predicted, true = output.argmax(1)[counted], y[counted]
    agree = torch.bincount(true[predicted == true], minlength=classes)
    either = torch.bincount(predicted, minlength=classes) + torch.bincount(true, minlength=classes) - agree
    return torch.stack([agree, either]).double()


def _iou(sums: Tensor, n: int) -> float:
    agree, either = sums
    return float((agree / either)[either > 0].mean()) if bool((either > 0).any()) else math.nan


def _surprise(output: Tensor, y: Tensor) -> Tensor:
    """The negative log-likelihood of all tokens, and how many they are."""
    losses = F.cross_entropy(output.flatten(0, -2), y.flatten(), reduction="sum")
    return torch.stack([losses.double(), y.ne(NOTHING).sum().double()])


def _perplexity(sums: Tensor, n: int) -> float:
    return math.exp(min(700.0, float(sums[0] / sums[1].clamp_min(1))))


def _total(loss: Loss, output: Tensor, y: Tensor) -> Tensor:
    return loss(output, y).sum()


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", right),
        Metric("f1", _confusion, _f1),  # micro: over all labels of all samples
        Metric("exact", _exact),  # samples all of whose labels are right
        Metric("mae", partial(_total, absolute), higher=False, share=False),
        Metric("rmse", _moments, _rmse, higher=False, share=False),
        Metric("r2", _moments, _r2, share=False),
        Metric("iou", _overlap, _iou),  # mean over the classes that occur
        Metric("pixel_accuracy", _right_pixels),
        Metric("perplexity", _surprise, _perplexity, higher=False, share=False),
    )
}


def metric_of(wanted: Any, loss: Loss) -> Metric:
    """A metric by name, as it is, or from a function (output, labels) -> one number per sample.

    More is better, unless the function has an attribute `higher` that is false.

    >>> metric_of("mae", squared).name, metric_of(huber, squared).higher
    ('mae', True)
    """
    if isinstance(wanted, Metric):
        return wanted
    if wanted == "loss":
        return Metric("loss", partial(_total, loss), higher=False, share=False)
    if isinstance(wanted, str):
        if wanted not in METRICS:
            raise ValueError(unknown("metric", wanted, [*METRICS, "loss"]))
        return METRICS[wanted]
    if not callable(wanted):
        raise TypeError(f"a metric is a name, a Metric or a function (output, labels), got {type(wanted).__name__}")
    name = getattr(wanted, "__name__", type(wanted).__name__)
    return Metric(name, partial(_total, wanted), higher=getattr(wanted, "higher", True), share=False)


@dataclass(frozen=True)
class Kind:
    """A kind of supervised task."""

    name: str
    loss: str
    metrics: tuple[str, ...]  # the first is the main one: it decides what is best, and tables begin with it
    labels: str  # in words
    classes: bool = True  # whether outputs and labels stand for classes
    positions: bool = False  # one label for every position of an input

    def fault(self, y: Tensor) -> str:
        """Why labels cannot be of this kind; empty if they can."""
        if self.name == "regression":
            return "" if bool(torch.isfinite(y.double()).all()) else "some are not finite"
        if self.name == "multilabel":
            return "" if y.ndim == 2 and bool(((y == 0) | (y == 1)).all()) else "they are not all 0 or 1"
        if y.is_floating_point():
            return f"they are numbers of type {str(y.dtype).removeprefix('torch.')}, such as {y.flatten()[0].item():g}"
        if self.positions and y.ndim != (3 if self.name == "segmentation" else 2):
            return f"they have the shape {tuple(y.shape)}"
        return "some are below 0" if bool((y[y != NOTHING] < 0).any()) else ""


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("classification", "cross_entropy", ("accuracy",), "one whole number per sample, the class from 0"),
        Kind("multilabel", "binary", ("f1", "exact"), "a row of 0 and 1 per sample, one for each label", classes=False),
        Kind("regression", "squared", ("mae", "rmse", "r2"), "one number, or a row of them, per sample", classes=False),
        Kind("segmentation", "pixels", ("iou", "pixel_accuracy"), "an image of classes per sample [n, height, width]",
             positions=True),
        Kind("language", "cross_entropy", ("accuracy", "perplexity"), "a row of tokens per sample [n, length]",
             positions=True),
    )
}  # fmt: skip


def kind_of(name: str) -> Kind:
    """A kind by name; an unknown name is an error that suggests the nearest.

    >>> kind_of("regresion")
    Traceback (most recent call last):
    ValueError: unknown kind of task 'regresion': did you mean 'regression'? Known: classification, language, ...
    """
    if name not in KINDS:
        raise ValueError(unknown("kind of task", name, KINDS))
    return KINDS[name]


def loss_of(kind: str, loss: Any = None) -> Loss:
    """A loss by name or as it is; without one, that of the kind.

    >>> loss_of("regression").__name__, loss_of("regression", "huber").__name__
    ('squared', 'huber')
    """
    wanted = kind_of(kind).loss if loss is None else loss
    if isinstance(wanted, str) and wanted not in LOSSES:
        raise ValueError(unknown("loss", wanted, LOSSES))
    function: Any = LOSSES[wanted] if isinstance(wanted, str) else wanted
    if not callable(function):
        raise TypeError(f"a loss is a name or a function (output, labels), got {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def metrics_of(kind: str, metrics: Any, loss: Loss) -> tuple[Metric, ...]:
    """Metrics by name or function, the main one first; without any, those of the kind.

    >>> [metric.name for metric in metrics_of("multilabel", (), binary)]
    ['f1', 'exact']
    """
    alone = isinstance(metrics, str | Metric) or callable(metrics)
    return tuple(metric_of(metric, loss) for metric in ([metrics] if alone else metrics or kind_of(kind).metrics))


def in_range(kind: Kind, output: Tensor, y: Tensor, where: str) -> None:
    """Refuse a class for which the model has no output."""
    if not kind.classes:
        return
    outputs, highest = output.shape[1 if kind.name == "segmentation" else -1], int(y.max())
    if highest >= outputs:
        raise ValueError(
            f"the model has {outputs} outputs, but a label of {where} is {highest} (labels count from 0): give the "
            f"model {highest + 1} outputs, or correct the labels"
        )


def fits(kind: Kind, y: Tensor, where: str) -> None:
    """Refuse labels that cannot be of this kind, and say of which they could be."""
    if reason := kind.fault(y):
        others = [other.name for other in KINDS.values() if other is not kind and not other.fault(y)]
        hint = f"; set task.kind to {' or '.join(others)}, or give other labels" if others else ""
        raise ValueError(f'the labels of {where} do not fit task.kind = "{kind.name}" ({kind.labels}): {reason}{hint}')


def check(kind: Kind, loss: Loss, output: Tensor, y: Tensor, where: str = "the data") -> None:
    """Refuse labels that do not fit the kind of task, or the model's output on the same samples.

    >>> check(KINDS["classification"], cross_entropy, torch.zeros(2, 3), torch.tensor([0.5, 1.5]))
    Traceback (most recent call last):
    ValueError: the labels of the data do not fit task.kind = "classification" ...
    """
    fits(kind, y, where)
    shape, labels = tuple(output.shape), tuple(y.shape)
    if kind.name in ("multilabel", "regression"):
        if output.numel() != y.numel():
            raise ValueError(
                f"the model's output has the shape {shape}, the labels of {where} {labels}: for {kind.name} the model "
                f"has one output for each of {math.prod(labels[1:])} labels"
            )
    else:
        place = 1 if kind.name == "segmentation" else -1
        rest = (*shape[:1], *shape[2:]) if place == 1 else shape[:-1]
        if rest != labels:
            where_to = "in the second dimension" if place == 1 else "in the last dimension"
            raise ValueError(
                f"the model's output has the shape {shape}, the labels of {where} {labels}: for {kind.name} the output "
                f"has the labels' shape and one number for each class {where_to}"
            )
        in_range(kind, output, y, where)
    try:
        losses = loss(output, y)
    except RecipeError:  # of code that a recipe names: it says itself what is wrong
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        name = getattr(loss, "__name__", "given")
        raise ValueError(
            f"the loss {name!r} cannot be computed from outputs of shape {shape} and labels of shape {labels}: {error}"
        ) from error
    if tuple(losses.shape) != labels[:1]:
        raise ValueError(
            f"the loss returned the shape {tuple(losses.shape)} for {labels[0]} samples: it must return one number per "
            "sample (reduction='none', then the mean over all other dimensions)"
        )
