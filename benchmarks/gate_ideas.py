"""pFedGate with ideas that were tried and not kept, for `gate_trials.py` and `mixed_trials.py`.

Other signals for dropped blocks, above all: a dropped unit is exactly zero, and so is the slope of a ReLU there, so no
gradient reaches its importance, not even in masked execution. What is left is to let it live now and then. And masks
that labels choose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn

from pfedgate.algorithms.pfedgate import PFedGate
from pfedgate.algorithms.pfedgate.personal import Personal, Setting
from pfedgate.core.seeds import generator
from pfedgate.core.types import CPU, Local, State, Update
from pfedgate.gating.gate.features import Features, Reader, _average
from pfedgate.gating.gate.network import GateOutput
from pfedgate.gating.model import GatedModel
from pfedgate.gating.optimizer import LiveOptimizer
from pfedgate.gating.selection.budget import Budget
from pfedgate.gating.slicing.live import Live, Selection

UNITS = 4  # of the first layer, that a gate may read


class FirstLayer(Reader):
    """Reads what the first units of a model's first layer make of a batch, instead of the batch."""

    layer: nn.Conv2d

    def __init__(self, example: Tensor, pool: int, **options: Any) -> None:
        super().__init__(example[:, :1].repeat(1, UNITS, 1, 1), pool, **options)

    def __call__(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Features:
        with torch.no_grad():
            seen = nn.functional.conv2d(x, self.layer.weight[:UNITS], self.layer.bias[:UNITS])
            return super().__call__(seen.relu_(), dtype)


class Patches(Reader):
    """Adds the standard deviation within every pooling cell to its mean: twice the features."""

    def __init__(self, example: Tensor, pool: int, **options: Any) -> None:
        super().__init__(example, pool, **options)
        if self.kind != "flat":
            self.positions *= 2
            self.features *= 2

    @torch.no_grad()
    def __call__(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Features:
        seen = super().__call__(x, dtype)
        if self.kind == "flat":
            return seen
        # Around the channel's mean, so that a large offset does not eat the digits of the spread.
        centred = self._channels_first(x).to(dtype) - seen.mean.reshape(*seen.mean.shape, *[1] * (x.dim() - 2))
        variance = _average(centred.square(), self.cells).flatten(2) - (seen.pooled - seen.mean.unsqueeze(2)).square()
        spread = variance.clamp(min=0).sqrt() + seen.mean.unsqueeze(2)  # the norm takes this mean off
        return seen._replace(pooled=torch.cat([seen.pooled, spread], 2))


READERS = {"first layer": FirstLayer, "patches": Patches}


# What gradients of W are multiplied with, by live shares of a layer's inputs and units. W' = W / sqrt(inputs), so the
# root of both lets W' move by the root of units over inputs; the others were before it, and more of the same.
STEPS: dict[str, Callable[[float, float], float]] = {
    "inputs": lambda inputs, units: inputs**1.5,
    "root": lambda inputs, units: (inputs * units) ** 0.5,
    "units": lambda inputs, units: units,
    "first layer": lambda inputs, units: inputs**1.5 if inputs < 1 else units,
}


@dataclass(frozen=True)
class Tried(PFedGate):
    """With exploration, whole steps, other budgets, features or rates, outputs that may drop, masks by labels."""

    noise: float = 0.0  # of importances, before their sigmoid, drawn once a round; fades out over the first half
    whole_every: int = 0  # every so many steps all blocks live, whatever the budget
    narrow: float = 0.0  # share of steps in which clients keep no more than those with the smallest budget do
    least: float = 0.1  # that budget, of the parameters
    warm_up: int = 0  # rounds in which budgets shrink from 1 to what they are
    features: Literal["pooled", "patches", "first layer"] = "pooled"
    keep_output: bool = True
    steps: str = "root"  # of STEPS
    common: float = 1.0  # share of what a layer keeps at first that is the same for all; labels choose the rest

    def init_client(self, got: State, local: Local) -> State:
        private = super().init_client(got, local)
        if self.common < 1:
            self._by_labels(private["gate/post_norm.bias"][-1], local)
        return private

    def _by_labels(self, importance: Tensor, local: Local) -> None:
        """Reorder the blocks of each layer: those that all keep, then those whose random direction suits the labels."""
        plan, first = self._workspace(local.device).gated.plan, 0
        frequencies = torch.bincount(local.train.y.long()).float() / len(local.train.y)
        kept = plan.selector(self._budget(local.card)).select(torch.sigmoid(importance)[plan.optional].double().numpy())
        for group in plan.costs.groups:
            part = slice(first, first + group.count)
            blocks, width, first = torch.from_numpy(plan.optional[part]), int(kept[part].sum()), first + group.count
            values, order = importance[blocks].sort(descending=True, stable=True)
            shared = round(self.common * width)
            # The same in all layers: a block's neighbours before and after are kept by much the same clients.
            drawn = torch.randn(group.count, 1000, generator=generator(0, "directions"))[:, : len(frequencies)]
            suits = (drawn @ frequencies)[order[shared:]].argsort(descending=True)
            importance[blocks[torch.cat([order[:shared], order[shared:][suits]])]] = values

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        gated, rule = self._workspace(local.device).gated, STEPS[self.steps]

        def restoring(_: LiveOptimizer, name: str, live: Live) -> float:
            return rule(live.share_read(name), live.share_written(name))

        with (
            mock.patch.object(gated, "choose", self._chooser(gated, local)),
            mock.patch.object(LiveOptimizer, "_restoring", restoring),
        ):
            return super().train(got, private, local)

    def _chooser(self, gated: GatedModel, local: Local) -> Callable[[GateOutput], Selection]:
        left = max(0.0, 1 - 2 * local.round.index / local.round.rounds)
        noise = self.noise * left * torch.randn(len(gated.plan.blocks), generator=local.generator("explore"))
        everything, little = (gated.plan.selector(Budget(params=share)) for share in (1.0, self.least))
        steps, drawn = itertools.count(1), local.generator("narrow")

        def choose(out: GateOutput) -> Selection:
            moved = torch.sigmoid(torch.logit(out.importance.detach()) + noise)
            out = out._replace(importance=out.importance + (moved - out.importance.detach()))
            step, selector = next(steps), gated.selector
            if self.whole_every and step % self.whole_every == 0:
                selector = everything
            elif torch.rand((), generator=drawn) < self.narrow:
                selector = little
            with mock.patch.object(gated, "selector", selector):
                return GatedModel.choose(gated, out)

        return choose

    def _load(self, got: State, private: State, local: Local) -> Personal:
        personal = super()._load(got, private, local)
        if local.round.index < self.warm_up and isinstance(local.card.budget, float):
            share = local.card.budget + (1 - local.card.budget) * (1 - local.round.index / self.warm_up)
            personal.gated.rebudget(self._budget(replace(local.card, budget=share)))
        return personal

    def _workspace(self, device: torch.device = CPU, setting: Setting | None = None) -> Personal:
        if self.features not in READERS:
            return super()._workspace(device, setting)
        with mock.patch("pfedgate.gating.gate.network.Reader", READERS[self.features]):
            personal = super()._workspace(device, setting)
        if self.features == "first layer":
            layer = next(m for m in personal.gated.model.modules() if isinstance(m, nn.Conv2d))
            personal.gated.gate.reader.layer = layer
        return personal

    @property
    def _setting(self) -> Setting:
        usual = super()._setting
        options = tuple(sorted({**dict(usual.options), "keep_output": self.keep_output}.items()))
        # More room than usual, and thereby a workspace of its own.
        room = {"first layer": 0.25, "patches": 0.0631}.get(self.features, usual.gate.max_share)
        return replace(usual, gate=replace(usual.gate, max_share=room), options=options)
