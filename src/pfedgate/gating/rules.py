"""Rules for operations without parameters: what keeps a dropped unit at zero, what moves it, what forbids it.

`choose` finds the rule of a node. Whatever no rule can prove exact runs on the full tensor (`Restore`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .layout import Layout, Part, dense
from .trace import Analysis, CannotSlice, Rule, describe

# f(0) = 0 element by element, so a dropped unit stays exactly zero and need not be computed.
ZERO_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Tanh,
    nn.Softsign, nn.Tanhshrink, nn.Hardshrink, nn.Softshrink, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d,
    nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
ZERO_FUNCTIONS = {
    F.relu, torch.relu, torch.relu_, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish,
    F.hardswish, F.tanh, torch.tanh, F.softsign, F.tanhshrink, F.hardshrink, F.softshrink, torch.abs, torch.neg,
    torch.square, torch.sin, torch.erf, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, operator.neg,
}  # fmt: skip
ZERO_METHODS = {
    "relu",
    "relu_",
    "tanh",
    "abs",
    "neg",
    "square",
    "contiguous",
    "clone",
    "float",
    "type_as",
    "to",
}
POOL_MODULES = {
    nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3, nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3,
    nn.AdaptiveAvgPool1d: 1, nn.AdaptiveAvgPool2d: 2, nn.AdaptiveAvgPool3d: 3, nn.AdaptiveMaxPool1d: 1,
    nn.AdaptiveMaxPool2d: 2, nn.AdaptiveMaxPool3d: 3,
}  # fmt: skip
POOL_FUNCTIONS = {
    F.max_pool1d: 1, F.max_pool2d: 2, F.max_pool3d: 3, F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3,
    torch.max_pool1d: 1, torch.max_pool2d: 2, torch.avg_pool1d: 1, torch.adaptive_avg_pool1d: 1,
    F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3, F.adaptive_max_pool1d: 1,
    F.adaptive_max_pool2d: 2, F.adaptive_max_pool3d: 3,
}  # fmt: skip


def execute(run: Any, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a node as it is written."""
    if node.op == "call_module":
        return run.call(str(node.target), args, kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


class Source(Rule):
    """The input of the network."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.out = None

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise AssertionError("inputs are given, not computed")


class Attribute(Rule):
    """A parameter, buffer or constant read by the forward itself (a position embedding, a class token)."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.place, self.name = str(node.target), None
        value = analysis.values[node.name]
        parameter = dict(analysis.model.named_parameters(remove_duplicate=False)).get(self.place)
        if parameter is None:
            return
        self.name = analysis.parameter(parameter)
        if value.ndim >= 2:
            parts = analysis.units(value.shape[-1], "parameter", self.place)
            analysis.claim(parameter, {value.ndim - 1: parts})
            self.out = layout_of(value.ndim - 1, parts)

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run.constant(self.place) if self.name is None else run.weight(self.name)


def layout_of(axis: int, parts: tuple[Part, ...]) -> Layout | None:
    """A layout, or None when nothing along the axis can be missing."""
    return None if all(p.space is None for p in parts) else Layout(axis, parts)


class Output(Rule):
    """What the network returns is always complete."""

    view = full = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        for source in node.all_input_nodes:
            if isinstance(held := analysis.layout(source), Layout):
                analysis.spaces.mark(held.parts, output=True)
                analysis.note(node, f"the result of {describe(source)} leaves the network, so it is completed")

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0]


class Restore(Rule):
    """Runs a node on full tensors: the fallback that is always right."""

    full = True

    def __init__(self, node: fx.Node, analysis: Analysis, reason: str) -> None:
        self.node = node
        if any(isinstance(analysis.layout(n), Layout | tuple) for n in node.all_input_nodes):
            analysis.note(node, reason)
        if node.op == "call_module":
            for parameter in analysis.module(node).parameters():
                analysis.claim(parameter, {})

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return execute(run, self.node, args, kwargs)


