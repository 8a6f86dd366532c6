"""What may be set in a recipe, and how: names, types, defaults and reasons, read from the code that uses them.

Dataclasses and keyword arguments are the only place where an option is declared; recipes, the command line and tables
of options read them here, comments included. The sections below have the same keys always. Keys of [data], [model] and
[algorithm] are the options of whatever their `name` names; a field that is itself a dataclass contributes its own
fields under dotted names: `gate.shift`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import textwrap
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pfedgate import algorithms, models
from pfedgate.config import code
from pfedgate.config.code import Code
from pfedgate.core.attack import Attack
from pfedgate.core.errors import RecipeError, unknown
from pfedgate.core.kinds import KINDS, LOSSES, METRICS
from pfedgate.core.types import Privacy, ServerOptim
from pfedgate.data import (
    DATASETS,
    Federation,
    conflicting,
    exercises,
    from_folder,
    from_table,
    load,
    mixture,
    synthetic,
)
from pfedgate.data.adopt import adopt
from pfedgate.data.shakespeare import shakespeare
from pfedgate.data.sharing import Options as DataOptions
from pfedgate.data.sharing import Sharing
from pfedgate.fleet.pace import Pace

REQUIRED = dataclasses.MISSING
GIVEN = "given"  # the name of data or a model that came as a Python object
DEVICES = ("auto", "cpu", "cuda", "mps")
MOST = 1024  # worker processes: more are a slip of the keyboard, and would take the machine down


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
    # End after so many evaluations (evaluate.every) without a better score on validation data; none: train all rounds.
    stop_after: int | None = None
    # Times the initial weights of hidden layers, which torch draws too small for ReLU: for every method alike. Networks
    # with norms and modules of your own keep theirs.
    initial_scale: float = 1.4
    # Log frequencies of a client's labels, added to its model's outputs: "prediction" when it is used, "training" in
    # the loss, too. They never leave the client. Tasks without classes (regression, …) have none to count.
    correction: Literal["none", "prediction", "training"] = "training"
    shift: bool = False  # a private value per class, added to the outputs and learnt by the client
    shift_lr: float | None = None  # its rate; none: the model's

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise RecipeError(f"train.rounds is a whole number from 1 on, got {self.rounds}")
        if self.stop_after is not None and self.stop_after < 1:
            raise RecipeError(f"train.stop_after counts evaluations, from 1 on, got {self.stop_after}")


@dataclass(frozen=True)
class Goal:
    """[task]: what is learnt, and the numbers that say how well."""

    kind: str = "auto"  # classification, multilabel, regression, segmentation, language; auto: what the data says
    loss: str = "auto"  # cross_entropy, pixels, binary, squared, absolute, huber, or FILE.py:FUNCTION; auto: the kind's
    # Names such as accuracy, f1, mae, rmse, iou or perplexity, or FILE.py:FUNCTION. The first one decides what is best.
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind != "auto" and self.kind not in KINDS:
            raise RecipeError(f"task.kind: {unknown('kind of task', self.kind, [*KINDS, 'auto'])}")
        if self.loss not in ("auto", *LOSSES) and ".py:" not in self.loss:
            raise RecipeError(f"task.loss: {unknown('loss', self.loss, [*LOSSES, 'auto'])}")
        for metric in self.metrics:
            if metric not in ("loss", *METRICS) and ".py:" not in metric:
                raise RecipeError(f"task.metrics: {unknown('metric', metric, [*METRICS, 'loss'])}")


@dataclass(frozen=True)
class Clients:
    """[clients]: who takes part, and what each can afford."""

    fraction: float = 1.0  # share of the clients sampled each round; the paper's main tables use all
    number: int | None = None  # clients sampled each round, instead of fraction
    # Share of the dense model a client can afford; also one per client, { id = budget }, a distribution such as
    # { "0.5" = 0.5, "0.1" = 0.5 }, resources { params = 0.5, latency_ms = 8 }, the path of a CSV of devices,
    # or "device": what its device in [fleet] can train within memory, deadline and data plan.
    budget: Any = 1.0
    novel: float = 0.0  # share of clients held out of training, to be met afterwards (the paper: 0.2)
    agg_norm: str = "sampled"  # average over the sampled clients; "all" counts the others as unchanged

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise RecipeError(f"clients.fraction must be a share in (0, 1], got {self.fraction}; see clients.number")


@dataclass(frozen=True)
class Evaluate:
    """[evaluate]: when and how models are scored; it never changes what is learnt."""

    every: int = 5  # rounds, and always the last one: scoring all clients costs about as much as a third of a round
    # Models to score: each client's after the broadcast; also "after_local", after epochs of its own, as published
    # numbers often are; "batch_1", one sample at a time; "per_client", one decision for all of a client's batches.
    points: tuple[str, ...] = ("after_broadcast",)
    local_lr: float | None = None  # rate of the client's own epochs; none: that of training
    local_epochs: int | None = None  # how many; none: those of a round
    batch: int = 512  # only memory and speed depend on it
    novel: bool = True  # after training, let the clients held out adapt and score them


@dataclass(frozen=True)
class Session:
    """[run]: where and how it runs; of these only the seed changes the result."""

    seed: int = 0  # everything random follows from it
    workers: int | str = "auto"  # processes; 1 = this one; auto = one per core where a round is worth it
    exchange: str = "auto"  # auto = this process or workers; ray = the cores of a Ray cluster (extra ray, RAY_ADDRESS)
    device: str = "auto"  # auto, cpu, cuda, mps; auto takes the first accelerator there is
    amp: bool = False  # bfloat16 where it is safe, on a CUDA device; elsewhere float32, with a word
    stack: int | str = "auto"  # clients trained at once where the method can: a number, 0 = never
    checkpoint_every: int = 1  # rounds; a checkpoint is cheap beside a round
    keep_best: bool = True  # keep the models that were best on validation, beside the last ones
    callbacks: tuple[str, ...] = ()  # FILE.py:FUNCTION, called with {"event": "start" | "round" | "end", …}

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise RecipeError(f"run.device: {unknown('device', self.device, DEVICES)}")
        for callback in self.callbacks:
            Code.of(callback)
        if self.exchange not in ("auto", "ray"):
            raise RecipeError(f"run.exchange: {unknown('exchange', self.exchange, ('auto', 'ray'))}")
        for key, value, least, most in (("workers", self.workers, 1, MOST), ("stack", self.stack, 0, math.inf)):
            if value != "auto" and (not isinstance(value, int) or not least <= value <= most):
                bounds = f"from {least} on" if most == math.inf else f"from {least} to {most}"
                raise RecipeError(f'run.{key} must be "auto" or a whole number {bounds}, got {value!r}')


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


FIXED: dict[str, type[Any]] = {
    "task": Goal, "train": Train, "clients": Clients, "fleet": Pace, "server": ServerOptim, "privacy": Privacy,
    "attack": Attack,
    "evaluate": Evaluate, "run": Session, "deploy": Deploy,
}  # fmt: skip
NAMED = ("data", "model", "algorithm")
SECTIONS = (
    "data",
    "model",
    "task",
    "train",
    "algorithm",
    "clients",
    "fleet",
    "server",
    "privacy",
    "attack",
    "evaluate",
    "run",
    "deploy",
)


@dataclass(frozen=True)
class Option:
    """A name that can be set, with the type and default of its value and the reason for that default."""

    name: str
    type: Any
    default: Any
    why: str = ""


# Sources of data beside the table of data sets.
BUILDERS: dict[str, Callable[..., Federation]] = {
    "synthetic": synthetic,
    "conflicting": conflicting,
    "mixture": mixture,
    "folder": from_folder,
    "table": from_table,
    "tags": exercises.tags,
    "meters": exercises.meters,
    "shapes": exercises.shapes,
    "babble": exercises.babble,
    "shakespeare": shakespeare,
}

SEED = Option("seed", int | None, None, "of the partition and the split; by default the run's")
# Options that `from_folder` and `from_table` hand on to `from_arrays`, as far as a text file can say them.
ARRAYS = {
    "classes": Option("classes", int | None, None, "how many there are, if the data does not show all of them"),
    "standardise": Option("standardise", bool, False, "mean 0 and deviation 1, measured on the training samples"),
    "mean": Option("mean", float | tuple[float, ...], (), "per channel or feature"),
    "std": Option("std", float | tuple[float, ...], (), "per channel or feature"),
}

# Defaults that fit a data set better than those above. A recipe goes over them.
FITTING: dict[str, dict[str, dict[str, Any]]] = {
    # 20 clients of about 54 training images: a batch of 128 would be one step a round. At alpha = 0.4 one model for all
    # does best here (FedAvg beats pFedGate): digits are easy and clients much alike; at 0.1 personal models pay.
    "digits": {"data": {"alpha": 0.1}, "train": {"batch": 16, "rounds": 30, "lr": 0.1}},
    "fashion": {"data": {"alpha": 0.3}, "train": {"batch": 32, "rounds": 10}},
    **{name: {"train": {"batch": 16, "rounds": 30}} for name in ("tags", "meters", "shapes", "babble")},
}

# The network for a data set, where [model] names none: the paper's, or a small one of ours.
NETWORKS = {
    "digits": "cnn_digits",
    "fashion": "cnn_femnist",
    "cifar10": "cnn_cifar10",
    "cifar100": "cnn_cifar100",
    "emnist": "cnn_femnist",
    "emnist_sd19": "cnn_femnist",
    "femnist": "cnn_femnist",
    "folder": "cnn_cifar10",
    "shapes": "unet",
    "babble": "token_gru",
    "shakespeare": "token_gru",
    "mixture": "cnn_femnist",
}


# Arguments of a function in a file that are never set in a recipe: they follow from the data, or from other sections.
DONE = {"data": ("novel",), "model": ("input_shape", "classes")}


def options_of(section: str, name: str = "") -> Mapping[str, Option]:
    """The options of a section; for [data], [model] and [algorithm] they depend on the name there.

    >>> sorted(options_of("model", "mlp")), options_of("evaluate")["every"].default
    (['dropout', 'hidden'], 5)
    """
    if section in FIXED:
        return of_dataclass(FIXED[section])  # type: ignore[arg-type]  # classes are hashable
    if name == GIVEN or (section == "model" and name == "auto"):
        return {}
    if code.is_code(name) and section in DONE:
        values = {key: value for key, value in code.arguments(name).items() if key not in DONE[section]}
        return {key: Option(key, Any, REQUIRED if value is code.MISSING else value) for key, value in values.items()}
    if name.endswith(".py"):
        raise RecipeError(f"[{section}] say which function of {name} it is: {name}:build")
    if section == "data":
        return _of_data(name)
    if section == "algorithm":
        try:
            return of_dataclass(algorithms.get(name), "task")  # type: ignore[arg-type]
        except KeyError as error:
            raise RecipeError(f"[algorithm] {error.args[0]}") from None
    if name not in models.names():
        raise RecipeError(f"[model] {unknown('model', name, [*models.names(), 'auto'])}")
    options: dict[str, Option] = {}
    for key, default in models.options(name).items():
        kind: Any = Any if default is None else type(default)
        if isinstance(default, (list, tuple)):
            kind = tuple[type(default[0]) if default else int, ...]  # type: ignore[misc]
        options[key] = Option(key, kind, default)
    return options


def _of_data(name: str) -> dict[str, Option]:
    if name in DATASETS:
        return {**of_dataclass(DataOptions, "novel"), "seed": SEED}
    if name not in BUILDERS:
        if any(mark in name for mark in "/\\."):
            raise RecipeError(f"[data] no file or folder {name}: data is a name, a folder of images or a table")
        raise RecipeError(f"[data] {unknown('data set', name, [*DATASETS, *BUILDERS])}")
    hints, own = _hints(BUILDERS[name]), {}
    for key, argument in inspect.signature(BUILDERS[name]).parameters.items():
        if key != "novel" and argument.kind not in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL):
            default = REQUIRED if argument.default is argument.empty else argument.default
            own[key] = Option(key, hints.get(key, Any), default)
    sharing = {} if name == "synthetic" else of_dataclass(DataOptions if name == "mixture" else Sharing, "novel")
    return {**sharing, **(ARRAYS if name in ("folder", "table") else {}), **own, "seed": SEED}


def usual(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a data set with its own defaults written out, where they do not depend on the copy at hand.

    >>> usual("digits", {"clients": None, "partition": None})
    {'clients': 20, 'partition': 'dirichlet'}
    """
    if name not in DATASETS:
        return options
    data, filled = DATASETS[name], dict(options)
    filled["partition"] = options.get("partition") or data.partition
    if data.samples is not None and options.get("samples") is None:
        filled["samples"] = data.samples
    # The number of owners is in the data alone.
    if filled["partition"] != "owner" and options.get("clients") is None and options.get("writers") is None:
        filled["clients"] = data.clients
    return filled


