"""The server's exchange over a Flower grid: send to nodes, check what comes back, hand it on in order.

A node holds one client or several and gets one message a round. Whatever is late, comes twice, belongs to another
round or client, or cannot be an update is left out with its reason; a round needs a quorum of what is left.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.types import Card, Round, State
from pfedgate.deploy.fleet import Answer, Fleet, QuorumError, parcel_of
from pfedgate.deploy.parcels import Parcel, ParcelError
from pfedgate.engine import wire
from pfedgate.engine.endpoint import Reply, Scored, checked
from pfedgate.engine.store import Store
from pfedgate.training.fit import Score

log = logging.getLogger("flwr")  # the log that `flwr run --stream` and `flwr log` show


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
        replies: deque[Reply] = deque()
        for card in cards:
            replies.append(self._reply(card, gots[card.id], answers, round, downs.get(card.id, 0)))
            answers.pop(card.id, None)  # opened: an update is held as a message or as tensors, never as both
        reasons = {reply.card.id: reply.reason for reply in replies if reply.update is None}
        good = len(cards) - len(reasons)
        needed = max(1, math.ceil(self.fleet.deploy.quorum * len(cards)))
        if good < needed:
            said = "; ".join(f"{client}: {reason}" for client, reason in reasons.items())
            raise QuorumError(
                f"round {round.index + 1}: {good} of {len(cards)} clients sent a usable update within "
                f"{self.fleet.deploy.deadline:.0f} s, {needed} are needed ({said}). Start the same run again to go on "
                "from the last checkpoint, or change deploy.deadline or deploy.quorum"
            )
        while replies:
            yield replies.popleft()

    def evaluate(self, server: State, round: Round, cards: Iterable[Card], points: Sequence[str]) -> Iterator[Scored]:
        """Scores of the clients that answered in time: models are scored where the data is, numbers travel."""
        everyone = list(cards)
        gots = {card.id: self.algorithm.send(server, card, round) for card in everyone}
        answers, _ = self._send("evaluate", everyone, gots, round, points)
        for card in everyone:
            try:
                told = self._told(card, answers)
                yield from _scores(card, told, points)
            except (ParcelError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                log.warning("round %s: no score of client %r: %s", round.index + 1, card.id, error)

    def close(self) -> None:
        """Nothing to stop: nodes stay."""

    # -- parts
    def _send(
        self, stage: str, cards: Sequence[Card], gots: Mapping[str, State], round: Round, points: Sequence[str]
    ) -> tuple[dict[str, Answer], dict[str, int]]:
        """Ask every node that holds some of these clients: what it said, and the bytes sent, for each client."""
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
        said = self.fleet.ask(parcels, stage, self.fleet.deploy.deadline)
        # By client, as it was asked: meanwhile a client may have come back on another node.
        return {card.id: said[node] for node, held in by_node.items() for card in held}, downs

    def _told(self, card: Card, answers: Mapping[str, Answer]) -> Mapping[str, Any]:
        if card.id not in answers:
            raise ParcelError("its node is not connected")
        parcel = parcel_of(answers[card.id])
        found = parcel.about.get("clients")
        told = found.get(card.id) if isinstance(found, dict) else None
        if not isinstance(told, dict):
            raise ParcelError("its node answered without it")
        if "error" in told:
            raise ParcelError(str(told["error"]))
        return {**told, "parcel": parcel}

    def _reply(self, card: Card, got: State, answers: Mapping[str, Answer], round: Round, down: int) -> Reply:
        try:
            told = self._told(card, answers)
            message = told["parcel"].body(told.get("body"))
            arrived = wire.decode(message)
        except (ParcelError, wire.WireError) as error:
            return Reply(card, None, down, 0, str(error))
        if arrived.client != card.id:
            return Reply(card, None, down, len(message), f"the update is that of client {arrived.client!r}")
        if arrived.round != round.index:
            return Reply(card, None, down, len(message), f"the update is that of round {arrived.round + 1}")
        up = len(message) if arrived.update.shared else 0
        return checked(self.algorithm, got, Reply(card, arrived.update, down, up))


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
