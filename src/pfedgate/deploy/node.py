"""A node's side: its data, its answers to roll call, training and evaluation, and its private states.

Where its data comes from, by `--node-config` (or a function given to `client_app`):

    partition-id=0 num-partitions=3    its share of the recipe's data: clients 0, 3, 6, … of it
    data-dir="/data/photos"            its own copy: the path of [data] name = "folder" or "table", else data_dir
    budget=0.3                         what its clients can afford, instead of the recipe's clients.budget
    novel=true                         its clients are met after training only
    state-dir="/var/lib/pfedgate"      where private states live

Private states are one folder per experiment, atomic, and in step with the server's checkpoints. A state that a round
leaves is pending under (commit, session): the commit of the server it waits for, and the start of the server it belongs
to. A server that was killed goes back to its last checkpoint; `starts[s]` is the commit from which start number s + 1
repeats the work. States of an earlier start from there on are dropped, the rest is current. No state is ever sent.

    <state-dir>/<experiment>/<share>/session.json      the last order taken: stale ones are refused
    <state-dir>/<experiment>/<share>/private/…         see `pfedgate.engine.store`
    <state-dir>/<experiment>/<share>/noise.key         with privacy of samples: the key of this node's noise
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from pfedgate import experiment
from pfedgate.config import options as catalogue
from pfedgate.config import toml
from pfedgate.config.recipe import Recipe
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import unknown
from pfedgate.core.types import Card, Part, Round, State
from pfedgate.deploy.messages import NodeInfo, Parcel
from pfedgate.engine import wire
from pfedgate.engine.endpoint import Endpoint, serve
from pfedgate.engine.files import PRIVATE, make_folder, plain, write_atomically
from pfedgate.engine.server import choose_device, one_thread
from pfedgate.engine.store import DiskStore

KEYS = ("partition-id", "num-partitions", "data-dir", "budget", "novel", "state-dir")
log = logging.getLogger("flwr")
_PENDING = re.compile(r"pending-(\d+)-(\d+)")
_SAFE = re.compile(r"[0-9a-f]{8,64}")  # an experiment's id becomes the name of a folder

Data = Callable[[Mapping[str, Any]], Any]  # a node's configuration -> a federation of its own


class Holding:
    """The part of a federation that a node holds; optionally with labels numbered as the whole fleet does."""

    def __init__(self, whole: Any, clients: Sequence[str], novel: Sequence[str], classes: Sequence[str] = ()) -> None:
        self.whole, self.clients, self.novel = whole, list(clients), list(novel)
        self.class_names = tuple(classes) or getattr(whole, "class_names", None)
        self.classes = len(classes) or whole.classes
        self.task: str = getattr(whole, "task", "classification")
        self.prepare: Callable[[Tensor], Tensor] = whole.prepare
        self._labels: Tensor | None = None
        if classes:
            own = getattr(whole, "class_names", None) or [str(label) for label in range(whole.classes)]
            for name in own:
                if name not in classes:
                    raise ValueError(f"its data: {unknown('class', str(name), classes)} (see deploy.class_names)")
            self._labels = torch.tensor([list(classes).index(name) for name in own])

    def part(self, client: str, name: str) -> Part:
        """Data of one of the node's own clients."""
        if client not in self.clients and client not in self.novel:
            raise KeyError(f"this node does not hold client {client!r}")
        part: Part = self.whole.part(client, name)
        return part if self._labels is None else Relabelled(part, self._labels)


@dataclasses.dataclass(frozen=True)
class Relabelled:
    """A part whose labels are numbered as the whole fleet does."""

    part: Part
    labels: Tensor

    @property
    def n(self) -> int:
        """Number of samples in the part."""
        return self.part.n

    @property
    def x(self) -> Tensor:
        """Inputs of the samples, unchanged."""
        return self.part.x

    @property
    def y(self) -> Tensor:
        """Labels in the numbers of the fleet."""
        return self.labels[self.part.y]


