"""Rules for layers with parameters: which units they write and read, and how they run on live units only.

A dropped unit has its weights and its bias multiplied by zero, so what it writes is exactly zero; the layers that
read it skip the matching inputs. `run.weight(name)` is a parameter cut to its live entries and scaled by the gate.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .layout import Layout, Part, Parts, dense, is_dense
from .rules import layout_of
from .trace import Analysis, CannotSlice, Rule


def _names(analysis: Analysis, module: nn.Module) -> dict[str, str]:
    """Local parameter names -> the names of the whole model."""
    return {local: analysis.parameter(p) for local, p in module.named_parameters(recurse=False)}


def _reads(analysis: Analysis, node: fx.Node, axis: int, size: int, kind: str) -> tuple[Parts, Parts | None]:
    """The units a layer reads along `axis`: those its input already lacks, or those it chooses itself."""
    layout = analysis.tensor_layout(node.args[0])
    if layout is not None:
        if layout.axis != axis:
            raise CannotSlice("the units do not lie on the axis that the layer reads")
        analysis.spaces.mark(layout.parts, consumer=kind)
        return layout.parts, None
    chosen = analysis.units(size, "input", str(node.target))
    return chosen, None if is_dense(chosen) else chosen


class LinearRule(Rule):
    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module = analysis.module(node)
        assert isinstance(module, nn.Linear)
        axis = len(analysis.shape(node)) - 1
        read, self.chosen = _reads(analysis, node, axis, module.in_features, "linear")
        written = analysis.units(module.out_features, "linear", str(node.target))
        analysis.claim(module.weight, {0: written, 1: read}, reads=1)
        analysis.claim(module.bias, {0: written})
        names = _names(analysis, module)
        self.weight, self.bias = names["weight"], names.get("bias")
        self.axis, self.out = axis, layout_of(axis, written)
        positions = math.prod(analysis.shape(node)[:-1])
        analysis.operation(str(node.target), 2.0 * positions * module.in_features * module.out_features, written, read)

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: Tensor = args[0]
        if self.chosen is not None:
            x = run.pick(x, Layout(self.axis, self.chosen))
        return run.linear(x, self.weight, self.bias)


class ConvRule(Rule):
    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module: Any = analysis.module(node)
        self.place, self.axis = str(node.target), 1
        groups, c_in, c_out = module.groups, module.in_channels, module.out_channels
        if len(analysis.shape(node)) != module.weight.ndim:
            raise CannotSlice("an input without a batch axis")
        self.kind, self.chosen = "plain", None
        held = analysis.tensor_layout(node.args[0])
        if held is not None and held.axis != 1:
            raise CannotSlice("the units do not lie on the channel axis")
        if groups == 1:
            read, self.chosen = _reads(analysis, node, 1, c_in, "conv")
            written = analysis.units(c_out, "conv", self.place)
            analysis.claim(module.weight, {0: written, 1: read}, reads=1)
        elif groups == c_in == c_out and held is not None and all(p.inner == 1 for p in held.parts):
            # Depthwise: channel c writes channel c, so both are the same unit.
            self.kind, written, read = "depthwise", held.parts, dense(1)
            analysis.claim(module.weight, {0: written})
        else:
            # Grouped: a unit is a whole group of filters; the group's input channels are read completely.
            self.kind, self.full, read = "grouped", True, dense(1)
            units = analysis.units(groups, "conv", self.place)
            written = tuple(Part(p.space, groups, c_out // groups) for p in units) if not is_dense(units) else units
            written = written if not is_dense(written) else dense(c_out)
            analysis.claim(module.weight, {0: written})
            self.inputs = tuple(Part(p.space, groups, c_in // groups) for p in written)
            if held is not None:
                analysis.note(node, "a grouped convolution reads whole groups, so its input is completed")
        analysis.claim(module.bias, {0: written})
        names = _names(analysis, module)
        self.weight, self.bias = names["weight"], names.get("bias")
        self.groups, self.out = groups, layout_of(1, written)
        positions = math.prod(analysis.shape(node)) / c_out
        flops = 2.0 * positions * c_out * (c_in // groups) * math.prod(module.kernel_size)
        analysis.operation(self.place, flops, written, read)

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, module = args[0], run.module(self.place)
        if self.chosen is not None:
            x = run.pick(x, Layout(1, self.chosen))
        groups = self.groups
        weight = run.weight(self.weight)
        if self.kind == "depthwise":
            groups = weight.shape[0]
        elif self.kind == "grouped" and self.out is not None:
            x = run.pick(x, Layout(1, self.inputs))
            groups = x.shape[1] * self.groups // module.in_channels
        bias = None if self.bias is None else run.weight(self.bias)
        if module.padding_mode != "zeros":
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
            padding: Any = 0
        else:
            padding = module.padding
        conv = (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
        return conv(x, weight, bias, module.stride, padding, module.dilation, groups)


class BatchNormRule(Rule):
    """Exact: the scale and the shift of a dropped channel are dropped too, and its statistics stay untouched."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module: Any = analysis.module(node)
        held = analysis.tensor_layout(node.args[0])
        self.place, self.out = str(node.target), held
        if held is not None:
            if held.axis != 1:
                raise CannotSlice("the units do not lie on the channel axis")
            if not module.affine:
                raise CannotSlice("a norm without scale and shift moves zeros")
            analysis.spaces.mark(held.parts, consumer="norm")
        parts = dense(module.num_features) if held is None else held.parts
        analysis.claim(module.weight, {0: parts})
        analysis.claim(module.bias, {0: parts})
        self.names = _names(analysis, module) if module.affine else {}

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = run.module(self.place)
        weight, bias = (run.weight(self.names[n]) if self.names else None for n in ("weight", "bias"))
        index = None if self.out is None else run.index(self.out.parts)
        mean, var = module.running_mean, module.running_var
        use_batch = module.training or mean is None
        factor = module.momentum if module.momentum is not None else 0.0
        if module.training and mean is not None:
            module.num_batches_tracked.add_(1)
            if module.momentum is None:
                factor = 1.0 / float(module.num_batches_tracked)
        if index is not None and mean is not None:
            mean, var = mean.index_select(0, index), var.index_select(0, index)
        y = F.batch_norm(args[0], mean, var, weight, bias, use_batch, factor, module.eps)
        if index is not None and module.training and mean is not None:
            module.running_mean.index_copy_(0, index, mean)
            module.running_var.index_copy_(0, index, var)
        return y


