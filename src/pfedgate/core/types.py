"""The nouns: State, Card, Round, Local, Update, Optim, Schedule, Task, DataShape.

A server knows cards; a client's data exists only inside a `Local`, which lives for one call; what travels
is a State down and an `Update` up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pfedgate.core.errors import unknown
from pfedgate.core.kinds import Loss, Metric, loss_of, metrics_of
from pfedgate.core.seeds import generator, key

State = dict[str, Tensor]  # flat and named: the one thing stored, sent, checkpointed, counted
CPU = torch.device("cpu")
Budget = float | Mapping[str, float]  # a share of the dense model, or one number per resource


class Part(Protocol):
    """Some samples: `x` raw as stored, `y` labels. Read when asked for."""

    @property
    def n(self) -> int: ...
    @property
    def x(self) -> Tensor: ...
    @property
    def y(self) -> Tensor: ...


class Federation(Protocol):
    """What the engine needs to know of data; `pfedgate.data.Federation` is one."""

    @property
    def clients(self) -> Sequence[str]: ...
    @property
    def novel(self) -> Sequence[str]: ...
    def part(self, client: str, name: str) -> Part: ...
    @property
    def prepare(self) -> Callable[[Tensor], Tensor]: ...


@dataclass(frozen=True)
class DataShape:
    """The form of a data set: all that planning a model needs to know, so that no sample must be read.

    >>> DataShape(10, (1, 8, 8), torch.float32).shape
    (1, 8, 8)
    """

    classes: int
    shape: tuple[int, ...]  # of one input as a model takes it
    dtype: torch.dtype  # of an input as a model takes it
    kind: str = "classification"  # of task; classes are then the number of outputs


@dataclass(frozen=True)
class Card:
    """All a server may know of a client."""

    id: str
    n_train: int
    budget: Budget = 1.0


@dataclass(frozen=True)
class Round:
    """Where we are in a run; known to server and clients alike."""

    index: int = 0  # from 0
    rounds: int = 1  # how many there will be
    seed: int = 0
    factor: float = 1.0  # the schedule's: multiply any learning rate with it
    total: float | None = None  # weight of ALL clients if averages are over all of them (agg_norm="all")

    def generator(self, purpose: str) -> torch.Generator:
        """A generator that server and all clients of this round agree on."""
        return generator(self.seed, purpose, self.index)


@dataclass(frozen=True)
class Local:
    """A client's side of one call. It has no test data."""

    card: Card
    train: Part
    val: Part
    round: Round = Round()
    device: torch.device = CPU
    prepare: Callable[[Tensor], Tensor] = torch.Tensor.float  # raw batch -> what the model takes
    secret: bytes = field(default=b"", repr=False)  # a key of the client's side alone, for noise; empty: none is kept

    @property
    def n(self) -> int:
        """Training samples: the usual weight of an update."""
        return self.train.n

    def generator(self, purpose: str) -> torch.Generator:
        """A generator of this client in this round; every purpose has its own stream."""
        return generator(self.round.seed, purpose, self.round.index, self.card.id)

    def key(self, purpose: str) -> int:
        """The number that seeds `generator(purpose)`."""
        return key(self.round.seed, purpose, self.round.index, self.card.id)


@dataclass(frozen=True)
class Update:
    """What a client sends: new *values* (not differences) of what it shares, a weight, a few numbers."""

    shared: State
    weight: float
    metrics: Mapping[str, float] = field(default_factory=dict)


Objective = Callable[[nn.Module, Any], Tensor]  # (module, batch) -> one number


OPTIMISERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class Optim:
    """Which optimiser clients use, and its settings."""

    name: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float | None = 10.0  # L2 norm of the gradient, for every method alike

    def __post_init__(self) -> None:
        if self.name not in OPTIMISERS:
            raise ValueError(unknown("optimiser", self.name, OPTIMISERS))
        for name, value in (("lr", self.lr), ("weight_decay", self.weight_decay)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must not be negative, and be finite; got {value}")
        if not 0 <= self.momentum < 1 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"momentum and betas are from 0 to below 1; got {self.momentum} and {self.betas}")
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps is more than 0, and finite; got {self.eps}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip is a norm > 0, or None for no clipping; got {self.clip}")


SERVER_RATES = {
    "none": 0.0,
    "momentum": 1.0,
    "adam": 0.03,
    "yogi": 0.03,
}  # 10^-1.5: among the paper's best on four tasks


ROBUST = ("guard", "clip", "median", "trimmed", "geometric", "krum", "off")


