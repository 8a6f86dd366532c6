"""Networks for images: the paper's convolutional ones, a small one for 8×8 digits, an MLP and residual networks.

Convolutional ones are conv–ReLU–pool twice, then fully connected layers. `width` multiplies every hidden size, and
`widths` names each: a wide network under a small budget can be compared with narrow dense ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]


def cnn_femnist(input_shape: Shape, classes: int, *, width: float = 1.0, widths: Sequence[int] = ()) -> nn.Module:
    """EMNIST and FEMNIST in the paper: conv5 32, conv5 64, fc 2048.

    With 62 classes it has 2,278,334 parameters; the paper's 2,171,786 is the count with 10.
    """
    return _two_convolutions(input_shape, classes, (32, 64), (2048,), width, widths)


def cnn_cifar10(input_shape: Shape, classes: int, *, width: float = 1.0, widths: Sequence[int] = ()) -> nn.Module:
    """CIFAR-10 in the paper, LeNet-like: conv5 32, conv5 64, fc 120, fc 84."""
    return _two_convolutions(input_shape, classes, (32, 64), (120, 84), width, widths)


def cnn_cifar100(input_shape: Shape, classes: int, *, width: float = 1.0, widths: Sequence[int] = ()) -> nn.Module:
    """CIFAR-100 by the paper's parameter count: conv5 32, conv5 64, fc 2048."""
    return _two_convolutions(input_shape, classes, (32, 64), (2048,), width, widths)


def lenet5_wide(input_shape: Shape, classes: int, *, width: float = 1.0, widths: Sequence[int] = ()) -> nn.Module:
    """CIFAR-100 in the authors' released commands: conv5 32, conv5 64, fc 1920, fc 504."""
    return _two_convolutions(input_shape, classes, (32, 64), (1920, 504), width, widths)


def cnn_digits(input_shape: Shape, classes: int, *, width: float = 1.0, widths: Sequence[int] = ()) -> nn.Module:
    """8×8 digits, for the demo and tests: conv3 32, conv3 64 (padded), fc 128."""
    return _two_convolutions(input_shape, classes, (32, 64), (128,), width, widths, kernel=3, padding=1)


def _two_convolutions(
    input_shape: Shape,
    classes: int,
    channels: tuple[int, int],
    hidden: Sequence[int],
    width: float,
    widths: Sequence[int],
    kernel: int = 5,
    padding: int = 0,
) -> nn.Module:
    if len(input_shape) != 3:
        raise ValueError(f"images are (channels, height, width), got {input_shape}")
    if width <= 0:
        raise ValueError(f"width multiplies the hidden sizes and must be positive, got {width}")
    if widths and (len(widths) != len(channels) + len(hidden) or min(widths) < 1):
        raise ValueError(f"widths are {len(channels) + len(hidden)} hidden sizes of at least 1, got {list(widths)}")
    first, second, *units = widths or [max(1, round(size * width)) for size in (*channels, *hidden)]
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
    for index, size in enumerate(units, start=1):
        layers[f"fc{index}"] = nn.Linear(features, size)
        layers[f"relu{index + 2}"] = nn.ReLU()
        features = size
    layers["out"] = nn.Linear(features, classes)
    return nn.Sequential(layers)


def _after(size: int, kernel: int, padding: int) -> int:
    """Pixels left of `size` after one convolution and one pooling by two."""
    return (size + 2 * padding - kernel + 1) // 2


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


class UNet(nn.Module):
    """A class for every pixel: two halvings and back, the finer features added again"""

    def __init__(self, input_shape: Shape, classes: int, *, width: float = 1.0) -> None:
        if len(input_shape) != 3 or input_shape[1] % 4 or input_shape[2] % 4:
            raise ValueError(f"images are (channels, height, width), both sides multiples of 4, got {input_shape}")
        if width <= 0:
            raise ValueError(f"width multiplies the channels and must be positive, got {width}")
        super().__init__()
        fine, middle, coarse = (max(1, round(size * width)) for size in (16, 32, 64))
        self.conv1 = nn.Conv2d(input_shape[0], fine, 3, padding=1)
        self.conv2 = nn.Conv2d(fine, middle, 3, padding=1)
        self.conv3 = nn.Conv2d(middle, coarse, 3, padding=1)
        self.up2 = nn.Conv2d(coarse, middle, 3, padding=1)
        self.up1 = nn.Conv2d(middle, fine, 3, padding=1)
        self.out = nn.Conv2d(fine, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every pixel."""
        fine = F.relu(self.conv1(x))
        middle = F.relu(self.conv2(F.max_pool2d(fine, 2)))
        coarse = F.relu(self.conv3(F.max_pool2d(middle, 2)))
        middle = middle + F.relu(self.up2(F.interpolate(coarse, scale_factor=2.0)))
        fine = fine + F.relu(self.up1(F.interpolate(middle, scale_factor=2.0)))
        logits: Tensor = self.out(fine)
        return logits


class ResidualBlock(nn.Module):
    """conv3–BN–ReLU–conv3–BN plus a shortcut: the identity, or a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The transformed input added to the shortcut."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return F.relu(h + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network with BatchNorm (He et al. 2016); `depth` 6n + 2 (8, 14, 20, …), 16·`width` channels first."""

    def __init__(self, input_shape: Shape, classes: int, *, depth: int = 8, width: float = 1.0) -> None:
        if len(input_shape) != 3:
            raise ValueError(f"images are (channels, height, width), got {input_shape}")
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth must be 6n + 2 with n ≥ 1 (8, 14, 20, …), got {depth}")
        if width <= 0:
            raise ValueError(f"width multiplies the channels and must be positive, got {width}")
        super().__init__()
        channels = max(1, round(16 * width))
        self.conv = nn.Conv2d(input_shape[0], channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.stage1 = _stage(channels, channels, depth, stride=1)
        self.stage2 = _stage(channels, 2 * channels, depth, stride=2)
        self.stage3 = _stage(2 * channels, 4 * channels, depth, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.out = nn.Linear(4 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        x = F.relu(self.bn(self.conv(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        logits: Tensor = self.out(self.pool(x).flatten(1))
        return logits


def _stage(inputs: int, outputs: int, depth: int, stride: int) -> nn.Sequential:
    blocks = [ResidualBlock(inputs, outputs, stride)]
    blocks += [ResidualBlock(outputs, outputs, 1) for _ in range((depth - 2) // 6 - 1)]
    return nn.Sequential(*blocks)
