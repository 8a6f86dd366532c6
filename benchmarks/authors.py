"""pFedGate with the departures of the authors' code from their paper: a switch each, to bracket published numbers.

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

`AUTHORS` are all of them but D27, which the published scripts switch off. Not switches here: D15 follows from D13, D14
and D16 (at s = .3 one single mask is possible, at s = .1 the budget is broken); D19 is the paper's own design; D21 is
`AuthorsModel.sparse_ratio`; D23 (dense execution) holds for all flat blocks; D28, the chain rule, is everybody's
choice. The protocol (D1: scored after local training) is an option of the run: points = ("after_local",).

`python benchmarks/authors.py --budget 0.5` runs the method on a small federation, as published and as released;
`--switch D14` (several times) chooses single departures. `authors_gate` wraps one module.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfedgate import Budget, GatedModel, InfeasibleBudget, LiveOptimizer, Selection, data, gate, models
from pfedgate.algorithms.pfedgate import PFedGate
from pfedgate.algorithms.pfedgate.personal import Personal, Setting
from pfedgate.core.errors import unknown
from pfedgate.core.types import Local, Task
from pfedgate.engine.server import Options, run
from pfedgate.gating.gate.config import GateConfig
from pfedgate.gating.gate.network import GateOutput
from pfedgate.gating.plan import BlockPlan
from pfedgate.gating.selection.budget import CostModel, Group, Selector, Term
from pfedgate.gating.splitters import Block, Piece
from pfedgate.training.fit import loop

BLOCKS = 5  # B in the authors' scripts
LEVELS = 10  # importances are rounded to tenths
NUMBERS = {
    "single_path": "D12", "equal_blocks": "D13", "capacity": "D14", "by_operator": "D14", "greedy": "D16",
    "kept_only": "D17", "skip_full": "D18", "clip_importance": "D20", "flat_input": "D22", "dense_upload": "D24",
    "move_dropped": "D25", "relu_logits": "D26", "bi_level": "D27",
}  # fmt: skip
AUTHORS = frozenset(NUMBERS) - {"bi_level"}


def switches(names: Iterable[str]) -> frozenset[str]:
    """Departures by name or number: `switches(["D14", "kept_only"])` are three of them."""
    result: set[str] = set()
    for name in names:
        meant = {switch for switch, number in NUMBERS.items() if name in (switch, number)}
        if not meant:
            raise ValueError(unknown("deviation", name, [*NUMBERS, *NUMBERS.values()]))
        result |= meant
    return frozenset(result)


def equal_blocks(model: nn.Module, blocks: int = BLOCKS) -> list[Block]:
    """Every tensor, flattened, in pieces of ceil(d / B); the first is always kept, the last may be smaller."""
    result = []
    for name, parameter in model.named_parameters():
        size = parameter.numel()
        step = -(-size // min(blocks, size))
        for number, start in enumerate(range(0, size, step)):
            piece = Piece(name, start, min(start + step, size), axis=None)
            result.append(Block(f"{name}/{number}", (piece,), keep=number == 0))
    return result


def authors_gate(
    model: nn.Module,
    example: Tensor | Sequence[int],
    departures: Iterable[str] = AUTHORS,
    config: GateConfig | None = None,
    budget: float | Mapping[str, float | None] | Budget = 1.0,
    *,
    smallest: float = 0.05,
    generator: torch.Generator | None = None,
) -> AuthorsModel:
    """The paper's method with these departures around a module; its budget is a share of parameters."""
    departures = frozenset(departures)
    config = replace(config or GateConfig.paper(), post_norm="batch", activation="sigmoid")
    if "single_path" in departures:
        config = replace(config, paths=1)
    if "flat_input" in departures:
        config = replace(config, pool=0, max_share=float("inf"))
    gated = gate(
        model, example, 1.0, split=equal_blocks if "equal_blocks" in departures else "flat", blocks=BLOCKS,
        smallest=smallest, keep_output=False, gate=config, execution="masked", compensate="none",
        straight_through="kept" if "kept_only" in departures else "full", generator=generator,
    )  # fmt: skip
    return AuthorsModel(gated.model, gated.gate, gated.plan, departures, budget)


