"""What a node may send instead of its updates, and the words in which each is refused. Also run by real nodes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from pfedgate.core.types import Update
from pfedgate.deploy.messages import Parcel
from pfedgate.deploy.node import Node
from pfedgate.engine import wire
from pfedgate.runs import folder as runfolder


def altered(answer: Parcel, change: Any) -> Parcel:
    """The answer with every update in it replaced by what `change` makes of it."""
    bodies = []
    for body in answer.bodies:
        arrived = wire.decode(body)
        made = change(arrived)
        bodies.append(
            made if isinstance(made, bytes) else wire.encode(made, client=arrived.client, round=arrived.round)
        )
    return Parcel(answer.about, bodies)


def _values(change: Any) -> Any:
    def made(arrived: wire.Arrived) -> Update:
        shared = {name: change(name, value.clone()) for name, value in arrived.update.shared.items()}
        return Update(shared, arrived.update.weight, arrived.update.metrics)

    return made


def _nan(name: str, value: torch.Tensor) -> torch.Tensor:
    return value.fill_(math.nan) if value.is_floating_point() else value


def _wrong_ids(name: str, value: torch.Tensor) -> torch.Tensor:
    return value + 10_000 if name == "blocks" else value


def _same_id(name: str, value: torch.Tensor) -> torch.Tensor:
    return value.fill_(0) if name == "blocks" else value


def _short(name: str, value: torch.Tensor) -> torch.Tensor:
    return value[:-1] if name == "values" else value


def _elsewhere(**what: Any) -> Any:
    def made(arrived: wire.Arrived) -> bytes:
        return wire.encode(arrived.update, **{"client": arrived.client, "round": arrived.round, **what})

    return made


GATED_LIES = {
    "NaN": (_values(_nan), "NaN or infinity"),
    "a wrong shape": (_values(_short), "values for blocks of"),
    "block ids out of range": (_values(_wrong_ids), "block ids run from"),
    "a block id twice": (_values(_same_id), "occurs twice"),
    "another round": (_elsewhere(round=7), "that of round 8"),
    "another client": (_elsewhere(client="mallory"), "that of client 'mallory'"),
    "garbage": (lambda arrived: b"\x00" * 500, "starts with"),
    "a message cut short": (lambda arrived: b"pfg1", "too few"),
    "no weight": (lambda a: Update(a.update.shared, 0.0, a.update.metrics), "weight is 0.0"),
}


def _cut(name: str, value: torch.Tensor) -> torch.Tensor:
    return value[:-1] if value.ndim else value


def _double(name: str, value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


DENSE = {
    "NaN": (_values(_nan), "NaN or infinity"),
    "wrong shapes": (_values(_cut), "expected torch.float32"),
    "wrong types": (_values(_double), "is torch.float64"),
}


LATE = 1  # the round, from 0, whose order a late node answers when that round is over


def nonsense() -> None:
    """The node with partition-id 1 sends another kind of nonsense in each round."""
    _instead(lambda node, order, work: altered(work(), list(GATED_LIES.values())[order.about["round"]["index"]][0]))


def late() -> None:
    """The node with partition-id 1 starts to train for one round when the server has closed it, and then answers."""

    def answer(node: Node, order: Parcel, work: Callable[[], Parcel]) -> Parcel:
        at, until = order.about["round"]["index"], time.monotonic() + 600
        while at == LATE and len(runfolder.load(node.run_config["folder"]).metrics) <= at:
            assert time.monotonic() < until, "the server still waits for this node"
            time.sleep(0.2)
        return work()

    _instead(answer)


def _instead(answer: Callable[[Node, Parcel, Callable[[], Parcel]], Parcel]) -> None:
    """What this process answers to orders to train, if it is one of the node in question."""
    honest = Node.answer

    def crooked(self: Node, order: Parcel) -> Parcel:
        if self.config["partition-id"] != 1 or order.about["stage"] != "train":
            return honest(self, order)
        return answer(self, order, lambda: honest(self, order))

    Node.answer = crooked  # type: ignore[method-assign]
