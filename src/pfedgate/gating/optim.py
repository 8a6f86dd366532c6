"""An optimiser that steps on live blocks only.

A dropped block has no gradient, but momentum and weight decay of an ordinary optimiser would still move it: then
every block changes in every round and nothing is sparse (D25 in our notes on the authors' code). Here the entries
of theta that were not live in a step, and their momentum, stay bit for bit what they were, and the step costs what
the live part costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from pfedgate.names import unknown

from .execute import cut
from .live import Live, compensation

if TYPE_CHECKING:
    from .model import GatedModel

OPTIMIZERS = ("sgd", "adam", "adamw")
View = tuple[Tensor, list[Tensor]]  # a part of a parameter, and the same part of its buffers


class LiveOptimizer:
    """SGD, Adam or AdamW on the live entries of theta, and the same kind with rate `gate_lr` on the gate.

    One step belongs to one forward pass. `clip` bounds the L2 norm of the gradients of theta and of the gate,
    separately. Weight decay applies to live entries of theta only.
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
        self.gated, self.name, self.lr, self.clip = gated, name, lr, clip
        self.momentum, self.weight_decay, self.betas, self.eps = momentum, weight_decay, betas, eps
        self.state: dict[str, Tensor] = {}  # flat and named, like every state here
        self.touched: set[bytes] = set()  # selections that were stepped on
        self._parameters = dict(gated.model.named_parameters())
        self._seen: tuple[bytes, dict[str, list[View]]] | None = None  # of the last selection
        kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=momentum),
            "adam": lambda p, lr: torch.optim.Adam(p, lr=lr, betas=betas, eps=eps),
            "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, betas=betas, eps=eps, weight_decay=0.0),
        }
        self.gate_optimizer = kinds[name](list(gated.parameters_private()), lr if gate_lr is None else gate_lr)
        gated.leaves, gated.earlier, gated.trained = {}, {}, None

    def zero_grad(self) -> None:
        """Forget gradients; before or after the forward pass, as with any optimiser."""
        for leaf in (self.gated.leaves or {}).values():
            leaf.grad = None
        self.gated.earlier = {}
        self.gate_optimizer.zero_grad()
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move what was live in the last pass with gradients, and the gate."""
        live = self.gated.trained
        if any(leaf.grad is not None for leaf in self.gated.earlier.values()):
            raise RuntimeError(
                "two passes were differentiated before one step, but their blocks differ: step after each"
            )
        found = {} if live is None else self._leaves(live)
        leaves = {name: found[name] for name in self._parameters if name in found and found[name].grad is not None}
        if live is None or not leaves:
            raise RuntimeError("nothing to step on: call the gated model and backward() first, once per step")
        for name, leaf in leaves.items():
            self._undo_compensation(name, leaf, live)
        if self.clip is not None:
            _clip([leaf.grad for leaf in leaves.values() if leaf.grad is not None], self.clip)
        self._move(leaves, live)
        self.step_gate()
        self.touched.add(live.kept.tobytes())
        self.gated.leaves, self.gated.trained = {}, None

    def _undo_compensation(self, name: str, leaf: Tensor, live: Live) -> None:
        """W' = W / c would move 1 / c^2 times too far in a step of SGD, and few live inputs would mean chaos.

        With c = sqrt(rho) a further root of the live share rho: tried on FEMNIST, better than none and than a square.
        """
        share = live.share_read(name)
        divisor = compensation(self.gated.compensate, share)
        if divisor != 1.0 and leaf.grad is not None:
            leaf.grad.mul_(divisor**2 * (share**0.5 if self.gated.compensate == "sqrt" else 1.0))

    @torch.no_grad()
    def step_gate(self) -> None:
        """A step of the gate alone; theta stays as it is."""
        if self.clip is not None:
            _clip([p.grad for p in self.gated.parameters_private() if p.grad is not None], self.clip)
        self.gate_optimizer.step()

    def memory(self) -> dict[str, Tensor]:
        """All buffers, of theta and of the gate, to go on with later (`recall`)."""
        own = {f"gate/{i}/{kind}": value for i, slots in self._gate_slots() for kind, value in slots.items()}
        return {name: value.clone() for name, value in {**self.state, **own}.items()}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Start with buffers that an optimiser like this one left behind."""
        self._seen = None
        for name, value in memory.items():
            if name.startswith("gate/"):
                _, index, kind = name.split("/")
                parameter = self.gate_optimizer.param_groups[0]["params"][int(index)]
                self.gate_optimizer.state[parameter][kind] = value.clone()
            else:
                self.state[name] = value.clone()

    def _gate_slots(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        for index, parameter in enumerate(self.gate_optimizer.param_groups[0]["params"]):
            found = self.gate_optimizer.state.get(parameter, {})
            yield index, {kind: value for kind, value in found.items() if isinstance(value, Tensor)}

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

    def _move(self, leaves: Mapping[str, Tensor], live: Live) -> None:
        """Torch's own step, once for all views of what is live: no copies of parameters or of their momentum."""
        views, gradients, aside = self._views(leaves, live), [], []
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            aside += self._unowned(name, live)
            gradients += [leaf.grad[here] for _, here in live.rectangles(name)]
        found = [view for name in leaves for view in views[name]]
        values, slots = [value for value, _ in found], [held for _, held in found]
        if self.name == "sgd":
            sgd(
                values, gradients, [held[0] if held else None for held in slots], weight_decay=self.weight_decay,
                momentum=self.momentum, lr=self.lr, dampening=0.0, nesterov=False, maximize=False, foreach=False,
            )  # fmt: skip
        else:
            steps = {name: self.state.setdefault(f"step/{name}", torch.zeros(())) for name in leaves}
            adam(
                values, gradients, [held[0] for held in slots], [held[1] for held in slots], [],
                [steps[name].clone() for name in leaves for _ in views[name]], amsgrad=False, beta1=self.betas[0],
                beta2=self.betas[1], lr=self.lr, weight_decay=self.weight_decay, eps=self.eps, maximize=False,
                foreach=False, decoupled_weight_decay=self.name == "adamw",
            )  # fmt: skip
            for count in steps.values():
                count += 1
        for tensor, mask, kept in aside:
            tensor[mask] = kept

    def _views(self, names: Iterable[str], live: Live) -> Mapping[str, list[View]]:
        """The live parts of parameters and of their buffers. Mostly a step keeps what the last one kept."""
        key = live.kept.tobytes()
        if self._seen is None or self._seen[0] != key:
            self._seen = (key, {})
        found = self._seen[1]
        for name in names:
            if name not in found:
                parameter = self._parameters[name].detach()
                slots = self._slots(name, parameter)
                parts = [there for there, _ in live.rectangles(name)]
                found[name] = [(parameter[there], [slot[there] for slot in slots]) for there in parts]
        return found

    def _slots(self, name: str, parameter: Tensor) -> list[Tensor]:
        kinds = ["mean", "square"]
        if self.name == "sgd":
            kinds = ["momentum"] if self.momentum else []
        for kind in kinds:
            if f"{kind}/{name}" not in self.state:  # setdefault would fill a whole model with zeros every time
                self.state[f"{kind}/{name}"] = torch.zeros_like(parameter)
        return [self.state[f"{kind}/{name}"] for kind in kinds]

    def _unowned(self, name: str, live: Live) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Dropped entries that slicing cannot leave out (flat blocks): kept aside and put back."""
        if live.plan.axes or bool(live.kept.all()):
            return []
        parameter = self._parameters[name].detach()
        mask = ~torch.from_numpy(live.elements(name)).to(parameter.device)
        return [(tensor, mask, tensor[mask]) for tensor in (parameter, *self._slots(name, parameter))]


def _clip(gradients: list[Tensor], norm: float) -> None:
    """Scale gradients down to a norm, taken over one vector: the same bits however the vector is cut into tensors."""
    if gradients:
        length = torch.linalg.vector_norm(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        factor = (norm / (length + 1e-6)).clamp_(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
