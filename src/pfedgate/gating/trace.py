"""Reads a network's graph and finds what can be left out without changing the result.

`analyse` traces a module with `torch.fx`, follows every set of units (see `layout.py`) from the layer that writes
it to the layers that read it, and returns a `Network`: a program of steps that can run on live units only, the
units along each axis of each parameter, the cost of every operation, and a note for every place where units have
to be restored, with the reason.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from .layout import Layout, Part, Parts, Space, Spaces, dense

Layouts = Any  # Layout | None, or nested tuples of them for nodes that return several tensors


class CannotSlice(Exception):
    """A rule's answer when it cannot prove that leaving units out is exact; the text is the reason."""


@dataclass(frozen=True)
class Policy:
    """What a splitter wants to cut: kinds of units it may cut, and which finished spaces it takes back."""

    kinds: frozenset[str]
    refuse: Callable[[Space], bool]


@dataclass(frozen=True)
class Operation:
    """FLOPs per sample of one operation at full width, and the units it writes and reads."""

    place: str
    flops: float
    written: Parts
    read: Parts


@dataclass(frozen=True)
class Activation:
    """Bytes per sample of a tensor that an operation allocates."""

    place: str
    nbytes: float
    parts: Parts


@dataclass(frozen=True)
class Step:
    """A node as traced in training and in evaluation, its rule, and the values nobody needs after it."""

    train: fx.Node
    evaluate: fx.Node
    rule: Rule
    release: tuple[str, ...]


@dataclass
class Network:
    """The result of `analyse`; `program` is None when the module cannot be traced (then `reason` says why)."""

    program: list[Step] | None
    reason: str = ""
    axes: dict[str, dict[int, Parts]] = field(default_factory=dict)
    reads: dict[str, int] = field(default_factory=dict)  # the axis of a parameter that its layer sums over
    spaces: dict[int, Space] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    activations: list[Activation] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    outputs: set[str] = field(default_factory=set)
    constants: dict[str, Tensor] = field(default_factory=dict)
    alias: dict[int, int] = field(default_factory=dict)  # a space as a rule knew it -> the space it was tied into


class Rule:
    """How one node of the graph is analysed (in the constructor) and run on live units (when called)."""

    out: Layouts = None
    view = False  # the result shares memory with an argument: it costs nothing to keep
    full = False  # the arguments must be complete tensors

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        raise NotImplementedError

    def __call__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class Analysis:
    """One pass over the graph. Rules ask it for layouts and shapes and tell it what they found."""

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        values: dict[str, Any],
        policy: Policy,
        refused: set[tuple[str, str]],
    ) -> None:
        self.model, self.graph, self.values = model, graph, values
        self.policy, self.refused = policy, refused
        self.spaces = Spaces()
        self.layouts: dict[str, Layouts] = {}
        self.axes: dict[str, dict[int, Parts]] = {}
        self.reads: dict[str, int] = {}
        self.operations: list[Operation] = []
        self.activations: list[Activation] = []
        self.notes: list[tuple[str, str]] = []
        self.clashes: set[tuple[str, str]] = set()
        self._made: dict[tuple[str, str], int] = {}
        self._names = {id(p): n for n, p in model.named_parameters()}
        self.batch = next((v.shape[0] for v in values.values() if isinstance(v, Tensor) and v.ndim), 1)

    # -- what rules ask
    def layout(self, arg: Any) -> Layouts:
        return self.layouts.get(arg.name) if isinstance(arg, fx.Node) else None

    def tensor_layout(self, arg: Any) -> Layout | None:
        found = self.layout(arg)
        return found if isinstance(found, Layout) else None

    def shape(self, arg: Any) -> tuple[int, ...]:
        value = self.values[arg.name]
        if not isinstance(value, Tensor):
            raise CannotSlice("the operand is not a tensor")
        return tuple(value.shape)

    def module(self, node: fx.Node) -> nn.Module:
        return self.model.get_submodule(str(node.target))

    def parameter(self, tensor: Tensor) -> str:
        """The name under which the model lists this parameter (shared parameters have one name)."""
        return self._names[id(tensor)]

    def units(self, count: int, kind: str, place: str) -> Parts:
        """New units written by `place`, or an axis that is always full when this splitter does not cut them."""
        key = (kind, place)
        if kind not in self.policy.kinds or key in self.refused or count < 2:
            return dense(count)
        if key not in self._made:
            self._made[key] = self.spaces.new(count, kind, place)
        return (Part(self._made[key], count),)

    # -- what rules tell
    def claim(self, tensor: Tensor | None, axes: dict[int, Parts], reads: int | None = None) -> None:
        """The units along the axes of a parameter; the layer sums over the axis `reads`.

        A parameter used twice must be cut the same way twice.
        """
        if tensor is None:
            return
        name = self.parameter(tensor)
        if reads is not None:
            self.reads[name] = reads
        known = self.axes.setdefault(name, {})
        for axis, parts in axes.items():
            if axis not in known:
                known[axis] = parts
            elif not self.spaces.tie(known[axis], parts):
                for part in (*known[axis], *parts):
                    if part.space is not None:
                        self.clashes.update(self.spaces[part.space].producers)

    def tie(self, a: Layout, b: Layout) -> None:
        if not self.spaces.tie(a.parts, b.parts):
            raise CannotSlice("two operands hold their units in different order")

    def operation(self, place: str, flops: float, written: Parts, read: Parts) -> None:
        self.operations.append(Operation(place, flops / self.batch, written, read))

    def activation(self, place: str, numbers: float, parts: Parts) -> None:
        """A tensor of float32 `numbers` that is kept for the backward pass."""
        self.activations.append(Activation(place, 4.0 * numbers / self.batch, parts))

    def note(self, node: fx.Node, reason: str) -> None:
        self.notes.append((describe(node), reason))

    # -- the pass
    def run(self, rules: Callable[[fx.Node, Analysis], Rule]) -> list[Rule]:
        program = []
        for node in self.graph.nodes:
            rule = rules(node, self)
            self.layouts[node.name] = rule.out
            value = self.values.get(node.name)
            if node.op not in ("placeholder", "get_attr", "output") and not rule.view and isinstance(value, Tensor):
                parts = rule.out.parts if isinstance(rule.out, Layout) else dense(1)
                nbytes = value.numel() * value.element_size() / self.batch
                self.activations.append(Activation(describe(node), nbytes, parts))
            program.append(rule)
        return program

    def refusals(self) -> set[tuple[str, str]]:
        """Producers that must not be cut after all; empty when the pass stands."""
        refused = set(self.clashes)
        for root in self.spaces.roots():
            if self.policy.refuse(self.spaces[root]):
                refused.update(self.spaces[root].producers)
        return refused - self.refused


