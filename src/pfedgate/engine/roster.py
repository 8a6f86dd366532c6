"""Who takes part and how a run is to go: options, the roster of clients, sampling, budgets of clients."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import unknown
from pfedgate.core.ids import Ids
from pfedgate.core.modules import skeleton
from pfedgate.core.seeds import key
from pfedgate.core.types import Budget, Card, Federation, Privacy, ServerOptim
from pfedgate.engine.endpoint import POINTS
from pfedgate.fleet.clock import Clock
from pfedgate.fleet.devices import Device, Fleet, Need, by_id
from pfedgate.fleet.pace import Pace
from pfedgate.training.workspace import flops_per_sample, saved_bytes_per_sample

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
DEVICE = "device"  # a budget that follows from the client's device
RESOURCES = ("params", "flops", "activation_bytes", "reducible_bytes", "latency_ms", "speedup")


@dataclass(frozen=True)
class Options:
    """How to run, as opposed to what (the algorithm) and on which data (the federation)."""

    rounds: int = 100
    sample: float | int = 1.0  # clients a round: a share (float ≤ 1) or a number (int); without replacement
    seed: int = 0
    evaluate_every: int = 5  # rounds; the last one is always evaluated; 0 = never
    points: tuple[str, ...] = ("after_broadcast",)  # and "after_local": both are recorded under their names
    agg_norm: str = "sampled"  # average over sampled clients, or over "all" (others count as unchanged)
    budget: Any = 1.0  # see `budgets`
    stack: int | str = "auto"  # clients trained together where the algorithm can: a number, 0 = never
    device: str = "auto"
    stop_after: int | None = None  # evaluations without a better score on validation data; None: all rounds
    novel: bool = True  # after training, adapt and score the clients held out
    checkpoint_every: int = 1  # rounds; only with a folder
    keep_best: bool = True  # with a folder: keep the State that was best on validation
    fleet: Pace = field(default_factory=Pace)  # the clients' devices, and whom a round waits for
    server: ServerOptim = field(default_factory=ServerOptim)  # what the server makes of a round's mean
    privacy: Privacy = field(default_factory=Privacy)  # how little the model tells of any one client

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
        listed = Ids(ids)
        order = listed.order
        self.ids = listed if order is None else listed[order]
        if bool(np.any(self.ids.names[:-1] == self.ids.names[1:])):
            raise ValueError("client ids must be different from each other")
        numbers: Ints = np.asarray(sizes, dtype=np.int32)
        self.sizes = numbers if order is None else numbers[order]
        # Kinds of budgets are few: a byte or four for each client says which is its own.
        places: dict[float | int, int] = {}
        keys = (budget if isinstance(budget, float) else id(budget) for budget in given)
        owned = np.fromiter((places.setdefault(key, len(places)) for key in keys), np.int32, count=len(given))
        self._kinds = [given[int(at)] for at in np.unique(owned, return_index=True)[1]]
        self._owned = (owned if order is None else owned[order]).astype(np.uint8 if len(places) <= 256 else np.int32)

    @classmethod
    def of(cls, source: Federation | Cards, group: str, options: Options, algorithm: Algorithm | None = None) -> Roster:
        """The training (`clients`) or the held-out (`novel`) clients of a federation, or of some cards.

        With the budget "device" the algorithm's task says how much there is to train.
        """
        if isinstance(source, Cards):
            cards = getattr(source, group)
            return cls([c.id for c in cards], [c.n_train for c in cards], [c.budget for c in cards])
        for name in algorithm.clients_named() if algorithm else ():
            if name not in source.clients and name not in source.novel:
                raise ValueError(f"an option of the algorithm: {unknown('client', name, source.clients)}")
        ids, given = getattr(source, group), options.budget
        if isinstance(given, list | tuple):
            # A list is for the training clients, or for them and the held-out ones after them. Held-out clients
            # that it does not reach get its values in turn: devices like those seen in training.
            first = len(source.clients)
            if group == "clients":
                given = given[:first] if len(given) == first + len(source.novel) else given
            else:
                given = [value for value, _ in zip(itertools.cycle(given[first:] or given), ids, strict=False)]
        if hasattr(source, "sizes") and hasattr(source, "ids"):  # at once where they are known without reading
            sizes = source.sizes("train")[Ids(source.ids).places(Ids(ids))]
        else:
            sizes = [source.part(client, "train").n for client in ids]
        if given == DEVICE:
            if not options.fleet.devices or algorithm is None:
                raise ValueError('clients.budget = "device" needs to know the devices: set fleet.devices')
            afford = affordable(algorithm, clock_of(source, options).fleet, options.fleet.deadline)
            return cls(ids, sizes, [afford(client, n) for client, n in zip(ids, sizes, strict=True)])
        return cls(ids, sizes, budgets(given, ids, options.seed, others=itertools.chain(source.clients, source.novel)))

    def __len__(self) -> int:
        return len(self.ids)

    def card(self, at: int) -> Card:
        """The card of the client at this position."""
        return Card(self.ids[at], int(self.sizes[at]), self._kinds[self._owned[at]])

    def __iter__(self) -> Iterator[Card]:
        return (self.card(at) for at in range(len(self)))

    @property
    def able(self) -> Ints:
        """Positions of the clients that have training data."""
        return np.flatnonzero(self.sizes)

    def wanted(self, sample: float | int) -> int:
        """How many clients a round asks for; clients without training data do not count."""
        able = int(np.count_nonzero(self.sizes))
        if not able:
            raise ValueError("no client has training data")
        return min(able, sample if isinstance(sample, int) else max(1, int(sample * able)))

    def draw(self, sample: float | int, seed: int, round: int, among: Ints | None = None) -> list[Card]:
        """The clients of a round, sorted; clients without training data are never drawn.

        `among` are the positions of the clients that may be drawn; default: all.
        """
        wanted = self.wanted(sample)
        able: Ints | range = range(len(self))  # of a million clients no list, if there is none without data
        if among is not None:
            able = np.sort(among[self.sizes[among] > 0])
        elif not self.sizes.all():
            able = self.able
        generator = np.random.default_rng(key(seed, "sample", round))
        places = generator.choice(len(able), min(wanted, len(able)), replace=False, shuffle=False)
        return [self.card(int(able[at])) for at in np.sort(places)]


def budgets(spec: Any, ids: Sequence[str], seed: int = 0, others: Iterable[str] = ()) -> list[Budget]:
    """One budget for every id, in their order; `others` are clients that a mapping may name, too.

    number          the same for all
    list            one each, in the order of `ids`
    mapping         by id, `"default"` for the rest: {"anna": 0.3, "default": 1.0}
    distribution    {0.5: 0.5, 0.1: 0.5} = half of the clients 0.5, half 0.1 (exact counts, drawn by seed)
    resources       {"params": 0.5, "latency_ms": 8} = the same bounds for all
    path to a CSV   columns `id` and `budget`, or `id` and resources (params, flops, …): one row per device

    `everyone` are all clients there are: a budget for anybody else is refused, or in a file of devices warned of.

    >>> budgets({0.5: 0.5, 0.1: 0.5}, ["a", "b", "c", "d"]).count(0.1)
    2
    >>> budgets({"a": 0.3, "default": 1.0}, ["a", "b"])
    [0.3, 1.0]
    """
    where = "the mapping"
    if spec == DEVICE:
        raise ValueError('the budget "device" is for simulated fleets: give a node its own in --node-config')
    if isinstance(spec, (int, float)):
        return [_budget(spec)] * len(ids)
    if isinstance(spec, (str, Path)):
        spec, where = _read(Path(spec)), str(spec)
    elif isinstance(spec, Mapping):
        if not spec:
            raise ValueError("an empty mapping gives no client a budget")
        if "upload" in spec and set(spec) - {"upload"} <= set(RESOURCES):
            raise ValueError("a cap on the upload is the method's, the same for all clients: set algorithm.upload")
        if set(spec) <= set(RESOURCES):
            return [_budget(spec)] * len(ids)
        if (drawn := _drawn(spec, ids, seed)) is not None:
            return drawn
    elif isinstance(spec, Sequence):
        if len(spec) != len(ids):
            raise ValueError(f"{len(spec)} budgets for {len(ids)} clients: give one each, or a single number")
        return [_budget(value) for value in spec]
    else:
        raise TypeError(f"a budget is a number, list, mapping or path to a CSV, got {type(spec).__name__}")
    every = {*ids, *others, "default"}
    for client in spec:
        if client not in every:
            near = difflib.get_close_matches(str(client), every - {"default"}, n=1, cutoff=0.5)
            hint = f": did you mean {near[0]!r}?" if near else f"; clients are {', '.join(sorted(every)[:9])}, ..."
            raise ValueError(f"{where} has a budget for {client!r}, which is no client{hint}")
    for client in ids:
        if client not in spec and "default" not in spec:
            raise ValueError(f"{where} has no budget for client {client!r} and no 'default'")
    return [_budget(spec[client] if client in spec else spec["default"]) for client in ids]


def _budget(value: Any) -> Budget:
    """A number, or one for each resource."""
    if isinstance(value, Mapping):
        for name in value:
            if name not in RESOURCES:
                raise ValueError(unknown("resource", str(name), RESOURCES))
        return {str(name): _number(bound) for name, bound in value.items()}
    return _number(value)


def _number(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"a budget is a number > 0 (a share of the dense model if ≤ 1), got {value}")
    return number


def _drawn(spec: Mapping[Any, Any], ids: Sequence[str], seed: int) -> list[Budget] | None:
    """Budgets by a distribution {budget: share}: its keys are numbers (TOML has them as text), shares add up to 1."""
    try:
        shares = {float(value): float(share) for value, share in spec.items()}
    except (TypeError, ValueError):
        return None
    if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values()) < 0:
        return None
    # Ranks by a hash of the id: who gets which does not depend on the order of the list.
    ranks = np.argsort(np.argsort([key(seed, "budget", client) for client in ids], kind="stable"))
    edges = np.rint(np.cumsum(list(shares.values())) * len(ids)).astype(int)
    values = [_number(value) for value in shares]
    return [values[int(np.searchsorted(edges, rank, side="right"))] for rank in ranks]


def _read(path: Path) -> dict[str, Any]:
    """A CSV of devices: `id,budget` or `id,params,latency_ms,…`; empty cells do not bind."""
    if not path.exists():
        raise FileNotFoundError(f"no file {path}: a budget is a share such as 0.3, or the path of a CSV of devices")
    return {client: _budget(row.get("budget") or row) for client, row in by_id(path).items()}


def clock_of(source: Federation | Cards, options: Options) -> Clock:
    """The virtual clock of a run: every client of the federation has a device."""
    if isinstance(source, Cards):
        ids: Sequence[str] = [card.id for card in (*source.clients, *source.novel)]
    else:
        ids = [*source.clients, *source.novel] if len(source.novel) else source.clients
    return Clock(Fleet.of(options.fleet.devices, ids, options.seed), options.seed)


def affordable(algorithm: Algorithm, fleet: Fleet, deadline: float | None) -> Callable[[str, int], Budget]:
    """What a client's device can train within its memory, the deadline and its data plan, as `clients.budget`."""
    task = algorithm.task

    @cache
    def of(device: Device, n: int) -> Budget:
        steps = task.steps if task.steps is not None else task.epochs * -(-n // task.batch)
        samples = n * task.epochs if task.steps is None else steps * min(task.batch, n)
        sample = torch.Size(task.inputs.shape[1:])
        need = Need(
            params=sum(value.numel() for _, value in skeleton(task.model).named_parameters()),
            flops=samples * flops_per_sample(task.model, None, sample, task.inputs.dtype, True),
            activation_bytes=min(task.batch, n) * saved_bytes_per_sample(task.model, sample, task.inputs.dtype),
            steps=steps,
            whole=algorithm.sends_whole,
        )
        return device.budget(need, math.inf if deadline is None else deadline)

    return lambda client, n: of(fleet.device(client), n) if n else 1.0
