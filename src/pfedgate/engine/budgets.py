"""Budgets of clients from what a user writes: number, list, mapping, distribution, CSV of devices."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedgate.core.errors import unknown
from pfedgate.core.seeds import key
from pfedgate.core.types import Budget

RESOURCES = ("params", "flops", "activation_bytes", "latency_ms")


def budgets(spec: Any, ids: Sequence[str], seed: int = 0) -> list[Budget]:
    """One budget for every id, in their order.

    number          the same for all
    list            one each, in the order of `ids`
    mapping         by id, `"default"` for the rest: {"anna": 0.3, "default": 1.0}
    distribution    {0.5: 0.5, 0.1: 0.5} = half of the clients 0.5, half 0.1 (exact counts, drawn by seed)
    resources       {"params": 0.5, "latency_ms": 8} = the same bounds for all
    path to a CSV   columns `id` and `budget`, or `id` and resources (params, flops, …): one row per device

    >>> budgets({0.5: 0.5, 0.1: 0.5}, ["a", "b", "c", "d"]).count(0.1)
    2
    >>> budgets({"a": 0.3, "default": 1.0}, ["a", "b"])
    [0.3, 1.0]
    """
    if isinstance(spec, (int, float)):
        return [_number(spec)] * len(ids)
    if isinstance(spec, (str, Path)):
        return _by_id(_read(Path(spec)), ids, str(spec))
    if isinstance(spec, Mapping):
        if not spec:
            raise ValueError("an empty mapping gives no client a budget")
        if "upload" in spec and set(spec) - {"upload"} <= set(RESOURCES):
            raise ValueError("a cap on the upload is the method's, the same for all clients: set algorithm.upload")
        if all(name in RESOURCES for name in spec):
            return [_resources(spec)] * len(ids)
        shares = _distribution(spec)
        return _by_id(spec, ids, "the mapping") if shares is None else _draw(shares, ids, seed)
    if isinstance(spec, Sequence):
        if len(spec) != len(ids):
            raise ValueError(f"{len(spec)} budgets for {len(ids)} clients: give one each, or a single number")
        return [_one(value) for value in spec]
    raise TypeError(f"a budget is a number, list, mapping or path to a CSV, got {type(spec).__name__}")


def _number(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"a budget is a number > 0 (a share of the dense model if ≤ 1), got {value}")
    return number


def _resources(spec: Mapping[Any, Any]) -> dict[str, float]:
    for name in spec:
        if name not in RESOURCES:
            raise ValueError(unknown("resource", str(name), RESOURCES))
    return {str(name): _number(value) for name, value in spec.items()}


def _one(value: Any) -> Budget:
    return _resources(value) if isinstance(value, Mapping) else _number(value)


def _distribution(spec: Mapping[Any, Any]) -> dict[float, float] | None:
    """{budget: share} if this is one: all keys are numbers (TOML has them as text) and shares add up to 1."""
    try:
        shares = {float(value): float(share) for value, share in spec.items()}
    except (TypeError, ValueError):
        return None
    if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values()) < 0:
        return None
    return shares


def _draw(shares: Mapping[float, float], ids: Sequence[str], seed: int) -> list[Budget]:
    # Ranks by a hash of the id: who gets which does not depend on the order of the list.
    ranks = np.argsort(np.argsort([key(seed, "budget", client) for client in ids], kind="stable"))
    edges = np.rint(np.cumsum(list(shares.values())) * len(ids)).astype(int)
    values = [_number(value) for value in shares]
    return [values[int(np.searchsorted(edges, rank, side="right"))] for rank in ranks]


def _by_id(spec: Mapping[str, Any], ids: Sequence[str], where: str) -> list[Budget]:
    chosen: list[Budget] = []
    for client in ids:
        if client not in spec and "default" not in spec:
            raise ValueError(f"{where} has no budget for client {client!r} and no 'default'")
        chosen.append(_one(spec[client] if client in spec else spec["default"]))
    return chosen


def _read(path: Path) -> dict[str, Any]:
    """A CSV of devices: `id,budget` or `id,params,latency_ms,…`; empty cells do not bind."""
    if not path.exists():
        raise FileNotFoundError(f"no file {path}: a text budget is the path of a CSV of devices")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or "id" not in rows[0]:
        raise ValueError(f"{path}: the first line must name the columns, one of them 'id'")
    devices: dict[str, Any] = {}
    for row in rows:
        client = row.pop("id")
        if client in devices:
            raise ValueError(f"{path}: device {client!r} occurs twice")
        if row.get("budget"):
            devices[client] = _number(row["budget"])
        else:
            devices[client] = _resources({n: v for n, v in row.items() if n != "budget" and v})
    return devices
