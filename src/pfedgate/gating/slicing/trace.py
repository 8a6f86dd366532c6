"""Reads a network's graph and finds what can be left out without changing the result.

`torch.fx` follows a forward with stand-ins for tensors. What it misses (gradients switched off, hooks, attributes,
random numbers, buffers that move) is found by running module and graph side by side on an example; then the module
counts as untraceable, with the reason. `analyse` follows every set of units (`axes.py`) from the layer that writes it
to the layers that read it, and returns a `Network`. All of it happens on a copy: the user's module, its buffers, its
attributes and the random generators stay as they were.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from pfedgate.gating.inputs import Given, call, leaves, repeated
from pfedgate.gating.slicing.analysis import Analysis, Wishes
from pfedgate.gating.slicing.axes import Layout, dense, is_dense
from pfedgate.gating.slicing.capture import capture
from pfedgate.gating.slicing.functional import SIGNATURES
from pfedgate.gating.slicing.regions import (
    SMALLEST,
    calls,
    leaves_the_model,
    outcome,
    outcome_apart,
    outside,
    work_between,
)
from pfedgate.gating.slicing.rules import Restore, choose, joins
from pfedgate.gating.slicing.rules.operations import PoolRule, Same
from pfedgate.gating.slicing.steps import (
    Activation,
    Arguments,
    Network,
    Operation,
    Policy,
    Programmed,
    Ref,
    Rule,
    Step,
    Untraceable,
    describe,
    has_hooks,
)

Result = TypeVar("Result")

_GAIN = 0.05  # share of FLOPs that torch.export must free beyond torch.fx, which follows any size of input
_LITTLE, _MUCH = 0.5, 0.25  # regions are tried where so much is held back, and taken if they free so much more
_INPLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}  # others end with "_"
_RELU = (F.relu, torch.relu, torch.relu_)
_MAX_POOL = (
    F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, torch.max_pool3d,
)  # fmt: skip
_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


def analyse(model: nn.Module, example: Given, policy: Policy) -> Network:
    """Find the units of `model` that can be left out, under a splitter's policy."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:  # a user's module may hold anything
        return Network(None, reason=f"it cannot be copied, so it was not traced ({first_line(error)})")
    reasons: list[str] = []
    best: Network | None = None
    for front in FRONTS:
        if front is FRONTS[-1] and (best is not None or "its graph gives another" not in reasons[-1]):
            break  # what a first pass sets up did no harm
        own = copy.deepcopy(twin)
        try:
            network = _network(own, front(own, example), policy)
        except Untraceable as error:
            reasons.append(str(error))
            continue
        if best is None or _held(network) < _held(best) - _GAIN:
            best = network
        # Modules without a rule may be made of operations that have one.
        if _held(best) < _GAIN or not any("has no rule" in reason and "kept" in reason for _, reason in best.notes):
            break
    if best is not None and _held(best) < _LITTLE:
        return best
    saves = [] if best is None else [f"in its graph no units save {_held(best):.0%} of the FLOPs"]
    try:
        regions = _by_regions(twin, example, policy, "; ".join(dict.fromkeys([*reasons, *saves])))
    except Untraceable as error:
        return best or Network(None, reason="; ".join(dict.fromkeys([*reasons, str(error)])))
    return regions if best is None or _held(regions) < _held(best) - _MUCH else best


def _held(network: Network) -> float:
    """The share of a network's FLOPs that no unit can save."""
    whole = sum(one.flops for one in network.operations)
    held = sum(one.flops for one in network.operations if is_dense(one.written) and is_dense(one.read))
    return held / whole if whole else 1.0


def _follow(model: nn.Module, example: Given) -> _Read:
    """The network as `torch.fx` sees it: modules stay modules, so any size of input fits. `model` is changed."""
    if not isinstance(example, Tensor):
        raise Untraceable("torch.fx follows one input")
    places = _hooked(model)
    train, evaluate, constants = _graphs(model)
    seen = _Example(model, evaluate, example)
    return _Read([_Graph(train, seen)], evaluate, constants, places)


