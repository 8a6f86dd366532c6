"""Residual networks for small images (He et al. 2016, 4.2): BatchNorm, identity and projection shortcuts."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]


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
    """Residual network with BatchNorm; `depth` 6n + 2 (8, 14, 20, …), 16·`width` channels first."""

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
