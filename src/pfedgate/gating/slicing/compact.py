"""`compact(gated, data)`: one fixed selection of a gated model as a small plain module, for other runtimes.

The rules that run a network on live units (`execute.Sliced`) are called once, on stand-ins for tensors that write down
every operation as a plain `torch.fx.GraphModule`: torch's own layers, made smaller, and no gate. So there is one
slicing, and the module does what it does. Weights are numbers by then: cut, and multiplied by M and by what makes up
for missing inputs. Sizes of a batch stay open.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from pfedgate.gating.gate.network import GateOutput
from pfedgate.gating.inputs import Given, Inputs, leaves
from pfedgate.gating.model import GatedModel
from pfedgate.gating.slicing.axes import Layout, Segments
from pfedgate.gating.slicing.execute import Program, Sliced, cut
from pfedgate.gating.slicing.live import Live, Selection
from pfedgate.gating.slicing.steps import Layouts
from pfedgate.gating.slicing.trace import first_line, mode, quiet

_EXAMPLE = 8  # samples that a pass is recorded on


class CannotCompact(ValueError):
    """A model of which no plain module can be made; says where and why."""


def compact(model: nn.Module, data: Tensor | Iterable[Tensor] | Selection | None = None) -> fx.GraphModule:
    """A plain module without a gate: the live parts of a gated model under one selection, as smaller torch layers.

    `model` is a gated model or a client's predictor. `data` says what the gate decides on, once and for all: a batch,
    the batches of a client (M and G are averaged over them), a selection such as `gated.last`, or nothing for a gate
    with scope "client", which remembers its client. Give training data, not the data to predict.

    What comes back is in evaluation mode, keeps the names of your own module's parameters, and holds no code of this
    library: it can be trained on, saved, and given to `torch.export` or ONNX. A place that cannot be written down is
    an error (`CannotCompact`) that names it.

    >>> import pfedgate, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    >>> x = torch.randn(8, 64)
    >>> gated = pfedgate.gate(model, x, budget=0.3).eval()
    >>> small = pfedgate.compact(gated, x)
    >>> type(small.get_submodule("0")), sum(p.numel() for p in small.parameters()) <= 0.3 * 7510
    (<class 'torch.nn.modules.linear.Linear'>, True)
    >>> torch.allclose(small(x), gated(x), atol=1e-5)
    True
    """
    gated = getattr(model, "gated", model)
    if not isinstance(gated, GatedModel):
        raise TypeError(f"compact() takes a gated model (pfedgate.gate) or a client's, got {type(model).__name__}")
    if not gated.plan.sliceable:
        raise CannotCompact(f"there is no smaller module of this model: {gated.explain()}. Use split='unit'")
    device = next(gated.model.parameters()).device
    with torch.inference_mode(False), torch.no_grad(), quiet(device), mode(gated, training=False):
        selection, example = _selection(gated, data)
        program = Program(gated.model, gated.plan, gated.compensate)
        small = Transcription(program, selection.live, selection.adapted).record(example, selection.shift)
        _check(small, program, selection, example)
    return small


def _selection(gated: GatedModel, data: Tensor | Iterable[Tensor] | Selection | None) -> tuple[Selection, Given]:
    """The one selection, and a batch to record a pass on."""
    if isinstance(data, Selection):
        return data, gated.plan.wiring.batch(gated.model)[:_EXAMPLE]
    if data is None:
        if (scope := gated.gate.config.scope) != "client":
            raise ValueError(f"this gate decides for each {scope}: give a batch, the client's batches, or a selection")
        decision = gated.gate.decide(gated.gate.remembered())
        return gated.choose(decision), gated.plan.wiring.batch(gated.model)[:_EXAMPLE]
    decisions: list[tuple[GateOutput, int]] = []
    example: Given | None = None
    for batch in [data] if isinstance(data, Tensor | Inputs) else data:
        example = batch[:_EXAMPLE] if example is None else example
        decisions.append((gated.gate(gated.read(batch)), len(batch)))
    if example is None:
        raise ValueError("no batches: give at least one")
    total = sum(n for _, n in decisions)

    def mean(values: Iterable[Tensor]) -> Tensor:
        return torch.stack([value * (n / total) for value, (_, n) in zip(values, decisions, strict=True)]).sum(0)

    shifts = [out.shift for out, _ in decisions if out.shift is not None]
    weights, importance = mean(out.weights for out, _ in decisions), mean(out.importance for out, _ in decisions)
    return gated.choose(GateOutput(weights, importance, mean(shifts) if shifts else None)), example


def _check(small: nn.Module, program: Program, selection: Selection, example: Given) -> None:
    """The module gives the result of the gated model: else it must not leave this place."""
    live = selection.live
    results: Any = Sliced(program, live, selection.adapted, lambda name, p: cut(p, name, live))(example.clone())
    results = results if selection.shift is None else results + selection.shift
    assert program.whole is not None
    for a, b in zip(_tensors(small(*leaves(example.clone(), program.whole.keys))), _tensors(results), strict=True):
        if not b.is_floating_point() or not bool(b.isfinite().all()):
            close = torch.allclose(a, b, equal_nan=True)
        else:
            close = bool((a - b).norm() <= torch.finfo(b.dtype).eps ** 0.5 * b.norm())
        if not close:
            raise CannotCompact(
                "the compact module gives another result than the gated model: please report this model as a bug"
            )


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


class StandIn(fx.Proxy):
    """Stands for a value of the pass, and holds its value on the example."""

    tracer: _Transcript

    def __init__(self, node: fx.Node, tracer: _Transcript) -> None:
        super().__init__(node, tracer)
        self.value: Any = None
        self.units: int | None = None  # the axis whose size is given by the selection, not by the batch
        self._sizes: dict[int, Any] = {}

    @property
    def ndim(self) -> int:
        return int(self.value.ndim)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.value.dtype
        return dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes: a number for the axis of the units, else a stand-in, so that other batches fit as well."""
        return tuple(self._size(axis) for axis in range(self.value.ndim))

    def _size(self, axis: int) -> Any:
        if axis == self.units:
            return self.value.shape[axis]
        if axis not in self._sizes:
            self._sizes[axis] = self.tracer.create_proxy("call_method", "size", (self, axis), {})
        return self._sizes[axis]

    def __getitem__(self, key: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.getitem, (self, key), {})

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self.value))])


