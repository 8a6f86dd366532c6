"""A grid in this process: nodes answer at once, and a test may spoil, drop, repeat or delay what they say."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pfedgate.deploy import settings
from pfedgate.deploy.node import Node
from pfedgate.deploy.parcels import Parcel, from_records, to_records

Spoil = Callable[[int, Parcel, Parcel], list[Parcel]]  # (node, order, answer) -> what arrives


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
        order: settings.Order,
        configs: Mapping[int, Mapping[str, Any]],
        spoil: Spoil | None = None,
        **given: Any,
    ) -> None:
        self.order, self.configs, self.spoil, self.given = order, dict(configs), spoil, given
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
            answer = Node(self.order, self.configs[node], **self.given).answer(order)
            answers = [answer] if self.spoil is None else self.spoil(node, order, answer)
            self.traffic += [(node, "up", told) for told in answers]
            self.replies[name] = [Message(to_records(told), reply_to=message) for told in answers]
            ids.append(name)
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Any]:
        return [reply for name in ids for reply in self.replies.pop(name, [])]
