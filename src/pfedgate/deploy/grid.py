"""The server's exchange over a Flower grid: ask nodes, wait no longer than the deadline, check, hand on in order.

A node holds one client or several and gets one message a round. Whatever is late, comes twice, belongs to another
round or client, or cannot be an update is left out with its reason; a round needs a quorum of what is left. Replies
are matched by the id of the message they answer, as Flower's own error replies do not carry their node.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pfedgate import wire
from pfedgate.algorithm import Algorithm
from pfedgate.deploy.parcels import Parcel, ParcelError, from_records, to_records
from pfedgate.deploy.roll import Roll, Told
from pfedgate.deploy.settings import Deploy
from pfedgate.local import Score
from pfedgate.serve import Reply, Scored
from pfedgate.store import Store
from pfedgate.types import Card, Round, State

POLL = 0.5  # seconds between two looks for replies
AGAIN = 15.0  # seconds until a node that could not answer the roll call is asked again
log = logging.getLogger("flwr")  # the log that `flwr run --stream` and `flwr log` show


class QuorumError(RuntimeError):
    """Too few clients to go on; what was done so far is in the checkpoint."""


@dataclasses.dataclass(frozen=True)
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
        self.homes: dict[str, int] = {}  # client -> node
        self.told: dict[int, Told] = {}  # what nodes said of themselves
        self.reasons: dict[int, str] = {}  # why nodes could not
        self._asked: dict[int, float] = {}  # when a node was last asked

    def online(self) -> set[int]:
        """Nodes connected now, as far as Flower knows: it notices a death after about a minute."""
        return set(self.grid.get_node_ids())

    def assemble(self) -> Roll:
        """Wait for the nodes the recipe wants and ask them for their clients."""
        until = self.clock() + self.deploy.start
        while True:
            self.call_roll(until - self.clock())
            if len(self.told) >= self.deploy.nodes:
                return Roll.of(self.told)
            if self.clock() >= until:
                said = "; ".join(f"node {node}: {reason}" for node, reason in self.reasons.items())
                raise QuorumError(
                    f"{len(self.told)} of {self.deploy.nodes} nodes ready after {self.deploy.start:.0f} s "
                    f"({said or 'no other node is connected'}): start nodes, or change deploy.nodes or deploy.start"
                )
            self.sleep(POLL)

    def call_roll(self, patience: float) -> None:
        """Ask nodes that have not told their clients yet."""
        now, online = self.clock(), self.online()
        for node in set(self.told) - online:
            del self.told[node]  # asked anew if it comes back: it may hold other data then
        new = sorted(node for node in online - set(self.told) if now - self._asked.get(node, -math.inf) >= AGAIN)
        if new and patience > 0:
            answers = self.ask({node: Parcel({"stage": "roll"}) for node in new}, "query", min(patience, 60.0))
            fresh: dict[str, int] = {}
            for node in new:
                self._asked[node] = self.clock()
                try:
                    told = Told.read(_parcel(answers[node]).about)
                except ParcelError as error:
                    self.reasons[node] = str(error)
                    log.warning("node %s takes no part: %s", node, error)
                    continue
                for client in told.ids():
                    if fresh.setdefault(client, node) != node:
                        raise ValueError(
                            f"nodes {fresh[client]} and {node} both hold client {client!r}: give every node its own "
                            "partition-id, or its own data with names of its own"
                        )
                    self.homes[client] = node  # the newest claim holds: a node that restarted has another id
                self.told[node] = told
                self.reasons.pop(node, None)

    def ask(self, parcels: Mapping[int, Parcel], kind: str, deadline: float) -> dict[int, Answer]:
        """One message to each node; an answer or a reason for each of them, within the deadline."""
        from flwr.app import Message

        until = self.clock() + deadline
        answers: dict[int, Answer] = {}
        waiting: dict[str, int] = {}
        for node, parcel in parcels.items():
            # Messages that outlive the deadline would be trained on by a node that comes back later.
            message = Message(to_records(parcel), node, kind, ttl=max(deadline, 1.0))
            sent = list(self.grid.push_messages([message]))
            if sent and sent[0]:
                waiting[sent[0]] = node
            else:
                answers[node] = Failure("the message could not be sent to it")
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                node_asked = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node_asked is not None:  # else it came twice, or answers something else: the first one counts
                    answers[node_asked] = _opened(reply, node_asked)
            left = until - self.clock()
            if left <= 0:
                break
            if waiting:
                self.sleep(min(POLL, left))
        for node in waiting.values():
            answers[node] = Failure(f"no answer within {deadline:.0f} s")
        return answers


def _opened(reply: Any, node: int) -> Answer:
    if reply.has_error():
        return Failure(f"Flower reports error {reply.error.code}: {reply.error.reason}")
    if reply.metadata.src_node_id != node:
        return Failure(f"the answer came from node {reply.metadata.src_node_id}")
    try:
        return from_records(reply.content)
    except ParcelError as error:
        return Failure(str(error))


def _parcel(answer: Answer) -> Parcel:
    """The parcel of an answer; a node's own error and a missing answer are ParcelErrors."""
    if isinstance(answer, Failure):
        raise ParcelError(answer.reason)
    if "error" in answer.about:
        raise ParcelError(str(answer.about["error"]))
    return answer


