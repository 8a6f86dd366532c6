"""Rules for attention by heads and for recurrent layers by hidden units."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from pfedgate.gating.slicing.analysis import Analysis, flat
from pfedgate.gating.slicing.axes import Layout, Segment, Segments, dense, is_dense, layout_of, length
from pfedgate.gating.slicing.rules.layers import parameter_names, units_read
from pfedgate.gating.slicing.steps import CannotSlice, Rule, describe

if TYPE_CHECKING:
    from pfedgate.gating.slicing.execute import Sliced

_RECURRENT: dict[str, Any] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


class AttentionRule(Rule):
    """Self-attention by whole heads: a head without weights writes zeros into its slice of the output."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module: Any = analysis.module(node)
        self.place = place = str(node.target)
        inputs = {**dict(zip(("query", "key", "value"), node.args, strict=False)), **node.kwargs}
        x = inputs.get("query")
        if not (x is inputs.get("key") is inputs.get("value")):
            raise CannotSlice("cross-attention")
        extra = {k for k, v in inputs.items() if k not in ("query", "key", "value", "need_weights") and v is not None}
        if extra - {"average_attn_weights"} or inputs.get("need_weights", True) is not False:
            raise CannotSlice("attention with masks or returned weights (pass need_weights=False)")
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn or len(node.args) > 3:
            raise CannotSlice("attention with separate projections or extra keys")
        shape = analysis.shape(x)
        if len(shape) != 3:
            raise CannotSlice("an input without a batch axis")
        self.names = parameter_names(analysis, module)
        self.outer = parameter_names(analysis, module.out_proj)
        width, heads = module.embed_dim, module.num_heads
        read, self.inputs = units_read(analysis, self, self.place, x, 2, width, "attention")
        units = analysis.units(heads, "heads", place)
        inner = dense(width) if is_dense(units) else (Segment(units[0].space, heads, width // heads),)
        written = analysis.units(width, "attention", place)
        analysis.claim(module.in_proj_weight, {0: inner * 3, 1: read}, reads=1)
        analysis.claim(module.in_proj_bias, {0: inner * 3})
        analysis.claim(module.out_proj.weight, {0: written, 1: inner}, reads=1)
        analysis.claim(module.out_proj.bias, {0: written})
        rows = float(shape[0] * shape[1])
        analysis.operation(f"{place}.in_proj", 6.0 * rows * width * width, inner, read)
        # `torch.utils.flop_counter` defines what a FLOP is: on CPUs it does not see scores, inside a fused kernel.
        steps = 0 if analysis.device.type == "cpu" else shape[1 if module.batch_first else 0]
        analysis.operation(f"{place}.scores", 4.0 * rows * steps * width, inner, dense(1))
        analysis.operation(f"{place}.out_proj", 2.0 * rows * width * width, written, inner)
        analysis.activation(f"{place}.in_proj", 4.0 * rows * width, inner)  # q, k, v and what the heads write
        analysis.activation(f"{place}.out_proj", rows * width, written)
        self.segments = (read, inner, written)
        self.size, self.out = width // heads, (layout_of(2, written), None)

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = run.modules[self.place]
        if all(run.index(segments) is None for segments in self.segments):
            return run.call(self.place, args, kwargs)  # nothing is missing: the module itself, bit for bit
        x: Tensor = args[0] if args else kwargs["query"]
        if self.inputs is not None:
            x = run.pick(x, Layout(2, self.inputs))
        if not module.batch_first:
            x = x.transpose(0, 1)
        qkv = F.linear(x, run.weight(self.names["in_proj_weight"]), run.optional(self.names.get("in_proj_bias")))
        q, k, v = qkv.reshape(*qkv.shape[:2], 3, -1, self.size).permute(2, 0, 3, 1, 4)
        drop = module.dropout if module.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop).transpose(1, 2).flatten(2)
        y = F.linear(y, run.weight(self.outer["weight"]), run.optional(self.outer.get("bias")))
        return (y if module.batch_first else y.transpose(0, 1)), None


def attention_flops(node: fx.Node, analysis: Analysis) -> float:
    """FLOPs of scores and of what they weigh; torch counts them in some of its kernels, and chooses one at run time."""
    given = {**dict(zip(("query", "key"), node.args, strict=False)), **node.kwargs}
    return 4.0 * math.prod(analysis.shape(given["query"])) * analysis.shape(given["key"])[-2]


class HeadsRule(Rule):
    """Attention of queries, keys and values that are given by heads; fewer keys and values than queries may serve."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        layouts = [analysis.tensor_layout(given[name], filled=True) for name in names[:3]]
        mask, self.mask = given.get("attn_mask"), None
        axis = len(analysis.shape(node)) - 3
        present = [layout for layout in layouts if layout is not None]
        if not present and analysis.layout(mask) is None:
            return self._cost(node, analysis, dense(1))
        if (held := analysis.layout(mask)) is not None:
            for one in flat(held):  # what shifts scores, often in many layers, is not worth cutting: heads are
                for segment in one.segments:
                    if segment.space is not None:
                        analysis.clashes.update(analysis.spaces[segment.space].producers)
            raise CannotSlice("its mask holds units")
        if len(present) < 3 or any(one.axis != axis or one.fill for one in present):
            raise CannotSlice("queries, keys and values do not all hold heads")
        query, key, value = present
        analysis.tie(key, value)
        few, many = length(key.segments), length(query.segments)
        if few == many:
            analysis.tie(query, key)
        else:  # each head of keys serves several of queries
            a, b = query.segments[0], key.segments[0]
            if len(query.segments) > 1 or len(key.segments) > 1 or a.space is None or b.space is None:
                raise CannotSlice("queries and keys hold their heads in different ways")
            if a.units != b.units:
                analysis.wish((max(a, b, key=lambda one: one.units),), units=min(a.units, b.units))
                raise CannotSlice("queries and keys are cut in different ways")
            analysis.spaces.union(a.space, b.space)
        if isinstance(mask, fx.Node):
            place = axis - len(analysis.shape(node)) + len(analysis.shape(mask))
            if place >= 0 and analysis.shape(mask)[place] == many:
                self.mask = Layout(place, query.segments)
        analysis.spaces.mark(query.segments, consumer="attention")
        self.out = query
        self._cost(node, analysis, query.segments)

    @staticmethod
    def _cost(node: fx.Node, analysis: Analysis, heads: Segments) -> None:
        analysis.operation(describe(node), attention_flops(node, analysis), heads, dense(1))

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.mask is not None:
            if "attn_mask" in kwargs:
                kwargs = {**kwargs, "attn_mask": run.pick(kwargs["attn_mask"], self.mask)}
            else:
                args = (*args[:3], run.pick(args[3], self.mask), *args[4:])
        return F.scaled_dot_product_attention(*args, **kwargs)


class RecurrentRule(Rule):
    """RNN, GRU and LSTM by hidden units: without weights a unit's state starts at zero and stays there."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module: Any = analysis.module(node)
        self.place, self.mode = str(node.target), module.mode
        if len(node.args) + len(node.kwargs) > 1:
            raise CannotSlice("a recurrent layer with a given first state")
        if module.proj_size or len(analysis.shape(node.args[0])) != 3:
            raise CannotSlice("a recurrent layer with projections or without a batch axis")
        names = parameter_names(analysis, module)
        gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
        read, self.inputs = units_read(analysis, self, self.place, node.args[0], 2, module.input_size, "recurrent")
        rows = float(analysis.shape(node.args[0])[0] * analysis.shape(node.args[0])[1])
        self.read = read
        self.layers: list[list[str]] = []
        self.segments: list[Segments] = []
        suffixes = ["", "_reverse"] if module.bidirectional else [""]
        for layer in range(module.num_layers):
            # Both directions keep the same units, so that one bidirectional call serves them.
            units = analysis.units(module.hidden_size, "recurrent", f"{self.place}.{layer}")
            weights = []
            for suffix in suffixes:
                end = f"_l{layer}{suffix}"
                for kind, other in (("weight_ih", read), ("weight_hh", units)):
                    parameter = getattr(module, kind + end)
                    analysis.claim(parameter, {0: units * gates, 1: other}, reads=1)
                    analysis.operation(f"{self.place}.{kind}{end}", 2.0 * rows * parameter.numel(), units, other)
                    weights.append(names[kind + end])
                for kind in ("bias_ih", "bias_hh") if module.bias else ():
                    analysis.claim(getattr(module, kind + end), {0: units * gates})
                    weights.append(names[kind + end])
            # Every gate's value and the state, at every step.
            numbers = (gates + 1) * rows * module.hidden_size * len(suffixes)
            analysis.activation(f"{self.place}.{layer}", numbers, units)
            self.layers.append(weights)
            self.segments.append(units)
            read = units * len(suffixes)
            if layer + 1 < module.num_layers:
                analysis.spaces.mark(units, consumer="recurrent")
        state = layout_of(2, self.segments[-1]) if module.num_layers == 1 else None
        self.out = (layout_of(2, read), (state, state) if module.mode == "LSTM" else state)

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module, x = run.modules[self.place], args[0]
        if all(run.index(segments) is None for segments in (self.read, *self.segments)):
            return run.call(self.place, args, kwargs)
        if self.inputs is not None:
            x = run.pick(x, Layout(2, self.inputs))
        lstm, directions = self.mode == "LSTM", 2 if module.bidirectional else 1
        ends: list[list[Tensor]] = [[], []]
        for layer, names in enumerate(self.layers):
            weights = [run.weight(name) for name in names]
            zero = x.new_zeros(directions, x.shape[0 if module.batch_first else 1], weights[1].shape[1])
            x, *last = _RECURRENT[self.mode](
                x, (zero, zero) if lstm else zero, weights, module.bias, 1, 0.0, module.training,
                module.bidirectional, module.batch_first,
            )  # fmt: skip
            if layer + 1 < len(self.layers):
                x = F.dropout(x, module.dropout, module.training)
            for end, state in zip(ends, last, strict=False):
                # Layers of one module may keep different units, but their last states come as one tensor.
                one = len(self.layers) == 1
                end.append(state if one else run.restore(state, Layout(2, self.segments[layer])))
        states = [torch.cat(end) for end in ends if end]
        return x, (states[0], states[1]) if lstm else states[0]
