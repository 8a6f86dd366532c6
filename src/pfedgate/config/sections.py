"""The sections of a recipe whose keys never change: every default, and why it is what it is.

[data], [model] and [algorithm] are not here: their keys are the options of whatever their `name` names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pfedgate.core.errors import RecipeError

DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True)
class Train:
    """[train]: what a client does in a round, the same for every method."""

    rounds: int = 100  # the paper trains 400; most of the accuracy is there after a quarter
    batch: int = 128  # the paper's
    epochs: int = 1  # over a client's data, each round; the paper's
    steps: int | None = None  # batches a round instead of epochs: equal work for clients of unequal size
    drop_last: bool = False  # a client's smaller last batch is data too
    optimiser: str = "sgd"  # sgd, adam, adamw
    lr: float = 0.05  # the model's rate, in the middle of the paper's grid .005 to .5
    momentum: float = 0.9  # within a round; buffers start at zero every round
    weight_decay: float = 5e-4  # the references' value
    betas: tuple[float, float] = (0.9, 0.999)  # Adam's usual
    eps: float = 1e-8  # Adam's usual
    clip: float | None = 10.0  # norm of the gradient: rarely reached, keeps one bad batch from ruining a round
    schedule: str = "constant"  # constant, multi_step, cosine, plateau; by the global round
    milestones: tuple[float, ...] = (0.5, 0.75)  # multi_step: shares of all rounds (FedEM's)
    gamma: float = 0.1  # multi_step: factor at a milestone (FedEM's)
    floor: float = 0.0  # cosine: the factor it ends at
    plateau: float = 0.75  # plateau: factor when validation stops rising
    patience: int = 10  # plateau: evaluations without a new best before that
    warmup: int = 0  # rounds of linear rise; small networks need none


@dataclass(frozen=True)
class Clients:
    """[clients]: who takes part, and what each can afford."""

    fraction: float = 1.0  # share of the clients sampled each round; the paper's main tables use all
    number: int | None = None  # clients sampled each round, instead of fraction
    # Share of the dense model a client can afford; also one per client, { id = budget }, a distribution such as
    # { "0.5" = 0.5, "0.1" = 0.5 }, resources { params = 0.5, latency_ms = 8 }, or the path of a CSV of devices.
    budget: Any = 1.0
    novel: float = 0.0  # share of clients held out of training, to be met afterwards (the paper: 0.2)
    agg_norm: str = "sampled"  # average over the sampled clients; "all" counts the others as unchanged


@dataclass(frozen=True)
class Evaluate:
    """[evaluate]: when and how models are scored; it never changes what is learnt."""

    every: int = 5  # rounds, and always the last one: scoring all clients costs about as much as a third of a round
    # Models to score: each client's after the broadcast, or also "after_local", as published numbers often are.
    points: tuple[str, ...] = ("after_broadcast",)
    batch: int = 512  # only memory and speed depend on it
    novel: bool = True  # after training, let the clients held out adapt and score them


@dataclass(frozen=True)
class Session:
    """[run]: where and how it runs; of these only the seed changes the result."""

    seed: int = 0  # everything random follows from it
    workers: int | str = "auto"  # processes; 1 = this one; auto = one per core where a round is worth it
    device: str = "auto"  # auto, cpu, cuda, mps; auto takes the first accelerator there is
    stack: int | str = "auto"  # clients trained at once where the method can: a number, 0 = never
    checkpoint_every: int = 1  # rounds; a checkpoint is cheap beside a round
    keep_best: bool = True  # keep the models that were best on validation, beside the last ones


@dataclass(frozen=True)
class Deploy:
    """[deploy]: on many machines (`pfedgate deploy`), how long to wait and for how many; elsewhere without effect."""

    nodes: int = 1  # training starts when so many nodes have told which clients they hold
    start: float = 300.0  # seconds to wait for them; a node needs some 10 to come up
    deadline: float = 600.0  # seconds a round may take, an evaluation likewise; who is late is left out
    quorum: float = 0.5  # share of a round's clients whose updates must have come by then, else the run stops
    class_names: tuple[str, ...] = ()  # names of all classes, where a node may hold data of some of them only

    def __post_init__(self) -> None:
        if self.nodes < 1 or not 0 < self.start < math.inf or not 0 < self.deadline < math.inf:
            raise RecipeError("[deploy] nodes is at least 1; start and deadline are seconds > 0")
        if not 0 <= self.quorum <= 1:
            raise RecipeError(f"[deploy] quorum is a share from 0 to 1, got {self.quorum}")


# Defaults that fit a data set better than those above. A recipe goes over them.
FITTING: dict[str, dict[str, dict[str, Any]]] = {
    # 20 clients of about 54 training images: a batch of 128 would be one step a round. At alpha = 0.4 one model for all
    # does best here (FedAvg beats pFedGate): digits are easy and clients much alike; at 0.1 personal models pay.
    "digits": {"data": {"alpha": 0.1}, "train": {"batch": 16, "rounds": 30, "lr": 0.1}},
}

# The network for a data set, where [model] names none: the paper's, or a small one of ours.
NETWORKS = {
    "digits": "cnn_digits",
    "cifar10": "cnn_cifar10",
    "cifar100": "cnn_cifar100",
    "emnist": "cnn_femnist",
    "emnist_sd19": "cnn_femnist",
    "femnist": "cnn_femnist",
    "folder": "cnn_cifar10",
}

# Keys of earlier versions, so that their recipes and run folders can still be read: under a new name, or gone. A key
# that is gone may only say what holds now; any other value is refused for the reason beside it.
GATE_FIELDS = {
    **{name: name for name in ("pre_norm", "post_norm", "activation", "weight_range", "shift", "ranking")},
    "spread": "initial_scale",
    "bias": "initial_bias",
    "predict": "scope",
}
RENAMED: dict[str, dict[str, str]] = {
    "algorithm.pfedgate": {old: f"gate.{new}" for old, new in GATE_FIELDS.items()},
}
GONE: dict[str, dict[str, tuple[Any, str]]] = {
    "train": {
        "persist_momentum": (False, "momentum that outlives a round points to a model of rounds ago"),
    },
    "algorithm.pfedgate": {
        "half": (False, "float16 differences gained nothing beside upload, which caps what is sent"),
        "own": ([], "layers of a client's own gained nothing in long training; FedPer, FedRep and LG-FedAvg have them"),
        "straight_through": ("full", "gradients for live blocks alone gained nothing; pfedgate.gate still has them"),
        "deviations": ([], "the authors' code is bracketed in benchmarks/ now"),
        "ignore": (1.0, "believing a client's label counts altogether slowed the shared model"),
        "common_init": (True, "gates that start apart ended two points lower"),
        "gate_ones": (False, 'write algorithm.gate.init = "ones"'),
    },
}
