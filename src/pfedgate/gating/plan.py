"""The plan: how a model is cut into blocks, what they cost, and which selections fit a budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pfedgate.gating.plan_table import Row, plan_rows, plan_text
from pfedgate.gating.selection.budget import Budget, CostModel, Group, InfeasibleBudget, Selector, Term
from pfedgate.gating.slicing.axes import Parts, is_dense
from pfedgate.gating.slicing.live import Bools, Ints, Live, constant
from pfedgate.gating.splitters import Block, Split, axis_blocks

GATE_SHARE = 0.02  # FLOPs of the gate that do not count against the budget, as a share of the dense model's
_REMEMBERED = 256  # selections whose consequences are kept


class BlockPlan:
    """How a model is cut into blocks, what they cost, and which resources dropping them saves.

    `blocks` in the order of the gate's outputs; `sizes` counts their parameters; `costs` is the cost model of the
    selection; `resources` are the resources that this plan can reduce, in the order they are bound by a number.
    Copies of a model share one plan: it knows no weights.
    """

    def __init__(self, split: Split, shapes: Mapping[str, tuple[int, ...]], how: str) -> None:
        self.how, self.blocks, self.owners = how, split.blocks, split.owners
        self.network, self.cuts, self.first_block = split.network, split.cuts, split.first_block
        self.shapes = dict(shapes)
        self.size = sum(math.prod(shape) for shape in shapes.values())
        self.recipe: Any = None  # the arguments of `gate`, so that a pickled model can be planned again
        self.gate_size = 0  # parameters of the gate, once there is one
        self.gate_flops = 0.0  # per sample
        self.keep = np.array([block.keep for block in self.blocks])
        self.sizes = np.zeros(len(self.blocks), np.int64)
        for name, owner in self.owners.items():
            inner = math.prod(shapes[name]) // len(owner.block)
            self.sizes += np.bincount(owner.block, minlength=len(self.blocks)) * inner
        self.sliceable = self.network is not None and self.network.program is not None
        self.axes: dict[str, dict[int, Parts]] = {}
        if self.network is not None and self.sliceable:
            self.axes = {
                name: {axis: parts for axis, parts in axes.items() if not is_dense(parts)}
                for name, axes in self.network.axes.items()
            }
        groups, terms, self.optional = self._structured() if self.cuts else self._loose()
        self.costs = CostModel(tuple(groups), tuple(terms))
        self.resources = self._resources()
        self._live: dict[bytes, Live] = {}
        self._selectors: dict[Budget, Selector] = {}
        self._choices: dict[Budget, bool] = {}
        self._blocks: dict[tuple[str, torch.device], Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockPlan:
        return self

    # -- cost model
    def _structured(self) -> tuple[list[Group], list[Term], Ints]:
        """Products of live shares: a layer's cost depends on what it writes and on what it reads."""
        assert self.network is not None
        number = {space: i for i, space in enumerate(self.cuts)}
        groups: list[Group] = []
        optional: list[int] = []
        for space, cut in self.cuts.items():
            groups.append(Group(self.name_of(space), cut.units, cut.first, cut.step, cut.count))
            optional.extend(range(self.first_block[space] + 1, self.first_block[space] + 1 + cut.count))
        terms: dict[tuple[str, tuple[int, ...]], float] = {}

        def add(resource: str, coefficient: float, axes: Iterable[Parts]) -> None:
            shares: list[tuple[float, tuple[int, ...]]] = [(coefficient, ())]
            for parts in axes:
                total = sum(part.length for part in parts)
                shares = [
                    (c * part.length / total, held if part.space is None else (*held, number[part.space]))
                    for c, held in shares
                    for part in parts
                ]
            for c, held in shares:
                key = (resource, tuple(sorted(held)))
                terms[key] = terms.get(key, 0.0) + c

        for name, shape in self.shapes.items():
            add("params", float(math.prod(shape)), self.axes.get(name, {}).values())
        for operation in self.network.operations:
            add("flops", operation.flops, (operation.written, operation.read))
        for activation in self.network.activations:
            add("activation_bytes", activation.nbytes, (activation.parts,))
        found = [Term(resource, c, held) for (resource, held), c in terms.items()]
        return groups, found, np.array(optional, np.int64)

    def _loose(self) -> tuple[list[Group], list[Term], Ints]:
        """Blocks that are masked, not skipped: only parameters are saved. Blocks of equal size form a group."""
        groups: list[Group] = []
        terms = [Term("params", float(self.sizes[self.keep].sum()), ())]
        optional: list[int] = []
        layers: dict[tuple[str, int], list[int]] = {}
        for number, block in enumerate(self.blocks):
            if not block.keep:
                layers.setdefault((block.name.rpartition("/")[0], int(self.sizes[number])), []).append(number)
        for (layer, size), numbers in layers.items():
            terms.append(Term("params", float(size * len(numbers)), (len(groups),)))
            groups.append(Group(layer, len(numbers), 0, 1, len(numbers)))
            optional.extend(numbers)
        return groups, terms, np.array(optional, np.int64)

    def _resources(self) -> tuple[str, ...]:
        dense, smallest = self.costs.dense(), self.costs.smallest()
        return tuple(
            r
            for r in ("params", "flops", "activation_bytes")
            if dense.get(r, 0.0) > 0 and (r == "params" or smallest.get(r, 0.0) < dense[r])
        )

    # -- selection
    def budget(self, value: float | Mapping[str, float | None] | Budget) -> Budget:
        """A budget for this plan; a plain number binds every resource that the plan can reduce."""
        if isinstance(value, Budget) and value in self._selectors:
            return value
        found = Budget.of(value, self.resources)
        for resource in found.bound():
            if resource != "latency_ms" and resource not in self.costs.dense():
                raise ValueError(
                    f"{self.how} blocks are masked, not skipped, so they save no {resource}: "
                    f"bind {' or '.join(self.resources)}, or use split='unit' on a model that can be traced"
                )
        return found

    def selector(self, value: float | Mapping[str, float | None] | Budget) -> Selector:
        """Chooses blocks under a budget; remembered, because making one takes longer than using it.

        FLOPs of the gate beyond 2 % of the dense model's come out of the FLOP budget, unless the whole model fits it.
        """
        budget = self.budget(value)
        if budget not in self._selectors:
            try:
                self._selectors[budget] = self._selector(budget)
            except InfeasibleBudget as error:
                raise InfeasibleBudget(f"{error}{self._why_whole()}", error.smallest) from None
        return self._selectors[budget]

    def _why_whole(self) -> str:
        notes = () if self.network is None else self.network.notes[:3]
        return " Not skipped: " + "; ".join(f"{place}: {reason}" for place, reason in notes) + "." if notes else ""

    def _selector(self, budget: Budget) -> Selector:
        dense = self.costs.dense().get("flops", 0.0)
        extra = max(0.0, self.gate_flops - GATE_SHARE * dense)
        limit = budget.limits(self.costs).get("flops", math.inf)
        if not extra or limit >= dense:
            return Selector(self.costs, budget)
        least = self.costs.smallest()["flops"] + extra
        if limit < least:
            raise InfeasibleBudget(
                f"the blocks that are always kept, and the gate, exceed the budget: flops: asked {limit / dense:.4f} "
                f"of the dense model, smallest feasible {math.ceil(least / dense * 1e4) / 1e4:.4f} (of which the gate "
                f"{extra / dense:.4f}). Raise the budget, keep less always (smallest=...), or use a smaller gate "
                "(fewer blocks, GateConfig(pool=...))",
                {"flops": least},
            )
        return Selector(self.costs, replace(budget, flops=limit - extra))

    def leaves_a_choice(self, value: float | Mapping[str, float | None] | Budget) -> bool:
        """False if blocks must be dropped and only one selection is possible; remembered, as selectors are."""
        budget = self.budget(value)
        if budget not in self._choices:
            selector = self.selector(budget)
            self._choices[budget] = selector.solver == "everything fits" or selector.reachable_masks(2) > 1
        return self._choices[budget]

    def reachable_masks(self, budget: float | Mapping[str, float | None] | Budget, limit: int = 10**6) -> int:
        """How many different selections are possible under a budget, counted up to `limit`."""
        return self.selector(budget).reachable_masks(limit)

    def add_latency(self, terms: tuple[Term, ...]) -> None:
        """Make latency a resource that can be bound, by terms measured on this device (see `timing.py`)."""
        others = tuple(term for term in self.costs.terms if term.resource != "latency_ms")
        self.costs = replace(self.costs, terms=(*others, *terms))
        self._selectors.clear()
        self._choices.clear()
        self._live.clear()

    def live(self, kept: Bools) -> Live:
        """What is live under a selection; remembered, because selections repeat from batch to batch."""
        key = np.packbits(kept).tobytes()
        found = self._live.get(key)
        if found is None:
            if len(self._live) >= _REMEMBERED:
                self._live.clear()
            found = self._live[key] = Live(self, kept.copy())
        return found

    def axis_blocks(self, parts: Parts) -> npt.NDArray[np.int64]:
        """Block of each position along an axis; -1 where it belongs to none."""
        return axis_blocks(parts, self.cuts, self.first_block)

    def block_index(self, name: str, device: torch.device) -> Tensor:
        """Block of each position of a parameter along its owner's axis, as a tensor."""
        key = (name, device)
        if key not in self._blocks:
            self._blocks[key] = constant(self.owners[name].block, device)
        return self._blocks[key]

    @property
    def class_blocks(self) -> npt.NDArray[np.int64] | None:
        """The block of each output of the network, where every output has one of its own; None elsewhere."""
        outputs = () if self.network is None else self.network.outputs
        found = [self.owners[name].block for name in outputs if self.owners[name].axis == 0]
        if not found or any(not np.array_equal(block, found[0]) for block in found):
            return None
        return found[0] if len(set(found[0].tolist())) == len(found[0]) else None

    def name_of(self, space: int) -> str:
        """The layer that writes a set of units."""
        assert self.network is not None
        return self.network.spaces[space].producers[0][1]

    # -- printing
    @property
    def rows(self) -> list[Row]:
        """The lines of the printed plan."""
        return plan_rows(self)

    def __str__(self) -> str:
        return plan_text(self)


__all__ = ["Block", "BlockPlan", "Live"]
