"""Models by name, for recipes and the command line. Unknown names and options fail and name the nearest."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfedgate.core.errors import unknown
from pfedgate.models import images, text, vit

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelInfo:
    """One line of `pfedgate models`."""

    name: str
    what: str
    input_shape: Shape  # one sample's; the default of build()
    classes: int
    params: int  # at these defaults
    options: dict[str, object]  # accepted by build() beyond the shape, with the defaults


@dataclass(frozen=True)
class _Entry:
    make: Callable[..., nn.Module]
    input_shape: Shape
    classes: int
    reads_classes: bool = False  # inputs are tokens, of which there are as many as outputs


_MODELS = {
    "cnn_femnist": _Entry(images.cnn_femnist, (1, 28, 28), 62),
    "cnn_cifar10": _Entry(images.cnn_cifar10, (3, 32, 32), 10),
    "cnn_cifar100": _Entry(images.cnn_cifar100, (3, 32, 32), 100),
    "lenet5_wide": _Entry(images.lenet5_wide, (3, 32, 32), 100),
    "cnn_digits": _Entry(images.cnn_digits, (1, 8, 8), 10),
    "mlp": _Entry(images.mlp, (64,), 10),
    "resnet": _Entry(images.ResNet, (3, 32, 32), 10),
    "vit": _Entry(vit.VisionTransformer, (3, 32, 32), 10),
    "text_cnn": _Entry(text.TextCNN, (32,), 4),
    "text_gru": _Entry(text.TextGRU, (32,), 4),
    "unet": _Entry(images.UNet, (1, 16, 16), 3),
    "token_gru": _Entry(text.TokenGRU, (32,), 65, reads_classes=True),
}


def names() -> tuple[str, ...]:
    """Names that `build` accepts.

    >>> "cnn_digits" in names()
    True
    """
    return tuple(_MODELS)


def build(name: str, input_shape: Shape | None = None, classes: int | None = None, **options: object) -> nn.Module:
    """A fresh model; `input_shape` is that of one sample. Shape and classes default to the model's own data.

    Weights come from torch's global generator, as for any module.

    >>> build("cnn_femnist", (1, 28, 28), 10).out
    Linear(in_features=2048, out_features=10, bias=True)
    >>> build("cnn_femnist", widht=2)
    Traceback (most recent call last):
    TypeError: model 'cnn_femnist': unknown option 'widht': did you mean 'width'? Known: width, widths
    """
    entry = _entry(name)
    accepted = _options(entry)
    for option in options:
        if option not in accepted:
            raise TypeError(f"model {name!r}: {unknown('option', option, accepted)}")
    shape = entry.input_shape if input_shape is None else tuple(int(size) for size in input_shape)
    outputs = entry.classes if classes is None else int(classes)
    if outputs < 1 or not shape or min(shape) < 1:
        raise ValueError(f"model {name!r}: needs positive sizes, got input {shape} and {outputs} classes")
    try:
        return entry.make(shape, outputs, **options)
    except ValueError as error:
        raise ValueError(f"model {name!r}: {error}") from None


def options(name: str) -> dict[str, object]:
    """Options that build() accepts for this model beyond the shape, with their defaults; nothing is built.

    >>> options("cnn_femnist")
    {'width': 1.0, 'widths': ()}
    """
    return _options(_entry(name))


def describe() -> tuple[ModelInfo, ...]:
    """All models with their parameter counts, counted on torch's meta device (no memory, no random numbers).

    >>> [(m.name, m.params) for m in describe()][:2]
    [('cnn_femnist', 2278334), ('cnn_cifar10', 256830)]
    """
    lines = []
    for name, entry in _MODELS.items():
        with torch.device("meta"):
            model = build(name)
        what = (inspect.getdoc(entry.make) or "").splitlines()[0].rstrip(".")
        params = sum(p.numel() for p in model.parameters())
        lines.append(ModelInfo(name, what, entry.input_shape, entry.classes, params, _options(entry)))
    return tuple(lines)


def example(name: str, batch: int = 2, generator: torch.Generator | None = None) -> Tensor:
    """A random batch of the model's default shape: tokens for text models, numbers for the others.

    >>> example("text_gru", batch=3).shape, example("text_gru").dtype
    (torch.Size([3, 32]), torch.int64)
    """
    entry = _entry(name)
    shape = (batch, *entry.input_shape)
    vocabulary = entry.classes if entry.reads_classes else _options(entry).get("vocabulary")
    if isinstance(vocabulary, int):
        return torch.randint(vocabulary, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def _entry(name: str) -> _Entry:
    if name not in _MODELS:
        raise ValueError(unknown("model", name, _MODELS))
    return _MODELS[name]


def _options(entry: _Entry) -> dict[str, object]:
    parameters = inspect.signature(entry.make).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
