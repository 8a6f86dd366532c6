"""Accumulators: a merger takes the updates of a round one by one and makes the server's next State of them.

    merger = algorithm.merger(server, round)
    merger.add(card, update)              for every update that passed `check`, in the order of the cards
    server = merger.result()

`WeightedMean` is the default. Methods that send something else have a merger of their own beside
them: per tile (`algorithms.pfedgate.tiles`), per bit (`algorithms.fedmask.structures`), per element
(`algorithms.heterofl.narrow`), gradients of a hypernetwork (`algorithms.pfedhn`). What bounds the
influence of a single client lies around any of them: `core.robust`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from pfedgate.core.state import Form, floating, form, shapes, unflat
from pfedgate.core.types import Card, State, Update


class Merger(Protocol):
    """One round's accumulator; it is made by `Algorithm.merger` and thrown away after `result`.

    The engine feeds updates as they come in, in the order of the cards, and keeps none of them. A
    merger must give the same bits for the same updates in that order. What the protocol leaves room for:

    Refusal. `add` returns the reason in words if the merger cannot use an update (a norm beyond a
    bound, a signature that fails); the engine records it under "refusals" and goes on. A refused
    update must leave no trace in the merger. `result` raises if too few updates are left.

    Two passes. A merger that must compare updates with each other (a median, Krum) keeps them in
    `add`, in memory or in files, and makes its passes over them in `result`. A sum of masked or
    noised updates needs a single pass: noise is drawn in `result` from `round.generator("noise")`.

    Late updates. An update of an earlier round goes to the merger of the round in which it arrives.
    A merger that accepts it declares a keyword, `add(card, update, late=rounds)`, and discounts by it;
    an engine passes `late` only to mergers that declare it. Nothing in `add` may rely on a card
    being one of the round's sample, or on `update` having started from this round's `server`.
    """

    def add(self, card: Card, update: Update) -> str | None:
        """Take in an update; a reason if the merger refuses it."""

    def result(self) -> State:
        """The server's next State; called once, after the last `add`."""


def merge(merger: Merger, updates: Iterable[tuple[Card, Update]]) -> State:
    """The result of a merger after these updates; a refused one is an error.

    >>> server = {"w": torch.zeros(2), "count": torch.tensor(0)}
    >>> sent = [({"w": torch.ones(2), "count": torch.tensor(3)}, 1), ({"w": torch.zeros(2)}, 3)]
    >>> mean = merge(WeightedMean(server), [(Card(str(i), 1), Update(s, w)) for i, (s, w) in enumerate(sent)])
    >>> mean["w"].tolist(), int(mean["count"])
    ([0.25, 0.25], 3)
    """
    for card, update in updates:
        if reason := merger.add(card, update):
            raise ValueError(f"client {card.id!r}: {reason}")
    return merger.result()


class WeightedMean:
    """The mean of the clients' values, weighted by their weights.

    Sums are in float64 and in the order given, so the result has the same bits for any number of
    workers, and the mean of one client is that client. Floating tensors are averaged; whole numbers
    and booleans (counters such as BatchNorm's) take the maximum. With `total` (the weight of all
    clients, sampled or not) clients that sent nothing count as holding `server`. A name that no
    client sent keeps the server's value. `finish`, if given, is applied to the mean.
    """

    def __init__(
        self, server: State, total: float | None = None, finish: Callable[[State], State] = lambda mean: mean
    ) -> None:
        self.server, self.total, self.finish = server, total, finish
        self._counters: State = {}
        self._form: Form = ()
        # One vector per set of names: clients that send the same names cost one addition each.
        self._sums: dict[tuple[str, ...], tuple[Tensor, float, State]] = {}

    def add(self, card: Card, update: Update) -> str | None:
        """Add weight times values to the sums."""
        floats, vector = floating(update)
        names = tuple(floats)
        if form(update) is not self._form:  # one and the same for clients that were trained side by side
            if names in self._sums and shapes(floats) != shapes(like := self._sums[names][2]):
                return f"its shapes are {shapes(floats)}, those of the others {shapes(like)}"
            self._form = form(update)
        if len(floats) < len(update.shared):
            for name, value in update.shared.items():
                if name not in floats:
                    most = self._counters.get(name)
                    self._counters[name] = value.clone() if most is None else torch.maximum(most, value)
        if vector is None:
            return None
        if names not in self._sums:
            zeros = torch.zeros(vector.shape, dtype=torch.float64, device=vector.device)
            self._sums[names] = (zeros, 0.0, floats)
        total, weight, like = self._sums[names]
        total.add_(vector, alpha=update.weight)
        self._sums[names] = (total, weight + update.weight, like)
        return None

    def around(self, card: Card, update: Update) -> State:
        """What the server holds where this update lies; zeros where it holds nothing."""
        server = self.server
        floats = floating(update)[0]
        return {name: server[name] if name in server else torch.zeros_like(value) for name, value in floats.items()}

    def lay(self, update: Update) -> State:
        """Its entries as they are: those of one name lie side by side."""
        return update.shared

    def lift(self, state: State) -> State:
        """As they are."""
        return state

    def result(self) -> State:
        """The server's State with every entry that was sent replaced by its mean."""
        return self.finish({**self.server, **self._counters, **self._means()})

    def _means(self) -> State:
        if len(self._sums) == 1 and self.total is None:  # the usual case: all clients sent the same names
            ((vector, weight, like),) = self._sums.values()
            dtypes = {value.dtype for value in like.values()}
            if len(dtypes) == 1:
                return unflat(vector.div_(weight).to(dtypes.pop()), shapes(like))
        sums: State = {}
        weights: dict[str, float] = {}
        dtype_of: dict[str, torch.dtype] = {}
        for vector, weight, like in self._sums.values():
            for name, value in unflat(vector, shapes(like)).items():
                sums[name] = sums[name] + value if name in sums else value
                weights[name] = weights.get(name, 0.0) + weight
                dtype_of.setdefault(name, like[name].dtype)
        means = {}
        for name, value in sums.items():
            if self.total is None:
                mean = value / weights[name]
            else:
                mean = (value + self.server[name].double() * (self.total - weights[name])) / self.total
            means[name] = mean.to(dtype_of[name])
        return means