class _Transcript(fx.Tracer):
    """Writes a graph, and runs every step of it on the example."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.place = ""  # the step that is being recorded
        self.contents: dict[str, Any] = {}  # layers, parameters and buffers of the module to be, by name
        self.names: dict[int, str] = {}  # the name of a tensor, by where its numbers lie
        self.named: list[Tensor] = []  # those tensors, so that nothing else comes to lie there
        self.parameters: dict[str, nn.Parameter] = {}
        self._attributes: dict[tuple[int, torch.Size], str] = {}
        self._layers: dict[Any, str] = {}

    # -- names for tensors
    def name(self, tensor: Tensor, name: str) -> Tensor:
        """From now on this tensor, and any view of all of it, has a name."""
        if tensor.data_ptr() not in self.names:
            self.names[tensor.data_ptr()] = name
            self.named.append(tensor)
        return tensor

    def parameter(self, tensor: Tensor) -> nn.Parameter | None:
        """The parameter of these numbers; None for other tensors."""
        name = self.names.get(tensor.data_ptr(), "")
        parameter = self.parameters.get(name)
        if parameter is None or parameter.shape == tensor.shape:
            return parameter
        return self.parameters.setdefault(f"{name}/{tuple(tensor.shape)}", nn.Parameter(tensor.detach()))

    def attribute(self, tensor: Tensor) -> str:
        """The attribute of the module to be that holds a tensor."""
        key = (tensor.data_ptr(), tensor.shape)
        if key not in self._attributes:
            name = self.names.get(tensor.data_ptr(), "constant")
            own = self.parameter(tensor)
            self._attributes[key] = self.hold(name, self.name(tensor, name).detach().clone() if own is None else own)
        return self._attributes[key]

    def hold(self, name: str, what: Any) -> str:
        """Keep something under this name, or under one like it if that is taken."""
        free, number = name, 2
        while self.contents.setdefault(free, what) is not what:
            free, number = f"{name}_{number}", number + 1
        return free

    # -- what torch.fx asks
    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            return self.create_node("get_attr", self.attribute(a), (), {})
        return super().create_arg(a)

    def proxy(self, node: fx.Node) -> StandIn:
        return StandIn(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        # Asked by rules only, and only about what the selection decides.
        return bool(_value(obj))

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> Any:
        if kind == "call_function" and target in LAYERS and (place := self._layer(target, args, kwargs)):
            result = self.create_proxy("call_module", place, args[:1], {})
            if target not in RECURRENT:
                return result
            states = result[1]  # torch.lstm returns y, h, c where nn.LSTM returns y, (h, c)
            return (result[0], *(states if isinstance(states.value, tuple) else (states,)))
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **options)
        assert isinstance(proxy, StandIn)
        inputs: Any = fx.node.map_aggregate(args, _value)
        keywords: Any = fx.node.map_aggregate(kwargs, _value)
        if kind == "get_attr":
            proxy.value = self.contents[target]
        elif kind == "call_module":
            proxy.value = self.contents[target](*inputs, **keywords)
        elif kind == "call_method":
            proxy.value = getattr(inputs[0], target)(*inputs[1:], **keywords)
        elif kind != "placeholder":
            proxy.value = target(*inputs, **keywords)
        return proxy

    # -- layers
    def _layer(self, function: Any, args: Any, kwargs: Any) -> str | None:
        """The layer that does what a function does with these weights; None where its weights are no numbers."""
        rest = (*args[2:], kwargs) if function in RECURRENT else (*args[1:], kwargs)
        leaves: list[Any] = []
        fx.node.map_aggregate(rest, leaves.append)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return None
        plain = [repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
        # Weights have names; what else is in a layer (running statistics) is given by its place.
        key = (function, self.place, *(self.names.get(tensor.data_ptr()) for tensor in tensors), *plain)
        if key not in self._layers:
            layer, numbers = LAYERS[function](_value(args[0]), *args[1:], **kwargs)
            for local, tensor in numbers.items():
                parameter = self.parameter(tensor)
                setattr(layer, local, tensor.detach().clone() if parameter is None else parameter)
            self._layers[key] = self.hold(self._home(tensors[0]), layer.eval())
        return self._layers[key]

    def _home(self, weight: Tensor) -> str:
        """Where a layer goes: to its old place, or below it if one layer became several.

        attend.out_proj.weight -> attend.out_proj, attend.in_proj_weight -> attend.in_proj, rnn.weight_ih_l1 -> rnn.l1
        """
        place, _, local = self.names.get(weight.data_ptr(), "").rpartition(".")
        if not f"{place}.".startswith(f"{self.place}."):
            return self.place  # a weight that it shares with another layer
        part = local.replace("weight", "").replace("_ih", "").strip("_")
        return f"{place}.{part}" if part and part not in ("running_mean", "bias") else place


def _value(what: Any) -> Any:
    """The value that a stand-in stands for."""
    if isinstance(what, StandIn):
        return what.value
    return getattr(_value(what.root), what.attr) if isinstance(what, fx.proxy.Attribute) else what


class Transcription(Sliced):
    """A pass on live units that is written down."""

    def __init__(self, program: Program, live: Live, weights: Tensor) -> None:
        super().__init__(program, live, weights, lambda name, parameter: cut(parameter.detach(), name, live))
        self.tracer = _Transcript()
        self._weights: dict[str, Tensor] = {}
        self._homes: dict[Segments, Tensor] = {}
        self._called: dict[str, str] = {}

    # -- what rules ask for
    def weight(self, name: str) -> Tensor:
        if name not in self._weights:
            weight = self._weights[name] = super().weight(name).detach()
            self.tracer.parameters[name] = nn.Parameter(weight)
            self.tracer.name(weight, name)
        return self._weights[name]

    def linear(self, x: Tensor, weight: str, bias: str | None) -> Tensor:
        return F.linear(x, self.weight(weight), self.optional(bias))

    def constant(self, place: str) -> Tensor:
        # At the top of the module to be: below a layer, it could be taken for what the layer has itself.
        return self.tracer.name(super().constant(place), place.replace(".", "_"))

    def index(self, segments: Segments) -> Tensor | None:
        index = super().index(segments)
        return None if index is None else self.tracer.name(index, "live")

    def call(self, place: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if place not in self._called:
            twin = copy.deepcopy(self.modules[place]).eval()
            for local, name in (self.program.adapted.get(place) or self.program.adapt(place)).items():
                inner, _, last = local.rpartition(".")
                setattr(twin.get_submodule(inner), last, self.tracer.parameter(self.weight(name)))
            self._called[place] = self.tracer.hold(place, twin)
        return self.tracer.create_proxy("call_module", self._called[place], args, kwargs)

    def function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.tracer.create_proxy("call_function", target, args, kwargs)

    def restore(self, x: Any, layout: Layout) -> Any:
        """The complete tensor: every unit from its place among the live ones, or from a zero behind them."""
        index = self.index(layout.segments)
        if index is None:
            return x
        if layout.segments not in self._homes:
            home = torch.full((layout.length,), len(index), device=index.device)
            home[index] = torch.arange(len(index), device=index.device)
            self._homes[layout.segments] = self.tracer.name(home, "complete")
        behind = [0, 0] * (x.ndim - 1 - layout.axis) + [0, 1]
        return F.pad(x, behind, value=layout.fill).index_select(layout.axis, self._homes[layout.segments])

    # -- the pass
    def record(self, example: Given, shift: Tensor | None) -> fx.GraphModule:
        """The module; `shift` is added to what it returns."""
        tracer, whole = self.tracer, self.program.whole
        if whole is None:
            raise CannotCompact("its forward as a whole cannot be followed, only regions of it: see explain()")
        steps = whole.evaluation
        values: list[Any] = [None] * len(steps)
        inputs = leaves(example.clone(), whole.keys)
        names = ["x"] if len(inputs) == 1 else [step.place.partition(" ")[0] for step in steps[: len(inputs)]]
        for slot, (name, value) in enumerate(zip(names, inputs, strict=True)):
            values[slot] = tracer.create_proxy("placeholder", name, (), {})
            values[slot].value = value
        result: Any = values[0]
        asked: set[fx.Node] = set()  # may change a tensor that is read elsewhere, so they stay
        for step in steps[len(inputs) :]:
            tracer.place = step.place
            try:
                result = self._stand_in(self._call(step.rule, step.inputs, values), step.rule.out)
            except Exception as error:  # whatever torch or a user's function says to a stand-in
                reason = first_line(error)
                raise CannotCompact(f"{step.place} cannot be made part of a plain module: {reason}") from error
            values[step.slot] = result
            asked.update([result.node] if isinstance(result, StandIn) else [])
        if shift is not None:
            result = result + tracer.name(shift.detach().clone(), "shift")
        tracer.create_node("output", "output", (tracer.create_arg(result),), {})
        for node in reversed(tracer.graph.nodes):
            if not node.users and node.op not in ("placeholder", "output") and node not in asked:
                tracer.graph.erase_node(node)
        return fx.GraphModule(tracer.contents, tracer.graph, class_name="Compact").eval()

    def _stand_in(self, result: Any, layouts: Layouts) -> Any:
        """A step's result as stand-ins that know the axis of their units."""
        tracer = self.tracer
        if isinstance(result, Tensor):
            return self._stand_in(tracer.create_proxy("get_attr", tracer.attribute(result), (), {}), layouts)
        if isinstance(result, fx.proxy.Attribute):
            result = tracer.create_proxy("call_function", getattr, (result.root, result.attr), {})
        if isinstance(layouts, Layout) and isinstance(result, StandIn):
            result.units = layouts.axis
        elif isinstance(layouts, tuple) and isinstance(result, tuple):
            return tuple(self._stand_in(one, layout) for one, layout in zip(result, layouts, strict=True))
        return result


