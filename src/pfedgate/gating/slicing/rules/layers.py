"""Rules for linear layers, convolutions, embeddings and PReLU: which units they write and read, and how they run.

A dropped unit has its weights and its bias multiplied by zero, so what it writes is exactly zero; the layers that
read it skip the matching inputs. `run.weight(name)` is a parameter cut to its live entries and scaled by the gate.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from pfedgate.gating.slicing.analysis import Analysis
from pfedgate.gating.slicing.axes import Layout, Segment, Segments, dense, is_dense, layout_of
from pfedgate.gating.slicing.steps import CannotSlice, Rule

if TYPE_CHECKING:
    from pfedgate.gating.slicing.execute import Sliced


def parameter_names(analysis: Analysis, module: nn.Module) -> dict[str, str]:
    """Local parameter names -> the names of the whole model."""
    names = {local: analysis.parameter(p) for local, p in module.named_parameters(recurse=False)}
    if "weight" not in names and isinstance(getattr(module, "weight", None), Tensor):
        raise CannotSlice("its weight is no parameter")
    return names


def units_read(
    analysis: Analysis, node: fx.Node, source: Any, axis: int, size: int, kind: str
) -> tuple[Segments, Segments | None]:
    """The units a layer reads along `axis`: those its input already lacks, or those it chooses itself."""
    layout = analysis.tensor_layout(source)
    if layout is not None:
        if layout.axis != axis:
            raise CannotSlice("the units do not lie on the axis that the layer reads")
        analysis.spaces.mark(layout.segments, consumer=kind)
        return layout.segments, None
    inputs = analysis.units(size, "input", str(node.target))
    return inputs, None if is_dense(inputs) else inputs


class LinearRule(Rule):
    """A unit is a neuron of the layer."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module = analysis.module(node)
        assert isinstance(module, nn.Linear)
        names = parameter_names(analysis, module)
        self.weight, self.bias = names["weight"], names.get("bias")
        axis = self.axis = len(analysis.shape(node)) - 1
        read, self.inputs = units_read(analysis, node, node.args[0], axis, module.in_features, "linear")
        written = analysis.units(module.out_features, "linear", str(node.target))
        analysis.claim(module.weight, {0: written, 1: read}, reads=1)
        analysis.claim(module.bias, {0: written})
        self.out = layout_of(axis, written)
        positions = math.prod(analysis.shape(node)[:-1])
        analysis.operation(str(node.target), 2.0 * positions * module.in_features * module.out_features, written, read)

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: Tensor = args[0]
        if self.inputs is not None:
            x = run.pick(x, Layout(self.axis, self.inputs))
        return run.linear(x, self.weight, self.bias)


class ConvRule(Rule):
    """Units are filters; of a grouped convolution, whole groups; of a depthwise one, the channels it reads."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module: Any = analysis.module(node)
        self.place, self.kind, self.groups = str(node.target), "plain", module.groups
        names = parameter_names(analysis, module)
        self.weight, self.bias = names["weight"], names.get("bias")
        c_in, c_out = module.in_channels, module.out_channels
        if len(analysis.shape(node)) != module.weight.ndim:
            raise CannotSlice("an input without a batch axis")
        held = analysis.tensor_layout(node.args[0])
        if held is not None and held.axis != 1:
            raise CannotSlice("the units do not lie on the channel axis")
        self.inputs: Segments | None = None
        if self.groups == 1:
            read, self.inputs = units_read(analysis, node, node.args[0], 1, c_in, "conv")
            written = analysis.units(c_out, "conv", self.place)
            analysis.claim(module.weight, {0: written, 1: read}, reads=1)
        elif self.groups == c_in == c_out and held is not None and all(p.inner == 1 for p in held.segments):
            # Channel c writes channel c, so both are the same unit.
            self.kind, written, read = "depthwise", held.segments, dense(1)
            analysis.spaces.mark(held.segments, consumer="conv")
            analysis.claim(module.weight, {0: written})
        else:
            # A group's input channels are read completely, whatever the layer before left out.
            self.kind, self.full, read = "grouped", True, dense(1)
            units = analysis.units(self.groups, "conv", self.place)
            written = dense(c_out) if is_dense(units) else (Segment(units[0].space, self.groups, c_out // self.groups),)
            analysis.claim(module.weight, {0: written})
            self.channels = (Segment(units[0].space, self.groups, c_in // self.groups),)
            if held is not None:
                analysis.note(node, "a grouped convolution reads whole groups, so its input is completed")
        analysis.claim(module.bias, {0: written})
        self.out = layout_of(1, written)
        flops = 2.0 * math.prod(analysis.shape(node)) * (c_in // self.groups) * math.prod(module.kernel_size)
        analysis.operation(self.place, flops, written, read)

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, module, groups = args[0], run.modules[self.place], self.groups
        weight, bias = run.weight(self.weight), run.optional(self.bias)
        if self.inputs is not None:
            x = run.pick(x, Layout(1, self.inputs))
        if self.kind == "depthwise":
            groups = weight.shape[0]
        elif self.kind == "grouped" and self.out is not None:
            x = run.pick(x, Layout(1, self.channels))
            groups = x.shape[1] * groups // module.in_channels
        padding = module.padding
        if module.padding_mode != "zeros":
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
            padding = 0
        conv = (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
        return conv(x, weight, bias, module.stride, padding, module.dilation, groups)


class EmbeddingRule(Rule):
    """A unit is one of the embedding's dimensions."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module: Any = analysis.module(node)
        self.place = str(node.target)
        self.weight = parameter_names(analysis, module)["weight"]
        if module.max_norm is not None:
            raise CannotSlice("an embedding with max_norm changes its own weights")
        written = analysis.units(module.embedding_dim, "embedding", self.place)
        analysis.claim(module.weight, {1: written})
        self.out = layout_of(len(analysis.shape(node)) - 1, written)

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = run.modules[self.place]
        weight = run.weight(self.weight)
        return F.embedding(args[0], weight, module.padding_idx, scale_grad_by_freq=module.scale_grad_by_freq)


class PReLURule(Rule):
    """Zero stays zero whatever the slope."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module: Any = analysis.module(node)
        self.name = parameter_names(analysis, module)["weight"]
        held = self.out = analysis.tensor_layout(node.args[0])
        if held is None or module.num_parameters == 1:
            analysis.claim(module.weight, {})
        elif held.axis != 1:
            raise CannotSlice("one slope per channel, but the units lie elsewhere")
        else:
            analysis.claim(module.weight, {0: held.segments})

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return F.prelu(args[0], run.weight(self.name))
