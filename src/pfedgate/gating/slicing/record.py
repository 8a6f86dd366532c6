"""Records one pass on live units as a plain `torch.fx.GraphModule`: torch's own layers, made smaller, and no gate.

The rules that run a network on live units (`execute.Sliced`) are called once, on stand-ins for tensors that write down
what is done to them. So there is one slicing, and what is recorded is what it does. Weights are numbers by then: cut,
and multiplied by M and by what makes up for missing inputs. Sizes of a batch stay open.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pfedgate.gating.slicing.axes import Layout, Parts
from pfedgate.gating.slicing.execute import Program, Sliced, cut
from pfedgate.gating.slicing.live import Live
from pfedgate.gating.slicing.plain import LAYERS, RECURRENT
from pfedgate.gating.slicing.steps import Layouts


class CannotCompact(ValueError):
    """A model of which no plain module can be made; says where and why."""


class Known(fx.Proxy):
    """Stands for a value of the pass, and knows what it was on the example."""

    tracer: _Tracer

    def __init__(self, node: fx.Node, tracer: _Tracer) -> None:
        super().__init__(node, tracer)
        self.value: Any = None
        self.units: int | None = None  # the axis whose size is given by the selection, not by the batch
        self._sizes: dict[int, Any] = {}

    @property
    def ndim(self) -> int:
        return int(self.value.ndim)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.value.dtype
        return found

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


class _Tracer(fx.Tracer):
    """Writes a graph, and runs every step of it on the example."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.place = ""  # the step that is being recorded
        self.held: dict[str, Any] = {}  # layers, parameters and buffers of the module to be, by name
        self.names: dict[int, str] = {}  # what a tensor is called, by where its numbers lie
        self.kept: list[Tensor] = []  # those tensors, so that nothing else comes to lie there
        self.parameters: dict[str, nn.Parameter] = {}
        self._attributes: dict[tuple[int, torch.Size], str] = {}
        self._made: dict[Any, str] = {}

    # -- names for tensors
    def name(self, tensor: Tensor, name: str) -> Tensor:
        """From now on this tensor, and any view of all of it, has a name."""
        if tensor.data_ptr() not in self.names:
            self.names[tensor.data_ptr()] = name
            self.kept.append(tensor)
        return tensor

    def parameter(self, tensor: Tensor) -> nn.Parameter | None:
        """The parameter of these numbers; None for what is not a parameter of the model."""
        name = self.names.get(tensor.data_ptr(), "")
        found = self.parameters.get(name)
        if found is None or found.shape == tensor.shape:
            return found
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
        while self.held.setdefault(free, what) is not what:
            free, number = f"{name}_{number}", number + 1
        return free

    # -- what torch.fx asks
    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            return self.create_node("get_attr", self.attribute(a), (), {})
        return super().create_arg(a)

    def proxy(self, node: fx.Node) -> Known:
        return Known(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        # Asked by rules only, and only about what the selection decides.
        return bool(_value(obj))

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> Any:
        if kind == "call_function" and target in LAYERS and (place := self._layer(target, args, kwargs)):
            made = self.create_proxy("call_module", place, args[:1], {})
            return _like_the_function(made) if target in RECURRENT else made
        found = super().create_proxy(kind, target, args, kwargs, *more, **options)
        assert isinstance(found, Known)
        if kind == "get_attr":
            found.value = self.held[target]
        elif kind != "placeholder":
            found.value = self._run(kind, target, *(fx.node.map_aggregate(a, _value) for a in (args, kwargs)))
        return found

    def _run(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        if kind == "call_module":
            return self.held[target](*args, **kwargs)
        if kind == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

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
        if key not in self._made:
            layer, numbers = LAYERS[function](_value(args[0]), *args[1:], **kwargs)
            for local, tensor in numbers.items():
                held = self.parameter(tensor)
                setattr(layer, local, tensor.detach().clone() if held is None else held)
            self._made[key] = self.hold(self._home(tensors[0]), layer.eval())
        return self._made[key]

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
    """What a stand-in stands for."""
    if isinstance(what, Known):
        return what.value
    return getattr(_value(what.root), what.attr) if isinstance(what, fx.proxy.Attribute) else what


def _like_the_function(made: Known) -> tuple[Any, ...]:
    """torch.lstm returns y, h, c where nn.LSTM returns y, (h, c)."""
    states = made[1]
    return (made[0], *(states if isinstance(states.value, tuple) else (states,)))


class Recorder(Sliced):
    """A pass on live units that is written down."""

    def __init__(self, program: Program, live: Live, weights: Tensor) -> None:
        super().__init__(program, live, weights, lambda name, parameter: cut(parameter.detach(), name, live))
        self.tracer = _Tracer()
        self._weights: dict[str, Tensor] = {}
        self._homes: dict[Parts, Tensor] = {}
        self._called: dict[str, str] = {}

    # -- what rules ask for
    def weight(self, name: str) -> Tensor:
        if name not in self._weights:
            found = self._weights[name] = super().weight(name).detach()
            self.tracer.parameters[name] = nn.Parameter(found)
            self.tracer.name(found, name)
        return self._weights[name]

    def linear(self, x: Tensor, weight: str, bias: str | None) -> Tensor:
        return F.linear(x, self.weight(weight), self.optional(bias))

    def constant(self, place: str) -> Tensor:
        # At the top of the module to be: below a layer, it could be taken for what the layer has itself.
        return self.tracer.name(super().constant(place), place.replace(".", "_"))

    def index(self, parts: Parts) -> Tensor | None:
        found = super().index(parts)
        return None if found is None else self.tracer.name(found, "live")

    def call(self, place: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if place not in self._called:
            twin = copy.deepcopy(self.module(place)).eval()
            for local, name in self.program.adapted(place).items():
                inner, _, last = local.rpartition(".")
                setattr(twin.get_submodule(inner), last, self.tracer.parameter(self.weight(name)))
            self._called[place] = self.tracer.hold(place, twin)
        return self.tracer.create_proxy("call_module", self._called[place], args, kwargs)

    def function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.tracer.create_proxy("call_function", target, args, kwargs)

    def restore(self, x: Any, layout: Layout) -> Any:
        """The complete tensor: every unit from its place among the live ones, or from a zero behind them."""
        index = self.index(layout.parts)
        if index is None:
            return x
        if layout.parts not in self._homes:
            home = torch.full((layout.length,), len(index), device=index.device)
            home[index] = torch.arange(len(index), device=index.device)
            self._homes[layout.parts] = self.tracer.name(home, "complete")
        behind = [0, 0] * (x.ndim - 1 - layout.axis) + [0, 1]
        return F.pad(x, behind).index_select(layout.axis, self._homes[layout.parts])

    # -- the pass
    def record(self, example: Tensor, shift: Tensor | None) -> fx.GraphModule:
        """The module; `shift` is added to what it returns."""
        tracer, steps = self.tracer, self.program.steps
        values: list[Any] = [None] * len(steps)
        values[0] = tracer.create_proxy("placeholder", "x", (), {})
        values[0].value = example.clone()
        result: Any = values[0]
        asked: set[fx.Node] = set()  # may change a tensor that is read elsewhere, so they stay
        for step in steps[1:]:
            tracer.place = step.place
            try:
                result = self._known(self._call(step.rule, step.evaluate, values), step.rule.out)
            except Exception as error:  # whatever torch or a user's function says to a stand-in
                first = (str(error).splitlines() or [type(error).__name__])[0]
                raise CannotCompact(f"{step.place} cannot be made part of a plain module: {first}") from error
            values[step.slot] = result
            asked.update([result.node] if isinstance(result, Known) else [])
        if shift is not None:
            result = result + tracer.name(shift.detach().clone(), "shift")
        tracer.create_node("output", "output", (tracer.create_arg(result),), {})
        for node in reversed(tracer.graph.nodes):
            if not node.users and node.op not in ("placeholder", "output") and node not in asked:
                tracer.graph.erase_node(node)
        return fx.GraphModule(tracer.held, tracer.graph, class_name="Compact").eval()

    def _known(self, result: Any, layouts: Layouts) -> Any:
        """A step's result as stand-ins that know the axis of their units."""
        tracer = self.tracer
        if isinstance(result, Tensor):
            return self._known(tracer.create_proxy("get_attr", tracer.attribute(result), (), {}), layouts)
        if isinstance(result, fx.proxy.Attribute):
            result = tracer.create_proxy("call_function", getattr, (result.root, result.attr), {})
        if isinstance(layouts, Layout) and isinstance(result, Known):
            result.units = layouts.axis
        elif isinstance(layouts, tuple) and isinstance(result, tuple):
            return tuple(self._known(one, held) for one, held in zip(result, layouts, strict=True))
        return result
