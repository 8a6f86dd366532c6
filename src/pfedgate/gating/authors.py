"""Where the authors' released code departs from their paper: a switch each, to bracket published numbers.

The base is `variant="paper"`: flat blocks, two paths, BatchNorm and sigmoid, one budget over all parameters, exact
selection, straight-through for all blocks. Numbers are those of our notes.

====  ===============  ==============================================================================================
D12   single_path      G and M from one path
D13   equal_blocks     every tensor in B = 5 equal pieces, so the piece that is always kept is a fifth of it
D14   capacity         room for the other pieces: (s - s_min) of their size, s_min = min(max(1/B, .1), s), not s·d
D14   by_operator      … separately for the tensors of linear layers and for all others
D16   greedy           pieces by importance rounded to tenths, as long as they fit; ties: the first
D17   kept_only        dropped pieces get no gradient of G (straight-through is multiplied by zero)
D18   skip_full        at s = 1 nothing is selected, so G gets no gradient at all
D20   clip_importance  G is at least s_min, without a gradient below
D22   flat_input       the gate reads all pixels: 60 % of the size of the CIFAR-10 network
D24   dense_upload     everything is uploaded and averaged, sent or not by others
D25   move_dropped     momentum and decay move dropped pieces, too
D26   relu_logits      ReLU on the logits
D27   bi_level         an epoch of the gate, then one of the model (the program's default, but not that of its scripts)
====  ===============  ==============================================================================================

`variant="authors"` is all of them but D27, which the published scripts switch off. Not switches here: D15 follows from
D13, D14 and D16 (at s = .3 one single mask is possible, at s = .1 the budget is broken); D19 is the paper's own design;
D21 is `AuthorsModel.sparse_ratio`; D23 (dense execution) holds for all flat blocks; D28, the chain rule, is everybody's
choice. The protocol (D1: scored after local training) is an option of the run: points = ("after_local",).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfedgate.core.errors import unknown
from pfedgate.gating.gate.config import GateConfig
from pfedgate.gating.gate.network import GateOutput
from pfedgate.gating.optimizer import LiveOptimizer
from pfedgate.gating.plan import BlockPlan
from pfedgate.gating.selection.budget import Budget, CostModel, Group, InfeasibleBudget, Selector, Term
from pfedgate.gating.selection.costs import Bools, Floats, Ints
from pfedgate.gating.splitters import Block, Piece
from pfedgate.gating.wrap import GatedModel, Selection, gate

BLOCKS = 5  # B in the authors' scripts
LEVELS = 10  # importances are rounded to tenths
NUMBERS = {
    "single_path": "D12", "equal_blocks": "D13", "capacity": "D14", "by_operator": "D14", "greedy": "D16",
    "kept_only": "D17", "skip_full": "D18", "clip_importance": "D20", "flat_input": "D22", "dense_upload": "D24",
    "move_dropped": "D25", "relu_logits": "D26", "bi_level": "D27",
}  # fmt: skip
AUTHORS = frozenset(NUMBERS) - {"bi_level"}


def deviations(variant: str, changes: Sequence[str] = ()) -> frozenset[str]:
    """The switches of a variant after changes: names or numbers, "-" before one to switch it off.

    >>> sorted(deviations("paper", ["D14", "kept_only"]))
    ['by_operator', 'capacity', 'kept_only']
    >>> "kept_only" in deviations("authors", ["-D17"])
    False
    """
    if variant not in ("paper", "authors"):
        raise ValueError(unknown("variant", str(variant), ("paper", "authors")))
    chosen = set(AUTHORS if variant == "authors" else ())
    for change in changes:
        name = change.removeprefix("-")
        meant = {switch for switch, number in NUMBERS.items() if name in (switch, number)}
        if not meant:
            raise ValueError(unknown("deviation", name, [*NUMBERS, *NUMBERS.values()]))
        chosen = chosen - meant if change.startswith("-") else chosen | meant
    return frozenset(chosen)


def equal_blocks(model: nn.Module, blocks: int = BLOCKS) -> list[Block]:
    """Every tensor, flattened, in pieces of ceil(d / B); the first is always kept, the last may be smaller."""
    found = []
    for name, parameter in model.named_parameters():
        size = parameter.numel()
        step = -(-size // min(blocks, size))
        for number, start in enumerate(range(0, size, step)):
            piece = Piece(name, start, min(start + step, size), axis=None)
            found.append(Block(f"{name}/{number}", (piece,), keep=number == 0))
    return found


def authors_gate(
    model: nn.Module,
    example: Tensor | Sequence[int],
    chosen: Iterable[str],
    config: GateConfig | None = None,
    budget: float | Mapping[str, float | None] | Budget = 1.0,
    *,
    smallest: float = 0.05,
    generator: torch.Generator | None = None,
) -> AuthorsModel:
    """The paper's method with the chosen deviations around a module; its budget is a share of parameters."""
    chosen = frozenset(chosen)
    config = replace(config or GateConfig.paper(), post_norm="batch", activation="sigmoid")
    if "single_path" in chosen:
        config = replace(config, paths=1)
    if "flat_input" in chosen:
        config = replace(config, pool=0, max_share=float("inf"))
    made = gate(
        model, example, 1.0, split=equal_blocks if "equal_blocks" in chosen else "flat", blocks=BLOCKS,
        smallest=smallest, keep_output=False, gate=config, execution="masked", compensate="none",
        straight_through="kept" if "kept_only" in chosen else "full", generator=generator,
    )  # fmt: skip
    return AuthorsModel(made.model, made.gate, made.plan, chosen, budget)


