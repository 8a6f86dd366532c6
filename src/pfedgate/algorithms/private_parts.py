"""Models of which a part is private: choosing tensors by name, and the bases of methods with such a split.

A part is a set of names of a State. In a client's private State its part lies under `own/`; what is shared lies in
the server's State under its plain names. So a client's whole model is `join(got, private)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import unknown
from pfedgate.core.modules import initial, module, persistent_buffers, skeleton
from pfedgate.core.state import inside, split, under
from pfedgate.core.types import Card, Local, State, Task, Update
from pfedgate.training.fit import fit

OWN = "own/"
Part = frozenset[str]  # names of tensors
Names = str | Sequence[str]  # a layer, a module above layers, or a tensor; or several


@dataclass(frozen=True)
class PrivatePart(Algorithm):
    """A model of which every client keeps a part to itself; as it stands both parts are trained jointly.

    A subclass says which tensors are private, how a novel client gets its own, and whatever else differs. What is
    never averaged may want another rate than what is: `own_lr`.
    """

    own_lr: float | None = None  # rate of the private part; None: the task's, in one optimiser with the rest

    def __post_init__(self) -> None:
        _ = self.own  # a wrong name fails here, not on a client

    @property
    def own(self) -> Part:
        """The names of the private tensors."""
        raise NotImplementedError(f"{type(self).__name__} must define own")

    @property
    def whole(self) -> Task:
        """The task of the client's whole model. Default: the task; a method may add private tensors to its model."""
        return self.task

    def init_server(self, seed: int) -> State:
        """The initial model without the private part: the server never holds that."""
        return split(self._begun(seed), self.own.__contains__)[1]

    def init_client(self, got: State, local: Local) -> State:
        """The private part of the same initial model, for every client alike."""
        return under(OWN, split(self._begun(local.round.seed), self.own.__contains__)[0])

    def _begun(self, seed: int) -> State:
        """The initial whole model; what the method did not add begins as in every other method."""
        return {**initial(self.whole, seed), **initial(self.task, seed)}

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs on the whole model; the private part stays, the rest is sent."""
        own = parameters(self.whole, self.own) if self.own_lr is not None else ()
        done = fit(self.whole, join(got, private), local, own=own, own_lr=self.own_lr)
        part, shared = split(done.state, self.own.__contains__)
        return Update(shared, local.n, done.metrics), under(OWN, part)

    def adapt_part(self, got: State, private: State, local: Local, epochs: int) -> State:
        """A novel client's private part, trained on top of the shared one, which stands still.

        Training both would pull the private part towards a shared part that the client does not keep.
        """
        if not (names := parameters(self.whole, self.own)):
            return private
        done = fit(self.whole, join(got, private), local, names=names, epochs=epochs, lr=self.own_lr)
        return under(OWN, split(done.state, self.own.__contains__)[0])

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The shared part with the client's own."""
        return module(self.whole, join(got, private))


@dataclass(frozen=True)
class PrivateModel(Algorithm):
    """Every client keeps a whole model, which is scored; it lies under `model/` in the private State."""

    def init_client(self, got: State, local: Local) -> State:
        """The initialisation that FedAvg starts from."""
        return under("model/", initial(self.task, local.round.seed))

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The model in the client's private State."""
        return module(self.task, inside("model/", private))


def join(got: State, private: State) -> State:
    """A client's whole model: the shared part and its own."""
    return {**got, **inside(OWN, private)}


def layers(task: Task) -> dict[str, tuple[str, ...]]:
    """Every layer that has parameters, in the order of registration, and its tensors (buffers included).

    >>> from functools import partial; from pfedgate.models import build
    >>> layers(Task(partial(build, "mlp")))
    {'fc1': ('fc1.weight', 'fc1.bias'), 'out': ('out.weight', 'out.bias')}
    """
    model = skeleton(task.model)
    tensors: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        tensors.setdefault(name.rpartition(".")[0], []).append(name)
    for name in persistent_buffers(model):
        if (layer := name.rpartition(".")[0]) in tensors:
            tensors[layer].append(name)
    return {layer: tuple(names) for layer, names in tensors.items()}


def everything(task: Task) -> Part:
    """All parameters and buffers of the model."""
    model = skeleton(task.model)
    return frozenset([*dict(model.named_parameters()), *persistent_buffers(model)])


