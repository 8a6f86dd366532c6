"""Captures a forward that `torch.fx` cannot follow, with `torch.export`: the operations that ran, for any batch size.

`torch.export` runs the forward itself on tensors without numbers, so that control flow, keyword arguments, subclasses
and dataclasses are no obstacle. It writes ATen operations. They are put in the words of the rules: functions of
`torch.nn.functional` and methods of tensors, parameters by their names. Training and evaluation are captured apart.
"""

from __future__ import annotations

import io
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from pfedgate.gating.inputs import Given, repeated

Put = Callable[..., Any]

_LEAST = 2  # torch.export takes sizes of 0 and 1 for constants


def capture(model: nn.Module, example: Given, constants: dict[str, Tensor]) -> fx.Graph:
    """The graph of a forward in the mode that the model is in; tensors that it makes once are added to `constants`."""
    from torch.export import Dim, ShapesCollection, export

    given = (example if len(example) >= _LEAST else repeated(example)).clone()
    args, kwargs = ((given,), {}) if isinstance(given, Tensor) else (given.args, given.kwargs)
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, Tensor) and tensor.ndim and len(tensor) == len(given):
            axes = range(min(2, tensor.ndim)) if not tensor.is_floating_point() else range(1)
            shapes[tensor] = {axis: Dim.AUTO for axis in axes if tensor.shape[axis] >= _LEAST}
    with warnings.catch_warnings(), _silence():
        warnings.simplefilter("ignore")
        dynamic = shapes.dynamic_shapes(model, args, kwargs)  # type: ignore[no-untyped-call]
        program = export(model, args, kwargs, dynamic_shapes=dynamic, strict=False)
    known = {name: value for name, value in program.constants.items() if isinstance(value, Tensor)}
    return _Writer(program, known, constants, len(given)).graph


@contextmanager
def _silence() -> Iterator[None]:
    """Without the pages that torch.export prints about code that it cannot capture: the error says enough."""
    before, nowhere = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield
    finally:
        logging.disable(before)