class Node:
    """One node: data and algorithm are made when the first message needs them, and serve all later ones."""

    def __init__(
        self,
        recipe: Recipe,
        node_config: Mapping[str, Any],
        run_config: Mapping[str, Any] | None = None,
        *,
        data: Data | None = None,
        model: Any = None,
    ) -> None:
        self.recipe, self.config, self.run_config = recipe, dict(node_config), dict(run_config or {})
        self.data, self.model = data, model

    def answer(self, parcel: Parcel) -> Parcel:
        """An answer whatever happens: an error is answered in words, so that the server need not wait."""
        try:
            with one_thread():
                return self._introduce() if parcel.about["stage"] == "roll" else self._work(parcel)
        except Exception as error:
            log.exception("this node could not do what it was asked")
            return Parcel({"error": f"{type(error).__name__}: {error}"})

    @cached_property
    def holding(self) -> Holding:
        """The clients of this node and their data."""
        recipe, config = self.recipe, self.config
        whole: Any
        if self.data is not None:
            whole = self.data(config)
        elif "partition-id" in config or "data-dir" in config:
            options = dict(recipe.data.options)
            if "data-dir" in config:
                options["path" if "path" in options else "data_dir"] = str(Path(config["data-dir"]).expanduser())
            whole = catalogue.federation(recipe.data.name, options, novel=recipe.clients.novel, seed=recipe.run.seed)
        else:
            raise ValueError(
                "this node was not told where its data is: start it with --node-config "
                "'partition-id=0 num-partitions=3' or 'data-dir=\"/path\"', or give client_app a function (keys: "
                + ", ".join(KEYS)
                + ")"
            )
        clients, novel = list(whole.clients), list(whole.novel)
        if "partition-id" in config and self.data is None:
            at, of = int(config["partition-id"]), int(config.get("num-partitions", len(clients)))
            if not 0 <= at < of:
                raise ValueError(f"partition-id {at} is not one of {of} (num-partitions)")
            clients, novel = clients[at::of], novel[at::of]
        if config.get("novel"):
            clients, novel = [], [*clients, *novel]
        return Holding(whole, clients, novel, recipe.deploy.class_names)

    @cached_property
    def algorithm(self) -> Algorithm:
        """The recipe's algorithm for data of this node's shape."""
        return experiment.build(self.recipe, experiment.shape_of(self.holding), self.model)

    def _introduce(self) -> Parcel:
        holding = self.holding
        clients, novel = ({c: holding.part(c, "train").n for c in group} for group in (holding.clients, holding.novel))
        budget = self.config.get("budget")
        if isinstance(budget, str):
            budget = toml.value(budget)
        return Parcel(NodeInfo(clients, novel, budget, experiment.shape_of(holding), holding.class_names).plain())

    def _work(self, parcel: Parcel) -> Parcel:
        about = parcel.about
        store = take(
            self.root, str(about["experiment"]), self.place,
            [int(start) for start in about["starts"]], int(about["serial"]), int(about["commit"]),
        )  # fmt: skip
        endpoint = Endpoint(self.algorithm, self.holding, store, choose_device(self.recipe.run.device))
        round = Round(**about["round"])
        gots = [wire.unpack(body) if body else {} for body in parcel.bodies]
        results: dict[str, Any] = {}
        bodies: list[bytes] = []
        for job in about["jobs"]:
            card = Card(**job["card"])
            try:
                got = gots[job["body"]]
                if about["stage"] == "train":
                    update = serve(self.algorithm, got, store, endpoint.local(card, round))
                    results[card.id] = {"body": len(bodies)}
                    bodies.append(wire.encode(update, client=card.id, round=round.index))
                else:
                    scores = {}
                    for scored in endpoint.score(got, card, round, about["points"]):
                        test, val = (list(dataclasses.astuple(score)) for score in (scored.test, scored.val))
                        scores[scored.point] = {"test": test, "val": val, "stats": scored.stats}
                    results[card.id] = {"scores": scores}
            except Exception as error:  # one client's trouble is not that of the others on this node
                log.exception("client %r could not do its part", card.id)
                results[card.id] = {"error": f"{type(error).__name__}: {error}"}
        return Parcel({"clients": results}, bodies)

    @property
    def root(self) -> Path:
        """Where private states live: the node's own setting first, then the run's, then a folder of the user."""
        folder = self.config.get("state-dir") or self.run_config.get("state-dir") or "~/.local/state/pfedgate"
        return Path(str(folder)).expanduser()

    @property
    def place(self) -> str:
        """The folder of this node among others that keep their states in the same root."""
        if "partition-id" in self.config:
            return f"{int(self.config['partition-id'])}-of-{int(self.config.get('num-partitions', 0))}"
        everyone = "\x1f".join(sorted([*self.holding.clients, *self.holding.novel]))
        return "own-" + hashlib.blake2b(everyone.encode(), digest_size=6).hexdigest()