class AuthorsModel(GatedModel):
    """A gated model with some of the authors' departures."""

    def __init__(
        self,
        model: nn.Module,
        gate: Any,
        plan: BlockPlan,
        departures: frozenset[str],
        budget: float | Mapping[str, float | None] | Budget = 1.0,
    ) -> None:
        self.departures = departures
        self._rooms: dict[float, _Rooms] = {}
        through = "kept" if "kept_only" in departures else "full"
        linear = {f"{place}.{name}" for place, module in model.named_modules() if isinstance(module, nn.Linear)
                  for name, _ in module.named_parameters(recurse=False)}  # fmt: skip
        owners = [block.pieces[0].parameter for block in plan.blocks]
        self._linear = np.array([owner in linear for owner in owners])
        super().__init__(model, gate, plan, budget, execution="masked", compensate="none", straight_through=through)

    def rebudget(self, budget: float | Mapping[str, float | None] | Budget) -> AuthorsModel:
        """Bind another share of the parameters."""
        self.budget = Budget.of(budget, ("params",))
        share = self.budget.params
        if share is None or len(self.budget.bound()) > 1:
            raise ValueError(f"this variant takes one budget, a share of parameters; got {self.budget}")
        self.share = share if share <= 1 else share / self.plan.size
        self.least = min(max(1 / BLOCKS, 0.1), self.share)
        if self.departures & {"capacity", "by_operator", "greedy"}:
            if self.share not in self._rooms:
                self._rooms[self.share] = _Rooms(self.plan, self._linear, self.share, self.least, self.departures)
            self.selector = self._rooms[self.share]  # type: ignore[assignment]
        else:
            self.selector = self.plan.selector(self.budget)
        return self

    def select(self, x: Tensor) -> tuple[Selection, GateOutput]:
        """The paper's selection, with deviations 16-20."""
        if self.share >= 1 and "skip_full" in self.departures:
            out = self.gate(x)
            mask = np.ones(len(self.plan.blocks), bool)
            self.last = Selection(mask, out.weights, out.importance, out.weights, self.plan.live(mask))
            return self.last, out
        if "clip_importance" not in self.departures:
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
        return torch.relu(y) if "relu_logits" in self.departures else y

    @property
    def sparse_ratio(self) -> float:
        """The authors' log of the last batch's sparsity: without the pieces that are always kept (D21)."""
        assert self.last is not None
        return float(self.plan.sizes[self.last.kept & ~self.plan.keep].sum()) / self.plan.size

    def optimizer(self, name: str = "sgd", *, lr: float, gate_lr: float | None = None, **options: Any) -> LiveOptimizer:
        """An optimiser that moves what was live, or everything."""
        kind = _EverywhereOptimizer if "move_dropped" in self.departures else LiveOptimizer
        return kind(self, name, lr=lr, gate_lr=gate_lr, **options)

    def __reduce__(self) -> Any:
        raise TypeError("a model with the authors' departures is for studies: save its state_dict() instead")


