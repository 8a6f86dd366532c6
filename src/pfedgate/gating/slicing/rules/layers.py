"""Rules for linear layers, convolutions, embeddings and PReLU: which units they write and read, and how they run.

A dropped unit has its weights and its bias multiplied by zero, so what it writes is exactly zero; the layers that
read it skip the matching inputs. `run.weight(name)` is a parameter cut to its live entries and scaled by the gate.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pfedgate.gating.slicing.analysis import Analysis
from pfedgate.gating.slicing.axes import Layout, Segment, Segments, dense, is_dense, layout_of
from pfedgate.gating.slicing.functional import TRANSPOSED, layer, options
from pfedgate.gating.slicing.steps import CannotSlice, Rule

if TYPE_CHECKING:
    from pfedgate.gating.slicing.execute import Sliced


def parameter_names(analysis: Analysis, module: Any) -> dict[str, str]:
    """Local parameter names -> the names of the whole model."""
    if not isinstance(module, nn.Module):
        own = {local: getattr(module, local, None) for local in ("weight", "bias")}
        return {local: analysis.parameter(p) for local, p in own.items() if p is not None}
    names = {local: analysis.parameter(p) for local, p in module.named_parameters(recurse=False)}
    if "weight" not in names and isinstance(getattr(module, "weight", None), Tensor):
        raise CannotSlice("its weight is no parameter")
    return names


def place_of(node: fx.Node, module: Any) -> str:
    """Where a layer is: a module at its own place, a function at that of its weight."""
    return str(node.target) if isinstance(module, nn.Module) else str(module.place)


def input_of(node: fx.Node, module: Any) -> Any:
    """What a layer reads."""
    return node.args[0] if isinstance(module, nn.Module) else module.input


def layout_read(analysis: Analysis, rule: Rule, place: str, source: Any) -> Layout | None:
    """Where the units of a layer's input lie; an input whose dropped units are not zero is completed."""
    held = analysis.layout(source)
    if isinstance(held, Layout) and held.fill and not math.isnan(held.fill):
        rule.full = True
        analysis.notes.append((place, "dropped units of its input are not zero, so it is completed"))
        return None
    return analysis.tensor_layout(source)


def units_read(
    analysis: Analysis, rule: Rule, place: str, source: Any, axis: int, size: int, kind: str
) -> tuple[Segments, Segments | None]:
    """The units a layer reads along `axis`: those its input already lacks, or those it chooses itself."""
    layout = layout_read(analysis, rule, place, source)
    if layout is not None:
        if layout.axis != axis:
            raise CannotSlice("the units do not lie on the axis that the layer reads")
        analysis.spaces.mark(layout.segments, consumer=kind)
        return layout.segments, None
    inputs = dense(size) if rule.full else analysis.units(size, "input", place)
    return inputs, None if is_dense(inputs) else inputs


class LinearRule(Rule):
    """A unit is a neuron of the layer."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module = layer(node, analysis)
        names = parameter_names(analysis, module)
        self.weight, self.bias = names["weight"], names.get("bias")
        self.place, source = place_of(node, module), input_of(node, module)
        self.position = 1 if node.target is torch.addmm else 0
        self.turned = node.target in (torch.addmm, torch.matmul)  # its weight is [inputs, outputs]
        if node.kwargs and not isinstance(module, nn.Module) and (module.input in node.kwargs.values() or self.turned):
            raise CannotSlice("its input is given by keyword, or its result is scaled")
        if module.weight.ndim != 2 or len(analysis.shape(source)) < 2:
            raise CannotSlice("it multiplies no matrix")
        axis = self.axis = len(analysis.shape(node)) - 1
        read, self.inputs = units_read(analysis, self, self.place, source, axis, module.in_features, "linear")
        written = analysis.units(module.out_features, "linear", self.place)
        rows, columns = (1, 0) if self.turned else (0, 1)
        analysis.claim(module.weight, {rows: written, columns: read}, reads=columns)
        analysis.claim(module.bias, {0: written})
        self.out = layout_of(axis, written)
        positions = math.prod(analysis.shape(node)[:-1])
        analysis.operation(self.place, 2.0 * positions * module.in_features * module.out_features, written, read)

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: Tensor = args[self.position]
        if self.inputs is not None:
            x = run.pick(x, Layout(self.axis, self.inputs))
        if self.turned:
            y, bias = torch.matmul(x, run.weight(self.weight)), run.optional(self.bias)
            return y if bias is None else y + bias
        return run.linear(x, self.weight, self.bias)


class ConvRule(Rule):
    """Units are filters; of a grouped convolution, whole groups; of a depthwise one, the channels it reads."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module = layer(node, analysis)
        self.options, source = options(module), input_of(node, module)
        self.place, self.kind, self.groups = place_of(node, module), "plain", module.groups
        names = parameter_names(analysis, module)
        self.weight, self.bias = names["weight"], names.get("bias")
        c_in, c_out = module.in_channels, module.out_channels
        if len(analysis.shape(node)) != module.weight.ndim:
            raise CannotSlice("an input without a batch axis")
        held = analysis.layout(source)
        if isinstance(held, Layout) and held.axis != 1:
            raise CannotSlice("the units do not lie on the channel axis")
        held = held if isinstance(held, Layout) and not held.fill else None
        self.inputs: Segments | None = None
        if self.groups == 1:
            read, self.inputs = units_read(analysis, self, self.place, source, 1, c_in, "conv")
            written = analysis.units(c_out, "conv", self.place)
            analysis.claim(module.weight, {0: written, 1: read}, reads=1)
        elif self.groups == c_in == c_out and held is not None and _single(held):
            # Channel c writes channel c, so both are the same unit.
            self.kind, written, read = "depthwise", held.segments, dense(1)
            analysis.spaces.mark(held.segments, consumer="conv")
            analysis.claim(module.weight, {0: written})
        else:
            # A group's input channels are read completely, whatever the layer before left out.
            layout_read(analysis, self, self.place, source)
            self.kind, self.full, read = "grouped", True, dense(1)
            units = analysis.units(self.groups, "conv", self.place)
            if len(units) > 1 or units[0].inner > 1:
                raise CannotSlice("its groups are read in parts")
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
        x, module, groups = args[0], self.options or run.modules[self.place], self.groups
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