class GridExchange:
    """Clients on the nodes of a Flower grid. Private states never leave the nodes."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Any,
        store: Store,
        device: Any = None,
        *,
        fleet: Fleet,
        experiment: str,
        starts: Sequence[int] = (0,),
    ) -> None:
        self.algorithm, self.store, self.fleet = algorithm, store, fleet
        self.experiment, self.starts, self._serial = experiment, list(starts), 0

    def train(self, server: State, round: Round, chunks: Iterable[Sequence[Card]]) -> Iterator[Reply]:
        """One training round: a reply per card, in order, at the latest when the deadline has passed."""
        cards = [card for chunk in chunks for card in chunk]
        gots = {card.id: self.algorithm.send(server, card, round) for card in cards}
        answers, downs = self._send("train", cards, gots, round, ())
        replies = [self._reply(card, gots[card.id], answers, round, downs.get(card.id, 0)) for card in cards]
        good = sum(reply.update is not None for reply in replies)
        needed = max(1, math.ceil(self.fleet.deploy.quorum * len(cards)))
        if good < needed:
            said = "; ".join(f"{reply.card.id}: {reply.reason}" for reply in replies if reply.update is None)
            raise QuorumError(
                f"round {round.index + 1}: {good} of {len(cards)} clients sent a usable update within "
                f"{self.fleet.deploy.deadline:.0f} s, {needed} are needed ({said}). Start the same run again to go on "
                "from the last checkpoint, or change deploy.deadline or deploy.quorum"
            )
        yield from replies

    def evaluate(self, server: State, round: Round, cards: Iterable[Card], points: Sequence[str]) -> Iterator[Scored]:
        """Scores of the clients that answered in time: models are scored where the data is, numbers travel."""
        everyone = list(cards)
        gots = {card.id: self.algorithm.send(server, card, round) for card in everyone}
        answers, _ = self._send("evaluate", everyone, gots, round, points)
        for card in everyone:
            try:
                told = self._told(card, answers)
                yield from _scores(card, told, points)
            except (ParcelError, KeyError, TypeError, ValueError) as error:
                log.warning("round %s: no score of client %r: %s", round.index + 1, card.id, error)

    def close(self) -> None:
        """Nothing to stop: nodes stay."""

    # -- parts
    def _send(
        self, stage: str, cards: Sequence[Card], gots: Mapping[str, State], round: Round, points: Sequence[str]
    ) -> tuple[dict[int, Answer], dict[str, int]]:
        """Ask every node that holds some of these clients; also the bytes each client was sent."""
        deadline = self.fleet.deploy.deadline
        began = self.fleet.clock()
        self.fleet.call_roll(deadline)  # nodes that came back
        online, by_node = self.fleet.online(), dict[int, list[Card]]()
        for card in cards:
            node = self.fleet.homes.get(card.id)
            if node in online and node is not None:
                by_node.setdefault(node, []).append(card)
        self._serial += 1
        number = self.store.tag.partition("-")[0]
        about = {
            "stage": stage,
            "experiment": self.experiment,
            "starts": self.starts,
            "serial": self._serial,
            "commit": int(number) if number.isdigit() else 0,
            "round": dataclasses.asdict(round),
            "points": list(points),
        }
        parcels, downs = {}, dict[str, int]()
        packed: dict[int, bytes] = {}  # most clients get the very same State: pack it once
        for node, held in by_node.items():
            bodies: list[bytes] = []
            places: dict[int, int] = {}
            jobs = []
            for card in held:
                got = gots[card.id]
                if id(got) not in packed:
                    packed[id(got)] = wire.pack(got) if got else b""
                if id(got) not in places:
                    places[id(got)] = len(bodies)
                    bodies.append(packed[id(got)])
                downs[card.id] = len(packed[id(got)])
                jobs.append({"card": dataclasses.asdict(card), "body": places[id(got)]})
            parcels[node] = Parcel({**about, "jobs": jobs}, bodies)
        left = max(0.0, deadline - (self.fleet.clock() - began))
        return self.fleet.ask(parcels, stage, left), downs

    def _told(self, card: Card, answers: Mapping[int, Answer]) -> Mapping[str, Any]:
        node = self.fleet.homes.get(card.id)
        if node is None or node not in answers:
            raise ParcelError("its node is not connected")
        parcel = _parcel(answers[node])
        found = parcel.about.get("clients")
        told = found.get(card.id) if isinstance(found, dict) else None
        if not isinstance(told, dict):
            raise ParcelError("its node answered without it")
        if "error" in told:
            raise ParcelError(str(told["error"]))
        return {**told, "parcel": parcel}

    def _reply(self, card: Card, got: State, answers: Mapping[int, Answer], round: Round, down: int) -> Reply:
        try:
            told = self._told(card, answers)
            message = told["parcel"].body(told.get("body"))
            arrived = wire.decode(message)
        except (ParcelError, wire.WireError) as error:
            return Reply(card, None, down, 0, str(error))
        reason = self._fault(card, got, arrived, round)
        if reason:
            return Reply(card, None, down, len(message), reason)
        return Reply(card, arrived.update, down, len(message) if arrived.update.shared else 0)

    def _fault(self, card: Card, got: State, arrived: wire.Arrived, round: Round) -> str:
        if arrived.client != card.id:
            return f"the update is that of client {arrived.client!r}"
        if arrived.round != round.index:
            return f"the update is that of round {arrived.round + 1}"
        return wire.fault(arrived.update) or self.algorithm.check(got, arrived.update) or ""


def _scores(card: Card, told: Mapping[str, Any], points: Sequence[str]) -> list[Scored]:
    """Scores as a node told them, checked."""
    found = []
    for point in points:
        score = told["scores"][point]
        test, val = (Score(int(n), *map(float, rest)) for n, *rest in (score["test"], score["val"]))
        if min(test.n, val.n) < 0:
            raise ValueError("a score over fewer than no samples")
        stats = {str(name): float(value) for name, value in score["stats"].items()}
        found.append(Scored(card.id, point, test, val, stats))
    return found