def _capture(model: nn.Module, example: Given, warm: bool = True) -> _Read:
    """The network as `torch.export` sees it: the operations that ran. `model` is changed: give a copy.

    What a first pass sets up (positions of tokens) is no part of it if the model is `warm`; but where a model remembers
    what it computes from parameters, the graph must compute that.
    """
    for place, module in model.named_modules():
        if has_hooks(module):
            raise Untraceable(f"hooks run around {place or 'the model itself'}")
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
            raise Untraceable(f"{place} averages statistics over all batches")
    constants: dict[str, Tensor] = {}
    graphs = []
    for training in (True, False):
        with mode(model, training), eager_attention():
            try:
                with torch.no_grad(), quiet(example.device):
                    if warm:
                        call(model, example.clone())
                twin = model if warm else copy.deepcopy(model)  # which would remember tensors without numbers
                before = _attributes(twin)
                with quiet(example.device) as drawn:
                    graphs.append(capture(twin, example, constants))
                    if drawn():
                        raise Untraceable("its forward draws random numbers that are no part of its graph")
            except Untraceable:
                raise
            except Exception as error:  # torch.export raises many kinds of errors
                raise Untraceable(f"torch.export cannot capture it: {first_line(error)}") from None
            _check_attributes(before, _attributes(twin), copied=True)
    vars(model).update(constants)
    seen = [_Example(model, graph, example, training) for graph, training in zip(graphs, (True, False), strict=True)]
    sizes = [node.meta["sizes"] for node in graphs[0].nodes if node.op == "placeholder"]
    return _Read(list(map(_Graph, graphs, seen)), None, constants, set(), sizes, list(graphs[0].keys))  # type: ignore[attr-defined]


FRONTS: tuple[Callable[[nn.Module, Given], _Read], ...] = (_follow, _capture, partial(_capture, warm=False))


class _Graph(NamedTuple):
    """A graph, and what ran when it was tried."""

    graph: fx.Graph
    seen: _Example


class _Read(NamedTuple):
    """What a front end made of a forward."""

    graphs: list[_Graph]  # of training, and of evaluation if it has other steps
    twin: fx.Graph | None  # of evaluation, if it has the same steps, with other rates of dropout
    constants: dict[str, Tensor]
    hooked: set[str]
    sizes: list[Any] = []  # noqa: RUF012
    keys: list[str] = []  # noqa: RUF012


def _network(model: nn.Module, read: _Read, policy: Policy) -> Network:
    """What can be left out of a network."""
    return _joined(model, {"": read}, policy, read.graphs[0].seen.example)


def _joined(
    model: nn.Module,
    parts: dict[str, _Read],
    policy: Policy,
    example: Given,
    times: Mapping[str, int] | None = None,
    last: Collection[str] = ("",),
    rest: Iterable[str] = (),
) -> Network:
    """The network of all parts (the whole, or regions by their places): units and costs are found together.

    `times` says how often a part is called, `last` whose results leave the network; the parameters of the `rest` stay
    whole.
    """
    refused: set[tuple[str, str]] = set()
    wishes = Wishes()
    while True:
        before, outputs = wishes.copy(), set[str]()
        graphs = [(place, pair, number > 0) for place, part in parts.items() for number, pair in enumerate(part.graphs)]
        analysis = Analysis(model, *graphs[0][1], policy, refused, wishes)
        named = dict(model.named_parameters())
        for name in rest:
            analysis.claim(named[name], {})
        programs: list[dict[str, Rule]] = []
        layouts: list[dict[str, Any]] = []
        for place, pair, again in graphs:
            analysis.turn_to(*pair, again=again, last=place in last)
            analysis.batch = example.shape[0] / (times or {}).get(place, 1)
            programs.append(analysis.run(choose))
            layouts.append(analysis.layouts)
            if place in last:
                places, names = _output_layers(analysis, pair.graph, programs[-1])
                analysis.mark_outputs(places)
                outputs |= names
        more = analysis.refusals()
        if wishes != before:
            continue
        if not more:
            break
        refused |= more
    modules = dict(model.named_modules(remove_duplicate=False))
    steps: dict[str, list[list[Step]]] = {place: [] for place in parts}
    for (place, pair, _), program, held in zip(graphs, programs, layouts, strict=True):
        analysis.turn_to(*pair, layouts=held)
        _check_writes(pair.graph, program, analysis)
        twin = parts[place].twin
        for one in (pair.graph, *([twin] if twin is not None else [])):  # costs stay those as it is written
            pool_first(one, program, modules)
            steps[place].append(_steps(one, program, analysis))
    programmed = {
        place: Programmed(steps[place][0], steps[place][1], part.sizes, part.keys) for place, part in parts.items()
    }
    resolve = analysis.spaces.resolve
    axes = {name: {a: resolve(p) for a, p in axes.items()} for name, axes in analysis.axes.items()}
    used = {segment.space for per_axis in axes.values() for segments in per_axis.values() for segment in segments}
    return Network(
        programmed,
        constants={name: tensor for part in parts.values() for name, tensor in part.constants.items()},
        hooked=set().union(*(part.hooked for part in parts.values())),
        axes=axes,
        reads=analysis.reads,
        spaces={root: analysis.spaces[root] for root in analysis.spaces.roots() if root in used},
        operations=[Operation(o.place, o.flops, resolve(o.written), resolve(o.read)) for o in analysis.operations],
        activations=[Activation(a.place, a.nbytes, resolve(a.segments)) for a in analysis.activations],
        notes=list(dict.fromkeys(analysis.notes)),
        outputs=outputs,
        alias={s: analysis.spaces.find(s) for s in range(analysis.spaces.count)},
    )