class TransposedConvRule(Rule):
    """Units are the channels that it writes; of a grouped one whole groups; of a depthwise one those that it reads."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module = layer(node, analysis)
        self.options, source = options(module), input_of(node, module)
        self.place, self.groups = place_of(node, module), module.groups
        names = parameter_names(analysis, module)
        self.weight, self.bias = names["weight"], names.get("bias")
        shape, c_in, c_out = analysis.shape(source), module.in_channels, module.out_channels
        if len(shape) != module.weight.ndim:
            raise CannotSlice("an input without a batch axis")
        if isinstance(module, nn.Module) and len(node.args) + len(node.kwargs) > 1:
            raise CannotSlice("its size is given when it is called")
        held = analysis.layout(source)
        if isinstance(held, Layout) and held.axis != 1:
            raise CannotSlice("the units do not lie on the channel axis")
        self.inputs: Segments | None = None
        if self.groups == 1:
            read, self.inputs = units_read(analysis, self, self.place, source, 1, c_in, "conv")
            written = analysis.units(c_out, "conv", self.place)
            analysis.claim(module.weight, {0: read, 1: written}, reads=0)
        elif self.groups == c_in == c_out and isinstance(held, Layout) and not held.fill and _single(held):
            written, read = held.segments, dense(1)  # channel c writes channel c, so both are the same unit
            analysis.spaces.mark(written, consumer="conv")
            analysis.claim(module.weight, {0: written})
        else:
            raise CannotSlice("a transposed convolution in groups")
        analysis.claim(module.bias, {0: written})
        self.out = layout_of(1, written)
        flops = 2.0 * math.prod(shape) * (c_out // self.groups) * math.prod(module.weight.shape[2:])
        analysis.operation(self.place, flops, written, read)

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, module = args[0], self.options or run.modules[self.place]
        weight, bias = run.weight(self.weight), run.optional(self.bias)
        if self.inputs is not None:
            x = run.pick(x, Layout(1, self.inputs))
        groups = weight.shape[0] if self.groups > 1 else 1
        how = (module.stride, module.padding, module.output_padding, groups, module.dilation)
        return TRANSPOSED[weight.ndim - 3](x, weight, bias, *how)


def _single(held: Layout) -> bool:
    """Whether every position along the axis is a unit of its own."""
    return all(segment.inner == 1 for segment in held.segments)


class EmbeddingRule(Rule):
    """A unit is one of the embedding's dimensions."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module = layer(node, analysis)
        self.options, self.place = options(module), place_of(node, module)
        self.weight = parameter_names(analysis, module)["weight"]
        if module.max_norm is not None:
            raise CannotSlice("an embedding with max_norm changes its own weights")
        written = analysis.units(module.embedding_dim, "embedding", self.place)
        analysis.claim(module.weight, {1: written})
        self.out = layout_of(len(analysis.shape(node)) - 1, written)

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.options or run.modules[self.place]
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
