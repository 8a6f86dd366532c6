"""Many small clients at once: one vectorised step for all of them instead of one after the other.

Parameters of C clients lie in one C×d matrix and `torch.func.vmap` computes all gradients together. Clients of
different sizes are padded and masked; one that has run out of batches drops out. Each client sees exactly
the batches it would see alone, and its result agrees with the sequential one to about 1e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from pfedgate.core.modules import persistent_buffers, skeleton
from pfedgate.core.seeds import orders
from pfedgate.core.state import flat, pick, shapes, unflat
from pfedgate.core.types import Local, Loss, State, Task
from pfedgate.training.fit import Fit
from pfedgate.training.steppers import Stepper
from pfedgate.training.workspace import flops_per_sample

# Above this a client's own arithmetic outweighs the overhead that stacking saves.
LARGEST = 50_000
# Layers whose stacked form is known to be fast. Convolutions are not: vmap turns them into grouped ones.
FAST = (nn.Linear, nn.LayerNorm, nn.Flatten, nn.Identity, nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU)


def stackable(task: Task) -> bool:
    """Whether clients of this task are trained together: a small model of layers that stack well."""
    return _stackable(task.model)


@lru_cache(maxsize=64)
def _stackable(task_model: Any) -> bool:
    model = skeleton(task_model)
    size = sum(value.numel() for value in model.parameters())
    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    plain = all(isinstance(leaf, FAST) for leaf in leaves) and not persistent_buffers(model)
    return plain and 0 < size <= LARGEST


def group_size(task: Task) -> int:
    """Clients in one group: as many as keep the matrices of a step within some megabytes."""
    size = sum(value.numel() for value in skeleton(task.model).parameters())
    return max(2, min(256, 2_000_000 // max(size, 1)))


def fit_many(
    task: Task,
    states: Sequence[State],
    locals: Sequence[Local],
    *,
    lr: float | None = None,
    epochs: int | None = None,
    anchors: Sequence[State] | None = None,
    prox: float = 0.0,
    stream: str = "batches",
) -> list[Fit]:
    """`local.fit` for several clients at once; the options are those of `fit`."""
    order = sorted(range(len(locals)), key=lambda at: locals[at].n)
    done = _fit_sorted(
        task,
        [states[at] for at in order],
        [locals[at] for at in order],
        lr,
        task.epochs if epochs is None else epochs,
        None if anchors is None or not prox else [anchors[at] for at in order],
        prox,
        task.steps if epochs is None else None,
        stream,
    )
    results: list[Fit | None] = [None] * len(order)
    for at, fit in zip(order, done, strict=True):
        results[at] = fit
    return [fit for fit in results if fit is not None]


def _fit_sorted(
    task: Task,
    states: Sequence[State],
    locals: Sequence[Local],
    lr: float | None,
    epochs: int,
    anchors: Sequence[State] | None,
    prox: float,
    steps: int | None,
    stream: str,
) -> list[Fit]:
    device, model = locals[0].device, skeleton(task.model).to(locals[0].device)
    names = [name for name, _ in model.named_parameters()]
    layout = shapes(dict(model.named_parameters()))
    vectors = _matrix(states, names).to(device)
    pulls = None if anchors is None else _matrix(anchors, names).to(device)
    batches, counts = _batches(task, locals, epochs, steps, stream)
    x = torch.cat([local.train.x for local in locals]).to(device)
    y = torch.cat([local.train.y for local in locals]).to(device)
    gradients = _gradients(task.model, task.loss, tuple(layout))
    stepper = Stepper(task.optim, (task.optim.lr if lr is None else lr) * locals[0].round.factor)
    losses = torch.zeros(len(locals), device=device)
    first = 0
    for at, (rows, mask) in enumerate(batches):
        # Smaller clients come first, so those still training are always the last ones.
        start = int(np.searchsorted(counts, at, side="right"))
        if start > first:
            stepper.drop(start - first)
            first = start
        rows = rows.to(device)
        inputs = locals[0].prepare(x.index_select(0, rows.flatten()))
        inputs = inputs.view(*rows.shape, *inputs.shape[1:])
        active = vectors[first:]
        gradient, loss = gradients(
            active, inputs, y.index_select(0, rows.flatten()).view(*rows.shape, *y.shape[1:]), mask.to(device)
        )
        gradient = gradient.detach()
        stepper.clip(gradient)
        if pulls is not None:
            gradient.add_(active, alpha=prox).add_(pulls[first:], alpha=-prox)
        stepper.step(active, gradient)
        losses[first:] += loss
    return _results(task, vectors, layout, losses, batches, counts, locals, x)


def _matrix(states: Sequence[State], names: Sequence[str]) -> Tensor:
    """One row per client; a State that all share is flattened once."""
    if all(state is states[0] for state in states):
        return flat(pick(states[0], names)).repeat(len(states), 1)
    return torch.stack([flat(pick(state, names)) for state in states])


def _batches(
    task: Task, locals: Sequence[Local], epochs: int, steps: int | None, stream: str
) -> tuple[list[tuple[Tensor, Tensor]], np.ndarray[Any, Any]]:
    """For every step the rows [clients, batch] of those still training and a mask; and steps per client."""
    sizes = np.array([local.n for local in locals])
    keys = [local.key(stream) for local in locals]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    size = task.batch
    whole = np.where((sizes > size) & task.drop_last, sizes - sizes % size, sizes)
    per_epoch = -(-whole // size)
    counts = np.where(sizes > 0, per_epoch * epochs if steps is None else steps, 0)
    every = np.arange(len(sizes))
    made: list[np.ndarray[Any, Any]] = []  # of every epoch: the order of all clients, one per row
    batches = []
    for at in range(int(counts.max(initial=0))):
        active = every[int(np.searchsorted(counts, at, side="right")) :]
        epoch, position = np.divmod(at, per_epoch[active])
        while len(made) <= epoch.max():
            made.append(_padded(orders(keys, sizes.tolist(), len(made)), starts))
        lengths = np.minimum(size, whole[active] - position * size)
        within = np.arange(lengths.max())
        # Padding repeats the client's last row; the mask takes it out of the loss.
        columns = np.minimum((position * size)[:, None] + within, (whole[active] - 1)[:, None])
        rows = np.stack(made)[epoch[:, None], active[:, None], columns]
        mask = (within < lengths[:, None]) / lengths[:, None]
        batches.append((torch.from_numpy(rows), torch.from_numpy(mask.astype(np.float32))))
    return batches, counts


def _padded(orders: Sequence[np.ndarray[Any, Any]], starts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Row numbers in the joint data, one line per client, as long as the longest."""
    table = np.zeros((len(orders), max(len(order) for order in orders)), dtype=np.int64)
    for line, order, start in zip(table, orders, starts, strict=True):
        line[: len(order)] = order + start
    return table


