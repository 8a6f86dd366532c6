"""Merging when some clients may be crooked: what one of them can do to the server is bounded.

    robust = "guard"       the mean; an update ten times as far from the server as is usual in its round is shortened
    robust = "clip"        the mean; beyond 3 times as far shortened, beyond 6 times left out
    robust = "median"      the median of every entry (Yin et al. 2018)
    robust = "trimmed"     the mean of every entry without the largest and smallest share (Yin et al. 2018)
    robust = "geometric"   the geometric median by smoothed Weiszfeld steps (RFA, Pillutla et al. 2022)
    robust = "krum"        the mean of the clients nearest to their neighbours (Multi-Krum, Blanchard et al. 2017)
    robust = "off"         the mean, as the method says

"Usual" is the median of the round. Clients may send different parts of a model: an entry is merged over those that sent
it, and a distance is the root of the mean square over what is there, so that it does not pay to put everything into one
block. But for "guard" and "clip" every client counts
once, because its number of samples is its own word.

A rule is a merger around the method's own. It asks that one for three things, as far as it has them:

    around(card, update)    what the server holds where this update lies; enough for "guard" and "clip"
    lay(update)             its entries side by side with those of others, NaN where it sent none
    lift(state)             the way back, to what a client could have sent
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pfedgate.core.mergers import Merger
from pfedgate.core.state import Form, flat, floating, form
from pfedgate.core.types import Card, ServerOptim, State, Update

FOR_ALL = ("guard", "clip", "off")  # rules that look at one update at a time
HELD = 32  # updates that "guard" and "clip" look at before the first is merged; then the median goes on with the round
STEPS = 10  # of Weiszfeld
# Times the median that an update's distance may be, from where on it is left out, and what its weight may be. Honest
# clients are within 3.9 times in all runs of tests/golden.
LIMITS = {"guard": (10.0, math.inf, 100.0), "clip": (3.0, 6.0, 10.0)}


def robust(rule: ServerOptim, merger: Merger) -> Merger:
    """A rule around a method's merger."""
    if rule.robust in LIMITS:
        return Clipped(merger, rule) if hasattr(merger, "around") else merger
    if rule.robust == "off":
        return merger
    return (Entrywise if rule.robust in ("median", "trimmed") else Reweighted)(merger, rule)