class AuthorsModel(GatedModel):
    """A gated model with some of the authors' deviations."""

    def __init__(
        self,
        model: nn.Module,
        gate: Any,
        plan: BlockPlan,
        chosen: frozenset[str],
        budget: float | Mapping[str, float | None] | Budget = 1.0,
    ) -> None:
        self.chosen = chosen
        self._rooms: dict[float, _Rooms] = {}
        through = "kept" if "kept_only" in chosen else "full"
        linear = {f"{place}.{name}" for place, module in model.named_modules() if isinstance(module, nn.Linear)
                  for name, _ in module.named_parameters(recurse=False)}  # fmt: skip
        owners = [block.pieces[0].parameter for block in plan.blocks]
        self._linear = np.array([owner in linear for owner in owners])
        super().__init__(model, gate, plan, budget, execution="masked", compensate="none", straight_through=through)

    def rebudget(self, budget: float | Mapping[str, float | None] | Budget) -> AuthorsModel:
        """Bind another share of the parameters."""
        self.budget = Budget.of(budget, ("params",))
        asked = self.budget.params
        if asked is None or len(self.budget.bound()) > 1:
            raise ValueError(f"this variant knows one budget, a share of parameters; got {self.budget}")
        self.share = asked if asked <= 1 else asked / self.plan.size
        self.least = min(max(1 / BLOCKS, 0.1), self.share)
        if self.chosen & {"capacity", "by_operator", "greedy"}:
            if self.share not in self._rooms:
                self._rooms[self.share] = _Rooms(self.plan, self._linear, self.share, self.least, self.chosen)
            self.selector = self._rooms[self.share]  # type: ignore[assignment]
        else:
            self.selector = self.plan.selector(self.budget)
        return self

    def select(self, x: Tensor) -> tuple[Selection, GateOutput]:
        """As the paper's, with deviations 16-20."""
        if self.share >= 1 and "skip_full" in self.chosen:
            out = self.gate(x)
            kept = np.ones(len(self.plan.blocks), bool)
            self.last = Selection(kept, out.weights, out.importance, out.weights, self.plan.live(kept))
            return self.last, out
        if "clip_importance" not in self.chosen:
            return super().select(x)
        handle = self.gate.register_forward_hook(self._clip)
        try:
            return super().select(x)
        finally:
            handle.remove()

    def _clip(self, _: Any, __: Any, out: GateOutput) -> GateOutput:
        return out._replace(importance=out.importance.clamp(min=self.least))

    def forward(self, x: Tensor) -> Any:
        """The adapted model's logits."""
        y = super().forward(x)
        return torch.relu(y) if "relu_logits" in self.chosen else y

    @property
    def sparse_ratio(self) -> float:
        """What the authors log as sparsity of the last batch: without the pieces that are always kept (D21)."""
        assert self.last is not None
        return float(self.plan.sizes[self.last.kept & ~self.plan.keep].sum()) / self.plan.size

    def optimizer(self, name: str = "sgd", *, lr: float, gate_lr: float | None = None, **options: Any) -> LiveOptimizer:
        """An optimiser that moves what was live, or everything."""
        kind = _EverywhereOptimizer if "move_dropped" in self.chosen else LiveOptimizer
        return kind(self, name, lr=lr, gate_lr=gate_lr, **options)

    def __reduce__(self) -> Any:
        raise TypeError("a model with the authors' deviations is for studies: save its state_dict() instead")