def _by_regions(model: nn.Module, example: Given, policy: Policy, reason: str) -> Network:
    """The network of those submodules that can be followed, where the whole cannot (for this `reason`)."""
    with mode(model, False), quiet(example.device), eager_attention():
        asked = _tried(partial(calls, model, example))
    total = sum(p.numel() for p in model.parameters())
    parts: dict[str, _Read] = {}
    notes = [("", reason)]

    def look(place: str, module: nn.Module) -> None:
        if sum(p.numel() for p in module.parameters()) < SMALLEST * total:
            return
        if place in asked:
            try:
                parts[place] = _read(module, asked[place].example)
            except Untraceable as error:
                if str(error) not in dict(notes).values():
                    notes.append((place, str(error)))
            else:
                return
        for name, child in module.named_children():
            look(f"{place}.{name}", child)

    for name, child in model.named_children():
        look(name, child)
    if not parts:
        raise Untraceable("nor can any of its submodules be followed")
    for training in (True, False):
        with mode(model, training), eager_attention():
            with quiet(example.device):
                own = _tried(partial(outcome, model, example))
            with quiet(example.device):  # from the same random state
                apart = _tried(partial(outcome_apart, model, example, parts))
        if not all(len(a) == len(b) and all(map(alike, a, b)) for a, b in zip(own, apart, strict=True)):
            raise Untraceable("its forward reads parameters of its submodules, or runs them once more later")
    with mode(model, False), quiet(example.device), eager_attention():
        last = [place for place in parts if _tried(partial(leaves_the_model, model, example, place))]
        between = _tried(partial(work_between, model, example, parts))
    for place, read in parts.items():
        _put_at(place, read, model)
    rest = outside(model, list(parts))
    times = {place: asked[place].times for place in parts}
    network = _joined(model, parts, policy, example, times, last, rest)
    for place, (flops, nbytes) in between.items():
        where = place or "(the model itself)"
        network.operations.append(Operation(where, flops / len(example), dense(1), dense(1)))
        network.activations.append(Activation(where, nbytes / len(example), dense(1)))
    whole = [(place or "(the model itself)", f"its forward runs as it is: {why}") for place, why in notes]
    network.notes, network.rest = [*whole, *network.notes], rest
    return network


def _tried(run: Callable[[], Result]) -> Result:
    try:
        return run()
    except Exception as error:  # whatever a user's forward raises
        raise Untraceable(f"it does not run on the example: {first_line(error)}") from None


def _read(module: nn.Module, example: Given) -> _Read:
    """A submodule as the first front end that can follows it; shapes and costs are known afterwards."""
    reasons: list[str] = []
    for front in FRONTS:
        if front is FRONTS[-1] and "its graph gives another" not in reasons[-1]:
            break
        own = copy.deepcopy(module)
        try:
            read = front(own, example)
            for graph, seen in read.graphs:
                seen.elsewhere()
                seen.count(next(iter(graph.nodes)))
            return read._replace(constants={name: vars(own)[name] for name in read.constants})
        except Untraceable as error:
            reasons.append(str(error))
    raise Untraceable("; ".join(dict.fromkeys(reasons)))


