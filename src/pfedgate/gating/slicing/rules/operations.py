"""Rules for operations without parameters: elementwise functions, pooling, sums, products, views and reductions."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from pfedgate.gating.slicing.analysis import Analysis, flat
from pfedgate.gating.slicing.axes import Layout, Segment, Segments, dense, is_dense, length
from pfedgate.gating.slicing.steps import CannotSlice, Rule, describe

if TYPE_CHECKING:
    from pfedgate.gating.slicing.execute import Sliced

# Any product of one of these with a size differs from all others: strides tell axes apart.
_STRIDES = (1_000_003, 1_000_033, 1_000_037, 1_000_039, 1_000_081, 1_000_099, 1_000_117)


class AsWritten(Rule):
    """Runs a node as it is written, on whatever tensors it is given."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.op, self.target = node.op, node.target
        home = getattr(node.target, "__module__", None) or "torch"
        # A function that is neither torch's nor an operator: we do not look inside.
        self.foreign = node.target is not getattr and home.partition(".")[0] not in ("torch", "_operator")

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Any = self.target
        if self.op == "call_module":
            return run.call(target, args, kwargs)
        if self.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return run.function(target, args, kwargs) if self.foreign else target(*args, **kwargs)


class Same(AsWritten):
    """Keeps every unit where it is, and zero at zero."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        keeps = _name(node, analysis) in _KEEPING
        self.out = analysis.tensor_layout(node.args[0], filled=keeps)
        self._only_first(node, analysis)
        module, name = analysis.module(node) if node.op == "call_module" else None, _name(node, analysis)
        inplace = getattr(module, "inplace", False) or node.kwargs.get("inplace", False) or name.endswith("_")
        self.view = bool(inplace) or name in ("Identity", "contiguous", "detach", "to", "type_as", "float", "double")

    @staticmethod
    def _only_first(node: fx.Node, analysis: Analysis) -> None:
        others = [n for n in node.all_input_nodes if n is not node.args[0] and analysis.layout(n) is not None]
        if others and _name(node, analysis) not in ("to", "type_as"):
            raise CannotSlice("another argument than the first holds units")


_KEEPING = {"Identity", "contiguous", "clone", "detach", "to", "type_as", "float", "double"}  # every value


def _name(node: fx.Node, analysis: Analysis) -> str:
    """What a node calls, for short."""
    if node.op == "call_module":
        return type(analysis.module(node)).__name__
    return str(getattr(node.target, "__name__", node.target))


class Elementwise(Same):
    """Keeps every unit where it is; what zero becomes is computed once."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        AsWritten.__init__(self, node, analysis)
        held = analysis.tensor_layout(node.args[0], filled=True)
        if held is None:
            self._only_first(node, analysis)
            return
        rest = (node.args[1:], node.kwargs)
        if len(node.all_input_nodes) > 1 or math.isnan(held.fill):
            raise CannotSlice("what zero becomes is not known")
        value = torch.full((1,) * len(analysis.shape(node.args[0])), held.fill, dtype=torch.float64)
        call: Any = analysis.module(node) if node.op == "call_module" else functools.partial(super().__call__, None)  # type: ignore[arg-type]
        fill = float(call(value) if node.op == "call_module" else call((value, *rest[0]), rest[1]))
        if not math.isfinite(fill):
            raise CannotSlice(f"zero becomes {fill}")
        self.view = _name(node, analysis).endswith("_") or bool(getattr(call, "inplace", False))
        self.out = dataclasses.replace(held, fill=fill)


class Softmax(AsWritten):
    """Along another axis than that of heads: what comes out for a dropped head meets its values, which are zero."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        held = analysis.tensor_layout(node.args[0], filled=True)
        if held is None:
            return
        dim: Any = keyword(node, ("dim",), node.args[1] if len(node.args) > 1 else None)
        if not isinstance(dim, int) or dim % len(analysis.shape(node)) == held.axis:
            raise CannotSlice("it is normalised over the units")
        self.out = unknown(node, analysis, held)


def unknown(node: fx.Node, analysis: Analysis, held: Layout) -> Layout:
    """A layout in which dropped units are numbers that nobody knows; not of a tensor that is needed whole."""
    if ("unknown", node.name) in analysis.refused:
        raise CannotSlice("it is read where dropped units would count")
    return dataclasses.replace(held, fill=math.nan)


class BatchProduct(AsWritten):
    """Products of matrices, one for each head: zero where either side is."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        operands = _operands(node)
        layouts = [analysis.tensor_layout(a, filled=True) for a in operands]
        one, two = layouts
        if one is None or two is None:
            raise CannotSlice("it sums over units, or one side has none")
        ranks = {len(analysis.shape(a)) for a in operands} | {len(analysis.shape(node))}
        if len(ranks) > 1 or one.axis != two.axis or one.axis > ranks.pop() - 3:
            raise CannotSlice("it sums over units, or one side holds them elsewhere")
        if one.fill != 0 and two.fill != 0:
            raise CannotSlice("dropped units are not zero there")
        analysis.tie(one, two)
        self.out = dataclasses.replace(one, fill=0.0)
        if flops := analysis.count(node):
            analysis.operation(describe(node), flops, one.segments, dense(1))