class StaleOrder(RuntimeError):
    """An order that a newer one has overtaken: it came twice, or late, or from a server that is gone."""


@dataclasses.dataclass(frozen=True)
class Order:
    """Where the server is: its start (from 1), the number of the message in it, the commit it works on."""

    session: int
    serial: int
    commit: int


class NodeStore(DiskStore):
    """Private states that can be written only as long as no newer order has been taken."""

    def __init__(self, folder: Path, order: Order) -> None:
        super().__init__(folder / "private", f"{order.commit}-{order.session}", sync=True)
        self.folder, self.order = folder, order

    def put(self, client: str, state: State) -> None:
        """Write a state, unless this process was overtaken: a killed node's last process may still be at work."""
        with _lock(self.folder):
            if _last(self.folder) != self.order:
                raise StaleOrder("a newer order came while this one was at work")
            super().put(client, state)

    def secret(self) -> bytes:
        """The key of this node's own noise, in the experiment's folder."""
        with _lock(self.folder):
            return super().secret()


def take(root: Path, experiment: str, share: str, starts: Sequence[int], serial: int, commit: int) -> NodeStore:
    """The store for an order of the server; pending states are settled first."""
    if not _SAFE.fullmatch(experiment):
        raise ValueError(f"{experiment!r} is no id of an experiment")
    folder = root / experiment / share
    make_folder(folder, mode=0o700, durable=True)
    folder.parent.chmod(0o700)
    order = Order(len(starts), serial, commit)
    with _lock(folder):
        last = _last(folder)
        if last is not None and (order.session, order.serial) <= (last.session, last.serial):
            raise StaleOrder(
                f"order {order.serial} of start {order.session} came after order {last.serial} of start {last.session}"
            )
        _settle(folder / "private", starts, commit)
        write_atomically(
            folder / "session.json", json.dumps(dataclasses.asdict(order)).encode(), sync=True, mode=PRIVATE
        )
    return NodeStore(folder, order)


def current(root: str | Path, experiment: str, share: str) -> DiskStore:
    """A node's private states as they are now, for reading."""
    folder = Path(root) / experiment / share
    last = _last(folder)
    return DiskStore(folder / "private", None if last is None else f"{last.commit}-{last.session}")


def _settle(private: Path, starts: Sequence[int], commit: int) -> None:
    session, pending = len(starts), []
    for path in private.glob("pending-*"):
        match = _PENDING.fullmatch(path.name)
        if match:
            pending.append((int(match[1]), int(match[2]), path))
    for number, start, path in sorted(pending):
        redone = starts[start] if start < session else commit + 1  # where the next start of the server began
        if number < commit and number < redone:
            DiskStore(private, f"{number}-{start}", sync=True).commit()
        elif (number, start) != (commit, session):
            shutil.rmtree(path, ignore_errors=True)


def _last(folder: Path) -> Order | None:
    try:
        return Order(**plain(folder / "session.json"))
    except FileNotFoundError:
        return None


def _lock(folder: Path) -> FileLock:
    """One process at a time; the system lets go of the lock when a process dies."""
    return FileLock(folder / "lock", mode=0o600)
