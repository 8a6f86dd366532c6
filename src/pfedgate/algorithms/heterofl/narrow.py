"""Narrow models: some units of every hidden layer of a network, the first or a window, as a smaller network of its own.

Which axes of which parameters hold which units comes from the analysis behind `pfedgate.gate`: flattened maps, norms,
residual sums and heads follow without a word about the architecture. Inputs and outputs are never cut.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.modules import module, skeleton
from pfedgate.core.state import under
from pfedgate.core.types import Budget, Card, Example, Round, State, Task, Update
from pfedgate.gating.plan import BlockPlan
from pfedgate.gating.slicing.execute import Program, Sliced, cut
from pfedgate.gating.splitters import split_model

INNER = "model."  # where a narrow module holds the network's own names
LABELS = "labels"  # which classes a client has, if it masks the others


@dataclass(frozen=True)
class Narrow:
    """How to make the network of a width: `Narrow(...)()` is a module; equal ones share their workspace."""

    model: Any  # the task's
    example: Example
    width: float  # share of the units of every hidden layer, rounded up
    scaler: bool = False  # divide weights by the share of their inputs that are there
    start: int = 0  # the first unit of every layer's window, which goes on at the layer's beginning

    def __call__(self) -> nn.Module:
        return NarrowModel(self)

    @property
    def plan(self) -> BlockPlan:
        """The network's units, one block each."""
        return _plan(self.model, self.example)

    @property
    def live(self) -> Any:
        """What of the whole network a model of this width has."""
        plan, kept = self.plan, self.plan.keep.copy()
        for space, units in plan.cuts.items():
            first, count = plan.first_block[space], units.units
            kept[first : first + count] = False
            kept[first + (self.start + np.arange(_units(self.width, count))) % count] = True
        return plan.live(kept)

    @property
    def outputs(self) -> list[str]:
        """Parameters with one row per class."""
        return sorted(self.plan.network.outputs) if self.plan.network else []

    @property
    def density(self) -> float:
        """Its share of the parameters."""
        return float(self.live.density)

    def take(self, state: State) -> State:
        """The part of a whole State that the narrow model has. Buffers are not cut: their entries are few."""
        live, shapes = self.live, self.plan.shapes
        return {name: cut(v, name, live) if name in shapes else v for name, v in state.items()}

    def region(self, name: str) -> tuple[Any, ...]:
        """Where the narrow tensor lies in the whole one, as an index; running statistics lie as their norm's scale."""
        live, norm = self.live, f"{name.rpartition('.')[0]}.weight"
        owner = name if name in self.plan.shapes else norm if "running_" in name else ""
        lines = (
            {axis: live.index(parts, torch.device("cpu")) for axis, parts in live.extents[owner].missing}
            if owner
            else {}
        )
        if len(lines) < 2:
            return tuple(lines.get(axis, slice(None)) for axis in range(max(lines, default=-1) + 1))
        return lines[0][:, None], lines[1]


class NarrowModel(nn.Module):
    """A network of which only some units exist."""

    def __init__(self, made: Narrow) -> None:
        super().__init__()
        self.made = made
        self.model = copy.deepcopy(skeleton(made.model))
        live = made.live
        small = {id(p): nn.Parameter(cut(p.detach(), n, live).clone()) for n, p in self.model.named_parameters()}
        for layer in self.model.modules():  # a parameter in two places stays one parameter
            for name, parameter in layer._parameters.items():
                if parameter is not None:
                    layer._parameters[name] = small[id(parameter)]
        self.register_buffer("ones", torch.ones(len(made.plan.blocks)), persistent=False)
        self._program: Program | None = None

    def forward(self, x: Tensor) -> Any:
        """The network's own forward, on the units that exist."""
        return self._run(x, self.made.live, lambda name, parameter: parameter)

    def within(self, x: Tensor, inner: Narrow) -> Any:
        """The forward of a network that is narrower still, on its units of this one."""
        whole, live = self.made.live, inner.live

        def fetch(name: str, parameter: Tensor) -> Tensor:
            for axis, segments in live.extents[name].missing:
                here, there = live.positions(segments), whole.positions(segments)
                assert here is not None
                places = here if there is None else np.searchsorted(there, here)
                parameter = parameter.index_select(axis, torch.from_numpy(places).to(parameter.device))
            return parameter

        return self._run(x, live, fetch)

    def _run(self, x: Tensor, live: Any, fetch: Callable[[str, nn.Parameter], Tensor]) -> Any:
        if self._program is None or self._program.model is not self.model:
            self._program = Program(self.model, self.made.plan, "share" if self.made.scaler else "none")
        assert isinstance(self.ones, Tensor)
        return Sliced(self._program, live, self.ones, fetch)(x)

    def stats(self) -> dict[str, float]:
        """Share of the whole network's parameters."""
        return {"density": self.made.density}

    def __deepcopy__(self, memo: dict[int, Any]) -> NarrowModel:
        twin = NarrowModel(self.made)  # the plan never changes: it is shared, not copied
        twin.load_state_dict(self.state_dict())
        return twin.train(self.training)


