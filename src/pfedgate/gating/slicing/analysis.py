"""One pass over a traced graph: rules ask for layouts and shapes, and note units, costs and reasons."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, fx, nn

from pfedgate.gating.inputs import Given
from pfedgate.gating.slicing.axes import Layout, Segment, Segments, Spaces, dense, is_dense, length
from pfedgate.gating.slicing.steps import Activation, CannotSlice, Layouts, Operation, Policy, Rule, describe


@dataclass
class Wishes:
    """What a pass learned about how units must be cut so that the next pass can follow them further."""

    units: dict[tuple[str, str], int] = field(default_factory=dict)  # (kind, place) -> so many units, of equal width
    parts: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)  # -> sets of units of these lengths

    def copy(self) -> Wishes:
        return Wishes(dict(self.units), dict(self.parts))


class Seen(Protocol):
    """What ran when a graph was tried: shapes of all tensors, also for `elsewhere`, another size of batch; FLOPs."""

    values: dict[str, Any]
    example: Given

    def count(self, node: fx.Node) -> float: ...

    def elsewhere(self) -> dict[str, Any]: ...


def flat(held: Layouts) -> list[Layout]:
    """The layouts of a node that may return several tensors."""
    if isinstance(held, tuple):
        return [layout for one in held for layout in flat(one)]
    return [held] if isinstance(held, Layout) else []


class Analysis:
    """The pass so far: `seen` knows the tensors of the example's pass."""

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        seen: Seen,
        policy: Policy,
        refused: set[tuple[str, str]],
        wishes: Wishes,
    ) -> None:
        self.model, self.graph, self.values, self.count = model, graph, seen.values, seen.count
        self.elsewhere = seen.elsewhere
        self.batch, self.device = float(seen.example.shape[0]), seen.example.device
        self.policy, self.refused, self.wishes = policy, refused, wishes
        self.program: dict[str, Rule] = {}
        self.last = True
        self._again = False  # a second graph of the same network: its costs are those of the first
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
        self._counts: dict[tuple[str, str], int] = {}
        self._names = {id(p): n for n, p in model.named_parameters()}
        self._float = next((p.element_size() for p in model.parameters()), 4)

    # -- what rules ask
    def layout(self, arg: Any) -> Layouts:
        return self.layouts.get(arg.name) if isinstance(arg, fx.Node) else None

    def tensor_layout(self, arg: Any, filled: bool = False) -> Layout | None:
        """Where the units of a tensor lie; rules that do not ask for `filled` ones get zeros for dropped units."""
        layout = self.layout(arg)
        if isinstance(layout, Layout) and layout.fill != 0 and not filled:
            raise CannotSlice("dropped units are not zero there")
        return layout if isinstance(layout, Layout) else None

    def shape(self, arg: Any, elsewhere: bool = False) -> tuple[int, ...]:
        """The shape of a tensor on the example; or `elsewhere`, on a batch of another size."""
        values = self.elsewhere() if elsewhere else self.values
        value = values.get(arg.name) if isinstance(arg, fx.Node) else None
        if not isinstance(value, Tensor):
            raise CannotSlice("an operand is not a tensor")
        return tuple(value.shape)

    def module(self, node: fx.Node) -> nn.Module:
        return self.model.get_submodule(str(node.target))

    def attribute(self, arg: Any) -> Any:
        """The parameter or buffer that a node reads; None for other nodes."""
        if not isinstance(arg, fx.Node) or arg.op != "get_attr":
            return None
        place, _, name = str(arg.target).rpartition(".")
        return getattr(self.model.get_submodule(place), name, None)

    def is_heads(self, space: int) -> bool:
        """Whether units are heads of attention, or something else that is cut as coarsely."""
        return any(kind == "heads" for kind, _ in self.spaces[space].producers)

    def parameter(self, tensor: Tensor) -> str:
        """The name under which the model lists this parameter (shared parameters have one name)."""
        if id(tensor) not in self._names:
            raise CannotSlice("its weights are computed from other parameters")
        return self._names[id(tensor)]

    def units(self, count: int, kind: str, place: str) -> Segments:
        """New units written by `place`, or an axis that is always full when this splitter does not cut them."""
        segments: list[Segment] = []
        self._counts[kind, place] = count
        lengths = self.wishes.parts.get((kind, place), (count,))
        for i, size in enumerate(lengths):
            key = (kind, place if len(lengths) == 1 else f"{place}[{i}]")
            units = self.wishes.units.get(key, size)
            name = key if units == size else ("heads", key[1])
            if kind not in self.policy.kinds or {key, name} & self.refused or units < 2 or not self.policy.may(place):
                segments.extend(dense(size))
                continue
            if key not in self._written:
                self._written[key] = self.spaces.new(units, *name)
            segments.append(Segment(self._written[key], units, size // units))
        return tuple(segments)

    def wish(self, segments: Segments, *, units: int = 0, parts: tuple[int, ...] = ()) -> None:
        """Ask that what writes these units cuts them coarser, or into several sets; granted in the next pass."""
        roots = {self.spaces.find(s.space) for s in segments if s.space is not None}
        for key in [key for key, space in self._written.items() if self.spaces.find(space) in roots]:
            if units:
                self.wishes.units[key] = min(units, self.wishes.units.get(key, units))
            elif "[" not in key[1] and not any(part * self._counts[key] % sum(parts) for part in parts):
                # The axis may hold several positions of each unit.
                own = tuple(part * self._counts[key] // sum(parts) for part in parts)
                self.wishes.parts.setdefault(key, own)

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
            if not self.spaces.tie(before[axis], segments) and self._align(before[axis], segments):
                continue
            if not self.spaces.tie(before[axis], segments) or len(roles) > 1:
                for segment in (*before[axis], *segments):
                    if segment.space is not None:
                        self.clashes.update(self.spaces[segment.space].producers)

    def tie(self, a: Layout, b: Layout) -> None:
        if not self.spaces.tie(a.segments, b.segments):
            self._align(a.segments, b.segments)
            raise CannotSlice("two operands hold their units in different order")

    def _align(self, a: Segments, b: Segments) -> bool:
        """Wish that two axes are cut alike, where that is possible: at the same places, and the finer one coarser."""
        if length(a) != length(b) or is_dense(a) != is_dense(b):
            return False
        if len(a) != len(b):
            few, many = sorted((a, b), key=len)
            self.wish(few, parts=tuple(s.length for s in many))
            return len(few) == 1
        for p, q in zip(a, b, strict=True):
            fine, coarse = sorted((p, q), key=lambda s: -s.units)
            if p.length != q.length or fine.units % coarse.units:
                return False
            if fine.units != coarse.units:
                self.wish((fine,), units=coarse.units)
        return True

    def operation(self, place: str, flops: float, written: Segments, read: Segments) -> None:
        if not self._again:
            self.operations.append(Operation(place, flops / self.batch, written, read))

    def activation(self, place: str, numbers: float, segments: Segments) -> None:
        """A tensor of so many numbers that is kept for the backward pass."""
        if not self._again:
            self.activations.append(Activation(place, self._float * numbers / self.batch, segments))

    def note(self, node: fx.Node, reason: str) -> None:
        self.notes.append((describe(node), reason))

    # -- the pass
    def run(self, choose: Callable[[fx.Node, Analysis], Rule]) -> dict[str, Rule]:
        self.program = {}
        for node in self.graph.nodes:
            rule = self.program[node.name] = choose(node, self)
            self.layouts[node.name] = rule.out
            if not self._again:
                self._memory(node, rule)
        return self.program

    def turn_to(
        self,
        graph: fx.Graph,
        seen: Seen,
        layouts: dict[str, Layouts] | None = None,
        again: bool = True,
        last: bool = True,
    ) -> None:
        """Go on with another graph: of the same layers (`again`: in evaluation), whose units and costs are known, or of
        others. `last` says whether its results leave the network.
        """
        self.graph, self.values, self.layouts, self._again = graph, seen.values, layouts or {}, again
        self.elsewhere, self.count, self.last = seen.elsewhere, seen.count, last

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
            place = place.partition("[")[0]
            if kind != "heads" and (place in places or place.rpartition(".")[0] in places):
                self.spaces[space].output = True

    def refuse_unknown(self, node: fx.Node) -> None:
        """A tensor whose dropped units are unknown numbers is needed whole: it must be computed whole."""
        while node.op != "placeholder" and node.all_input_nodes:
            inputs = [n for n in node.all_input_nodes if any(math.isnan(x.fill) for x in flat(self.layout(n)))]
            if not inputs:
                break
            node = inputs[0]
        self.clashes.add(("unknown", node.name))

    def refusals(self) -> set[tuple[str, str]]:
        """Producers that must not be cut after all; empty when the pass stands."""
        refused = set(self.clashes)
        for root in self.spaces.roots():
            if self.policy.refuse(self.spaces[root]):
                refused.update(self.spaces[root].producers)
        return refused - self.refused