def _put_at(place: str, read: _Read, model: nn.Module) -> None:
    """Let the graphs of a submodule name what they read as the whole model does."""
    vars(model.get_submodule(place)).update(read.constants)
    for name in list(read.constants):
        read.constants[f"{place}.{name}"] = read.constants.pop(name)
    read.hooked.update({f"{place}.{name}" if name else place for name in read.hooked} - read.hooked)
    for graph in (*(graph for graph, _ in read.graphs), *([] if read.twin is None else [read.twin])):
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                node.target = f"{place}.{node.target}"


def _check_writes(graph: fx.Graph, program: dict[str, Rule], analysis: Analysis) -> None:
    """A tensor that is written in place and read again must be the same tensor both times, not a completed copy."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not _writes_in_place(node, analysis) or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        reader, source = node, node.args[0]
        copied = False
        while True:
            copied |= program[reader.name].full and analysis.layout(source) is not None
            fills = [one.fill for n in (reader, source) if isinstance(one := analysis.layout(n), Layout)]
            copied |= len(set(map(str, fills))) > 1  # dropped units became other numbers, for one of its names
            if copied and any(order[user] > order[node] for user in source.users if user is not reader):
                raise Untraceable(f"{describe(node)} writes in place into a tensor that is read again later")
            rule = program[source.name]
            name = str(getattr(source.target, "__name__", source.target)).partition(".")[0]
            fresh = name.startswith("new_") or name.endswith("_like")  # only the shape is taken over
            aliases = not fresh and (rule.view or isinstance(rule, Restore) or _writes_in_place(source, analysis))
            if source.op in ("placeholder", "get_attr") or not aliases or not isinstance(source.args[0], fx.Node):
                break
            reader, source = source, source.args[0]


def _writes_in_place(node: fx.Node, analysis: Analysis) -> bool:
    if node.op == "call_module":
        return bool(getattr(analysis.module(node), "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_")
    named = str(getattr(node.target, "__name__", "")).endswith("_")
    inplace = named or node.target in _INPLACE or bool(node.kwargs.get("inplace", False))
    return node.op == "call_function" and inplace


def _output_layers(analysis: Analysis, graph: fx.Graph, program: dict[str, Rule]) -> tuple[set[str], set[str]]:
    """Layers whose result the network returns, possibly through views, sums or functions; and their parameters."""
    places: set[str] = set()
    names: set[str] = set()
    waiting = [n for node in graph.nodes if node.op == "output" for n in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        own = list(analysis.module(node).parameters()) if node.op == "call_module" else []
        place = str(node.target)
        if node.op == "call_function" and node.target in SIGNATURES:
            own = [p for n in node.all_input_nodes if isinstance(p := analysis.attribute(n), nn.Parameter)]
            place = getattr(program[node.name], "place", "")
        if own:
            places.add(place)
            names |= {analysis.parameter(p) for p in own}
        elif node.op not in ("placeholder", "get_attr"):
            sources = node.all_input_nodes
            if node.target is torch.where:  # a condition is no output
                sources = [source for source in sources if source is not node.args[0]]
            waiting.extend(sources if joins(program[node.name]) else sources[:1])
    return places, names


def _steps(graph: fx.Graph, program: dict[str, Rule], analysis: Analysis) -> list[Step]:
    """Values are released after their last use, as in ordinary code: else activations would outlive their need."""
    nodes = [node for node in graph.nodes if not getattr(program[node.name], "unread", False)]
    slots = {node.name: i for i, node in enumerate(nodes)}
    last = {source.name: node.name for node in nodes for source in node.all_input_nodes if source.name in slots}
    release: dict[str, list[int]] = {}
    for name, user in last.items():
        release.setdefault(user, []).append(slots[name])

    def arguments(node: fx.Node, rule: Rule) -> Arguments:
        def ref(source: fx.Node) -> Any:
            if source.name not in slots:  # a layer reads its weights itself
                return None
            layout = analysis.layout(source) if rule.full else None
            return Ref(slots[source.name], layout if isinstance(layout, Layout | tuple) else None)

        args: Any = fx.node.map_arg(node.args, ref)
        kwargs: Any = fx.node.map_arg(node.kwargs, ref)
        atoms = [a for a in args if not isinstance(a, Ref)] + list(kwargs.values())
        plain = not any(isinstance(a, Ref | tuple | list | dict | slice) for a in atoms)
        plain = plain and all(a.layouts is None for a in args if isinstance(a, Ref))
        return Arguments(tuple(args), dict(kwargs), plain)

    steps = []
    for node in nodes:
        rule = program[node.name]
        place = getattr(rule, "place", "") or describe(node)
        unused = tuple(release.get(node.name, ()))
        steps.append(Step(slots[node.name], rule, arguments(node, rule), unused, place))
    return steps


def pool_first(graph: fx.Graph, program: Mapping[str, Rule], modules: Mapping[str, nn.Module]) -> None:
    """Put every max-pool that is the only reader of a ReLU before it; `program` has the rules of the graph's nodes.

    ``max(relu(x)) = relu(max(x))``, and so are the gradients: where a window's maximum is positive both send it to the
    same place, elsewhere both send nothing. A ReLU after a 2 x 2 pool reads and writes a quarter of the numbers.
    """
    for pool in list(graph.nodes):
        if isinstance(program[pool.name], PoolRule) and _is(pool, modules, _MAX_POOL, _MAX_POOLS):
            relu = pool.args[0] if pool.args else None
            if isinstance(relu, fx.Node) and _may_move(relu, program, modules):
                source = relu.args[0]
                pool.replace_all_uses_with(relu)
                pool.update_arg(0, source)
                relu.update_arg(0, pool)
                pool.append(relu)


def _may_move(relu: fx.Node, program: Mapping[str, Rule], modules: Mapping[str, nn.Module]) -> bool:
    rule = program[relu.name]
    is_relu = isinstance(rule, Same) and _is(relu, modules, _RELU, (nn.ReLU,), ("relu", "relu_"))
    if not is_relu or len(relu.users) != 1 or not relu.args or not isinstance(relu.args[0], fx.Node):
        return False
    source = relu.args[0]
    # In place it also changes its argument, which no other node may then read: only the result of a layer is new.
    fresh = source.op == "call_module" and any(True for _ in modules[str(source.target)].parameters())
    return not rule.view or (fresh and len(source.users) == 1)


def _is(
    node: fx.Node, modules: Mapping[str, nn.Module], functions: tuple[object, ...], kinds: tuple[type[nn.Module], ...],
    methods: tuple[str, ...] = (),
) -> bool:  # fmt: skip
    if node.op == "call_module":
        return type(modules[str(node.target)]) in kinds
    if node.op == "call_method":
        return node.target in methods
    return node.op == "call_function" and any(node.target is function for function in functions)


def _hooked(model: nn.Module) -> set[str]:
    """Layers with hooks, which are called as they are. The graph has no place for those of a container."""
    places = {place for place, module in model.named_modules(remove_duplicate=False) if has_hooks(module)}
    for place in places:
        if not place or not _Tracer().is_leaf_module(model.get_submodule(place), place):
            raise Untraceable(f"hooks run around {place or 'the model itself'}")
    return places


class _Buffer(fx.Proxy):
    """A buffer that the forward reads: its numbers may be loaded anew, its shape is known."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, value: Tensor) -> None:
        super().__init__(node, tracer)
        self.shape, self.ndim, self._value = value.shape, value.ndim, value

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return len(self._value)


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__(param_shapes_constant=True)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """An attribute that a forward reads; torch.fx would take the numbers of a buffer for constants."""
        if isinstance(attr_val, Tensor) and not isinstance(attr_val, nn.Parameter):
            for name, buffer in self.root.named_buffers():
                if buffer is attr_val:
                    if name not in parameter_proxy_cache:
                        parameter_proxy_cache[name] = self.create_proxy(
                            "get_attr", name, (), {}, proxy_factory_fn=lambda node: _Buffer(node, self, attr_val)
                        )
                    return parameter_proxy_cache[name]
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def _graphs(model: nn.Module) -> tuple[fx.Graph, fx.Graph, dict[str, Tensor]]:
    """The graphs in training and in evaluation, and tensors that the forward makes. `model` is changed: give a copy."""
    try:
        own = type(model)
        # One input, the others at their defaults: fx would otherwise trace `mask is not None` as true.
        forward = {"forward": lambda self, x: own.forward(self, x)}
        model.__class__ = type(own.__name__, (own,), {**forward, "__module__": own.__module__})
        (train, constants), (evaluate, others) = [_trace(model, training) for training in (True, False)]
    except Untraceable:
        raise
    except Exception as error:  # fx raises many kinds of errors on untraceable code; each means the same to us
        raise Untraceable(f"torch.fx cannot trace it: {first_line(error)}") from None
    same = constants.keys() == others.keys() and all(alike(constants[k], others[k]) for k in constants)
    if not same or _signature(train) != _signature(evaluate):
        raise Untraceable("its forward takes different steps in training and in evaluation")
    vars(model).update(constants)
    return train, evaluate, constants


