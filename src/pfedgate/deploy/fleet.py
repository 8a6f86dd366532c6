"""The nodes of a Flower grid, as the server sees them: who is there, what they hold, and what they answer in time.

Replies are matched by the id of the message they answer, as Flower's own error replies do not carry their node. Every
wait ends at its deadline.

Each reply is fetched by a thread of its own. Flower hands out a reply as soon as its header is there and then waits
for the rest, for minutes if a node falls silent half-way, and raises if the rest is no message. If replies were fetched
together, one such node would hold up those of all others until their deadline, or end the run.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pfedgate.config.options import Deploy
from pfedgate.deploy.messages import NodeInfo, Parcel, ParcelError, from_records, to_records
from pfedgate.engine.boundary import words

POLL = 0.5  # seconds between two looks for replies
TEND = 5.0  # seconds between two looks for nodes that came back
AGAIN = 15.0  # seconds until a node that could not answer the roll call is asked again
GRACE = 1.0  # seconds to wait for replies that are being fetched; a slower fetch goes on in the background
TOGETHER = 16  # replies fetched at a time
log = logging.getLogger("flwr")  # the log that `flwr run --stream` and `flwr log` show


class QuorumError(RuntimeError):
    """Too few clients to go on; the checkpoint holds all rounds before."""


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
        self.homes: dict[str, int] = {}  # client -> the node that is asked
        # Client -> the first node that held it. With keys a node has the same id whenever it comes back.
        self.owners: dict[str, int] = {}
        self.refusals: list[str] = []  # a line for each node that is not believed, until the run has recorded it
        self.nodes: dict[int, NodeInfo] = {}  # by node, its answer to the roll call
        self.reasons: dict[int, str] = {}  # by node, why it gave none
        self._failed: dict[int, float] = {}  # by node, when it failed to
        self._calls: dict[str, int] = {}  # roll calls that are not answered yet
        self._fetches: dict[str, _Fetch] = {}  # fetches under way, by message

    def online(self) -> set[int]:
        """Nodes connected now, as far as Flower knows: it notices a death after about a minute."""
        return set(self.grid.get_node_ids())

    def assemble(self) -> list[NodeInfo]:
        """Wait for the nodes the recipe wants, and ask them for their clients."""
        until = self.clock() + self.deploy.start
        while True:
            self.tend()
            ready = {node: info.only(lambda c, node=node: self.homes[c] == node) for node, info in self.nodes.items()}  # type: ignore[misc]
            if (ready := {node: info for node, info in ready.items() if info.ids}) and len(ready) >= self.deploy.nodes:
                return list(ready.values())
            if self.clock() >= until:
                reasons = "; ".join(f"node {node}: {reason}" for node, reason in self.reasons.items())
                raise QuorumError(
                    f"{len(ready)} of {self.deploy.nodes} nodes ready after {self.deploy.start:.0f} s "
                    f"({reasons or 'no other node is connected'}): start nodes, or change deploy.nodes or deploy.start"
                )
            self.sleep(POLL)

    def tend(self) -> None:
        """Ask nodes that came or came back which clients they hold, and hear those who were asked; never waits."""
        now, online = self.clock(), self.online()
        for node in set(self.nodes) - online:
            del self.nodes[node]  # asked anew if it comes back: it may hold other data then
        # An unanswered call stays open as long as its node is online: the node may only be slow.
        self._forget(name for name, node in self._calls.items() if node not in online)
        self._calls = {name: node for name, node in self._calls.items() if node in online}
        for node in sorted(online - set(self.nodes) - set(self._calls.values())):
            if now - self._failed.get(node, -math.inf) >= AGAIN:
                self.reasons[node] = "no answer to the roll call yet"
                name = self._push(node, Parcel({"stage": "roll"}), "query", max(self.deploy.start, 60.0))
                if name:
                    self._calls[name] = node
        for name, answer in self._pull(self._calls).items():
            node = self._calls.pop(name)
            try:
                info = NodeInfo.read(parcel_of(answer).about)
            except ParcelError as error:
                self._failed[node] = now
                self._refuse(node, str(error))
                continue
            self.nodes[node] = info
            self.reasons.pop(node, None)
        self._settle(online)

    def _settle(self, online: set[int]) -> None:
        """Which node is asked for a client: the first that held it; another one only when that one is gone."""
        claims: dict[str, list[int]] = {}
        for node, info in self.nodes.items():  # in the order of their answers
            for client in info.ids:
                claims.setdefault(client, []).append(node)
        denied: dict[int, list[str]] = {}
        for client, nodes in claims.items():
            owner, home = self.owners.setdefault(client, nodes[0]), self.homes.get(client)
            if owner in nodes or (owner in online and owner not in self.nodes):  # the latter is being asked
                home = owner
            elif home not in nodes:  # a node that restarted without a key has another id
                home = nodes[0]
            self.homes[client] = home
            for node in set(nodes) - {home}:
                denied.setdefault(node, []).append(client)
        for node, clients in sorted(denied.items()):
            self._refuse(
                node,
                f"its claim to {len(clients)} clients such as {clients[0]!r} does not count as long as node "
                f"{self.homes[clients[0]]}, which held them first, is connected: give every node its own partition-id, "
                "or its own data with names of its own",
            )

    def _refuse(self, node: int, reason: str) -> None:
        """A line for the log and the record, once for each reason."""
        if self.reasons.get(node) != reason:
            log.warning("node %s takes no part: %s", node, reason)
            self.refusals.append(f"node {node}: {reason}")
        self.reasons[node] = reason

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
        self._forget(waiting)
        for node in waiting.values():
            answers[node] = Failure(f"no answer within {deadline:.0f} s")
        return answers

    def _push(self, node: int, parcel: Parcel, kind: str, ttl: float) -> str:
        """Send a message; its id, or nothing if it could not be sent."""
        from flwr.app import Message

        names = list(self.grid.push_messages([Message(to_records(parcel), node, kind, ttl=ttl)]))
        return str(names[0]) if names and names[0] else ""

    def _pull(self, waiting: Mapping[str, int]) -> dict[str, Answer]:
        """The answers to these messages that are there; the first, if one came twice."""
        answers: dict[str, Answer] = {}
        for name, replies in self._fetch(list(waiting)).items():
            if isinstance(replies, Exception):
                answers[name] = Failure(f"its answer could not be read: {type(replies).__name__}: {replies}")
                continue
            for reply in replies:
                if reply.metadata.reply_to_message_id == name and name not in answers:
                    answers[name] = _opened(reply, waiting[name])
        return answers

    def _fetch(self, names: list[str]) -> dict[str, list[Any] | Exception]:
        """By message, Flower's replies or why they could not be read; no entry where there is none yet."""
        for at in range(0, len(names), TOGETHER):
            fetches = {n: _Fetch(self.grid, n) for n in names[at : at + TOGETHER] if n not in self._fetches}
            self._fetches |= fetches
            for fetch in fetches.values():
                fetch.start()
            until = time.monotonic() + GRACE
            for fetch in fetches.values():
                fetch.join(max(0.0, until - time.monotonic()))
        ended = {name: self._fetches.pop(name).replies for name in names if not self._fetches[name].is_alive()}
        return {name: replies for name, replies in ended.items() if replies != []}

    def _forget(self, names: Iterable[str]) -> None:
        """Stop waiting for these; replies that still come are thrown away."""
        for name in names:
            self._fetches.pop(name, None)


class _Fetch(threading.Thread):
    """One look for the replies to one message; a daemon, so that one that hangs does not outlive the server."""

    def __init__(self, grid: Any, name: str) -> None:
        super().__init__(name=f"reply to {name}", daemon=True)
        self.grid, self.message = grid, name
        self.replies: list[Any] | Exception = []

    def run(self) -> None:
        """Pull the replies; a failure to read them is noted, in whatever way Flower fails."""
        try:
            self.replies = list(self.grid.pull_messages([self.message]))
        except Exception as error:
            self.replies = error


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
        raise ParcelError(words(answer.reason))
    if "error" in answer.about:
        raise ParcelError(words(answer.about["error"]))
    return answer
