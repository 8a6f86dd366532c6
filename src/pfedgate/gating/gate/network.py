"""The private gate of a client (the paper's "Adaptive Gating Layer"): batch -> weights M, importances G.

``x -> switchable norm -> features -> FC (d_X -> L) -> post-norm -> activation -> mean over the batch``: one
path for M, one for G, optionally one for a shift of the classes. All of it is private and never sent.

Where the default departs from the paper, and why (measured; ``GateConfig.paper()`` is the literal one):

* features are pooled: on flattened pixels the gate would be larger than the model;
* M is centred on 1: a plain sigmoid starts at 1/2, halves every layer, and training stalls at chance;
* the post-norm is taken over the blocks: over the batch, it removes the batch from the mean over the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfedgate.core.errors import warn
from pfedgate.gating.gate.config import GateConfig
from pfedgate.gating.gate.features import EPS, POOLS, Features, Reader, SwitchableNorm, fold, kind_of

LESSONS, LESSON, DECAY = 100, 2.0, 1e-3  # steps, rate and decay of the chooser's regression
FLOPS = 0.02  # the gate's free share of the model's FLOPs; the plan takes more out of the budget


class GateOutput(NamedTuple):
    """The gate's decision, ``[L]`` and ``[classes]`` for a batch; with a leading ``N`` per sample."""

    weights: Tensor  # M
    importance: Tensor  # G
    shift: Tensor | None


