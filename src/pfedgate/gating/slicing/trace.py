"""Reads a network's graph and finds what can be left out without changing the result.

`analyse` traces a module (see `graphs.py`), follows every set of units (see `layout.py`) from the layer that writes it
to the layers that read it, and returns a `Network`. All of it happens on a copy: the user's module, its buffers, its
attributes and the random generators stay as they were.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from pfedgate.gating.slicing.analysis import Analysis
from pfedgate.gating.slicing.axes import Layout
from pfedgate.gating.slicing.graphs import Example, first_line, graphs, hooked
from pfedgate.gating.slicing.order import pool_first
from pfedgate.gating.slicing.rules.choose import Restore, choose, joins
from pfedgate.gating.slicing.steps import (
    Activation,
    Arguments,
    Network,
    Operation,
    Policy,
    Ref,
    Rule,
    Step,
    Untraceable,
    describe,
)

_INPLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}  # others end with "_"


def analyse(model: nn.Module, example: Tensor, policy: Policy) -> Network:
    """Find the units of `model` that can be left out, under a splitter's policy."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:  # a user's module may hold anything
        return Network(None, reason=f"it cannot be copied, so it was not traced ({first_line(error)})")
    try:
        known = hooked(twin)
        train, evaluate, constants = graphs(twin)
        seen = Example(twin, evaluate, example)
        network = _network(twin, train, evaluate, seen, policy)
    except Untraceable as error:
        return Network(None, reason=str(error))
    network.constants, network.hooked = constants, known
    return network


def _network(model: nn.Module, train: fx.Graph, evaluate: fx.Graph, seen: Example, policy: Policy) -> Network:
    refused: set[tuple[str, str]] = set()
    while True:
        analysis = Analysis(model, train, seen.values, seen.count, seen.example, policy, refused)
        program = analysis.run(choose)
        places, outputs = _output_layers(analysis, train, program)
        analysis.mark_outputs(places)
        more = analysis.refusals()
        if not more:
            break
        refused |= more
    _check_writes(train, program, analysis)
    for graph in (train, evaluate):  # costs, found above, stay those of the network as it is written
        pool_first(graph, program, dict(model.named_modules(remove_duplicate=False)))
    resolve = analysis.spaces.resolve
    axes = {name: {a: resolve(p) for a, p in axes.items()} for name, axes in analysis.axes.items()}
    used = {part.space for per_axis in axes.values() for parts in per_axis.values() for part in parts}
    return Network(
        _steps(train, evaluate, program, analysis),
        axes=axes,
        reads=analysis.reads,
        spaces={root: analysis.spaces[root] for root in analysis.spaces.roots() if root in used},
        operations=[Operation(o.place, o.flops, resolve(o.written), resolve(o.read)) for o in analysis.operations],
        activations=[Activation(a.place, a.nbytes, resolve(a.parts)) for a in analysis.activations],
        notes=list(dict.fromkeys(analysis.notes)),
        outputs=outputs,
        alias={s: analysis.spaces.find(s) for s in range(analysis.spaces.count)},
    )


def _check_writes(graph: fx.Graph, program: dict[str, Rule], analysis: Analysis) -> None:
    """A tensor that is written in place and read again must be the same tensor both times, not a completed copy."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not _writes_in_place(node, analysis) or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        below, found = node, node.args[0]
        copied = False
        while True:
            copied |= program[below.name].full and analysis.layout(found) is not None
            if copied and any(order[user] > order[node] for user in found.users if user is not below):
                raise Untraceable(f"{describe(node)} writes in place into a tensor that is read again later")
            rule = program[found.name]
            aliases = rule.view or isinstance(rule, Restore) or _writes_in_place(found, analysis)
            if found.op in ("placeholder", "get_attr") or not aliases or not isinstance(found.args[0], fx.Node):
                break
            below, found = found, found.args[0]


def _writes_in_place(node: fx.Node, analysis: Analysis) -> bool:
    if node.op == "call_module":
        return bool(getattr(analysis.module(node), "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_")
    named = str(getattr(node.target, "__name__", "")).endswith("_")
    known = named or node.target in _INPLACE or bool(node.kwargs.get("inplace", False))
    return node.op == "call_function" and known


def _output_layers(analysis: Analysis, graph: fx.Graph, program: dict[str, Rule]) -> tuple[set[str], set[str]]:
    """Layers whose result the network returns, possibly through views, sums or functions; and their parameters."""
    places: set[str] = set()
    names: set[str] = set()
    waiting = [n for node in graph.nodes if node.op == "output" for n in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        own = list(analysis.module(node).parameters()) if node.op == "call_module" else []
        if own:
            places.add(str(node.target))
            names |= {analysis.parameter(p) for p in own}
        elif node.op not in ("placeholder", "get_attr"):
            sources = node.all_input_nodes
            if node.target is torch.where:  # a condition is no output
                sources = [source for source in sources if source is not node.args[0]]
            waiting.extend(sources if joins(program[node.name]) else sources[:1])
    return places, names


def _steps(train: fx.Graph, evaluate: fx.Graph, program: dict[str, Rule], analysis: Analysis) -> list[Step]:
    """Values are released after their last use, as in ordinary code: else activations would outlive their need."""
    slots = {node.name: i for i, node in enumerate(train.nodes)}
    last = {source.name: node.name for node in train.nodes for source in node.all_input_nodes}
    release: dict[str, list[int]] = {}
    for name, user in last.items():
        release.setdefault(user, []).append(slots[name])

    def arguments(node: fx.Node, rule: Rule) -> Arguments:
        def ref(source: fx.Node) -> Any:
            held = analysis.layout(source) if rule.full else None
            return Ref(slots[source.name], held if isinstance(held, Layout | tuple) else None)

        args: Any = fx.node.map_arg(node.args, ref)
        kwargs: Any = fx.node.map_arg(node.kwargs, ref)
        atoms = [a for a in args if not isinstance(a, Ref)] + list(kwargs.values())
        plain = not any(isinstance(a, Ref | tuple | list | dict | slice) for a in atoms)
        plain = plain and all(a.layouts is None for a in args if isinstance(a, Ref))
        return Arguments(tuple(args), dict(kwargs), plain)

    steps = []
    for node, other in zip(train.nodes, evaluate.nodes, strict=True):
        rule = program[node.name]
        done = tuple(release.get(node.name, ()))
        steps.append(Step(slots[node.name], rule, arguments(node, rule), arguments(other, rule), done, describe(node)))
    return steps
