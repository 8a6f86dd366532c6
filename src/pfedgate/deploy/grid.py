"""The server's exchange over a Flower grid: send to nodes, check each answer, hand updates on in order.

A node holds one client or several and gets one message a round. An update is left out, with its reason, if it is late,
comes twice, belongs to another round or client, or cannot be an update; a round needs a quorum of the rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.types import Card, Round, State
from pfedgate.deploy.fleet import Answer, Fleet, QuorumError, parcel_of
from pfedgate.deploy.messages import Parcel, ParcelError
from pfedgate.engine import boundary, wire
from pfedgate.engine.boundary import Refused, words
from pfedgate.engine.endpoint import Reply, Scored, checked
from pfedgate.engine.store import Store


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
        self.refusals = fleet.refusals  # lines for the record: of nodes, and here of scores

    def train(self, server: State, round: Round, chunks: Iterable[Sequence[Card]]) -> Iterator[Reply]:
        """One training round: a reply per card, in order, at the latest when the deadline has passed."""
        cards = [card for chunk in chunks for card in chunk]
        gots, reasons = self._gots(server, cards, round)
        answers, downs = self._send("train", [card for card in cards if card.id in gots], gots, round, ())
        # A quorum needs all verdicts before the first update is merged. Each answer is let go when it is opened.
        replies = deque(
            self._reply(card, gots[card.id], answers.pop(card.id, None), round, downs.get(card.id, 0))
            if card.id in gots
            else Reply(card, None, reason=reasons[card.id])
            for card in cards
        )
        usable = sum(reply.update is not None for reply in replies)
        needed = max(1, math.ceil(self.fleet.deploy.quorum * len(cards)))
        if usable < needed:
            told = "; ".join(f"{reply.card.id}: {reply.reason}" for reply in replies if reply.update is None)
            raise QuorumError(
                f"round {round.index + 1}: {usable} of {len(cards)} clients sent a usable update within "
                f"{self.fleet.deploy.deadline:.0f} s, {needed} are needed ({words(told, 2000)}). Start the same "
                "run again to go on from the last checkpoint, or change deploy.deadline or deploy.quorum"
            )
        while replies:
            yield replies.popleft()  # a merged update is let go

    def evaluate(self, server: State, round: Round, cards: Iterable[Card], points: Sequence[str]) -> Iterator[Scored]:
        """Scores of the clients that answered in time: models are scored where the data is, numbers travel."""
        everyone = list(cards)
        gots, reasons = self._gots(server, everyone, round)
        answers, _ = self._send("evaluate", [card for card in everyone if card.id in gots], gots, round, points)
        for card in everyone:
            try:
                if card.id in reasons:
                    raise Refused(reasons[card.id])
                scores = self._scores(card, answers.get(card.id), points)
            except Refused as error:
                self.refusals.append(f"client {card.id!r}, round {round.index + 1}, scores: {error}")
                continue
            yield from scores

    def close(self) -> None:
        """Nothing to stop: nodes stay."""

    def _gots(self, server: State, cards: Sequence[Card], round: Round) -> tuple[dict[str, State], dict[str, str]]:
        """What each client is sent; or why nothing can be, for its budget may be a node's own."""
        gots: dict[str, State] = {}
        reasons: dict[str, str] = {}
        for card in cards:
            try:
                with boundary.reading("its budget"):
                    gots[card.id] = self.algorithm.send(server, card, round)
            except Refused as error:
                reasons[card.id] = str(error)
        return gots, reasons

    def _send(
        self, stage: str, cards: Sequence[Card], gots: Mapping[str, State], round: Round, points: Sequence[str]
    ) -> tuple[dict[str, Answer], dict[str, int]]:
        """Ask every node that holds some of these clients: its answer, and the bytes sent, for each client."""
        self.fleet.tend()
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
        for node, residents in by_node.items():
            bodies: list[bytes] = []
            places: dict[int, int] = {}
            jobs = []
            for card in residents:
                got = gots[card.id]
                if id(got) not in packed:
                    packed[id(got)] = wire.pack(got) if got else b""
                if id(got) not in places:
                    places[id(got)] = len(bodies)
                    bodies.append(packed[id(got)])
                downs[card.id] = len(packed[id(got)])
                jobs.append({"card": dataclasses.asdict(card), "body": places[id(got)]})
            parcels[node] = Parcel({**about, "jobs": jobs}, bodies)
        answers = self.fleet.ask(parcels, stage, self.fleet.deploy.deadline)
        # Clients keep the node that was asked: meanwhile a client may have come back on another one.
        return {card.id: answers[node] for node, residents in by_node.items() for card in residents}, downs

    def _reply(self, card: Card, got: State, answer: Answer | None, round: Round, down: int) -> Reply:
        """One client's reply out of its node's answer, opened and checked."""
        try:
            result, parcel = _result(card, answer)
            message = parcel.body(result.get("body"))
            arrived = wire.decode(message)
        except Refused as error:
            return Reply(card, None, down, 0, str(error))
        if arrived.client != card.id:
            reason = f"the update is that of client {words(repr(arrived.client), 80)}"
            return Reply(card, None, down, len(message), reason)
        if arrived.round != round.index:
            return Reply(card, None, down, len(message), f"the update is that of round {arrived.round + 1}")
        up = len(message) if arrived.update.shared else 0
        return checked(self.algorithm, got, Reply(card, arrived.update, down, up))

    def _scores(self, card: Card, answer: Answer | None, points: Sequence[str]) -> list[Scored]:
        """One client's scores out of its node's answer, checked."""
        result, _ = _result(card, answer)
        with boundary.reading("its scores"):
            entries, metrics = result["scores"], self.algorithm.task.metrics
            return [Scored(card.id, point, *boundary.score(card, entries[point], metrics)) for point in points]


def _result(card: Card, answer: Answer | None) -> tuple[dict[str, Any], Parcel]:
    """The entry of one client in its node's answer, and the parcel it came in."""
    if answer is None:
        raise ParcelError("its node is not connected")
    parcel = parcel_of(answer)
    entries = parcel.about.get("clients")
    result = entries.get(card.id) if isinstance(entries, dict) else None
    if not isinstance(result, dict):
        raise ParcelError("its node answered without it")
    if "error" in result:
        raise ParcelError(words(result["error"]))
    return result, parcel
