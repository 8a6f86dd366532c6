"""Convolutional networks: the four of the paper and its code, and a small one for 8×8 digits.

All are conv–ReLU–pool twice, then fully connected layers. `width` multiplies every hidden size, so that a
wide network under a small budget can be compared with a narrow dense one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

Shape = tuple[int, ...]


def cnn_femnist(input_shape: Shape, classes: int, *, width: float = 1.0) -> nn.Module:
    """EMNIST and FEMNIST in the paper: conv5 32, conv5 64, fc 2048.

    With 62 classes it has 2,278,334 parameters; the paper's 2,171,786 is the count with 10.
    """
    return _two_convolutions(input_shape, classes, (32, 64), (2048,), width)


def cnn_cifar10(input_shape: Shape, classes: int, *, width: float = 1.0) -> nn.Module:
    """CIFAR-10 in the paper, LeNet-like: conv5 32, conv5 64, fc 120, fc 84."""
    return _two_convolutions(input_shape, classes, (32, 64), (120, 84), width)


def cnn_cifar100(input_shape: Shape, classes: int, *, width: float = 1.0) -> nn.Module:
    """CIFAR-100 by the paper's parameter count: conv5 32, conv5 64, fc 2048."""
    return _two_convolutions(input_shape, classes, (32, 64), (2048,), width)


def lenet5_wide(input_shape: Shape, classes: int, *, width: float = 1.0) -> nn.Module:
    """CIFAR-100 in the authors' released commands: conv5 32, conv5 64, fc 1920, fc 504."""
    return _two_convolutions(input_shape, classes, (32, 64), (1920, 504), width)


def cnn_digits(input_shape: Shape, classes: int, *, width: float = 1.0) -> nn.Module:
    """8×8 digits, for the demo and tests: conv3 32, conv3 64 (padded), fc 128."""
    return _two_convolutions(input_shape, classes, (32, 64), (128,), width, kernel=3, padding=1)


def _two_convolutions(
    input_shape: Shape,
    classes: int,
    channels: tuple[int, int],
    hidden: Sequence[int],
    width: float,
    kernel: int = 5,
    padding: int = 0,
) -> nn.Module:
    if len(input_shape) != 3:
        raise ValueError(f"images are (channels, height, width), got {input_shape}")
    if width <= 0:
        raise ValueError(f"width multiplies the hidden sizes and must be positive, got {width}")
    first, second = (max(1, round(size * width)) for size in channels)
    height, breadth = (_after(_after(size, kernel, padding), kernel, padding) for size in input_shape[1:])
    if height < 1 or breadth < 1:
        raise ValueError(f"an image of {input_shape[1]}×{input_shape[2]} is too small for this network")

    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(input_shape[0], first, kernel, padding=padding),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(first, second, kernel, padding=padding),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
    )
    features = second * height * breadth
    for index, size in enumerate(hidden, start=1):
        units = max(1, round(size * width))
        layers[f"fc{index}"] = nn.Linear(features, units)
        layers[f"relu{index + 2}"] = nn.ReLU()
        features = units
    layers["out"] = nn.Linear(features, classes)
    return nn.Sequential(layers)


def _after(size: int, kernel: int, padding: int) -> int:
    """Pixels left of `size` after one convolution and one pooling by two."""
    return (size + 2 * padding - kernel + 1) // 2