@dataclass(frozen=True)
class ServerOptim:
    """[server]: what it does with updates, for whatever method; see `engine.server_step` and `core.robust`."""

    optimiser: str = "none"  # none, momentum (FedAvgM), adam (FedAdam), yogi (FedYogi)
    lr: float | None = None  # none: 1 with momentum, 0.03 with adam and yogi
    momentum: float = 0.9  # momentum: the papers'
    betas: tuple[float, float] = (0.9, 0.99)  # adam, yogi: the paper's
    tau: float = 1e-3  # adam, yogi: how adaptive; the paper's
    robust: str = "guard"  # against crooked clients: guard, clip, median, trimmed, geometric, krum, off
    crooked: float = 0.2  # trimmed, krum: the share of a round's clients that may be crooked
    norm: float | None = None  # guard, clip: the longest that an update may be (L2), instead of a bound by its round

    def __post_init__(self) -> None:
        if self.optimiser not in SERVER_RATES:
            raise ValueError(f"server.optimiser: {unknown('value', self.optimiser, SERVER_RATES)}")
        if (self.lr is not None and self.lr <= 0) or not 0 <= self.momentum < 1 or self.tau <= 0:
            raise ValueError("server: lr and tau are more than 0, momentum is in [0, 1)")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"server.betas are in [0, 1), got {self.betas}")
        if self.robust not in ROBUST:
            raise ValueError(f"server.robust: {unknown('rule', self.robust, ROBUST)}")
        if not 0 <= self.crooked < 0.5 or (self.norm is not None and not 0 < self.norm < math.inf):
            raise ValueError("server: crooked is a share below a half, norm a length above 0")
        if self.lr is None and self.optimiser != "none":
            object.__setattr__(self, "lr", SERVER_RATES[self.optimiser])  # said in recipes and searches


LEVELS = ("none", "client", "sample")


@dataclass(frozen=True)
class Privacy:
    """[privacy]: how little the server's model tells of any one client, or a client's update of any one sample."""

    # client: updates are shortened and the server adds noise, so that no client stands out; sample: each client does so
    # with the gradients of its samples, so that none of them stands out, to the server, too.
    level: str = "none"
    noise: float = 1.0  # standard deviation of the noise as a multiple of clip; 1 with all clients is much epsilon
    clip: float = 1.0  # L2 norm of a client's whole update (its median is logged), or of a sample's gradient
    delta: float = 1e-5  # chance that epsilon does not hold: far below one over the number of clients, or samples
    # Noise and draws come from a key that is made for the run and kept beside its checkpoint until it ends (sample: by
    # each node beside its private states), so that a round that is repeated tells the same again. false: from run.seed,
    # for studies that must repeat; whoever knows the seed can then take the noise off again.
    secret: bool = True

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"privacy.level: {unknown('level', self.level, LEVELS)}")
        if not 0 <= self.noise < math.inf or not self.clip > 0 or not 0 < self.delta < 1:
            raise ValueError("privacy: noise is at least 0, clip more than 0, delta between 0 and 1")
        if self.clip == math.inf and self.noise > 0:
            raise ValueError("privacy.noise is a multiple of privacy.clip, which must be finite then")


SCHEDULES = ("constant", "multi_step", "cosine", "plateau")