def choose(task: Task, names: Names, option: str) -> Part:
    """The tensors that the names stand for: a layer's, those below a module, or single ones.

    >>> from functools import partial; from pfedgate.models import build
    >>> sorted(choose(Task(partial(build, "mlp")), ["out"], "head"))
    ['out.bias', 'out.weight']
    >>> choose(Task(partial(build, "mlp")), "uot", "head")
    Traceback (most recent call last):
    ValueError: head: unknown layer 'uot': did you mean 'out'? Known: fc1, out
    """
    part: set[str] = set()
    for name in [names] if isinstance(names, str) else names:
        below = [tensor for tensor in everything(task) if tensor == name or tensor.startswith(f"{name}.")]
        if not below:
            raise ValueError(f"{option}: {unknown('layer', name, filter(None, layers(task)))}")
        part.update(below)
    return frozenset(part)


def head(task: Task, names: Names | None) -> Part:
    """The head: the layers named, or the last layer that has parameters."""
    return choose(task, names if names is not None else head_layer(task), "head")


def head_layer(task: Task) -> str:
    """The name of the last layer that has parameters, in the order of registration."""
    if not (names := list(layers(task))):
        raise ValueError("the model has no parameters, so it has no head")
    return names[-1]


def linear_head(task: Task) -> tuple[str, nn.Linear]:
    """Name and layer of a head that takes one vector of features per prediction; another kind of head is an error."""
    name = head_layer(task)
    if not isinstance(layer := skeleton(task.model).get_submodule(name), nn.Linear):
        raise TypeError(f"the method needs a linear head; the last layer of this model, {name!r}, is {layer}")
    return name, layer


def extended(task: Task, add: Callable[[nn.Linear], None]) -> Task:
    """The task of a model whose linear head is given something more."""
    return replace(task, model=Extended(task.model, linear_head(task)[0], add))


@dataclass(frozen=True)
class Extended:
    """How to make the model of `extended`."""

    model: Any
    layer: str
    add: Callable[[nn.Linear], None]

    def __call__(self) -> nn.Module:
        model: nn.Module = self.model()
        head = model.get_submodule(self.layer)
        assert isinstance(head, nn.Linear)
        self.add(head)
        return model


def features(model: nn.Module, layer: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """What enters a layer for these inputs, before hooks of the layer itself, and the model's output."""
    entered: list[Tensor] = []
    watched = model.get_submodule(layer)
    hook = watched.register_forward_pre_hook(lambda _, given: entered.append(given[0]), prepend=True)
    try:
        output: Tensor = model(x)
    finally:
        hook.remove()
    (seen,) = entered
    return seen, output


def upper(task: Task) -> Part:
    """The upper part: what follows the convolutions; without convolutions the upper half of the layers.

    >>> from functools import partial; from pfedgate.models import build
    >>> sorted(choose(Task(partial(build, "cnn_digits")), "fc1", "") ^ upper(Task(partial(build, "cnn_digits"))))
    ['out.bias', 'out.weight']
    """
    tensors = layers(task)
    kinds = [skeleton(task.model).get_submodule(layer) for layer in tensors]
    convolutions = [at for at, kind in enumerate(kinds) if isinstance(kind, nn.modules.conv._ConvNd)]
    start = convolutions[-1] + 1 if convolutions else len(kinds) // 2
    while convolutions and start < len(kinds) and isinstance(kinds[start], nn.modules.batchnorm._NormBase):
        start += 1  # the norm of the last convolution
    return frozenset(name for names in list(tensors.values())[start:] for name in names)


def batch_norms(task: Task) -> Part:
    """Weights, biases and running statistics of all BatchNorm layers, found by type, not by name."""
    modules = skeleton(task.model).named_modules()
    norms = {name for name, kind in modules if isinstance(kind, nn.modules.batchnorm._BatchNorm)}
    return frozenset(name for name in everything(task) if name.rpartition(".")[0] in norms)


def parameters(task: Task, part: Part) -> tuple[str, ...]:
    """The parameters of a part, in the model's order: what `fit(names=...)` wants."""
    return tuple(name for name, _ in skeleton(task.model).named_parameters() if name in part)
