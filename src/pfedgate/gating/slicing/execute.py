"""Two ways to run the adapted model theta * M': masked (dense, the reference) and sliced (live units only).

Both compute the same function and the same gradients; `masked` reads and computes everything and multiplies by
zero, `Sliced` gathers the live part of each parameter, runs smaller layers, and scatters gradients back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfedgate.gating.inputs import Given, functional, given, leaves, lend
from pfedgate.gating.plan import BlockPlan
from pfedgate.gating.slicing.axes import Layout, Segments, length
from pfedgate.gating.slicing.live import Live, compensation
from pfedgate.gating.slicing.regions import instead
from pfedgate.gating.slicing.steps import Arguments, Programmed, Ref, hooks_of

Fetch = Callable[[str, nn.Parameter], Tensor]  # the live entries of a parameter

_LARGE = 131072  # entries from which on a matrix product reads a copy faster than a part of a larger matrix


def cut(parameter: Tensor, name: str, live: Live) -> Tensor:
    """The live entries of a parameter (or of anything of its shape, such as its momentum)."""
    extent = live.extents[name]
    if extent.missing and not parameter.requires_grad:
        # Copying rectangles is several times faster than indexing, and needs no tensor in between.
        values = part(parameter, name, live)
        return values.clone(memory_format=torch.contiguous_format) if len(extent.rectangles) == 1 else values
    for axis, segments in extent.missing:
        index = live.index(segments, parameter.device)
        assert index is not None
        parameter = parameter.index_select(axis, index)
    return parameter


def part(values: Tensor, name: str, live: Live) -> Tensor:
    """The same of values without a gradient, and no copy where they are one rectangle: a view of them."""
    extent = live.extents[name]
    if len(extent.rectangles) == 1:
        return values[extent.rectangles[0][0]]
    copy = values.new_empty(extent.shape)
    for source, target in extent.rectangles:
        copy[target] = values[source]
    return copy


def fetcher(live: Live, leaves: dict[str, Tensor] | None) -> Fetch:
    """How a pass reads the live entries of theta.

    Gradients go to theta itself, or to `leaves`, which the pass then fills: tensors of their own, whose gradients have
    the size of the live part, not of the model.
    """
    if not torch.is_grad_enabled():
        return lambda name, parameter: part(parameter.detach(), name, live)
    if leaves is None:
        return lambda name, parameter: cut(parameter, name, live)

    def leaf_of(name: str, parameter: nn.Parameter) -> Tensor:
        extent, values = live.extents[name], parameter.detach()
        large = extent.size >= _LARGE and bool(extent.missing)
        leaf = leaves.get(name)
        if leaf is None:
            leaf = leaves[name] = cut(values, name, live) if large else part(values, name, live)
            leaf.requires_grad_(parameter.requires_grad)
            if leaf.requires_grad and large:
                leaf.register_post_accumulate_grad_hook(_free)  # type: ignore[no-untyped-call]
        elif large:
            leaf.data = cut(values, name, live)  # freed after the microbatch before
        return leaf.view_as(leaf) if leaf.requires_grad and large else leaf  # a graph that runs again keeps the view

    return leaf_of


def _free(leaf: Tensor) -> None:
    """A copy of live weights is not needed once its gradient is there: the optimiser steps on the parameter itself."""
    leaf.data = leaf.data.new_empty(1).expand(leaf.shape)  # the shape stays, for further gradients


class Program:
    """A plan's program, bound to one model: what does not change from batch to batch is looked up once."""

    def __init__(self, model: nn.Module, plan: BlockPlan, how: str) -> None:
        assert plan.network is not None and plan.network.parts is not None
        self.model, self.plan, self.how = model, plan, how
        self.whole, self.regions, self.rest = plan.network.program, dict(plan.network.parts), plan.network.rest
        self.regions.pop("", None)
        self.constants = plan.network.constants
        self.modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
        # Parameters may be replaced in their modules (load_state_dict with assign), so homes are stored instead.
        self.homes: dict[str, tuple[dict[str, Any], str]] = {}
        for name in plan.shapes:
            place, _, local = name.rpartition(".")
            self.homes[name] = (self.modules[place]._parameters, local)
        # Parts that do something else in evaluation.
        self.modal = [
            self.modules[place]
            for place, part in plan.network.parts.items()
            if [step.inputs for step in part.training] != [step.inputs for step in part.evaluation]
        ]
        hooked = plan.network.hooked
        read = [place for place in self.modules if self.whole is not None or _is_in(place, self.regions)]
        places = {self.modules[place]: place for place in read if place not in hooked}
        # Empty when the model was read.
        self.hooks = [(hooks, place) for module, place in places.items() for hooks in hooks_of(module)]
        self.adapted: dict[str, dict[str, str]] = {}  # names of a submodule's parameters, once it was called
        self.together: dict[tuple[str, str | None], bool] = {}  # see `lie_together`

    def changed(self) -> str | None:
        """How the model is no longer as it was read: a hook was added, or functions do not know who trains."""
        for hooks, place in self.hooks:
            if hooks:
                return f"a hook was added around {place or 'the model itself'}"
        if any(inner.training != part.training for part in self.modal for inner in part.modules()):
            return "only some of its submodules are in training, and functions such as F.dropout ask one of them"
        return None

    def adapt(self, place: str) -> dict[str, str]:
        """Names of a submodule's parameters: its own -> those of the whole model; remembered in `adapted`."""
        names = {id(home[local]): name for name, (home, local) in self.homes.items()}
        own = self.modules[place].named_parameters()
        self.adapted[place] = {local: names[id(p)] for local, p in own}
        return self.adapted[place]

    def lie_together(self, weight: str, bias: str | None) -> bool:
        """Whether a linear layer's rows and its bias lie in the same blocks, so that its result can be scaled."""
        owners = self.plan.owners
        same = bias is None or np.array_equal(owners[weight].block, owners[bias].block)
        self.together[weight, bias] = owners[weight].axis == 0 and same
        return self.together[weight, bias]