@dataclass(frozen=True)
class Schedule:
    """The factor of the learning rate by the global round, the same for every algorithm and every client.

    The references step a scheduler per client, so that under partial participation the rate never
    decays (`baselines` 2.1). Here it is a pure function of the round and of the validation scores so far.

    >>> [Schedule("multi_step").factor(r, 8) for r in (0, 4, 6)]
    [1.0, 0.1, 0.01]
    """

    name: str = "constant"
    milestones: tuple[float, ...] = (0.5, 0.75)  # multi_step: shares of all rounds (FedEM's choice)
    gamma: float = 0.1  # multi_step: factor at a milestone
    floor: float = 0.0  # cosine: where it ends
    factor_plateau: float = 0.75  # plateau: factor when validation stops rising
    patience: int = 10  # plateau: evaluations without a new best before the factor is applied
    warmup: int = 0  # any: rounds of linear rise at the start

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(unknown("schedule", self.name, SCHEDULES))
        for name in ("warmup", "patience"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} counts rounds, from 0; got {getattr(self, name)}")
        for name in ("gamma", "floor", "factor_plateau"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is a factor, from 0 and finite; got {getattr(self, name)}")
        if not all(0 <= share <= 1 for share in self.milestones):
            raise ValueError(f"milestones are shares of all rounds, from 0 to 1; got {self.milestones}")

    def factor(self, round: int, rounds: int, validation: Sequence[float] = ()) -> float:
        """The factor in `round` (from 0) of `rounds`; `validation` = the accuracies before it."""
        rise = min(1.0, (round + 1) / (self.warmup + 1))
        if self.name == "multi_step":
            passed = sum(round >= int(share * rounds) for share in self.milestones)
            value = float(f"{self.gamma**passed:.12g}")  # 0.1 ** 2 is 0.010000000000000002
        elif self.name == "cosine":
            value = self.floor + (1 - self.floor) * (1 + math.cos(math.pi * round / max(rounds, 1))) / 2
        elif self.name == "plateau":
            value = self.factor_plateau ** self._drops(validation)
        else:
            value = 1.0
        return rise * value

    def _drops(self, validation: Sequence[float]) -> int:
        # Replayed from the scores, so there is no scheduler state to checkpoint or to lose.
        best, waited, drops = -math.inf, 0, 0
        for score in validation:
            if score > best:
                best, waited = score, 0
            else:
                waited += 1
            if waited > self.patience:
                drops, waited = drops + 1, 0
        return drops


@dataclass(frozen=True)
class Example:
    """Shape and dtype of a prepared batch. Equal ones share a traced model; values are never needed.

    >>> Example((2, 3), torch.float32) == Example.of(torch.ones(2, 3))
    True
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, batch: Tensor) -> Example:
        """The shape and dtype of this batch."""
        return cls(tuple(batch.shape), batch.dtype)

    def batch(self) -> Tensor:
        """Noise of this shape, the same every time; whole numbers are zeros, which every vocabulary has."""
        if not self.dtype.is_floating_point:
            return torch.zeros(self.shape, dtype=self.dtype)
        return torch.randn(self.shape, generator=generator(0, "example"), dtype=self.dtype)


CORRECTIONS = ("none", "prediction", "training")


@dataclass(frozen=True)
class Task:
    """What is learnt and how: everything that all algorithms have in common."""

    model: Callable[[], nn.Module]  # picklable (a function or functools.partial) if worker processes are used
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    # (output, labels) -> one loss per sample, or a name of `kinds.LOSSES`; None: what is usual for the kind.
    loss: Loss = None  # type: ignore[assignment]
    batch: int = 128
    epochs: int = 1
    steps: int | None = None  # batches a round instead of epochs
    drop_last: bool = False
    eval_batch: int = 512
    amp: bool = False  # bfloat16 where torch deems it safe, on a CUDA device
    example: Example | Tensor | None = None  # a prepared batch or its shape, for methods that trace the model
    classes: int | None = None  # that labels name; None: unknown, or labels are no classes
    initial_scale: float = 1.0  # times the initial weights of hidden layers, where ReLU follows without a norm
    # What every client adds to its outputs, whatever the method: see `core.prior`.
    correction: str = "none"
    shift: bool = False
    shift_lr: float | None = None  # None: the model's
    added: Tensor | None = None  # set by a client's endpoint: what this client adds, one value per class
    # A client's own epochs after the broadcast ("after_local"): every rate of the method scaled as the model's is.
    local_lr: float | None = None  # None: as in training
    local_epochs: int | None = None

    private: Privacy | None = None  # clients train by DP-SGD (level "sample"): see `training.dpsgd`

    kind: str = "classification"  # see `kinds`
    metrics: tuple[Metric, ...] = ()  # also names of `kinds.METRICS` or functions; the first decides what is best

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", loss_of(self.kind, self.loss))
        object.__setattr__(self, "metrics", metrics_of(self.kind, self.metrics, self.loss))
        if self.correction not in CORRECTIONS:
            raise ValueError(unknown("correction", self.correction, CORRECTIONS))
        if not 0 < self.initial_scale < math.inf:
            raise ValueError(f"initial_scale multiplies weights and is more than 0, got {self.initial_scale}")
        if self.batch < 1 or self.eval_batch < 1 or self.epochs < 0 or (self.steps or 0) < 0:
            raise ValueError("batch and eval_batch are at least 1; epochs and steps are not negative")

    @property
    def metric(self) -> Metric:
        """The main metric: what is best on validation, the bottom decile and tables follow it."""
        return self.metrics[0]

    @property
    def inputs(self) -> Example:
        """The example, which methods that trace the model cannot do without."""
        if self.example is None:
            raise ValueError("this method traces the model: give the task an example (Task(example=...))")
        return Example.of(self.example) if isinstance(self.example, Tensor) else self.example
