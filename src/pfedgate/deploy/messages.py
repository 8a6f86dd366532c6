"""What passes between server and nodes: parcels, and what a node says of itself when the roll is called.

A parcel is some plain values as JSON, and byte strings, each one array of uint8; there is no pickle. A State or an
update is one byte string (`wire`), however many tensors it has: an array for each tensor would take several times the
bytes and the time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pfedgate.core.kinds import kind_of
from pfedgate.core.types import Budget, Card, DataShape
from pfedgate.engine.roster import Cards, budgets

ABOUT, BODIES, TEXT = "about", "bodies", "json"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.uint8, torch.float32, torch.int64, torch.int32)}


class ParcelError(ValueError):
    """A message that is not one of ours."""


@dataclass(frozen=True)
class Parcel:
    """Plain values, and byte strings that they refer to by position."""

    about: dict[str, Any]
    bodies: Sequence[bytes] = field(default_factory=tuple)

    def body(self, at: Any) -> bytes:
        """The byte string at a position that came from outside."""
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < len(self.bodies):
            raise ParcelError(f"there is no body {at!r} among {len(self.bodies)}")
        return self.bodies[at]


def to_records(parcel: Parcel) -> Any:
    """A parcel as Flower's RecordDict."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    arrays = {str(at): Array(np.frombuffer(body, dtype=np.uint8)) for at, body in enumerate(parcel.bodies)}
    about = ConfigRecord({TEXT: json.dumps(parcel.about)})
    return RecordDict({ABOUT: about, BODIES: ArrayRecord(arrays)} if arrays else {ABOUT: about})


def from_records(records: Any) -> Parcel:
    """The parcel in a RecordDict, checked: anything else is a ParcelError that says what is wrong."""
    try:
        about = json.loads(records[ABOUT][TEXT])
        if not isinstance(about, dict):
            raise ParcelError(f"{ABOUT} is {type(about).__name__}, not a table")
        arrays = records.get(BODIES, {})
        bodies = []
        for at in range(len(arrays)):
            array = arrays[str(at)].numpy()
            if array.dtype != np.uint8 or array.ndim != 1:
                raise ParcelError(f"body {at} is {array.dtype} {array.shape}, not bytes")
            bodies.append(array.tobytes())
    except ParcelError:
        raise
    except Exception as error:  # a sender may put anything there, and reading it may fail in any way
        raise ParcelError(f"not a pfedgate message: {type(error).__name__}: {error}") from error
    return Parcel(about, bodies)


@dataclass(frozen=True)
class NodeInfo:
    """One node's answer to the roll call: its clients, their budget, and the shape of its data."""

    clients: Mapping[str, int]  # id -> training samples
    novel: Mapping[str, int]
    budget: Any  # None: the recipe's
    shape: DataShape
    class_names: tuple[str, ...] | None = None

    @property
    def ids(self) -> list[str]:
        """All clients of the node, training and novel."""
        return [*self.clients, *self.novel]

    @classmethod
    def read(cls, about: Mapping[str, Any]) -> NodeInfo:
        """An answer from outside, checked."""
        try:
            clients, novel = (
                {str(client): int(n) for client, n in dict(about[group]).items()} for group in ("clients", "novel")
            )
            if any(n < 0 for n in (*clients.values(), *novel.values())):
                raise ValueError("a client with fewer than no samples")
            if not clients and not novel:
                raise ValueError("it holds no client")
            shape, names = _shape(about["data"])
            budget = about.get("budget")
            if isinstance(budget, str):
                raise ValueError("a budget is a number or a table")  # a path would name a file of the server's
            if budget is not None:
                budgets(budget, ["one"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ParcelError(f"its answer to the roll call cannot be used: {error}") from error
        return cls(clients, novel, budget, shape, names)

    def plain(self) -> dict[str, Any]:
        """The answer in values that JSON can hold; `read` is the way back."""
        data = {
            "shape": list(self.shape.shape),
            "dtype": str(self.shape.dtype).removeprefix("torch."),
            "classes": self.shape.classes,
            "task": self.shape.kind,
            "class_names": None if self.class_names is None else list(self.class_names),
        }
        return {"clients": dict(self.clients), "novel": dict(self.novel), "budget": self.budget, "data": data}


def _shape(data: Mapping[str, Any]) -> tuple[DataShape, tuple[str, ...] | None]:
    # Journals of runs that began before 2026-11-18 name the shape of a prepared batch apart from that of a raw one.
    sizes, dtype = data.get("prepared_shape", data.get("shape")), data.get("prepared_type", data.get("dtype"))
    if dtype not in DTYPES:
        raise ValueError(f"inputs of type {dtype!r}")
    names = data["class_names"]
    kind = kind_of(str(data.get("task", "classification"))).name
    shape = DataShape(int(data["classes"]), tuple(int(size) for size in sizes or ()), DTYPES[dtype], kind)
    return shape, None if names is None else tuple(str(name) for name in names)


class Roll:
    """All clients of a fleet, as far as their nodes have answered: what a server knows instead of data."""

    def __init__(self, nodes: Sequence[NodeInfo]) -> None:
        # The order must not depend on which node answered first.
        self.nodes = sorted(nodes, key=lambda node: sorted(node.ids))
        first = self.nodes[0]
        for other in self.nodes[1:]:
            ours, theirs = first.plain()["data"], other.plain()["data"]
            differences = [f"{key} {ours[key]!r} and {theirs[key]!r}" for key in ours if ours[key] != theirs[key]]
            if differences:
                raise ValueError(
                    f"clients {first.ids[0]!r} and {other.ids[0]!r} hold data of different shapes "
                    f"({'; '.join(differences)}); where nodes hold different classes, list all of them as "
                    "deploy.class_names"
                )
        self.shape = first.shape

    def joined(self, before: Roll | None) -> Roll:
        """The roll with the clients of an earlier start, so that one who is away now is sampled as before."""
        if before is None:
            return self
        present = {client for node in self.nodes for client in node.ids}
        absent = []
        for node in before.nodes:
            clients, novel = ({c: n for c, n in g.items() if c not in present} for g in (node.clients, node.novel))
            if clients or novel:
                absent.append(NodeInfo(clients, novel, node.budget, node.shape, node.class_names))
        return Roll([*self.nodes, *absent])

    def cards(self, budget: Any, seed: int) -> Cards:
        """Everybody's card: budgets are the recipe's, except where a node brings its own."""
        groups = []
        for group in ("clients", "novel"):
            sizes = {client: n for node in self.nodes for client, n in getattr(node, group).items()}
            own = {c: node.budget for node in self.nodes for c in getattr(node, group) if node.budget is not None}
            ids = sorted(sizes)
            shares: dict[str, Budget] = {}
            if any(client not in own for client in ids):
                # A distribution is dealt out to everybody, as in one process, and then overruled.
                shares = dict(zip(ids, budgets(budget, ids, seed), strict=True))
            shares |= {client: budgets(value, [client])[0] for client, value in own.items()}
            groups.append([Card(client, sizes[client], shares[client]) for client in ids])
        return Cards(*groups)