class _EverywhereOptimizer(LiveOptimizer):
    """Momentum and decay act on dropped pieces as on others."""

    def _unowned(self, *_: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
        return []


class _Rooms:
    """Chooses pieces for one room, or one for each kind of operator; in place of a `Selector`."""

    solver = "rooms"

    def __init__(
        self, plan: BlockPlan, linear: np.ndarray, share: float, least: float, departures: frozenset[str]
    ) -> None:
        kinds = [linear, ~linear] if "by_operator" in departures else [np.ones_like(linear)]
        self.sizes, self.rooms = plan.sizes[plan.optional], []
        for kind in kinds:
            first, rest = (float(plan.sizes[kind & mask].sum()) for mask in (plan.keep, ~plan.keep))
            room = (
                float(np.rint((share - least) * rest)) if "capacity" in departures else share * (first + rest) - first
            )
            if room < 0:
                raise InfeasibleBudget(
                    f"the pieces that are always kept are {first / (first + rest):.4f} of the parameters, "
                    f"more than the budget of {share}; raise it",
                    {"params": first},
                )
            numbers = np.flatnonzero(kind[plan.optional])
            choose = _Greedy if "greedy" in departures else _Exact
            self.rooms.append((numbers, choose(self.sizes[numbers], room)))

    def select(self, importance: np.ndarray) -> np.ndarray:
        """The pieces to keep, over all optional ones."""
        if not np.isfinite(importance).all():
            raise ValueError("importances must be finite")
        mask = np.zeros(len(self.sizes), bool)
        for numbers, room in self.rooms:
            mask[numbers] = room.fill(importance[numbers])
        return mask


class _Greedy:
    """The most important first, rounded to tenths, as long as they fit."""

    def __init__(self, sizes: np.ndarray, room: float) -> None:
        self.sizes, self.room = sizes, room

    def fill(self, importance: np.ndarray) -> np.ndarray:
        mask, room = np.zeros(len(self.sizes), bool), self.room
        for number in np.argsort(-np.rint(importance * LEVELS), kind="stable"):
            if self.sizes[number] <= room:
                mask[number] = True
                room -= self.sizes[number]
        return mask


class _Exact:
    """The best that fit, as everywhere else; pieces of one size form a group."""

    def __init__(self, sizes: np.ndarray, room: float) -> None:
        self.order = np.argsort(sizes, kind="stable")
        values, counts = np.unique(sizes, return_counts=True)
        groups = tuple(Group(str(size), int(n), 0, 1, int(n)) for size, n in zip(values, counts, strict=True))
        terms = tuple(
            Term("params", float(size * n), (g,)) for g, (size, n) in enumerate(zip(values, counts, strict=True))
        )
        fits = bool(len(values)) and room >= max(2.0, float(values[0]))  # up to 1 would be a share
        self.selector = Selector(CostModel(groups, terms), Budget(params=room)) if fits else None

    def fill(self, importance: np.ndarray) -> np.ndarray:
        mask = np.zeros(len(self.order), bool)
        if self.selector is not None:
            mask[self.order] = self.selector.select(importance[self.order])
        return mask


# -- the algorithm
@dataclass(frozen=True)
class ReleasedSetting(Setting):
    """How a model is gated with the authors' departures."""

    departures: frozenset[str] = AUTHORS

    def build(self, model: nn.Module, example: Tensor) -> GatedModel:
        return authors_gate(model, example, self.departures, self.gate)


@dataclass(frozen=True)
class Released(PFedGate):
    """pFedGate as in the authors' code: the paper's variant with `departures`."""

    departures: tuple[str, ...] = tuple(sorted(AUTHORS))
    variant: str | None = "paper"

    @property
    def _setting(self) -> Setting:
        return ReleasedSetting(super()._setting.gate, departures=switches(self.departures))

    def _fit(self, personal: Personal, local: Local) -> tuple[float, Tensor]:
        departures, loss = switches(self.departures), self.task.loss
        stepper = self._stepper(personal, local)
        if "bi_level" in departures:
            loop(self.task, local, lambda batch: personal.step(stepper, loss, batch, gate_alone=True))
            personal.gated.gate.requires_grad_(False)
        value, _ = loop(self.task, local, lambda batch: personal.step(stepper, loss, batch))
        personal.gated.gate.requires_grad_(True)
        if "dense_upload" in departures:
            return value, torch.arange(self.tiles.count)
        return value, personal.live_tiles(stepper)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=0.5, help="share of the parameters")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--switch", action="append", default=[], help="a departure, by name or number; default: all")
    args = parser.parse_args()
    federation = data.synthetic(clients=10, samples_per_client=60, features=16, classes=4, classes_per_client=2)

    def model() -> nn.Module:
        return models.build("mlp", (16,), 4)

    task = Task(model=model, example=torch.zeros(16, 16), batch=16)
    released = Released(task, departures=tuple(args.switch) or tuple(sorted(AUTHORS)))
    for name, algorithm in {"as published": PFedGate(task, variant="paper"), "as released": released}.items():
        options = Options(rounds=args.rounds, budget={"params": args.budget}, points=("after_local",))
        summary = run(algorithm, federation, options).summary
        print(name, {key: round(value, 4) for key, value in summary.items() if isinstance(value, float)})


if __name__ == "__main__":
    main()
