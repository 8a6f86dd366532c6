"""Models of which a part is private: choosing tensors by name, and what methods with such a split have in common.

A part is a set of names of a State. In a client's private State its part lies under `own/`; what is shared lies in
the server's State under its plain names. So a client's whole model is `join(got, private)`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from pfedgate.core.errors import unknown
from pfedgate.core.modules import initial, persistent_buffers, skeleton
from pfedgate.core.seeds import seeded
from pfedgate.core.state import clone, inside, split, under
from pfedgate.core.types import Local, State, Task, Update
from pfedgate.training.fit import fit
from pfedgate.training.workspace import Workspace

OWN = "own/"
Part = frozenset[str]  # names of tensors
Names = str | Sequence[str]  # a layer, a module above layers, or a tensor; or several


def layers(task: Task) -> dict[str, tuple[str, ...]]:
    """Every layer that has parameters, in the order of registration, and its tensors (buffers included).

    >>> from functools import partial; from pfedgate.models import build
    >>> layers(Task(partial(build, "mlp")))
    {'fc1': ('fc1.weight', 'fc1.bias'), 'out': ('out.weight', 'out.bias')}
    """
    return _layers(task.model)


@lru_cache(maxsize=64)
def _layers(task_model: Any) -> dict[str, tuple[str, ...]]:
    model = skeleton(task_model)
    found: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        found.setdefault(name.rpartition(".")[0], []).append(name)
    for name in persistent_buffers(model):
        if (layer := name.rpartition(".")[0]) in found:
            found[layer].append(name)
    return {layer: tuple(names) for layer, names in found.items()}


def choose(task: Task, names: Names, option: str) -> Part:
    """The tensors that the names stand for: a layer's, those below a module, or single ones.

    >>> from functools import partial; from pfedgate.models import build
    >>> sorted(choose(Task(partial(build, "mlp")), ["out"], "head"))
    ['out.bias', 'out.weight']
    >>> choose(Task(partial(build, "mlp")), "uot", "head")
    Traceback (most recent call last):
    ValueError: head: unknown layer 'uot': did you mean 'out'? Known: fc1, out
    """
    return _choose(task.model, (names,) if isinstance(names, str) else tuple(names), option)


@lru_cache(maxsize=256)
def _choose(task_model: Any, names: tuple[str, ...], option: str) -> Part:
    known = _everything(task_model)
    chosen: set[str] = set()
    for name in names:
        below = [tensor for tensor in known if tensor == name or tensor.startswith(f"{name}.")]
        if not below:
            raise ValueError(f"{option}: {unknown('layer', name, filter(None, _layers(task_model)))}")
        chosen.update(below)
    return frozenset(chosen)


def head(task: Task, names: Names | None, option: str = "head") -> Part:
    """The head: the layers named, or the last layer that has parameters."""
    return choose(task, names if names is not None else head_layer(task), option)


def head_layer(task: Task) -> str:
    """The name of the last layer that has parameters, in the order of registration."""
    found = list(layers(task))
    if not found:
        raise ValueError("the model has no parameters, so it has no head")
    return found[-1]


def upper(task: Task) -> Part:
    """The upper part: what follows the convolutions; without convolutions the upper half of the layers.

    >>> from functools import partial; from pfedgate.models import build
    >>> sorted(choose(Task(partial(build, "cnn_digits")), "fc1", "") ^ upper(Task(partial(build, "cnn_digits"))))
    ['out.bias', 'out.weight']
    """
    model, found = skeleton(task.model), list(layers(task))
    kinds = [model.get_submodule(layer) for layer in found]
    convolutions = [at for at, kind in enumerate(kinds) if isinstance(kind, nn.modules.conv._ConvNd)]
    start = convolutions[-1] + 1 if convolutions else len(found) // 2
    while convolutions and start < len(found) and isinstance(kinds[start], nn.modules.batchnorm._NormBase):
        start += 1  # the norm of the last convolution
    return frozenset(name for layer in found[start:] for name in layers(task)[layer])


def everything(task: Task) -> Part:
    """All parameters and buffers of the model."""
    return _everything(task.model)


@lru_cache(maxsize=64)
def _everything(task_model: Any) -> Part:
    model = skeleton(task_model)
    return frozenset([name for name, _ in model.named_parameters()]) | frozenset(persistent_buffers(model))


def batch_norms(task: Task) -> Part:
    """Weights, biases and running statistics of all BatchNorm layers, found by type, not by name."""
    kinds = skeleton(task.model).named_modules()
    found = {name for name, kind in kinds if isinstance(kind, nn.modules.batchnorm._BatchNorm)}
    return frozenset(name for name in everything(task) if name.rpartition(".")[0] in found)


def parameters(task: Task, part: Part) -> tuple[str, ...]:
    """The parameters of a part, in the model's order: what `fit(names=...)` wants."""
    return tuple(name for name, _ in skeleton(task.model).named_parameters() if name in part)


def rest(task: Task, part: Part) -> tuple[str, ...]:
    """The parameters outside a part, in the model's order."""
    return tuple(name for name, _ in skeleton(task.model).named_parameters() if name not in part)


def init_shared(task: Task, own: Part, seed: int) -> State:
    """The initial model without the private part: the server never holds that."""
    return split(initial(task, seed), own.__contains__)[1]


def init_own(task: Task, own: Part, seed: int) -> State:
    """The private part of the same initial model, for every client alike."""
    return under(OWN, split(initial(task, seed), own.__contains__)[0])


def join(got: State, private: State) -> State:
    """A client's whole model."""
    return {**got, **inside(OWN, private)}


def train_jointly(task: Task, own: Part, got: State, private: State, local: Local) -> tuple[Update, State]:
    """Local epochs on the whole model; the private part stays, the rest is sent."""
    done = fit(task, join(got, private), local)
    kept, shared = split(done.state, own.__contains__)
    return Update(shared, local.n, done.metrics), under(OWN, kept)


def adapt_own(
    task: Task, own: Part, got: State, private: State, local: Local, epochs: int, lr: float | None = None
) -> State:
    """A novel client's private part, trained on top of the shared one, which stands still.

    Training both would pull the private part towards a shared part that the client does not keep.
    """
    names = parameters(task, own)
    if not names:
        return private
    done = fit(task, join(got, private), local, names=names, epochs=epochs, lr=lr)
    return under(OWN, split(done.state, own.__contains__)[0])


@lru_cache(maxsize=8)
def twin(task_model: Any, device: torch.device) -> Workspace:
    """A second workspace beside the one `fit` uses, for methods that train two models in one loop."""
    return Workspace(copy.deepcopy(skeleton(task_model)), None, device)


@contextmanager
def aside(work: Workspace, local: Local, purpose: str, count: int) -> Iterator[None]:
    """Passes beside the main one: it notices them neither in its buffers nor in its random numbers (dropout)."""
    buffers = clone(work.buffers)
    with seeded(local.round.seed, "dropout", purpose, local.round.index, local.card.id, count):
        yield
    for name, value in buffers.items():
        work.buffers[name].copy_(value)