class _Writer:
    """Writes the graph of an exported program anew, in the words of the rules."""

    def __init__(self, program: Any, known: dict[str, Tensor], constants: dict[str, Tensor], batch: int) -> None:
        self.graph, self.batch = fx.Graph(), batch
        self.known, self.constants = known, constants
        self.attributes: dict[str, fx.Node] = {}
        self.own = set(program.state_dict)
        values: dict[fx.Node, Any] = {}
        for spec, node in zip(program.graph_signature.input_specs, program.graph.nodes, strict=False):
            if spec.kind.name == "USER_INPUT":
                values[node] = self.graph.placeholder(node.name)
                values[node].meta["sizes"] = self.sizes(node.meta["val"])
        for spec, node in zip(program.graph_signature.input_specs, program.graph.nodes, strict=False):
            if spec.kind.name != "USER_INPUT":
                values[node] = spec.target
        flat = self.follow(program.graph_module, values)
        spec = program.call_spec.out_spec
        self.graph.keys = list(program.call_spec.in_spec.child(1).context or ())  # type: ignore[attr-defined]

        def unflatten(*leaves: Any) -> Any:
            return tree_unflatten(leaves, spec)

        if spec.is_leaf():
            self.graph.output(flat[0])
        else:
            unflatten.unflattens = True  # type: ignore[attr-defined]
            self.graph.output(self.graph.call_function(unflatten, tuple(flat)))
        self.clean()

    def sizes(self, value: Any) -> Any:
        """Which sizes of an input are open (None); what is no tensor stays as it is."""
        if not isinstance(value, Tensor):
            return value
        sizes = tuple(size if isinstance(size, int) else None for size in value.shape)
        if sizes and sizes[0] == self.batch:
            raise ValueError(f"it works for batches of {sizes[0]} only (say x.shape[0], not len(x))")
        return sizes

    def read(self, name: str) -> fx.Node:
        """A parameter, buffer or constant, read where it is first needed."""
        if name not in self.attributes:
            place = name
            if name in self.known and name not in self.own:
                place = f"_tensor_constant_{name.replace('.', '_')}"
                self.constants[place] = self.known[name]
            self.attributes[name] = self.graph.get_attr(place)
        return self.attributes[name]

    def follow(self, module: Any, values: dict[fx.Node, Any]) -> Any:
        """Write the nodes of a module; returns its result."""

        def value(node: fx.Node) -> Any:
            held = values[node]
            return self.read(held) if isinstance(held, str) else held

        for node in module.graph.nodes:
            if node in values:
                continue
            if node.op == "output":
                return fx.node.map_arg(node.args[0], value)
            if node.op == "get_attr":
                held = getattr(module, str(node.target))
                values[node] = held if not isinstance(held, Tensor) else self._constant(f"{node.target}", held)
            elif node.op == "call_function":
                name = getattr(node.target, "__name__", "")
                if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
                    inner = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node))
                    body, given = values[node.args[inner]], [value(arg) for arg in node.args[inner + 1 :]]
                    holes = [n for n in body.graph.nodes if n.op == "placeholder"]
                    values[node] = self.follow(body, dict(zip(holes, given, strict=True)))
                elif name.startswith(("_assert", "sym_constrain", "_check")):
                    values[node] = None
                else:
                    values[node] = self.write(node, *fx.node.map_arg((node.args, node.kwargs), value))
        raise AssertionError("a graph without output")

    def _constant(self, name: str, tensor: Tensor) -> str:
        self.known[name] = tensor
        return name

    def write(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """One operation in the words of the rules; as it is where they have no word for it."""
        target: Any = node.target
        if target is operator.getitem and isinstance(args[0], tuple | list):
            return args[0][args[1]]
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            return self.graph.call_function(target, args, kwargs)
        name = target._schema.name.partition("::")[2]
        if name == "copy_" and args[0].op == "get_attr":
            raise ValueError(f"its forward sets a buffer ({args[0].target})")
        kwargs = {k: v for k, v in kwargs.items() if v is not None and k not in ("pin_memory", "layout", "implicit")}
        if name in _WORDS:
            return _WORDS[name](self.graph, args, kwargs)
        base = name.rstrip("_")
        if hasattr(F, base) and base in _FUNCTIONS:
            options = {"inplace": True} if name.endswith("_") else {}
            return self.graph.call_function(getattr(F, base), args, {**kwargs, **options})
        if name in _TORCH:
            return self.graph.call_function(getattr(torch, name), args, kwargs)
        first = target._schema.arguments[0].name if target._schema.arguments else ""
        if first == "self" and name in _METHODS:
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(target, node.args and args, dict(kwargs))

    def clean(self) -> None:
        """Leave out what nothing reads, but for what writes in place."""
        for node in reversed(self.graph.nodes):
            name = str(getattr(node.target, "__name__", node.target))
            changes = name.rstrip("0123456789").endswith("_") or node.target is F.batch_norm
            changes = changes or bool(node.kwargs.get("inplace")) or "_." in str(node.target)
            if not node.users and node.op not in ("placeholder", "output") and not changes:
                self.graph.erase_node(node)


def _call(target: Any, order: tuple[int, ...]) -> Put:
    """A function that takes its arguments in another order."""

    def put(graph: fx.Graph, args: Any, kwargs: Any) -> Any:
        taken = [args[i] if i < len(args) else None for i in order]
        return graph.call_function(target, tuple(taken), kwargs)

    return put


def _embedding(graph: fx.Graph, args: Any, kwargs: Any) -> Any:
    weight, ids, padding, scale, sparse = (*args, -1, False, False)[: len(args)] + (-1, False, False)[len(args) - 2 :]
    padding = None if padding == -1 else padding
    return graph.call_function(F.embedding, (ids, weight, padding, None, 2.0, scale, sparse), kwargs)


def _slice(graph: fx.Graph, args: Any, kwargs: Any) -> Any:
    x, dim, start, stop, step = (*args, 0, None, None, 1)[: len(args)] + (0, None, None, 1)[len(args) - 1 :]
    stop = None if stop == sys.maxsize else stop
    start = None if start == 0 else start
    if start is None and stop is None and step == 1:
        return x
    if dim < 0:
        return graph.call_function(torch.ops.aten.slice.Tensor, args, kwargs)
    part = slice(start, stop, None if step == 1 else step)
    return graph.call_function(operator.getitem, (x, (*[slice(None)] * dim, part)))


def _select(graph: fx.Graph, args: Any, kwargs: Any) -> Any:
    x, dim, index = args
    if dim < 0:
        return graph.call_function(torch.ops.aten.select.int, args, kwargs)
    return graph.call_function(operator.getitem, (x, (*[slice(None)] * dim, index)))


def _to(graph: fx.Graph, args: Any, kwargs: Any) -> Any:
    kinds = [a for a in args[1:] if isinstance(a, torch.dtype | torch.device)]
    options = {k: v for k, v in kwargs.items() if k in ("dtype", "device", "memory_format")}
    return graph.call_method("to", (args[0], *kinds), options)


def _method(name: str) -> Put:
    return lambda graph, args, kwargs: graph.call_method(name, args, kwargs)


_WORDS: dict[str, Put] = {
    "batch_norm": _call(F.batch_norm, (0, 3, 4, 1, 2, 5, 6, 7)),
    "layer_norm": _call(F.layer_norm, (0, 1, 2, 3, 4)),
    "group_norm": _call(F.group_norm, (0, 1, 2, 3, 4)),
    "rms_norm": _call(F.rms_norm, (0, 1, 2, 3)),
    "instance_norm": _call(F.instance_norm, (0, 3, 4, 1, 2, 5, 6, 7)),
    "embedding": _embedding,
    "split_with_sizes": _method("split"),
    "constant_pad_nd": lambda graph, args, kwargs: graph.call_function(F.pad, (*args[:2], "constant", *args[2:])),
    "slice": _slice,
    "select": _select,
    "to": _to,
    "_to_copy": _to,
    "alias": lambda graph, args, kwargs: args[0],
    "sym_size": _method("size"),
    "relu_": lambda graph, args, kwargs: graph.call_function(torch.relu_, args, kwargs),
}
_FUNCTIONS = {
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "dropout",
    "relu", "gelu", "silu", "mish", "hardswish", "hardtanh", "hardsigmoid", "leaky_relu", "relu6", "selu", "softplus",
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "scaled_dot_product_attention", "pad", "softmax", "log_softmax",
    "prelu", "glu", "pixel_shuffle", "pixel_unshuffle", "tanhshrink",
}  # fmt: skip
_TORCH = {"addmm", "cat", "stack", "where", "matmul", "bmm", "baddbmm", "einsum", "arange"}
_METHODS = {
    "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "pow", "neg", "abs", "exp", "log", "sqrt", "rsqrt",
    "tanh", "sigmoid", "sigmoid_", "clamp", "clamp_min", "clamp_max", "cos", "sin", "erf", "square", "view", "reshape",
    "flatten", "transpose", "permute", "unsqueeze", "squeeze", "expand", "movedim", "t", "contiguous", "clone",
    "detach", "type_as", "mean", "sum", "amax", "amin", "max", "min", "split", "chunk", "unbind", "tanh_", "roll",
    "masked_fill", "repeat", "flip", "unflatten",
}  # fmt: skip
