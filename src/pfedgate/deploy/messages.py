"""What passes between server and nodes: parcels, and what a node says of itself when the roll is called.

A parcel is some plain values as JSON, and byte strings, each one array of uint8; there is no pickle. A State or an
update is one byte string (`wire`), however many tensors it has: an array for each tensor would take several times the
bytes and the time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pfedgate.core.types import Budget, Card, DataShape
from pfedgate.engine import boundary
from pfedgate.engine.boundary import Refused, words
from pfedgate.engine.roster import Cards, budgets

ABOUT, BODIES, TEXT = "about", "bodies", "json"

Described = tuple[DataShape, tuple[str, ...] | None]


class ParcelError(Refused):
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
        if len(arrays) > boundary.CLIENTS:
            raise ParcelError(f"{len(arrays)} bodies, at most {boundary.CLIENTS} are read")
        bodies = []
        for at in range(len(arrays)):
            array = arrays[str(at)].numpy()
            if array.dtype != np.uint8 or array.ndim != 1:
                raise ParcelError(f"body {at} is {array.dtype} {array.shape}, not bytes")
            bodies.append(array.tobytes())
    except ParcelError:
        raise
    except Exception as error:  # a sender may put anything there, and reading it may fail in any way
        raise ParcelError(f"not a pfedgate message: {type(error).__name__}: {words(error)}") from error
    return Parcel(about, bodies)


@dataclass(frozen=True)
class NodeInfo(boundary.Introduction):
    """One node's answer to the roll call: its clients, their budget, and the shape of its data."""

    @property
    def ids(self) -> list[str]:
        """All clients of the node, training and novel."""
        return [*self.clients, *self.novel]

    @classmethod
    def read(cls, about: Mapping[str, Any]) -> NodeInfo:
        """An answer from outside, checked."""
        try:
            said = boundary.roll(about)
            with boundary.reading("its budget"):
                if said.budget is not None:
                    budgets(said.budget, ["one"])
        except Refused as error:
            raise ParcelError(str(error)) from error
        return cls(**vars(said))

    @property
    def data(self) -> Described:
        """The shape of its data, and the names of its classes."""
        return self.shape, self.class_names

    def only(self, wanted: Callable[[str], bool]) -> NodeInfo:
        """The answer as if the node held these clients alone."""
        clients, novel = ({c: n for c, n in group.items() if wanted(c)} for group in (self.clients, self.novel))
        return replace(self, clients=clients, novel=novel)

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


class Roll:
    """All clients of a fleet, as far as their nodes have answered: what a server knows instead of data."""

    def __init__(self, nodes: Sequence[NodeInfo], known: Described | None = None) -> None:
        """`known` is the data of an earlier start; without it most nodes decide which data is meant."""
        # The order must not depend on which node answered first.
        everyone = sorted(nodes, key=lambda node: sorted(node.ids))
        ranked = Counter(node.data for node in everyone).most_common()
        self.data = known or ranked[0][0]
        self.shape = self.data[0]
        self.nodes = [node for node in everyone if node.data == self.data]
        self.refusals: list[str] = []
        ours = NodeInfo({"": 0}, {}, None, *self.data).plain()["data"]
        for other in [node for node in everyone if node.data != self.data]:
            theirs = other.plain()["data"]
            differences = [f"{key} {ours[key]!r} and {theirs[key]!r}" for key in ours if ours[key] != theirs[key]]
            first = repr(self.nodes[0].ids[0]) if self.nodes else "of the run so far"
            self.refusals.append(
                words(
                    f"clients {first} and {other.ids[0]!r} hold data of different shapes ({'; '.join(differences)}): "
                    "the other takes no part; where nodes hold different classes, list all in deploy.class_names"
                )
            )
        if not self.nodes or (known is None and self.refusals and ranked[1][1] == ranked[0][1]):
            raise ValueError(self.refusals[0])  # nobody is left, or as many say one thing as the other

    def joined(self, before: Roll | None) -> Roll:
        """The roll with the clients of an earlier start, so that one who is away now is sampled as before."""
        if before is None:
            return self
        present = {client for node in self.nodes for client in node.ids}
        absent = []
        for node in before.nodes:
            if (rest := node.only(lambda client: client not in present)).ids:
                absent.append(rest)
        whole = Roll([*self.nodes, *absent], self.data)
        whole.refusals += self.refusals
        return whole

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