class _EverywhereOptimizer(LiveOptimizer):
    """Momentum and decay act on dropped pieces as on others."""

    def _unowned(self, *_: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
        return []


class _Rooms:
    """Chooses pieces for one room, or one for each kind of operator; in place of a `Selector`."""

    solver = "rooms"

    def __init__(self, plan: BlockPlan, linear: Bools, share: float, least: float, chosen: frozenset[str]) -> None:
        kinds = [linear, ~linear] if "by_operator" in chosen else [np.ones_like(linear)]
        self.sizes, self.rooms = plan.sizes[plan.optional], []
        for kind in kinds:
            first, rest = (float(plan.sizes[kind & mask].sum()) for mask in (plan.keep, ~plan.keep))
            room = float(np.rint((share - least) * rest)) if "capacity" in chosen else share * (first + rest) - first
            if room < 0:
                raise InfeasibleBudget(
                    f"the pieces that are always kept are {first / (first + rest):.4f} of the parameters, "
                    f"more than the budget of {share}; raise it",
                    {"params": first},
                )
            numbers = np.flatnonzero(kind[plan.optional])
            choose = _Greedy if "greedy" in chosen else _Exact
            self.rooms.append((numbers, choose(self.sizes[numbers], room)))

    def select(self, importance: Floats) -> Bools:
        """The pieces to keep, over all optional ones."""
        if not np.isfinite(importance).all():
            raise ValueError("importances must be finite")
        kept = np.zeros(len(self.sizes), bool)
        for numbers, room in self.rooms:
            kept[numbers] = room.fill(importance[numbers])
        return kept


class _Greedy:
    """The most important first, rounded to tenths, as long as they fit."""

    def __init__(self, sizes: Ints, room: float) -> None:
        self.sizes, self.room = sizes, room

    def fill(self, importance: Floats) -> Bools:
        kept, room = np.zeros(len(self.sizes), bool), self.room
        for number in np.argsort(-np.rint(importance * LEVELS), kind="stable"):
            if self.sizes[number] <= room:
                kept[number] = True
                room -= self.sizes[number]
        return kept


class _Exact:
    """The best that fit, as everywhere else; pieces of one size form a group."""

    def __init__(self, sizes: Ints, room: float) -> None:
        self.order = np.argsort(sizes, kind="stable")
        found, counts = np.unique(sizes, return_counts=True)
        groups = tuple(Group(str(size), int(n), 0, 1, int(n)) for size, n in zip(found, counts, strict=True))
        terms = tuple(
            Term("params", float(size * n), (g,)) for g, (size, n) in enumerate(zip(found, counts, strict=True))
        )
        self.fits = bool(len(found)) and room >= max(2.0, float(found[0]))  # up to 1 would be a share
        self.selector = Selector(CostModel(groups, terms), Budget(params=room)) if self.fits else None

    def fill(self, importance: Floats) -> Bools:
        kept = np.zeros(len(self.order), bool)
        if self.selector is not None:
            kept[self.order] = self.selector.select(importance[self.order])
        return kept
