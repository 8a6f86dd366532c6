"""A model whose parameters are views of one vector, and optimisers of such a vector: a handful of calls a step.

Building a module costs more than a small client's whole round, so each process keeps one workspace per model
and set of trained names. It is working memory only: `load` overwrites every parameter and buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pfedgate.core.errors import unknown
from pfedgate.core.kinds import Loss
from pfedgate.core.modules import fresh, persistent_buffers
from pfedgate.core.seeds import seeded
from pfedgate.core.state import clone, flat, pick, unflat
from pfedgate.core.types import Objective, Optim, State


@dataclass(frozen=True)
class Batch:
    """Samples of one step: `x` prepared, `y` labels, `rows` their numbers within the part."""

    x: Tensor
    y: Tensor
    rows: Tensor

    @property
    def n(self) -> int:
        """The number of samples of this step."""
        return int(self.x.shape[0])


class Workspace:
    """A module in training mode over two vectors: `flat` (what is trained) and its gradient `grad`.

    `names` are the trained parameters (default all); the rest is frozen: no gradient, no decay, no momentum,
    and the running statistics of a frozen normalisation layer stand still.
    """

    def __init__(self, model: nn.Module, names: Iterable[str] | None, device: torch.device) -> None:
        self.module = model.to(device)
        parameters = dict(model.named_parameters())
        trained = list(parameters) if names is None else list(names)
        for name in trained:
            if name not in parameters:
                raise KeyError(unknown("parameter", name, parameters))
        kinds = {value.dtype for value in parameters.values()}
        if len(kinds) > 1:
            raise TypeError(f"parameters of one model must have one dtype, got {sorted(map(str, kinds))}")
        self._order = trained + [name for name in parameters if name not in set(trained)]
        self._shapes = [(name, parameters[name].shape) for name in self._order]
        size = sum(parameters[name].numel() for name in trained)
        dtype = kinds.pop() if kinds else torch.float32
        self._whole = torch.empty(sum(p.numel() for p in parameters.values()), dtype=dtype, device=device)
        self.flat, self.grad = self._whole[:size], torch.zeros(size, dtype=dtype, device=device)
        views = unflat(self._whole, self._shapes)
        gradients = unflat(self.grad, self._shapes[: len(trained)])
        for name, value in parameters.items():
            value.data = views[name]
            value.requires_grad_(name in gradients)
            value.grad = gradients.get(name)
        self.parameters = parameters
        self.trained = tuple(trained)
        self.buffers = persistent_buffers(model)
        self.gradients = 0  # samples that went forward and backward since `load`, for counting FLOPs
        self.module.train()
        for layer in self.module.modules():
            own = list(layer.parameters(recurse=False))
            if (
                own
                and not any(value.requires_grad for value in own)
                and any(True for _ in layer.buffers(recurse=False))
            ):
                layer.eval()

    @property
    def shapes(self) -> list[tuple[str, torch.Size]]:
        """Names and shapes of what is trained, in the order of `flat`."""
        return self._shapes[: len(self.trained)]

    def load(self, state: State) -> None:
        """Take over a State (its parameters and buffers; other names in it are ignored)."""
        values = pick(state, self._order)
        for (name, shape), value in zip(self._shapes, values.values(), strict=True):
            if value.shape != shape:
                raise ValueError(f"{name!r} has shape {tuple(value.shape)}, the model wants {tuple(shape)}")
        if values:
            self._whole.copy_(flat(values))
        for name, buffer in self.buffers.items():
            buffer.copy_(pick(state, [name])[name])
        self.gradients = 0

    def state(self) -> State:
        """A copy of all parameters and buffers, in the module's own order, over one vector."""
        copied = unflat(self._whole.clone(), self._shapes)
        state = {name: copied[name] for name in self.parameters}
        state.update({name: value.clone() for name, value in self.buffers.items()})
        return state

    def vector(self, state: State) -> Tensor:
        """The trained names of a State as one vector in the order of `flat` (an anchor, a direction)."""
        return flat(pick(state, self.trained)).to(self.flat.device)

    def gradient(
        self, batch: Batch, loss: Loss, *, weights: Tensor | None = None, objective: Objective | None = None
    ) -> Tensor:
        """Put the gradient at the current parameters into `grad`; return the loss, detached."""
        self.grad.zero_()
        self.gradients += batch.n
        if objective is not None:
            value = objective(self.module, batch)
        else:
            losses = loss(self.module(batch.x), batch.y)
            value = (losses if weights is None else losses * weights[batch.rows]).mean()
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()