class AcrossNormRule(Rule):
    """LayerNorm and GroupNorm: statistics over all units (zeros included), then scale and shift of live ones."""

    full = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module: Any = analysis.module(node)
        held = analysis.tensor_layout(node.args[0])
        self.layer, self.place = isinstance(module, nn.LayerNorm), str(node.target)
        affine = module.weight is not None
        axis = len(analysis.shape(node)) - 1 if self.layer else 1
        single = not self.layer or len(module.normalized_shape) == 1
        if held is not None and (held.axis != axis or not affine or not single):
            raise CannotSlice("its scale and shift do not match the units")
        self.axis = axis
        if held is not None:
            analysis.spaces.mark(held.parts, consumer="norm")
            self.out = held
            for parameter in (module.weight, module.bias):
                analysis.claim(parameter, {0: held.parts})
        else:
            for parameter in (module.weight, module.bias):
                analysis.claim(parameter, {})
        self.names = _names(analysis, module) if affine else {}

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = run.module(self.place)
        weight = run.weight(self.names["weight"]) if self.names else None
        bias = run.weight(self.names["bias"]) if "bias" in self.names else None
        if self.out is None:
            if self.layer:
                return F.layer_norm(args[0], module.normalized_shape, weight, bias, module.eps)
            return F.group_norm(args[0], module.num_groups, weight, bias, module.eps)
        if self.layer:
            y = F.layer_norm(args[0], module.normalized_shape, eps=module.eps)
        else:
            y = F.group_norm(args[0], module.num_groups, eps=module.eps)
        y = run.pick(y, self.out)
        shape = [-1 if i == self.axis else 1 for i in range(y.ndim)]
        assert weight is not None
        y = y * weight.view(shape)
        return y if bias is None else y + bias.view(shape)


