"""An optimiser that steps on live blocks only.

A dropped block has no gradient, but momentum and weight decay of an ordinary optimiser would still move it: then
every block changes in every round and nothing is sparse (D25 in our notes on the authors' code). Here the entries
of theta that were not live in a step, and their momentum, stay bit for bit what they were, and the step costs what
the live part costs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from pfedgate.core.errors import unknown
from pfedgate.gating.slicing.execute import cut
from pfedgate.gating.slicing.live import Live, compensation

if TYPE_CHECKING:
    from pfedgate.gating.model import GatedModel

OPTIMIZERS = ("sgd", "adam", "adamw")
_KEPT = ("defaults", "state", "param_groups", "gated", "name", "clip", "touched", "_parameters")  # by copies


class View(NamedTuple):
    """A rectangle of a parameter that is live."""

    here: tuple[slice, ...] | None  # where it lies in the gradient; None: it is all of it
    value: Tensor
    held: list[Tensor]  # the same part of the parameter's buffers


class Route(NamedTuple):
    """Where the gradient of a parameter goes."""

    pointer: int  # to the parameter's numbers
    factor: float  # that the gradient is multiplied with
    views: list[View]


class LiveOptimizer(torch.optim.Optimizer):
    """SGD, Adam or AdamW on the live entries of theta, and the same kind with rate `gate_lr` on the gate.

    One step belongs to one forward pass, or to all of one `GatedModel.microbatches`. `clip` bounds the L2 norm of the
    gradients of theta and of the gate, separately. Weight decay applies to live entries of theta only.

    To torch it is an optimiser with two groups of parameters, theta and the gate: schedules of rates, `state_dict` and
    `load_state_dict` work. But gradients of theta have the size of what is live and are not in `parameters().grad`, so
    clip with `clip`, not with `clip_grad_norm_`, and scale no losses with a `GradScaler`.

    >>> import pfedgate
    >>> gated = pfedgate.gate(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)),
    ...                       torch.zeros(2, 64), 0.5)
    >>> optimizer = gated.optimizer("sgd", lr=0.1, gate_lr=0.01)
    >>> schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     gated(torch.randn(8, 64)).square().sum().backward()
    ...     optimizer.step()
    ...     schedule.step()
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.025, 0.0025]
    """

    def __init__(
        self,
        gated: GatedModel,
        name: str = "sgd",
        *,
        lr: float,
        gate_lr: float | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        clip: float | None = None,
    ) -> None:
        if name not in OPTIMIZERS:
            raise ValueError(unknown("optimiser", name, OPTIMIZERS))
        if gated.gate.config.scope == "sample":
            raise ValueError("with scope 'sample' every sample has its own blocks; train with scope 'batch'")
        self.gated, self.name, self.clip = gated, name, clip
        self.touched: set[bytes] = set()  # selections that were stepped on
        self._parameters = dict(gated.model.named_parameters())
        self._seen: tuple[Live, dict[str, Route]] | None = None  # of the last selection
        for what, rate in (("lr", lr), ("gate_lr", lr if gate_lr is None else gate_lr)):
            if not (math.isfinite(rate) and rate >= 0):
                raise ValueError(f"{what} must be a number of at least 0, got {rate!r}")
        groups = [
            {"params": list(self._parameters.values()), "lr": lr, "weight_decay": weight_decay},
            {"params": list(gated.parameters_private()), "lr": lr if gate_lr is None else gate_lr, "weight_decay": 0.0},
        ]
        # Schedules that cycle momentum look here for what there is.
        super().__init__(groups, {"momentum": momentum} if name == "sgd" else {"betas": betas, "eps": eps})
        self._take_over()

    def _take_over(self) -> None:
        """From now on gradients of theta come here, for as long as there is this optimiser."""
        self.gated.leaves, self.gated.earlier, self.gated.trained = {}, {}, None
        self.gated.stepper = weakref.ref(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_seen": None})
        self._take_over()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Theta and the gate are all there is: what else is to be trained needs an optimiser of its own."""
        if len(self.param_groups) == 2:
            raise ValueError("a LiveOptimizer steps on theta and the gate only; use another optimiser for the rest")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients; before or after the forward pass, as with any optimiser."""
        for leaf in (self.gated.leaves or {}).values():
            leaf.grad = None
        self.gated.earlier = {}
        if not set_to_none:
            super().zero_grad(set_to_none)
        else:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move what was live in the last pass with gradients, and the gate."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        live = self.gated.trained
        if any(leaf.grad is not None for leaf in self.gated.earlier.values()):
            raise RuntimeError(
                "there was another pass between backward() and step(), whose blocks may differ: step after each "
                "backward(), and look at other data under torch.no_grad()"
            )
        found = {} if live is None else self._leaves(live)
        gradients = {name: found[name].grad for name in self._parameters if name in found}
        self._move({name: g for name, g in gradients.items() if g is not None}, live)
        self.step_gate()
        self.gated.leaves, self.gated.trained = {}, None
        return value

    @torch.no_grad()
    def step_gate(self) -> None:
        """A step of the gate alone; theta stays as it is."""
        group = self.param_groups[1]
        moving = [p for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in moving]
        self._clip(gradients)
        self._update(group, moving, gradients, [self._slots(p) for p in moving], [self._count(p) for p in moving])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on as an optimiser like this one was, rates included."""
        super().load_state_dict(dict(state_dict))
        self._seen = None

    def memory(self) -> dict[str, Tensor]:
        """All buffers, of theta and of the gate, as a flat named state to go on with later (`recall`)."""
        found = {}
        for place, parameter in self._places():
            for kind, value in self.state.get(parameter, {}).items():
                found[f"{place}/{kind}"] = value.clone()
        return found

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Start with buffers that an optimiser like this one left behind."""
        self._seen = None
        places = dict(self._places())
        for name, value in memory.items():
            place, _, kind = name.rpartition("/")
            if place not in places:
                raise ValueError(f"{name!r} is no buffer of this optimiser: start without memory")
            self.state[places[place]][kind] = value.clone()

    def _places(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield f"model/{name}", parameter
        for index, parameter in enumerate(self.param_groups[1]["params"]):
            yield f"gate/{index}", parameter

    def _leaves(self, live: Live) -> dict[str, Tensor]:
        """Live entries with their gradients; after masked execution cut out of the full gradients."""
        if self.gated.leaves:
            return self.gated.leaves
        cuts = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                leaf = cut(parameter.detach(), name, live)
                leaf = leaf.clone() if leaf.data_ptr() == parameter.data_ptr() else leaf
                leaf.grad = cut(parameter.grad, name, live)
                cuts[name] = leaf
        return cuts

    def _move(self, gradients: Mapping[str, Tensor], live: Live | None) -> None:
        """A step of views of what is live: no copies of parameters or of their momentum."""
        if live is None or not gradients:
            raise RuntimeError("nothing to step on: call the gated model and backward() first, once per step")
        self.touched.add(live.kept.tobytes())
        routes = {name: self._route(name, live) for name in gradients}
        for name, gradient in gradients.items():
            if (factor := routes[name].factor) != 1.0:
                gradient.mul_(factor)
        self._clip(list(gradients.values()))
        aside = []
        if not (live.plan.axes or live.kept.all()):
            aside = [held for name in gradients for held in self._unowned(name, live)]
        values, parts, slots, counts = [], [], [], []
        for name, gradient in gradients.items():
            count = self._count(self._parameters[name])
            for here, value, held in routes[name].views:
                values.append(value)
                parts.append(gradient if here is None else gradient[here])
                slots.append(held)
                counts.append(count)
        self._update(self.param_groups[0], values, parts, slots, counts)
        for tensor, mask, kept in aside:
            tensor[mask] = kept

    def _restoring(self, name: str, live: Live) -> float:
        """W' = W / c would move 1 / c^2 times too far in a step of SGD, and few live inputs would mean chaos.

        With c = sqrt(rho) also times the root of live units over live inputs: the rate that suits a layer grows with
        its outputs over its inputs (Yang, Simon, Bernstein: A Spectral Condition for Feature Learning, 2023), and then
        one rate suits all budgets. The root did better than the whole in our trials (what-makes-gating-work.md).
        """
        read = live.share_read(name)
        divisor = compensation(self.gated.compensate, read)
        return divisor**2 * (math.sqrt(live.share_written(name) / read) if self.gated.compensate == "sqrt" else 1.0)

    def _update(
        self, group: dict[str, Any], values: list[Tensor], gradients: list[Tensor], slots: list[list[Tensor]],
        counts: list[Tensor | None],
    ) -> None:  # fmt: skip
        """Torch's own step. `counts` may name one of Adam's counts several times, once for each view."""
        if self.name == "sgd":
            sgd(
                values, gradients, [held[0] if held else None for held in slots], weight_decay=group["weight_decay"],
                momentum=group["momentum"], lr=group["lr"], dampening=0.0, nesterov=False, maximize=False,
                foreach=True,
            )  # fmt: skip
            return
        known = [count for count in counts if count is not None]
        adam(
            values, gradients, [held[0] for held in slots], [held[1] for held in slots], [],
            [count.clone() for count in known], amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1],
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False, foreach=False,
            decoupled_weight_decay=self.name == "adamw",
        )  # fmt: skip
        for count in {id(count): count for count in known}.values():
            count += 1

    def _route(self, name: str, live: Live) -> Route:
        """The live parts of a parameter and of its buffers. Mostly a step keeps what the last one kept."""
        if self._seen is None or self._seen[0] is not live:
            self._seen = (live, {})
        parameter, (_, seen) = self._parameters[name], self._seen
        # Numbers may be replaced under a parameter (vector_to_parameters, .to): then views of the old ones are stale.
        if name not in seen or seen[name].pointer != parameter.data_ptr():
            slots, values, rectangles = self._slots(parameter), parameter.detach(), live.rectangles(name)
            views = [
                View(here if len(rectangles) > 1 else None, values[there], [slot[there] for slot in slots])
                for there, here in rectangles
            ]
            seen[name] = Route(parameter.data_ptr(), self._restoring(name, live), views)
        return seen[name]

    def _slots(self, parameter: Tensor) -> list[Tensor]:
        """A parameter's buffers, by torch's names."""
        if self.name != "sgd":
            kinds: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        else:
            kinds = ("momentum_buffer",) if self.param_groups[0]["momentum"] else ()
        held = self.state[parameter] if kinds else {}
        for kind in kinds:
            if kind not in held:  # setdefault would fill a whole model with zeros every time
                held[kind] = torch.zeros_like(parameter)
        return [held[kind] for kind in kinds]

    def _count(self, parameter: Tensor) -> Tensor | None:
        """How many steps Adam has made on a parameter."""
        if self.name == "sgd":
            return None
        held = self.state[parameter]
        if "step" not in held:
            held["step"] = torch.zeros(())
        count: Tensor = held["step"]
        return count

    def _unowned(self, name: str, live: Live) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Dropped entries that slicing cannot leave out (flat blocks): kept aside and put back."""
        parameter = self._parameters[name]
        mask = ~torch.from_numpy(live.elements(name)).to(parameter.device)
        return [(tensor, mask, tensor[mask]) for tensor in (parameter.detach(), *self._slots(parameter))]

    def _clip(self, gradients: list[Tensor]) -> None:
        """Scale gradients to the norm, taken over one vector: the same bits however the vector is cut into tensors."""
        if self.clip is not None and gradients:
            length = torch.linalg.vector_norm(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            factor = (self.clip / (length + 1e-6)).clamp_(max=1.0)
            for gradient in gradients:
                gradient.mul_(factor)
