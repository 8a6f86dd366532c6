"""Many small clients at once: one vectorised step for all of them instead of one after the other.

Parameters of C clients lie in one C×d matrix, and all gradients are computed together: by batched matrix products
(`Beside`), or by `torch.func.vmap` for models that these do not fit. Clients of different sizes are padded and masked;
one that has run out of batches drops out. Each client sees exactly the batches it would see alone, and its result
agrees with the sequential one to about 1e-7.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from pfedgate.core.kinds import Loss
from pfedgate.core.modules import persistent_buffers, skeleton
from pfedgate.core.seeds import orders
from pfedgate.core.state import flat, pick, shapes, unflat
from pfedgate.core.types import Local, State, Task
from pfedgate.training.fit import Fit, half
from pfedgate.training.workspace import Stepper, flops_per_sample

# Above this a client's own arithmetic outweighs the overhead that stacking saves.
LARGEST = 50_000
# Layers whose stacked form is known to be fast. Convolutions are not: vmap turns them into grouped ones.
FAST = (nn.Linear, nn.LayerNorm, nn.Flatten, nn.Identity, nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU)


@lru_cache(maxsize=64)
def stackable(task_model: Any) -> bool:
    """Whether clients with this model are trained together: a small one of layers that stack well."""
    model = skeleton(task_model)
    size = sum(value.numel() for value in model.parameters())
    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    plain = all(isinstance(leaf, FAST) for leaf in leaves) and not persistent_buffers(model)
    return plain and 0 < size <= LARGEST


def group_size(task: Task) -> int:
    """Clients in one group: as many as keep the matrices of a step within some megabytes."""
    size = sum(value.numel() for value in skeleton(task.model).parameters())
    return max(2, min(256, 2_000_000 // max(size, 1)))


def fit_many(task: Task, states: Sequence[State], locals: Sequence[Local]) -> list[Fit]:
    """`fit` for several clients at once; the results come in the order given."""
    # Smaller clients come first, so those still training are always the last ones.
    order = sorted(range(len(locals)), key=lambda at: locals[at].n)
    fits = dict(zip(order, _fit(task, [states[at] for at in order], [locals[at] for at in order]), strict=True))
    return [fits[at] for at in range(len(order))]


def _fit(task: Task, states: Sequence[State], locals: Sequence[Local]) -> list[Fit]:
    device, model, prepare = locals[0].device, skeleton(task.model).to(locals[0].device), locals[0].prepare
    layout = shapes(dict(model.named_parameters()))
    names = [name for name, _ in layout]
    if all(state is states[0] for state in states):  # one row per client; a State that all share is flattened once
        vectors = flat(pick(states[0], names)).repeat(len(states), 1).to(device)
    else:
        vectors = torch.stack([flat(pick(state, names)) for state in states]).to(device)
    batches, counts = _batches(task, locals)
    parts = [local.train for local in locals]
    # Our own parts are read at once. Others have `x` and `y` alone.
    read = getattr(type(parts[0]), "together", lambda parts: None)(parts)
    x, y = read or (torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
    x, y = x.to(device), y.to(device)
    gradients = _gradients(task.model, task.loss, tuple(layout))
    stepper = Stepper(task.optim, task.optim.lr * locals[0].round.factor, keeps=True)
    losses = torch.zeros(len(locals), device=device)
    samples = np.zeros(len(locals), dtype=np.int64)
    first = 0
    for at, (rows, mask) in enumerate(batches):
        start = int(np.searchsorted(counts, at, side="right"))
        if start > first:
            stepper.drop(start - first)
            first = start
        inputs, labels = (part.index_select(0, rows.to(device).flatten()) for part in (x, y))
        inputs = prepare(inputs)
        inputs, labels = (part.view(*rows.shape, *part.shape[1:]) for part in (inputs, labels))
        active = vectors[first:]
        with half(task, device):
            gradient, loss = gradients(active, inputs, labels, mask.to(device))
        gradient = gradient.detach()
        stepper.clip(gradient)
        stepper.step(active, gradient)
        losses[first:] += loss
        samples[first:] += (mask > 0).sum(1).numpy()
    cost = 0.0
    if len(x):
        sample = prepare(x[:1])
        cost = flops_per_sample(task.model, None, sample.shape[1:], sample.dtype, True)
    pieces = zip(torch.split(vectors, [shape.numel() for _, shape in layout], dim=1), layout, strict=True)
    # Views of all clients at once: cut client by client they would cost a sixth of a round.
    columns = [piece.view(len(locals), *shape).unbind(0) for piece, (_, shape) in pieces]
    return [
        Fit(
            dict(zip(names, values, strict=True)), total / steps if steps else float("nan"), steps, seen, seen * cost,
            vector=vector,
        )
        for values, total, steps, seen, vector in zip(
            zip(*columns, strict=True), losses.tolist(), counts.tolist(), samples.tolist(), vectors.unbind(0),
            strict=True,
        )
    ]  # fmt: skip


def _batches(task: Task, locals: Sequence[Local]) -> tuple[list[tuple[Tensor, Tensor]], np.ndarray[Any, Any]]:
    """For every step the rows [clients, batch] of those still training and a mask; and steps per client."""
    sizes = np.array([local.n for local in locals])
    keys = [local.key("batches") for local in locals]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    size = task.batch
    whole = np.where((sizes > size) & task.drop_last, sizes - sizes % size, sizes)
    per_epoch = -(-whole // size)
    counts = np.where(sizes > 0, per_epoch * task.epochs if task.steps is None else task.steps, 0)
    every = np.arange(len(sizes))
    epochs: list[np.ndarray[Any, Any]] = []  # for every epoch the order of all clients' samples, one per row
    batches = []
    for at in range(int(counts.max(initial=0))):
        active = every[int(np.searchsorted(counts, at, side="right")) :]
        epoch, position = np.divmod(at, per_epoch[active])
        while len(epochs) <= epoch.max():
            table = np.zeros((len(sizes), sizes.max()), dtype=np.int64)  # row numbers in the joint data
            ordered = orders(keys, sizes.tolist(), len(epochs))
            if sizes.min() == sizes.max():
                table = np.stack(ordered) + starts[:, None]
            else:
                for line, order, start in zip(table, ordered, starts, strict=True):
                    line[: len(order)] = order + start
            epochs.append(table)
        lengths = np.minimum(size, whole[active] - position * size)
        within = np.arange(lengths.max())
        # Padding repeats the client's last row; the mask takes it out of the loss.
        columns = np.minimum((position * size)[:, None] + within, (whole[active] - 1)[:, None])
        rows = np.stack(epochs)[epoch[:, None], active[:, None], columns]
        mask = (within < lengths[:, None]) / lengths[:, None]
        batches.append((torch.from_numpy(rows), torch.from_numpy(mask.astype(np.float32))))
    return batches, counts


@lru_cache(maxsize=32)
def _gradients(
    task_model: Any, loss: Loss, layout: tuple[tuple[str, torch.Size], ...]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """All clients' gradients and losses: side by side where the model allows it, by vmap where it does not."""
    model = skeleton(task_model)

    def objective(vector: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        output = functional_call(model, unflat(vector, layout), (x,))
        return (loss(output, y) * mask).sum()

    mapped: Callable[..., tuple[Tensor, Tensor]] = vmap(grad_and_value(objective))
    beside = Beside.of(model, loss, layout)
    trusted: bool | None = None if beside else False  # nobody knows before the first batch

    def gradients(vectors: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal trusted
        if trusted is None:
            assert beside is not None
            try:
                pairs = zip(beside(vectors, x, y, mask), mapped(vectors, x, y, mask), strict=True)
                trusted = all(bool((a - b).norm() <= 1e-3 * b.norm() + 1e-6) for a, b in pairs)
            except (RuntimeError, IndexError, ValueError):  # a forward pass that counts on the shape of one client
                trusted = False
        return beside(vectors, x, y, mask) if trusted and beside else mapped(vectors, x, y, mask)

    return gradients


class Beside:
    """A network whose layers hold the parameters of C clients; its batch is theirs, one after the other.

    vmap takes twice as long. But here the samples of all clients run through the network together, so nothing but
    layers may hold parameters, and no sample may see another: `_gradients` compares the first batch with vmap. Layers
    write their gradients where they belong in the C×d matrix, which saves copying them there.
    """

    def __init__(self, model: nn.Module, loss: Loss, layout: tuple[tuple[str, torch.Size], ...]) -> None:
        self.model, self.loss, self.layout = copy.deepcopy(model), loss, layout
        self.values: State = {}
        self.gradients: State = {}
        self.written: set[str] = set()
        self.start = torch.zeros((), requires_grad=True)  # autograd asks no layer for gradients without one
        names = {id(value): name for name, value in self.model.named_parameters()}
        for leaf in self.model.modules():
            own = {name: names[id(value)] for name, value in leaf.named_parameters(recurse=False)}
            if own:
                leaf.forward = partial(self._layer, leaf, own)

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, layout: tuple[tuple[str, torch.Size], ...]) -> Beside | None:
        """The network side by side; None if something but a layer that is known holds parameters."""
        owners = {type(leaf) for leaf in model.modules() if any(True for _ in leaf.parameters(recurse=False))}
        return cls(model, loss, layout) if owners <= {nn.Linear, nn.LayerNorm} else None

    def __call__(self, vectors: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient and the loss of every client."""
        matrix = torch.empty_like(vectors)
        self.values, self.gradients = self._pieces(vectors.detach()), self._pieces(matrix)
        self.written.clear()
        output = self.model(x.flatten(0, 1))
        losses = (self.loss(output, y.flatten(0, 1)).view_as(mask) * mask).sum(1)
        torch.autograd.grad(losses.sum(), self.start, allow_unused=True)
        for name in self.gradients.keys() - self.written:
            self.gradients[name].zero_()
        self.values, self.gradients = {}, {}
        return matrix, losses.detach()

    def _pieces(self, matrix: Tensor) -> State:
        pieces = torch.split(matrix, [shape.numel() for _, shape in self.layout], dim=1)
        named = zip(pieces, self.layout, strict=True)
        return {name: piece.view(len(matrix), *shape) for piece, (name, shape) in named}

    def _layer(self, layer: nn.Module, own: dict[str, str], x: Tensor) -> Tensor:
        """A layer's forward pass with the weight and the bias of every client."""
        entry = x.shape[-1:]
        if isinstance(layer, nn.LayerNorm):
            entry = torch.Size(layer.normalized_shape)
            x = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        rows = x.reshape(len(self.values[own["weight"]]), -1, *entry)
        out: Tensor = _Layer.apply(rows, self, own, self.start)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[: x.ndim - len(entry)], *out.shape[2:])

    def put(self, name: str, write: Callable[..., Any], *given: Any) -> None:
        """Let an operation write a gradient, or add it to that of an earlier use of the same parameter."""
        if name in self.written:
            self.gradients[name] += write(*given)
        else:
            write(*given, out=self.gradients[name])
            self.written.add(name)


class _Layer(torch.autograd.Function):
    """x·W + b of every client (x·w + b, entry by entry, after a norm); backward writes what is W's and b's itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Beside, own: dict[str, str], start: Tensor) -> Tensor:
        weight, bias = beside.values[own["weight"]], beside.values[own["bias"]].unsqueeze(1) if "bias" in own else None
        ctx.save_for_backward(x, weight)
        ctx.beside, ctx.own, ctx.matrix = beside, own, weight.ndim == 3 and x.ndim == 3
        if not ctx.matrix:
            return x * weight.unsqueeze(1) if bias is None else torch.addcmul(bias, x, weight.unsqueeze(1))
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias, x, weight.mT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.matrix:
            ctx.beside.put(ctx.own["weight"], torch.bmm, gradient.mT, x)
        else:
            ctx.beside.put(ctx.own["weight"], torch.sum, gradient * x, 1)
        if "bias" in ctx.own:
            ctx.beside.put(ctx.own["bias"], torch.sum, gradient, 1)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return (torch.bmm(gradient, weight) if ctx.matrix else gradient * weight.unsqueeze(1)), None, None, None