class Same(Rule):
    """Keeps every unit where it is, and zero at zero."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.node = node
        self.out = analysis.tensor_layout(node.args[0])
        module = analysis.module(node) if node.op == "call_module" else None
        name = type(module).__name__ if module else getattr(node.target, "__name__", str(node.target))
        # Dropout allocates in training only; views and in-place functions never do.
        self.view = name in ("Identity", "contiguous", "to", "float") or getattr(module, "inplace", False)

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return execute(run, self.node, args, kwargs)


class Pool(Same):
    """Works on each channel alone: a channel of zeros stays zero."""

    def __init__(self, node: fx.Node, analysis: Analysis, spatial: int) -> None:
        super().__init__(node, analysis)
        ndim = len(analysis.shape(node.args[0]))
        if self.out is not None and self.out.axis != ndim - spatial - 1:
            raise CannotSlice("it pools along the axis of the units")
        if not isinstance(analysis.values[node.name], Tensor):
            raise CannotSlice("it returns indices")


class Reshape(Rule):
    """flatten, view and reshape, judged by the shapes they had on the example."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.node = node
        before, after = analysis.shape(node.args[0]), analysis.shape(node)
        layout = analysis.tensor_layout(node.args[0])
        if layout is None:
            self.how = "as written"
            return
        axis = layout.axis
        self.axis, self.tail = axis, after[axis + 1 :]
        if after[: axis + 1] == before[: axis + 1]:
            self.how, self.out = "tail", layout
        elif after == (*before[:axis], math.prod(before[axis:])):
            self.how, self.out = "merge", layout.merged(math.prod(before[axis + 1 :]))
        elif axis == len(before) - 1 and after == (math.prod(before[:axis]), before[axis]):
            self.how, self.out = "rows", layout.moved(1)
        else:
            raise CannotSlice("the reshape mixes units with other positions")

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: Tensor = args[0]
        if self.how == "tail":
            return x.reshape(*x.shape[: self.axis + 1], *self.tail)
        if self.how == "merge":
            return x.flatten(self.axis)
        if self.how == "rows":
            return x.flatten(0, self.axis - 1)
        return execute(run, self.node, args, kwargs)


class Move(Rule):
    """transpose, permute, unsqueeze, squeeze, expand: the units change their axis, nothing else."""

    view = True
    expand = False

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.node = node
        layout = analysis.tensor_layout(node.args[0])
        if layout is None:
            return
        before, after = analysis.shape(node.args[0]), analysis.shape(node)
        # Mark each axis by a different stride and see where the units' axis went.
        probe = torch.empty_strided(before, [10**k for k in range(len(before))], device="meta")
        rest = fx.node.map_arg(node.args[1:], lambda n: analysis.values[n.name])
        keywords = fx.node.map_arg(node.kwargs, lambda n: analysis.values[n.name])
        moved = execute(None, node, (probe, *rest), keywords)
        axes = [i for i, stride in enumerate(moved.stride()) if stride == 10**layout.axis]
        if before[layout.axis] < 2 or len(axes) != 1 or after[axes[0]] != layout.length:
            raise CannotSlice("the units' axis cannot be followed")
        self.out = layout.moved(axes[0])
        self.expand = str(node.target) == "expand"

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.out is not None and self.expand:
            sizes = list(args[1]) if isinstance(args[1], tuple | list) else list(args[1:])
            sizes[self.out.axis] = -1  # the written size counts all units
            return args[0].expand(*sizes)
        return execute(run, self.node, args, kwargs)