class Gate(nn.Module):
    """The gate of one client for a model of ``blocks`` blocks, ``model_size`` parameters and ``model_flops`` FLOPs.

    ``example`` is a batch like those to come (only its shape and kind matter). Integer tokens are read
    through ``embedding``, which stays the model's own: neither registered here nor trained through the gate;
    without one, through a fixed hash. ``generator`` makes the initialisation reproducible.

    >>> gate = Gate(torch.zeros(2, 3, 32, 32), 53, GateConfig(), model_size=256_830)
    >>> gate.size, gate(torch.randn(8, 3, 32, 32)).weights.shape
    (5418, torch.Size([53]))
    """

    rankings: Tensor
    choice: Tensor
    chooser_weight: Tensor
    chooser_bias: Tensor
    client_features: Tensor
    client_mean: Tensor
    client_var: Tensor
    client_samples: Tensor

    def __init__(
        self,
        example: Tensor,
        blocks: int,
        config: GateConfig | None = None,
        *,
        model_size: int,
        model_flops: float = math.inf,
        embedding: nn.Embedding | None = None,
        classes: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        config = GateConfig() if config is None else config
        if blocks < 1 or model_size < 1:
            raise ValueError(f"a gate needs at least one block and one parameter: got {blocks}, {model_size}")
        if config.shift and not classes:
            raise ValueError("GateConfig.shift adds one value per class: pass classes=...")
        self.config, self.blocks, self.model_size, self.model_flops = config, blocks, model_size, model_flops
        self.classes = (classes or 0) if config.shift else 0
        self.candidates = config.candidates if config.candidates > 1 else 0
        self.paths = 1 if self.candidates else config.paths
        self.reader = self._fit(example, embedding)
        # Only scope "batch" may depend on who else is in the batch.
        track = config.scope == "batch"
        self.pre_norm: SwitchableNorm | None = None
        if config.pre_norm:
            self.pre_norm = SwitchableNorm(self.reader.channels, self.reader.norm_rank, track=track)
        # One matrix for all paths (rows: M, then G, then classes): one product instead of three.
        # Built without numbers, so that a given generator is the only one that is read.
        fc = nn.Linear(self.reader.features, self.paths * blocks + self.classes, device="meta")
        self.fc = fc.to_empty(device=torch.get_default_device())
        self.post_norm: BlockNorm | None = None
        if config.post_norm != "none":
            self.post_norm = BlockNorm(self.paths, blocks, kind=config.post_norm, track=track)
        if self.candidates:
            self.register_buffer("rankings", torch.full((self.candidates, blocks), 0.5))  # G under each candidate
            self.register_buffer("choice", torch.tensor(0))  # the candidate in use
        if config.chooser:  # scores of the candidates, linear in what the gate sees of a sample
            self.register_buffer("chooser_weight", torch.zeros(self.candidates, self.reader.features))
            self.register_buffer("chooser_bias", torch.zeros(self.candidates))
        if config.scope == "client":
            channels, positions = self.reader.channels, self.reader.positions
            self.register_buffer("client_features", torch.zeros(channels, positions))
            self.register_buffer("client_mean", torch.zeros(channels))
            self.register_buffer("client_var", torch.ones(channels))
            self.register_buffer("client_samples", torch.zeros((), dtype=torch.int64))
        self.draw(generator)
        if self.post_norm is not None:
            with torch.no_grad():
                scale, offset = self._start
                self.post_norm.weight[0] *= scale
                self.post_norm.bias[0] += offset

    @property
    def size(self) -> int:
        """Number of parameters, all of them private."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def flops(self) -> float:
        """FLOPs of a forward pass per sample."""
        return self._flops_with(self.reader)

    def forward(self, x: Tensor) -> GateOutput:
        """M, G and the class shift for this batch (means over it), or for the client if that is the scope."""
        client = self.config.scope == "client"
        return self.decide(self.remembered() if client else self.reader(x, self.fc.weight.dtype))

    def per_sample(self, x: Tensor) -> GateOutput:
        """The same before the mean over the batch: ``[N, L]`` and ``[N, classes]``."""
        return self.decide(self.read(x), mean=False)

    def read(self, x: Tensor) -> Features:
        """The features of a batch. No parameter is involved: it may be kept for the next epoch."""
        return self.reader(x, self.fc.weight.dtype)

    def decide(self, seen: Features, *, mean: bool = True) -> GateOutput:
        """M, G and the class shift from what :meth:`read` saw (or from some of its rows)."""
        h = (seen.pooled if self.pre_norm is None else self.pre_norm(*seen)).flatten(1)
        z = self.fc(h)
        shift = None
        if self.classes:
            z, shift = z.split((self.paths * self.blocks, self.classes), 1)
            shift = shift.mean(0) if mean else shift
        z = z.reshape(len(z), self.paths, self.blocks)
        if self.post_norm is not None:
            z = self.post_norm(z)
        config, bounded = self.config, torch.sigmoid(z)
        paths = (bounded.mean(0) if mean else bounded.movedim(1, 0)).unbind(0)
        weights, importance = paths[0], paths[-1]
        if config.activation in ("linear", "none"):
            weights = z[:, 0].mean(0) if mean else z[:, 0]
        if config.activation == "centred":
            # In these forms sigmoid(0) = 1/2 gives exactly 1, also after the mean.
            weights = 2 * weights if config.weight_range == 1 else 1 + 2 * config.weight_range * (weights - 0.5)
        elif config.activation == "linear":
            weights = 1 + config.weight_range * weights
        if self.candidates:
            importance = self.rankings[self.choice]
        elif self.paths == 1:
            importance = weights
        return GateOutput(weights, importance, shift)

    def groups(self, x: Tensor) -> list[tuple[int, Tensor]]:
        """With a chooser: the candidates that samples of this batch go to, each with the rows of its samples.

        In training a group of one joins the largest, because norms over a batch have no use for it.
        """
        scores = self._glimpse(x) @ self.chooser_weight.T + self.chooser_bias
        chosen = scores.argmax(1)
        counts = torch.bincount(chosen, minlength=self.candidates)
        if self.training:
            chosen = torch.where(counts[chosen] < 2, counts.argmax(), chosen)
        return [(int(c), (chosen == c).nonzero()[:, 0]) for c in torch.bincount(chosen).nonzero()[:, 0].tolist()]

    @torch.no_grad()
    def learn(self, x: Tensor, losses: Tensor, sharpness: float) -> None:
        """Let the chooser learn from these samples and their losses under every candidate, ``[candidates, N]``.

        A softmax regression on soft choices, exp(-loss · sharpness): a sample to which candidates are alike says
        nothing. It goes on from what it has learnt before.
        """
        h = self._glimpse(x)
        soft = torch.softmax(-losses.T * sharpness, 1)
        for _ in range(LESSONS):
            wrong = (torch.softmax(h @ self.chooser_weight.T + self.chooser_bias, 1) - soft) / len(h)
            self.chooser_weight -= LESSON * (wrong.T @ h + DECAY * self.chooser_weight)
            self.chooser_bias -= LESSON * wrong.sum(0)

    def _glimpse(self, x: Tensor) -> Tensor:
        """What the gate sees of each sample alone, as a vector of length 1."""
        pooled = self.read(x).pooled.flatten(1)
        return F.normalize(pooled - pooled.mean(1, keepdim=True))

    @torch.no_grad()
    def remember(self, batches: Iterable[Tensor]) -> None:
        """Store the mean over all of a client's training data: what scope ``"client"`` decides from."""
        if self.config.scope != "client":
            raise ValueError(f"remember() is for scope='client', this gate has scope={self.config.scope!r}")
        count = 0
        pooled = torch.zeros_like(self.client_features, dtype=torch.float64)  # thousands of samples
        first, second = torch.zeros_like(pooled[:, 0]), torch.zeros_like(pooled[:, 0])
        for x in batches:
            seen = self.reader(x, torch.float64)
            count += len(seen.mean)
            pooled += seen.pooled.sum(0)
            first += seen.mean.sum(0)
            second += (seen.var + seen.mean.square()).sum(0)
        if not count:
            raise ValueError("remember() got no data: pass the batches of the client's training set")
        mean = first / count
        self.client_features.copy_(pooled / count)
        self.client_mean.copy_(mean)
        self.client_var.copy_((second / count - mean.square()).clamp_(min=0))
        self.client_samples.fill_(count)
        if self.pre_norm is not None:  # the client is the batch
            self.pre_norm.running_mean.copy_(self.client_mean)
            self.pre_norm.running_var.copy_(self.client_var)

    def remembered(self) -> Features:
        """The stored client as a batch of one."""
        if not int(self.client_samples):
            raise RuntimeError(
                "a gate with scope='client' decides from all of the client's training data: "
                "call gate.remember(batches) before the first forward"
            )
        return Features(self.client_features[None], self.client_mean[None], self.client_var[None])

    def _fit(self, example: Tensor, embedding: nn.Embedding | None) -> Reader:
        """The reader with the largest pooling that keeps the gate within its shares of the model's size and FLOPs."""
        config = self.config
        for pool in POOLS[kind_of(example)] if config.pool is None else (config.pool,):
            reader = Reader(example, pool, embedding=embedding, channels_last=config.channels_last)
            # 2 d_X L and a few: biases, post-norm, switchable norm, class shift.
            outputs = self.paths * self.blocks
            size = (reader.features + 1) * (outputs + self.classes)
            if config.post_norm != "none":
                size += 2 * outputs
            if config.pre_norm:
                size += 2 * reader.channels + (4 if reader.norm_rank == 2 else 6)
            fits = size <= config.max_share * self.model_size
            if fits and self._flops_with(reader) <= FLOPS * self.model_flops:
                return reader
        if fits:  # the plan takes the FLOPs beyond that from the budget
            return reader
        warn(
            f"the gate has {size:,} parameters, {size / self.model_size:.1%} of the model's "
            f"{self.model_size:,} (wanted: at most {config.max_share:.1%}), from {reader.features} features "
            f"and {self.blocks} blocks: use fewer blocks (blocks=...), a smaller gate (gate={{'pool': 1}}, "
            f"gate={{'paths': 1}}), or gate={{'max_share': {math.ceil(100 * size / self.model_size) / 100}}}; "
            f"in a recipe these are algorithm.blocks, algorithm.gate.pool, .paths and .max_share",
        )
        return reader

    def _flops_with(self, reader: Reader) -> float:
        """Per sample: one product for all paths, and the mixture of two or three means and variances."""
        statistics = min(reader.norm_rank, 3) if self.config.pre_norm else 0
        chooser = 2.0 * reader.features * self.candidates if self.config.chooser else 0.0
        products = self.paths * self.blocks + self.classes
        return 2.0 * reader.features * products + chooser + 4.0 * statistics * reader.channels

    @torch.no_grad()
    def draw(self, generator: torch.Generator | None) -> Gate:
        """Draw the weights anew, from ``generator`` alone: another client's gate, otherwise like this one."""
        learned = self.paths * self.blocks
        bound = self.reader.features**-0.5  # torch's own rule for Linear, but from `generator`
        self.fc.weight.uniform_(-bound, bound, generator=generator)
        self.fc.bias.uniform_(-bound, bound, generator=generator)
        self.fc.weight[learned:] = 0
        self.fc.bias[learned:] = 0
        if self.post_norm is None:
            scale, offset = self._start
            self.fc.weight[: self.blocks] *= scale
            self.fc.bias[: self.blocks] *= scale
            self.fc.bias[: self.blocks] += offset
        return self

    @property
    def _start(self) -> tuple[float, float]:
        """Spread and offset of M's path at the start."""
        if self.config.init == "ones":
            return 0.0, (1.0 if self.config.activation == "none" else 0.0)
        return self.config.initial_scale, self.config.initial_bias

    def extra_repr(self) -> str:
        reader, share = self.reader, self.size / self.model_size
        return (
            f"{self.blocks} blocks from {reader.features} features ({reader.kind}), "
            f"scope={self.config.scope!r}, {self.size:,} parameters = {share:.1%} of the model"
        )


class BlockNorm(nn.Module):
    """The gate's post-norm on values ``[N, paths, L]``, with one weight and bias per path and block.

    ``kind="blocks"`` normalises each path of each sample over its L blocks. ``kind="batch"`` is the paper's
    BatchNorm over the batch: the mean over the batch that follows then hardly depends on the batch any more
    (kept because it is the published choice). A batch of one has no statistics: it uses the running ones.

    >>> z = BlockNorm(2, 5, kind="blocks")(torch.randn(4, 2, 5))
    >>> bool(z.mean(2).abs().max() < 1e-6)
    True
    """

    running_mean: Tensor
    running_var: Tensor
    batches_seen: Tensor

    def __init__(self, paths: int, blocks: int, *, kind: str, track: bool = True) -> None:
        super().__init__()
        self.kind, self.track = kind, track
        self.weight = nn.Parameter(torch.ones(paths, blocks))
        self.bias = nn.Parameter(torch.zeros(paths, blocks))
        if kind == "batch":
            self.register_buffer("running_mean", torch.zeros(paths, blocks))
            self.register_buffer("running_var", torch.ones(paths, blocks))
            self.register_buffer("batches_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, z: Tensor) -> Tensor:
        if self.kind == "blocks":
            z = F.layer_norm(z, z.shape[2:], eps=EPS)
        elif self.training and self.track and len(z) > 1:
            mean = z.mean(0)
            centred = z - mean
            var = centred.square().mean(0)
            fold(self, mean.detach(), var.detach())
            z = centred * torch.rsqrt(var + EPS)
        else:
            z = (z - self.running_mean) * torch.rsqrt(self.running_var + EPS)
        return torch.addcmul(self.bias, z, self.weight)

    def extra_repr(self) -> str:
        paths, blocks = self.weight.shape
        return f"paths={paths}, blocks={blocks}, kind={self.kind!r}"
