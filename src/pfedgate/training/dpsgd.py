"""DP-SGD on a client (Abadi et al. 2016): every sample's gradient is shortened, and noise is added to their sum.

`fit` works so where its task has `private`. Each sample is drawn for itself for each step, with the chance that makes
a batch of the usual size (Poisson sampling), and the sum is divided by that size, not by how many came. So one sample
more or less changes the sum by at most `clip`, and what a client sends tells little of it, to the server, too.

Noise and draws follow from a key that only the client's side has (`Store.secret`), and from all that the update depends
on: what the server sent, settings and data. So a round that is repeated after a crash gives the same update again, as
two with noise of their own could be averaged; and whoever asks for a round in another way gets other noise, as two
with the same could be subtracted. With `secret = false` they follow from the client's seed.

Gradients of single samples come from `torch.func`. Opacus would wrap the module, its optimiser and its loader, which
here are one vector and a few functions; it counts epsilon (`engine.private`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from pfedgate.core.kinds import Loss
from pfedgate.core.modules import skeleton
from pfedgate.core.privacy import normal, uniforms
from pfedgate.core.state import digest
from pfedgate.core.types import Local, Privacy, Task
from pfedgate.training.workspace import Batch, Workspace

CHUNK = 16  # samples whose gradients lie in memory at once


def share_and_steps(task: Task, n: int, *, epochs: int | None = None, steps: int | None = None) -> tuple[float, int]:
    """The chance of each of n samples to be in a step, and the number of steps of a round.

    >>> from functools import partial; from pfedgate.models import build
    >>> share_and_steps(Task(partial(build, "mlp"), batch=32, epochs=2), 100)
    (0.32, 8)
    """
    if epochs is None and steps is None:
        epochs, steps = task.epochs, task.steps
    each = -(-n // task.batch)
    return min(1.0, task.batch / n) if n else 1.0, (epochs or 0) * each if steps is None else steps


@lru_cache(maxsize=32)
def unfit(task_model: Any) -> str | None:
    """Why gradients of single samples of a model are impossible or tell of others; None: they are not."""
    for name, layer in skeleton(task_model).named_modules():
        kind = f"{name or 'the model'} ({type(layer).__name__})"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            return f"{kind} mixes the samples of a batch: use GroupNorm, or a model without it"
        if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
            return f"{kind} keeps running statistics of samples, which get no noise"
        if isinstance(layer, nn.RNNBase):
            return f"{kind} gives no gradients of single samples (torch.func): use another layer"
    return None


class Noisy:
    """The draws and the gradients of one client's training."""

    def __init__(
        self, task: Task, local: Local, epochs: int | None, steps: int | None, stream: str, asked: tuple[object, ...]
    ) -> None:
        assert task.private is not None
        self.privacy: Privacy = task.private
        self.n = n = local.train.n
        self.batch = min(task.batch, n)
        self.share, self.steps = share_and_steps(task, n, epochs=epochs, steps=steps)
        path = f"private/{local.key(stream)}"
        if self.privacy.secret:
            data = digest({"x": local.train.x, "y": local.train.y})
            settings = (local.card, local.round, task.optim, task.batch, self.privacy, self.steps)
            path = f"{path}/{data}/{settings}/{asked}"
        secret = (local.secret or os.urandom(32)) if self.privacy.secret else b""
        self.key = hashlib.blake2b(path.encode(), key=secret, digest_size=32).digest()
        self.step, self.device = 0, local.device

    def draws(self) -> Iterator[Tensor]:
        """Row numbers of every step; there may be none."""
        for step in range(self.steps if self.n else 0):
            drawn = uniforms(self.key, f"draw/{step}", self.n) < self.share
            yield drawn.nonzero()[:, 0].to(self.device)

    def gradient(self, work: Workspace, batch: Batch, loss: Loss) -> Tensor:
        """Put the noised gradient into `work.grad`. The loss is not returned: it would tell of samples exactly."""
        trained = {name: work.parameters[name].detach() for name in work.trained}
        rest = {name: value.detach() for name, value in work.parameters.items() if name not in trained}
        fixed = {**rest, **work.buffers}

        def one(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return loss(functional_call(work.module, {**values, **fixed}, (x[None],)), y[None]).sum()

        each = vmap(grad(one), in_dims=(None, 0, 0), randomness="different")
        total = torch.zeros_like(work.grad)
        for x, y in zip(torch.split(batch.x, CHUNK), torch.split(batch.y, CHUNK), strict=True):
            if len(x):
                slopes = each(trained, x, y)
                rows = torch.cat([slopes[name].reshape(len(x), -1) for name in work.trained], 1)
                lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
                total += rows.t() @ (self.privacy.clip / lengths).clamp_(max=1.0).to(rows)
        if self.privacy.noise > 0:
            noise = normal(self.key, f"noise/{self.step}", total.numel()).to(total)
            total += self.privacy.noise * self.privacy.clip * noise
        work.grad.copy_(total / max(1, self.batch))
        work.gradients += self.batch  # how many came is not told
        self.step += 1
        return total.new_zeros(())
