"""One pass over a traced graph: rules ask for layouts and shapes, and note units, costs and reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from pfedgate.gating.slicing.axes import Layout, Segment, Segments, Spaces, dense, is_dense
from pfedgate.gating.slicing.steps import Activation, CannotSlice, Layouts, Operation, Policy, Rule, describe


class Analysis:
    """The pass so far. `values` are the tensors of the example's pass (shapes only), `count` measures FLOPs."""

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        values: dict[str, Any],
        count: Callable[[fx.Node], float],
        example: Tensor,
        policy: Policy,
        refused: set[tuple[str, str]],
    ) -> None:
        self.model, self.graph, self.values, self.count = model, graph, values, count
        self.batch, self.device = example.shape[0], example.device
        self.policy, self.refused = policy, refused
        self.spaces = Spaces()
        self.layouts: dict[str, Layouts] = {}
        self.axes: dict[str, dict[int, Segments]] = {}
        self.reads: dict[str, int] = {}
        self._roles: dict[tuple[str, int], set[bool]] = {}  # whether the units along an axis are read, or written
        self.operations: list[Operation] = []
        self.activations: list[Activation] = []
        self.notes: list[tuple[str, str]] = []
        self.clashes: set[tuple[str, str]] = set()
        self._written: dict[tuple[str, str], int] = {}
        self._names = {id(p): n for n, p in model.named_parameters()}
        self._float = next((p.element_size() for p in model.parameters()), 4)

    # -- what rules ask
    def layout(self, arg: Any) -> Layouts:
        return self.layouts.get(arg.name) if isinstance(arg, fx.Node) else None

    def tensor_layout(self, arg: Any) -> Layout | None:
        layout = self.layout(arg)
        return layout if isinstance(layout, Layout) else None

    def shape(self, arg: Any) -> tuple[int, ...]:
        value = self.values.get(arg.name) if isinstance(arg, fx.Node) else None
        if not isinstance(value, Tensor):
            raise CannotSlice("an operand is not a tensor")
        return tuple(value.shape)

    def module(self, node: fx.Node) -> nn.Module:
        return self.model.get_submodule(str(node.target))

    def parameter(self, tensor: Tensor) -> str:
        """The name under which the model lists this parameter (shared parameters have one name)."""
        if id(tensor) not in self._names:
            raise CannotSlice("its weights are computed from other parameters")
        return self._names[id(tensor)]

    def units(self, count: int, kind: str, place: str) -> Segments:
        """New units written by `place`, or an axis that is always full when this splitter does not cut them."""
        key = (kind, place)
        if kind not in self.policy.kinds or key in self.refused or count < 2:
            return dense(count)
        if key not in self._written:
            self._written[key] = self.spaces.new(count, kind, place)
        return (Segment(self._written[key], count),)

    # -- what rules note
    def claim(self, tensor: Tensor | None, axes: dict[int, Segments], reads: int | None = None) -> None:
        """The units along the axes of a parameter; other axes must be complete, and the layer sums over `reads`.

        A parameter used twice must be cut the same way twice: else nothing of it is cut. An axis that one use writes
        and another reads (an embedding that is the output layer, too) cannot be: weights belong to what they write, so
        a mask would leave what the reading use skips.
        """
        if tensor is None:
            return
        name = self.parameter(tensor)
        if reads is not None:
            self.reads[name] = reads
        claimed = {axis: axes.get(axis, dense(size)) for axis, size in enumerate(tensor.shape)}
        before = self.axes.setdefault(name, claimed)
        for axis, segments in claimed.items():
            roles = self._roles.setdefault((name, axis), set())
            if not is_dense(segments):
                roles.add(axis == reads)
            if not self.spaces.tie(before[axis], segments) or len(roles) > 1:
                for segment in (*before[axis], *segments):
                    if segment.space is not None:
                        self.clashes.update(self.spaces[segment.space].producers)

    def tie(self, a: Layout, b: Layout) -> None:
        if not self.spaces.tie(a.segments, b.segments):
            raise CannotSlice("two operands hold their units in different order")

    def operation(self, place: str, flops: float, written: Segments, read: Segments) -> None:
        self.operations.append(Operation(place, flops / self.batch, written, read))

    def activation(self, place: str, numbers: float, segments: Segments) -> None:
        """A tensor of so many numbers that is kept for the backward pass."""
        self.activations.append(Activation(place, self._float * numbers / self.batch, segments))

    def note(self, node: fx.Node, reason: str) -> None:
        self.notes.append((describe(node), reason))

    # -- the pass
    def run(self, choose: Callable[[fx.Node, Analysis], Rule]) -> dict[str, Rule]:
        program: dict[str, Rule] = {}
        for node in self.graph.nodes:
            rule = program[node.name] = choose(node, self)
            self.layouts[node.name] = rule.out
            self._memory(node, rule)
        return program

    def _memory(self, node: fx.Node, rule: Rule) -> None:
        """Bytes that a node allocates: what it returns, and complete copies of cut arguments."""
        place = describe(node)
        if rule.full:
            for source in node.all_input_nodes:
                if isinstance(self.layout(source), Layout):
                    self.activations.append(Activation(place, self._nbytes(self.values[source.name]), dense(1)))
        value = self.values.get(node.name)
        if node.op not in ("placeholder", "get_attr", "output") and not rule.view and isinstance(value, Tensor):
            segments = rule.out.segments if isinstance(rule.out, Layout) else dense(1)
            self.activations.append(Activation(place, self._nbytes(value), segments))

    def _nbytes(self, value: Tensor) -> float:
        return value.numel() * value.element_size() / self.batch

    def mark_outputs(self, places: set[str]) -> None:
        """The network returns what these layers write, even where the graph was followed no further."""
        for (kind, place), space in self._written.items():
            if kind != "heads" and (place in places or place.rpartition(".")[0] in places):
                self.spaces[space].output = True

    def refusals(self) -> set[tuple[str, str]]:
        """Producers that must not be cut after all; empty when the pass stands."""
        refused = set(self.clashes)
        for root in self.spaces.roots():
            if self.policy.refuse(self.spaces[root]):
                refused.update(self.spaces[root].producers)
        return refused - self.refused
