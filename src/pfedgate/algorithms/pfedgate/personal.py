"""A client's gated model while it works: loaded from State, trained, packed, copied out as a predictor.

Tracing a network and planning its blocks costs more than a small client's round, so each process keeps one workspace
per model and setting. It is working memory only: `load` overwrites every parameter, buffer, budget and counter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfedgate.algorithms.pfedgate.tiles import Tiles
from pfedgate.core.kinds import Loss
from pfedgate.core.modules import persistent_buffers
from pfedgate.core.seeds import generator, seeded
from pfedgate.core.state import flat, pick
from pfedgate.core.types import Example, State
from pfedgate.gating.gate.config import GateConfig
from pfedgate.gating.gate.start import rank
from pfedgate.gating.model import GatedModel
from pfedgate.gating.optimizer import LiveOptimizer
from pfedgate.gating.plan import PlanTiles
from pfedgate.gating.selection.budget import Budget
from pfedgate.gating.wrap import gate
from pfedgate.training.workspace import Batch, flops_per_sample


@dataclass(frozen=True)
class Setting:
    """How a model is gated: the arguments of `pfedgate.gate`."""

    gate: GateConfig = field(default_factory=GateConfig)
    options: tuple[tuple[str, Any], ...] = ()  # the others, sorted: hashable, so that workspaces can be found again

    def build(self, model: nn.Module, example: Tensor) -> GatedModel:
        return gate(model, example, budget=1.0, gate=self.gate, **dict(self.options))


class Personal(nn.Module):
    """A gated model that knows where its numbers come from and counts what it spends."""

    def __init__(self, gated: GatedModel, task_model: Any) -> None:
        super().__init__()
        self.gated, self.task_model = gated, task_model
        self.pristine = copy.deepcopy(gated.gate)  # never loaded into: buffers of a new gate
        self.names = tuple(gated.plan.shapes)
        self.flops, self._densities = 0.0, list[float]()
        self.added: Tensor | None = None  # to the outputs, when it predicts: see `core.prior`

    @cached_property
    def parts(self) -> PlanTiles:
        """The tiles of the plan, and which blocks each of them needs."""
        return PlanTiles(self.gated.plan)

    @cached_property
    def tiles(self) -> Tiles:
        """The same tiles in the form that packing and merging use."""
        return Tiles.of(torch.from_numpy(self.parts.owner), self.parts.count)

    # -- state in, state out
    @torch.no_grad()
    def load(self, shared: State, gate: State, budget: Budget) -> None:
        for target, state in ((self.gated.model, shared), (self.gated.gate, gate)):
            own = {**dict(target.named_parameters()), **persistent_buffers(target)}
            for name, value in own.items():
                value.copy_(pick(state, [name])[name])
        self.gated.last = None
        self.gated.rebudget(budget)
        self.gated.train()
        self.flops, self._densities = 0.0, []

    def gate_state(self) -> State:
        return {name: value.detach().clone() for name, value in self.gated.gate.state_dict().items()}

    def vector(self) -> Tensor:
        """theta as one vector, in the order of the plan."""
        return flat({name: p.detach() for name, p in self.gated.model.named_parameters()})

    # -- work
    def step(
        self, optimizer: LiveOptimizer, loss: Loss, batch: Batch, size: int | None = None, *, gate_alone: bool = False
    ) -> Tensor:
        """One step of model and gate, or of the gate on a model that stands still; the mean loss of the batch.

        Batches of more than `size` samples are computed in microbatches.
        """
        optimizer.zero_grad()
        with _frozen(self.gated.model) if gate_alone else nullcontext():
            if size is None or batch.n <= size:
                value = loss(self.gated(batch.x), batch.y).mean()
                value.backward()  # type: ignore[no-untyped-call]
                value = value.detach()
            else:
                values = []
                for rows, output in self.gated.microbatches(batch.x, size):
                    y = batch.y[rows]
                    value = loss(output, y).mean() * (len(y) / batch.n)
                    value.backward()  # type: ignore[no-untyped-call]
                    values.append(value.detach())
                value = torch.stack(values).sum()
        optimizer.step_gate() if gate_alone else optimizer.step()
        dense = flops_per_sample(self.task_model, None, batch.x.shape[1:], batch.x.dtype, True)
        self.flops += batch.n * (dense * self._share + 6.0 * self.gated.gate.fc.weight.numel())
        assert self.gated.last is not None
        self._densities.append(self.gated.last.density)
        return value

    @torch.no_grad()
    def losses(self, loss: Loss, batch: Batch) -> Tensor:
        """The loss of every sample under every candidate of the gate, ``[candidates, N]``; changes nothing."""
        gate, results = self.gated.gate, []
        before, training = gate.choice.clone(), self.gated.training
        self.gated.eval()
        forward = flops_per_sample(self.task_model, None, batch.x.shape[1:], batch.x.dtype, False)
        with self.gated.under_choice():
            for candidate in range(gate.candidates):
                gate.choice.fill_(candidate)
                results.append(loss(self.gated(batch.x), batch.y))
                self.flops += batch.n * (forward * self._share + 2.0 * gate.fc.weight.numel())
        gate.choice.copy_(before)
        self.gated.train(training)
        return torch.stack(results)

    @property
    def _share(self) -> float:
        """The last pass's FLOPs as a share of the dense model's."""
        assert self.gated.last is not None
        return self.gated.last.cost.get("flops", 1.0) if self.gated.execution == "sliced" else 1.0

    def live_tiles(self, optimizer: LiveOptimizer) -> Tensor:
        """Tiles that were live in at least one step."""
        return torch.from_numpy(self.parts.live(np.frombuffer(mask, np.bool_) for mask in sorted(optimizer.touched)))

    # -- prediction
    def copy(self) -> Personal:
        """A module of its own with these values, in evaluation mode; the plan is shared, it never changes."""
        return Personal(copy.deepcopy(self.gated), self.task_model).eval()

    def forward(self, x: Tensor) -> Any:
        out = self.gated(x)
        if self.gated.last is not None:
            self._densities.append(self.gated.last.density)
        return out if self.added is None else out + self.added.to(out.device)

    def stats(self) -> dict[str, float]:
        return {"density": float(np.mean(self._densities))} if self._densities else {}


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    model.requires_grad_(False)
    try:
        yield
    finally:
        model.requires_grad_(True)


@lru_cache(maxsize=16)
def workspace(task_model: Any, example: Example, setting: Setting, device: torch.device) -> Personal:
    """The process's workspace for this model and setting; its contents are whatever the last user left."""
    with seeded(0, "skeleton"):
        model: nn.Module = task_model()
        return Personal(setting.build(model.to(device), example.batch().to(device)), task_model)


def fresh_gate(personal: Personal, budget: Budget, seed: int) -> State:
    """The State of a new gate that ranks blocks for this budget."""
    gate = copy.deepcopy(personal.pristine)
    gate.draw(generator(seed, "gate"))
    rank(gate, personal.gated.plan, budget, personal.gated.model)
    state = {name: value.detach().clone() for name, value in gate.state_dict().items()}
    outputs = personal.gated.plan.class_blocks
    if gate.config.initial_bias and outputs is not None:
        _offsets(state, gate.blocks)[torch.from_numpy(outputs)] = 0.0  # no ReLU follows: outputs start at M = 1
    return state


def _offsets(gate: State, blocks: int) -> Tensor:
    """The entries of a gate's State that M's path adds for each block before the activation."""
    return gate["post_norm.bias"][0] if "post_norm.bias" in gate else gate["fc.bias"][:blocks]