class Split(AsWritten):
    """Parts of a tensor: along the units' axis every part has units of its own."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        self.parts: list[Segments] | None = None
        self.axis, self.take = 0, _name(node, analysis) == "unbind"
        held = analysis.tensor_layout(node.args[0], filled=True)
        if held is None:
            return
        values: Any = analysis.values[node.name]
        at = 0 if self.take else 1
        dim: Any = keyword(node, ("dim",), node.args[at + 1] if len(node.args) > at + 1 else 0)
        axis = self.axis = dim % len(analysis.shape(node.args[0]))
        if axis != held.axis:
            self.out = tuple(held.moved(held.axis - (self.take and axis < held.axis)) for _ in values)
            return
        if self.take:
            raise CannotSlice("it takes the units one by one")
        self.parts = portions(analysis, held, tuple(value.shape[axis] for value in values))
        self.out = tuple(layout_like(held, part) for part in self.parts)

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.parts is None:
            return super().__call__(run, args, kwargs)
        return torch.split(args[0], [run.count(part) for part in self.parts], self.axis)


def layout_like(held: Layout, segments: Segments) -> Layout | None:
    """The same layout of other units; None where nothing can be missing."""
    return None if is_dense(segments) else dataclasses.replace(held, segments=segments)


def portions(analysis: Analysis, held: Layout, lengths: tuple[int, ...]) -> list[Segments]:
    """The units of consecutive parts of an axis; if they cross its segments, the pass that follows cuts there."""
    parts: list[Segments] = []
    waiting = list(held.segments)
    for size in lengths:
        part: list[Segment] = []
        while waiting and length(tuple(part)) + waiting[0].length <= size:
            part.append(waiting.pop(0))
        if waiting and (rest := size - length(tuple(part))):
            if waiting[0].space is not None:
                if len(held.segments) == 1:
                    analysis.wish(held.segments, parts=lengths)
                raise CannotSlice("it parts a set of units")
            part.append(Segment(None, rest))
            waiting[0] = Segment(None, waiting[0].length - rest)
        parts.append(tuple(part))
    return parts


class Gated(AsWritten):
    """glu: the first half of an axis times the sigmoid of the second half, so both halves are the same units."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        held = self.out = analysis.tensor_layout(node.args[0])
        if held is None:
            return
        module = analysis.module(node) if node.op == "call_module" else None
        dim: Any = getattr(module, "dim", keyword(node, ("dim",), node.args[1] if len(node.args) > 1 else -1))
        if dim % len(analysis.shape(node)) != held.axis:
            return
        parts = [layout_like(held, part) for part in portions(analysis, held, (held.length // 2,) * 2)]
        if parts[0] is None or parts[1] is None:
            raise CannotSlice("only one of its halves holds units")
        analysis.tie(parts[0], parts[1])
        self.out = parts[0]


class Pad(AsWritten):
    """Numbers around a tensor: beside units they belong to none, behind every unit's own they must be zero or its."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        held = analysis.tensor_layout(node.args[0])
        if held is None:
            return
        if node.op == "call_module":
            module: Any = analysis.module(node)
            widths, value = module.padding, getattr(module, "value", 0.0)
            constant = isinstance(module, nn.modules.padding._ConstantPadNd)
        else:
            widths = keyword(node, ("pad",), node.args[1] if len(node.args) > 1 else None)
            constant = keyword(node, ("mode",), node.args[2] if len(node.args) > 2 else "constant") == "constant"
            value = keyword(node, ("value",), node.args[3] if len(node.args) > 3 else None) or 0.0
        if not isinstance(widths, tuple | list) or any(isinstance(a, fx.Node) for a in (*widths, value)):
            raise CannotSlice("its widths are computed")
        place = 2 * (len(analysis.shape(node)) - 1 - held.axis)
        before, after = widths[place : place + 2] if place < len(widths) else (0, 0)
        elsewhere = [width for i, width in enumerate(widths) if i // 2 != place // 2]
        if (constant and value and any(elsewhere)) or min(before, after) < 0 or (not constant and (before or after)):
            raise CannotSlice("it pads with something else than zero, or cuts units off")
        ends = [dense(width) if width else () for width in (before, after)]
        self.out = dataclasses.replace(held, segments=(*ends[0], *held.segments, *ends[1]))


class Resample(AsWritten):
    """interpolate: every channel by itself, and zeros stay zeros."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        self.out = analysis.tensor_layout(node.args[0])
        if self.out is not None and self.out.axis != 1:
            raise CannotSlice("it resamples along the axis of the units")


class Rearrange(AsWritten):
    """Channels become positions, or positions channels, so many for each: a unit keeps its own."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        held = analysis.tensor_layout(node.args[0])
        if held is None:
            return
        before, after = analysis.shape(node.args[0]), analysis.shape(node)
        axis = 1 if "nfold" in _name(node, analysis) else len(before) - 3
        if held.axis != axis or "im2col" in _name(node, analysis):
            raise CannotSlice("the units do not lie on the channel axis")
        wide, narrow = max(before[axis], after[axis]), min(before[axis], after[axis])
        if after[axis] == wide:
            self.out = held.merged(wide // narrow)
            return
        if any(segment.inner % (wide // narrow) for segment in held.segments):
            if len(held.segments) == 1:
                analysis.wish(held.segments, units=narrow)
            raise CannotSlice("it parts units")
        segments = (Segment(s.space, s.units, s.inner // (wide // narrow)) for s in held.segments)
        self.out = dataclasses.replace(held, segments=tuple(segments))


class PoolRule(AsWritten):
    """Works on each channel alone: a channel of zeros stays zero."""

    def __init__(self, node: fx.Node, analysis: Analysis, spatial: int) -> None:
        super().__init__(node, analysis)
        self.out = analysis.tensor_layout(node.args[0])
        if not isinstance(analysis.values[node.name], Tensor):
            raise CannotSlice("it returns indices")
        if self.out is not None and self.out.axis != len(analysis.shape(node.args[0])) - spatial - 1:
            raise CannotSlice("it pools along the axis of the units")

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        y: Tensor = super().__call__(run, args, kwargs)
        last = y.ndim == 4 and y.is_contiguous(memory_format=torch.channels_last) and not y.is_contiguous()
        if last and y.requires_grad and not torch._C._are_functorch_transforms_active():
            y.register_hook(_channels_last)  # type: ignore[no-untyped-call]
        return y


def _channels_last(gradient: Tensor) -> Tensor:
    """In another layout, as flattening gives it, torch would copy the pooled tensor and its indices to work on them."""
    return gradient.contiguous(memory_format=torch.channels_last)


class Add(AsWritten):
    """A sum is zero where both sides are: the two sets of units are cut together from here on."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        a, b = _operands(node)
        self.pick: tuple[int, Layout] | None = None
        one, two = (analysis.tensor_layout(side, filled=True) for side in (a, b))
        if one is None and two is None:
            return
        if one is None or two is None:
            self._one_sided(node, analysis, one or two, 0 if two is None else 1)
            return
        ranks = [len(analysis.shape(x)) for x in (a, b)]
        if one.axis - ranks[0] != two.axis - ranks[1]:
            raise CannotSlice("the two sides of the sum hold their units on different axes")
        analysis.tie(one, two)
        sign = -1 if "sub" in str(getattr(node.target, "__name__", node.target)) else 1
        self.out = one if ranks[0] >= ranks[1] else two
        if one.fill or two.fill:
            if node.kwargs:
                raise CannotSlice("dropped units are not zero there")
            self.out = dataclasses.replace(self.out, fill=one.fill + sign * two.fill)

    def _one_sided(self, node: fx.Node, analysis: Analysis, held: Layout | None, side: int) -> None:
        """Units plus a number, which is what dropped ones become; or heads plus a mask that nobody reads for them."""
        assert held is not None
        other = _operands(node)[1 - side]
        if isinstance(other, int | float) and not node.kwargs and not math.isnan(held.fill):
            minus = "sub" in str(getattr(node.target, "__name__", node.target))
            first, second = (held.fill, other) if side == 0 else (other, held.fill)
            self.out = dataclasses.replace(held, fill=first - second if minus else first + second)
            return
        heads = all(s.space is None or analysis.is_heads(s.space) for s in held.segments)
        if (
            not heads
            or isinstance(other, int | float)
            or len(analysis.shape(_operands(node)[side])) < len(analysis.shape(node))
        ):
            raise CannotSlice("one side of the sum is complete, so the sum is")
        axis = held.axis - len(analysis.shape(node)) + len(analysis.shape(other))
        if axis >= 0 and analysis.shape(other)[axis] == held.length:
            self.pick = (1 - side, Layout(axis, held.segments))
        self.out = unknown(node, analysis, held)

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.pick is not None:
            place, layout = self.pick
            args = tuple(run.pick(a, layout) if i == place else a for i, a in enumerate(args))
        return super().__call__(run, args, kwargs)


class Multiply(AsWritten):
    """A product is zero where one side is: the other side is needed for live units only."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        self.pick: tuple[int, Layout] | None = None
        operands = _operands(node)
        layouts = [analysis.tensor_layout(a, filled=True) for a in operands]
        if layouts == [None, None]:
            return
        tensors = [isinstance(a, fx.Node) and isinstance(analysis.values[a.name], Tensor) for a in operands]
        divides = "div" in getattr(node.target, "__name__", str(node.target))
        if divides and layouts[1] is not None:
            raise CannotSlice("it divides by the units")
        held = layouts[0] or layouts[1]
        assert held is not None
        if not all(tensors):
            number = operands[1] if layouts[0] is not None else operands[0]
            if held.fill and not isinstance(number, int | float):
                raise CannotSlice("dropped units are not zero there")
            fill = 0.0 if not held.fill else held.fill / number if divides else held.fill * number
            self.out = dataclasses.replace(held, fill=fill)
            return
        if divides:
            raise CannotSlice("the divisor may be zero")
        ranks = [len(analysis.shape(a)) for a in operands]
        if layouts[0] is not None and layouts[1] is not None:
            if layouts[0].axis - ranks[0] != layouts[1].axis - ranks[1]:
                raise CannotSlice("the two factors hold their units on different axes")
            analysis.tie(layouts[0], layouts[1])
            fills = [layout.fill for layout in layouts if layout is not None]
            fill = 0.0 if 0.0 in fills else fills[0] * fills[1]
            self.out = dataclasses.replace(held if ranks[0] >= ranks[1] else layouts[1], fill=fill)
            return
        if held.fill:
            raise CannotSlice("dropped units are not zero there")
        side = 0 if layouts[0] is not None else 1
        if ranks[side] < max(ranks):
            raise CannotSlice("the other factor has more axes")
        axis = held.axis - ranks[side] + ranks[1 - side]
        if axis >= 0 and analysis.shape(operands[1 - side])[axis] == held.length:
            if side == 1 and str(getattr(node.target, "__name__", node.target)) in ("imul", "mul_"):
                raise CannotSlice("it writes into a complete tensor")
            self.pick = (1 - side, held.moved(axis))
        self.out = held

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.pick is not None:
            place, layout = self.pick
            args = tuple(run.pick(a, layout) if i == place else a for i, a in enumerate(args))
        return super().__call__(run, args, kwargs)


class Concatenate(AsWritten):
    """Along the units' axis the sets stand side by side; along another one they are tied."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        tensors: Any = node.args[0]
        if not isinstance(tensors, list | tuple):
            raise CannotSlice("it joins a list that is not written out")
        layouts = [analysis.tensor_layout(t) for t in tensors]
        cut = [layout for layout in layouts if layout is not None]
        if not cut:
            return
        dim: Any = keyword(node, ("dim", "axis"), node.args[1] if len(node.args) > 1 else 0)
        if not isinstance(dim, int):
            raise CannotSlice("the axis it joins along is computed")
        axis = dim % len(analysis.shape(node))
        if all(layout.axis == axis for layout in cut):
            segments: list[Segment] = []
            for tensor, layout in zip(tensors, layouts, strict=True):
                segments.extend(dense(analysis.shape(tensor)[axis]) if layout is None else layout.segments)
            self.out = Layout(axis, tuple(segments))
            return
        if len(cut) != len(layouts) or len({layout.axis for layout in cut}) != 1:
            raise CannotSlice("only some of the tensors hold units")
        for other in cut[1:]:
            analysis.tie(cut[0], other)
        self.out = cut[0]


def keyword(node: fx.Node, names: tuple[str, ...], default: Any) -> Any:
    """An argument that has several names (torch's and numpy's)."""
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


def _operands(node: fx.Node) -> tuple[Any, Any]:
    if len(node.args) < 2:
        raise CannotSlice("an operand is given by keyword")
    return node.args[0], node.args[1]


class Reshape(AsWritten):
    """flatten, view and reshape, judged by the shapes they had on the example."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        self.how = "as written"
        layout = analysis.tensor_layout(node.args[0], filled=True)
        if layout is None:
            return
        before, after = analysis.shape(node.args[0]), analysis.shape(node)
        flatten = node.op == "call_module" or "flatten" in getattr(node.target, "__name__", str(node.target))
        axis = self.axis = layout.axis
        if any(isinstance(a, torch.dtype) for a in node.args) or (node.kwargs and not flatten):
            raise CannotSlice("its sizes are given by keyword, or it changes the type")
        if after[: axis + 1] == before[: axis + 1]:
            self.how, self.out = "as written" if flatten else "tail", layout
        elif after == (*before[:axis], math.prod(before[axis:])):
            self.how, self.out = "merge", layout.merged(math.prod(before[axis + 1 :]))
        elif axis == len(before) - 1 and after == (math.prod(before[:axis]), before[axis]):
            self.how, self.out = "rows", layout.moved(1)
        else:
            self.how = "as written" if flatten else "sizes"
            elsewhere = [analysis.shape(n, elsewhere=True) for n in (node.args[0], node)]
            old, new = aligned(before, after, layout.axis)
            if any(before[i] != elsewhere[0][i] for i in old) or any(after[i] != elsewhere[1][i] for i in new):
                raise CannotSlice("the reshape mixes units with the samples of a batch")
            self._regroup(analysis, layout, before, after)

    def _regroup(self, analysis: Analysis, layout: Layout, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        """Axes join and part: units stay whole if theirs is the outermost of those that join, and where it parts."""
        old, new = aligned(before, after, layout.axis)
        if any(before[i] != 1 for i in old if i < layout.axis):
            raise CannotSlice("the reshape mixes units with other positions")
        self.joined = (layout.axis + 1, old[-1] + 1)
        segments = layout.merged(math.prod(before[layout.axis + 1 : old[-1] + 1])).segments
        wide = [i for i in new if after[i] != 1] or list(new[:1])
        target, self.tail, self.sets = wide[0], math.prod(after[wide[0] + 1 : new[-1] + 1]), 1
        if len(segments) == 1 and len(wide) > 2 and after[target] in (2, 3) and segments[0].units % after[target] == 0:
            size = length(segments) // after[target]
            analysis.wish(segments, parts=(size,) * after[target])
            raise CannotSlice("it parts a set of units")
        if len(segments) > 1 and len(wide) > 1 and len(segments) == after[target]:
            # Several sets of units side by side (queries, keys, values) become an axis: they are one set from here on.
            one = layout_like(layout, segments[:1])
            for other in segments[1:]:
                rest = layout_like(layout, (other,))
                if one is None or rest is None:
                    raise CannotSlice("only some of its parts hold units")
                analysis.tie(one, rest)
            self.sets, target, segments = len(segments), wide[1], segments[:1]
            self.tail = math.prod(after[target + 1 : new[-1] + 1])
        if any(segment.inner % self.tail for segment in segments):
            if len(segments) == 1 and self.tail % segments[0].inner == 0:
                analysis.wish(segments, units=after[target])
            raise CannotSlice("the reshape parts units")
        self.unit_axis = target
        inner = tuple(Segment(s.space, s.units, s.inner // self.tail) for s in segments)
        self.out = dataclasses.replace(layout, axis=target, segments=inner)

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: Tensor = args[0]
        if self.how == "merge":
            return x.flatten(self.axis)
        if self.how == "rows":
            return x.flatten(0, self.axis - 1)
        if self.how == "sizes":
            sizes = list(args[1]) if isinstance(args[1], tuple | list) else list(args[1:])
            if all(isinstance(size, int) and size == -1 for i, size in enumerate(sizes) if i == self.unit_axis):
                return x.reshape(sizes)
            if any(isinstance(size, int) and size == -1 for size in sizes):
                live = x.shape[self.axis] * math.prod(x.shape[slice(*self.joined)])
                sizes[self.unit_axis] = live // (self.tail * self.sets)
            else:
                sizes[self.unit_axis] = -1
            return x.reshape(sizes)
        if self.how == "tail":
            sizes = list(args[1]) if isinstance(args[1], tuple | list) else list(args[1:])
            sizes[self.axis] = x.shape[self.axis]  # the written size counts all units
            return x.reshape(sizes)
        return super().__call__(run, args, kwargs)


def aligned(before: tuple[int, ...], after: tuple[int, ...], axis: int) -> tuple[list[int], list[int]]:
    """The smallest runs of axes, one of them `axis`, that hold the same positions before and after a reshape.

    >>> aligned((8, 16, 64), (8, 16, 4, 16), axis=2), aligned((8, 16, 4, 16), (8, 16, 64), axis=2)
    (([2], [2, 3]), ([2, 3], [2]))
    """
    i = j = 0
    while True:
        old, new, left, right = [i], [j], before[i], after[j] if j < len(after) else 1
        while left != right:
            if left <= right and old[-1] + 1 < len(before):
                old.append(old[-1] + 1)
                left *= before[old[-1]]
            elif new[-1] + 1 < len(after):
                new.append(new[-1] + 1)
                right *= after[new[-1]]
            else:
                raise CannotSlice("the reshape mixes units with other positions")
        if axis in old:
            return old, new
        i, j = old[-1] + 1, new[-1] + 1


class Move(AsWritten):
    """transpose, permute, unsqueeze, squeeze, expand: the units change their axis, nothing else."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        self.expand = str(node.target) == "expand"
        layout = analysis.tensor_layout(node.args[0], filled=True)
        if layout is None:
            return
        before, after = analysis.shape(node.args[0]), analysis.shape(node)
        if len(before) > len(_STRIDES):
            raise CannotSlice(f"a tensor of {len(before)} axes")
        if getattr(node.target, "__name__", str(node.target)) == "squeeze":
            dims: Any = keyword(node, ("dim", "axis"), node.args[1] if len(node.args) > 1 else range(len(before)))
            if layout.axis in {d % len(before) for d in ([dims] if isinstance(dims, int) else dims)}:
                raise CannotSlice("a single live unit would be squeezed")
        # Mark each axis by its own stride and see where the units' axis went.
        probe = torch.empty_strided(before, _STRIDES[: len(before)], device="meta")
        rest, keywords = fx.node.map_arg((node.args[1:], node.kwargs), lambda n: analysis.values[n.name])
        moved = super().__call__(None, (probe, *rest), keywords)  # type: ignore[arg-type]
        axes = [i for i, stride in enumerate(moved.stride()) if stride == _STRIDES[layout.axis]]
        if len(axes) != 1 or after[axes[0]] != layout.length:
            raise CannotSlice("the units' axis cannot be followed")
        self.out = layout.moved(axes[0])

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.out is not None and self.expand:
            sizes = list(args[1]) if isinstance(args[1], tuple | list) else list(args[1:])
            sizes[self.out.axis] = -1  # the written size counts all units
            return args[0].expand(*sizes)
        return super().__call__(run, args, kwargs)


class Reduce(AsWritten):
    """mean, sum, max ... over axes that hold no units."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        layout = analysis.tensor_layout(node.args[0])
        if layout is None:
            if any(analysis.layout(source) is not None for source in node.all_input_nodes):
                raise CannotSlice("it compares complete tensors with units")
            return
        rank = len(analysis.shape(node.args[0]))
        given: Any = keyword(node, ("dim", "axis"), node.args[1] if len(node.args) > 1 else None)
        dims = list(given) if isinstance(given, tuple | list) else [given]
        if not all(isinstance(d, int) for d in dims) or not dims:
            raise CannotSlice("it reduces over the units")
        gone = {d % rank for d in dims}
        self.divisor: float | None = None
        if layout.axis in gone:
            if _name(node, analysis) not in ("sum", "mean") or node.kwargs.get("dtype") is not None:
                raise CannotSlice("it reduces over the units")
            # Dropped units add nothing. What comes out is complete.
            analysis.spaces.mark(layout.segments, consumer="layer norm")
            if _name(node, analysis) == "mean":
                self.divisor = layout.length
            self.axis = layout.axis
            return
        keep = keyword(node, ("keepdim", "keepdims"), node.args[2] if len(node.args) > 2 else False)
        moved = layout.moved(layout.axis - (0 if keep else sum(d < layout.axis for d in gone)))
        # max and min also return where: position 0 for a dropped unit, as for any row of zeros.
        self.out = moved if isinstance(analysis.values[node.name], Tensor) else (moved, moved)

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        y = super().__call__(run, args, kwargs)
        divisor = getattr(self, "divisor", None)
        return y if divisor is None else y * (args[0].shape[self.axis] / divisor)


class Item(Rule):
    """x[:, 0] and the elements of a tuple."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        held, index = analysis.layout(node.args[0]), node.args[1]
        if isinstance(held, tuple):
            if not isinstance(index, int):
                raise CannotSlice("it takes more than one element")
            self.out = held[index]
            return
        if not isinstance(held, Layout):
            if any(analysis.layout(source) is not None for source in node.all_input_nodes):
                raise CannotSlice("it is indexed by units")
            return
        self.cut: tuple[int, Segments, Segments] | None = None
        entries: Any = index if isinstance(index, tuple) else (index,)
        if any(isinstance(e, bool) or not isinstance(e, int | slice) for e in entries):
            raise CannotSlice("it is indexed by a tensor, None or ...")
        axis = held.axis - sum(isinstance(e, int) for e in entries[: held.axis])
        self.out = held.moved(axis)
        if len(entries) > held.axis and entries[held.axis] != slice(None):
            entry = entries[held.axis]
            ends = (entry.start, entry.stop, entry.step) if isinstance(entry, slice) else (None,)
            if len(ends) == 1 or ends[2] not in (None, 1) or any(isinstance(e, fx.Node) for e in ends):
                raise CannotSlice("it picks some of the units by number")
            start, stop, _ = entry.indices(held.length)
            before, part, _ = _ends(analysis, held, (start, stop - start, held.length - stop))
            self.cut, self.out = (held.axis, before, part), layout_like(self.out, part)

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cut = getattr(self, "cut", None)
        if cut is None:
            return args[0][args[1]]
        axis, before, part = cut
        entries: list[Any] = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
        start = run.count(before) if before else 0
        entries[axis] = slice(start, start + run.count(part))
        return args[0][tuple(entries)]


def _ends(analysis: Analysis, held: Layout, edges: tuple[int, ...]) -> list[Segments]:
    """The units of parts, of which some may be empty."""
    given = tuple(edge for edge in edges if edge)
    parts = iter(portions(analysis, held, given))
    return [next(parts) if edge else () for edge in edges]


class Field(Rule):
    """x.shape and other facts about a tensor, and .values of a reduction."""

    view = True
    facts = ("ndim", "dtype", "device", "is_cuda", "layout", "requires_grad")

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.field: Any = node.args[1]
        self.held = analysis.layout(node.args[0])
        if isinstance(self.held, tuple) and self.field in ("values", "indices"):
            self.out = self.held[("values", "indices").index(self.field)]
        elif self.held is not None and self.field not in ("shape", *self.facts):
            raise CannotSlice(f".{self.field} has no rule")

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.field == "shape" and isinstance(self.held, Layout):
            return full_shape(args[0], self.held)
        return getattr(args[0], self.field)


class Size(Rule):
    """x.size(): the full size, so that arithmetic in the forward sees what it would see in the dense model."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.held = analysis.tensor_layout(node.args[0])
        self.rank = str(node.target) == "dim"

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.rank:
            return args[0].dim()
        shape = args[0].shape if self.held is None else full_shape(args[0], self.held)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return shape if dim is None else shape[dim]


def full_shape(x: Tensor, layout: Layout) -> torch.Size:
    """The shape that the tensor would have with all units."""
    # The type stays: while a pass is written down, sizes are not numbers (see `compact.py`).
    return type(x.shape)([layout.length if i == layout.axis else n for i, n in enumerate(x.shape)])


class Output(Rule):
    """The result of the network is always complete."""

    view = full = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        for source in node.all_input_nodes:
            for held in flat(analysis.layout(source)):
                analysis.spaces.mark(held.segments, output=analysis.last)
                where = "the network" if analysis.last else "what can be followed"
                analysis.note(node, f"the result of {describe(source)} leaves {where}, so it is completed")

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0]


class Result(Output):
    """What a network returns, put together: a tuple, a dict, a dataclass."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        self.put: Any = node.target

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.put(*args)
