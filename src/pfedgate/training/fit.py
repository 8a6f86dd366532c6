"""A client's work: the only batch loops of the library, with `stacked`.

    done = fit(task, state, local)           train a copy of `state`; done.state, done.loss, done.flops
    loop(task, local, step)                  the bare loop, for a method with its own modules and optimisers
    evaluate(task, module, part, ...)        loss and metrics
    scan(task, module, part, local, look)    an answer for every sample, for methods that look before they train

Nothing in the loop reads a number back from the device; losses are summed there and read once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pfedgate.core.modules import skeleton, smallest_batch
from pfedgate.core.seeds import orders, seeded
from pfedgate.core.state import digest
from pfedgate.core.types import Local, Objective, Part, State, Task
from pfedgate.training.dpsgd import Noisy
from pfedgate.training.workspace import Batch, Stepper, Workspace, flops_per_sample, workspace

__all__ = ["Batch", "Fit", "Score", "Workspace", "evaluate", "fit", "loop", "workspace"]


@dataclass(frozen=True)
class Fit:
    """The trained State, and how much work it took."""

    state: State
    loss: float  # mean over batches, each taken before its step
    steps: int
    samples: int  # samples that went forward and backward, repetitions counted
    flops: float
    hidden: bool = False  # the loss tells of samples, so it was not looked at
    vector: Tensor | None = None  # the State as one vector, of clients that were trained side by side

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers an Update usually carries; the loss is missing where nobody may know it."""
        return {"flops": self.flops} | ({} if self.hidden else {"loss": self.loss})


@dataclass(frozen=True)
class Score:
    """How good a module is on some samples."""

    n: int
    loss: float
    score: float  # the task's main metric
    more: tuple[float, ...] = ()  # its other metrics, in their order

    @property
    def accuracy(self) -> float:
        """The score under the name it has in classification."""
        return self.score


def half(task: Task, device: torch.device) -> AbstractContextManager[object]:
    """The context of mixed precision, where the task wants it and the device has it."""
    return torch.autocast("cuda", torch.bfloat16) if task.amp and device.type == "cuda" else nullcontext()


def loop(
    task: Task,
    local: Local,
    step: Callable[[Batch], Tensor],
    *,
    part: Part | None = None,
    batch: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    stream: str = "batches",
    draws: Iterator[Tensor] | None = None,
) -> tuple[float, int]:
    """Call `step` on every batch; return (mean of the returned losses, number of batches).

    Batches are those every algorithm sees: their order comes from the stream named `stream` of this client
    and round. Torch's global generator (dropout) is seeded from the same path, so that two branches of a
    method do not disturb each other. Models with BatchNorm skip a batch of a single sample, which has no variance.
    `draws` are the rows of each batch, for whoever draws them in another way.
    """
    if epochs is None and steps is None:
        epochs, steps = (task.epochs, task.steps)
    part = local.train if part is None else part
    total: Tensor | None = None
    count = 0
    # The raw samples move to the device once (bytes, not floats); batches are gathered and prepared there.
    x, y = part.x.to(local.device), part.y.to(local.device)
    with seeded(local.round.seed, "dropout", stream, local.round.index, local.card.id):
        for rows in _rows(part.n, batch or task.batch, task, local, stream, epochs, steps) if draws is None else draws:
            with half(task, local.device):
                loss = step(Batch(local.prepare(x.index_select(0, rows)), y.index_select(0, rows), rows))
            total = loss if total is None else total + loss
            count += 1
    return (float(total) / count if total is not None else float("nan")), count


def read(part: Part, rows: Tensor, local: Local) -> Batch:
    """These rows of a part, prepared for the model, on the client's device."""
    x, y = part.x.index_select(0, rows.cpu()), part.y.index_select(0, rows.cpu())
    return Batch(local.prepare(x.to(local.device)), y.to(local.device), rows.to(local.device))


