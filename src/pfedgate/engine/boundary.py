"""The boundary: whatever a node says passes here before the server uses, keeps or prints it.

A node may be wrong, broken or hostile, so nothing that it says may end a run, overwrite what the server itself records,
or fill its memory and logs. What fails here is `Refused`, in words that are short and printable: the client (or at the
roll call the node) is left out, named and with the reason, and the others go on.

    admit(algorithm, got, card, update)    an update: types, sizes of numbers, names, weight, then the method's check
    score(card, entry, metrics)            scores and statistics of one client at one point
    roll(about)                            a node's answer to the roll call
    words(value)                           a text for logs and records
    reading(what)                          whatever else fails inside is `Refused`, too

In one process, in worker processes and on Ray, updates are made by this same code, and pass `admit` all the same.

>>> words("no space\\nleft \\x1b[31m" + "x" * 500, 30)
'no space left [31mxxxxxxxxxxxx… (519 characters)'
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.kinds import METRICS, Metric, kind_of
from pfedgate.core.state import floating
from pfedgate.core.types import Card, DataShape, State, Update
from pfedgate.training.fit import Score

CLIENTS = 10_000  # ids that one node may hold
SAMPLES = 10**9  # of one client
VALUE = 1e9  # the largest value of a model: training that passes it has failed already
COUNT = 2**53  # the largest whole number in a model
NUMBER = 1e18  # the largest number beside it, such as FLOPs
NUMBERS = 64  # names of numbers that one client may send
TEXT = 400  # characters of a reason
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_./@ -]{0,63}")  # of a number
SIDES = (8, 65_536, 2**28, 10**6)  # of an input: dimensions, the largest, entries; and classes
# float8 and complex numbers have no arithmetic here, bfloat16 not on every machine.
TYPES = (
    *(torch.float32, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
INPUTS = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.uint8, torch.float32, torch.int64, torch.int32)}

# What the server itself writes into records, lines, tables and events. A client's numbers lie beside it and never have
# such a name.
RESERVED = {
    *("after_broadcast", "after_local", "batch_1", "per_client", "novel", "client", "clients", "point"),
    *("round", "rounds", "sampled", "lr_factor", "bytes_up", "bytes_down", "virtual_seconds", "joules", "dropped"),
    *("refused", "refusals", "clipped", "began", "seconds", "late", "stale", "event", "seconds_evaluation"),
    *("epsilon", "delta", "update_norm", "shortened", "resident_bytes", "peak_bytes"),
    *("metric", "higher", "n_test", "n_val", "bottom_decile", "worst_tenth", "spread"),
    *METRICS,
}
PREFIXES = ("val_", "best_", "training_", "rounds_to_")
SPOKEN = {"update": {"loss", "flops"}, "score": {"bytes_down", "flops"}}  # what clients say under a name of the server


class Refused(ValueError):
    """What a node said cannot be used; the message may be shown."""


def words(value: object, most: int = TEXT) -> str:
    """A text from outside on one line, printable and short."""
    text = str(value)
    clean = "".join(each if each.isprintable() else " " if each.isspace() else "" for each in text[: 4 * most])
    clean = " ".join(clean.split())
    return clean if len(text) <= most else f"{clean[:most]}… ({len(text)} characters)"


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Reading what a node said may fail in any way: all of them are `Refused`."""
    try:
        yield
    except Exception as error:
        raise _refused(what, error) from error


def _refused(what: str, error: Exception) -> Refused:
    if isinstance(error, Refused):
        return type(error)(words(error))
    return Refused(words(f"{what} cannot be used: {type(error).__name__}: {error}"))


def number(value: object, most: float = NUMBER, least: float = -NUMBER) -> float:
    """A finite number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(f"{words(repr(value), 60)} is no number")
    if not least <= value <= most:  # NaN compares false, and a whole number of 400 digits is compared exactly
        shown = repr(value) if isinstance(value, float) or abs(value) < 10**30 else "a number"
        raise Refused(f"{shown} is not within {least:g} … {most:g}")
    return float(value)


def whole(value: object, most: int) -> int:
    """A whole number from 0."""
    if type(value) is not int or not 0 <= value <= most:
        shown = repr(value) if isinstance(value, float) or (type(value) is int and abs(value) < 10**30) else "this"
        raise Refused(f"{words(shown, 60)} is no whole number from 0 to {most}")
    return value


def identity(value: object) -> str:
    """A client's id: printable text of at most 255 bytes."""
    if not isinstance(value, str) or not value or not value.isprintable() or len(value.encode()) > 255:
        raise Refused(f"{words(repr(value), 60)} is no client's id: those are printable and of 1 to 255 bytes")
    return value


def numbers(said: Mapping[Any, Any], stage: str, taken: Sequence[str] = ()) -> dict[str, float]:
    """Named numbers of a client; one that is NaN or infinite says nothing and is left out."""
    if len(said) > NUMBERS:
        raise Refused(f"{len(said)} named numbers, at most {NUMBERS} are read")
    kept = {}
    for name, value in said.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Refused(f"{words(repr(name), 80)} cannot be the name of a number")
        if (name in RESERVED or name in taken or name.startswith(PREFIXES)) and name not in SPOKEN[stage]:
            raise Refused(f"a number is called {name!r}, which is a name of the server's own")
        if not isinstance(value, float) or math.isfinite(value):
            kept[name] = number(value, least=0.0 if name == "flops" else -NUMBER)
    return kept