@dataclass(frozen=True)
class NarrowClients(Algorithm):
    """A wide model on the server, of which every client has the part that it can afford."""

    budgeted = True
    sends_whole = False
    apart = "its clients send parts of different widths"

    def width(self, card: Card) -> Narrow:
        """The client's part of the model, as wide as its budget allows."""
        return Narrow(self.task.model, self.task.inputs, width_for(self.task, card.budget))

    def part(self, card: Card, sent: State) -> Narrow:
        """The part of the model that this State holds for a client. Default: it depends on the client alone."""
        return self.width(card)

    def send(self, server: State, card: Card, round: Round) -> State:
        """The client's part."""
        return self.part(card, {}).take(server)

    def merger(self, server: State, round: Round) -> ElementMean:
        """Every element: the mean over the clients that have it."""
        return ElementMean(server, self.part, round.total)

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The client's part."""
        return module(replace(self.task, model=self.part(card, got)), under(INNER, got))


class ElementMean:
    """The mean of narrow States over the clients that have an element; other elements keep the server's value.

    `part` gives the part of the model that a client has sent. With `total` (the weight of all clients) clients
    that sent nothing count as unchanged.
    """

    def __init__(self, server: State, part: Callable[[Card, State], Narrow], total: float | None = None) -> None:
        self.server, self.part, self.total, self.rest = server, part, total, dict(server)
        floats = {name: value for name, value in server.items() if value.is_floating_point()}
        self.sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in floats.items()}
        self.weights = {name: torch.zeros_like(value) for name, value in self.sums.items()}

    def add(self, card: Card, update: Update) -> str | None:
        """One client's values. If it sent its labels, rows of absent classes do not count."""
        narrow, labels = self.part(card, update.shared), update.shared.get(LABELS)
        for name, value in update.shared.items():
            if name not in self.server:
                continue
            if name not in self.sums:
                self.rest[name] = torch.maximum(self.rest[name], value)  # counters
                continue
            where, each = narrow.region(name), torch.tensor(update.weight, dtype=torch.float64)
            if name not in narrow.plan.shapes:
                value = value[where]  # statistics came whole, but nothing was seen of missing channels
            if labels is not None and name in narrow.outputs:
                each = each * labels.double().view(-1, *[1] * (value.ndim - 1))
            self.sums[name][where] += value.double() * each
            self.weights[name][where] += each
        return None

    def around(self, card: Card, update: Update) -> State:
        """What the server holds where this update lies."""
        narrow = self.part(card, update.shared)
        return {
            name: self.server[name][narrow.region(name)] if name in narrow.plan.shapes else self.server[name]
            for name in update.shared
            if name in self.sums
        }

    def result(self) -> State:
        """The server's State with every element that was sent replaced by its mean."""
        merged = dict(self.rest)
        for name, value in self.sums.items():
            old, weight = self.server[name], self.weights[name]
            mean = value / weight if self.total is None else (value + old.double() * (self.total - weight)) / self.total
            merged[name] = torch.where(weight > 0, mean.to(old.dtype), old)
        return merged


def width_for(task: Task, budget: Budget) -> float:
    """The width that a client can afford.

    A number is a share of the parameters: the width whose own share is nearest (layers have whole units, so it may be
    a little more or less). Bounds by resource ({"flops": 0.3}) are kept: the largest width within all of them.
    """
    bounds: float | tuple[tuple[str, float], ...] = 0.0
    if isinstance(budget, Mapping):  # a width sends the parameters it has: a cap on the upload is one on them
        bounds = tuple(sorted(("params" if name == "upload" else name, bound) for name, bound in budget.items()))
    else:
        bounds = float(budget)
    return _width_for(task.model, task.inputs, bounds)


@lru_cache(maxsize=1024)
def _width_for(task_model: Any, example: Example, bounds: float | tuple[tuple[str, float], ...]) -> float:
    plan = _plan(task_model, example)
    dense, found = plan.costs.dense(), [units.units for units in plan.cuts.values()]
    widths = sorted({(k + 1) / units for units in found for k in range(units)})

    def share(width: float, resource: str = "params") -> float:
        return plan.costs.cost([_units(width, units) - 1 for units in found])[resource] / dense[resource]

    if isinstance(bounds, float):
        if bounds > 1:
            bounds /= dense["params"]
        at = bisect_left(widths, bounds, key=share)
        near = widths[max(0, at - 1) : at + 1]
        return min(near, key=lambda width: (abs(share(width) - bounds), width))
    largest = len(widths)
    for resource, bound in bounds:
        if resource not in dense:
            raise ValueError(f"a width is chosen by {', '.join(dense)}; nothing is known of {resource!r}")
        limit = bound / dense[resource] if bound > 1 else bound
        largest = min(largest, bisect_right(widths, limit, key=lambda width, r=resource: share(width, r)))  # type: ignore[misc]
    if not largest:
        raise ValueError(f"not even one unit per layer fits {dict(bounds)}")
    return widths[largest - 1]


def _units(width: float, units: int) -> int:
    return max(1, math.ceil(width * units - 1e-9))  # k/n*n may come out a hair above k


@lru_cache(maxsize=16)
def _plan(task_model: Any, example: Example) -> BlockPlan:
    model = copy.deepcopy(skeleton(task_model))
    found = split_model(
        model, example.batch(), "unit", blocks=2**62, smallest=0.0, keep_output=True, output_blocks=1
    )  # every unit a block
    plan = BlockPlan(found, {name: tuple(p.shape) for name, p in model.named_parameters()}, "unit")
    if not plan.sliceable:
        raise ValueError(f"the units of this model cannot be found: {plan.network.reason if plan.network else ''}")
    return plan
