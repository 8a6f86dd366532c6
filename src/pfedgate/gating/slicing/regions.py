"""Regions: submodules that can be followed, in a forward that as a whole cannot.

The model's own forward runs. Where it calls a region, the region's program runs on live units in the place of its
forward; between regions tensors are complete, and parameters are whole. A region is the largest submodule that can be
followed: where its parent could, the parent would be one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from pfedgate.gating.inputs import Given, call, functional, given, lend

SMALLEST = 0.005  # share of the parameters from which on a submodule is worth a look


class Call(NamedTuple):
    """What a submodule was given on the example, how often it was called, and what it returned."""

    example: Given
    times: int
    result: Any


@contextmanager
def instead(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Other forwards of some modules, for a while; what is around them (hooks) stays."""
    own = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for module in forwards:
            del vars(module)["forward"]
        for module, forward in own.items():
            vars(module)["forward"] = forward


def calls(model: nn.Module, example: Given) -> dict[str, Call]:
    """The calls of all submodules in one pass; left out are those that take nothing with a batch axis."""
    asked: dict[str, Call] = {}
    strange: set[str] = set()

    def see(place: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        try:
            example = given(args, {name: value for name, value in kwargs.items() if value is not None})
        except TypeError:
            strange.add(place)
            return
        before = asked.get(place)
        if before is not None and before.example.shape != example.shape:
            strange.add(place)
        asked[place] = Call(example.clone(), 1 if before is None else before.times + 1, result)

    with ExitStack() as stack, torch.no_grad():
        for place, module in model.named_modules():
            if place:
                hook = partial(see, place)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        call(model, example.clone())
    return {place: one for place, one in asked.items() if place not in strange}


def outside(model: nn.Module, regions: Collection[str]) -> list[str]:
    """Parameters that something else than a region reads (also), by the names under which the model lists them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rest = {
        id(parameter)
        for place, module in model.named_modules(remove_duplicate=False)
        if not any(place == region or place.startswith(f"{region}.") for region in regions)
        for parameter in module.parameters(recurse=False)
    }
    return [name for key, name in names.items() if key in rest]


def work_between(model: nn.Module, example: Given, regions: Collection[str]) -> dict[str, tuple[float, float]]:
    """FLOPs, and bytes of results, of every module that is no region and in none, without what lies inside it."""
    counter = FlopCounterMode(display=False)
    own: dict[str, float] = {}
    nbytes: dict[str, float] = {}
    open_calls: list[list[float]] = []  # FLOPs before a call, and those of the calls inside it

    def enter(module: nn.Module, args: Any) -> None:
        open_calls.append([counter.get_total_flops(), 0.0])

    def leave(place: str, module: nn.Module, args: Any, result: Any) -> None:
        before, inner = open_calls.pop()
        whole = counter.get_total_flops() - before
        if open_calls:
            open_calls[-1][1] += whole
        if not any(place == region or place.startswith(f"{region}.") for region in regions):
            own[place] = own.get(place, 0.0) + whole - inner
            if not any(True for _ in module.children()):
                size = sum(t.numel() * t.element_size() for t in tree_leaves(result) if isinstance(t, Tensor))
                nbytes[place] = nbytes.get(place, 0.0) + size

    with ExitStack() as stack, torch.no_grad():
        for place, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(module.register_forward_hook(partial(leave, place)).remove)
        stack.enter_context(counter)
        call(model, example.clone())
    return {place: (own.get(place, 0.0), nbytes.get(place, 0.0)) for place in own.keys() | nbytes.keys()}


def leaves_the_model(model: nn.Module, example: Given, place: str) -> bool:
    """Whether one unit of a region's result is one number of the model's result: then it must not be dropped."""
    module, widths = model.get_submodule(place), set[int]()

    def run(hook: Callable[[nn.Module, Any, Any], Any]) -> list[Tensor]:
        handle = module.register_forward_hook(hook)
        try:
            results = tree_leaves(call(model, example.clone()))
        finally:
            handle.remove()
        return [t for t in results if isinstance(t, Tensor) and t.is_floating_point()]

    def measure(module: nn.Module, args: Any, result: Any) -> None:
        widths.update(size for t in tree_leaves(result) if isinstance(t, Tensor) for size in t.shape[1:])

    def moved(axis: int, module: nn.Module, args: Any, result: Any) -> Any:
        def move(tensor: Tensor) -> Tensor:
            if tensor.ndim <= axis or not tensor.is_floating_point():
                return tensor
            tensor = tensor.clone()
            tensor.select(axis, 0).add_(1)
            return tensor

        return tree_map_only(Tensor, move, result)

    with torch.no_grad():
        results = run(measure)
        rank = max((t.ndim for t in results if widths & set(t.shape[1:])), default=0)
        for axis in range(1, rank):
            for one, other in zip(results, run(partial(moved, axis)), strict=True):
                changed = (one != other).nonzero()
                for side in range(1, one.ndim if len(changed) else 1):
                    if one.shape[side] in widths - {1} and bool((changed[:, side] == changed[0, side]).all()):
                        return True
    return False


Outcome = tuple[list[Any], list[Any]]  # results and gradients


def outcome(model: nn.Module, example: Given) -> Outcome:
    """A pass of a model with other parameters than it has."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(_other(parameter))
    return _outcome(lambda: call(twin, example.clone()), list(twin.parameters()))


def outcome_apart(model: nn.Module, example: Given, regions: Collection[str]) -> Outcome:
    """The same where regions stand apart: for all else their parameters are NaN, and the model has its own.

    If this is another outcome, something reads past a region, or runs it once more later (checkpoints).
    """
    rest = set(outside(model, regions))
    names = {id(p): name for name, p in model.named_parameters()}
    numbers = {name: _other(p) for name, p in model.named_parameters()}
    lent = {name: p if name in rest else torch.full_like(p, torch.nan) for name, p in numbers.items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for place in regions:
        region = model.get_submodule(place)
        own = {local: numbers[names[id(p)]] for local, p in region.named_parameters()}
        forwards[region] = partial(_with, copy.deepcopy(region), own)

    def run() -> Any:
        with instead(forwards):
            return functional(model, {**lent, **buffers}, example.clone())

    return _outcome(run, list(numbers.values()))


def _outcome(run: Callable[[], Any], parameters: list[Tensor]) -> Outcome:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        values = tree_leaves(run())
        roots = [value.sum() for value in values if isinstance(value, Tensor) and value.requires_grad]
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        gradients = torch.autograd.grad(roots, wanted, allow_unused=True) if roots and wanted else ()
    return [value.detach() if isinstance(value, Tensor) else value for value in values], list(gradients)


def _other(parameter: Tensor) -> Tensor:
    """Other numbers of the same size, that a ReLU can tell apart."""
    return (parameter.detach() * -0.7).requires_grad_(parameter.requires_grad)


def _with(module: nn.Module, parameters: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    return lend(module, parameters, args, kwargs)
