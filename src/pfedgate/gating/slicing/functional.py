"""Layers that a forward calls as functions, `F.linear(x, self.weight)`: read as if they were modules.

A rule for a layer asks `layer(node, analysis)` for what it needs to know. A module answers itself; for a function, its
arguments do: parameters by the name that the model lists them under, options as they were written.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pfedgate.gating.slicing.steps import CannotSlice

if TYPE_CHECKING:
    from pfedgate.gating.slicing.analysis import Analysis

_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
TRANSPOSED: tuple[Any, ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
SIGNATURES: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    torch.addmm: ("bias", "input", "weight"),
    torch.matmul: ("input", "weight"),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _CONVOLUTION),
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _CONVOLUTION),
    **dict.fromkeys(TRANSPOSED, _TRANSPOSED),
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    F.embedding: (
        "input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse",
    ),
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "bias": None, "weight": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "training": False,
    "momentum": 0.1, "padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False,
    "output_padding": 0, "use_input_stats": True, "eps": 1e-5,
}  # fmt: skip
_WEIGHTS = ("weight", "bias")


def arguments(node: fx.Node) -> dict[str, Any]:
    """What a function of `SIGNATURES` was given, by name."""
    return {**dict(zip(SIGNATURES[node.target], node.args, strict=False)), **node.kwargs}


def is_weight(node: fx.Node) -> bool:
    """Whether all that reads a parameter takes it for its weight, so that it says how it is cut."""

    def takes(user: fx.Node) -> bool:
        if user.op != "call_function" or user.target not in SIGNATURES:
            return False
        given = arguments(user)
        return any(given.get(name) is node for name in _WEIGHTS) and given["input"] is not node

    return bool(node.users) and all(map(takes, node.users))


def layer(node: fx.Node, analysis: Analysis) -> Any:
    """The module of a node, or the arguments of its function as a module would hold them; `place` says where it is."""
    if node.op == "call_module":
        return analysis.module(node)
    given = arguments(node)
    if given.get("input") is None:
        raise CannotSlice("its input is given in a way that has no rule")
    held = {**_DEFAULTS, **given}
    for name in _WEIGHTS:
        held[name] = None if held[name] is None else _parameter(held[name], analysis)
    if any(isinstance(value, fx.Node) for name, value in held.items() if name not in ("input", *_BUFFERS)):
        raise CannotSlice("its options are computed")
    weight: Tensor | None = held["weight"]
    module = SimpleNamespace(**held, padding_mode="zeros", affine=weight is not None)
    names = [analysis.parameter(p) for p in (weight, held["bias"]) if p is not None]
    module.place = names[0].removesuffix(".weight").removesuffix(".bias") if names else ""
    if weight is not None and node.target is not F.embedding:
        turned = node.target in (torch.addmm, torch.matmul, *TRANSPOSED)
        rows, columns = (1, 0) if turned else (0, min(1, weight.ndim - 1))
        module.out_features = module.out_channels = module.num_channels = weight.shape[rows]
        module.in_features, module.in_channels = weight.shape[columns], weight.shape[columns] * module.groups
        if node.target in TRANSPOSED:
            module.in_channels, module.out_channels = weight.shape[0], weight.shape[1] * module.groups
        module.kernel_size = tuple(weight.shape[2:])
    elif weight is not None:
        module.embedding_dim = weight.shape[1]
    return module


_BUFFERS = ("running_mean", "running_var")


def _parameter(value: Any, analysis: Analysis) -> nn.Parameter:
    found = analysis.attribute(value)
    if not isinstance(found, nn.Parameter):
        raise CannotSlice("its weights are computed")
    return found


def options(module: Any) -> Any:
    """What a rule may keep of a layer that is no module: its options, without tensors."""
    if isinstance(module, nn.Module):
        return None
    held = vars(module)
    return SimpleNamespace(**{k: v for k, v in held.items() if not isinstance(v, Tensor | fx.Node)})