class EmbeddingRule(Rule):
    """A unit is one of the embedding's dimensions."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module: Any = analysis.module(node)
        self.place = str(node.target)
        if module.max_norm is not None:
            raise CannotSlice("an embedding with max_norm changes its own weights")
        written = analysis.units(module.embedding_dim, "embedding", self.place)
        analysis.claim(module.weight, {1: written})
        self.weight = _names(analysis, module)["weight"]
        self.out = layout_of(len(analysis.shape(node)) - 1, written)

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return F.embedding(args[0], run.weight(self.weight), run.module(self.place).padding_idx)


class AttentionRule(Rule):
    """Self-attention by whole heads: a head without weights writes zeros into its slice of the output."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module: Any = analysis.module(node)
        self.place = place = str(node.target)
        wanted = {**dict(zip(("query", "key", "value"), node.args, strict=False)), **node.kwargs}
        if not (wanted["query"] is wanted["key"] is wanted["value"]):
            raise CannotSlice("cross-attention")
        extra = {k for k, v in wanted.items() if k not in ("query", "key", "value", "need_weights") and v is not None}
        if extra - {"is_causal", "average_attn_weights"} or wanted.get("need_weights", True) is not False:
            raise CannotSlice("attention with masks or returned weights (pass need_weights=False)")
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn or len(node.args) > 3:
            raise CannotSlice("attention with separate projections or extra keys")
        width, heads = module.embed_dim, module.num_heads
        read, self.chosen = _reads(analysis, node, len(analysis.shape(wanted["query"])) - 1, width, "attention")
        inner = analysis.units(heads, "heads", place)
        inner = tuple(Part(p.space, heads, width // heads) for p in inner) if not is_dense(inner) else dense(width)
        written = analysis.units(width, "attention", place)
        analysis.claim(module.in_proj_weight, {0: inner * 3, 1: read}, reads=1)
        analysis.claim(module.in_proj_bias, {0: inner * 3})
        analysis.claim(module.out_proj.weight, {0: written, 1: inner}, reads=1)
        analysis.claim(module.out_proj.bias, {0: written})
        self.names = _names(analysis, module)
        self.outer = _names(analysis, module.out_proj)
        batch, steps, _ = shape = analysis.shape(wanted["query"])
        if not module.batch_first:
            steps, batch = batch, steps
        rows = batch * steps
        analysis.operation(f"{place}.in_proj", 6.0 * rows * width * width, inner, read)
        analysis.operation(f"{place}.scores", 4.0 * rows * steps * width, inner, dense(1))
        analysis.operation(f"{place}.out_proj", 2.0 * rows * width * width, written, inner)
        analysis.activation(f"{place}.in_proj", 4.0 * rows * width, inner)  # q, k, v and what the heads write
        analysis.activation(f"{place}.out_proj", 1.0 * rows * width, written)
        self.size, self.out = width // heads, (layout_of(len(shape) - 1, written), None)

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = run.module(self.place)
        x: Tensor = args[0] if args else kwargs["query"]
        if self.chosen is not None:
            x = run.pick(x, Layout(x.ndim - 1, self.chosen))
        if not module.batch_first:
            x = x.transpose(0, 1)
        qkv = F.linear(x, run.weight(self.names["in_proj_weight"]), run.optional(self.names.get("in_proj_bias")))
        q, k, v = qkv.unflatten(-1, (3, -1, self.size)).permute(2, 0, 3, 1, 4)
        drop = module.dropout if module.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop).transpose(1, 2).flatten(2)
        y = F.linear(y, run.weight(self.outer["weight"]), run.optional(self.outer.get("bias")))
        return (y if module.batch_first else y.transpose(0, 1)), None


class RecurrentRule(Rule):
    """RNN, GRU and LSTM by hidden units: without weights a unit's state starts at zero and stays there."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module: Any = analysis.module(node)
        self.place, self.mode = str(node.target), module.mode
        if len(node.args) + len(node.kwargs) > 1:
            raise CannotSlice("a recurrent layer with a given first state")
        if module.proj_size or len(analysis.shape(node.args[0])) != 3:
            raise CannotSlice("a recurrent layer with projections or without a batch axis")
        gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
        read, self.chosen = _reads(analysis, node, 2, module.input_size, "recurrent")
        first, steps, _ = analysis.shape(node.args[0])
        names = _names(analysis, module)
        self.layers: list[list[str]] = []
        self.parts: list[Parts] = []
        suffixes = ["", "_reverse"] if module.bidirectional else [""]
        for layer in range(module.num_layers):
            # Both directions keep the same units, so that one bidirectional call serves them.
            units = analysis.units(module.hidden_size, "recurrent", f"{self.place}.{layer}")
            weights = []
            for suffix in suffixes:
                for kind, other in (("ih", read), ("hh", units)):
                    parameter = getattr(module, f"weight_{kind}_l{layer}{suffix}")
                    analysis.claim(parameter, {0: units * gates, 1: other}, reads=1)
                    flops = 2.0 * first * steps * parameter.numel()
                    analysis.operation(f"{self.place}.weight_{kind}_l{layer}{suffix}", flops, units, other)
                for kind in ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if module.bias else ())):
                    name = f"{kind}_l{layer}{suffix}"
                    weights.append(names[name])
                    if kind.startswith("bias"):
                        analysis.claim(getattr(module, name), {0: units * gates})
            # Every gate's value and the state, at every step.
            amount = (gates + 1.0) * first * steps * module.hidden_size * len(suffixes)
            analysis.activation(f"{self.place}.{layer}", amount, units)
            self.layers.append(weights)
            self.parts.append(units)
            read = units * len(suffixes)
            if layer + 1 < module.num_layers:
                analysis.spaces.mark(units, consumer="recurrent")
        state = layout_of(2, self.parts[-1]) if module.num_layers == 1 else None
        states = (state, state) if module.mode == "LSTM" else state
        self.out = (layout_of(2, read), states)

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module, x = run.module(self.place), args[0]
        if self.chosen is not None:
            x = run.pick(x, Layout(2, self.chosen))
        lstm, directions = self.mode == "LSTM", 2 if module.bidirectional else 1
        function = {
            "LSTM": torch.lstm,
            "GRU": torch.gru,
            "RNN_TANH": torch.rnn_tanh,
            "RNN_RELU": torch.rnn_relu,
        }
        ends: list[list[Tensor]] = [[], []]
        for layer, names in enumerate(self.layers):
            weights = [run.weight(name) for name in names]
            hidden = weights[1].shape[1]
            zero = x.new_zeros(directions, x.shape[0] if module.batch_first else x.shape[1], hidden)
            x, *last = function[self.mode](
                x, (zero, zero) if lstm else zero, weights, module.bias, 1, 0.0, module.training,
                module.bidirectional, module.batch_first,
            )  # fmt: skip
            if layer + 1 < len(self.layers):
                x = F.dropout(x, module.dropout, module.training)
            for kept, state in zip(ends, last, strict=False):
                if len(self.layers) > 1:
                    state = run.restore(state, Layout(2, self.parts[layer]))
                kept.append(state)
        states = [torch.cat(kept) for kept in ends if kept]
        return x, (states[0], states[1]) if lstm else states[0]


class PReLURule(Rule):
    """Zero stays zero whatever the slope."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module: Any = analysis.module(node)
        held = analysis.tensor_layout(node.args[0])
        if held is not None and module.num_parameters > 1 and held.axis != 1:
            raise CannotSlice("one slope per channel, but the units lie elsewhere")
        many = held is not None and module.num_parameters > 1
        analysis.claim(module.weight, {0: held.parts} if many and held is not None else {})
        self.name, self.out = _names(analysis, module)["weight"], held

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return F.prelu(args[0], run.weight(self.name))


LAYERS: dict[type[nn.Module], type[Rule]] = {
    nn.Linear: LinearRule,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ConvRule),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), BatchNormRule),
    **dict.fromkeys((nn.LayerNorm, nn.GroupNorm), AcrossNormRule),
    nn.Embedding: EmbeddingRule,
    nn.MultiheadAttention: AttentionRule,
    **dict.fromkeys((nn.RNN, nn.GRU, nn.LSTM), RecurrentRule),
    nn.PReLU: PReLURule,
}