def _is_in(place: str, regions: Iterable[str]) -> bool:
    return any(f"{place}.".startswith(f"{region}.") for region in regions)


class Sliced:
    """One forward pass on live units: the `run` that the rules talk to."""

    def __init__(self, program: Program, live: Live, weights: Tensor, fetch: Fetch) -> None:
        self.program, self.live, self.device = program, live, weights.device
        self.modules: Mapping[str, Any] = program.modules
        self._fetch = fetch
        self._parameters: dict[str, Tensor] = {}
        scales = live.scales.get((program.how, self.device)) or live.scales_for(program.how, self.device)
        rows = weights.index_select(0, scales.rows)
        if scales.factor is not None:
            rows = rows * scales.factor.to(rows.dtype)
        # For each parameter, the vector that it is multiplied with along the axis of its blocks.
        vectors: tuple[Tensor, ...] = rows.split(scales.lengths)  # type: ignore[no-untyped-call]
        self._scales = dict(zip(scales.names, vectors, strict=True))
        self._divisors = scales.divisors

    # -- what rules ask for
    def index(self, segments: Segments) -> Tensor | None:
        return self.live.index(segments, self.device)

    def parameter(self, name: str) -> Tensor:
        """The live entries of a parameter, not yet adapted."""
        value: Tensor | None = self._parameters.get(name)
        if value is None:
            home, local = self.program.homes[name]
            value = self._parameters[name] = self._fetch(name, home[local])
        return value

    def weight(self, name: str) -> Tensor:
        """A parameter cut to its live entries and adapted."""
        parameter = self.parameter(name)
        axis, ndim = self.program.plan.owners[name].axis or 0, parameter.ndim
        scale = self._scales[name].to(parameter.dtype)
        if ndim != 1:
            scale = scale.view(*[1] * axis, -1, *[1] * (ndim - 1 - axis)) if ndim else scale.view([])
        return like_a_parameter(parameter * scale)

    def optional(self, name: str | None) -> Tensor | None:
        return None if name is None else self.weight(name)

    def linear(self, x: Tensor, weight: str, bias: str | None) -> Tensor:
        """A linear layer. With fewer rows than inputs, scaling what it writes is cheaper than scaling weights."""
        w = self.parameter(weight)
        together = self.program.together.get((weight, bias))
        if together is None:
            together = self.program.lie_together(weight, bias)
        if x.numel() >= w.shape[1] * w.shape[1] or not together:
            return F.linear(x, self.weight(weight), self.optional(bias))
        scale = self._scales[weight].to(w.dtype)
        if bias is None:
            return F.linear(x, w) * scale
        b, divisor = self.parameter(bias), self._divisors[weight]
        return F.linear(x, w, b if divisor == 1.0 else b * divisor) * scale

    def constant(self, place: str) -> Tensor:
        """A buffer of the model, or a tensor that the forward makes."""
        if place in self.program.constants:
            return self.program.constants[place].to(self.device)
        owner, _, name = place.rpartition(".")
        buffer: Tensor = getattr(self.modules[owner], name)
        return buffer

    def call(self, place: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any other module, with its parameters adapted."""
        module, names = self.modules[place], self.program.adapted.get(place)
        if names is None:
            names = self.program.adapt(place)
        if not names:
            return module(*args, **kwargs)
        return lend(module, {local: self.weight(name) for local, name in names.items()}, args, kwargs)

    def function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of the user's."""
        return target(*args, **kwargs)

    def pick(self, x: Tensor, layout: Layout) -> Tensor:
        """Live units of a complete tensor."""
        index = self.index(layout.segments)
        return x if index is None else x.index_select(layout.axis, index)

    def count(self, segments: Segments) -> int:
        """Number of live positions along an axis."""
        index = self.index(segments)
        return length(segments) if index is None else len(index)

    def restore(self, x: Tensor, layout: Layout) -> Tensor:
        """The complete tensor, zeros where units were left out."""
        index = self.index(layout.segments)
        if index is None:
            return x
        shape = [layout.length if i == layout.axis else n for i, n in enumerate(x.shape)]
        return x.new_full(shape, layout.fill).index_copy(layout.axis, index, x)

    # -- the pass
    def __call__(self, x: Given) -> Any:
        program = self.program
        if program.whole is not None:
            return self._run(program.whole, program.model.training, x)
        rest = {name: self.weight(name) for name in program.rest}
        forwards = {program.modules[place]: partial(self._region, place) for place in program.regions}
        with instead(forwards):
            return functional(program.model, rest, x)

    def _region(self, place: str, *args: Any, **kwargs: Any) -> Any:
        """A submodule that the model's own forward calls."""
        x = given(args, {name: value for name, value in kwargs.items() if value is not None})
        return self._run(self.program.regions[place], self.program.modules[place].training, x)

    def _run(self, part: Programmed, training: bool, x: Given) -> Any:
        inputs = leaves(x, part.keys)
        if part.sizes:
            _check_sizes(part.sizes, inputs)
        steps = part.training if training else part.evaluation
        values: list[Any] = [None] * len(steps)
        result: Any = x
        values[: len(inputs)] = inputs
        for step in steps[len(inputs) :]:
            needed = step.inputs
            if needed.plain:
                args = tuple([values[a.slot] if type(a) is Ref else a for a in needed.args])
                result = step.rule(self, args, needed.kwargs)
            else:
                result = self._call(step.rule, needed, values)
            values[step.slot] = result
            args = ()
            for slot in step.release:
                values[slot] = None
        return result

    def _call(self, rule: Any, inputs: Arguments, values: list[Any]) -> Any:
        """A step whose references lie inside lists, slices or keywords, or must be completed first."""

        def complete(value: Any, layouts: Any) -> Any:
            if isinstance(layouts, Layout):
                return self.restore(value, layouts)
            if isinstance(layouts, tuple):
                return tuple(map(complete, value, layouts))
            return value

        def fill(item: Any) -> Any:
            if isinstance(item, Ref):
                return complete(values[item.slot], item.layouts)
            if isinstance(item, tuple | list):
                return type(item)(map(fill, item)) if type(item) in (tuple, list) else [fill(one) for one in item]
            if isinstance(item, dict):
                return {key: fill(value) for key, value in item.items()}
            return slice(fill(item.start), fill(item.stop), fill(item.step)) if isinstance(item, slice) else item

        return rule(self, fill(inputs.args), fill(inputs.kwargs))


def _check_sizes(sizes: list[Any], inputs: list[Any]) -> None:
    """A captured program fits some sizes only, and does the same whatever else it is given."""
    if len(sizes) != len(inputs):
        raise ValueError(f"this model was captured with {len(sizes)} inputs, and is given {len(inputs)}")
    for expected, value in zip(sizes, inputs, strict=True):
        if not isinstance(value, Tensor):
            if expected != value:
                raise ValueError(
                    f"this model was captured with {expected!r} where it is given {value!r}: wrap it again"
                )
        elif len(expected) != value.ndim or any(a not in (None, b) for a, b in zip(expected, value.shape, strict=True)):
            shape = ", ".join("any" if size is None else str(size) for size in expected)
            raise ValueError(
                f"this model was captured for inputs of shape ({shape}), got {tuple(value.shape)}: wrap it again with "
                "an example of that shape, or set execution = 'masked'"
            )


def like_a_parameter(weight: Tensor) -> Tensor:
    """Torch picks kernels by whether weights want gradients, even where none are taken: ask for the model's own."""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return weight
    return weight.requires_grad_()


def masked(model: nn.Module, plan: BlockPlan, live: Live, weights: Tensor, how: str, x: Given) -> Any:
    """The dense reference: every parameter times its block's M', nothing left out."""
    adapted = {}
    for name, parameter in model.named_parameters():
        axis = plan.owners[name].axis
        scale = weights.index_select(0, plan.block_index(name, weights.device))
        divisor = compensation(how, live.share_read(name))
        if divisor != 1.0:
            scale = scale / divisor
        shape = parameter.shape if axis is None else [-1 if i == axis else 1 for i in range(parameter.ndim)]
        adapted[name] = like_a_parameter(parameter * scale.view(shape).to(parameter.dtype))
    # A training pass moves running statistics: it moves a copy, of which the live channels are taken over.
    names = {id(p): name for name, p in model.named_parameters()}
    statistics: dict[str, tuple[Tensor, Tensor, str]] = {}
    for place, module in model.named_modules():
        if not (isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training):
            continue
        if (channels := names.get(id(module.weight))) is not None:
            for local in ("running_mean", "running_var"):
                buffer = getattr(module, local)
                if buffer is not None:
                    statistics[f"{place}.{local}" if place else local] = (buffer.clone(), buffer, channels)
    result = functional(model, {**adapted, **{name: copy for name, (copy, _, _) in statistics.items()}}, x)
    with torch.no_grad():
        for copy, buffer, channels in statistics.values():
            # Nothing was seen of a dropped channel, so its running statistics must not move.
            alive = torch.from_numpy(live.mask[plan.owners[channels].block]).to(buffer.device)
            buffer.copy_(torch.where(alive, copy, buffer))
    return result
