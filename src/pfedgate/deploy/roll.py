"""The roll call: what a node tells of itself, and what the server knows once all have answered.

A node tells the ids of its clients, how many training samples each has, its budget, and the shape of the data, which
all must agree on. That is all a server needs to build the model; it never has data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfedgate.core.seeds import generator
from pfedgate.core.types import Budget, Card
from pfedgate.deploy.parcels import ParcelError
from pfedgate.engine.roster import Cards, budgets

TYPES = {str(kind).removeprefix("torch."): kind for kind in (torch.uint8, torch.float32, torch.int64, torch.int32)}
SHAPE = ("raw_shape", "raw_type", "shape", "prepared_shape", "prepared_type", "classes", "class_names")


@dataclass(frozen=True)
class Told:
    """One node's answer."""

    clients: Mapping[str, int]  # id -> training samples
    novel: Mapping[str, int]
    budget: Any  # None: the recipe's
    data: Mapping[str, Any]  # the keys of SHAPE

    def ids(self) -> list[str]:
        """Everyone it holds."""
        return [*self.clients, *self.novel]

    @classmethod
    def read(cls, about: Mapping[str, Any]) -> Told:
        """An answer from outside, checked."""
        try:
            groups = [
                {str(client): int(n) for client, n in dict(about[group]).items()} for group in ("clients", "novel")
            ]
            data = {name: about["data"][name] for name in SHAPE}
            if any(n < 0 for group in groups for n in group.values()):
                raise ValueError("a client with fewer than no samples")
            for name in ("raw_type", "prepared_type"):
                if data[name] not in TYPES:
                    raise ValueError(f"inputs of type {data[name]!r}")
            for name in ("raw_shape", "shape", "prepared_shape"):
                data[name] = [int(size) for size in data[name]]
            if not groups[0] and not groups[1]:
                raise ValueError("it holds no client")
            if isinstance(about.get("budget"), str):
                raise ValueError("a budget is a number or a table")  # a path would name a file of the server's
            if about.get("budget") is not None:
                budgets(about["budget"], ["one"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ParcelError(f"its answer to the roll call cannot be used: {error}") from error
        return cls(groups[0], groups[1], about.get("budget"), data)

    def plain(self) -> dict[str, Any]:
        """As JSON has it; `read` is the way back."""
        return {
            "clients": dict(self.clients), "novel": dict(self.novel), "budget": self.budget, "data": dict(self.data)
        }  # fmt: skip


class Roll:
    """All clients of a fleet. To a recipe it is a federation without data: shapes and types only."""

    def __init__(self, answers: Sequence[Told]) -> None:
        first = answers[0].data
        for told in answers[1:]:
            wrong = [name for name in SHAPE if told.data[name] != first[name]]
            if wrong:
                said = "; ".join(f"{name} {first[name]!r} and {told.data[name]!r}" for name in wrong)
                raise ValueError(
                    f"clients {answers[0].ids()[0]!r} and {told.ids()[0]!r} hold data of different shapes ({said}); "
                    "where nodes hold different classes, list all of them as deploy.class_names"
                )
        self.answers, self.data = list(answers), first

    @classmethod
    def of(cls, told: Mapping[int, Told]) -> Roll:
        """From the answers of nodes, in an order that does not depend on who answered first."""
        return cls(sorted(told.values(), key=lambda one: sorted(one.ids())))

    def joined(self, before: Roll | None) -> Roll:
        """With the clients of an earlier start, so that a client who is away now is still sampled as then."""
        if before is None:
            return self
        here = {client for told in self.answers for client in told.ids()}
        old = []
        for told in before.answers:
            kept = [{c: n for c, n in group.items() if c not in here} for group in (told.clients, told.novel)]
            if any(kept):
                old.append(Told(kept[0], kept[1], told.budget, told.data))
        return Roll(sorted([*self.answers, *old], key=lambda one: sorted(one.ids())))

    def cards(self, budget: Any, seed: int) -> Cards:
        """Everybody's card: budgets as the recipe has them, except where a node brings its own."""
        groups = []
        for group in ("clients", "novel"):
            sizes = {client: n for told in self.answers for client, n in getattr(told, group).items()}
            own = {c: t.budget for t in self.answers for c in getattr(t, group) if t.budget is not None}
            ids = sorted(sizes)
            missing = [client for client in ids if client not in own]
            # As in one process, where a distribution is dealt out to everybody.
            given: dict[str, Budget] = dict(zip(ids, budgets(budget, ids, seed), strict=True)) if missing else {}
            given |= {client: budgets(value, [client])[0] for client, value in own.items()}
            groups.append([Card(client, sizes[client], given[client]) for client in ids])
        return Cards(*groups)

    # -- what `experiment.plan` asks of a federation
    @property
    def clients(self) -> list[str]:
        """Everybody who trains."""
        return sorted(client for told in self.answers for client in told.clients) or ["nobody"]

    @property
    def novel(self) -> list[str]:
        """Everybody who is held out."""
        return sorted(client for told in self.answers for client in told.novel)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input as a model sees it."""
        return tuple(self.data["shape"])

    @property
    def classes(self) -> int:
        """How many."""
        return int(self.data["classes"])

    def part(self, client: str, name: str) -> Blank:
        """One sample of zeros: shape and type, nobody's data."""
        return Blank(torch.zeros((1, *self.data["raw_shape"]), dtype=TYPES[self.data["raw_type"]]))

    def prepare(self, x: Tensor) -> Tensor:
        """A batch of noise of the shape that nodes' batches have."""
        shape, kind = (len(x), *self.data["prepared_shape"]), TYPES[self.data["prepared_type"]]
        if not kind.is_floating_point:
            return torch.zeros(shape, dtype=kind)  # tokens: 0 is in every vocabulary
        return torch.randn(shape, generator=generator(0, "example"), dtype=kind)


@dataclass(frozen=True)
class Blank:
    """A part without data."""

    x: Tensor
    n: int = 1

    @property
    def y(self) -> Tensor:
        """A label of nobody."""
        return torch.zeros(1, dtype=torch.int64)
