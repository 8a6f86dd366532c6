"""Two ways to run the adapted model theta * M': masked (dense, the reference) and sliced (live units only).

Both compute the same function and the same gradients; `masked` reads and computes everything and multiplies by
zero, `sliced` gathers the live part of each parameter, runs smaller layers, and scatters gradients back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pfedgate.gating.plan import BlockPlan
from pfedgate.gating.slicing.axes import Layout, Parts
from pfedgate.gating.slicing.live import Live, compensation
from pfedgate.gating.slicing.steps import Arguments, Ref, hooks_of

Fetch = Callable[[str, nn.Parameter], Tensor]  # the live entries of a parameter


def cut(parameter: Tensor, name: str, live: Live) -> Tensor:
    """The live entries of a parameter (or of anything of its shape, such as its momentum)."""
    lacking = live.axes(name)
    if lacking and not parameter.requires_grad:
        # Copying rectangles is several times faster than indexing, and needs no tensor in between.
        found = part(parameter, name, live)
        return found.clone(memory_format=torch.contiguous_format) if len(live.rectangles(name)) == 1 else found
    for axis, parts in lacking:
        index = live.index(parts, parameter.device)
        assert index is not None
        parameter = parameter.index_select(axis, index)
    return parameter


def part(values: Tensor, name: str, live: Live) -> Tensor:
    """The same of values without a gradient, and no copy where they are one rectangle: a view of them."""
    rectangles = live.rectangles(name)
    if len(rectangles) == 1:
        return values[rectangles[0][0]]
    found = values.new_empty(live.shape(name))
    for source, target in rectangles:
        found[target] = values[source]
    return found


class Program:
    """A plan's program, bound to one model: what does not change from batch to batch is looked up once."""

    def __init__(self, model: nn.Module, plan: BlockPlan, how: str) -> None:
        assert plan.network is not None and plan.network.program is not None
        self.model, self.plan, self.how = model, plan, how
        self.steps, self.constants = plan.network.program, plan.network.constants
        self.modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        # Parameters may be replaced in their modules (load_state_dict with assign), so homes are kept, not parameters.
        self.homes: dict[str, tuple[dict[str, nn.Parameter | None], str]] = {}
        for name in plan.shapes:
            place, _, local = name.rpartition(".")
            self.homes[name] = (self.modules[place]._parameters, local)
        self.modal = any(s.train != s.evaluate for s in self.steps)
        hooked = plan.network.hooked
        unhooked = {module for place, module in self.modules.items() if place not in hooked}
        self.hooks = [held for module in unhooked for held in hooks_of(module)]  # empty when the model was read
        self._adapted: dict[str, dict[str, str]] = {}
        self._together: dict[tuple[str, str], bool] = {}

    def parameter(self, name: str) -> nn.Parameter:
        """A parameter of the model, by name."""
        home, local = self.homes[name]
        found = home[local]
        assert found is not None
        return found

    def differs(self) -> bool:
        """Whether the model is no longer as it was read: hooks were added, or only some submodules are in training."""
        return any(self.hooks) or (self.modal and any(m.training != self.model.training for m in self.modules.values()))

    def adapted(self, place: str) -> dict[str, str]:
        """Names of a submodule's parameters: its own -> those of the whole model."""
        if place not in self._adapted:
            known = {id(self.parameter(name)): name for name in self.homes}
            own = self.modules[place].named_parameters()
            self._adapted[place] = {local: known[id(p)] for local, p in own}
        return self._adapted[place]

    def together(self, weight: str, bias: str | None) -> bool:
        """Whether a linear layer's rows and its bias lie in the same blocks, so that its result can be scaled."""
        key = (weight, bias or "")
        if key not in self._together:
            owners = self.plan.owners
            same = bias is None or np.array_equal(owners[weight].block, owners[bias].block)
            self._together[key] = owners[weight].axis == 0 and same
        return self._together[key]


