"""Who takes part and how a run is to go: options, the roster of clients, sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pfedgate.core.seeds import key
from pfedgate.core.types import Budget, Card, Federation
from pfedgate.engine.budgets import budgets
from pfedgate.engine.endpoint import POINTS

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Options:
    """How to run, as opposed to what (the algorithm) and on which data (the federation)."""

    rounds: int = 100
    sample: float | int = 1.0  # clients a round: a share (float ≤ 1) or a number (int); without replacement
    seed: int = 0
    evaluate_every: int = 5  # rounds; the last one is always evaluated; 0 = never
    points: tuple[str, ...] = ("after_broadcast",)  # and "after_local": both are recorded under their names
    agg_norm: str = "sampled"  # average over sampled clients, or over "all" (others count as unchanged)
    budget: Any = 1.0  # see budgets.budgets
    stack: int | str = "auto"  # clients trained together where the algorithm can: a number, 0 = never
    device: str = "auto"
    novel: bool = True  # after training, adapt and score the clients held out
    checkpoint_every: int = 1  # rounds; only with a folder
    keep_best: bool = True  # with a folder: keep the State that was best on validation

    def __post_init__(self) -> None:
        if self.rounds < 0 or self.evaluate_every < 0 or self.checkpoint_every < 1:
            raise ValueError("rounds and evaluate_every are not negative; checkpoint_every is at least 1")
        if self.agg_norm not in ("sampled", "all"):
            raise ValueError(f"agg_norm is 'sampled' or 'all', got {self.agg_norm!r}")
        for point in self.points:
            if point not in POINTS:
                raise ValueError(f"points are {', '.join(POINTS)}; got {point!r}")
        if self.sample <= 0 or (isinstance(self.sample, float) and self.sample > 1):
            raise ValueError(f"sample is a share in (0, 1] or a whole number of clients, got {self.sample!r}")


DEFAULTS = Options()


@dataclass(frozen=True)
class Cards:
    """Clients of which only the cards are here: their data is wherever the exchange finds it."""

    clients: Sequence[Card]
    novel: Sequence[Card] = ()


class Roster:
    """Clients of a run, sorted by id, so that the order in which they were listed cannot matter."""

    def __init__(self, ids: Sequence[str], sizes: Sequence[int] | Ints, given: Sequence[Budget]) -> None:
        order = np.argsort(np.array(ids, dtype=np.str_), kind="stable").tolist()
        self.ids = [str(ids[at]) for at in order]
        if len(set(self.ids)) != len(self.ids):
            raise ValueError("client ids must be different from each other")
        self.sizes: Ints = np.asarray(sizes, dtype=np.int64)[order] if order else np.zeros(0, dtype=np.int64)
        self._budgets = [given[at] for at in order]

    @classmethod
    def of(cls, source: Federation | Cards, group: str, options: Options) -> Roster:
        """The training (`clients`) or the held-out (`novel`) clients of a federation, or of some cards."""
        if isinstance(source, Cards):
            cards = getattr(source, group)
            return cls([c.id for c in cards], [c.n_train for c in cards], [c.budget for c in cards])
        ids = getattr(source, group)
        return cls(ids, _sizes(source, ids), budgets(_budget(source, group, options.budget), ids, options.seed))

    def __len__(self) -> int:
        return len(self.ids)

    def card(self, at: int) -> Card:
        """The card of the client at this position."""
        return Card(self.ids[at], int(self.sizes[at]), self._budgets[at])

    def __iter__(self) -> Iterator[Card]:
        return (self.card(at) for at in range(len(self)))

    def draw(self, sample: float | int, seed: int, round: int) -> list[Card]:
        """The clients of a round, sorted; clients without training data are never drawn."""
        able = np.flatnonzero(self.sizes)
        if not len(able):
            raise ValueError("no client has training data")
        wanted = sample if isinstance(sample, int) else max(1, int(sample * len(able)))
        generator = np.random.default_rng(key(seed, "sample", round))
        chosen = generator.choice(len(able), min(wanted, len(able)), replace=False, shuffle=False)
        return [self.card(int(able[at])) for at in np.sort(chosen)]


def _budget(federation: Federation, group: str, given: Any) -> Any:
    """A list of budgets is for the training clients, or for them and the held-out ones after them.

    Held-out clients that it does not reach get its values in turn: devices like those seen in training.
    """
    if not isinstance(given, list | tuple):
        return given
    first, count = len(federation.clients), len(getattr(federation, group))
    if group == "clients":
        return given[:first] if len(given) == first + len(federation.novel) else given
    rest = given[first:] or given
    return [rest[at % len(rest)] for at in range(count)]


def _sizes(federation: Federation, ids: Sequence[str]) -> Ints:
    """Training samples of every client; at once where the federation knows them without reading."""
    sizes, known = getattr(federation, "sizes", None), getattr(federation, "ids", None)
    if sizes is not None and known is not None:
        by_id = dict(zip(known, sizes("train").tolist(), strict=True))
        return np.array([by_id[client] for client in ids], dtype=np.int64)
    return np.array([federation.part(client, "train").n for client in ids], dtype=np.int64)