def admit(algorithm: Algorithm, got: State, card: Card, update: Update) -> Update:
    """The update as the server may use it: no heavier than the roll says, and without numbers that say nothing."""
    try:
        if not math.isfinite(update.weight) or update.weight <= 0:
            raise Refused(f"weight is {update.weight}, must be a finite number > 0")
        for name, value in update.shared.items():
            if value.dtype not in TYPES:
                raise Refused(f"{words(repr(name), 80)} is {value.dtype}: not a type that is computed with")
        if (weight := float(max(card.n_train, 1))) < update.weight:
            update = replace(update, weight=weight)
        if reason := _out_of_bounds(update) or algorithm.check(got, update):
            raise Refused(reason)
        said = numbers(update.metrics, "update", [metric.name for metric in algorithm.task.metrics])
        return update if said == update.metrics else replace(update, metrics=said)
    except Exception as error:
        raise _refused("its update", error) from error


def _out_of_bounds(update: Update) -> str | None:
    floats, vector = floating(update)
    if vector is not None and not _small(vector):
        for name, value in floats.items():
            if not bool(value.isfinite().all()):
                return f"{words(repr(name), 80)}: NaN or infinity"
        for name, value in floats.items():
            if not _small(value):
                return f"{words(repr(name), 80)}: values beyond {VALUE:g}"
    if len(floats) == len(update.shared):
        return None
    for name, value in update.shared.items():
        if name not in floats and value.dtype is torch.int64 and value.numel() and int(value.abs().max()) > COUNT:
            return f"{words(repr(name), 80)}: whole numbers beyond {COUNT}"
    return None


def _small(values: Tensor) -> bool:
    """Whether all values are finite and within bounds: in the usual case for the price of a dot product."""
    values = values if values.ndim == 1 else values.reshape(-1)
    square = torch.dot(values, values).item()
    return square <= VALUE**2 or (bool(values.isfinite().all()) and float(values.abs().max()) <= VALUE)


def score(card: Card, entry: Mapping[str, Any], metrics: Sequence[Metric]) -> tuple[Score, Score, dict[str, float]]:
    """A client's (test, val, statistics) at one point.

    Scores count by samples, so their number is bounded by what the roll says of the client.
    """
    most = 10 * card.n_train + 1000
    parts = []
    for part in ("test", "val"):
        n, loss, main, more = entry[part]
        scores = [main, *more]
        if len(scores) != len(metrics):
            raise Refused(f"{len(scores)} scores for {len(metrics)} metrics")
        n = whole(n, most)
        if not n:  # nothing to score
            parts.append(Score(0, math.nan, math.nan, (math.nan,) * len(more)))
            continue
        bounds = [(1.0 + 1e-6, 0.0) if metric.share else (NUMBER, -NUMBER) for metric in metrics]
        values = [number(value, *bound) for value, bound in zip(scores, bounds, strict=True)]
        parts.append(Score(n, number(loss), values[0], tuple(values[1:])))
    return parts[0], parts[1], numbers(entry["stats"], "score", ["loss", *(metric.name for metric in metrics)])


@dataclass(frozen=True)
class Introduction:
    """A node's answer to the roll call, checked."""

    clients: Mapping[str, int]  # id -> training samples
    novel: Mapping[str, int]
    budget: Any  # None: the recipe's
    shape: DataShape
    class_names: tuple[str, ...] | None = None


def roll(about: Mapping[str, Any]) -> Introduction:
    """What a node says of itself: its clients, how much they have, what they can afford, the shape of their data."""
    with reading("its answer to the roll call"):
        groups = [about["clients"], about["novel"]]
        if not all(isinstance(group, dict) for group in groups):
            raise Refused("its clients are no table")
        if (held := sum(map(len, groups))) > CLIENTS:
            raise Refused(f"it holds {held} clients, at most {CLIENTS} are read of one node")
        clients, novel = ({identity(c): whole(n, SAMPLES) for c, n in group.items()} for group in groups)
        if not clients and not novel:
            raise Refused("it holds no client")
        if both := clients.keys() & novel.keys():
            raise Refused(f"client {min(both)!r} is both for training and novel")
        shape, names = _shape(about["data"])
        return Introduction(clients, novel, _budget(about.get("budget")), shape, names)


def _budget(said: object) -> Any:
    if isinstance(said, Mapping):
        if len(said) > NUMBERS:
            raise Refused("its budget has too many entries")
        return {words(name, 60): _bound(name, bound) for name, bound in said.items()}
    return None if said is None else _bound("it", said)


def _bound(name: object, said: object) -> float:
    try:
        return number(said)
    except Refused as error:  # a text, for example, would name a file of the server's
        raise Refused(f"a budget is a number or a table of numbers: {words(name, 60)}: {error}") from error


def _shape(data: Mapping[str, Any]) -> tuple[DataShape, tuple[str, ...] | None]:
    # Journals of runs that began before 2026-11-18 name the shape of a prepared batch apart from that of a raw one.
    sizes, dtype = data.get("prepared_shape", data.get("shape")), data.get("prepared_type", data.get("dtype"))
    if not isinstance(dtype, str) or dtype not in INPUTS:
        raise Refused(f"inputs of type {words(repr(dtype), 60)}")
    dimensions, side, entries, most = SIDES
    if not isinstance(sizes, list | tuple) or len(sizes) > dimensions:
        raise Refused(f"{words(repr(sizes), 60)} is no shape of an input")
    shape = tuple(whole(size, side) for size in sizes)
    if math.prod(shape) > entries:
        raise Refused(f"inputs of {math.prod(shape)} numbers")
    classes, names = whole(data["classes"], most), data["class_names"]
    if names is not None:
        if not isinstance(names, list | tuple) or len(names) != classes:
            raise Refused(f"class_names are not {classes} names")
        names = tuple(words(name, 100) for name in names)
    kind = kind_of(words(data.get("task", "classification"), 60)).name
    return DataShape(classes, shape, INPUTS[dtype], kind), names