# Torch's functions with fixed weights as torch's own layers: `F.linear(x, w, b)` is an `nn.Linear` that holds w and b.
# Each entry of `LAYERS` takes the arguments of a function and returns the layer, still without numbers, and the tensors
# that belong into it by their names.
Layered = tuple[nn.Module, dict[str, Tensor]]

_CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS: dict[int, Any] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def _linear(x: Any, weight: Tensor, bias: Tensor | None = None) -> Layered:
    wide, high = weight.shape[1], weight.shape[0]
    return nn.Linear(wide, high, bias is not None, device="meta"), _given(weight=weight, bias=bias)


def _convolution(
    x: Any, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Layered:
    layer = _CONVOLUTIONS[weight.ndim - 3](
        weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]), stride, padding, dilation, groups,
        bias is not None, device="meta",
    )  # fmt: skip
    return layer, _given(weight=weight, bias=bias)


def _batch_norm(
    x: Any,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Layered:
    layer = _BATCH_NORMS[x.ndim](x.shape[1], eps, momentum, weight is not None, mean is not None, device="meta")
    seen = {} if mean is None else {"num_batches_tracked": torch.zeros((), dtype=torch.long, device=mean.device)}
    return layer, _given(weight=weight, bias=bias, running_mean=mean, running_var=var) | seen


def _layer_norm(x: Any, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Layered:
    layer = nn.LayerNorm(list(shape), eps, weight is not None, bias is not None, device="meta")
    return layer, _given(weight=weight, bias=bias)


def _group_norm(x: Any, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Layered:
    channels = x.shape[1] if weight is None else weight.shape[0]
    return nn.GroupNorm(groups, channels, eps, weight is not None, device="meta"), _given(weight=weight, bias=bias)


def _embedding(x: Any, weight: Tensor, padding_idx: int | None = None, **options: Any) -> Layered:
    layer = nn.Embedding(weight.shape[0], weight.shape[1], padding_idx, device="meta", **options)
    return layer, _given(weight=weight)


def _prelu(x: Any, weight: Tensor) -> Layered:
    return nn.PReLU(weight.numel(), device="meta"), _given(weight=weight)


def _recurrent(kind: Any, **options: Any) -> Callable[..., Layered]:
    def build(
        x: Any, start: Any, weights: Sequence[Tensor], bias: bool, layers: int, dropout: float, training: bool,
        both: bool, first: bool,
    ) -> Layered:  # fmt: skip
        layer = kind(
            weights[0].shape[1], weights[1].shape[1], layers, bias=bias, batch_first=first, bidirectional=both,
            device="meta", **options,
        )  # fmt: skip
        names = [name for per_direction in layer._all_weights for name in per_direction]
        return layer, dict(zip(names, weights, strict=True))

    return build


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


RECURRENT: dict[Any, Callable[..., Layered]] = {
    torch.lstm: _recurrent(nn.LSTM),
    torch.gru: _recurrent(nn.GRU),
    torch.rnn_tanh: _recurrent(nn.RNN),
    torch.rnn_relu: _recurrent(nn.RNN, nonlinearity="relu"),
}
LAYERS: dict[Any, Callable[..., Layered]] = {
    F.linear: _linear,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.embedding: _embedding,
    F.prelu: _prelu,
    **RECURRENT,
}