class Stepper:
    """Optimiser of one vector, or of the rows of a matrix (clients side by side, each clipped alone).

    Clients start every round with empty buffers; a server that keeps momentum (pFedHN) passes `slots` on. Step counts
    are Python numbers: a tensor would have to be read back from the device.

    >>> w = torch.ones(2)
    >>> Stepper(Optim(lr=0.5, momentum=0, weight_decay=0, clip=None)).step(w, torch.ones(2))
    >>> w.tolist()
    [0.5, 0.5]
    """

    def __init__(self, optim: Optim, lr: float | None = None, slots: State | None = None, keeps: bool = False) -> None:
        self.optim, self.keeps = optim, keeps  # whether it may keep the gradient, which nobody uses again
        self.lr = optim.lr if lr is None else lr
        slots = clone(slots or {})
        self.first = slots.get("optim/first")  # momentum, or Adam's mean
        self.second = slots.get("optim/second")  # Adam's mean of squares
        self.steps = int(slots.get("optim/steps", 0))

    def clip(self, gradient: Tensor) -> None:
        """Scale the gradient down to the clipping norm, if it is longer; nothing is read back from an accelerator."""
        if self.optim.clip is not None:
            norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            factor = (self.optim.clip / (norm + 1e-6)).clamp_(max=1.0)
            # A look at the factors is free on a CPU only, and spares a pass over many clients' gradients.
            if gradient.ndim == 1 or gradient.device.type != "cpu" or not bool((factor >= 1).all()):
                gradient.mul_(factor)

    def step(self, vector: Tensor, gradient: Tensor) -> None:
        """Move `vector` along `gradient`, which is used up: the same numbers as `torch.optim`."""
        self.steps += 1
        decay, momentum = self.optim.weight_decay, self.optim.momentum
        if decay and self.optim.name == "adamw":
            vector.mul_(1 - self.lr * decay)
        elif decay:
            gradient.add_(vector, alpha=decay)
        if self.optim.name == "sgd":
            if momentum:
                if self.first is None:
                    self.first = gradient if self.keeps else gradient.clone()
                else:
                    self.first.mul_(momentum).add_(gradient)
                gradient = self.first
            vector.add_(gradient, alpha=-self.lr)
            return
        beta1, beta2 = self.optim.betas
        if self.first is None or self.second is None:
            self.first, self.second = torch.zeros_like(vector), torch.zeros_like(vector)
        self.first.lerp_(gradient, 1 - beta1)
        self.second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = self.second.sqrt().div_(math.sqrt(1 - beta2**self.steps)).add_(self.optim.eps)
        vector.addcdiv_(self.first, root, value=-self.lr / (1 - beta1**self.steps))

    def drop(self, count: int) -> None:
        """Forget the first rows: those clients are done (see `stacked`)."""
        self.first, self.second = (rows if rows is None else rows[count:] for rows in (self.first, self.second))

    def slots(self) -> State:
        """A copy of the buffers; a Stepper that is given them goes on where this one stops."""
        slots = {"optim/steps": torch.tensor(self.steps), "optim/first": self.first, "optim/second": self.second}
        return {name: value.clone() for name, value in slots.items() if value is not None}


@lru_cache(maxsize=32)
def workspace(task_model: Any, names: tuple[str, ...] | None, device: torch.device) -> Workspace:
    """The process's workspace for a model; its contents are whatever the last user left."""
    return Workspace(fresh(task_model), names, device)


@lru_cache(maxsize=256)
def flops_per_sample(
    task_model: Any, names: tuple[str, ...] | None, sample: torch.Size, dtype: torch.dtype, training: bool
) -> float:
    """Floating-point operations of one sample: forward, or forward and backward; measured once per shape.

    A matrix product of m×k by k×n counts 2·m·k·n, as in `torch.utils.flop_counter`; all such work grows with
    the batch, so two samples are enough to measure.
    """
    model = fresh(task_model)
    model.train(training)
    for name, value in model.named_parameters():
        value.requires_grad_(names is None or name in names)
    x = torch.zeros((2, *sample), dtype=dtype)
    # With gradients even for prediction: without, attention takes a fused path that no formula counts.
    with seeded(0, "flops"), Flops() as counter, torch.enable_grad():
        output = model(x)
        if training and output.requires_grad:
            output.sum().backward()
    return float(counter.total) / 2


@lru_cache(maxsize=64)
def saved_bytes_per_sample(task_model: Any, sample: torch.Size, dtype: torch.dtype) -> float:
    """Bytes of one sample that the forward pass keeps for the backward pass, parameters not counted."""
    model = fresh(task_model)
    model.train()
    own = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())}
    sizes: dict[int, tuple[Tensor, int]] = {}  # by address; a tensor is held, so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    x = torch.zeros((2, *sample), dtype=dtype)
    with seeded(0, "flops"), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(x)
    return sum(size for _, size in sizes.values()) / 2


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts as `FlopCounterMode` does, by its formulas, but without loading the compiler (two seconds a process)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += float(flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out))
        return out
