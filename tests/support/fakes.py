"""A grid in this process: nodes answer at once, and a test may spoil, drop, repeat or delay what they say."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pfedgate.config.recipe import Recipe
from pfedgate.deploy import flower
from pfedgate.deploy.fleet import Fleet
from pfedgate.deploy.messages import Parcel, from_records, to_records
from pfedgate.deploy.node import Node

Spoil = Callable[[int, Parcel, Parcel], list[Parcel]]  # (node, order, answer) -> what arrives

# Six clients on three nodes, of which some are held out; a budget that differs from client to client.
TABLES: dict[str, Any] = {
    "data": {"name": "digits", "clients": 6, "samples": 300},
    "model": {"name": "mlp", "hidden": [96]},
    "train": {"rounds": 2},
    "clients": {"fraction": 0.75, "budget": {"0.5": 0.5, "1.0": 0.5}, "novel": 0.34},
    "run": {"stack": 0, "workers": 1},
}


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class FakeGrid:
    """What `Fleet` needs of a Grid."""

    def __init__(
        self,
        recipe: Recipe,
        configs: Mapping[int, Mapping[str, Any]],
        spoil: Spoil | None = None,
        **given: Any,
    ) -> None:
        self.recipe, self.configs, self.spoil, self.given = recipe, dict(configs), spoil, given
        self.gone: set[int] = set()
        self.replies: dict[str, list[Any]] = {}
        self.traffic: list[tuple[int, str, Parcel]] = []
        self._numbers = itertools.count()
        from flwr.supercore.task_identity import TaskIdentity  # set by Flower in the process of a ServerApp

        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.configs if node not in self.gone]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        from flwr.app import Message

        ids = []
        for message in messages:
            name = f"message-{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = name
            node = message.metadata.dst_node_id
            order = from_records(message.content)
            self.traffic.append((node, "down", order))
            answer = Node(self.recipe, self.configs[node], **self.given).answer(order)
            answers = [answer] if self.spoil is None else self.spoil(node, order, answer)
            self.traffic += [(node, "up", told) for told in answers]
            self.replies[name] = [Message(to_records(told), reply_to=message) for told in answers]
            ids.append(name)
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Any]:
        return [reply for name in ids for reply in self.replies.pop(name, [])]


def deployed(
    folder: Path,
    tables: Mapping[str, Any],
    *,
    nodes: int = 3,
    spoil: Spoil | None = None,
    scene: Callable[[FakeGrid], Spoil] | None = None,
    configs: Any = None,
    **given: Any,
) -> tuple[Any, FakeGrid, Clock]:
    """A run over a fake grid whose nodes keep their states under `folder`; a `scene` spoils, and changes the grid."""
    recipe = flower.read(
        {**tables, "deploy": {"nodes": nodes, "deadline": 30, "start": 30, **tables.get("deploy", {})}}
    )
    shares = {11 + at: {"partition-id": at, "num-partitions": nodes} for at in range(nodes)}
    configs = {
        node: {**own, "state-dir": str(folder / "state")}
        for node, own in (shares if configs is None else configs).items()
    }
    grid, clock = FakeGrid(recipe, configs, spoil, **given), Clock()
    grid.spoil = scene(grid) if scene else spoil
    fleet = Fleet(grid, recipe.deploy, clock=clock, sleep=clock.sleep)
    return flower.serve(grid, recipe, str(folder / "run"), fleet=fleet), grid, clock
