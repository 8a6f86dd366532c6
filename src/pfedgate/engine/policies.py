"""Whom a round waits for: policies over virtual time, the same for every exchange.

    synchronous    the round ends when its last client has answered; times change nothing but the clock
    deadline       more clients are drawn than wanted; the first ones in time count, the others are late
    tiered         as synchronous, but each round draws from one class of alike fast clients (TiFL, Chai et al. 2020)
    asynchronous   clients train all the time; the server merges whenever so many updates have arrived, each moved by
                   what the server has learnt meanwhile and discounted by its staleness (FedBuff, Nguyen et al. 2022;
                   a buffer of one is FedAsync, Xie et al. 2019)

A policy yields `Arrival`s, in the order in which the merger is to add them. An update trains when it is sent out and
arrives when the clock says; what is in flight is part of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.seeds import numpy_generator
from pfedgate.core.state import inside, under
from pfedgate.core.types import Card, Round, State, Update
from pfedgate.engine.endpoint import Reply
from pfedgate.engine.roster import Ints, Roster
from pfedgate.fleet.clock import Clock, Cost
from pfedgate.fleet.pace import POLICIES, Pace

Train = Callable[[State, Round, Sequence[Card]], Iterator[Reply]]


@dataclass(frozen=True)
class Arrival:
    """A reply, when its client began, what it took, and why it does not count."""

    reply: Reply
    began: float = 0.0
    cost: Cost | None = None
    dropped: str = ""
    stale: int = 0  # merges since its client was sent the model

    @property
    def end(self) -> float:
        """When the reply arrives."""
        return self.began + (self.cost.seconds if self.cost else 0.0)


@dataclass
class Policy:
    """Synchronous, and what all policies share: drawing clients and timing their replies."""

    pace: Pace
    algorithm: Algorithm
    roster: Roster
    sample: float | int
    clock: Clock | None = None
    now: float = 0.0  # virtual seconds since the run began
    lottery: Callable[[Round], Sequence[Card]] | None = None  # draws in another way; it may draw nobody

    def arrivals(self, train: Train, server: State, round: Round) -> Iterator[Arrival]:
        """Draw, train and time the clients of a round; `now` is its end when all have arrived."""
        if self.lottery is None:
            cards: Sequence[Card] = self.roster.draw(self.sample, round.seed, round.index)
        else:
            cards = self.lottery(round)
        if cards:
            yield from self.all_of(train(server, round, cards), round)

    def all_of(self, replies: Iterator[Reply], round: Round) -> Iterator[Arrival]:
        """Replies as they come; the last one to arrive ends the round."""
        end = self.now
        for reply in replies:
            arrival = self.timed(reply, round.index)
            end = max(end, arrival.end)
            yield arrival
        self.now = end

    def timed(self, reply: Reply, round: int) -> Arrival:
        """When this reply's client began and what it took: a device that is away starts when it is back."""
        if self.clock is None:
            return Arrival(reply)
        task, card = self.algorithm.task, reply.card
        steps = task.steps if task.steps is not None else task.epochs * -(-card.n_train // task.batch)
        flops = reply.update.metrics.get("flops", 0.0) if reply.update else 0.0
        cost = self.clock.cost(card.id, round, flops=flops, steps=steps, down=reply.down, up=reply.up)
        return Arrival(reply, self.now + self.clock.wait(card.id, self.now), cost)

    def save(self) -> tuple[State, list[dict[str, Any]]]:
        """What is in flight between rounds: tensors, and what JSON can hold."""
        return {}, []

    def load(self, tensors: State, flights: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what was in flight."""


class Deadline(Policy):
    """Draw more clients than wanted; whoever arrives first and in time counts."""

    def arrivals(self, train: Train, server: State, round: Round) -> Iterator[Arrival]:
        wanted = self.roster.wanted(self.sample)
        cards = self.roster.draw(math.ceil(wanted * self.pace.oversample), round.seed, round.index)
        timed = [self.timed(reply, round.index) for reply in train(server, round, cards)]
        ends = [arrival.end if arrival.reply.update is not None else math.inf for arrival in timed]
        order = np.argsort(ends, kind="stable")[:wanted].tolist()
        latest = math.inf if self.pace.deadline is None else self.now + self.pace.deadline
        counted = {at for at in order if ends[at] <= latest}
        # With fewer than wanted in time, the server waits until the deadline; without one, for whom there is.
        last = max((ends[at] for at in counted), default=self.now)
        self.now = last if len(counted) == wanted or latest == math.inf else latest
        for at, arrival in enumerate(timed):
            late = "" if at in counted or arrival.reply.update is None else "late"
            yield replace(arrival, dropped=late)


class Tiered(Policy):
    """Each round draws from one class of alike fast clients, so that nobody waits for a much slower one."""

    @cached_property
    def _tiers(self) -> list[Ints]:
        """Positions of the clients with training data, fast to slow, in classes of one size."""
        assert self.clock is not None
        able = np.flatnonzero(self.roster.sizes)
        speeds = [self.clock.speed(self.roster.ids[int(at)], int(self.roster.sizes[at])) for at in able]
        parts = np.array_split(able[np.argsort(speeds, kind="stable")], self.pace.tiers)
        return [part for part in parts if len(part)]

    def arrivals(self, train: Train, server: State, round: Round) -> Iterator[Arrival]:
        tiers = self._tiers
        tier = tiers[int(numpy_generator(round.seed, "tier", round.index).integers(len(tiers)))]
        wanted = self.roster.wanted(self.sample)
        yield from self.all_of(train(server, round, self.roster.draw(wanted, round.seed, round.index, tier)), round)


@dataclass
class Asynchronous(Policy):
    """Clients train on the model they were sent; a merge takes the updates that arrive first, whatever their age.

    Each merge draws as many clients as it took in, so that the number in flight stays that of the sample. An update
    is moved by what the server has learnt since it was sent, entry by entry: `new + (update - old) / (1 + s)**p`,
    where s counts the merges that changed this entry. A fresh update is added as it is, bit for bit.
    """

    flights: list[tuple[Arrival, int]] = field(default_factory=list)  # and the merge its client started from
    states: dict[int, State] = field(default_factory=dict)  # of the server, from the oldest flight's on

    def arrivals(self, train: Train, server: State, round: Round) -> Iterator[Arrival]:
        wanted = self.roster.wanted(self.sample)
        buffer = self.pace.buffer if self.pace.buffer >= 1 else self.pace.buffer * wanted
        busy = {arrival.reply.card.id for arrival, _ in self.flights}
        free = np.delete(np.arange(len(self.roster)), [self.roster.ids.index(client) for client in busy])
        self.states[round.index] = server
        if wanted > len(busy) and self.roster.sizes[free].any():
            cards = self.roster.draw(wanted - len(busy), round.seed, round.index, among=free if busy else None)
            self.flights += [(self.timed(r, round.index), round.index) for r in train(server, round, cards)]
        self.flights.sort(key=lambda flight: (flight[0].end, flight[0].reply.card.id))
        take = min(len(self.flights), max(1, math.ceil(buffer)))
        landed, self.flights = self.flights[:take], self.flights[take:]
        self.now = max([self.now, *(arrival.end for arrival, _ in landed)])
        for arrival, start in sorted(landed, key=lambda flight: (flight[1], flight[0].reply.card.id)):
            stale, update = round.index - start, arrival.reply.update
            if update is None or not stale:
                yield arrival
            elif stale > self.pace.stalest:
                yield replace(arrival, dropped="stale", stale=stale)
            else:
                card = arrival.reply.card
                then = replace(round, index=start)  # what is sent may depend on the round: a window that rolls
                sent = [self.algorithm.send(self.states[at], card, then) for at in range(start, round.index + 1)]
                moved = self.algorithm.rebase(update, sent, self.pace.staleness)
                yield replace(arrival, reply=replace(arrival.reply, update=moved), stale=stale)
        oldest = min((start for _, start in self.flights), default=round.index + 1)
        self.states = {at: state for at, state in self.states.items() if at >= oldest}

    def save(self) -> tuple[State, list[dict[str, Any]]]:
        tensors: State = {}
        for at, state in self.states.items():
            tensors.update(under(f"server/{at}/", state))
        lines = []
        for number, (arrival, start) in enumerate(self.flights):
            reply = arrival.reply
            line: dict[str, Any] = {"start": start, "began": arrival.began, "card": vars(reply.card)}
            line |= {"cost": vars(arrival.cost) if arrival.cost else None, "down": reply.down, "up": reply.up}
            line |= {"reason": reply.reason}
            if reply.update is not None:
                tensors.update(under(f"flight/{number}/", reply.update.shared))
                line |= {"weight": reply.update.weight, "metrics": dict(reply.update.metrics)}
            lines.append(line)
        return tensors, lines

    def load(self, tensors: State, flights: Sequence[Mapping[str, Any]]) -> None:
        for name in tensors:
            if name.startswith("server/"):
                at = int(name.split("/")[1])
                self.states.setdefault(at, inside(f"server/{at}/", tensors))
        for number, line in enumerate(flights):
            update = None
            if "weight" in line:
                update = Update(inside(f"flight/{number}/", tensors), line["weight"], line["metrics"])
            reply = Reply(Card(**line["card"]), update, line["down"], line["up"], line["reason"])
            cost = Cost(**line["cost"]) if line["cost"] else None
            self.flights.append((Arrival(reply, line["began"], cost), line["start"]))


def policy(
    pace: Pace, algorithm: Algorithm, roster: Roster, sample: float | int, clock: Clock | None, now: float = 0.0
) -> Policy:
    """The policy of a run."""
    kinds: dict[str, type[Policy]] = dict(zip(POLICIES, (Policy, Deadline, Tiered, Asynchronous), strict=True))
    return kinds[pace.policy](pace, algorithm, roster, sample, clock, now)