@lru_cache(maxsize=32)
def _gradients(
    task_model: Any, loss: Loss, layout: tuple[tuple[str, torch.Size], ...]
) -> Callable[..., tuple[Tensor, Tensor]]:
    model = skeleton(task_model)

    def objective(vector: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        output = functional_call(model, unflat(vector, layout), (x,))
        return (loss(output, y) * mask).sum()

    stacked: Callable[..., tuple[Tensor, Tensor]] = vmap(grad_and_value(objective))
    return stacked


def _results(
    task: Task,
    vectors: Tensor,
    layout: Sequence[tuple[str, torch.Size]],
    losses: Tensor,
    batches: Sequence[tuple[Tensor, Tensor]],
    counts: np.ndarray[Any, Any],
    locals: Sequence[Local],
    x: Tensor,
) -> list[Fit]:
    """One Fit per client; every State is a set of views of the client's row."""
    columns = []
    at = 0
    for _, shape in layout:
        columns.append(vectors[:, at : at + shape.numel()].view(len(locals), *shape).unbind(0))
        at += shape.numel()
    names = [name for name, _ in layout]
    samples = np.zeros(len(locals), dtype=np.int64)
    for step, (_, mask) in enumerate(batches):
        samples[int(np.searchsorted(counts, step, side="right")) :] += (mask > 0).sum(1).numpy()
    cost = 0.0
    if len(x):
        sample = locals[0].prepare(x[:1])
        cost = flops_per_sample(task.model, None, sample.shape[1:], sample.dtype, True)
    totals = losses.tolist()
    return [
        Fit(
            dict(zip(names, values, strict=True)),
            totals[client] / int(counts[client]) if counts[client] else float("nan"),
            int(counts[client]),
            int(samples[client]),
            int(samples[client]) * cost,
        )
        for client, values in enumerate(zip(*columns, strict=True))
    ]
