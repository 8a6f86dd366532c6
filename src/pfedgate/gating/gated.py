"""`gate(model, example, budget)`: a private gate around any module, and the adapted sparse model it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pfedgate.names import unknown

from .blocks import Block, split_model
from .budget import Budget, Selector
from .execute import Sliced, cut, masked
from .gate import Gate, GateOutput
from .gate_config import GateConfig
from .optim import LiveOptimizer
from .plan import BlockPlan, Live
from .trace import mode

EXECUTIONS = ("auto", "sliced", "masked")
COMPENSATIONS = ("share", "sqrt", "none")
STRAIGHT_THROUGH = ("full", "kept")


@dataclass(frozen=True)
class Selection:
    """What the last batch was given: I*, M, G and M' (eq. 5-7 of the paper), and what they cost."""

    kept: npt.NDArray[np.bool_]  # I*, over all blocks
    weights: Tensor  # M
    importance: Tensor  # G
    adapted: Tensor  # M', zero for dropped blocks
    live: Live

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
    """A module with a gate: `model` is the shared part (theta), `gate` the private one (phi)."""

    last: Selection | None

    def __init__(
        self,
        model: nn.Module,
        gate: Gate,
        plan: BlockPlan,
        budget: Budget,
        *,
        execution: str,
        compensate: str,
        straight_through: str,
    ) -> None:
        super().__init__()
        self.model, self.gate = model, gate
        self.plan, self.execution, self.compensate = plan, execution, compensate
        self.straight_through = straight_through
        self.last = None
        self.leaves: dict[str, Tensor] | None = None  # live entries of theta, when a LiveOptimizer steps on them
        self.rebudget(budget)

    # -- public
    def rebudget(self, budget: float | Mapping[str, float | None] | Budget) -> GatedModel:
        """Bind another budget (the same plan, gate and model); an infeasible one raises here."""
        self.budget = self.plan.budget(budget)
        self.selector = Selector(self.plan.costs, self.budget)
        if self.selector.reachable_masks(2) < 2 and self.budget.bound() and len(self.plan.optional):
            everything = all(value >= 1 for value in self.selector.limits.values()) or (
                self.selector.costs.dense() and self.selector.solver == "everything fits"
            )
            if not everything and not self._all_fits():
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
        if self.execution == "masked":
            network = self.plan.network
            if network is not None and network.reason:
                return f"masked execution: {network.reason}"
            return f"masked execution: {self.plan.how} blocks cut through units, so nothing can be left out"
        assert self.plan.network is not None
        notes = self.plan.network.notes
        if not notes:
            return "sliced execution everywhere: dropped units are never computed"
        width = max(len(place) for place, _ in notes)
        lines = [f"  {place.ljust(width)}  {reason}" for place, reason in notes]
        return "\n".join(["sliced execution; complete tensors are restored at:", *lines])

    def select(self, x: Tensor) -> tuple[Selection, GateOutput]:
        """Ask the gate about a batch and choose the blocks that fit the budget (the one host copy of a step)."""
        out = self.gate(x)
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
        selection = Selection(kept, out.weights, out.importance, out.weights * through, self.plan.live(kept))
        self.last = selection
        return selection, out

    def forward(self, x: Tensor) -> Any:
        self._check(x)
        if self.gate.config.scope != "sample" or x.shape[0] == 1:
            return self._forward(x)
        return torch.cat([self._forward(one) for one in x.split(1)])

    # -- parts
    def _forward(self, x: Tensor) -> Any:
        selection, out = self.select(x)
        if self.execution == "masked":
            y = masked(self.model, self.plan, selection.live, selection.adapted, self.compensate, x)
        else:
            y = self._sliced(selection)(x)
        return y if out.shift is None else y + out.shift

    def _sliced(self, selection: Selection) -> Sliced:
        parameters = dict(self.model.named_parameters())
        collect = self.leaves is not None and torch.is_grad_enabled()
        if collect:
            assert self.leaves is not None
            self.leaves.clear()

        def fetch(name: str, live: Live) -> Tensor:
            parameter = parameters[name]
            if not collect:
                return cut(parameter, name, live)
            # A leaf of its own: its gradient has the size of what is live, not of the model.
            leaf = cut(parameter.detach(), name, live).requires_grad_(parameter.requires_grad)
            assert self.leaves is not None
            self.leaves[name] = leaf
            return leaf

        return Sliced(self.model, self.plan, selection.live, selection.adapted, self.compensate, fetch)

    def _all_fits(self) -> bool:
        dense = self.plan.costs.dense()
        return all(dense.get(r, 0.0) <= limit for r, limit in self.selector.limits.items())

    def _check(self, x: Tensor) -> None:
        if x.ndim == 0 or x.shape[0] == 0:
            raise ValueError("the batch is empty; give at least one sample")

    def extra_repr(self) -> str:
        share = self.gate.size / self.plan.size
        return f"{len(self.plan.blocks)} {self.plan.how} blocks, {self.execution}, gate {share:.1%} of the model"


