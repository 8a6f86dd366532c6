"""What a node may send instead of its updates, and the words in which each is refused. Also run by real nodes."""

from __future__ import annotations

import json
import math
import struct
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


def _state(**entry: Any) -> Any:
    """The first entry of each update replaced by something written by hand, as no pfedgate would."""

    def made(arrived: wire.Arrived) -> bytes:
        name = next(iter(arrived.update.shared))
        honest = wire.encode(Update({}, arrived.update.weight), client=arrived.client, round=arrived.round)
        about = json.dumps({entry.get("name", name): {key: entry[key] for key in ("dtype", "shape", "data_offsets")}})
        body = struct.pack("<Q", len(about)) + about.encode() + bytes(entry["data_offsets"][1])
        return honest[: -len(wire.pack({}))] + body

    return made


def _said(**numbers: float) -> Any:
    return lambda arrived: Update(arrived.update.shared, arrived.update.weight, {**arrived.update.metrics, **numbers})


def _filled(value: float) -> Any:
    return _values(lambda name, tensor: tensor.fill_(value) if tensor.is_floating_point() else tensor)


def _crowd(arrived: wire.Arrived) -> Update:
    return Update(arrived.update.shared, 1.0, {f"number{at}": 1.0 for at in range(60_000)})


def _strangers(arrived: wire.Arrived) -> Update:
    return Update({**arrived.update.shared, **{f"t{at}": torch.zeros(1) for at in range(5000)}}, 1.0)


# What ended a run, steered it or filled its logs before there was a boundary; for any method.
HOSTILE = {
    "float8": (_state(dtype="F8_E4M3", shape=[4], data_offsets=[0, 4]), "float8"),
    "float8, another": (_state(dtype="F8_E5M2", shape=[0], data_offsets=[0, 0]), "float8"),
    "complex": (_state(dtype="C64", shape=[1], data_offsets=[0, 8]), ""),
    "bfloat16": (_state(dtype="BF16", shape=[4], data_offsets=[0, 8]), "bfloat16"),
    "a shape of 2**33": (_state(dtype="F32", shape=[2**33, 0], data_offsets=[0, 0]), ""),
    "a shape that overflows": (_state(dtype="F32", shape=[2**33, 2**33, 0], data_offsets=[0, 0]), "not a State"),
    "a name of five million letters": (
        _state(dtype="F32", shape=[0], data_offsets=[0, 0], name="n" * 5_000_000),
        "client",
    ),
    "many tensors": (_strangers, "was never sent to the client"),
    "no tensors, as bytes": (_state(dtype="U8", shape=[3], data_offsets=[0, 3]), ""),
    "values of 1e30": (_filled(1e30), "values beyond 1e+09"),
    "values of -3e38": (_filled(-3e38), "values beyond 1e+09"),
    "infinity": (_filled(math.inf), "NaN or infinity"),
    "a number called round": (_said(round=99.0), "a name of the server's own"),
    "a number called after_local": (_said(after_local=1.0), "a name of the server's own"),
    "a number called after_broadcast": (_said(after_broadcast=1.0), "a name of the server's own"),
    "a number called refused": (_said(refused=-5.0), "a name of the server's own"),
    "a number called val_accuracy": (_said(val_accuracy=1e9), "a name of the server's own"),
    "a number called client": (_said(client=1.0), "a name of the server's own"),
    "a number that ends a line": (_said(**{"x\n{}": 1.0}), "cannot be the name of a number"),
    "sums that overflow": (_said(flops=1.7e308), "is not within"),
    "work that was negative": (_said(flops=-1e15), "is not within 0"),
    "many numbers": (_crowd, "named numbers, at most"),
    "an endless weight": (lambda a: Update(a.update.shared, math.inf, a.update.metrics), "weight is inf"),
    "no weight at all": (lambda a: Update(a.update.shared, math.nan, a.update.metrics), "weight is nan"),
    "another client of many letters": (_elsewhere(client="m" * 60_000), "that of client 'mmm"),
    "a round of long ago": (_elsewhere(round=-(2**63)), "that of round -"),
}


DENSE = {
    "NaN": (_values(_nan), "NaN or infinity"),
    "wrong shapes": (_values(_cut), "expected torch.float32"),
    "wrong types": (_values(_double), "is torch.float64"),
}


LATE = 1  # the round, from 0, whose order a late node answers when that round is over


def nonsense() -> None:
    """The node with partition-id 1 sends another kind of nonsense in each round."""
    _instead(lambda node, order, work: altered(work(), list(GATED_LIES.values())[order.about["round"]["index"]][0]))


def hostile() -> None:
    """The node with partition-id 1 attacks in another way in each round, and says that its scores are a billion."""
    honest, attacks = Node.answer, list(HOSTILE.values())

    def crooked(self: Node, order: Parcel) -> Parcel:
        answer, stage = honest(self, order), order.about["stage"]
        if self.config["partition-id"] != 1 or stage == "roll":
            return answer
        at = order.about["round"]["index"]
        if stage == "evaluate":
            for entry in answer.about["clients"].values():
                for point in entry["scores"].values():
                    point["val"][2] = 1e9
            return answer
        if at == len(attacks):
            return Parcel({"error": "no\x1b[2J\nround 9: all is well " * 200_000})
        return altered(answer, attacks[at][0])

    Node.answer = crooked  # type: ignore[method-assign]


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