class Reduce(Rule):
    """mean, sum, amax ... over axes that hold no units."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.node = node
        layout = analysis.tensor_layout(node.args[0])
        if layout is None:
            return
        before = analysis.shape(node.args[0])
        dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        if isinstance(dims, fx.Node) or dims is None:
            raise CannotSlice("it reduces over the units")
        gone = {int(d) % len(before) for d in (dims if isinstance(dims, tuple | list) else [dims])}  # type: ignore[call-overload]
        if layout.axis in gone:
            raise CannotSlice("it reduces over the units")
        keep = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
        moved = layout.moved(layout.axis - (0 if keep else sum(d < layout.axis for d in gone)))
        self.out = moved if isinstance(analysis.values[node.name], Tensor) else (moved, moved)

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return execute(run, self.node, args, kwargs)


class Add(Rule):
    """A sum is zero where both sides are: the two sets of units are cut together from here on."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.node = node
        a, b = node.args[:2]
        one, two = analysis.tensor_layout(a), analysis.tensor_layout(b)
        if one is None and two is None:
            return
        if one is None or two is None:
            raise CannotSlice("one side of the sum is complete, so the sum is")
        ranks = [len(analysis.shape(x)) for x in (a, b)]
        if one.axis - ranks[0] != two.axis - ranks[1]:
            raise CannotSlice("the two sides of the sum hold their units on different axes")
        analysis.tie(one, two)
        self.out = one if ranks[0] >= ranks[1] else two

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return execute(run, self.node, args, kwargs)


class Multiply(Rule):
    """A product is zero where one side is: the other side is needed for live units only."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.node = node
        self.pick: tuple[int, Layout] | None = None
        layouts = [analysis.tensor_layout(a) for a in node.args[:2]]
        if layouts == [None, None]:
            return
        tensors = [isinstance(a, fx.Node) and isinstance(analysis.values[a.name], Tensor) for a in node.args[:2]]
        divides = "div" in str(node.target)
        if divides and layouts[1] is not None:
            raise CannotSlice("it divides by the units")
        if not all(tensors):
            self.out = layouts[0] or layouts[1]
            return
        ranks = [len(analysis.shape(a)) for a in node.args[:2]]
        if layouts[0] is not None and layouts[1] is not None:
            if layouts[0].axis - ranks[0] != layouts[1].axis - ranks[1]:
                raise CannotSlice("the two factors hold their units on different axes")
            analysis.tie(layouts[0], layouts[1])
            self.out = layouts[0] if ranks[0] >= ranks[1] else layouts[1]
            return
        side = 0 if layouts[0] is not None else 1
        held = layouts[side]
        assert held is not None
        if ranks[side] < max(ranks):
            raise CannotSlice("the other factor has more axes")
        axis = held.axis - ranks[side] + ranks[1 - side]
        if axis >= 0 and analysis.shape(node.args[1 - side])[axis] == held.length:
            self.pick = (1 - side, held.moved(axis))
        if divides:
            raise CannotSlice("the divisor may be zero")
        self.out = held

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.pick is not None:
            place, layout = self.pick
            args = tuple(run.pick(a, layout) if i == place else a for i, a in enumerate(args))
        return execute(run, self.node, args, kwargs)


class Concatenate(Rule):
    """Along the units' axis the sets stand side by side; along another one they are tied."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.node = node
        tensors: Any = node.args[0]
        layouts = [analysis.tensor_layout(t) for t in tensors]
        held = [found for found in layouts if found is not None]
        if not held:
            return
        ndim = len(analysis.shape(node))
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        axis = int(dim) % ndim  # type: ignore[arg-type]
        if all(found.axis == axis for found in held):
            parts: list[Part] = []
            for tensor, found in zip(tensors, layouts, strict=True):
                parts.extend(dense(analysis.shape(tensor)[axis]) if found is None else found.parts)
            self.out = Layout(axis, tuple(parts))
            return
        if len(held) != len(layouts) or len({found.axis for found in held}) != 1:
            raise CannotSlice("only some of the tensors hold units")
        for other in held[1:]:
            analysis.tie(held[0], other)
        self.out = held[0]

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return execute(run, self.node, args, kwargs)


class Item(Rule):
    """x[:, 0] and the elements of a tuple."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.node = node
        held, index = analysis.layout(node.args[0]), node.args[1]
        if isinstance(held, tuple):
            self.out = held[index]  # type: ignore[index]
            return
        if not isinstance(held, Layout):
            return
        entries: Any = index if isinstance(index, tuple) else (index,)
        if any(not isinstance(e, int | slice) for e in entries):
            raise CannotSlice("it is indexed by a tensor, None or ...")
        if len(entries) > held.axis and entries[held.axis] != slice(None):
            raise CannotSlice("it picks some of the units by number")
        self.out = held.moved(held.axis - sum(isinstance(e, int) for e in entries[: held.axis]))

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0][args[1]]


class Field(Rule):
    """x.shape, and .values of a reduction."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.field = str(node.args[1])
        self.held = analysis.layout(node.args[0])
        if isinstance(self.held, tuple) and self.field == "values":
            self.out = self.held[0]

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.field == "shape" and isinstance(self.held, Layout):
            return full_shape(args[0], self.held)
        return getattr(args[0], self.field)