def _rows(
    n: int, batch: int, task: Task, local: Local, stream: str, epochs: int | None, steps: int | None
) -> Iterator[Tensor]:
    """Row numbers of every batch. `steps` counts batches over as many epochs as it takes."""
    if n == 0:
        return
    # A client smaller than a batch keeps its only batch, or it would never train.
    whole = n - n % batch if task.drop_last and n > batch else n
    if 0 < whole % batch < smallest_batch(task.model):
        whole -= whole % batch
    if whole == 0:
        return
    key, each = local.key(stream), -(-whole // batch)
    count = each * (epochs or 0) if steps is None else steps
    for epoch in range(-(-count // each)):
        order = torch.from_numpy(orders([key], [n], epoch)[0]).to(local.device)
        yield from torch.split(order[:whole], batch)[: count - each * epoch]


def fit(
    task: Task,
    state: State,
    local: Local,
    *,
    names: tuple[str, ...] | None = None,
    lr: float | None = None,
    own: tuple[str, ...] = (),
    own_lr: float | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    anchor: State | None = None,
    prox: float = 0.0,
    weights: Tensor | None = None,
    objective: Objective | None = None,
    gradient: Callable[[Workspace, Batch], None] | None = None,
    step: Callable[[Workspace, Batch], Tensor] | None = None,
    part: Part | None = None,
    stream: str = "batches",
) -> Fit:
    """Train a copy of `state` on the client's data; `state` itself is not touched.

    names      train only these parameters (default: all); the rest is frozen altogether
    lr         base rate instead of task.optim.lr; the schedule's factor of this round is applied either way
    own        parameters with an optimiser of their own, which clips them apart and has the base rate `own_lr`
    epochs, steps, batch, part, stream   see `loop`
    anchor, prox   add prox·(w − anchor) to the gradient, after clipping, so that prox keeps its meaning
    weights    one weight per sample of the part; the weighted losses are divided by the batch size
    objective  (module, batch) -> scalar, instead of the mean of task.loss
    gradient   called after the gradient was computed and clipped; may change `work.grad`
    step       (work, batch) -> loss: replaces the whole step (gradient, clipping, update)
    """
    if own:  # they come last, so that each optimiser has one piece of the vector
        every = [name for name, _ in skeleton(task.model).named_parameters()] if names is None else names
        names = (*(name for name in every if name not in own), *own)
    work = workspace(task.model, names, local.device)
    work.load(state)
    rates = [task.optim.lr if rate is None else rate for rate in (lr, own_lr)]
    stepper, apart = (Stepper(task.optim, rate * local.round.factor) for rate in rates)
    size = sum(shape.numel() for name, shape in work.shapes if name not in own)
    branches = [(stepper, slice(size)), (apart, slice(size, None))] if own else [(stepper, slice(None))]
    pull = work.vector(anchor) if anchor is not None and prox else None
    sample: list[Tensor] = []
    noisy = None
    if task.private is not None:
        if objective is not None or gradient is not None or step is not None or weights is not None or batch:
            raise ValueError("privacy.level='sample' knows the task's own loss only: this method has another")
        asked = (digest(state), rates, prox, names, stream)
        noisy = Noisy(task, local if part is None else replace(local, train=part), epochs, steps, stream, asked)

    def one(data: Batch) -> Tensor:
        if not sample:
            sample.append(data.x)
        if step is not None:
            return step(work, data)
        if noisy is not None:
            loss = noisy.gradient(work, data, task.loss)
        else:
            loss = work.gradient(data, task.loss, weights=weights, objective=objective)
        for branch, piece in branches:
            branch.clip(work.grad[piece])
        if pull is not None:
            work.grad.add_(work.flat, alpha=prox).add_(pull, alpha=-prox)
        if gradient is not None:
            gradient(work, data)
        for branch, piece in branches:
            branch.step(work.flat[piece], work.grad[piece])
        return loss

    draws = None if noisy is None else noisy.draws()
    loss, count = loop(task, local, one, part=part, batch=batch, epochs=epochs, steps=steps, stream=stream, draws=draws)
    samples = work.gradients
    flops = samples * flops_per_sample(task.model, names, sample[0].shape[1:], sample[0].dtype, True) if sample else 0.0
    return Fit(work.state(), loss, count, samples, flops, hidden=noisy is not None)


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, part: Part, local: Local) -> Score:
    """Loss and metrics of a module on a part. Changes nothing: evaluation mode, no generator read."""
    if part.n == 0:
        return Score(0, float("nan"), float("nan"), (float("nan"),) * (len(task.metrics) - 1))
    model.eval()
    x, y = part.x.to(local.device), part.y.to(local.device)
    losses: list[Tensor] = []
    sums: list[list[Tensor]] = [[] for _ in task.metrics]
    for inputs, labels in zip(*(torch.split(values, task.eval_batch) for values in (x, y)), strict=True):
        with half(task, local.device):
            output = model(local.prepare(inputs))
        output = output.float() if task.amp else output
        losses.append(task.loss(output, labels).sum())
        for metric, own in zip(task.metrics, sums, strict=True):
            own.append(metric.sums(output, labels))
    values = [m.value(torch.stack(own).sum(0), part.n) for m, own in zip(task.metrics, sums, strict=True)]
    return Score(part.n, float(torch.stack(losses).sum()) / part.n, values[0], tuple(values[1:]))


def scan(
    task: Task,
    model: nn.Module,
    part: Part,
    local: Local,
    look: Callable[[Tensor, Tensor], Tensor] = lambda output, y: output,
) -> Tensor:
    """`look(output, labels)` of all samples, in the order of the part: evaluation mode, no gradient.

    No sample is left out, whatever `task.drop_last` says.
    """
    answers: list[tuple[Tensor, Tensor]] = []
    model.eval()

    @torch.no_grad()
    def step(batch: Batch) -> Tensor:
        answers.append((batch.rows, look(model(batch.x), batch.y)))
        return batch.x.new_zeros(())

    loop(replace(task, drop_last=False), local, step, part=part, batch=task.eval_batch, epochs=1, stream="scan")
    if not answers:
        raise ValueError(f"client {local.card.id!r} has no samples to look at")
    first = answers[0][1]
    ordered = torch.empty((part.n, *first.shape[1:]), dtype=first.dtype, device=first.device)
    for rows, values in answers:
        ordered[rows] = values
    return ordered


def forward_flops(task: Task, part: Part, local: Local) -> float:
    """Floating-point operations of one forward pass over a part."""
    if not part.n:
        return 0.0
    one = local.prepare(part.x[:1])
    return part.n * flops_per_sample(task.model, None, one.shape[1:], one.dtype, False)
