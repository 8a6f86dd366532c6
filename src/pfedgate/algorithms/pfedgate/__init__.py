"""pFedGate: every client runs its own sparse version of one shared model, chosen by a private gate.

Chen, Yao, Gao, Ding, Li: Efficient Personalized Federated Learning via Sparse Model-Adaptation, ICML 2023.
Shared: the model (theta). Private: the gate (phi), which sees a batch, weighs every block of the model and keeps the
most important ones that fit the client's budget. A client uploads only what was live at least once in its round, and
the server averages each part over the clients that sent it (Algorithm 1). With `own`, layers of the client's own are
private too: the server never has them. A novel client trains these and its gate.

Where we depart, and why: docs/explanation/what-makes-gating-work.md (M around 1, normalisation over blocks, pooled
features, unit blocks, a start from the client's labels). `variant="paper"` is
literal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.algorithms.pfedgate.personal import (
    Personal,
    Setting,
    fresh_gate,
    predicting,
    start_at_labels,
    wire_tiles,
    workspace,
)
from pfedgate.algorithms.pfedgate.sparse import SendsTiles
from pfedgate.algorithms.pfedgate.tiles import BLOCKS, Tiles
from pfedgate.core.modules import smallest_batch
from pfedgate.core.state import inside, split, under
from pfedgate.core.types import CPU, Card, Local, State, Update
from pfedgate.gating.authors import deviations
from pfedgate.gating.gate.config import GateConfig
from pfedgate.gating.optimizer import LiveOptimizer
from pfedgate.gating.selection.budget import Budget
from pfedgate.training.fit import loop
from pfedgate.training.workspace import Batch


@register("pfedgate")
@dataclass(frozen=True)
class PFedGate(SendsTiles):
    """Sparse personal models from a private gate."""

    gate_lr: float = 0.01  # eta of the paper; more makes gates fit a client's few samples instead of the client
    resources: str = "all"  # what a plain number as budget binds: "all", or "params" (the paper's s)
    split: str = "unit"
    blocks: int = 10  # B: with 5, s = .3 may leave one possible selection
    smallest: float = 0.05  # s_min: share of a layer that is always kept; with .1 more layers are cut in steps of four
    compensate: str = "sqrt"  # divide weights by the root of the live share of their inputs: sums keep their spread
    # A batch is computed in so many parts, each with its share of the activations: a budget on them then allows so many
    # times as much of the model. The gradient stays that of the batch (BatchNorm aside).
    microbatches: int = 1
    straight_through: str = "full"
    variant: str | None = None  # "paper": the published method, literally; "authors": as in their code, for bracketing
    deviations: tuple[str, ...] = ()  # of the authors' code, by name or number, "-" to leave out (gating.authors)
    shift: bool = False  # a private additive value per class, from the gate: adapts to the client's labels
    # Private layers beside the gate, by name; "first": the first one, where clients differ in how things look.
    own: parts.Names = ()
    # "labels": a gate starts from how often its client has each class, so that the shared model need not learn what
    # only the client's labels say.
    start: Literal["labels", "random"] = "labels"
    ranking: Literal["nested", "random"] = "nested"  # of blocks at the start, see gating.ranking
    ignore: float = 1.0  # logarithms of frequencies nearer to their mean than this tell nothing (log_frequencies)
    pre_norm: bool = True  # this and the next four: switches of the gate, see GateConfig
    post_norm: Literal["blocks", "batch", "none"] = "blocks"
    activation: Literal["centred", "linear", "sigmoid", "none"] = "centred"
    weight_range: float = 1.0
    spread: float = 0.1  # of M around 1 at the start (GateConfig.initial_scale)
    # Of M's path at the start: 0 starts M at 1, .85 at 1.4. Torch draws weights too small for ReLUs, so training from
    # scratch begins faster; for a model that was trained before, give 0.
    bias: float = 0.85
    predict: str = "batch"  # the gate decides for a batch, or once per client ("client", from its training data)
    common_init: bool = True  # all gates start alike, so that masks agree at first and differ by what they learn
    gate_ones: bool = False  # gates start at M = 1 exactly
    adapt_epochs: int = 1  # of the gate alone, for a novel client

    paper: ClassVar[str] = "Chen et al., Efficient Personalized FL via Sparse Model-Adaptation, ICML 2023"
    shares: ClassVar[str] = "the parts of the model that were live"
    keeps: ClassVar[str] = "the gate"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {"gate_lr": (0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 1.5)}

    def __post_init__(self) -> None:
        if self.deviations and self.variant is None:
            raise ValueError("deviations are from the paper: they need variant='paper' (add some) or 'authors'")
        if self.ignore < 0:
            raise ValueError(f"ignore is a difference of logarithms, at least 0, not {self.ignore}")
        if not 1 <= self.microbatches <= self.task.batch:
            raise ValueError(
                f"microbatches are parts of a batch of {self.task.batch}: 1 to that, not {self.microbatches}"
            )
        if self.microbatches > 1 and self.variant is not None:
            raise ValueError("microbatches are ours: leave them out with variant='paper' or 'authors'")
        if self._own and self.variant is not None:
            raise ValueError("private layers are ours: leave own out with variant='paper' or 'authors'")
        if not parts.rest(self.task, self._own):
            raise ValueError("own names all layers, so nothing would be shared: name some, or use local_only")
        _ = self._setting  # a wrong name fails here, not on a client

    def init_server(self, seed: int) -> State:
        """The model, without layers of clients' own."""
        return parts.init_shared(self.task, self._own, seed)

    def init_client(self, got: State, local: Local) -> State:
        """A fresh gate."""
        path = ("gate",) if self.common_init else ("gate", local.card.id)
        personal = self._workspace(local.device)
        gate = fresh_gate(personal, self._budget(local.card), local.round.seed, *path)
        if self.start == "labels" and not self.gate_ones and self.variant is None:
            start_at_labels(personal, gate, local.train.y, self.ignore)
        return {**under("gate/", gate), **parts.init_own(self.task, self._own, local.round.seed)}

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs of model and gate together, on the blocks that the gate keeps."""
        personal = self._load(got, private, local)
        loss, live, memory = self._fit(personal, private, local)
        packed, residual = self.pack(got, personal.vector(self._own), live, private)
        q = float(self.tiles.sizes[packed[BLOCKS].long()].sum()) / personal.size
        shared = {**packed, **split(personal.buffers_state(), self._own.__contains__)[1]}
        return (
            Update(shared, local.n, {"loss": loss, "q": q, **personal.spent()}),
            {**self._private(personal), **residual, **under("optim/", memory)},
        )

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client trains its gate, and layers of its own; the shared model stays as it is."""
        personal, own = self._load(got, private, local), parts.parameters(self.task, self._own)
        stepper = self._stepper(personal, local)

        def step(batch: Batch) -> Tensor:
            return personal.step_gate(stepper, self.task.loss, batch, self._size, own)

        loop(self.task, local, step, epochs=self.adapt_epochs)
        return self._private(personal)

    def personalise(self, got: State, private: State, local: Local) -> State:
        """With predict="client": what the gate makes of all of the client's training data."""
        if self.predict == self._setting.gate.scope:
            return private
        personal = self._workspace(local.device, predicting(self._setting, self.predict))
        gate = {**personal.gate_state(), **inside("gate/", private)}
        personal.load(parts.join(got, private), gate, self._budget(local.card))
        personal.remember(self.task, local)
        return self._private(personal)

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The gated model of this client, within its budget."""
        personal = self._workspace(setting=predicting(self._setting, self.predict))
        personal.load(parts.join(got, private), inside("gate/", private), self._budget(card))
        return personal.copy()

    def inspect(self, got: State, private: State, local: Local) -> dict[str, Any]:
        """What this client's gate makes of its training data, for reports; see `pfedgate.runs.gates`."""
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

    # -- parts
    def _fit(self, personal: Personal, private: State, local: Local) -> tuple[float, Tensor, State]:
        """Train: the loss, the tiles that were live, what the optimiser keeps for the next round.

        A method of its own, so that momentum of the model's size is gone before the upload is packed.
        """
        stepper = self._stepper(personal, local)
        stepper.recall(inside("optim/", private))
        joint = "bi_level" not in (self._setting.deviations or ())
        if not joint:
            loop(self.task, local, lambda batch: personal.step_gate(stepper, self.task.loss, batch))
        step = personal.step if joint else personal.step_model
        loss, _ = loop(self.task, local, lambda batch: step(stepper, self.task.loss, batch, self._size))
        memory = stepper.memory() if self.task.optim.persist_momentum else {}
        return loss, personal.live_tiles(stepper, self._own), memory

    def _stepper(self, personal: Personal, local: Local) -> LiveOptimizer:
        optim, factor = self.task.optim, local.round.factor
        return personal.optimizer(optim, lr=optim.lr * factor, gate_lr=self.gate_lr * factor)

    def _private(self, personal: Personal) -> State:
        return {**under("gate/", personal.gate_state()), **under(parts.OWN, personal.part(self._own))}

    @property
    def names(self) -> tuple[str, ...]:
        """The shared parameters, in the order of the plan."""
        return tuple(name for name in self._workspace().names if name not in self._own)

    @property
    def tiles(self) -> Tiles:
        """What a block of units writes, cut by what it reads."""
        return wire_tiles(self._workspace().gated.plan, self._own)

    @property
    def _own(self) -> parts.Part:
        names = tuple(parts.layers(self.task))[:1] if self.own == "first" else self.own
        return parts.choose(self.task, names, "own ('first' or layers)")

    @property
    def _setting(self) -> Setting:
        options: dict[str, Any] = {"split": self.split, "blocks": self.blocks, "smallest": self.smallest,
                   "compensate": self.compensate, "straight_through": self.straight_through}  # fmt: skip
        around_one = self.variant is None and self.activation in ("centred", "linear")
        # M = 2 sigmoid(bias) at the start, also without the sigmoid.
        bias = self.bias if self.activation == "centred" else math.tanh(self.bias / 2) / self.weight_range
        gate = GateConfig(self.pre_norm, self.post_norm, self.activation, self.weight_range, shift=self.shift,
                          init="ones" if self.gate_ones else "random",
                          initial_scale=self.spread if around_one else 1.0,
                          ranking=self.ranking if self.variant is None else "random",
                          initial_bias=bias if around_one else 0.0)  # fmt: skip
        if self.variant == "paper" and not self.deviations:
            options, gate = {"variant": self.variant}, replace(gate, post_norm="batch", activation="sigmoid")
        elif self.variant is not None:
            return Setting(gate, deviations=deviations(self.variant, self.deviations))
        return Setting(gate, tuple(sorted(options.items())))

    def _workspace(self, device: torch.device = CPU, setting: Setting | None = None) -> Personal:
        return workspace(self.task, setting or self._setting, device)

    @property
    def _size(self) -> int | None:
        """Samples of a microbatch; with BatchNorm so many that none of the even parts of a batch is a single one."""
        least = 2 * smallest_batch(self.task.model) - 1
        return None if self.microbatches == 1 else max(least, self.task.batch // self.microbatches)

    def _budget(self, card: Card) -> Budget:
        plan, value = self._workspace().gated.plan, card.budget
        plain = self.resources != "all" and isinstance(value, float | int)
        budget = Budget.of(value, tuple(self.resources.split("+"))) if plain else plan.budget(value)
        if self._size is None or budget.activation_bytes is None:
            return budget
        more = budget.activation_bytes * self.task.batch / self._size
        return replace(budget, activation_bytes=min(more, 1.0) if budget.activation_bytes <= 1 else more)

    def _load(self, got: State, private: State, local: Local) -> Personal:
        personal = self._workspace(local.device)
        personal.load(parts.join(got, private), inside("gate/", private), self._budget(local.card))
        return personal
