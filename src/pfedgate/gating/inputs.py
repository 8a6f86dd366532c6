"""What a model is given: mostly one tensor; else `Inputs`, arguments and keyword arguments of any structure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Union

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

Given = Union[Tensor, "Inputs"]


class Inputs:
    """Several inputs of a model, for as many samples each: `len`, slices of samples and devices work as of a tensor.

    What has another length than the tensor that the gate reads belongs to all samples: it is never cut.

    >>> both = Inputs((), {"ids": torch.ones(4, 7).long(), "mask": torch.ones(4, 7)})
    >>> len(both), both[:2].kwargs["mask"].shape, both.seen.shape
    (4, torch.Size([2, 7]), torch.Size([4, 7]))
    """

    def __init__(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = tuple(args), {name: value for name, value in kwargs.items() if value is not None}
        tensors = [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor) and t.ndim > 1]
        if not tensors:
            raise TypeError("none of the inputs is a tensor with a batch axis first")
        tokens = [t for t in tensors if not t.is_floating_point()]
        # Tokens come with masks, which say less than they; what comes with images or signals says less than those.
        first = next((t for t in tensors if t.is_floating_point() and t.ndim > 2), None)
        self.seen: Tensor = first if first is not None else (tokens or tensors)[0]  # what the gate reads

    def __len__(self) -> int:
        return len(self.seen)

    @property
    def shape(self) -> torch.Size:
        return self.seen.shape

    @property
    def ndim(self) -> int:
        return self.seen.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.seen.dtype

    @property
    def device(self) -> torch.device:
        return self.seen.device

    def __getitem__(self, rows: slice | Tensor) -> Inputs:
        return self._map(lambda t: t[rows] if self._is_batch(t) else t)

    def clone(self) -> Inputs:
        """Copies of all tensors."""
        return self._map(Tensor.clone)

    def repeated(self) -> Inputs:
        """The same, and the first sample once more."""
        return self._map(lambda t: torch.cat([t, t[:1]]) if self._is_batch(t) else t)

    def leaves(self, keys: Iterable[str] = ()) -> list[Any]:
        """All inputs in a row, keyword arguments in the order of `keys`."""
        order = [*keys] or [*self.kwargs]
        if set(order) != set(self.kwargs):
            raise ValueError(f"the model was wrapped for {_listed(order)}, and is given {_listed(self.kwargs)}")
        return tree_flatten((self.args, {name: self.kwargs[name] for name in order}))[0]

    def _is_batch(self, tensor: Tensor) -> bool:
        return tensor.ndim > 0 and len(tensor) == len(self)

    def _map(self, change: Any) -> Inputs:
        args, kwargs = tree_map_only(Tensor, change, (self.args, self.kwargs))
        return Inputs(args, kwargs)


def given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
    """What a model is called with, in one."""
    one = len(args) == 1 and not any(value is not None for value in kwargs.values())
    return args[0] if one and isinstance(args[0], Tensor | Inputs) else Inputs(args, kwargs)


def call(module: Any, x: Given) -> Any:
    """A module's result."""
    return module(x) if isinstance(x, Tensor) else module(*x.args, **x.kwargs)


def functional(model: nn.Module, tensors: dict[str, Tensor], x: Given) -> Any:
    """A module's result with other parameters and buffers."""
    args, kwargs = ((x,), {}) if isinstance(x, Tensor) else (x.args, x.kwargs)
    return lend(model, tensors, args, kwargs)


def lend(module: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A module's result with other parameters and buffers, everywhere where it has them.

    Torch ties names itself, but of a module that is registered twice it does not put the parameters back.
    """
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    values = {id(own[name]): tensor for name, tensor in tensors.items()}
    everywhere = {
        f"{place}.{name}" if place else name: values[id(tensor)]
        for place, part in module.named_modules()
        for name, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None and id(tensor) in values
    }
    return torch.func.functional_call(module, everywhere, args, dict(kwargs), tie_weights=False)


def seen(x: Given) -> Tensor:
    """The tensor that a gate reads."""
    return x if isinstance(x, Tensor) else x.seen


def leaves(x: Given, keys: Iterable[str] = ()) -> list[Any]:
    """All inputs in a row."""
    return [x] if isinstance(x, Tensor) else x.leaves(keys)


def repeated(x: Given) -> Given:
    """A batch with one more sample."""
    return torch.cat([x, x[:1]]) if isinstance(x, Tensor) else x.repeated()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "positional arguments alone"