def _example(model: nn.Module, example: Tensor | Sequence[int]) -> Tensor:
    if isinstance(example, Tensor):
        return example
    try:
        shape = tuple(int(n) for n in example)
    except TypeError:
        raise TypeError(f"example must be a batch (Tensor) or its shape, got {type(example).__name__}") from None
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    first = next(
        (m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd)),
        None,
    )
    dtype = torch.long if isinstance(first, nn.Embedding) else torch.get_default_dtype()
    return torch.zeros(shape, dtype=dtype, device=device)


def _choice(what: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise ValueError(unknown(what, value, known))
    return value


def gate(
    model: nn.Module,
    example: Tensor | Sequence[int],
    budget: float | Mapping[str, float | None] | Budget = 0.3,
    *,
    split: str | Callable[[nn.Module], Sequence[Block]] = "unit",
    blocks: int = 10,
    smallest: float = 0.05,
    keep_output: bool = True,
    output_blocks: int = 128,
    gate: GateConfig | Mapping[str, Any] | None = None,
    execution: str = "auto",
    compensate: str = "share",
    straight_through: str = "full",
    variant: str | None = None,
) -> GatedModel:
    """Wrap a module with a gate that keeps every batch within a budget.

    `example` is one batch, or its shape. `budget=0.3` binds parameters, FLOPs and activation bytes alike (where the
    splitter can reduce them); `Budget(params=0.3)` is the paper's s. `split` says what a block is (see `blocks.py`),
    `blocks` how many a layer has, `smallest` the least share of a layer that is always kept (s_min). `keep_output`
    never drops an output, and weighs outputs in up to `output_blocks` blocks. `compensate` divides weights by the live
    share of their inputs. `gate` holds the gate's own switches (`GateConfig`). `variant="paper"` is the published
    method, literally.

    >>> import pfedgate, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    >>> gated = pfedgate.gate(model, torch.randn(8, 64), budget=0.3)
    >>> gated(torch.randn(8, 64)).shape, gated.last.density <= 0.3
    (torch.Size([8, 10]), True)
    """
    if variant is not None:
        _choice("variant", variant, ("paper",))
        published = GateConfig(post_norm="batch", activation="sigmoid")
        split, blocks, keep_output, compensate, gate = "flat", 5, False, "none", gate or published
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not any(True for _ in model.parameters()):
        raise ValueError("the model has no parameters, so there is nothing to gate")
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        raise ValueError(
            f"{len(frozen)} parameters are frozen (the first is {frozen[0]!r}); the gate weighs all of them. "
            "Call requires_grad_(True) on them, or turn what must not be trained into buffers"
        )
    if blocks < 2 or not 0 <= smallest < 1:
        raise ValueError(f"need blocks >= 2 and 0 <= smallest < 1, got blocks={blocks}, smallest={smallest}")
    _choice("execution", execution, EXECUTIONS)
    _choice("compensation", compensate, COMPENSATIONS)
    _choice("straight-through mode", straight_through, STRAIGHT_THROUGH)
    batch = _example(model, example)
    found = split_model(
        model,
        batch,
        split,
        blocks=blocks,
        smallest=smallest,
        keep_output=keep_output,
        output_blocks=output_blocks,
    )
    plan = BlockPlan(
        found,
        {name: tuple(p.shape) for name, p in model.named_parameters()},
        split if isinstance(split, str) else getattr(split, "__name__", "custom"),
    )
    skippable = plan.sliceable
    if execution == "sliced" and not skippable:
        reason = plan.network.reason if plan.network is not None else f"{plan.how} blocks cut through units"
        raise ValueError(f"sliced execution is not possible: {reason}. Use execution='auto' or 'masked'")
    if isinstance(gate, Mapping):
        known = GateConfig.__dataclass_fields__
        for name in gate:
            if name not in known:
                raise ValueError(unknown("gate option", str(name), known))
        config = replace(GateConfig(), **gate)
    else:
        config = gate or GateConfig()
    classes = None
    if config.shift:
        with mode(model, training=False), torch.no_grad():
            classes = int(model(batch).shape[-1])
    embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    private = Gate(
        batch,
        len(plan.blocks),
        config,
        model_size=plan.size,
        embedding=embedding if not batch.is_floating_point() else None,
        classes=classes,
    ).to(next(model.parameters()).device)
    return GatedModel(
        model,
        private,
        plan,
        plan.budget(budget),
        execution="sliced" if skippable and execution != "masked" else "masked",
        compensate=compensate,
        straight_through=straight_through,
    )
