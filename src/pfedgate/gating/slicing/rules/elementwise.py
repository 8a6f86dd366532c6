"""Rules for elementwise functions, pooling, sums, products and concatenation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from pfedgate.gating.slicing.analysis import Analysis
from pfedgate.gating.slicing.axes import Layout, Part, dense
from pfedgate.gating.slicing.steps import CannotSlice, Rule, Run, as_written


class AsWritten(Rule):
    """Runs on live units exactly as it would on all."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.run = as_written(node)

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run(run, args, kwargs)


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


class Pool(AsWritten):
    """Works on each channel alone: a channel of zeros stays zero."""

    def __init__(self, node: fx.Node, analysis: Analysis, spatial: int) -> None:
        super().__init__(node, analysis)
        self.out = analysis.tensor_layout(node.args[0])
        if not isinstance(analysis.values[node.name], Tensor):
            raise CannotSlice("it returns indices")
        if self.out is not None and self.out.axis != len(analysis.shape(node.args[0])) - spatial - 1:
            raise CannotSlice("it pools along the axis of the units")

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        y: Tensor = self.run(run, args, kwargs)
        last = y.ndim == 4 and y.is_contiguous(memory_format=torch.channels_last) and not y.is_contiguous()
        if last and y.requires_grad and not torch._C._are_functorch_transforms_active():
            y.register_hook(_channels_last)  # type: ignore[no-untyped-call]
        return y


def _channels_last(gradient: Tensor) -> Tensor:
    """In another layout, as flattening gives it, torch would copy what is pooled and its indices to work on them."""
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

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.pick is not None:
            place, layout = self.pick
            args = tuple(run.pick(a, layout) if i == place else a for i, a in enumerate(args))
        return self.run(run, args, kwargs)


class Concatenate(AsWritten):
    """Along the units' axis the sets stand side by side; along another one they are tied."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        super().__init__(node, analysis)
        tensors: Any = node.args[0]
        if not isinstance(tensors, list | tuple):
            raise CannotSlice("it joins a list that is not written out")
        layouts = [analysis.tensor_layout(t) for t in tensors]
        held = [found for found in layouts if found is not None]
        if not held:
            return
        dim: Any = keyword(node, ("dim", "axis"), node.args[1] if len(node.args) > 1 else 0)
        if not isinstance(dim, int):
            raise CannotSlice("the axis it joins along is computed")
        axis = dim % len(analysis.shape(node))
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


def keyword(node: fx.Node, names: tuple[str, ...], default: Any) -> Any:
    """An argument that has several names (torch's and numpy's)."""
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


def _operands(node: fx.Node) -> tuple[Any, Any]:
    if len(node.args) < 2:
        raise CannotSlice("an operand is given by keyword")
    return node.args[0], node.args[1]
