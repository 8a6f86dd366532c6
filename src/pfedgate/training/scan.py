"""What a model says about every sample of a part, in their order: for methods that look before they train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from pfedgate.core.types import Local, Part, Task
from pfedgate.training.fit import Batch, loop
from pfedgate.training.workspace import flops_per_sample


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
    found: list[tuple[Tensor, Tensor]] = []
    model.eval()

    @torch.no_grad()
    def step(batch: Batch) -> Tensor:
        found.append((batch.rows, look(model(batch.x), batch.y)))
        return batch.x.new_zeros(())

    loop(replace(task, drop_last=False), local, step, part=part, batch=task.eval_batch, epochs=1, stream="scan")
    if not found:
        raise ValueError(f"client {local.card.id!r} has no samples to look at")
    first = found[0][1]
    seen = torch.empty((part.n, *first.shape[1:]), dtype=first.dtype, device=first.device)
    for rows, values in found:
        seen[rows] = values
    return seen


def forward_flops(task: Task, part: Part, local: Local) -> float:
    """Floating-point operations of one forward pass over a part."""
    if not part.n:
        return 0.0
    one = local.prepare(part.x[:1])
    return part.n * flops_per_sample(task.model, None, one.shape[1:], one.dtype, False)