class Size(Rule):
    """x.size(): the full size, so that arithmetic in the forward sees what it would see in the dense model."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.held = analysis.tensor_layout(node.args[0])

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shape = args[0].shape if self.held is None else full_shape(args[0], self.held)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return shape if dim is None else shape[dim]


def full_shape(x: Tensor, layout: Layout) -> torch.Size:
    return torch.Size([layout.length if i == layout.axis else n for i, n in enumerate(x.shape)])


_FUNCTIONS: dict[Any, Callable[[fx.Node, Analysis], Rule]] = {
    **dict.fromkeys(ZERO_FUNCTIONS, Same),
    **dict.fromkeys((torch.flatten, torch.reshape), Reshape),
    **dict.fromkeys((torch.transpose, torch.permute, torch.unsqueeze, torch.squeeze), Move),
    **dict.fromkeys((torch.mean, torch.sum, torch.amax, torch.max), Reduce),
    **dict.fromkeys((operator.add, operator.iadd, torch.add, operator.sub, operator.isub, torch.sub), Add),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, operator.truediv, torch.div), Multiply),
    **dict.fromkeys((torch.cat, torch.concat), Concatenate),
    operator.getitem: Item,
    getattr: Field,
}
_METHODS: dict[str, Callable[[fx.Node, Analysis], Rule]] = {
    **dict.fromkeys(ZERO_METHODS, Same),
    **dict.fromkeys(("flatten", "view", "reshape"), Reshape),
    **dict.fromkeys(("transpose", "permute", "unsqueeze", "squeeze", "expand"), Move),
    **dict.fromkeys(("mean", "sum", "amax", "max"), Reduce),
    **dict.fromkeys(("add", "add_", "sub"), Add),
    **dict.fromkeys(("mul", "mul_", "div"), Multiply),
    "size": Size,
}


def _find(node: fx.Node, analysis: Analysis) -> Rule:
    from .layers import LAYERS  # rules of layers with parameters; they build on this module

    if node.op == "placeholder":
        return Source(node, analysis)
    if node.op == "get_attr":
        return Attribute(node, analysis)
    if node.op == "output":
        return Output(node, analysis)
    if node.op == "call_module":
        module = analysis.module(node)
        if type(module) in LAYERS:
            return LAYERS[type(module)](node, analysis)
        if isinstance(module, ZERO_MODULES):
            return Same(node, analysis)
        if type(module) in POOL_MODULES:
            return Pool(node, analysis, POOL_MODULES[type(module)])
        if isinstance(module, nn.Flatten):
            return Reshape(node, analysis)
        raise CannotSlice(f"{type(module).__name__} has no rule, so zeros are not known to stay zero")
    if node.op == "call_method":
        if (rule := _METHODS.get(str(node.target))) is not None:
            return rule(node, analysis)
        raise CannotSlice(f".{node.target}() has no rule, so zeros are not known to stay zero")
    if node.target in POOL_FUNCTIONS:
        return Pool(node, analysis, POOL_FUNCTIONS[node.target])
    if (function := _FUNCTIONS.get(node.target)) is not None:
        return function(node, analysis)
    raise CannotSlice(f"{getattr(node.target, '__name__', node.target)} has no rule: f(0) may differ from 0")


def choose(node: fx.Node, analysis: Analysis) -> Rule:
    """The rule of a node, or `Restore` with the reason why there is none."""
    try:
        return _find(node, analysis)
    except CannotSlice as error:
        return Restore(node, analysis, str(error))


__all__ = ["choose", "execute", "layout_of"]
