"""What a page leaves out when it would become too large, in steps: what is missed least goes first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Content = Mapping[str, Any]
WHY = "they were left out to keep this file small"
COPIES = ("latex", "markdown", "csv")
TABLES = ("table", "clients", "differences", "seeds")


def lean(content: Content) -> dict[str, Any]:
    """The same page in fewer bytes: scripts read the text of a cell, not its value, and ask whether it is the best."""
    return {**content, **{name: _bare(content[name]) for name in TABLES if content[name]}}


def _bare(table: Content) -> dict[str, Any]:
    def cell(full: Content) -> dict[str, Any]:
        return {"text": full["text"], **({"best": True} if full["best"] else {})}

    return {**table, "rows": [{**row, "cells": [cell(full) for full in row["cells"]]} for row in table["rows"]]}


def _each_run(change: Callable[[Content], Content]) -> Callable[[Content], dict[str, Any]]:
    return lambda content: {**content, "runs": [{**run, **change(run)} for run in content["runs"]]}


def _no_weights(run: Content) -> Content:
    gates = run["gates"]
    if gates is None or gates["weights"] is None:
        return {}
    return {"gates": {**gates, "weights": None, "importance": None, "reason": gates["reason"] or WHY}}


def _no_copies(content: Content) -> dict[str, Any]:
    return {**content, "clients": {key: part for key, part in content["clients"].items() if key not in COPIES}}


def thin(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many of some values, evenly spaced, the first and the last among them.

    >>> thin(list(range(10)), 4), thin([1, 2], 4)
    ([0, 3, 6, 9], [1, 2])
    """
    if len(values) <= most:
        return list(values)
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]


def _thinner(most: int) -> Callable[[Content], dict[str, Any]]:
    def change(run: Content) -> Content:
        told = {
            part: {name: thin(values, most) for name, values in run[part].items()} for part in ("curves", "training")
        }
        if run["gates"] is None:
            return told
        gates = {**run["gates"], "rounds": thin(run["gates"]["rounds"], most)}
        gates["changes"] = thin(gates["changes"], most)
        gates["over_rounds"] = {
            layer: {
                path: {name: thin(part, most) if isinstance(part, list) else part for name, part in spread.items()}
                for path, spread in paths.items()
            }
            for layer, paths in gates["over_rounds"].items()
        }
        return {**told, "gates": gates}

    return _each_run(change)


def _no_layers(run: Content) -> Content:
    gates = run["gates"]
    if gates is None:
        return {}
    every = {name: paths for name, paths in gates["over_rounds"].items() if name == "all blocks"}
    return {"gates": {**gates, "over_rounds": every}}


# What the page says was left out, and how.
STEPS: tuple[tuple[str, Callable[[Content], dict[str, Any]]], ...] = (
    ("weights M and importances G of single blocks", _each_run(_no_weights)),
    ("the copies of the table of all clients", _no_copies),
    ("most rounds of every curve", _thinner(200)),
    ("gate weights over rounds of single layers", _each_run(_no_layers)),
    ("the table of all clients", lambda content: {**content, "clients": {}}),
    ("most rounds of every curve", _thinner(60)),
    ("gates", _each_run(lambda run: {"gates": None, "no_gates": WHY} if run["gates"] else {})),
    ("accuracy of single clients", _each_run(lambda run: {"clients": [], "novel": []})),
    (
        "samples by client and class",
        lambda content: {
            **_each_run(lambda run: {"partition": None, "no_partition": run["no_partition"] or WHY})(content),
            "partitions": [],
        },
    ),
)
