"""Rules for norms (batch, layer, group, instance): exact, because scale and shift of a dropped unit go with it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pfedgate.gating.slicing.analysis import Analysis
from pfedgate.gating.slicing.functional import layer, options
from pfedgate.gating.slicing.rules.layers import input_of, layout_read, parameter_names, place_of
from pfedgate.gating.slicing.steps import CannotSlice, Rule

if TYPE_CHECKING:
    from pfedgate.gating.slicing.execute import Sliced


class NormRule(Rule):
    """Scale and shift follow the units; a subclass says along which axes it may be sliced, and computes."""

    kind = "norm"

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module = layer(node, analysis)
        self.place, self.options = place_of(node, module), options(module)
        layout = layout_read(analysis, self, self.place, input_of(node, module))
        names = parameter_names(analysis, module)
        self.weight, self.bias = names.get("weight"), names.get("bias")
        if layout is not None:
            if reason := self.misfit(module, layout.axis, len(analysis.shape(node))):
                raise CannotSlice(reason)
            analysis.spaces.mark(layout.segments, consumer=self.kind)
        self.out = layout
        self.running = [_buffer(analysis, getattr(module, name, None)) for name in ("running_mean", "running_var")]
        for parameter in (module.weight, getattr(module, "bias", None)):
            analysis.claim(parameter, {} if layout is None else {0: layout.segments})

    def misfit(self, module: Any, axis: int, ndim: int) -> str:
        """Why units along this axis of the input cannot be left out; nothing if they can."""
        raise NotImplementedError


class BatchNormRule(NormRule):
    """A dropped channel's running statistics stay untouched: nothing was seen of it."""

    def misfit(self, module: Any, axis: int, ndim: int) -> str:
        if axis != 1:
            return "the units do not lie on the channel axis"
        return "" if module.affine else "a norm without scale and shift moves zeros"

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.options or run.modules[self.place]
        weight, bias = run.optional(self.weight), run.optional(self.bias)
        index = None if self.out is None else run.index(self.out.segments)
        if self.options is not None:
            return self._function(run, args[0], weight, bias, index)
        mean, var = module.running_mean, module.running_var
        moves = module.training and mean is not None
        factor = 0.0 if module.momentum is None else module.momentum
        if moves and module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            if module.momentum is None:
                factor = 1.0 / float(module.num_batches_tracked)
        if index is not None and mean is not None:
            mean, var = mean.index_select(0, index), var.index_select(0, index)
        y = F.batch_norm(args[0], mean, var, weight, bias, module.training or mean is None, factor, module.eps)
        if index is not None and moves:
            module.running_mean.index_copy_(0, index, mean)
            module.running_var.index_copy_(0, index, var)
        return y

    def _function(
        self, run: Sliced, x: Tensor, weight: Tensor | None, bias: Tensor | None, index: Tensor | None
    ) -> Any:
        """The same for `F.batch_norm`: it counts no batches, and says itself whether it trains."""
        how = self.options
        whole = [None if name is None else run.constant(name) for name in self.running]
        mean, var = whole
        if index is not None and mean is not None and var is not None:
            mean, var = mean.index_select(0, index), var.index_select(0, index)
        y = F.batch_norm(x, mean, var, weight, bias, how.training or mean is None, how.momentum, how.eps)
        if index is not None and how.training:
            for buffer, part in zip(whole, (mean, var), strict=True):
                if buffer is not None and part is not None:
                    buffer.index_copy_(0, index, part)
        return y


