"""The module of a task: built, begun from a seed, filled with a State."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from pfedgate.core.seeds import seeded
from pfedgate.core.state import flat, pick, unflat
from pfedgate.core.types import State, Task

_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


def initial(task: Task, seed: int, *path: str | int) -> State:
    """The model's initial State: the same for every client, process and algorithm with this seed.

    More `path` gives other initialisations (FedEM's components: `initial(task, seed, m)` for m > 0).
    """
    with seeded(seed, "init", *path):
        model = task.model()
    if task.initial_scale != 1:
        _scale_hidden(model, task.initial_scale)
    state = {name: value.detach() for name, value in model.named_parameters()}
    whole = unflat(flat(state).clone(), [(n, v.shape) for n, v in state.items()]) if state else {}
    return {**whole, **{name: value.clone() for name, value in persistent_buffers(model).items()}}


@torch.no_grad()
def _scale_hidden(model: nn.Module, scale: float) -> None:
    """Multiply weights and biases of all layers but the last: torch draws them too small for ReLU.

    A norm would undo it, and without ReLU there is nothing to make up for: such networks stay as they are.
    """
    norms = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
    if any(isinstance(layer, norms) for layer in model.modules()):
        return
    if any(isinstance(layer, nn.ReLU) for layer in model.modules()):
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)]
        for value in (value for layer in layers[:-1] for value in layer.parameters(recurse=False)):
            value.mul_(scale)


def module(task: Task, state: State, device: torch.device | None = None) -> nn.Module:
    """A module of its own with these values, in evaluation mode: what `predictor` returns."""
    model = copy.deepcopy(skeleton(task.model))
    if device is not None:
        model = model.to(device)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *persistent_buffers(model).items()]:
            value.copy_(pick(state, [name])[name])
    return model.eval()


@lru_cache(maxsize=32)
def skeleton(task_model: Any) -> nn.Module:
    """A module to copy or to call functionally; its own weights mean nothing."""
    return fresh(task_model)


def fresh(task_model: Any) -> nn.Module:
    """A newly built module, its own to change; max-pooling stands before ReLU where that gives the same numbers."""
    with seeded(0, "skeleton"):
        model: nn.Module = task_model()
    for inner in model.modules():
        if type(inner) is nn.Sequential:
            _pool_first(inner)
    return model


def _pool_first(layers: nn.Sequential) -> None:
    """Max-pool before a ReLU instead of after it: the same numbers and gradients (see gating.order) in less time."""
    named = list(layers._modules.items())  # not named_children(), which names a layer that stands twice only once
    for i in range(len(named) - 1):
        relu, pool = named[i][1], named[i + 1][1]
        if type(relu) is nn.ReLU and isinstance(pool, _MAX_POOLS) and not pool.return_indices:
            named[i], named[i + 1] = named[i + 1], named[i]
    layers._modules = dict(named)


def persistent_buffers(module: nn.Module) -> State:
    """The buffers that belong to a module's state (not those it recomputes)."""
    persistent = module.state_dict(keep_vars=True)
    return {name: value for name, value in module.named_buffers() if name in persistent}


@lru_cache(maxsize=64)
def smallest_batch(task_model: Any) -> int:
    """Two samples for a model with BatchNorm: the variance of one is nothing to divide by."""
    return 2 if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in skeleton(task_model).modules()) else 1