def _trace(model: nn.Module, training: bool) -> tuple[fx.Graph, dict[str, Tensor]]:
    before = _attributes(model)
    with mode(model, training), quiet(None) as drawn:
        graph = _Tracer().trace(model)
        if drawn():
            raise Untraceable("its forward draws random numbers that are no part of its graph")
    new = set(vars(model)) - {name for module, name in before if module is model}
    constants = {name: vars(model).pop(name) for name in new if name.startswith("_tensor_constant")}
    _check_attributes(before, _attributes(model))
    return graph, constants


def _check_attributes(
    before: dict[tuple[nn.Module, str], Any], after: dict[tuple[nn.Module, str], Any], copied: bool = False
) -> None:
    """Nothing was set by a forward; `copied`: by torch.export, which puts copies in the place of containers."""
    for module, name in after.keys() | before.keys():
        one, other = after.get((module, name), after), before.get((module, name), before)
        if one is not other and not (copied and _may_be_copy(one, other)):
            raise Untraceable(f"its forward sets an attribute ({type(module).__name__}.{name})")


def _may_be_copy(one: Any, other: Any) -> bool:
    """Whether a value may be a copy of another: numbers and words tell, other objects cannot be asked."""
    if isinstance(one, Tensor | nn.Module) or type(one) is not type(other):
        return False
    return not isinstance(one, bool | int | float | complex | str | bytes) or bool(one == other)