def federation(
    name: str, options: Mapping[str, Any], *, novel: float = 0.0, seed: int = 0, task: str = "auto"
) -> Federation:
    """The federation that a name and its options describe; `seed` counts if the options have none.

    `task` says what labels are where the data itself cannot: in a table.
    """
    given = {key: value for key, value in options.items() if value != ()}
    if code.is_code(name):
        if "seed" in (wanted := code.arguments(name)) and given.get("seed") is None:
            given["seed"] = seed
        given |= {"novel": novel} if "novel" in wanted else {}
        made = Code.of(name, **given)()
        if hasattr(made, "part"):
            return made  # type: ignore[no-any-return]
        kind: dict[str, Any] = {} if task == "auto" else {"task": task}
        return adopt(made, novel=novel, seed=seed, **kind)  # type: ignore[no-any-return]
    if name == "table" and task != "auto":
        given["task"] = task
    given["seed"] = seed if given.get("seed") is None else given["seed"]
    return load(name, novel=novel, **given) if name in DATASETS else BUILDERS[name](novel=novel, **given)


# -- options as the code declares them
@cache  # a study resolves hundreds of recipes
def of_dataclass(cls: type[Any], leave_out: str = "") -> Mapping[str, Option]:
    """The fields of a dataclass as options, all but one.

    >>> from pfedgate.core.types import Schedule
    >>> of_dataclass(Schedule)["gamma"]
    Option(name='gamma', type=<class 'float'>, default=0.1, why='multi_step: factor at a milestone')
    """
    hints, reasons = _hints(cls), comments(cls)
    options: dict[str, Option] = {}
    for field in dataclasses.fields(cls):
        if field.name == leave_out or not field.init:
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if dataclasses.is_dataclass(default):
            for inner in of_dataclass(type(default)).values():  # type: ignore[arg-type]
                name = f"{field.name}.{inner.name}"
                options[name] = Option(name, inner.type, getattr(default, inner.name), inner.why)
        else:
            options[field.name] = Option(field.name, hints[field.name], default, reasons.get(field.name, ""))
    return options


def _hints(declared: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(declared)
    except NameError:  # a type imported only for the type checker: any value goes, the code itself will object
        return dict.fromkeys(getattr(declared, "__annotations__", {}), Any)


_FIELD = re.compile(r"    (\w+): [^#]*(?:# *(.*))?$")
_COMMENT = re.compile(r"    # *(.*)$")


def comments(cls: type[Any]) -> dict[str, str]:
    """The comment beside or above each field of a class, base classes included.

    >>> from pfedgate.core.types import Optim
    >>> comments(Optim)["clip"]
    'L2 norm of the gradient, for every method alike'
    """
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            lines = textwrap.dedent(inspect.getsource(base)).splitlines() if dataclasses.is_dataclass(base) else []
        except (OSError, TypeError):  # built in, or typed into a console
            continue
        above: list[str] = []
        for line in lines:
            if comment := _COMMENT.match(line):
                above.append(comment[1].strip())
                continue
            if (field := _FIELD.match(line)) and (text := (field[2] or " ".join(above)).strip()):
                texts[field[1]] = text
            above = []
    return texts
