"""Masks over frozen weights: bits on the wire, structures (filters, neurons) to keep or drop, scores that learn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.core.modules import module, skeleton
from pfedgate.core.state import flat, pick, shapes, unflat
from pfedgate.core.types import Local, State, Task
from pfedgate.training.fit import Batch, Fit, fit
from pfedgate.training.workspace import Stepper, Workspace

BITS, KEPT = "mask/bits", "mask/structures"  # a mask as it travels, packed


def pack_bits(values: Tensor) -> Tensor:
    """Truth values as bytes, eight in each.

    >>> pack_bits(torch.tensor([True] * 8 + [False, True])).tolist()
    [255, 64]
    """
    return torch.from_numpy(np.packbits(values.cpu().numpy()))


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The first `count` of the packed truth values.

    >>> unpack_bits(pack_bits(torch.tensor([True, False, True])), 3).tolist()
    [True, False, True]
    """
    return torch.from_numpy(np.unpackbits(packed.cpu().numpy(), count=count).astype(bool))


@dataclass(frozen=True)
class Structures:
    """The entries that a mask covers, as one vector, and the structure each belongs to."""

    names: tuple[str, ...]  # parameters, in the order of the vector
    of: Tensor  # structure of every entry, numbered layer after layer
    layers: tuple[tuple[int, int], ...]  # first structure and one past the last of every layer

    @property
    def size(self) -> int:
        """The number of entries that the mask covers."""
        return int(self.of.shape[0])

    @property
    def count(self) -> int:
        """The number of structures in all masked layers."""
        return self.layers[-1][1]

    def best(self, scores: Tensor, share: float) -> Tensor:
        """Which structures have the highest mean score, this share of each layer (at least one); ties: the first."""
        sums = torch.zeros(self.count, dtype=torch.float64).index_add_(0, self.of, scores.cpu().double())
        mean = sums / torch.bincount(self.of, minlength=self.count)
        best = torch.zeros(self.count, dtype=torch.bool)
        for start, stop in self.layers:
            room = max(1, int(share * (stop - start)))
            best[start + torch.sort(mean[start:stop], descending=True, stable=True).indices[:room]] = True
        return best


def pack_mask(bits: Tensor, left: Tensor, of: Structures) -> State:
    """The bits of the structures that are left, and which ones these are."""
    return {BITS: pack_bits(bits[left[of.of]]), KEPT: pack_bits(left)}


