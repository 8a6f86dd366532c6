"""`gate(model, example, budget)`: a private gate around any module, and the adapted sparse model it runs."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pfedgate.core.errors import unknown, warn
from pfedgate.gating.gate.config import GateConfig
from pfedgate.gating.gate.network import Gate
from pfedgate.gating.gate.start import rank
from pfedgate.gating.inputs import Given, Inputs, call, functional, seen
from pfedgate.gating.model import GatedModel
from pfedgate.gating.plan import BlockPlan
from pfedgate.gating.selection.budget import Budget
from pfedgate.gating.slicing.trace import alike, mode, quiet
from pfedgate.gating.splitters import Block, split_model

_CHOICES = {
    "variant": ("paper",),
    "execution": ("auto", "sliced", "masked"),
    "compensation": ("share", "sqrt", "none"),
    "straight-through mode": ("full", "kept"),
}

Splitter = Callable[[nn.Module], Sequence[Block]]


def gate(
    model: nn.Module,
    example: Any,
    budget: float | Mapping[str, float | None] | Budget = 0.3,
    *,
    split: str | Splitter = "unit",
    blocks: int = 10,
    smallest: float = 0.05,
    keep_output: bool = True,
    output_blocks: int = 128,
    modules: str | Callable[[str], bool] = "*",
    gate: GateConfig | Mapping[str, Any] | str | None = None,
    features: Callable[..., Tensor] | None = None,
    execution: str = "auto",
    compensate: str = "sqrt",
    straight_through: str = "full",
    variant: str | None = None,
    generator: torch.Generator | None = None,
) -> GatedModel:
    """Wrap a module with a gate that keeps every batch within a budget.

    Args:
        model: Any module; it stays your own, and its parameters are trained in place.
        example: One batch, or its shape; of a model with several inputs a tuple of its arguments, or a dict of
            keyword arguments, in the way in which the gated model is called later.
        budget: A share of the dense model. One number binds parameters, FLOPs and activation bytes alike, where the
            splitter can reduce them; `Budget(params=0.3)` is the paper's s.
        split: What a block is: whole units ("unit"), other ways of `splitters.py`, or a function of your own.
        blocks: How many blocks a layer has.
        smallest: The least share of a layer that is always kept (s_min of the paper). With .1 more layers can be cut
            into steps of four units, which run faster, but a tenth of all resources is out of reach then.
        keep_output: Whether no output is ever dropped.
        output_blocks: In how many blocks at most outputs are weighed when all are kept.
        modules: What may be gated: a pattern of names ("*.mlp"), or a function of a layer's name. The budget stays one
            of the whole model.
        gate: The gate's own switches, as `GateConfig` or by name.
        features: Makes what the gate reads of all inputs, one row per sample; else it reads signals or images if
            there are any, and tokens if not.
        execution: "sliced" leaves dropped blocks out, "masked" multiplies them by zero, "auto" slices where exact.
        compensate: What weights are divided by because inputs are missing: the root of the live share ("sqrt"), the
            share itself ("share"), or nothing ("none").
        straight_through: Which blocks have a gradient of their importance G: all ("full") or kept ones ("kept").
        variant: "paper" is the published method, literally: flat blocks, no compensation, `GateConfig.paper`.
        generator: Draws the gate's first weights.

    >>> import pfedgate, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    >>> gated = pfedgate.gate(model, torch.randn(8, 64), budget=0.3)
    >>> gated(torch.randn(8, 64)).shape, gated.last.density <= 0.3
    (torch.Size([8, 10]), True)
    """
    options = (variant or "paper", execution, compensate, straight_through)
    for (option, choices), value in zip(_CHOICES.items(), options, strict=True):
        if value not in choices:
            raise ValueError(unknown(option, str(value), choices))
    if variant == "paper":
        split, blocks, keep_output, compensate, gate = "flat", 5, False, "none", gate or "paper"
    if blocks < 2 or not 0 <= smallest < 1 or output_blocks < 1:
        raise ValueError(
            "need blocks >= 2, 0 <= smallest < 1 and output_blocks >= 1, "
            f"got blocks={blocks}, smallest={smallest}, output_blocks={output_blocks}"
        )
    model = getattr(model, "_orig_mod", model)  # of torch.compile: which units are live changes from batch to batch
    _check_model(model)
    # Parameters made under inference mode could never be trained.
    with torch.inference_mode(False):
        batch = _example(model, example)
        result, embedding = _check_runs(model, batch)
        cutting = {
            "blocks": blocks, "smallest": smallest, "keep_output": keep_output, "output_blocks": output_blocks,
            "modules": modules,
        }  # fmt: skip
        wiring = Wiring(
            tuple(batch.shape), batch.dtype, split, cutting, execution, compensate, straight_through,
            None if isinstance(batch, Tensor) else batch, features,
        )  # fmt: skip
        plan = wiring.plan(model, batch)
        # One number is meant to save work, too: the user hears if that is impossible, unless masks were asked for.
        named = isinstance(budget, Budget | Mapping) or budget == 1
        if execution == "auto" and plan.network is not None and not plan.sliceable and not named:
            warn(
                f"blocks can only be masked, not skipped: {plan.network.reason}. The budget binds parameters alone and "
                "saves neither time nor memory. If that is what you want: execution='masked' or Budget(params=...)",
            )
        if execution == "masked" or not plan.sliceable:
            _check_gradients(model, batch)
        config, classes = GateConfig.of(gate), None
        if config.shift:
            if not isinstance(result, Tensor) or result.ndim != 2:
                raise ValueError("GateConfig(shift=True) needs a model that returns logits of shape [batch, classes]")
            classes = int(result.shape[1])
        flops = plan.costs.dense().get("flops", math.inf)
        reads = seen(batch) if features is None else call(features, batch).detach()
        private = Gate(
            reads, len(plan.blocks), config, model_size=plan.size, model_flops=flops,
            embedding=embedding, classes=classes, generator=generator,
        )  # fmt: skip
        parameter = next(model.parameters())
        private.to(parameter.device, torch.promote_types(parameter.dtype, torch.float32))
        gated = wiring.wrap(model, private, plan, budget)
        rank(private, plan, gated.budget, model)
        return gated


@dataclass(frozen=True)
class Wiring:
    """How a model was planned: enough to plan it again."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    split: str | Splitter
    cutting: Mapping[str, Any]  # the options of `split_model`
    execution: str
    compensate: str
    straight_through: str
    several: Inputs | None = None  # the example itself, if it is not one tensor
    features: Callable[..., Tensor] | None = None

    @property
    def single(self) -> bool:
        """Whether the model takes one tensor."""
        return self.several is None

    def plan(self, model: nn.Module, batch: Given) -> BlockPlan:
        """Cut the model into blocks."""
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        how = self.split if isinstance(self.split, str) else getattr(self.split, "__name__", "custom")
        plan = BlockPlan(split_model(model, batch, self.split, **self.cutting), shapes, how)
        plan.wiring = self
        if self.execution == "sliced" and not plan.sliceable:
            reason = plan.network.reason if plan.network is not None else f"{how} blocks cut through units"
            raise ValueError(f"sliced execution is not possible: {reason}. Use execution='auto' or 'masked'")
        return plan

    def batch(self, model: nn.Module) -> Given:
        """A batch like the example, of the type that the model has now: always the same noise, or zeros for tokens."""
        parameter = next(model.parameters())
        if self.several is not None:
            return self.several
        if not self.dtype.is_floating_point:
            return torch.zeros(self.shape, dtype=self.dtype, device=parameter.device)
        noise = torch.randn(self.shape, generator=torch.Generator().manual_seed(0))
        return noise.to(parameter.device, parameter.dtype)

    def wrap(
        self, model: nn.Module, private: Gate, plan: BlockPlan, budget: float | Mapping[str, float | None] | Budget
    ) -> GatedModel:
        """The gated model of a plan."""
        execution = "sliced" if plan.sliceable and self.execution != "masked" else "masked"
        return GatedModel(
            model, private, plan, budget, execution=execution, compensate=self.compensate,
            straight_through=self.straight_through, features=self.features,
        )  # fmt: skip

    def again(self, model: nn.Module, private: Gate, budget: Budget, training: bool) -> GatedModel:
        """A pickled gated model: the plan is made anew, the numbers are as they were."""
        gated = self.wrap(model, private, self.plan(model, self.batch(model)), budget)
        gated.training = training
        return gated


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    named = dict(model.named_parameters())
    if not named:
        raise ValueError("the model has no parameters, so there is nothing to gate")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in named.values()):
        raise ValueError("the model has lazy layers without shapes yet: run it once on a batch, then wrap it")
    if empty := [name for name, p in named.items() if not p.numel()]:
        raise ValueError(f"the parameter {empty[0]!r} has no entries; leave out layers of size 0")


