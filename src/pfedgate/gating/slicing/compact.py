"""`compact(gated, data)`: one fixed selection of a gated model as a small plain module, for other runtimes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from pfedgate.gating.gate.network import GateOutput
from pfedgate.gating.model import GatedModel, Selection
from pfedgate.gating.slicing.execute import Program, Sliced, cut
from pfedgate.gating.slicing.graphs import mode, quiet
from pfedgate.gating.slicing.record import CannotCompact, Recorder

_EXAMPLE = 8  # samples that a pass is recorded on


def compact(model: nn.Module, data: Tensor | Iterable[Tensor] | Selection | None = None) -> fx.GraphModule:
    """A plain module without a gate: the live parts of a gated model under one selection, as smaller torch layers.

    `model` is a gated model or a client's predictor. `data` says what the gate decides on, once and for all: a batch,
    the batches of a client (M and G are averaged over them), a selection such as `gated.last`, or nothing for a gate
    with scope "client", which remembers its client. Give training data, not the data to predict.

    What comes back is in evaluation mode, keeps the names of your own module's parameters, and holds no code of this
    library: it can be trained on, saved, and given to `torch.export` or ONNX. A place that cannot be written down is
    an error (`CannotCompact`) that names it.

    >>> import pfedgate, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    >>> x = torch.randn(8, 64)
    >>> gated = pfedgate.gate(model, x, budget=0.3).eval()
    >>> small = pfedgate.compact(gated, x)
    >>> type(small.get_submodule("0")), sum(p.numel() for p in small.parameters()) <= 0.3 * 7510
    (<class 'torch.nn.modules.linear.Linear'>, True)
    >>> torch.allclose(small(x), gated(x), atol=1e-5)
    True
    """
    gated = getattr(model, "gated", model)
    if not isinstance(gated, GatedModel):
        raise TypeError(f"compact() takes a gated model (pfedgate.gate) or a client's, got {type(model).__name__}")
    if not gated.plan.sliceable:
        raise CannotCompact(f"there is no smaller module of this model: {gated.explain()}. Use split='unit'")
    device = next(gated.model.parameters()).device
    with torch.inference_mode(False), torch.no_grad(), quiet(device), mode(gated, training=False):
        selection, example = _selection(gated, data)
        program = Program(gated.model, gated.plan, gated.compensate)
        found = Recorder(program, selection.live, selection.adapted).record(example, selection.shift)
        _check(found, program, selection, example)
    return found


def _selection(gated: GatedModel, data: Tensor | Iterable[Tensor] | Selection | None) -> tuple[Selection, Tensor]:
    """The one selection, and a batch to record a pass on."""
    if isinstance(data, Selection):
        return data, _noise(gated)
    if data is None:
        if (scope := gated.gate.config.scope) != "client":
            raise ValueError(f"this gate decides for each {scope}: give a batch, the client's batches, or a selection")
        return gated.choose(gated.gate.decide(gated.gate.remembered())), _noise(gated)
    said: list[tuple[GateOutput, int]] = []
    example: Tensor | None = None
    for batch in [data] if isinstance(data, Tensor) else data:
        example = batch[:_EXAMPLE] if example is None else example
        said.append((gated.gate(batch), len(batch)))
    if example is None:
        raise ValueError("no batches: give at least one")
    return gated.choose(_mean(said)), example


def _mean(said: list[tuple[GateOutput, int]]) -> GateOutput:
    """What a gate said of several batches, each counted by its samples."""
    total = sum(n for _, n in said)

    def mean(values: Iterable[Tensor]) -> Tensor:
        return torch.stack([value * (n / total) for value, (_, n) in zip(values, said, strict=True)]).sum(0)

    shifts = [out.shift for out, _ in said if out.shift is not None]
    return GateOutput(
        mean(out.weights for out, _ in said), mean(out.importance for out, _ in said), mean(shifts) if shifts else None
    )


def _noise(gated: GatedModel) -> Tensor:
    """A batch like the one the model was planned with."""
    recipe, device = gated.plan.recipe, next(gated.model.parameters()).device
    dtype = recipe.dtype_for(gated.model)
    if dtype.is_floating_point:
        return torch.randn(recipe.shape, dtype=dtype, device=device)[:_EXAMPLE]
    return torch.zeros(recipe.shape, dtype=dtype, device=device)[:_EXAMPLE]


def _check(found: nn.Module, program: Program, selection: Selection, example: Tensor) -> None:
    """The module gives what the gated model gives: else it must not leave this place."""
    live = selection.live
    wanted: Any = Sliced(program, live, selection.adapted, lambda name, p: cut(p, name, live))(example.clone())
    wanted = wanted if selection.shift is None else wanted + selection.shift
    for a, b in zip(tree_leaves(found(example.clone())), tree_leaves(wanted), strict=True):
        if isinstance(b, Tensor) and not _close(a, b):
            raise CannotCompact(
                "the compact module gives another result than the gated model: please report this model as a bug"
            )


def _close(a: Tensor, b: Tensor) -> bool:
    if not b.is_floating_point() or not bool(b.isfinite().all()):
        return torch.allclose(a, b, equal_nan=True)
    return bool((a - b).norm() <= torch.finfo(b.dtype).eps ** 0.5 * b.norm())


__all__ = ["CannotCompact", "compact"]
