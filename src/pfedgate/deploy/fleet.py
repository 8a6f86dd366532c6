"""The nodes of a Flower grid, as the server sees them: who is there, what they hold, and what they answer in time.

Replies are matched by the id of the message they answer, as Flower's own error replies do not carry their node. Nothing
here waits longer than it was told to.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pfedgate.config.sections import Deploy
from pfedgate.deploy.collect import Collector
from pfedgate.deploy.parcels import Parcel, ParcelError, from_records, to_records
from pfedgate.deploy.roll import Roll, Told

POLL = 0.5  # seconds between two looks for replies
TEND = 5.0  # seconds between two looks for nodes that came back
AGAIN = 15.0  # seconds until a node that could not answer the roll call is asked again
log = logging.getLogger("flwr")  # the log that `flwr run --stream` and `flwr log` show


class QuorumError(RuntimeError):
    """Too few clients to go on; what was done so far is in the checkpoint."""


@dataclass(frozen=True)
class Failure:
    """Why a node gave no usable answer."""

    reason: str


Answer = Parcel | Failure


class Fleet:
    """The nodes of a grid and the clients they hold."""

    def __init__(
        self,
        grid: Any,
        deploy: Deploy,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.grid, self.deploy, self.clock, self.sleep = grid, deploy, clock, sleep
        self.collector = Collector(grid)
        self.homes: dict[str, int] = {}  # client -> node
        self.told: dict[int, Told] = {}  # what nodes said of themselves
        self.reasons: dict[int, str] = {}  # why nodes could not
        self._failed: dict[int, float] = {}  # and when
        self._calls: dict[str, int] = {}  # roll calls that are not answered yet

    def online(self) -> set[int]:
        """Nodes connected now, as far as Flower knows: it notices a death after about a minute."""
        return set(self.grid.get_node_ids())

    def assemble(self) -> Roll:
        """Wait for the nodes the recipe wants and ask them for their clients."""
        until = self.clock() + self.deploy.start
        while True:
            self.tend()
            if len(self.told) >= self.deploy.nodes:
                self._check_claims()
                return Roll.of(self.told)
            if self.clock() >= until:
                said = "; ".join(f"node {node}: {reason}" for node, reason in self.reasons.items())
                raise QuorumError(
                    f"{len(self.told)} of {self.deploy.nodes} nodes ready after {self.deploy.start:.0f} s "
                    f"({said or 'no other node is connected'}): start nodes, or change deploy.nodes or deploy.start"
                )
            self.sleep(POLL)

    def tend(self) -> None:
        """Ask nodes that came or came back which clients they hold, and hear those who were asked; never waits."""
        now, online = self.clock(), self.online()
        for node in set(self.told) - online:
            del self.told[node]  # asked anew if it comes back: it may hold other data then
        # A call that is not answered stays open as long as the node is there: it may only be slow.
        self.collector.forget(name for name, node in self._calls.items() if node not in online)
        self._calls = {name: node for name, node in self._calls.items() if node in online}
        for node in sorted(online - set(self.told) - set(self._calls.values())):
            if now - self._failed.get(node, -math.inf) >= AGAIN:
                self.reasons[node] = "no answer to the roll call yet"
                name = self._push(node, Parcel({"stage": "roll"}), "query", max(self.deploy.start, 60.0))
                if name:
                    self._calls[name] = node
        for name, answer in self._pull(self._calls).items():
            node = self._calls.pop(name)
            try:
                told = Told.read(parcel_of(answer).about)
            except ParcelError as error:
                self.reasons[node], self._failed[node] = str(error), now
                log.warning("node %s takes no part: %s", node, error)
                continue
            self.told[node] = told
            self.reasons.pop(node, None)
            # The newest claim holds: a node that restarted without a key has another id.
            self.homes.update(dict.fromkeys(told.ids(), node))

    def _check_claims(self) -> None:
        owners: dict[str, int] = {}
        for node, told in sorted(self.told.items()):
            for client in told.ids():
                if owners.setdefault(client, node) != node:
                    raise ValueError(
                        f"nodes {owners[client]} and {node} both hold client {client!r}: give every node its own "
                        "partition-id, or its own data with names of its own"
                    )

    def ask(self, parcels: Mapping[int, Parcel], kind: str, deadline: float) -> dict[int, Answer]:
        """One message to each node; an answer or a reason for each of them, within the deadline."""
        until, tended = self.clock() + deadline, self.clock()
        answers: dict[int, Answer] = {}
        waiting: dict[str, int] = {}
        for node, parcel in parcels.items():
            # Messages that outlive the deadline would be trained on by a node that comes back later.
            name = self._push(node, parcel, kind, max(deadline, 1.0))
            if name:
                waiting[name] = node
            else:
                answers[node] = Failure("the message could not be sent to it")
        while waiting:
            for name, answer in self._pull(waiting).items():
                answers[waiting.pop(name)] = answer
            left = until - self.clock()
            if left <= 0 or not waiting:
                break
            self.sleep(min(POLL, left))
            if self.clock() - tended >= TEND:
                self.tend()  # so that a node that comes back now takes part in the next round
                tended = self.clock()
        self.collector.forget(waiting)
        for node in waiting.values():
            answers[node] = Failure(f"no answer within {deadline:.0f} s")
        return answers

    def _push(self, node: int, parcel: Parcel, kind: str, ttl: float) -> str:
        """Send a message; its id, or nothing if it could not be sent."""
        from flwr.app import Message

        sent = list(self.grid.push_messages([Message(to_records(parcel), node, kind, ttl=ttl)]))
        return str(sent[0]) if sent and sent[0] else ""

    def _pull(self, waiting: Mapping[str, int]) -> dict[str, Answer]:
        """What has come of these messages; of an answer that came twice, the first."""
        found: dict[str, Answer] = {}
        for name, fetched in self.collector.collect(waiting).items():
            if isinstance(fetched, Exception):
                found[name] = Failure(f"its answer could not be read: {type(fetched).__name__}: {fetched}")
                continue
            for reply in fetched:
                if reply.metadata.reply_to_message_id == name and name not in found:
                    found[name] = _opened(reply, waiting[name])
        return found


def _opened(reply: Any, node: int) -> Answer:
    if reply.has_error():
        return Failure(f"Flower reports error {reply.error.code}: {reply.error.reason}")
    if reply.metadata.src_node_id != node:
        return Failure(f"the answer came from node {reply.metadata.src_node_id}")
    try:
        return from_records(reply.content)
    except ParcelError as error:
        return Failure(str(error))


def parcel_of(answer: Answer) -> Parcel:
    """The parcel of an answer; a node's own error and a missing answer are ParcelErrors."""
    if isinstance(answer, Failure):
        raise ParcelError(answer.reason)
    if "error" in answer.about:
        raise ParcelError(str(answer.about["error"]))
    return answer
