"""`GatedModel`: a module, its private gate, and the adapted sparse model that both run for a batch."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pfedgate.gating.gate.network import Gate, GateOutput
from pfedgate.gating.optimizer import LiveOptimizer
from pfedgate.gating.plan import BlockPlan
from pfedgate.gating.selection.budget import Budget, Selector
from pfedgate.gating.slicing.execute import Program, Sliced, cut, masked, part
from pfedgate.gating.slicing.live import Live
from pfedgate.gating.timing import latency_terms

_LARGE = 131072  # entries from which on a matrix product reads a copy faster than a part of a larger matrix
_OF_A_PASS = frozenset({"last", "trained", "leaves", "earlier", "stepper", "_bound"})


@dataclass(frozen=True)
class Selection:
    """What the last batch was given: I*, M, G and M' (eq. 5-7 of the paper), and what they cost."""

    kept: npt.NDArray[np.bool_]  # I*, over all blocks
    weights: Tensor  # M
    importance: Tensor  # G
    adapted: Tensor  # M', zero for dropped blocks
    live: Live
    shift: Tensor | None = None  # what is added to the outputs (GateConfig.shift)

    @property
    def density(self) -> float:
        """Share of the model's parameters in use, always-kept ones included."""
        return self.live.density

    @property
    def cost(self) -> dict[str, float]:
        """Share of the dense model's cost per resource (latency in milliseconds)."""
        return self.live.cost

    @property
    def units(self) -> dict[str, int]:
        """Live units per layer."""
        return self.live.units


