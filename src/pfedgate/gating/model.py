"""`GatedModel`: a module, its private gate, and the adapted sparse model that both run for a batch.

A gated step: the gate reads the batch (`gate/`), the most important blocks that fit the budget are selected
(`selection/`), what is live follows (`slicing/live.py`), and the model runs on it (`slicing/execute.py`). If there is a
`LiveOptimizer`, it takes the `Pass`: the selection, and leaves that collect the gradients of live entries.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from pfedgate.core.errors import warn
from pfedgate.gating.gate.network import Gate, GateOutput
from pfedgate.gating.inputs import Given, Inputs, call, functional, given, seen
from pfedgate.gating.latency import as_fast, latency_terms
from pfedgate.gating.optimizer import LiveOptimizer
from pfedgate.gating.plan import BlockPlan
from pfedgate.gating.selection.budget import Budget, Selector
from pfedgate.gating.slicing.execute import Program, Sliced, fetcher, masked
from pfedgate.gating.slicing.live import Bools, Pass, Selection
from pfedgate.gating.slicing.trace import eager_attention, quiet


class GatedModel(nn.Module):
    """A module with a gate: `model` is the shared part (theta), `gate` the private one (phi).

    `last` is the last selection (with scope "sample": that of the last sample). After `optimizer()`, gradients of
    theta go to leaves that the optimiser steps on, for as long as it lives; without one, to theta itself, as for any
    module.
    """

    last: Selection | None

    def __init__(
        self,
        model: nn.Module,
        gate: Gate,
        plan: BlockPlan,
        budget: float | Mapping[str, float | None] | Budget,
        *,
        execution: str,
        compensate: str,
        straight_through: str,
        features: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.gate, self.features = model, gate, features
        self.plan, self.execution, self.compensate = plan, execution, compensate
        self.straight_through = straight_through
        self.chosen = False  # see `under_choice`
        plan.gate_size, plan.gate_flops = gate.size, gate.flops
        self._forget()
        self.rebudget(budget)

    def _forget(self) -> None:
        """Drop what belongs to passes and not to the model: the last selection, who takes passes, the bound program."""
        self.last = None
        self._taker: Callable[[], LiveOptimizer | None] = _nobody
        self._program: Program | None = None

    # -- public
    def rebudget(self, budget: float | Mapping[str, float | None] | Budget) -> GatedModel:
        """Bind another budget (the same plan, gate and model); an infeasible one raises here.

        A first latency budget measures this device for a few seconds, unless the cache knows it. A speedup is measured
        in any case, and becomes a budget in milliseconds that reaches it.
        """
        limit = self.plan.budget(budget)
        if {"latency_ms", "speedup"} & limit.bound().keys() and "latency_ms" not in self.plan.costs.dense():
            self.plan.add_latency(*latency_terms(self))
        if limit.speedup is not None:
            limit = as_fast(self, limit)
        self.selector: Selector = self.plan.selector(limit)  # raises before anything has changed
        self.budget = limit
        for text in self.plan.advice(limit):
            warn(text)
        return self

    def parameters_shared(self) -> Iterator[nn.Parameter]:
        """theta: what clients train together."""
        return self.model.parameters()

    def parameters_private(self) -> Iterator[nn.Parameter]:
        """phi: what never leaves the client."""
        return self.gate.parameters()

    def optimizer(self, name: str = "sgd", *, lr: float, gate_lr: float | None = None, **options: Any) -> LiveOptimizer:
        """An optimiser that moves live blocks only; see `LiveOptimizer`."""
        return LiveOptimizer(self, name, lr=lr, gate_lr=gate_lr, **options)

    def give_passes_to(self, optimizer: LiveOptimizer) -> None:
        """Let this optimiser take the passes from now on, until another does or it is gone."""
        self._taker = weakref.ref(optimizer)

    def explain(self) -> str:
        """Everything that is not skipped, why, and the share of each resource that each place holds back."""
        network = self.plan.network
        if network is None:
            return f"masked execution: {self.plan.how} blocks cut through units, so nothing can be left out"
        if network.parts is None:
            return f"masked execution: {network.reason}"
        head = "sliced execution" if self.execution == "sliced" else "masked execution, as asked for; sliced would be"
        rows = self.plan.held
        if not rows:
            return f"{head} everywhere: dropped units are never computed"
        width = max(len(place) for place, *_ in rows)
        lines = [f"  {place.ljust(width)}  {reason}{shares}" for place, reason, shares in rows]
        return "\n".join([f"{head} everywhere, except at:", *lines])

    def verify(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Count the FLOPs of a forward pass, and raise if they are more than `last.cost` claims; for debugging.

        >>> import pfedgate
        >>> model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(8, 64)
        >>> pfedgate.gate(model, x, 0.5).verify(x)["counted"] < 0.52
        True
        """
        x, counts = given(args, kwargs), []
        with torch.no_grad(), quiet(x.device), eager_attention():
            buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}
            # The counter's hooks do not like parameters that are given to modules.
            plain = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
            for run in (partial(functional, self.model, plain), partial(call, self)):
                with FlopCounterMode(display=False) as counter:
                    run(x)
                counts.append(counter.get_total_flops())
            for name, buffer in self.named_buffers():
                buffer.copy_(buffers[name])
        assert self.last is not None
        share, gate = (self.last.cost["flops"] if self.execution == "sliced" else 1.0), self.gate.flops * len(x)
        whole = counts[0]
        if self.plan.wiring is not None and tuple(x.shape[1:]) == self.plan.wiring.shape[1:]:
            # Torch counts attention in some of its kernels only; the plan counts it where it trains, too.
            whole = max(whole, int(self.plan.costs.dense().get("flops", 0) * len(x)))
        result = {"counted": counts[1] / whole, "claimed": share + gate / whole}
        if result["counted"] > 1.02 * result["claimed"]:
            raise RuntimeError(
                f"{self.execution} execution takes {result['counted']:.3f} of the dense model's FLOPs, but claims "
                f"{result['claimed']:.3f}: please report the model, and use execution='masked' until it is mended"
            )
        return result

    def select(self, x: Given) -> tuple[Selection, GateOutput]:
        """Ask the gate about a batch and choose the blocks that fit the budget (the one host copy of a step)."""
        if torch.is_autocast_enabled(x.device.type):  # a choice must not depend on how products are rounded
            with torch.autocast(x.device.type, enabled=False):
                out: GateOutput = self.gate(self.read(x))
        else:
            out = self.gate(self.read(x))
        self.last = self.choose(out)
        return self.last, out

    def read(self, x: Given) -> Tensor:
        """What the gate reads of a batch."""
        return seen(x) if self.features is None else call(self.features, x).detach()

    def choose(self, out: GateOutput) -> Selection:
        """The blocks that fit the budget, for what a gate said."""
        importance = out.importance.detach().cpu().double().numpy()
        if (processes := _together()) > 1:  # one choice for the batches of all processes, as for their joint batch
            total = torch.from_numpy(importance).to(out.importance.device)
            torch.distributed.all_reduce(total)
            importance = (total / processes).cpu().numpy()
        mask = self.plan.keep.copy()
        try:
            mask[self.plan.optional] = self.selector.select(importance[self.plan.optional])
        except ValueError as error:
            raise ValueError(
                f"cannot choose blocks: {error}. The gate's importances must be finite: "
                "lower the gate's rate, clip its gradient, or look for NaN in the input"
            ) from error
        blocks = torch.from_numpy(mask).to(out.weights)
        # I_ST = I* - sg(G) + G, in an order that leaves kept blocks at exactly 1.
        through = blocks + (out.importance - out.importance.detach())
        if self.straight_through == "kept":
            through = through * blocks
        live = self.plan.lives[mask.tobytes()]
        adapted, limits = out.weights * through, self.selector.limits
        return Selection(mask, out.weights, out.importance, adapted, live, out.shift, self.execution, limits)

    def forced(self, mask: Bools, x: Given) -> Any:
        """The output with these blocks kept, whatever the gate says: what a selection takes can be measured."""
        out = self.gate(self.read(x))
        weights = out.weights * torch.from_numpy(mask).to(out.weights)
        live = self.plan.live(mask)
        return self._runner(Selection(mask, out.weights, out.importance, weights, live, out.shift))(
            x, weights, out.shift
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The adapted model's output for a batch: a tensor, or all that the model takes."""
        x = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) else self._given(args, kwargs)
        if torch.compiler.is_compiling():  # every batch has other shapes; the choice is numpy's, and must stay the same
            return _as_it_is(self, x)
        if x.ndim == 0 or x.shape[0] == 0:
            _refuse(x)
        if self.gate.config.scope == "sample" and x.shape[0] > 1:
            return _stack([self.forward(x[i : i + 1]) for i in range(x.shape[0])])
        if self.gate.config.chooser and not self.chosen:
            return self._by_choice(x)
        selection, _ = self.select(x)
        return self._runner(selection)(x, selection.adapted, selection.shift)

    def _by_choice(self, x: Given) -> Any:
        """Every sample under the candidate that the chooser has for it, one pass for each candidate."""
        groups, own = self.gate.groups(self.read(x)), self.gate.choice.clone()
        with self.under_choice():
            results = []
            for candidate, rows in groups:
                self.gate.choice.fill_(candidate)
                results.append(self.forward(x if len(groups) == 1 else x[rows]))
            self.gate.choice.copy_(own)
        if len(groups) == 1:
            return results[0]
        back = torch.cat([rows for _, rows in groups]).argsort()
        return tree_map(lambda part: part[back] if isinstance(part, Tensor) else part, _stack(results))

    @torch.no_grad()
    def masks(self, x: Given) -> list[Bools]:
        """The blocks that are kept for a batch: one mask, or with a chooser one for each candidate in use."""
        if not self.gate.config.chooser:
            return [self.select(x)[0].kept]
        masks, own = [], self.gate.choice.clone()
        for candidate, rows in self.gate.groups(self.read(x)):
            self.gate.choice.fill_(candidate)
            masks.append(self.select(x[rows])[0].kept)
        self.gate.choice.copy_(own)
        return masks

    @contextmanager
    def under_choice(self) -> Iterator[None]:
        """Let every sample go to `gate.choice`, whatever a chooser has for it."""
        before, self.chosen = self.chosen, True
        try:
            yield
        finally:
            self.chosen = before

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
        network = self.plan.network
        if (network is None or not network.several) and self.plan.wiring is not None and self.plan.wiring.single:
            _refuse(args[0] if len(args) == 1 and not kwargs else (*args, *kwargs.values()))
        return given(args, kwargs)

    def microbatches(self, x: Given, size: int) -> Iterator[tuple[slice, Any]]:
        """A batch in parts of at most `size` samples, under one decision: its gradient, with the activations of a part.

        So a device with little memory can afford more of the model. The gate, which decides for the whole batch, gets
        its gradient when the loop ends. Layers that look across a batch (BatchNorm) see a part of it.

        >>> import pfedgate
        >>> x, y = torch.randn(32, 64), torch.randint(10, (32,))
        >>> gated = pfedgate.gate(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), x, budget=0.5)
        >>> optimizer = gated.optimizer(lr=0.1)
        >>> for rows, output in gated.microbatches(x, 8):
        ...     loss = nn.functional.cross_entropy(output, y[rows], reduction="sum") / len(x)
        ...     loss.backward()
        >>> optimizer.step()
        """
        if not isinstance(x, Tensor | Inputs) or x.ndim == 0 or x.shape[0] == 0:
            _refuse(x)
        if size < 1:
            raise ValueError(f"a microbatch has at least one sample, not {size}")
        if self.gate.config.scope == "sample":
            raise ValueError("with scope 'sample' every sample has its own blocks: there is nothing to share")
        selection, _ = self.select(x)
        decided = [selection.adapted] if selection.shift is None else [selection.adapted, selection.shift]
        # The gate's decision is cut off from how it came about, so that the graph of each part can be freed.
        leaves = [value.detach().requires_grad_(value.requires_grad) for value in decided]
        run = self._runner(selection)
        edges = np.linspace(0, len(x), -(-len(x) // size) + 1).astype(int).tolist()  # parts of nearly equal size
        for rows in itertools.starmap(slice, itertools.pairwise(edges)):
            yield rows, run(x[rows], *leaves)
        pairs = [(value, leaf.grad) for value, leaf in zip(decided, leaves, strict=True) if leaf.grad is not None]
        if pairs:
            torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])

    # -- a pass
    def _runner(self, selection: Selection) -> Callable[..., Any]:
        """The adapted model under one selection: (input, M', shift of the classes) -> output. Begins a pass."""
        live, optimizer = selection.live, self._taker() if torch.is_grad_enabled() else None
        apart = _together() == 1  # else gradients go to theta itself, where processes average them
        leaves: dict[str, Tensor] | None = None
        receive: Callable[[Tensor], None] | None = None
        if optimizer is not None:
            # The graph holds its pass until gradients arrive, so what nobody differentiates is forgotten. The pass does
            # not hold the graph: that circle would never be collected.
            given = Pass(live, {})
            leaves = given.leaves if apart else None
            receive = partial(_deliver, self._taker, given)
            if selection.adapted.requires_grad:
                selection.adapted.register_hook(receive)  # type: ignore[no-untyped-call]
                receive = None
        program = None
        if self.execution == "sliced":
            if self._program is None or self._program.model is not self.model:
                self._program = Program(self.model, self.plan, self.compensate)
            program = self._program
            if (change := program.changed()) is not None:
                raise RuntimeError(
                    f"the model is not as it was wrapped: {change}, which slicing would miss. Undo it, wrap the model "
                    "again, or set execution = 'masked' (which saves nothing)"
                )
        fetch = fetcher(live, leaves)

        def run(x: Given, weights: Tensor, shift: Tensor | None = None) -> Any:
            if program is None:
                y = masked(self.model, self.plan, live, weights, self.compensate, x)
            else:
                y = Sliced(program, live, weights, fetch)(x)
            if receive is not None:  # the gate is frozen
                for tensor in tree_leaves(y):
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        tensor.register_hook(receive)  # type: ignore[no-untyped-call]
            return y if shift is None else y + shift

        return run

    # -- copying
    def __deepcopy__(self, memo: dict[int, Any]) -> GatedModel:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        state = dict(self.__dict__)
        for name in ("last", "_taker", "_program", "selector"):
            state.pop(name, None)
        twin.__dict__.update(copy.deepcopy(state, memo))
        twin._forget()
        if "selector" in self.__dict__:  # it has no state, as the plan; it is missing while latency is measured
            twin.selector = self.selector
        return twin

    def __reduce__(self) -> Any:
        if self.plan.wiring is None:
            raise TypeError("its plan was not made by pfedgate.gate; save the state_dict() instead")
        return self.plan.wiring.again, (self.model, self.gate, self.budget, self.training)

    def extra_repr(self) -> str:
        share = self.gate.size / self.plan.size
        return f"{len(self.plan.blocks)} {self.plan.how} blocks, {self.execution}, gate {share:.1%} of the model"


