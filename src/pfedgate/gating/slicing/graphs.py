"""A module's graph, and whether it shows all that the module does.

`torch.fx` follows a forward with stand-ins for tensors. What it misses (gradients switched off, hooks, attributes,
random numbers, buffers that move) is found by running module and graph side by side on an example; then the module
counts as untraceable, with the reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from pfedgate.gating.slicing.steps import Untraceable, has_hooks


def hooked(model: nn.Module) -> set[str]:
    """Layers with hooks, which are called as they are. The graph has no place for those of a container."""
    found = {place for place, module in model.named_modules(remove_duplicate=False) if has_hooks(module)}
    for place in found:
        if not place or not _Tracer().is_leaf_module(model.get_submodule(place), place):
            raise Untraceable(f"hooks run around {place or 'the model itself'}")
    return found


class _Buffer(fx.Proxy):
    """A buffer that the forward reads: its numbers may be loaded anew, its shape is known."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, value: Tensor) -> None:
        super().__init__(node, tracer)
        self.shape, self.ndim, self._value = value.shape, value.ndim, value

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return len(self._value)


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__(param_shapes_constant=True)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """What a forward reads of its modules; torch.fx would take the numbers of a buffer for constants."""
        if isinstance(attr_val, Tensor) and not isinstance(attr_val, nn.Parameter):
            for name, buffer in self.root.named_buffers():
                if buffer is attr_val:
                    if name not in parameter_proxy_cache:
                        made = self.create_proxy(
                            "get_attr", name, (), {}, proxy_factory_fn=lambda node: _Buffer(node, self, attr_val)
                        )
                        parameter_proxy_cache[name] = made
                    return parameter_proxy_cache[name]
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def graphs(model: nn.Module) -> tuple[fx.Graph, fx.Graph, dict[str, Tensor]]:
    """The graphs in training and in evaluation, and tensors that the forward makes. `model` is changed: give a copy."""
    try:
        own = type(model)
        # One input, the others at their defaults: fx would otherwise trace `mask is not None` as true.
        forward = {"forward": lambda self, x: own.forward(self, x)}
        model.__class__ = type(own.__name__, (own,), {**forward, "__module__": own.__module__})
        (train, made), (evaluate, again) = [_trace(model, training) for training in (True, False)]
    except Untraceable:
        raise
    except Exception as error:  # fx raises many kinds of errors on untraceable code; each means the same to us
        raise Untraceable(f"torch.fx cannot trace it: {first_line(error)}") from None
    same = made.keys() == again.keys() and all(alike(made[k], again[k]) for k in made)
    if not same or _signature(train) != _signature(evaluate):
        raise Untraceable("its forward takes different steps in training and in evaluation")
    vars(model).update(made)
    return train, evaluate, made


def _trace(model: nn.Module, training: bool) -> tuple[fx.Graph, dict[str, Tensor]]:
    before = _attributes(model)
    with mode(model, training), quiet(None) as drawn:
        graph = _Tracer().trace(model)
        if drawn():
            raise Untraceable("its forward draws random numbers that are no part of its graph")
    new = set(vars(model)) - {name for module, name in before if module is model}
    made = {name: vars(model).pop(name) for name in new if name.startswith("_tensor_constant")}
    after = _attributes(model)
    for module, name in after.keys() | before.keys():
        if after.get((module, name), after) is not before.get((module, name), before):
            raise Untraceable(f"its forward sets an attribute ({type(module).__name__}.{name})")
    return graph, made


