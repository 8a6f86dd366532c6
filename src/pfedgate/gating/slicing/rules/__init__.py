"""The rules of slicing, and the choice of one for a node. What no rule can prove exact runs on complete tensors.

`operations.py` has elementwise functions, sums, products, views and reductions, `layers.py`, `norm_layers.py` and
`sequences.py` layers with parameters.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from pfedgate.gating.slicing.analysis import Analysis, flat
from pfedgate.gating.slicing.axes import dense, layout_of
from pfedgate.gating.slicing.functional import SIGNATURES, TRANSPOSED, arguments, is_weight
from pfedgate.gating.slicing.rules import operations as op
from pfedgate.gating.slicing.rules.layers import ConvRule, EmbeddingRule, LinearRule, PReLURule, TransposedConvRule
from pfedgate.gating.slicing.rules.norm_layers import (
    BatchNormRule,
    GroupNormRule,
    InstanceNormRule,
    LayerNormRule,
    RMSNormRule,
)
from pfedgate.gating.slicing.rules.sequences import AttentionRule, HeadsRule, RecurrentRule, attention_flops
from pfedgate.gating.slicing.steps import CannotSlice, Rule, computes_weights, describe, has_hooks

if TYPE_CHECKING:
    from pfedgate.gating.slicing.execute import Sliced

Maker = Callable[[fx.Node, Analysis], Rule]

# f(0) = 0 element by element, so a dropped unit stays exactly zero and need not be computed.
ZERO_MODULES: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Tanh,
    nn.Softsign, nn.Tanhshrink, nn.Hardshrink, nn.Softshrink, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d,
    nn.Dropout3d,
)  # fmt: skip
ZERO_FUNCTIONS: tuple[Any, ...] = (
    F.relu, torch.relu, torch.relu_, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish,
    F.hardswish, F.tanh, torch.tanh, F.softsign, F.tanhshrink, F.hardshrink, F.softshrink, torch.abs, torch.neg,
    torch.square, torch.sin, torch.erf, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, operator.neg,
)  # fmt: skip
ZERO_METHODS = (
    "relu", "relu_", "tanh", "tanh_", "abs", "neg", "square", "contiguous", "clone", "detach", "float", "double",
    "type_as", "to",
)  # fmt: skip
# Element by element, too, but zero becomes another number, which is known.
CONSTANT_FUNCTIONS: tuple[Any, ...] = (
    torch.sigmoid, F.sigmoid, F.hardsigmoid, F.hardtanh, F.softplus, F.logsigmoid, torch.exp, torch.cos, torch.clamp,
    torch.pow, operator.pow, torch.rsqrt, torch.sqrt,
)  # fmt: skip
CONSTANT_METHODS = ("sigmoid", "exp", "cos", "clamp", "clamp_min", "clamp_max", "pow", "rsqrt", "sqrt", "sigmoid_")
POOL_MODULES: dict[type[nn.Module], int] = {
    nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3, nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3,
    nn.AdaptiveAvgPool1d: 1, nn.AdaptiveAvgPool2d: 2, nn.AdaptiveAvgPool3d: 3, nn.AdaptiveMaxPool1d: 1,
    nn.AdaptiveMaxPool2d: 2, nn.AdaptiveMaxPool3d: 3,
}  # fmt: skip
POOL_FUNCTIONS: dict[Any, int] = {
    F.max_pool1d: 1, F.max_pool2d: 2, F.max_pool3d: 3, F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3,
    torch.max_pool1d: 1, torch.max_pool2d: 2, torch.avg_pool1d: 1, torch.adaptive_avg_pool1d: 1,
    F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3, F.adaptive_max_pool1d: 1,
    F.adaptive_max_pool2d: 2, F.adaptive_max_pool3d: 3,
}  # fmt: skip
PAD_MODULES: tuple[type[nn.Module], ...] = (
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.ReflectionPad1d,
    nn.ReflectionPad2d, nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d,
    nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d,
)  # fmt: skip
LAYERS: dict[type[nn.Module], Maker] = {
    nn.Linear: LinearRule,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ConvRule),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), TransposedConvRule),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), InstanceNormRule),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), BatchNormRule),
    nn.LayerNorm: LayerNormRule,
    nn.GroupNorm: GroupNormRule,
    nn.Embedding: EmbeddingRule,
    nn.MultiheadAttention: AttentionRule,
    **dict.fromkeys((nn.RNN, nn.GRU, nn.LSTM), RecurrentRule),
    nn.PReLU: PReLURule,
    nn.RMSNorm: RMSNormRule,
    nn.Flatten: op.Reshape,
    nn.GLU: op.Gated,
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), op.Resample),
    **dict.fromkeys((nn.PixelShuffle, nn.PixelUnshuffle, nn.Unfold), op.Rearrange),
    **dict.fromkeys(PAD_MODULES, op.Pad),
    **dict.fromkeys(
        (nn.Sigmoid, nn.Hardsigmoid, nn.Softplus, nn.Hardtanh, nn.LogSigmoid, nn.Threshold), op.Elementwise
    ),
    **dict.fromkeys(ZERO_MODULES, op.Same),
}
LAYER_FUNCTIONS: dict[Any, Maker] = {
    **dict.fromkeys((F.linear, torch.addmm, torch.matmul), LinearRule),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d), ConvRule),
    **dict.fromkeys(TRANSPOSED, TransposedConvRule),
    F.batch_norm: BatchNormRule,
    F.instance_norm: InstanceNormRule,
    F.layer_norm: LayerNormRule,
    F.rms_norm: RMSNormRule,
    F.group_norm: GroupNormRule,
    F.embedding: EmbeddingRule,
}
_FUNCTIONS: dict[Any, Maker] = {
    **dict.fromkeys((torch.matmul, torch.bmm, operator.matmul), op.BatchProduct),
    **dict.fromkeys(CONSTANT_FUNCTIONS, op.Elementwise),
    **dict.fromkeys((torch.softmax, F.softmax), op.Softmax),
    F.scaled_dot_product_attention: HeadsRule,
    **dict.fromkeys(ZERO_FUNCTIONS, op.Same),
    **dict.fromkeys((torch.flatten, torch.reshape), op.Reshape),
    **dict.fromkeys((torch.transpose, torch.permute, torch.unsqueeze, torch.squeeze, torch.movedim), op.Move),
    **dict.fromkeys((torch.mean, torch.sum, torch.amax, torch.amin, torch.max, torch.min), op.Reduce),
    **dict.fromkeys((operator.add, operator.iadd, torch.add, operator.sub, operator.isub, torch.sub), op.Add),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, operator.truediv, torch.div), op.Multiply),
    **dict.fromkeys((torch.cat, torch.concat), op.Concatenate),
    **dict.fromkeys((torch.split, torch.chunk, torch.tensor_split, torch.unbind), op.Split),
    **dict.fromkeys((F.pixel_shuffle, F.pixel_unshuffle, F.unfold), op.Rearrange),
    F.glu: op.Gated,
    F.pad: op.Pad,
    F.interpolate: op.Resample,
    operator.getitem: op.Item,
    getattr: op.Field,
}
_METHODS: dict[str, Maker] = {
    **dict.fromkeys(CONSTANT_METHODS, op.Elementwise),
    **dict.fromkeys(("matmul", "bmm"), op.BatchProduct),
    **dict.fromkeys(("split", "chunk", "tensor_split", "unbind"), op.Split),
    "softmax": op.Softmax,
    **dict.fromkeys(ZERO_METHODS, op.Same),
    **dict.fromkeys(("flatten", "view", "reshape"), op.Reshape),
    **dict.fromkeys(("transpose", "permute", "unsqueeze", "squeeze", "expand", "movedim", "t"), op.Move),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "max", "min"), op.Reduce),
    **dict.fromkeys(("add", "add_", "sub", "sub_"), op.Add),
    **dict.fromkeys(("mul", "mul_", "div", "div_"), op.Multiply),
    **dict.fromkeys(("size", "dim"), op.Size),
}


# These multiply no matrices, so that nothing has to be counted.
CHEAP = {
    "sigmoid", "sigmoid_", "softmax", "log_softmax", "exp", "log", "sqrt", "rsqrt", "pow", "clamp", "where", "flip",
    "roll", "stack", "chunk", "split", "unbind", "masked_fill", "pad", "interpolate", "normalize", "norm", "var",
    "std", "arange", "zeros", "ones", "unflatten", "repeat", "expand_as", "layer_norm", "batch_norm", "group_norm",
    "instance_norm", "softplus", "logsigmoid", "argmax", "cumsum", "gt", "lt", "ge", "le", "eq", "ne", "floordiv",
}  # fmt: skip


def _is_cheap(node: fx.Node) -> bool:
    """Whether a node without parameters of its own needs no FLOPs worth counting."""
    if node.target in SIGNATURES or _FUNCTIONS.get(node.target, _METHODS.get(str(node.target))) is op.BatchProduct:
        return False
    ruled = node.target in _FUNCTIONS or node.target in POOL_FUNCTIONS or str(node.target) in _METHODS
    return node.op == "call_module" or ruled or getattr(node.target, "__name__", str(node.target)) in CHEAP


class Source(Rule):
    """The input of the network."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        pass

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise AssertionError("the input is given, not computed")


