"""Torch's functions with fixed weights as torch's own layers: `F.linear(x, w, b)` is an `nn.Linear` that holds w and b.

Each entry of `LAYERS` takes the arguments of a function and returns the layer, still without numbers, and the tensors
that belong into it by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, dict[str, Tensor]]

_CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS: dict[int, Any] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def _linear(x: Any, weight: Tensor, bias: Tensor | None = None) -> Made:
    wide, high = weight.shape[1], weight.shape[0]
    return nn.Linear(wide, high, bias is not None, device="meta"), _given(weight=weight, bias=bias)


def _convolution(
    x: Any, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Made:
    layer = _CONVOLUTIONS[weight.ndim - 3](
        weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]), stride, padding, dilation, groups,
        bias is not None, device="meta",
    )  # fmt: skip
    return layer, _given(weight=weight, bias=bias)


def _batch_norm(
    x: Any,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Made:
    layer = _BATCH_NORMS[x.ndim](x.shape[1], eps, momentum, weight is not None, mean is not None, device="meta")
    seen = {} if mean is None else {"num_batches_tracked": torch.zeros((), dtype=torch.long, device=mean.device)}
    return layer, _given(weight=weight, bias=bias, running_mean=mean, running_var=var) | seen


def _layer_norm(x: Any, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Made:
    layer = nn.LayerNorm(list(shape), eps, weight is not None, bias is not None, device="meta")
    return layer, _given(weight=weight, bias=bias)


def _group_norm(x: Any, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Made:
    channels = x.shape[1] if weight is None else weight.shape[0]
    return nn.GroupNorm(groups, channels, eps, weight is not None, device="meta"), _given(weight=weight, bias=bias)


def _embedding(x: Any, weight: Tensor, padding_idx: int | None = None, **options: Any) -> Made:
    layer = nn.Embedding(weight.shape[0], weight.shape[1], padding_idx, device="meta", **options)
    return layer, _given(weight=weight)


def _prelu(x: Any, weight: Tensor) -> Made:
    return nn.PReLU(weight.numel(), device="meta"), _given(weight=weight)


def _recurrent(kind: Any, **options: Any) -> Callable[..., Made]:
    def build(
        x: Any, start: Any, weights: Sequence[Tensor], bias: bool, layers: int, dropout: float, training: bool,
        both: bool, first: bool,
    ) -> Made:  # fmt: skip
        layer = kind(
            weights[0].shape[1], weights[1].shape[1], layers, bias=bias, batch_first=first, bidirectional=both,
            device="meta", **options,
        )  # fmt: skip
        names = [name for per_direction in layer._all_weights for name in per_direction]
        return layer, dict(zip(names, weights, strict=True))

    return build


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


RECURRENT: dict[Any, Callable[..., Made]] = {
    torch.lstm: _recurrent(nn.LSTM),
    torch.gru: _recurrent(nn.GRU),
    torch.rnn_tanh: _recurrent(nn.RNN),
    torch.rnn_relu: _recurrent(nn.RNN, nonlinearity="relu"),
}
LAYERS: dict[Any, Callable[..., Made]] = {
    F.linear: _linear,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.embedding: _embedding,
    F.prelu: _prelu,
    **RECURRENT,
}
