"""pFedGate with ideas that were tried and not kept, for `gate_trials.py`: other signals for dropped blocks, above all.

A dropped unit is exactly zero, and so is the slope of a ReLU there: no gradient reaches its importance, not even in
masked execution. What is left is to let it live now and then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal
from unittest import mock

import torch

from pfedgate.algorithms.pfedgate import PFedGate
from pfedgate.gating.budget import Budget
from pfedgate.gating.gate import GateOutput
from pfedgate.gating.model import GatedModel, Selection
from pfedgate.personal import Personal, Setting
from pfedgate.types import Local, State, Update


@dataclass(frozen=True)
class Tried(PFedGate):
    """With exploration, whole steps, a budget that starts at 1, other features, outputs that may be dropped."""

    noise: float = 0.0  # of importances, before their sigmoid, drawn once a round; fades out over the first half
    whole_every: int = 0  # every so many steps all blocks live, whatever the budget
    warm_up: int = 0  # rounds in which budgets shrink from 1 to what they are
    features: Literal["pooled", "patches"] = "pooled"
    keep_output: bool = True

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        gated = self._workspace(local.device).gated
        with mock.patch.object(gated, "choose", self._chooser(gated, local)):
            return super().train(got, private, local)

    def _chooser(self, gated: GatedModel, local: Local) -> Callable[[GateOutput], Selection]:
        left = max(0.0, 1 - 2 * local.round.index / local.round.rounds)
        noise = self.noise * left * torch.randn(len(gated.plan.blocks), generator=local.generator("explore"))
        everything, steps = gated.plan.selector(Budget(params=1.0)), itertools.count(1)

        def choose(out: GateOutput) -> Selection:
            moved = torch.sigmoid(torch.logit(out.importance.detach()) + noise)
            out = out._replace(importance=out.importance + (moved - out.importance.detach()))
            whole = self.whole_every and next(steps) % self.whole_every == 0
            with mock.patch.object(gated, "selector", everything if whole else gated.selector):
                return GatedModel.choose(gated, out)

        return choose

    def _load(self, got: State, private: State, local: Local) -> Personal:
        personal = super()._load(got, private, local)
        if local.round.index < self.warm_up and isinstance(local.card.budget, float):
            share = local.card.budget + (1 - local.card.budget) * (1 - local.round.index / self.warm_up)
            personal.gated.rebudget(self._budget(replace(local.card, budget=share)))
        return personal

    @property
    def _setting(self) -> Setting:
        usual = super()._setting
        options = tuple(sorted({**dict(usual.options), "keep_output": self.keep_output}.items()))
        return replace(usual, gate=replace(usual.gate, features=self.features), options=options)