def describe(node: fx.Node) -> str:
    """A place a user can find in their own code."""
    if node.op == "call_module":
        return str(node.target)
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{target} ({node.name})"


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__(param_shapes_constant=True)


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


class _Shapes(fx.Interpreter):
    """Runs the graph once on the example and keeps every value's shape."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n.name] = value.detach() if isinstance(value, Tensor) else value
        return value


def _same_steps(a: fx.Graph, b: fx.Graph) -> bool:
    signature = [[(n.op, str(n.target), n.name) for n in g.nodes] for g in (a, b)]
    return signature[0] == signature[1]


def analyse(model: nn.Module, example: Tensor, policy: Policy) -> Network:
    """Trace `model` and find the units that can be left out, under a splitter's policy."""
    from .rules import choose  # the rules need the classes above

    root = copy.copy(model)  # fx hangs constants on the root it traces; the user's module stays as it was
    try:
        graphs = []
        for training in (True, False):
            with mode(model, training):
                root.training = training
                graphs.append(_Tracer().trace(root))
    except Exception as error:  # fx raises many kinds of errors on untraceable code; each means the same to us
        return Network(None, reason=f"torch.fx cannot trace it: {str(error).splitlines()[0]}")
    train, evaluate = graphs
    if not _same_steps(train, evaluate):
        return Network(None, reason="its forward takes different steps in training and in evaluation")
    inputs = [n for n in train.nodes if n.op == "placeholder"]
    if any(not n.args for n in inputs[1:]):
        return Network(None, reason="its forward needs more than one input")
    shapes = _Shapes(root, evaluate)
    with mode(model, False), torch.no_grad():
        shapes.run(example)
    refused: set[tuple[str, str]] = set()
    while True:
        analysis = Analysis(model, train, shapes.values, policy, refused)
        program = analysis.run(choose)
        more = analysis.refusals()
        if not more:
            break
        refused |= more
    resolve = analysis.spaces.resolve
    constants = {
        n.name: value
        for n in train.nodes
        if n.op == "get_attr"
        and isinstance(value := operator.attrgetter(str(n.target))(root), Tensor)
        and not isinstance(value, nn.Parameter)
    }
    used = {p.space for axes in analysis.axes.values() for parts in axes.values() for p in resolve(parts)}
    return Network(
        _steps(train, evaluate, program),
        axes={name: {a: resolve(p) for a, p in axes.items()} for name, axes in analysis.axes.items()},
        reads=analysis.reads,
        spaces={root_: analysis.spaces[root_] for root_ in analysis.spaces.roots() if root_ in used},
        operations=[Operation(o.place, o.flops, resolve(o.written), resolve(o.read)) for o in analysis.operations],
        activations=[Activation(a.place, a.nbytes, resolve(a.parts)) for a in analysis.activations],
        notes=analysis.notes,
        outputs=_output_layers(analysis, train),
        constants=constants,
        alias={s: analysis.spaces.find(s) for s in range(analysis.spaces.count)},
    )


def _steps(train: fx.Graph, evaluate: fx.Graph, program: list[Rule]) -> list[Step]:
    """Values are released after their last use, as in ordinary code: else activations would outlive their need."""
    last = {source.name: node.name for node in train.nodes for source in node.all_input_nodes}
    release: dict[str, list[str]] = {}
    for name, user in last.items():
        release.setdefault(user, []).append(name)
    return [
        Step(n, e, rule, tuple(release.get(n.name, ())))
        for n, e, rule in zip(train.nodes, evaluate.nodes, program, strict=True)
    ]


def _output_layers(analysis: Analysis, graph: fx.Graph) -> set[str]:
    """Parameters of the layer whose result the network returns, possibly through views."""
    node = next(n for n in graph.nodes if n.op == "output")
    found = node.args[0]
    while isinstance(found, fx.Node) and found.op != "placeholder":
        if found.op == "call_module" and (own := list(analysis.module(found).parameters(recurse=False))):
            return {analysis.parameter(p) for p in own}
        found = found.args[0] if found.args else None
    return set()


__all__ = ["Activation", "Analysis", "CannotSlice", "Network", "Operation", "Policy", "Rule", "analyse"]