def _example(model: nn.Module, example: Any) -> Given:
    if isinstance(example, Mapping):
        return Inputs((), example)
    if isinstance(example, tuple) and any(isinstance(one, Tensor) for one in example):
        return Inputs(example, {})
    if isinstance(example, Tensor):
        if example.ndim == 0 or example.shape[0] == 0:
            raise ValueError("the example is empty; give one batch with at least one sample")
        return example
    try:
        shape = tuple(operator.index(n) for n in example)
    except TypeError:
        inside = "" if not isinstance(example, list | tuple) else f" of {type(next(iter(example), None)).__name__}"
        raise TypeError(
            f"example must be a batch (Tensor) or its shape, got {type(example).__name__}{inside}; "
            "of a pair of inputs and labels give the inputs"
        ) from None
    if not shape or min(shape) < 1:
        raise ValueError(f"the shape of an example needs positive sizes, the batch first, got {shape}")
    parameter = next(model.parameters())
    reading = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)
    first = next((m for m in model.modules() if isinstance(m, reading)), None)
    dtype = torch.long if isinstance(first, nn.Embedding) else parameter.dtype
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def _check_runs(model: nn.Module, batch: Given) -> tuple[Any, nn.Embedding | None]:
    """Run the model once on the example, without a trace in the model or in random generators.

    Returns the model's result, and the embedding that reads the batch itself (not positions, or a part of it).
    """
    try:
        call(inspect.signature(model.forward).bind, batch)
    except TypeError as error:
        raise ValueError(
            f"the model's forward does not take this example: {error}. Give a tuple of its arguments, or a dict of "
            "keyword arguments"
        ) from None
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    reads: list[nn.Embedding] = []

    def see(module: nn.Module, given: tuple[Any, ...]) -> None:
        read = given[0] if given else None
        if isinstance(module, nn.Embedding) and isinstance(read, Tensor) and torch.equal(read, seen(batch)):
            reads.append(module)

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_pre_hook(see).remove)
        for context in (quiet(batch.device), mode(model, training=False), torch.no_grad()):
            stack.enter_context(context)
        try:
            return functional(model, buffers, batch), next(iter(reads), None)
        except Exception as error:  # whatever a user's forward raises
            raise ValueError(
                f"the model does not run on the example of shape {tuple(batch.shape)} and type {batch.dtype}: {error}. "
                "Give one batch as the model takes it, batch axis first"
            ) from error