def usual(ordered: Sequence[float]) -> float:
    """The median of numbers that are in order already; of two in the middle the lower, which a liar cannot raise.

    >>> usual([1.0, 2.0, 7.0]), usual([1.0, 7.0])
    (2.0, 1.0)
    """
    return ordered[(len(ordered) - 1) // 2]


class Clipped:
    """The mean of updates none of which is much longer or heavier than is usual in its round."""

    def __init__(self, inner: Any, rule: ServerOptim) -> None:
        self.inner, self.rule = inner, rule
        self.clipped = 0
        self.refusals: list[tuple[str, str]] = []  # of updates that were held: client, reason
        self._far: list[float] = []
        self._weights: list[float] = []
        self._like: tuple[Form, Tensor] = ((), torch.empty(0))  # the last update's form, and the server where it lay
        self._held: list[tuple[Card, Update, float]] | None = []  # and how far it is

    def add(self, card: Card, update: Update) -> str | None:
        """Measure an update, and merge it when there is something to compare it with."""
        far = self._far_off(card, update)
        insort(self._far, far)
        insort(self._weights, update.weight)
        if self._held is None:
            return self._put(card, update, far)  # type: ignore[no-any-return]
        self._held.append((card, update, far))
        if len(self._held) == HELD:
            self._release()
        return None

    def result(self) -> State:
        """The method's own, of what was added."""
        self._release()
        return self.inner.result()  # type: ignore[no-any-return]

    def _release(self) -> None:
        held, self._held = self._held or [], None
        for card, update, far in held:
            if reason := self._put(card, update, far):
                self.refusals.append((card.id, reason))

    def _put(self, card: Card, update: Update, far: float) -> Any:
        times, beyond, heavy = LIMITS[self.rule.robust]
        median, heaviest = usual(self._far), heavy * usual(self._weights)
        farthest = times * median
        if self.rule.norm is not None:
            farthest, beyond = self.rule.norm, math.inf
        if far > beyond * median > 0:
            return f"its update moves the server {far / median:.3g} times as far as is usual in this round"
        if far > farthest > 0 or update.weight > heaviest:
            factor = min(1.0, farthest / far) if farthest > 0 and far > 0 else 1.0
            short = {name: (b + (v - b) * factor).to(v.dtype) for name, v, b in self._pairs(card, update)}
            update = replace(update, shared={**update.shared, **short}, weight=min(update.weight, heaviest))
            self.clipped += 1
        return self.inner.add(card, update)

    def _far_off(self, card: Card, update: Update) -> float:
        """How far an update is from the server: the root of the mean square, or with `norm` of the sum."""
        floats, vector = floating(update)
        if vector is not None and form(update) is self._like[0]:  # trained side by side with the last one
            length = _length(vector - self._like[1])
            return length if self.rule.norm is not None else length / math.sqrt(max(len(vector), 1))
        bases = self.inner.around(card, update)
        if vector is not None and [*bases] == [*floats]:  # as usual: of a small model one vector costs less than many
            base = flat(bases)
            self._like = (form(update), base)
            length = _length(vector - base)
        else:
            squares = (float((update.shared[n].double() - base).square().sum()) for n, base in bases.items())
            length = math.sqrt(sum(squares))
        count = sum(base.numel() for base in bases.values())
        return length if self.rule.norm is not None else length / math.sqrt(max(count, 1))

    def _pairs(self, card: Card, update: Update) -> list[tuple[str, Tensor, Tensor]]:
        bases: State = self.inner.around(card, update)
        return [(name, update.shared[name], base) for name, base in bases.items()]


def _length(difference: Tensor) -> float:
    """The norm of a vector of bounded values: as one product, which costs half as much as torch's norm in float64."""
    square = float(torch.dot(difference, difference)) if difference.dtype is torch.float32 else 0.0
    return math.sqrt(square) if square > 1e-30 else float(torch.linalg.vector_norm(difference, dtype=torch.float64))


class Kept:
    """What the rules have in common that compare clients with each other: updates are kept until the round ends."""

    def __init__(self, inner: Any, rule: ServerOptim) -> None:
        self.inner, self.rule = inner, rule
        self.updates: list[tuple[Card, Update]] = []
        self.shapes: dict[str, tuple[int, ...]] = {}

    def add(self, card: Card, update: Update) -> str | None:
        """Keep an update."""
        shapes = {name: tuple(value.shape) for name, value in self.inner.lay(update).items()}
        for name, shape in shapes.items():
            if self.shapes.get(name, shape) != shape:
                return f"{name!r} is {shape}, that of others {self.shapes[name]}"
        self.shapes |= shapes
        self.updates.append((card, update))
        return None

    def result(self) -> State:
        """The method's own, of what the rule makes of the updates."""
        raise NotImplementedError

    def _laid(self) -> list[State]:
        """Updates in the order of their clients, so that ties and sums do not depend on who came first."""
        self.updates.sort(key=lambda pair: pair[0].id)
        return [self.inner.lay(update) for _, update in self.updates]


class Entrywise(Kept):
    """Median or trimmed mean of every entry over the clients that sent it."""

    def result(self) -> State:
        """The method's own, of one client that sent the centre of all."""
        laid = self._laid()
        share = None if self.rule.robust == "median" else self.rule.crooked
        centre = {}
        for name in sorted(set().union(*laid)):
            values = torch.stack([state[name] for state in laid if name in state])
            centre[name] = middle(values.reshape(len(values), -1), share).view(values.shape[1:])
        self.inner.add(Card("all", 1), Update(self.inner.lift(centre), 1.0))
        return self.inner.result()  # type: ignore[no-any-return]


class Reweighted(Kept):
    """The mean with a weight for every client that follows from its distances to the others."""

    def result(self) -> State:
        """The method's own mean, with these weights."""
        matrix = _matrix(self._laid())
        weights = geometric(matrix) if self.rule.robust == "geometric" else krum(matrix, self.rule.crooked)
        for (card, update), weight in zip(self.updates, weights, strict=True):
            if weight > 0:
                self.inner.add(card, replace(update, weight=weight))
        return self.inner.result()  # type: ignore[no-any-return]


def middle(values: Tensor, share: float | None = None) -> Tensor:
    """By column, the median of the rows that are not NaN; or their mean without this share at either end.

    >>> rows = torch.tensor([[1.0, 5.0], [2.0, math.nan], [9.0, 7.0]])
    >>> middle(rows).tolist(), middle(rows, 0.4).tolist()
    ([2.0, 6.0], [2.0, 6.0])
    """
    ranked = values.sort(dim=0).values  # NaN last
    if not values.is_floating_point():
        return ranked[(len(ranked) - 1) // 2]
    count = (~values.isnan()).sum(0)
    last = (count - 1).clamp_min(0)
    if share is None:
        low, high = (ranked.gather(0, at[None])[0] for at in (last // 2, (last + 1) // 2))
        return low + (high - low) / 2
    cut = torch.minimum((share * count + 1e-9).long(), last // 2)
    rank = torch.arange(len(ranked), device=values.device)[:, None]
    inner = (rank >= cut) & (rank < count - cut)
    mean = torch.where(inner, ranked.double(), 0.0).sum(0) / inner.sum(0)
    return mean.to(values.dtype)


def geometric(matrix: Tensor) -> list[float]:
    """Weights with which the mean of the rows is their geometric median; distances over the entries of each row.

    >>> rows = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1e6, 1e6]])
    >>> [round(weight, 2) for weight in geometric(rows)]
    [0.17, 0.17, 0.53, 0.12, 0.0]
    """
    sent = ~matrix.isnan()
    values, each = matrix.nan_to_num().double(), sent.sum(1).clamp_min(1)
    weights = torch.full((len(matrix),), 1 / len(matrix), dtype=torch.float64)
    if len(matrix) < 3:
        return weights.tolist()
    # From the middle, not from the mean: one client at 1e9 must not decide where the search begins.
    centre = middle(matrix).nan_to_num().double()
    for _ in range(STEPS):
        far = (((values - centre) * sent).square().sum(1) / each).sqrt()
        near = far.clamp_min(0.1 * float(far.median()) + 1e-12)  # smoothed: no client takes all
        weights = (1 / near) / (1 / near).sum()
        total = weights @ sent.double()
        centre = torch.where(total > 0, (weights @ (values * sent)) / total, centre)
    return weights.tolist()


def krum(matrix: Tensor, crooked: float) -> list[float]:
    """1 for the rows that are nearest to their neighbours, 0 for the share that may be crooked.

    >>> krum(torch.tensor([[0.0], [0.1], [0.2], [0.3], [9.0]]), 0.2)
    [1.0, 1.0, 1.0, 1.0, 0.0]
    """
    count = len(matrix)
    bad = math.ceil(crooked * count - 1e-9)
    sent, values = ~matrix.isnan(), matrix.nan_to_num().double()
    far = torch.full((count, count), math.inf, dtype=torch.float64)
    for at in range(count):
        common = sent & sent[at]
        squares = ((values - values[at]) * common).square().sum(1)
        far[at] = torch.where(common.any(1), squares / common.sum(1).clamp_min(1), math.inf)
    far.fill_diagonal_(math.inf)
    usual = far[far.isfinite()].median() if bool(far.isfinite().any()) else 0.0
    far = torch.where(far.isfinite(), far, usual)  # nothing in common: neither near nor far
    far.fill_diagonal_(math.inf)
    neighbours = max(1, count - bad - 2)
    scores = far.sort(1).values[:, :neighbours].sum(1)
    chosen = torch.sort(scores, stable=True).indices[: count - bad].tolist()
    return [1.0 if at in chosen else 0.0 for at in range(count)]


def _matrix(laid: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """A row for each client: its floating entries, NaN where it sent none."""
    shapes = {name: v for state in laid for name, v in state.items() if v.is_floating_point()}
    rows = [
        torch.cat([torch.zeros(0)] + [
            (state[name] if name in state else torch.full_like(like, math.nan)).reshape(-1).float()
            for name, like in sorted(shapes.items())
        ])
        for state in laid
    ]  # fmt: skip
    return torch.stack(rows)