@_disable_dynamo  # `torch.compiler.disable` would load the compiler at once: two seconds of each process
def _as_it_is(gated: GatedModel, x: Given) -> Any:
    """The pass of a model that torch.compile was told to compile: not compiled."""
    return call(gated.forward, x)


def _together() -> int:
    """How many processes train this model in step (DistributedDataParallel around it)."""
    from torch.nn.parallel import DistributedDataParallel

    return torch.distributed.get_world_size() if DistributedDataParallel._active_ddp_module is not None else 1


def _nobody() -> None:
    """Takes the place of a weak reference while there is no optimiser."""


def _deliver(taker: Callable[[], LiveOptimizer | None], given: Pass, gradient: Tensor) -> None:
    """A hook: gradients reach a pass, so that its optimiser will step on it."""
    if (optimizer := taker()) is not None:
        optimizer.receive(given)


def _refuse(x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"a gated model takes a batch as a torch.Tensor, got {type(x).__name__} "
            "(of several inputs, wrap it with an example of all)"
        )
    raise ValueError("the batch is empty; give at least one sample")


def _stack(results: list[Any]) -> Any:
    """Results of single samples as the result of a batch, whatever the model returns."""
    first = results[0]
    if isinstance(first, Tensor):
        return torch.cat(results)
    if isinstance(first, dict):
        return {key: _stack([result[key] for result in results]) for key in first}
    if isinstance(first, tuple | list):
        parts = [_stack(list(part)) for part in zip(*results, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first