def _check_gradients(model: nn.Module, batch: Given) -> None:
    """Masks are put on for the forward pass alone: a model that recomputes parts of it later would miss them."""
    try:
        twin = copy.deepcopy(model)
    except Exception:  # a user's module may hold anything
        return
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(-0.7)  # other numbers, that a ReLU can tell apart
    own = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    lent = {name: parameter.detach().clone().requires_grad_() for name, parameter in own.items()}
    gradients: list[tuple[Tensor | None, ...]] = []
    for host, parameters in ((twin, own), (model, lent)):
        buffers = {name: buffer.clone() for name, buffer in host.named_buffers()}
        with quiet(batch.device), mode(host, training=True), torch.enable_grad():
            try:
                results = tree_leaves(functional(host, {**parameters, **buffers}, batch.clone()))
            except Exception:  # a batch that is too small for training, say: then there is nothing to compare
                return
            roots = [t.sum() for t in results if isinstance(t, Tensor) and t.requires_grad]
            gradients.append(torch.autograd.grad(roots, list(parameters.values()), allow_unused=True) if roots else ())
    if not all(alike(a, b) for a, b in zip(*gradients, strict=True)):
        raise ValueError(
            "the model computes parts of its forward pass again for the backward pass (torch.utils.checkpoint), and "
            "masked weights would not be used there: switch checkpointing off"
        )
