"""What a study is, as data: rows (methods) × columns (data) × seeds, and the numbers shown of each cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pfedgate.report.tables import percent
from pfedgate.runs.progress import clock, scaled, size

Settings = Mapping[str, Any]  # by full name: {"train.lr": 0.1, "clients.budget": 0.5}
Show = Callable[[float], str]


@dataclass(frozen=True)
class Row:
    """A method as one line of a table. A value "@near" stands for what the column's data calls so."""

    name: str
    method: str
    settings: Settings = field(default_factory=dict)
    once: bool = False  # a control: never repeated with other seeds


@dataclass(frozen=True)
class Column:
    """Data, by the name that scales know it by, and what else is special about it."""

    title: str
    data: str
    settings: Settings = field(default_factory=dict)
    what: str = ""  # the special thing in words

    @property
    def name(self) -> str:
        """What the column is called."""
        return f"{self.title}, {self.what}" if self.what else self.title


@dataclass(frozen=True)
class Number:
    """One number of a cell. `key` names it in an outcome; `minus`: the difference to that other key."""

    key: str
    title: str
    show: Show = percent
    best: Callable[..., float] | None = max  # max, min, or None: nothing to win
    minus: str = ""
    over_first: bool = False  # divided by that of the study's first row
    first_seed: bool = False  # of the first seed alone, which all rows have

    @property
    def name(self) -> str:
        """What it is called in JSON."""
        parts = [self.key, f"-minus-{self.minus}" if self.minus else ""]
        return "".join([*parts, "-ratio" * self.over_first, "-first-seed" * self.first_seed])


ACC = Number("best_accuracy", "Acc, %")
FIRST_SEED = Number("best_accuracy", "Acc of the first seed, %", first_seed=True)
WORST = Number("best_bottom_decile", "bottom decile, %")
FIRST_WORST = Number("best_bottom_decile", "bottom decile of the first seed, %", first_seed=True)
LAST = Number("accuracy", "last round, %")
VALIDATION = Number("val", "best on validation, %")
LOCAL_EPOCH = Number("accuracy_after_local", "after a further local epoch, %")
DENSITY = Number("density", "s̄'", "{:.3f}".format, None)
Q = Number("q", "q̄", "{:.3f}".format, None)
UP = Number("up", "up per round", size, min)
FLOPS = Number("flops", "compute per round", lambda value: scaled(value, "FLOP"), min)
SECONDS = Number("seconds", "time", clock, None)
USUAL = (ACC, WORST, LAST, LOCAL_EPOCH, DENSITY, Q, UP, FLOPS, SECONDS)


@dataclass(frozen=True)
class Claim:
    """A difference that matters: the best of some rows on validation data, minus the best of others on test data.

    Choosing ours on validation and the opponent on test is the hardest fair comparison. Seeds are other partitions of
    the data, some easier than others, so rows are compared on the seeds that they share.
    """

    title: str
    ours: tuple[str, ...]
    others: tuple[str, ...] = ()  # none: all rows that are not pFedGate
    number: Number = ACC
    must: float | None = 0.0  # points; 0 means more than that
    aim: float | None = None
    chance: float = 1.0  # points that one seed may be off by


@dataclass(frozen=True)
class Study:
    """One table or figure."""

    name: str
    title: str
    rows: tuple[Row, ...] = ()
    columns: tuple[Column, ...] = ()
    numbers: tuple[Number, ...] = USUAL
    note: str = ""
    matrix: bool = False  # columns side by side instead of a table each
    more_seeds: bool = False  # repeat with other seeds, as far as the scale does
    drop: tuple[str, str] | None = None  # also show the first of these kinds of columns minus the second
    claims: tuple[Claim, ...] = ()
    look: str = ""  # something to be found out about a trained cell: see `cells.LOOKS`
    figure: str = ""  # see `figures.PAINTERS`
    measure: str = ""  # something to be measured beside or instead of cells: see `costs.MEASURES`

    @property
    def looks(self) -> tuple[str, ...]:
        """What is to be found out about each of its cells."""
        return (self.look,) if self.look else ()