def _attributes(model: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Everything that modules hold; a graph would not set it."""
    held = {(module, name): value for module in model.modules() for name, value in vars(module).items()}
    return held | {
        (module, f"{name} (a buffer)"): b for module in model.modules() for name, b in module._buffers.items()
    }


def alike(a: Any, b: Any) -> bool:
    """Whether two results are the same but for rounding."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return bool(a == b) if not isinstance(a, Tensor) and not isinstance(b, Tensor) else False
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def _signature(graph: fx.Graph) -> list[Any]:
    """Steps and their arguments; booleans and rates may differ between training and evaluation (dropout)."""

    def plain(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return ("node", arg.name)
        return type(arg).__name__ if isinstance(arg, bool | float) else arg

    return [
        (n.op, n.target, n.name, fx.node.map_aggregate(n.args, plain), fx.node.map_aggregate(n.kwargs, plain))
        for n in graph.nodes
    ]


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Train or eval mode for all submodules; every one gets its own flag back afterwards."""
    flags = {module: module.training for module in model.modules()}
    try:
        model.train(training)
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def quiet(device: torch.device | None) -> Iterator[Any]:
    """Random generators (torch's, Python's, numpy's) get their state back; yields "was anything drawn?"."""
    devices = [device] if device is not None and device.type == "cuda" else []
    others, main = random.getstate(), torch.random.get_rng_state()
    numbers: Any = np.random.get_state()

    def drawn() -> bool:
        now: Any = np.random.get_state()
        same = np.array_equal(numbers[1], now[1]) and numbers[2:] == now[2:] and others == random.getstate()
        return not (same and torch.equal(main, torch.random.get_rng_state()))

    with torch.random.fork_rng(devices=devices):
        try:
            yield drawn
        finally:
            random.setstate(others)
            np.random.set_state(numbers)


@contextmanager
def _eager_attention() -> Iterator[None]:
    """Attention's fused path for inference hides its FLOPs from the counter."""
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Example(fx.Interpreter):
    """Runs the graph on the example once and keeps every value's shape."""

    def __init__(self, root: nn.Module, graph: fx.Graph, example: Tensor) -> None:
        super().__init__(root, graph=graph)
        self.root, self.example = root, example
        self.values: dict[str, Any] = {}
        self.counter: Any = None
        self.flops: dict[str, float] = {}
        # From the same random state; code that the graph does not show makes the two differ.
        for what, *found in zip(("result", "gradient", "state"), self._told(root), self._told(self.run), strict=True):
            if len(found[0]) != len(found[1]) or not all(alike(a, b) for a, b in zip(*found, strict=True)):
                raise Untraceable(f"its graph gives another {what} than its forward")

    def _told(self, run: Callable[[Tensor], Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """What a pass returns, its gradients (no_grad and autograd.Function are no part of a graph), and buffers."""
        buffers = {name: buffer.clone() for name, buffer in self.root.named_buffers()}
        with torch.enable_grad():
            results = tree_leaves(self._quietly(run))
            roots = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
            gradients: Any = ()
            if roots:
                total = sum((r * torch.linspace(-1, 2, r.numel(), device=r.device).view(r.shape)).sum() for r in roots)
                gradients = torch.autograd.grad(total, list(self.root.parameters()), allow_unused=True)  # type: ignore[arg-type]
        moved = [buffer.clone() for buffer in self.root.buffers()]
        with torch.no_grad():
            for name, buffer in self.root.named_buffers():
                buffer.copy_(buffers[name])
        return [r.detach() if isinstance(r, Tensor) else r for r in results], list(gradients), moved

    def _quietly(self, run: Callable[[Tensor], Any]) -> Any:
        with quiet(self.example.device), _eager_attention(), mode(self.root, False):
            try:
                return run(self.example.clone())
            except Exception as error:  # whatever a user's forward raises
                raise Untraceable(f"its graph does not run on the example: {first_line(error)}") from None

    def run_node(self, n: fx.Node) -> Any:
        before = self.counter.get_total_flops() if self.counter else 0
        value = super().run_node(n)
        self.values[n.name] = tree_map_only(Tensor, lambda t: t.detach().to("meta"), value)
        if self.counter:
            self.flops[n.name] = float(self.counter.get_total_flops() - before)
        return value

    def count(self, node: fx.Node) -> float:
        """FLOPs of a node. Counted only when first asked for: the counter loads a compiler, which takes seconds."""
        if not self.flops:
            self.counter = FlopCounterMode(display=False)
            with self.counter, torch.no_grad():
                self._quietly(self.run)
        return self.flops[node.name]


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return (str(error).splitlines() or [type(error).__name__])[0]