def _attributes(model: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Everything that modules hold; a graph would not set it."""
    values = {(module, name): value for module in model.modules() for name, value in vars(module).items()}
    return values | {
        (module, f"{name} (a buffer)"): b for module in model.modules() for name, b in module._buffers.items()
    }


def alike(a: Any, b: Any) -> bool:
    """Whether two results are the same but for rounding."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return bool(a == b) if not isinstance(a, Tensor) and not isinstance(b, Tensor) else False
    a, b = (one.to_dense() if one.is_sparse else one for one in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def _signature(graph: fx.Graph) -> list[Any]:
    """Steps and their arguments; booleans and rates may differ between training and evaluation (dropout)."""

    def plain(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return ("node", arg.name)
        return type(arg).__name__ if isinstance(arg, bool | float) else arg

    return [
        (n.op, n.target, n.name, fx.node.map_aggregate(n.args, plain), fx.node.map_aggregate(n.kwargs, plain))
        for n in graph.nodes
    ]


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Train or eval mode for all submodules; every one gets its own flag back afterwards."""
    flags = {module: module.training for module in model.modules()}
    try:
        model.train(training)
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def quiet(device: torch.device | None) -> Iterator[Any]:
    """Random generators (torch's, Python's, numpy's) get their state back; yields "was anything drawn?"."""
    devices = [device] if device is not None and device.type == "cuda" else []
    others, main = random.getstate(), torch.random.get_rng_state()
    numbers: Any = np.random.get_state()

    def drawn() -> bool:
        now: Any = np.random.get_state()
        same = np.array_equal(numbers[1], now[1]) and numbers[2:] == now[2:] and others == random.getstate()
        return not (same and torch.equal(main, torch.random.get_rng_state()))

    with torch.random.fork_rng(devices=devices):
        try:
            yield drawn
        finally:
            random.setstate(others)
            np.random.set_state(numbers)


@contextmanager
def eager_attention() -> Iterator[None]:
    """Attention's fused path for inference hides its FLOPs from the counter."""
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Example(fx.Interpreter):
    """Runs the graph on the example once and keeps every value's shape."""

    def __init__(self, root: nn.Module, graph: fx.Graph, example: Given, training: bool = False) -> None:
        super().__init__(root, graph=graph)
        self.root, self.example = root, example
        self.values: dict[str, Any] = {}
        self._elsewhere: dict[str, Any] | None = None
        self.counter: Any = None
        self.flops: dict[str, float] = {}
        self.training = training
        # From the same random state; code that the graph does not show makes the two differ.
        for kind, a, b in zip(
            ("result", "gradient", "state"), self._outcome(partial(call, root)), self._outcome(self._try), strict=True
        ):
            if len(a) != len(b) or not all(map(alike, a, b)):
                raise Untraceable(f"its graph gives another {kind} than its forward")

    def _try(self, example: Given) -> Any:
        return self.run(*leaves(example, getattr(self.graph, "keys", ())))

    def _outcome(self, run: Callable[[Given], Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The results of a pass, its gradients (no_grad and autograd.Function are no part of a graph), and buffers."""
        buffers = {name: buffer.clone() for name, buffer in self.root.named_buffers()}
        with torch.enable_grad():
            results = tree_leaves(self._quietly(run))
            roots = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
            gradients: Any = ()
            if roots:
                total = sum((r * torch.linspace(-1, 2, r.numel(), device=r.device).view(r.shape)).sum() for r in roots)
                asked = [p for p in self.root.parameters() if p.requires_grad]
                gradients = torch.autograd.grad(total, asked, allow_unused=True)  # type: ignore[arg-type]
        moved = [buffer.clone() for buffer in self.root.buffers()]
        with torch.no_grad():
            for name, buffer in self.root.named_buffers():
                buffer.copy_(buffers[name])
        return [r.detach() if isinstance(r, Tensor) else r for r in results], list(gradients), moved

    def _quietly(self, run: Callable[[Given], Any], example: Given | None = None) -> Any:
        with quiet(self.example.device), eager_attention(), mode(self.root, self.training):
            try:
                return run((self.example if example is None else example).clone())
            except Exception as error:  # whatever a user's forward raises
                raise Untraceable(f"its graph does not run on the example: {first_line(error)}") from None

    def elsewhere(self) -> dict[str, Any]:
        """The shapes of all tensors for a batch with one more sample."""
        if self._elsewhere is None:
            here, counter = self.values, self.counter
            self.values, self.counter = {}, None
            buffers = {name: buffer.clone() for name, buffer in self.root.named_buffers()}
            try:
                with torch.no_grad():
                    self._quietly(self._try, repeated(self.example))
                    for name, buffer in self.root.named_buffers():
                        buffer.copy_(buffers[name])
            finally:
                self._elsewhere, self.values, self.counter = self.values, here, counter
        return self._elsewhere

    def run_node(self, n: fx.Node) -> Any:
        before = self.counter.get_total_flops() if self.counter else 0
        value = super().run_node(n)
        self.values[n.name] = tree_map_only(Tensor, lambda t: t.detach().to("meta"), value)
        if self.counter:
            self.flops[n.name] = float(self.counter.get_total_flops() - before)
        return value

    def count(self, node: fx.Node) -> float:
        """FLOPs of a node. Counted only when first asked for: the counter loads a compiler, which takes seconds."""
        if not self.flops:
            self.counter = FlopCounterMode(display=False)
            buffers = {name: buffer.clone() for name, buffer in self.root.named_buffers()}
            with self.counter, torch.no_grad():
                self._quietly(self._try)
                for name, buffer in self.root.named_buffers():
                    buffer.copy_(buffers[name])
        return self.flops[node.name]


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its kind."""
    return (str(error).splitlines() or [type(error).__name__])[0]
