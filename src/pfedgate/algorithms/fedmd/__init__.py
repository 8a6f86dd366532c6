"""FedMD (Li and Wang 2019, FedMD: Heterogenous Federated Learning via Model Distillation).

Shared: scores (logits) on public samples; no parameter moves, so models may differ (`architectures`). Private: the
client's model, first trained on the public set under a temporary head for its classes, if it has labels. A round:
digest the consensus (fit own logits to the mean of everybody's on a public subset), revisit the private data, send the
scores on the next round's subset. So one exchange a round is enough; the first round has nothing to digest.

Scores are averaged as they are, not as probabilities, every client counting the same; a subset is drawn anew every
round (official: stratified). Departures: the task's optimiser (official: Adam), one private epoch (official: 4–10),
temporary head instead of one over public and private classes. pFedGate's table says neither which public samples nor
how they are made to fit: see `public` for ours; near and far are options there. A novel client trains on the public
set, digests the last consensus, and does `adapt_epochs` on its own data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from pfedgate.algorithms import register
from pfedgate.algorithms.fedmd.public import Public, Rows, pretrained, public
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.mergers import WeightedMean
from pfedgate.core.modules import initial, module, skeleton
from pfedgate.core.seeds import key
from pfedgate.core.state import inside, under
from pfedgate.core.types import Card, Local, Round, State, Task, Update
from pfedgate.training.fit import Batch, Fit, fit, forward_flops, scan

SCORES, SUBSET = "scores", "subset"


@register("fedmd")
@dataclass(frozen=True)
class FedMD(Algorithm):
    """Models that learn from each other's predictions on public data."""

    public: str | Public = "auto"  # "glyphs", "photos", "noise", a data set, or samples; auto: glyphs for images
    align: int = 5000  # N_a: public samples a round, or all there are; official: 5000
    pretrain_epochs: int = 5  # on the public set, once; official: up to 20
    digest_epochs: int = 1  # official
    digest_lr: float | None = 0.01  # smaller than the task's: logits are fitted, not classes; None: the task's
    digest_loss: str = "mae"  # official; "mse" in other implementations
    architectures: Sequence[Callable[[], nn.Module]] = ()  # instead of the task's model: each client has one of these
    adapt_epochs: int = 1  # a novel client's epochs: the fine-tuning budget of all methods

    paper = "Li and Wang 2019, FedMD: Heterogenous Federated Learning via Model Distillation"
    shares = "scores on public samples"
    keeps = "the whole model"
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"digest_loss": ("mae", "mse")}
    kinds = ("classification",)  # public samples have classes

    def __post_init__(self) -> None:
        if self.digest_loss not in ("mae", "mse") or self.align < 0:
            raise ValueError(f"digest_loss is 'mae' or 'mse', align not negative; got {self.digest_loss}, {self.align}")

    @classmethod
    def example(cls, task: Task) -> FedMD:
        """An instance with few public samples."""
        return cls(task, align=24, pretrain_epochs=1)

    def init_server(self, seed: int) -> State:
        """Nothing: there is no consensus before the first round."""
        return {}

    def init_client(self, got: State, local: Local) -> State:
        """The client's model, after its training on public samples."""
        task, samples = self._task(local.card), self._public(local)
        if not self.align or not samples.classes or not self.pretrain_epochs:
            return under("model/", initial(task, local.round.seed))
        settings = (task, samples, local.round.seed, self.pretrain_epochs, local.device, local.prepare)
        return under("model/", pretrained(*settings))

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Digest, revisit, and say what the model thinks of the next subset."""
        task, model = self._task(local.card), inside("model/", private)
        digested = self._digest(got, model, local)
        done = fit(task, digested.state if digested else model, local)
        private = under("model/", done.state)
        flops = done.flops + (digested.flops if digested else 0.0)
        metrics = {"loss": done.loss} | ({"digest_loss": digested.loss} if digested else {})
        if not (subset := self._subset(local, local.round.index + 1)).n:
            return Update({}, 1.0, {**metrics, "flops": flops}), private
        scores = scan(task, module(task, done.state, local.device), subset, local).cpu()
        flops += forward_flops(task, subset, local)
        return Update({SCORES: scores}, 1.0, {**metrics, "flops": flops}), private

    def _digest(self, got: State, model: State, local: Local) -> Fit | None:
        if SCORES not in got or not self.digest_epochs:
            return None
        wanted, absolute = got[SCORES].to(local.device), self.digest_loss == "mae"

        def objective(net: nn.Module, batch: Batch) -> Tensor:
            difference = net(batch.x) - wanted[batch.rows]
            error: Tensor = difference.abs() if absolute else difference.square()
            return error.mean()

        return fit(self._task(local.card), model, local, part=self._subset(local, int(got[SUBSET])), stream="digest",
                   objective=objective, epochs=self.digest_epochs, lr=self.digest_lr)  # fmt: skip

    def merger(self, server: State, round: Round) -> WeightedMean:
        """The mean of the scores, for the next round."""
        following = {SUBSET: torch.tensor(round.index + 1)}
        return WeightedMean({}, finish=lambda scores: {**scores, **following} if scores else {})

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client learns from the public set, from the others and from its own data."""
        model = inside("model/", private)
        digested = self._digest(got, model, local)
        done = fit(self._task(local.card), digested.state if digested else model, local, epochs=self.adapt_epochs)
        return under("model/", done.state)

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The client's model, of its own architecture."""
        return module(self._task(card), inside("model/", private))

    def check(self, got: State, update: Update) -> str | None:
        """Scores of the shape that all clients send, and nothing else."""
        if set(update.shared) - {SCORES}:
            return f"only {SCORES!r} may be sent, got {sorted(update.shared)}"
        if SCORES in got:
            return super().check(got, update)
        scores = update.shared.get(SCORES)  # in the first round the merger compares them with each other
        if scores is not None and (scores.dtype is not torch.float32 or scores.ndim < 2):
            return f"{SCORES!r} is {scores.dtype} {tuple(scores.shape)}: one row of float32 for each sample is expected"
        return None

    def _task(self, card: Card) -> Task:
        if not self.architectures:
            return self.task
        return replace(self.task, model=self.architectures[key(0, "architecture", card.id) % len(self.architectures)])

    def _public(self, local: Local) -> Public:
        if isinstance(self.public, Public):
            return self.public
        embeddings = (m.num_embeddings for m in skeleton(self.task.model).modules() if isinstance(m, nn.Embedding))
        return public(self.public, local.train.x, tokens=next(embeddings, 0), seed=local.round.seed)

    def _subset(self, local: Local, index: int) -> Rows:
        """The samples that everybody looks at for this round."""
        samples = self._public(local)
        order = torch.randperm(samples.n, generator=replace(local.round, index=index).generator("public"))
        return samples.part(order[: self.align])