class Sliced:
    """One forward pass on live units: the `run` that the rules talk to."""

    def __init__(self, program: Program, live: Live, weights: Tensor, fetch: Fetch) -> None:
        self.program, self.live, self.device = program, live, weights.device
        self._fetch = fetch
        self._parameters: dict[str, Tensor] = {}
        scales = live.scales(program.how, self.device)
        self._divisors, self._scales = scales.divisors, scales.of(weights)

    # -- what rules ask for
    def module(self, place: str) -> Any:
        return self.program.modules[place]

    def index(self, parts: Parts) -> Tensor | None:
        return self.live.index(parts, self.device)

    def parameter(self, name: str) -> Tensor:
        """The live entries of a parameter, not yet adapted."""
        found = self._parameters.get(name)
        if found is None:
            found = self._parameters[name] = self._fetch(name, self.program.parameter(name))
        return found

    def weight(self, name: str) -> Tensor:
        """A parameter cut to its live entries and adapted."""
        parameter = self.parameter(name)
        axis, ndim = self.program.plan.owners[name].axis or 0, parameter.ndim
        scale = self._scales[name].to(parameter.dtype)
        view = scale if ndim == 1 else scale.view([-1 if i == axis else 1 for i in range(ndim)])
        return _like_a_parameter(parameter * view)

    def optional(self, name: str | None) -> Tensor | None:
        return None if name is None else self.weight(name)

    def linear(self, x: Tensor, weight: str, bias: str | None) -> Tensor:
        """A linear layer. With fewer rows than inputs, scaling what it writes is cheaper than scaling weights."""
        w = self.parameter(weight)
        if x.numel() >= w.shape[1] * w.shape[1] or not self.program.together(weight, bias):
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
        found: Tensor = getattr(self.module(owner), name)
        return found

    def call(self, place: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any other module, with its parameters adapted."""
        module = self.module(place)
        adapted = {local: self.weight(name) for local, name in self.program.adapted(place).items()}
        return functional_call(module, adapted, args, kwargs) if adapted else module(*args, **kwargs)

    def function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of the user's."""
        return target(*args, **kwargs)

    def pick(self, x: Tensor, layout: Layout) -> Tensor:
        """Live units of a complete tensor."""
        index = self.index(layout.parts)
        return x if index is None else x.index_select(layout.axis, index)

    def restore(self, x: Tensor, layout: Layout) -> Tensor:
        """The complete tensor, zeros where units were left out."""
        index = self.index(layout.parts)
        if index is None:
            return x
        shape = [layout.length if i == layout.axis else n for i, n in enumerate(x.shape)]
        return x.new_zeros(shape).index_copy(layout.axis, index, x)

    def _restore_all(self, value: Any, layouts: Any) -> Any:
        if isinstance(layouts, Layout):
            return self.restore(value, layouts)
        if isinstance(layouts, tuple):
            return tuple(self._restore_all(v, held) for v, held in zip(value, layouts, strict=True))
        return value

    # -- the pass
    def __call__(self, x: Tensor) -> Any:
        values: list[Any] = [None] * len(self.program.steps)
        training = self.program.model.training
        values[0] = result = x
        for step in self.program.steps[1:]:
            wanted = step.train if training else step.evaluate
            if wanted.plain:
                args = tuple([values[a.slot] if type(a) is Ref else a for a in wanted.args])
                result = step.rule(self, args, wanted.kwargs)
            else:
                result = self._call(step.rule, wanted, values)
            values[step.slot] = result
            args = ()
            for slot in step.release:
                values[slot] = None
        return result

    def _call(self, rule: Any, wanted: Arguments, values: list[Any]) -> Any:
        def fill(what: Any) -> Any:
            if isinstance(what, Ref):
                value = values[what.slot]
                return value if what.layouts is None else self._restore_all(value, what.layouts)
            if isinstance(what, tuple | list):
                return type(what)(map(fill, what)) if type(what) in (tuple, list) else [fill(w) for w in what]
            if isinstance(what, dict):
                return {key: fill(value) for key, value in what.items()}
            return slice(fill(what.start), fill(what.stop), fill(what.step)) if isinstance(what, slice) else what

        return rule(self, fill(wanted.args), fill(wanted.kwargs))


def _like_a_parameter(weight: Tensor) -> Tensor:
    """Torch picks kernels by whether weights want gradients, even where none are taken: ask for the model's own."""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return weight
    return weight.requires_grad_()


def masked(model: nn.Module, plan: BlockPlan, live: Live, weights: Tensor, how: str, x: Tensor) -> Any:
    """The dense reference: every parameter times its block's M', nothing left out."""
    adapted = {}
    for name, parameter in model.named_parameters():
        axis = plan.owners[name].axis
        scale = weights.index_select(0, plan.block_index(name, weights.device))
        divisor = compensation(how, live.share_read(name))
        if divisor != 1.0:
            scale = scale / divisor
        shape = parameter.shape if axis is None else [-1 if i == axis else 1 for i in range(parameter.ndim)]
        adapted[name] = _like_a_parameter(parameter * scale.view(shape).to(parameter.dtype))
    statistics = _statistics(model)
    result = functional_call(model, {**adapted, **{name: copy for name, (copy, _, _) in statistics.items()}}, (x,))
    with torch.no_grad():
        for copy, buffer, channels in statistics.values():
            # Nothing was seen of a dropped channel, so its running statistics must not move.
            alive = torch.from_numpy(live.kept[plan.owners[channels].block]).to(buffer.device)
            buffer.copy_(torch.where(alive, copy, buffer))
    return result


def _statistics(model: nn.Module) -> dict[str, tuple[Tensor, Tensor, str]]:
    """Running statistics that a training pass will move: a copy to move, the original, the channels' parameter."""
    known = {id(p): n for n, p in model.named_parameters()}
    found = {}
    for place, module in model.named_modules():
        if not (isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training):
            continue
        if (channels := known.get(id(module.weight))) is not None:
            for local in ("running_mean", "running_var"):
                buffer = getattr(module, local)
                if buffer is not None:
                    name = f"{place}.{local}" if place else local
                    found[name] = (buffer.clone(), buffer, channels)
    return found
