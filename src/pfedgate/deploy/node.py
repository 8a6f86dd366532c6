"""A node's side: its data, its private states, its answers to roll call, training and evaluation.

Where its data comes from, by `--node-config` (or a function given to `client_app`):

    partition-id=0 num-partitions=3    its share of the recipe's data: clients 0, 3, 6, … of it
    data-dir="/data/photos"            its own copy: the path of [data] name = "folder" or "table", else data_dir
    budget=0.3                         what its clients can afford, instead of the recipe's clients.budget
    novel=true                         its clients are met after training only
    state-dir="/var/lib/pfedgate"      where private states live
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfedgate import experiment
from pfedgate.config import options as catalogue
from pfedgate.config.recipe import GIVEN, Named, Recipe
from pfedgate.config.toml import value
from pfedgate.core.errors import unknown
from pfedgate.core.types import Card, Federation, Part, Round
from pfedgate.deploy import states as state
from pfedgate.deploy.parcels import Parcel
from pfedgate.deploy.roll import Told
from pfedgate.engine import wire
from pfedgate.engine.endpoint import Endpoint, Scored, serve
from pfedgate.engine.server import choose_device, one_thread

KEYS = ("partition-id", "num-partitions", "data-dir", "budget", "novel", "state-dir")
log = logging.getLogger("flwr")

Data = Callable[[Mapping[str, Any]], Any]  # what a node was configured with -> a federation of its own


class Share:
    """The part of a federation that a node holds; optionally with labels numbered as the whole fleet does."""

    def __init__(self, whole: Any, clients: Sequence[str], novel: Sequence[str], classes: Sequence[str] = ()) -> None:
        self.whole, self.clients, self.novel = whole, list(clients), list(novel)
        self.class_names = list(classes) or getattr(whole, "class_names", None)
        self.classes = len(classes) or whole.classes
        self._labels: Tensor | None = None
        if classes:
            own = getattr(whole, "class_names", None) or [str(label) for label in range(whole.classes)]
            for name in own:
                if name not in classes:
                    raise ValueError(f"its data: {unknown('class', str(name), classes)} (see deploy.class_names)")
            self._labels = torch.tensor([list(classes).index(name) for name in own])

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.whole.input_shape)

    @property
    def prepare(self) -> Callable[[Tensor], Tensor]:
        """Raw batch to input."""
        made: Callable[[Tensor], Tensor] = self.whole.prepare
        return made

    def part(self, client: str, name: str) -> Part:
        """Data of one of the node's own clients."""
        if client not in self.clients and client not in self.novel:
            raise KeyError(f"this node does not hold client {client!r}")
        part: Part = self.whole.part(client, name)
        return part if self._labels is None else Renamed(part, self._labels)


@dataclasses.dataclass(frozen=True)
class Renamed:
    """A part whose labels are numbered otherwise."""

    part: Part
    labels: Tensor

    @property
    def n(self) -> int:
        """Number of samples."""
        return self.part.n

    @property
    def x(self) -> Tensor:
        """Inputs."""
        return self.part.x

    @property
    def y(self) -> Tensor:
        """Labels of the fleet."""
        return self.labels[self.part.y]


class Node:
    """One node, for the time of one message."""

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
        """Whatever happens, an answer: errors are told in words, so that the server need not wait for the deadline."""
        try:
            with one_thread():
                return self._tell() if parcel.about["stage"] == "roll" else self._work(parcel)
        except Exception as error:
            log.exception("this node could not do what it was asked")
            return Parcel({"error": f"{type(error).__name__}: {error}"})

    def federation(self) -> Share:
        """The clients of this node."""
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
        return Share(whole, clients, novel, recipe.deploy.class_names)

    def _tell(self) -> Parcel:
        share = self.federation()
        clients, novel = ({c: share.part(c, "train").n for c in group} for group in (share.clients, share.novel))
        for client in [*share.clients, *share.novel]:
            raw = share.part(client, "train").x[:1]
            if len(raw):
                break
        else:
            raise ValueError("none of its clients has training data")
        prepared = share.prepare(raw)
        shape = {
            "raw_shape": list(raw.shape[1:]),
            "raw_type": str(raw.dtype).removeprefix("torch."),
            "shape": list(share.input_shape),
            "prepared_shape": list(prepared.shape[1:]),
            "prepared_type": str(prepared.dtype).removeprefix("torch."),
            "classes": int(share.classes),
            "class_names": None if share.class_names is None else list(share.class_names),
        }
        budget = self.config.get("budget")
        return Parcel(Told(clients, novel, value(budget) if isinstance(budget, str) else budget, shape).plain())

    def _work(self, parcel: Parcel) -> Parcel:
        about = parcel.about
        share = self.federation()
        store = state.take(
            self.root, str(about["experiment"]), self.place(share),
            [int(start) for start in about["starts"]], int(about["serial"]), int(about["commit"]),
        )  # fmt: skip
        recipe = dataclasses.replace(self.recipe, data=Named(GIVEN))
        algorithm = experiment.plan(recipe, data=_Any(share), model=self.model).algorithm
        endpoint = Endpoint(algorithm, share, store, choose_device(recipe.run.device))
        round = Round(**about["round"])
        gots = [wire.unpack(body) if body else {} for body in parcel.bodies]
        told: dict[str, Any] = {}
        bodies: list[bytes] = []
        for job in about["jobs"]:
            card = Card(**job["card"])
            try:
                got = gots[job["body"]]
                if about["stage"] == "train":
                    update = serve(algorithm, got, store, endpoint.local(card, round))
                    told[card.id] = {"body": len(bodies)}
                    bodies.append(wire.encode(update, client=card.id, round=round.index))
                else:
                    scores = {s.point: _plain(s) for s in endpoint.score(got, card, round, about["points"])}
                    told[card.id] = {"scores": scores}
            except Exception as error:  # one client's trouble is not that of the others on this node
                log.exception("client %r could not do its part", card.id)
                told[card.id] = {"error": f"{type(error).__name__}: {error}"}
        return Parcel({"clients": told}, bodies)

    @property
    def root(self) -> Path:
        """Where private states live: the node's own setting first, then the run's, then a folder of the user."""
        chosen = self.config.get("state-dir") or self.run_config.get("state-dir") or "~/.local/state/pfedgate"
        return Path(str(chosen)).expanduser()

    def place(self, share: Share) -> str:
        """The folder of this node among others that keep their states in the same root."""
        if "partition-id" in self.config:
            return f"{int(self.config['partition-id'])}-of-{int(self.config.get('num-partitions', 0))}"
        everyone = "\x1f".join(sorted([*share.clients, *share.novel]))
        return "own-" + hashlib.blake2b(everyone.encode(), digest_size=6).hexdigest()


class _Any:
    """A share as `experiment.plan` wants it: with some client first, though all be novel."""

    def __init__(self, share: Share) -> None:
        self._share = share
        everyone = [*share.clients, *share.novel]
        self.clients = [c for c in everyone if share.part(c, "train").n][:1] or everyone[:1]
        self.novel: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._share, name)


def _plain(scored: Scored) -> dict[str, Any]:
    test, val = (list(dataclasses.astuple(score)) for score in (scored.test, scored.val))
    return {"test": test, "val": val, "stats": scored.stats}


_: type[Federation] = Share  # checked by the type checker
