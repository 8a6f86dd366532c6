"""Two ways to run the adapted model theta * M': masked (dense, the reference) and sliced (live units only).

Both compute the same function and the same gradients; `masked` reads and computes everything and multiplies by
zero, `sliced` gathers the live part of each parameter, runs smaller layers, and scatters gradients back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call

from .layout import Layout, Parts
from .plan import BlockPlan, Live

Fetch = Callable[[str, Live], Tensor]


def compensation(how: str, share: float) -> float:
    """What a weight is divided by when only `share` of its inputs are live, so that sums keep their size."""
    return {"share": share, "sqrt": math.sqrt(share), "none": 1.0}[how]


def cut(parameter: Tensor, name: str, live: Live) -> Tensor:
    """The live entries of a parameter (or of anything of its shape, such as its momentum)."""
    for axis, parts in live.axes(name):
        index = live.index(parts, parameter.device)
        assert index is not None
        parameter = parameter.index_select(axis, index)
    return parameter


def paste(parameter: Tensor, name: str, live: Live, values: Tensor) -> None:
    """Write live entries back, in place; the rest stays bit for bit what it was."""
    lacking = {axis: live.index(parts, parameter.device) for axis, parts in live.axes(name)}
    if not lacking:
        parameter.copy_(values)
    elif len(lacking) == 1:
        ((axis, index),) = lacking.items()
        assert index is not None
        parameter.index_copy_(axis, index, values)
    else:
        first, second = sorted(lacking)
        a, b = lacking[first], lacking[second]
        assert a is not None and b is not None and (first, second) == (0, 1)
        parameter[a[:, None], b] = values


class Sliced:
    """One forward pass on live units: the `run` that the rules in `rules.py` and `layers.py` talk to."""

    def __init__(self, model: nn.Module, plan: BlockPlan, live: Live, weights: Tensor, how: str, fetch: Fetch) -> None:
        self.model, self.plan, self.live, self.weights, self.how = model, plan, live, weights, how
        self._fetch, self._parameters = fetch, {}  # type: ignore[var-annotated]
        self.device = weights.device

    # -- what rules ask for
    def module(self, place: str) -> nn.Module:
        return self.model.get_submodule(place)

    def index(self, parts: Parts) -> Tensor | None:
        return self.live.index(parts, self.device)

    def parameter(self, name: str) -> Tensor:
        if name not in self._parameters:
            self._parameters[name] = self._fetch(name, self.live)
        found: Tensor = self._parameters[name]
        return found

    def scale(self, name: str, ndim: int) -> Tensor:
        """M' of each live entry along the axis that blocks are cut on, ready to be multiplied with it."""
        axis = self.plan.owners[name].axis or 0
        scale = self.weights.index_select(0, self.live.rows(name, self.device))
        divisor = compensation(self.how, self.live.share_read(name))
        if divisor != 1.0:
            scale = scale / divisor
        return scale.view([-1 if i == axis else 1 for i in range(ndim)])

    def weight(self, name: str) -> Tensor:
        """A parameter cut to its live entries and adapted."""
        parameter = self.parameter(name)
        return parameter * self.scale(name, parameter.ndim)

    def optional(self, name: str | None) -> Tensor | None:
        return None if name is None else self.weight(name)

    def linear(self, x: Tensor, weight: str, bias: str | None) -> Tensor:
        """A linear layer. With fewer rows than inputs, scaling what it writes is cheaper than scaling weights."""
        own = self.plan.owners[weight].axis == 0
        w = self.parameter(weight)
        if not own or x.numel() >= w.shape[1] * w.shape[1]:
            return F.linear(x, self.weight(weight), self.optional(bias))
        scale = self.scale(weight, 1)
        if bias is None:
            return F.linear(x, w) * scale
        divisor = compensation(self.how, self.live.share_read(weight))
        b = self.parameter(bias)
        return F.linear(x, w, b * divisor if divisor != 1.0 else b) * scale

    def constant(self, place: str) -> Tensor:
        """A buffer of the model, or a constant that the forward made."""
        owner, _, name = place.rpartition(".")
        found: Any = getattr(self.model.get_submodule(owner), name, None)
        if found is None:
            assert self.plan.network is not None
            found = self.plan.network.constants[place]
        tensor: Tensor = found
        return tensor

    def call(self, place: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any other module, with its parameters adapted."""
        module = self.module(place)
        known = {id(p): n for n, p in self.model.named_parameters()}
        adapted = {local: self.weight(known[id(p)]) for local, p in module.named_parameters()}
        return functional_call(module, adapted, args, kwargs) if adapted else module(*args, **kwargs)

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

    def restore_all(self, value: Any, layouts: Any) -> Any:
        if isinstance(layouts, Layout):
            return self.restore(value, layouts)
        if isinstance(layouts, tuple):
            return tuple(self.restore_all(v, held) for v, held in zip(value, layouts, strict=True))
        return value

    # -- the pass
    def __call__(self, x: Tensor) -> Any:
        assert self.plan.network is not None and self.plan.network.program is not None
        values: dict[str, Any] = {}
        layouts: dict[str, Any] = {}
        result, given = None, False
        for step in self.plan.network.program:
            node = step.train if self.model.training else step.evaluate
            if node.op == "placeholder":
                # Further inputs have defaults (checked when the network was analysed).
                values[node.name], given = (node.args[0] if given else x), True
                continue
            load = self._complete(values, layouts) if step.rule.full else (lambda n: values[n.name])
            args, kwargs = fx.node.map_arg(node.args, load), fx.node.map_arg(node.kwargs, load)
            result = values[node.name] = step.rule(self, args, kwargs)
            layouts[node.name] = step.rule.out
            del args, kwargs
            for name in step.release:
                del values[name]
        return result

    def _complete(self, values: dict[str, Any], layouts: dict[str, Any]) -> Callable[[fx.Node], Any]:
        return lambda node: self.restore_all(values[node.name], layouts.get(node.name))


def masked(model: nn.Module, plan: BlockPlan, live: Live, weights: Tensor, how: str, x: Tensor) -> Any:
    """The dense reference: every parameter times its block's M', nothing left out."""
    adapted = {}
    for name, parameter in model.named_parameters():
        owner = plan.owners[name]
        block = torch.from_numpy(owner.block).to(weights.device)
        scale = weights.index_select(0, block)
        divisor = compensation(how, live.share_read(name))
        if divisor != 1.0:
            scale = scale / divisor
        shape = parameter.shape if owner.axis is None else [-1 if i == owner.axis else 1 for i in range(parameter.ndim)]
        adapted[name] = parameter * scale.view(shape)
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
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.affine:
            for local in ("running_mean", "running_var"):
                buffer = getattr(module, local)
                if buffer is not None:
                    name = f"{place}.{local}" if place else local
                    found[name] = (buffer.clone(), buffer, known[id(module.weight)])
    return found
