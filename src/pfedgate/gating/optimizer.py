"""An optimiser that steps on live blocks only.

A dropped block has no gradient, but momentum and weight decay of an ordinary optimiser would still move it: then
every block changes in every round and nothing is sparse. Here the entries of theta that were not live in a step, and
their momentum, stay bit for bit what they were, and the step costs what the live part costs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam

from pfedgate.core.errors import unknown
from pfedgate.gating.slicing.execute import cut
from pfedgate.gating.slicing.live import Live, Pass, compensation

if TYPE_CHECKING:
    from pfedgate.gating.model import GatedModel

OPTIMIZERS = ("sgd", "adam", "adamw")
_BUFFERS = {"sgd": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq")}
_COPIED = ("defaults", "state", "param_groups", "gated", "name", "clip", "touched", "_parameters")


class View(NamedTuple):
    """A rectangle of a parameter that is live."""

    here: tuple[slice, ...] | None  # where it lies in the gradient; None: it is all of it
    value: Tensor
    buffers: list[Tensor]  # the same part of the parameter's buffers


class Route(NamedTuple):
    """Where the gradient of a parameter goes."""

    pointer: int  # to the parameter's numbers
    factor: float  # the gradient is multiplied with it
    views: list[View]


# Torch's decorator of it would load the compiler at the first call: two seconds of every process.
_add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class LiveOptimizer(torch.optim.Optimizer):
    """SGD, Adam or AdamW on the live entries of theta, and the same kind with rate `gate_lr` on the gate.

    A step goes along the gradients of all passes since the last one: of one, of all of `GatedModel.microbatches`, of
    several batches whose gradients add up. `clip` bounds the L2 norm of the gradients of theta and of the gate,
    separately. Weight decay applies to live entries of theta only; frozen parameters never move.

    To torch it is an optimiser with two groups of parameters, theta and the gate: schedules of rates, `state_dict` and
    `load_state_dict` work. But gradients of theta have the size of the live part and are not in `parameters().grad`, so
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
        gate_lr = lr if gate_lr is None else gate_lr
        for option, rate in (("lr", lr), ("gate_lr", gate_lr)):
            if not (math.isfinite(rate) and rate >= 0):
                raise ValueError(f"{option} must be a number of at least 0, got {rate!r}")
        self.gated, self.name, self.clip = gated, name, clip
        self.touched: set[bytes] = set()  # selections that were stepped on
        self._parameters = dict(gated.model.named_parameters())
        groups = [
            {"params": list(self._parameters.values()), "lr": lr, "weight_decay": weight_decay},
            {"params": list(gated.parameters_private()), "lr": gate_lr, "weight_decay": 0.0},
        ]
        # Schedules that cycle momentum look here for what there is.
        super().__init__(groups, {"momentum": momentum} if name == "sgd" else {"betas": betas, "eps": eps})
        self._begin()

    def _begin(self) -> None:
        self._passes: list[Pass] = []  # those that gradients reached since the last step
        self._routes: tuple[Live | None, dict[str, Route]] = (None, {})  # those of the last selection
        self.gated.give_passes_to(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Theta and the gate are all there is: anything else that is to be trained needs an optimiser of its own."""
        if len(self.param_groups) == 2:
            raise ValueError("a LiveOptimizer steps on theta and the gate only; use another optimiser for the rest")
        _add_param_group(self, param_group)

    def receive(self, given: Pass) -> None:
        """Gradients reach a pass of the gated model: the next step goes along them, too."""
        if not any(one is given for one in self._passes):
            self._passes.append(given)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients; before or after the forward pass, as with any optimiser."""
        for one in self._passes:
            for leaf in one.leaves.values():
                leaf.grad = None
        self._passes = []
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move what was live in the passes that gradients reached, and the gate."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        self._step_live()
        self.step_gate()
        self._passes = []
        return value

    @torch.no_grad()
    def step_gate(self) -> None:
        """A step of the gate alone; theta stays as it is."""
        moving = [parameter for parameter in self.param_groups[1]["params"] if parameter.grad is not None]
        gradients = [parameter.grad for parameter in moving]
        if self.clip is not None:
            _clip(gradients, self.clip)
        states = [self._buffers(parameter) for parameter in moving]
        self._update(self.param_groups[1], moving, gradients, [held for held, _ in states], [n for _, n in states])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on as an optimiser like this one was, rates included."""
        super().load_state_dict(dict(state_dict))
        self._routes = (None, {})

    def memory(self) -> dict[str, Tensor]:
        """All buffers, of theta and of the gate, as a flat named state to go on with later (`recall`)."""
        buffers = {}
        for place, parameter in self._places():
            for kind, value in self.state.get(parameter, {}).items():
                buffers[f"{place}/{kind}"] = value.clone()
        return buffers

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Start with buffers that an optimiser like this one left behind."""
        self._routes = (None, {})
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

    def _step_live(self) -> None:
        """A step on views of live entries: no copies of parameters or of their momentum."""
        if not self._passes:
            raise RuntimeError("nothing to step on: call the gated model and backward() first, once per step")
        lives = list(dict.fromkeys(one.live for one in self._passes))
        self.touched.update(live.mask.tobytes() for live in lives)
        live = lives[0]
        if len(lives) > 1:
            live = live.plan.live(np.logical_or.reduce([one.mask for one in lives]))
        if self._routes[0] is not live:
            self._routes = (live, {})
        routes = self._routes[1]
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():  # clipping adds up in this order
            gradient = self._gradient(name, parameter, live, whole=len(lives) == 1)
            if gradient is None:
                continue
            gradients[name] = gradient
            # Numbers may be replaced under a parameter (vector_to_parameters, .to): then views of the old are stale.
            if name not in routes or routes[name].pointer != parameter.data_ptr():
                routes[name] = self._route(name, live)
            if len(lives) == 1 and (factor := routes[name].factor) != 1.0:
                gradient.mul_(factor)
        if self.clip is not None:
            _clip(list(gradients.values()), self.clip)
        cut_through = not live.plan.axes and not live.mask.all()
        aside = self._aside(gradients, lives) if cut_through or len(lives) > 1 else []
        values, parts, buffers, counts = [], [], [], []
        for name, gradient in gradients.items():
            count = None if self.name == "sgd" else self._buffers(self._parameters[name])[1]
            for here, value, held in routes[name].views:
                values.append(value)
                parts.append(gradient if here is None else gradient[here])
                buffers.append(held)
                counts.append(count)
        self._update(self.param_groups[0], values, parts, buffers, counts)
        for tensor, mask, numbers in aside:
            tensor[mask] = numbers

    def _gradient(self, name: str, parameter: Tensor, live: Live, whole: bool) -> Tensor | None:
        """The gradient of a parameter's live entries, of all passes; not `whole`: of passes with different ones."""
        leaves = [(one.live, one.leaves[name].grad) for one in self._passes if name in one.leaves]
        parts = [(own, gradient) for own, gradient in leaves if gradient is not None]
        if parameter.grad is not None and not parts:  # masked execution leaves it there, of all passes
            gradient = cut(parameter.grad, name, live)
            return gradient if whole else gradient.mul_(self._restoring(name, live))  # one factor for all of them
        if not parts or (whole and len(parts) == 1):
            return parts[0][1] if parts else None
        total = parameter.new_zeros(live.extents[name].shape if whole else parameter.shape)
        for own, gradient in parts:
            if whole:
                total += gradient
                continue
            factor = self._restoring(name, own)
            for there, here in own.extents[name].rectangles:
                total[there].add_(gradient[here], alpha=factor)
        return total if whole else cut(total, name, live)

    def _route(self, name: str, live: Live) -> Route:
        """The live parts of a parameter and of its buffers. Mostly a step finds those of the last one.

        W' = W / c would move 1/c² times too far in a step of SGD; uncorrected, it diverges when few inputs are live.
        With c = sqrt(rho) also times the root of live units over live inputs: the rate that suits a layer grows with
        its outputs over its inputs (Yang, Simon, Bernstein: A Spectral Condition for Feature Learning, 2023), and then
        one rate suits all budgets. The root did better than the whole in our trials (what-makes-gating-work.md).
        """
        parameter, rectangles = self._parameters[name], live.extents[name].rectangles
        values, (buffers, _) = parameter.detach(), self._buffers(parameter)
        views = [
            View(here if len(rectangles) > 1 else None, values[there], [buffer[there] for buffer in buffers])
            for there, here in rectangles
        ]
        return Route(parameter.data_ptr(), self._restoring(name, live), views)

    def _restoring(self, name: str, live: Live) -> float:
        """The factor of a parameter's gradient; see `_route`."""
        read, how = live.share_read(name), self.gated.compensate
        divisor = compensation(how, read)
        return divisor**2 * (math.sqrt(live.share_written(name) / read) if how == "sqrt" else 1.0)

    def _buffers(self, parameter: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """A parameter's buffers, by torch's names, and how many steps Adam has made on it."""
        if self.name == "sgd" and not self.param_groups[0]["momentum"]:
            return [], None
        state, buffers = self.state[parameter], []
        for kind in _BUFFERS[self.name]:
            if kind not in state:  # setdefault would fill a whole model with zeros every time
                state[kind] = torch.zeros_like(parameter)
            buffers.append(state[kind])
        if self.name != "sgd" and "step" not in state:
            state["step"] = torch.zeros(())
        return buffers, state.get("step")

    def _aside(self, names: Iterable[str], lives: list[Live]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Dropped entries between live ones (flat blocks, several passes), which are put back after the step."""
        aside = []
        for name in names:
            parameter = self._parameters[name]
            alive = np.logical_or.reduce([live.elements(name) for live in lives])  # no array for a single entry
            mask = ~torch.as_tensor(alive, device=parameter.device)
            aside += [(t, mask, t[mask]) for t in (parameter.detach(), *self._buffers(parameter)[0])]
        return aside

    def _update(
        self, group: dict[str, Any], values: list[Tensor], gradients: list[Tensor], buffers: list[list[Tensor]],
        counts: list[Tensor | None],
    ) -> None:  # fmt: skip
        """Torch's own step. `counts` may name one of Adam's counts several times, once for each view."""
        if not values:
            return
        if self.name == "sgd":  # called for small networks, too, where torch.optim.sgd takes longer than its arithmetic
            if group["weight_decay"]:
                gradients = list(torch._foreach_add(gradients, values, alpha=group["weight_decay"]))
            if group["momentum"]:
                momenta = [held[0] for held in buffers]
                torch._foreach_mul_(momenta, group["momentum"])
                torch._foreach_add_(momenta, gradients)
                gradients = momenta
            torch._foreach_add_(values, gradients, alpha=-group["lr"])
            return
        steps = [count for count in counts if count is not None]
        adam(
            values, gradients, [held[0] for held in buffers], [held[1] for held in buffers], [],
            [count.clone() for count in steps], amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1],
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False, foreach=False,
            decoupled_weight_decay=self.name == "adamw",
        )  # fmt: skip
        for count in {id(count): count for count in steps}.values():
            count += 1


def _clip(gradients: list[Tensor], bound: float) -> None:
    """Scale gradients to the norm, taken over one vector: the same bits however the vector is cut into tensors."""
    if gradients:
        length = torch.linalg.vector_norm(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        factor = (bound / (length + 1e-6)).clamp_(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