def fault_in_mask(packed: State, of: Structures) -> str | None:
    """Why a packed mask cannot be used, or None: as many bits as the kept structures have entries."""
    if set(packed) != {BITS, KEPT} or any(v.dtype is not torch.uint8 or v.ndim != 1 for v in packed.values()):
        return f"a mask is {BITS!r} and {KEPT!r}, bytes; got {sorted(packed)}"
    if len(packed[KEPT]) != -(-of.count // 8):
        return f"{len(packed[KEPT])} bytes for {of.count} structures"
    entries = int(unpack_bits(packed[KEPT], of.count)[of.of].sum())
    return None if len(packed[BITS]) == -(-entries // 8) else f"{len(packed[BITS])} bytes for {entries} bits"


class BitMean:
    """The weighted mean of every bit over the clients that kept it.

    A structure counts where two clients kept it, or the only one of the round. Elsewhere the old mean stays.
    """

    def __init__(self, of: Structures, old: Tensor) -> None:
        self.of, self.old = of, old
        self._sums, self._weights = torch.zeros(2, of.size, dtype=torch.float64)
        self._count, self._clients = torch.zeros(of.count, dtype=torch.int64), 0

    def add(self, packed: State, weight: float) -> None:
        """Count a client's packed mask with its weight."""
        structures = unpack_bits(packed[KEPT], self.of.count)
        entries = structures[self.of.of]
        self._sums[entries] += unpack_bits(packed[BITS], int(entries.sum())) * weight
        self._weights[entries] += weight
        self._count, self._clients = self._count + structures, self._clients + 1

    def result(self) -> tuple[Tensor, Tensor]:
        """The mean, and for which structures there were enough clients."""
        enough = self._count >= min(2, self._clients)
        return torch.where(enough[self.of.of], (self._sums / self._weights).to(self.old.dtype), self.old), enough


def masked(state: State, of: Structures, bits: Tensor) -> State:
    """A State whose covered entries are multiplied by the mask."""
    covered = pick(state, of.names)
    vector = flat(covered)
    return {**state, **unflat(torch.where(bits.to(vector.device), vector, 0.0), shapes(covered))}


def learn(
    task: Task,
    base: State,
    of: Structures,
    scores: Tensor,
    left: Tensor,
    local: Local,
    rule: tuple[float, float],
    epochs: int | None,
    stream: str = "batches",
) -> tuple[Tensor, Fit]:
    """Scores after local epochs; the weights stay. Entries of dropped structures are never masked in again.

    `rule` is (rate, threshold): forward with weights times 1[score >= threshold]; the gradient of a score is that of
    its bit (straight-through). Scores do not decay: that would be pruning by another name.
    """
    (lr, threshold), weights = rule, flat(pick(base, of.names)).to(local.device)
    open_ = left.to(local.device)[of.of.to(local.device)]
    scores, allowed = scores.to(local.device, copy=True), weights * open_
    stepper = Stepper(replace(task.optim, weight_decay=0.0), lr * local.round.factor)

    def step(work: Workspace, batch: Batch) -> Tensor:
        torch.mul(allowed, scores >= threshold, out=work.flat)
        loss = work.gradient(batch, task.loss)
        work.grad.mul_(allowed)
        stepper.clip(work.grad)
        stepper.step(scores, work.grad)
        return loss

    done = fit(task, base, local, names=of.names, epochs=epochs, step=step, stream=stream)
    return scores.cpu(), done


class MaskedModel(nn.Module):
    """A model under a mask; it knows both of its densities."""

    def __init__(self, task: Task, base: State, of: Structures, bits: Tensor) -> None:
        super().__init__()
        self.model = module(task, masked(base, of, bits))
        self._stats = densities(base, of, bits)

    def forward(self, x: Tensor) -> Any:
        """The output of the model under its mask."""
        return self.model(x)

    def stats(self) -> dict[str, float]:
        """Density of the whole model, and within the masked layers."""
        return self._stats


def densities(base: State, of: Structures, bits: Tensor) -> dict[str, float]:
    """Share of the entries that are left: of all parameters, and of those that the mask covers."""
    left = int(bits.sum())
    everything = sum(value.numel() for value in base.values() if value.is_floating_point())
    return {"density": 1 - (of.size - left) / everything, "mask_density": left / of.size}


def covered(task: Task, layers: parts.Names | None) -> Structures:
    """Structures of the layers named; None: of those after the first fully connected one, at least of the last."""
    tensors_of = parts.layers(task)
    if layers is None:
        upper = [name for name, tensors in tensors_of.items() if parts.upper(task).issuperset(tensors)]
        masked_ones = upper[1:] or list(tensors_of)[-1:]
    else:
        wanted = parts.choose(task, layers, "layers")
        masked_ones = [name for name, tensors in tensors_of.items() if wanted.intersection(tensors)]
    return structures(task.model, tuple(masked_ones), parts.head_layer(task))


@lru_cache(maxsize=64)
def structures(task_model: Any, layers: tuple[str, ...], output: str) -> Structures:
    """Structures of these layers: what they write (filters, neurons), bias included.

    Of the layer `output` they are the neurons it reads: dropping what it writes would drop classes.
    """
    model = skeleton(task_model)
    names: list[str] = []
    lines: list[Tensor] = []
    edges = [0]
    for layer in layers:
        own = {f"{layer}.{name}": p for name, p in model.get_submodule(layer).named_parameters(recurse=False)}
        axis = 1 if layer == output else 0
        own = {name: p for name, p in own.items() if p.ndim > axis}
        if not own:
            raise ValueError(f"layer {layer!r} has no weights that a mask could cover")
        lengths = {p.shape[axis] for p in own.values()}
        if len(lengths) != 1:
            raise ValueError(f"the weights of layer {layer!r} do not share their structures: {sorted(lengths)}")
        for name, parameter in own.items():
            line = edges[-1] + torch.arange(parameter.shape[axis])
            names.append(name)
            lines.append(line.view([-1 if at == axis else 1 for at in range(parameter.ndim)]).expand_as(parameter))
        edges.append(edges[-1] + lengths.pop())
    return Structures(tuple(names), torch.cat([line.reshape(-1) for line in lines]), tuple(pairwise(edges)))