class GatedModel(nn.Module):
    """A module with a gate: `model` is the shared part (theta), `gate` the private one (phi).

    `last` is the last selection (with scope "sample": that of the last sample). After `optimizer()`, gradients of
    theta go to the optimiser's live parts; without one, to theta itself, as for any module.
    """

    last: Selection | None
    trained: Live | None  # what was live in the last pass with gradients
    leaves: dict[str, Tensor] | None  # live entries of theta, when a LiveOptimizer steps on them
    earlier: dict[str, Tensor]  # those of the pass before
    stepper: Callable[[], LiveOptimizer | None] | None  # a weak reference to that optimiser
    _bound: Program | None

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
    ) -> None:
        super().__init__()
        self.model, self.gate = model, gate
        self.plan, self.execution, self.compensate = plan, execution, compensate
        self.straight_through = straight_through
        plan.gate_size, plan.gate_flops = gate.size, gate.flops
        self._forget()
        self.rebudget(budget)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_A_PASS:  # no parameter or module: torch's search for its kind takes longer than the selection
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    # -- public
    def rebudget(self, budget: float | Mapping[str, float | None] | Budget) -> GatedModel:
        """Bind another budget (the same plan, gate and model); an infeasible one raises here.

        A first latency budget measures this device for a few seconds, unless the cache knows it.
        """
        wanted = self.plan.budget(budget)
        if wanted.latency_ms is not None and "latency_ms" not in self.plan.costs.dense():
            self.plan.add_latency(latency_terms(self))
        self.selector: Selector = self.plan.selector(wanted)  # raises before anything has changed
        self.budget = wanted
        if not self.plan.leaves_a_choice(self.budget):
            warnings.warn(
                f"under {self.budget} only one selection of blocks is possible, so the gate cannot choose; "
                "use more blocks per layer (blocks=...), a smaller first block (smallest=...) or another budget",
                stacklevel=3,
            )
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

    def explain(self) -> str:
        """Where execution is not sliced, and why."""
        network = self.plan.network
        if network is None:
            return f"masked execution: {self.plan.how} blocks cut through units, so nothing can be left out"
        if network.program is None:
            return f"masked execution: {network.reason}"
        head = "sliced execution" if self.execution == "sliced" else "masked execution, as asked for; sliced would be"
        if not network.notes:
            return f"{head} everywhere: dropped units are never computed"
        width = max(len(place) for place, _ in network.notes)
        lines = [f"  {place.ljust(width)}  {reason}" for place, reason in network.notes]
        return "\n".join([f"{head} everywhere, except at:", *lines])

    def select(self, x: Tensor) -> tuple[Selection, GateOutput]:
        """Ask the gate about a batch and choose the blocks that fit the budget (the one host copy of a step)."""
        out: GateOutput = self.gate(x)
        self.last = self.choose(out)
        return self.last, out

    def choose(self, out: GateOutput) -> Selection:
        """The blocks that fit the budget, for what a gate said."""
        importance = out.importance.detach().cpu().numpy().astype(np.float64)
        kept = self.plan.keep.copy()
        try:
            kept[self.plan.optional] = self.selector.select(importance[self.plan.optional])
        except ValueError as error:
            raise ValueError(
                f"cannot choose blocks: {error}. The gate's importances must be finite: "
                "lower the gate's rate, clip its gradient, or look for NaN in the input"
            ) from error
        chosen = torch.from_numpy(kept).to(out.weights)
        # I_ST = I* - sg(G) + G, in an order that leaves kept blocks at exactly 1.
        through = chosen + (out.importance - out.importance.detach())
        if self.straight_through == "kept":
            through = through * chosen
        adapted = out.weights * through
        return Selection(kept, out.weights, out.importance, adapted, self.plan.live(kept), out.shift)

    def forward(self, x: Tensor) -> Any:
        self._check(x)
        if self.gate.config.scope != "sample" or x.shape[0] == 1:
            return self._forward(x)
        return _stack([self._forward(x[i : i + 1]) for i in range(x.shape[0])])

    def microbatches(self, x: Tensor, size: int) -> Iterator[tuple[slice, Any]]:
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
        self._check(x)
        if size < 1:
            raise ValueError(f"a microbatch has at least one sample, not {size}")
        if self.gate.config.scope == "sample":
            raise ValueError("with scope 'sample' every sample has its own blocks: there is nothing to share")
        selection, out = self.select(x)
        decided = [selection.adapted] if out.shift is None else [selection.adapted, out.shift]
        # What the gate decided is cut off from how it came to it, so that each part's graph can be freed.
        held = [value.detach().requires_grad_(value.requires_grad) for value in decided]
        run = self._runner(selection.live)
        edges = np.linspace(0, len(x), -(-len(x) // size) + 1).astype(int).tolist()  # as even as can be
        for rows in itertools.starmap(slice, itertools.pairwise(edges)):
            yield rows, run(x[rows], *held)
        found = [(value, leaf.grad) for value, leaf in zip(decided, held, strict=True) if leaf.grad is not None]
        if found:
            torch.autograd.backward([value for value, _ in found], [gradient for _, gradient in found])

    # -- parts
    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"a gated model takes a batch as a torch.Tensor, got {type(x).__name__}")
        if x.ndim == 0 or x.shape[0] == 0:
            raise ValueError("the batch is empty; give at least one sample")

    def _forward(self, x: Tensor) -> Any:
        selection, out = self.select(x)
        run = self._runner(selection.live)
        return run(x, selection.adapted) if out.shift is None else run(x, selection.adapted, out.shift)

    def _runner(self, live: Live) -> Callable[..., Any]:
        """The adapted model for one selection: (input, M', shift of the classes) -> output."""
        if torch.is_grad_enabled():
            self.trained = live
        whole = self.execution == "masked" or self._program().differs()
        fetch = None if whole else self._fetch(live)

        def run(x: Tensor, weights: Tensor, shift: Tensor | None = None) -> Any:
            if fetch is None:
                y = masked(self.model, self.plan, live, weights, self.compensate, x)
            else:
                y = Sliced(self._program(), live, weights, fetch)(x)
            return y if shift is None else y + shift

        return run

    def _program(self) -> Program:
        if self._bound is None or self._bound.model is not self.model:
            self._bound = Program(self.model, self.plan, self.compensate)
        return self._bound

    def _fetch(self, live: Live) -> Any:
        """Where a pass gets the live entries of theta from."""
        if not torch.is_grad_enabled():
            return lambda name, parameter: part(parameter.detach(), name, live)
        if self.leaves is None or self.stepper is None or self.stepper() is None:
            return lambda name, parameter: cut(parameter, name, live)
        leaves: dict[str, Tensor] = {}
        self.earlier, self.leaves = self.leaves, leaves

        def fetch(name: str, parameter: nn.Parameter) -> Tensor:
            # A leaf of its own: its gradient has the size of what is live, not of the model.
            values, large = parameter.detach(), live.size(name) >= _LARGE and bool(live.axes(name))
            leaf = leaves.get(name)
            if leaf is None:
                leaf = leaves[name] = cut(values, name, live) if large else part(values, name, live)
                leaf.requires_grad_(parameter.requires_grad)
                if leaf.requires_grad and large:
                    leaf.register_post_accumulate_grad_hook(_free)  # type: ignore[no-untyped-call]
            elif large:
                leaf.data = cut(values, name, live)  # freed after the microbatch before
            return leaf.view_as(leaf) if leaf.requires_grad and large else leaf  # kept by a graph that runs again

        return fetch

    # -- copying
    def _forget(self) -> None:
        """Drop what belongs to a pass, not to the model."""
        self.last = self.trained = self.leaves = self.stepper = self._bound = None
        self.earlier = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> GatedModel:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        state = dict(self.__dict__)
        for name in (*_OF_A_PASS, "selector"):
            state.pop(name, None)
        twin.__dict__.update(copy.deepcopy(state, memo))
        twin._forget()
        twin.selector = self.selector  # has no state, as the plan
        return twin

    def __reduce__(self) -> Any:
        if self.plan.recipe is None:
            raise TypeError("its plan was not made by pfedgate.gate; save the state_dict() instead")
        return self.plan.recipe.again, (self.model, self.gate, self.budget, self.training)

    def extra_repr(self) -> str:
        share = self.gate.size / self.plan.size
        return f"{len(self.plan.blocks)} {self.plan.how} blocks, {self.execution}, gate {share:.1%} of the model"


def _free(leaf: Tensor) -> None:
    """A copy of live weights is not needed once its gradient is there: the optimiser steps on the parameter itself."""
    leaf.data = leaf.data.new_empty(1).expand(leaf.shape)  # the shape stays, for further gradients


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
