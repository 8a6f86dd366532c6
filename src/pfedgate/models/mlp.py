"""A plain multilayer perceptron."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

Shape = tuple[int, ...]


def mlp(input_shape: Shape, classes: int, *, hidden: Sequence[int] = (64,), dropout: float = 0.0) -> nn.Module:
    """Multilayer perceptron on flattened input: `hidden` sizes, ReLU between."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    features = math.prod(input_shape)
    for index, size in enumerate(hidden, start=1):
        if size < 1:
            raise ValueError(f"hidden sizes must be positive, got {list(hidden)}")
        layers[f"fc{index}"] = nn.Linear(features, size)
        layers[f"relu{index}"] = nn.ReLU()
        if dropout:
            layers[f"dropout{index}"] = nn.Dropout(dropout)
        features = size
    layers["out"] = nn.Linear(features, classes)
    return nn.Sequential(layers)
