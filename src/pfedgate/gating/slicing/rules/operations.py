"""Rules for operations without parameters: elementwise functions, pooling, sums, products, views and reductions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from pfedgate.gating.slicing.analysis import Analysis
from pfedgate.gating.slicing.axes import Layout, Segment, dense
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
        self.out = analysis.tensor_layout(node.args[0])
        module = analysis.module(node) if node.op == "call_module" else None
        name = type(module).__name__ if module is not None else getattr(node.target, "__name__", str(node.target))
        if name not in ("to", "type_as") and any(analysis.layout(n) is not None for n in node.all_input_nodes[1:]):
            raise CannotSlice("another argument than the first holds units")
        inplace = getattr(module, "inplace", False) or node.kwargs.get("inplace", False) or name.endswith("_")
        self.view = bool(inplace) or name in ("Identity", "contiguous", "detach", "to", "type_as", "float", "double")


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


class Multiply(AsWritten):
    """A product is zero where one side is: the other side is needed for live units only."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        self.pick: tuple[int, Layout] | None = None
        operands = _operands(node)
        layouts = [analysis.tensor_layout(a) for a in operands]
        if layouts == [None, None]:
            return
        tensors = [isinstance(a, fx.Node) and isinstance(analysis.values[a.name], Tensor) for a in operands]
        divides = "div" in getattr(node.target, "__name__", str(node.target))
        if divides and layouts[1] is not None:
            raise CannotSlice("it divides by the units")
        if not all(tensors):
            self.out = layouts[0] or layouts[1]
            return
        if divides:
            raise CannotSlice("the divisor may be zero")
        ranks = [len(analysis.shape(a)) for a in operands]
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
        layout = analysis.tensor_layout(node.args[0])
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
            raise CannotSlice("the reshape mixes units with other positions")

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: Tensor = args[0]
        if self.how == "merge":
            return x.flatten(self.axis)
        if self.how == "rows":
            return x.flatten(0, self.axis - 1)
        if self.how == "tail":
            sizes = list(args[1]) if isinstance(args[1], tuple | list) else list(args[1:])
            sizes[self.axis] = x.shape[self.axis]  # the written size counts all units
            return x.reshape(sizes)
        return super().__call__(run, args, kwargs)


class Move(AsWritten):
    """transpose, permute, unsqueeze, squeeze, expand: the units change their axis, nothing else."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        self.expand = str(node.target) == "expand"
        layout = analysis.tensor_layout(node.args[0])
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
        if layout.axis in gone:
            raise CannotSlice("it reduces over the units")
        keep = keyword(node, ("keepdim", "keepdims"), node.args[2] if len(node.args) > 2 else False)
        moved = layout.moved(layout.axis - (0 if keep else sum(d < layout.axis for d in gone)))
        # max and min also return where: position 0 for a dropped unit, as for any row of zeros.
        self.out = moved if isinstance(analysis.values[node.name], Tensor) else (moved, moved)


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
        entries: Any = index if isinstance(index, tuple) else (index,)
        if any(isinstance(e, bool) or not isinstance(e, int | slice) for e in entries):
            raise CannotSlice("it is indexed by a tensor, None or ...")
        if len(entries) > held.axis and entries[held.axis] != slice(None):
            raise CannotSlice("it picks some of the units by number")
        self.out = held.moved(held.axis - sum(isinstance(e, int) for e in entries[: held.axis]))

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0][args[1]]


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
            for held in flat_layouts(analysis.layout(source)):
                analysis.spaces.mark(held.segments, output=True)
                analysis.note(node, f"the result of {describe(source)} leaves the network, so it is completed")

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0]


def flat_layouts(held: Any) -> list[Layout]:
    """The layouts of a node that may return several tensors."""
    if isinstance(held, tuple):
        return [layout for one in held for layout in flat_layouts(one)]
    return [held] if isinstance(held, Layout) else []