class Attribute(Rule):
    """A parameter, buffer or constant read by the forward itself (a position embedding, a class token)."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.place = str(node.target)
        self.name: str | None = None
        self.unread = False  # layers take it for their weight: they claim it, and read it themselves
        value = analysis.values[node.name]
        parameter = dict(analysis.model.named_parameters(remove_duplicate=False)).get(self.place)
        if parameter is None:
            return
        self.name = analysis.parameter(parameter)
        if is_weight(node):
            self.unread = True
            return
        axis = value.ndim - 1
        if axis >= 1:
            segments = analysis.units(value.shape[axis], "parameter", self.place)
            analysis.claim(parameter, {axis: segments})
            self.out = layout_of(axis, segments)
        else:
            analysis.claim(parameter, {})

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run.constant(self.place) if self.name is None else run.weight(self.name)


class Restore(op.AsWritten):
    """Runs a node on complete tensors: the fallback that is always right."""

    full = True

    def __init__(self, node: fx.Node, analysis: Analysis, reason: str) -> None:
        super().__init__(node, analysis)
        own = list(analysis.module(node).parameters()) if node.op == "call_module" else []
        for source in node.all_input_nodes:
            if any(math.isnan(held.fill) for held in flat(analysis.layout(source))):
                analysis.refuse_unknown(source)
            rule = analysis.program.get(source.name)
            if isinstance(rule, Attribute) and rule.unread:
                rule.unread = False
                own.append(analysis.attribute(source))
        for parameter in own:
            analysis.claim(parameter, {})
        place = describe(node)
        if own:
            if node.op != "call_module":  # a function is where its weights are
                place = analysis.parameter(own[0]).rpartition(".")[0] or place
            analysis.notes.append((place, f"kept whole: {reason}"))
        elif any(flat(analysis.layout(source)) for source in node.all_input_nodes):
            analysis.note(node, reason)
        if node.target is F.scaled_dot_product_attention:
            analysis.operation(place, attention_flops(node, analysis), dense(1), dense(1))
        elif (own or not _is_cheap(node)) and (flops := analysis.count(node)):
            analysis.operation(place, flops, dense(1), dense(1))


def joins(rule: Rule) -> bool:
    """Whether all arguments of a node may flow into its result alike."""
    return isinstance(rule, op.Result | op.Add | op.Concatenate | op.Multiply | Restore)


def _find(node: fx.Node, analysis: Analysis) -> Rule:
    if node.op == "placeholder":
        return Source(node, analysis)
    if node.op == "get_attr":
        return Attribute(node, analysis)
    if node.op == "output":
        return op.Output(node, analysis)
    if node.op == "call_module":
        return _module(node, analysis)
    if not node.args:
        raise CannotSlice("its input is given by keyword")
    if "out" in node.kwargs:
        raise CannotSlice("it writes into a given tensor")
    if node.op == "call_method":
        if (rule := _METHODS.get(str(node.target))) is not None:
            return rule(node, analysis)
        raise CannotSlice(f".{node.target}() has no rule, so zeros are not known to stay zero")
    if node.op == "call_function" and node.target in SIGNATURES and (layer := _layer(node, analysis)) is not None:
        return layer
    if getattr(node.target, "unflattens", False):
        return op.Result(node, analysis)
    if node.target in POOL_FUNCTIONS:
        return op.PoolRule(node, analysis, POOL_FUNCTIONS[node.target])
    if (function := _FUNCTIONS.get(node.target)) is not None:
        return function(node, analysis)
    if str(node.target).lstrip("_").startswith(("aten.upsample", "aten._upsample")):
        return op.Resample(node, analysis)
    raise CannotSlice(f"{getattr(node.target, '__name__', node.target)} has no rule: f(0) may differ from 0")


def _layer(node: fx.Node, analysis: Analysis) -> Rule | None:
    """The rule of a layer that is called as a function; None for a product of two tensors."""
    weights = [analysis.attribute(arguments(node).get(name)) for name in ("weight", "bias")]
    if node.target is torch.matmul and not isinstance(weights[0], nn.Parameter):
        return None
    return LAYER_FUNCTIONS[node.target](node, analysis)


def _module(node: fx.Node, analysis: Analysis) -> Rule:
    module = analysis.module(node)
    if what := computes_weights(module):
        raise CannotSlice(f"{what} computes its weights; once it is taken off, the layer can be gated")
    if has_hooks(module):
        raise CannotSlice("hooks run around it")
    if type(module) in POOL_MODULES:
        return op.PoolRule(node, analysis, POOL_MODULES[type(module)])
    if type(module) not in LAYERS:
        raise CannotSlice(f"{type(module).__name__} has no rule, so zeros are not known to stay zero")
    if not node.args and not isinstance(module, nn.MultiheadAttention):
        raise CannotSlice("its input is given by keyword")
    return LAYERS[type(module)](node, analysis)


def choose(node: fx.Node, analysis: Analysis) -> Rule:
    """The rule of a node, or `Restore` with the reason why there is none."""
    try:
        return _find(node, analysis)
    except CannotSlice as error:
        return Restore(node, analysis, str(error))
