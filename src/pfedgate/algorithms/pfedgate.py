"""pFedGate: every client runs its own sparse version of one shared model, chosen by a private gate.

Chen, Yao, Gao, Ding, Li: Efficient Personalized Federated Learning via Sparse Model-Adaptation, ICML 2023.
Shared: the model (theta). Private: the gate (phi), which sees a batch, weighs every block of the model and keeps the
most important ones that fit the client's budget. A client uploads only what was live at least once in its round, and
the server averages each part over the clients that sent it (Algorithm 1).

Where we depart, and why: see `pfedgate.gate` (M centred on 1, normalisation over blocks, pooled features, unit
blocks, division by the live share of inputs; as published, the gate does not train). `variant="paper"` is literal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from pfedgate.algorithm import Algorithm
from pfedgate.algorithms import register
from pfedgate.gating.authors import deviations
from pfedgate.gating.budget import Budget
from pfedgate.gating.gate_config import GateConfig
from pfedgate.local import loop
from pfedgate.personal import (
    Personal,
    Setting,
    fresh_gate,
    plan_tiles,
    predicting,
    start_at_labels,
    wire_tiles,
    workspace,
)
from pfedgate.tensors import flat, inside, pick, under, unflat, weighted_mean
from pfedgate.tiles import BLOCKS, VALUES, Tiles, cap_upload, fault_in_tiles, merge_tiles, pack_tiles, unpack_tiles
from pfedgate.types import CPU, Card, Local, Round, State, Update


@register("pfedgate")
@dataclass(frozen=True)
class PFedGate(Algorithm):
    """Sparse personal models from a private gate."""

    gate_lr: float = 0.1  # eta of the paper; the model's own rate is the task's (eta_g)
    resources: str = "all"  # what a plain number as budget binds: "all", or "params" (the paper's s)
    split: str = "unit"
    blocks: int = 10  # B: with 5, s = .3 may leave one possible selection
    smallest: float = 0.05  # s_min: share of a layer that is always kept
    compensate: str = "share"  # divide weights by the live share of their inputs: s = .5 learns like s = 1
    straight_through: str = "full"
    variant: str | None = None  # "paper": the published method, literally; "authors": as in their code, for bracketing
    deviations: tuple[str, ...] = ()  # of the authors' code, by name or number, "-" to leave out (gating.authors)
    # A private additive value per class, from the gate: "learned" starts at 0, "labels" at the logarithm of how often
    # the client has each class, so that the shared model need not learn what only the client's labels say.
    shift: Literal["none", "learned", "labels"] = "none"
    pre_norm: bool = True  # this and the next three: switches of the gate, see GateConfig
    post_norm: Literal["blocks", "batch", "none"] = "blocks"
    activation: Literal["centred", "linear", "sigmoid", "none"] = "centred"
    weight_range: float = 1.0
    predict: str = "batch"  # the gate decides for a batch, or once per client ("client", from its training data)
    common_init: bool = True  # all gates start alike, so that masks agree at first and differ by what they learn
    gate_ones: bool = False  # gates start at M = 1 exactly
    upload: float | None = None  # hard cap on the upload, as a share of the dense one; the rest is sent later
    half: bool = False  # send float16 differences
    adapt_epochs: int = 1  # of the gate alone, for a novel client

    paper: ClassVar[str] = "Chen et al., Efficient Personalized FL via Sparse Model-Adaptation, ICML 2023"
    shares: ClassVar[str] = "the parts of the model that were live"
    keeps: ClassVar[str] = "the gate"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {"gate_lr": (0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 1.5)}

    def __post_init__(self) -> None:
        if self.deviations and self.variant is None:
            raise ValueError("deviations are from the paper: they need variant='paper' (add some) or 'authors'")
        _ = self._setting  # a wrong name fails here, not on a client

    def init_client(self, got: State, local: Local) -> State:
        """A fresh gate."""
        path = ("gate",) if self.common_init else ("gate", local.card.id)
        gate = fresh_gate(self._workspace(local.device), local.round.seed, *path)
        if self.shift == "labels":
            start_at_labels(gate, local.train.y, self._workspace(local.device).gated.gate.classes)
        return under("gate/", gate)

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs of model and gate together, on the blocks that the gate keeps."""
        personal = self._load(got, private, local)
        optim, factor = self.task.optim, local.round.factor
        stepper = personal.optimizer(optim, lr=optim.lr * factor, gate_lr=self.gate_lr * factor)
        stepper.recall(inside("optim/", private))
        joint = "bi_level" not in (self._setting.deviations or ())
        if not joint:
            loop(self.task, local, lambda batch: personal.step_gate(stepper, self.task.loss, batch))
        step = personal.step if joint else personal.step_model
        loss, _ = loop(self.task, local, lambda batch: step(stepper, self.task.loss, batch))
        packed, residual = self._pack(got, private, personal, personal.live_tiles(stepper))
        q = float(self._tiles.sizes[packed[BLOCKS].long()].sum()) / personal.size
        shared = {**packed, **personal.buffers_state()}
        kept = stepper.memory() if optim.persist_momentum else {}
        return (
            Update(shared, local.n, {"loss": loss, "q": q, **personal.spent()}),
            {**under("gate/", personal.gate_state()), **residual, **under("optim/", kept)},
        )

    def merge(self, server: State, updates: Iterable[tuple[Card, Update]], round: Round) -> State:
        """Each tile: the mean over the clients that sent it, weights renormalised; an unsent one is unchanged."""
        names = self._workspace().names
        others: list[tuple[Card, Update]] = []

        def packed() -> Iterator[tuple[float, State]]:
            for card, update in updates:
                others.append((card, Update(_rest(update), update.weight)))
                yield update.weight, update.shared

        vector = flat(pick(server, names))
        merged = merge_tiles(vector, packed(), self._tiles, delta=self._differences, total=round.total)
        buffers = {name: value for name, value in server.items() if name not in set(names)}
        if buffers:
            buffers = weighted_mean(buffers, others, total=round.total)
        return {**unflat(merged, [(name, server[name].shape) for name in names]), **buffers}

    def landed(self, got: State, update: Update) -> State:
        """The client's copy after training: what it sent, in its places."""
        names = self._workspace().names
        vector = flat(pick(got, names)).cpu()
        if self._differences:
            vector = vector + unpack_tiles(update.shared, self._tiles, torch.zeros_like(vector))
        else:
            vector = unpack_tiles(update.shared, self._tiles, vector)
        return {**got, **unflat(vector, [(name, got[name].shape) for name in names]), **_rest(update)}

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client trains its gate; the model stays as it is."""
        personal = self._load(got, private, local)
        stepper = personal.optimizer(self.task.optim, lr=0.0, gate_lr=self.gate_lr * local.round.factor)
        loop(
            self.task,
            local,
            lambda batch: personal.step_gate(stepper, self.task.loss, batch),
            epochs=self.adapt_epochs,
        )
        return under("gate/", personal.gate_state())

    def personalise(self, got: State, private: State, local: Local) -> State:
        """With predict="client": what the gate makes of all of the client's training data."""
        if self.predict == self._setting.gate.scope:
            return private
        personal = self._workspace(local.device, predicting(self._setting, self.predict))
        personal.load(got, {**personal.gate_state(), **inside("gate/", private)}, self._budget(local.card))
        personal.remember(self.task, local)
        return under("gate/", personal.gate_state())

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The gated model of this client, within its budget."""
        personal = self._workspace(setting=predicting(self._setting, self.predict))
        personal.load(got, inside("gate/", private), self._budget(card))
        return personal.copy()

    def inspect(self, got: State, private: State, local: Local) -> dict[str, Any]:
        """What this client's gate makes of its training data, for reports; see `pfedgate.gates`."""
        personal = self.predictor(got, self.personalise(got, private, local), local.card)
        assert isinstance(personal, Personal)
        gated = personal.gated
        with torch.no_grad():
            chosen, _ = gated.select(local.prepare(local.train.x[:512]))  # more would hardly move a mean
        return {
            "blocks": [block.name for block in gated.plan.blocks],
            "kept": chosen.kept,
            "weights": chosen.weights.numpy(),
            "importance": chosen.importance.numpy(),
            "density": chosen.density,
        }

    def check(self, got: State, update: Update) -> str | None:
        """Block ids in range and unique, as many values as they need; buffers as sent."""
        return fault_in_tiles(update.shared, self._tiles) or super().check(got, Update(_rest(update), update.weight))

    # -- parts
    @property
    def _setting(self) -> Setting:
        options: dict[str, Any] = {"split": self.split, "blocks": self.blocks, "smallest": self.smallest,
                   "compensate": self.compensate, "straight_through": self.straight_through}  # fmt: skip
        gate = GateConfig(self.pre_norm, self.post_norm, self.activation, self.weight_range, shift=self.shift != "none",
                          init="ones" if self.gate_ones else "random")  # fmt: skip
        if self.variant == "paper" and not self.deviations:
            options, gate = {"variant": self.variant}, replace(gate, post_norm="batch", activation="sigmoid")
        elif self.variant is not None:
            return Setting(gate, deviations=deviations(self.variant, self.deviations))
        return Setting(gate, tuple(sorted(options.items())))

    @property
    def _differences(self) -> bool:
        """Whether updates carry differences instead of values: what is left behind must add up later."""
        return self.upload is not None or self.half

    def _workspace(self, device: torch.device = CPU, setting: Setting | None = None) -> Personal:
        return workspace(self.task, setting or self._setting, device)

    @property
    def _tiles(self) -> Tiles:
        return wire_tiles(self._workspace().gated.plan)

    def _budget(self, card: Card) -> Budget:
        plan, value = self._workspace().gated.plan, card.budget
        if self.resources == "all" or not isinstance(value, float | int):
            return plan.budget(value)
        return Budget.of(value, tuple(self.resources.split("+")))

    def _load(self, got: State, private: State, local: Local) -> Personal:
        personal = self._workspace(local.device)
        personal.load(got, inside("gate/", private), self._budget(local.card))
        return personal

    def _pack(self, got: State, private: State, personal: Personal, ids: Tensor) -> tuple[State, State]:
        """What to upload and, with a cap, what stays behind for later."""
        if not self._differences:
            return pack_tiles(personal.vector(), ids, self._tiles), {}
        difference = personal.vector().cpu() - flat(pick(got, personal.names)).cpu()
        if self.upload is None:
            return pack_tiles(difference, ids, self._tiles, half=True), {}
        difference = difference + private.get("residual", torch.zeros_like(difference))
        waiting = torch.zeros(self._tiles.count, dtype=torch.bool)
        waiting[ids] = True
        owner = torch.from_numpy(plan_tiles(personal.gated.plan).owner)
        waiting[owner[difference != 0]] = True
        room = int(self.upload * 4 * personal.size)
        ids, residual = cap_upload(
            difference, waiting.nonzero()[:, 0], self._tiles, room, value_bytes=2 if self.half else 4
        )
        return pack_tiles(difference, ids, self._tiles, half=self.half), {"residual": residual}


def _rest(update: Update) -> State:
    """Buffers: what travels beside the packed tiles."""
    return {name: value for name, value in update.shared.items() if name not in (BLOCKS, VALUES)}
