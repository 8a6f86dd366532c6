"""Rules for views, reductions, indexing, and questions about shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from pfedgate.gating.slicing.analysis import Analysis
from pfedgate.gating.slicing.axes import Layout
from pfedgate.gating.slicing.rules.elementwise import AsWritten, keyword
from pfedgate.gating.slicing.steps import CannotSlice, Rule, Run, as_written

# Any product of one of these with a size differs from all others: strides tell axes apart.
_STRIDES = (1_000_003, 1_000_033, 1_000_037, 1_000_039, 1_000_081, 1_000_099, 1_000_117)


class Reshape(Rule):
    """flatten, view and reshape, judged by the shapes they had on the example."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.run: Callable[..., Any] = as_written(node)
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

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: Tensor = args[0]
        if self.how == "merge":
            return x.flatten(self.axis)
        if self.how == "rows":
            return x.flatten(0, self.axis - 1)
        if self.how == "tail":
            sizes = list(args[1]) if isinstance(args[1], tuple | list) else list(args[1:])
            sizes[self.axis] = x.shape[self.axis]  # the written size counts all units
            return x.reshape(sizes)
        return self.run(run, args, kwargs)


class Move(Rule):
    """transpose, permute, unsqueeze, squeeze, expand: the units change their axis, nothing else."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.run = as_written(node)
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
        moved = as_written(node)(None, (probe, *rest), keywords)  # type: ignore[arg-type]
        axes = [i for i, stride in enumerate(moved.stride()) if stride == _STRIDES[layout.axis]]
        if len(axes) != 1 or after[axes[0]] != layout.length:
            raise CannotSlice("the units' axis cannot be followed")
        self.out = layout.moved(axes[0])

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.out is not None and self.expand:
            sizes = list(args[1]) if isinstance(args[1], tuple | list) else list(args[1:])
            sizes[self.out.axis] = -1  # the written size counts all units
            return args[0].expand(*sizes)
        return self.run(run, args, kwargs)


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

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.field == "shape" and isinstance(self.held, Layout):
            return full_shape(args[0], self.held)
        return getattr(args[0], self.field)


class Size(Rule):
    """x.size(): the full size, so that arithmetic in the forward sees what it would see in the dense model."""

    view = True

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.held = analysis.tensor_layout(node.args[0])
        self.rank = str(node.target) == "dim"

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.rank:
            return args[0].dim()
        shape = args[0].shape if self.held is None else full_shape(args[0], self.held)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return shape if dim is None else shape[dim]


def full_shape(x: Tensor, layout: Layout) -> torch.Size:
    """The shape that the tensor would have with all units."""
    # Of the same type: while a pass is recorded, sizes are not numbers (see `record.py`).
    return type(x.shape)([layout.length if i == layout.axis else n for i, n in enumerate(x.shape)])