class InstanceNormRule(NormRule):
    """Every channel by itself: one of zeros stays zero, and its shift is dropped with it."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        module = layer(node, analysis)
        tracks = getattr(module, "running_mean", None) is not None
        own = getattr(module, "use_input_stats", True)
        if tracks or not own:
            raise CannotSlice("an instance norm with running statistics")
        super().__init__(node, analysis)

    def misfit(self, module: Any, axis: int, ndim: int) -> str:
        ranks = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}
        fits = axis == 1 and ndim == ranks.get(type(module), ndim)
        return "" if fits else "the units do not lie on the channel axis"

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        weight, bias = run.optional(self.weight), run.optional(self.bias)
        eps = (self.options or run.modules[self.place]).eps
        return F.instance_norm(args[0], weight=weight, bias=bias, eps=eps)


def _buffer(analysis: Analysis, value: Any) -> str | None:
    """The name of a running statistic that a function was given."""
    if not isinstance(value, fx.Node):
        return None
    if analysis.attribute(value) is None:
        raise CannotSlice("its running statistics are computed")
    return str(value.target)


class LayerNormRule(NormRule):
    """Statistics over all units, of which the dropped ones are zero; then scale and shift of live ones."""

    kind = "layer norm"

    def misfit(self, module: Any, axis: int, ndim: int) -> str:
        fits = axis == ndim - 1 and module.weight is not None and len(module.normalized_shape) == 1
        return "" if fits else "its scale and shift do not match the units"

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, module = args[0], self.options or run.modules[self.place]
        weight, bias = run.optional(self.weight), run.optional(self.bias)
        if self.out is None or x.shape[-1] == self.out.length:
            return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)
        units, zeros = self.out.length, self.out.length - x.shape[-1]
        mean = x.sum(-1, keepdim=True) / units
        centred = x - mean
        var = (centred.square().sum(-1, keepdim=True) + zeros * mean.square()) / units
        y = centred * torch.rsqrt(var + module.eps)
        return _affine(y, -1, weight, bias)


class RMSNormRule(NormRule):
    """The mean of squares over all units, of which the dropped ones are zero; then the scale of live ones."""

    kind = "layer norm"

    def misfit(self, module: Any, axis: int, ndim: int) -> str:
        fits = axis == ndim - 1 and len(module.normalized_shape) == 1
        return "" if fits else "its scale does not match the units"

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, module, weight = args[0], self.options or run.modules[self.place], run.optional(self.weight)
        if self.out is None or x.shape[-1] == self.out.length:
            return F.rms_norm(x, module.normalized_shape, weight, module.eps)
        eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
        return _affine(x * torch.rsqrt(x.square().sum(-1, keepdim=True) / self.out.length + eps), -1, weight, None)


class GroupNormRule(NormRule):
    """Layer norm, within each group of channels."""

    def misfit(self, module: Any, axis: int, ndim: int) -> str:
        return "" if axis == 1 and module.weight is not None else "its scale and shift do not match the units"

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, module = args[0], self.options or run.modules[self.place]
        weight, bias = run.optional(self.weight), run.optional(self.bias)
        index = None if self.out is None else run.index(self.out.segments)
        if index is None:
            return F.group_norm(x, module.num_groups, weight, bias, module.eps)
        channels = module.num_channels // module.num_groups
        group = index // channels
        positions = math.prod(x.shape[2:])
        total = channels * positions
        zeros = total - positions * torch.bincount(group, minlength=module.num_groups)
        mean = _group_sum(x, group, module.num_groups) / total
        centred = x - _spread(mean, group, x)
        squares = _group_sum(centred.square(), group, module.num_groups)
        var = (squares + zeros * mean.square()) / total
        y = centred * _spread(torch.rsqrt(var + module.eps), group, x)
        return _affine(y, 1, weight, bias)


def _group_sum(x: Tensor, group: Tensor, groups: int) -> Tensor:
    """Sums over positions and over the channels of each group: [N, C, ...] -> [N, G]."""
    per_channel = x.flatten(2).sum(2) if x.ndim > 2 else x
    return x.new_zeros(x.shape[0], groups).index_add(1, group, per_channel)


def _spread(values: Tensor, group: Tensor, x: Tensor) -> Tensor:
    """A value per group, for every channel: [N, G] -> [N, C, 1, ...]."""
    return values.index_select(1, group).reshape(*x.shape[:2], *[1] * (x.ndim - 2))


def _affine(y: Tensor, axis: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = [-1 if i == axis % y.ndim else 1 for i in range(y.ndim)]
    if weight is not None:
        y = y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)
