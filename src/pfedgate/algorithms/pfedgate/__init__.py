"""pFedGate: every client runs its own sparse version of one shared model, chosen by a private gate.

Chen, Yao, Gao, Ding, Li: Efficient Personalized Federated Learning via Sparse Model-Adaptation, ICML 2023.
Shared: the model (theta). Private: the gate (phi), which sees a batch, weighs every block of the model and keeps the
most important ones that fit the client's budget. A client uploads only what was live at least once in its round, and
the server averages each part over the clients that sent it (Algorithm 1). A novel client trains its gate.

Where we depart, and why: docs/explanation/what-makes-gating-work.md (M around 1, normalisation over blocks, pooled
features, unit blocks, a start from the client's labels). `variant="paper"` is
literal.

This file holds the method and its options, `personal` a client's gated model while it works and the start of its gate,
and `tiles` how a model is cut into parts, which are sent and merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pfedgate.algorithms import register
from pfedgate.algorithms.pfedgate import masks
from pfedgate.algorithms.pfedgate import tiles as wire
from pfedgate.algorithms.pfedgate.personal import Personal, Setting, fresh_gate, workspace
from pfedgate.algorithms.pfedgate.tiles import BLOCKS, VALUES, SparseMean, TileMean, Tiles
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import unknown
from pfedgate.core.mergers import WeightedMean
from pfedgate.core.modules import persistent_buffers, smallest_batch
from pfedgate.core.state import clone, flat, inside, pick, rebased, staleness, under
from pfedgate.core.types import CPU, Card, Local, Round, State, Update
from pfedgate.gating.gate.config import GateConfig
from pfedgate.gating.optimizer import LiveOptimizer
from pfedgate.gating.selection.budget import Budget
from pfedgate.training.fit import loop
from pfedgate.training.workspace import Batch


@register("pfedgate")
@dataclass(frozen=True)
class PFedGate(Algorithm):
    """Sparse personal models from a private gate."""

    upload: float | None = None  # hard cap on the upload, as a share of the dense one; the rest is sent later
    gate_lr: float = 0.01  # eta of the paper; more makes gates fit a client's few samples instead of the client
    resources: str = "all"  # resources that a plain number as budget binds: "all", or "params" (the paper's s)
    split: str = "unit"  # the kind of block: whole units can be skipped, not only masked
    blocks: int = 10  # B: with 5, s = .3 may leave one possible selection
    smallest: float = 0.05  # s_min: share of a layer that is always kept; with .1 more layers are cut in steps of four
    compensate: str = "sqrt"  # divide weights by the root of the live share of their inputs: sums keep their spread
    # A batch is computed in so many parts, each with its share of the activations: a budget on them then allows so many
    # times as much of the model. The gradient stays that of the batch (BatchNorm aside).
    microbatches: int = 1
    variant: str | None = None  # "paper": the published method, literally
    # With gate.candidates > 1 a client keeps the candidate with the lowest loss on so many of its samples (`masks`).
    probe: int = 32
    heat: float = 0.15  # it trains under one drawn by loss at first; at 0 under the best, and a few win for all
    told: Mapping[str, int] | None = None  # candidates by client, where it is known who is alike: these do not choose
    adapt_epochs: int = 1  # a novel client's epochs, in which its gate alone is trained
    # The gate's own switches (GateConfig), with another default for models that nobody has trained before. Ranking
    # "nested": all clients begin with the same blocks.
    gate: GateConfig = field(default_factory=lambda: GateConfig(ranking="nested"))

    paper = "Chen et al., Efficient Personalized FL via Sparse Model-Adaptation, ICML 2023"
    budgeted = True
    shares = "the parts of the model that were live"
    keeps = "the gate"
    reads_batches = True
    sums = True
    adds = True
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"gate_lr": (0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 1.5)}

    def __post_init__(self) -> None:
        if self.variant not in (None, "paper"):
            raise ValueError(unknown("variant", self.variant, ["paper"]))
        if not 1 <= self.microbatches <= self.task.batch:
            raise ValueError(
                f"microbatches are parts of a batch of {self.task.batch}: 1 to that, not {self.microbatches}"
            )
        if self.microbatches > 1 and self.variant is not None:
            raise ValueError("microbatches are ours: leave them out with variant='paper'")
        if self.microbatches > 1 and self.gate.chooser:
            raise ValueError("a chooser parts batches by candidates: leave microbatches out")
        if self.probe < 1 or self.heat < 0:
            raise ValueError(f"probe counts samples, from 1, and heat is at least 0: not {self.probe} and {self.heat}")
        for client, candidate in (self.told or {}).items():
            if not 0 <= candidate < max(1, self.gate.candidates):
                number = self.gate.candidates
                raise ValueError(
                    f"told gives client {client!r} candidate {candidate}: there are {number}, counted from 0"
                )
        _ = self._setting  # a wrong name fails here, not on a client

    def init_client(self, got: State, local: Local) -> State:
        """A fresh gate: all start alike, so that masks agree at first and differ by what they learn."""
        personal = self._workspace(local.device)
        gate = fresh_gate(personal, self._budget(local.card), local.round.seed)
        if (told := (self.told or {}).get(local.card.id)) is not None and "choice" in gate:
            return under("gate/", {**gate, "choice": torch.full_like(gate["choice"], told)})
        return {**under("gate/", gate), **masks.new(gate)}

    def clients_named(self) -> Iterable[str]:
        """Those who are told their candidate."""
        return self.told or ()

    def ready(self, card: Card) -> None:
        """Refuse a budget below what is always kept; one on latency is measured where the client is."""
        budget = self._budget(card)
        if budget.latency_ms is None:
            self._workspace().gated.plan.selector(budget)

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs of model and gate together, on the blocks that the gate keeps."""
        personal = self._load(got, private, local.card, local.device)
        choice = masks.choose(personal, private, local, self.task, self.probe, self.heat)
        loss, live = self._fit(personal, local)
        packed, residual = self.pack(got, personal.vector(), live, private, local.card)
        q = float(self.tiles.sizes[packed[BLOCKS].long()].sum()) / self.tiles.length
        shared = {**packed, **clone(persistent_buffers(personal.gated.model))}
        metrics = {"loss": loss, "q": q, "flops": personal.flops, **personal.stats()}
        return Update(shared, local.n, metrics), {**under("gate/", personal.gate_state()), **choice, **residual}

    def _fit(self, personal: Personal, local: Local) -> tuple[float, Tensor]:
        """Train: the loss, and the tiles that were live.

        A method of its own, so that momentum of the model's size is gone before the upload is packed.
        """
        stepper = self._stepper(personal, local)
        loss, _ = loop(self.task, local, lambda batch: personal.step(stepper, self.task.loss, batch, self._size))
        return loss, personal.live_tiles(stepper)

    def pack(self, got: State, vector: Tensor, ids: Tensor, private: State, card: Card) -> tuple[State, State]:
        """The upload of a trained `vector`, and under a cap the rest, which stays private for later.

        Tiles travel as values, or under a cap as differences to what the client got, because what is left behind now
        must add up later.
        """
        if self.upload is None:
            if self._data_plan(card) < 1:
                raise ValueError("its data plan allows a part of the model only: set algorithm.upload, such as 1.0")
            return wire.pack_tiles(vector, ids, self.tiles), {}
        difference = vector.cpu() - flat(pick(got, self.names)).cpu()
        difference = difference + private.get("residual", torch.zeros_like(difference))
        waiting = torch.zeros(self.tiles.count, dtype=torch.bool)
        waiting[ids] = True
        waiting[self.tiles.owner[difference != 0]] = True
        room = int(min(self.upload, self._data_plan(card)) * 4 * self.tiles.length)
        ids, residual = wire.cap_upload(difference, waiting.nonzero()[:, 0], self.tiles, room)
        return wire.pack_tiles(difference, ids, self.tiles), {"residual": residual}

    def merger(self, server: State, round: Round) -> SparseMean:
        """Each tile: the mean over the clients that sent it, weights renormalised; an unsent one is unchanged."""
        vector = flat(pick(server, self.names))
        mean = TileMean(vector, self.tiles, delta=self.upload is not None, total=round.total)
        buffers = {name: value for name, value in server.items() if name not in set(self.names)}
        return SparseMean(server, self.names, mean, WeightedMean(buffers, round.total))

    def landed(self, got: State, update: Update) -> State:
        """The client's copy after training: the tiles it sent, in their places."""
        vector = flat(pick(got, self.names)).cpu()
        if self.upload is None:
            vector = wire.unpack_tiles(update.shared, self.tiles, vector)
        else:
            vector = vector + wire.unpack_tiles(update.shared, self.tiles, torch.zeros_like(vector))
        return {**got, **wire.shaped(vector, self.names, got), **wire.beside(update)}

    def rebase(self, update: Update, sent: Sequence[State], power: float) -> Update:
        """A late update: each tile moves by what others taught it meanwhile, and counts by its own staleness."""
        places = self.tiles.positions(update.shared[BLOCKS])
        history = [flat(pick(state, self.names)).cpu()[places] for state in sent]
        values = update.shared[VALUES]
        if self.upload is None:
            values = rebased(values, history, power)
        else:  # differences are already relative to what the client got
            values = values * (1.0 + staleness(history)).pow(-power)
        buffers = super().rebase(Update(wire.beside(update), update.weight), sent, power).shared
        return replace(update, shared={BLOCKS: update.shared[BLOCKS], VALUES: values, **buffers})

    def check(self, got: State, update: Update) -> str | None:
        """Block ids in range and unique, as many values as they need; buffers as sent."""
        buffers = Update(wire.beside(update), update.weight)
        return wire.fault_in_tiles(update.shared, self.tiles) or super().check(got, buffers)

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client trains its gate; the shared model stays as it is."""
        personal = self._load(got, private, local.card, local.device)
        choice = masks.choose(personal, private, local, self.task, self.probe, 0.0)
        stepper = self._stepper(personal, local)

        def step(batch: Batch) -> Tensor:
            return personal.step(stepper, self.task.loss, batch, self._size, gate_alone=True)

        loop(self.task, local, step, epochs=self.adapt_epochs)
        return {**under("gate/", personal.gate_state()), **choice}

    def personalise(self, got: State, private: State, local: Local) -> State:
        """A client that was never asked to train chooses its candidate.

        With gate.scope="client": what the gate makes of all of the client's training data.
        """
        if self.gate.scope != "client" and private.get("masks/due") != 0:
            return private
        gate = under("gate/", self._workspace(local.device, predicting=True).gate_state())
        personal = self._load(got, {**gate, **private}, local.card, local.device, predicting=True)
        if private.get("masks/due") == 0:
            masks.choose(personal, private, local, self.task, self.probe, 0.0)
        if self.gate.scope != "client":
            return under("gate/", personal.gate_state())
        batches: list[Tensor] = []

        def keep(batch: Batch) -> Tensor:
            batches.append(batch.x)
            return batch.x.new_zeros(())

        loop(self.task, local, keep, epochs=1, stream="remember")
        personal.gated.gate.remember(batches)
        return under("gate/", personal.gate_state())

    def per_client(self) -> PFedGate:
        """One choice of blocks, made of all of a client's training data."""
        return replace(self, gate=replace(self.gate, scope="client"))

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The gated model of this client, within its budget."""
        personal = self._load(got, private, card, predicting=True).copy()
        personal.added = self.task.added
        return personal

    def inspect(self, got: State, private: State, local: Local) -> dict[str, Any]:
        """What this client's gate makes of its training data, for reports; see `pfedgate.runs.gates`."""
        personal = self.predictor(got, self.personalise(got, private, local), local.card)
        assert isinstance(personal, Personal)
        gated = personal.gated
        with torch.no_grad():
            x = local.prepare(local.train.x[:512])  # more would hardly move a mean
            batches = [kept for part in torch.split(x, self.task.batch) for kept in gated.masks(part)]
            selection, _ = gated.select(x)
        return {
            "batches": batches,
            "blocks": [block.name for block in gated.plan.blocks],
            "kept": selection.kept,
            "weights": selection.weights.numpy(),
            "importance": selection.importance.numpy(),
            "density": selection.density,
        }

    # -- parts
    def _stepper(self, personal: Personal, local: Local) -> LiveOptimizer:
        optim, factor = self.task.optim, local.round.factor
        return personal.gated.optimizer(
            optim.name,
            lr=optim.lr * factor,
            gate_lr=self.gate_lr * factor,
            momentum=optim.momentum,
            weight_decay=optim.weight_decay,
            betas=optim.betas,
            eps=optim.eps,
            clip=optim.clip,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The shared parameters, in the order of the plan."""
        return self._workspace().names

    @property
    def tiles(self) -> Tiles:
        """What a block of units writes, cut by what it reads."""
        return self._workspace().tiles

    @property
    def _setting(self) -> Setting:
        """How models are gated in training, where every batch decides for itself."""
        gate = replace(self.gate, scope="batch")
        if self.variant == "paper":
            gate = replace(gate, post_norm="batch", activation="sigmoid", ranking="random")
        if gate.activation == "linear":  # M = 2 sigmoid(bias) at the start, also without the sigmoid
            gate = replace(gate, initial_bias=math.tanh(gate.initial_bias / 2) / gate.weight_range)
        elif gate.activation != "centred":  # M does not start around 1, as published
            gate = replace(gate, initial_scale=1.0, initial_bias=0.0)
        if self.variant == "paper":
            return Setting(gate, (("variant", "paper"),))
        names = ("blocks", "compensate", "smallest", "split")
        return Setting(gate, tuple((name, getattr(self, name)) for name in names))

    def _workspace(self, device: torch.device = CPU, predicting: bool = False) -> Personal:
        setting = self._setting
        if predicting:
            setting = replace(setting, gate=replace(setting.gate, scope=self.gate.scope))
        return workspace(self.task.model, self.task.inputs, setting, device)

    @property
    def _size(self) -> int | None:
        """Samples of a microbatch; with BatchNorm so many that none of the even parts of a batch is a single one."""
        least = 2 * smallest_batch(self.task.model) - 1
        return None if self.microbatches == 1 else max(least, self.task.batch // self.microbatches)

    @staticmethod
    def _data_plan(card: Card) -> float:
        """The share of the model that this client may send, where its device says so."""
        return card.budget.get("upload", 1.0) if isinstance(card.budget, Mapping) else 1.0

    def _budget(self, card: Card) -> Budget:
        plan, value = self._workspace().gated.plan, card.budget
        if isinstance(value, Mapping):
            value = {name: bound for name, bound in value.items() if name != "upload"}
        plain = self.resources != "all" and isinstance(value, float | int)
        budget = Budget.of(value, tuple(self.resources.split("+"))) if plain else plan.budget(value)
        if self._size is None:
            return budget
        more = {n: v * self.task.batch / self._size for n, v in budget.bound().items() if n.endswith("_bytes")}
        return replace(budget, **{n: v if budget.bound()[n] > 1 else min(v, 1.0) for n, v in more.items()})

    def _load(
        self, got: State, private: State, card: Card, device: torch.device = CPU, predicting: bool = False
    ) -> Personal:
        personal = self._workspace(device, predicting)
        personal.load(got, inside("gate/", private), self._budget(card))
        return personal
