"""A client that took no part in training, met later: its data from a file, its private state into a file.

adapted = adapt("runs/x", "photos/anna", budget=0.3)     it trains what is private; the shared model stands still
adapted.before, adapted.after                            scores on the client's test data
adapted.save("gate.safetensors")
load("runs/x", "gate.safetensors")                       the same again: `pfedgate export RUN --gate gate.safetensors`
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from pfedgate import experiment
from pfedgate.core.errors import unknown, warn
from pfedgate.core.types import Budget, Card, Round, State
from pfedgate.data.federation import Federation
from pfedgate.data.own import IMAGES, from_arrays
from pfedgate.data.sources import picture
from pfedgate.data.table import read, stack
from pfedgate.engine import files
from pfedgate.engine.endpoint import POINTS, Endpoint, Scored
from pfedgate.engine.roster import Roster
from pfedgate.engine.store import MemoryStore
from pfedgate.runs import folder as runfolder

TABLES = (".csv", ".tsv", ".parquet", ".pq")


@dataclass(frozen=True)
class Adapted:
    """A newcomer of a run: its private state, and what it takes to use it."""

    plan: experiment.Experiment
    server: State
    endpoint: Endpoint
    card: Card
    round: Round
    about: Mapping[str, str]

    @property
    def state(self) -> State:
        """The private state: of pFedGate the gate."""
        return self.endpoint.store.get(self.card.id) or {}

    @cached_property
    def before(self) -> Scored:
        """Scores with the private state that every client begins with."""
        fresh = Endpoint(self.plan.algorithm, self.endpoint.federation, MemoryStore())
        return next(iter(fresh.evaluate(self.server, self.round, [self.card], POINTS[:1])))

    @cached_property
    def after(self) -> Scored:
        """Scores with what was learnt."""
        return next(iter(self.endpoint.evaluate(self.server, self.round, [self.card], POINTS[:1])))

    def save(self, path: str | Path) -> Path:
        """Write the private state, and where its data lies, as safetensors."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.cpu().contiguous() for name, value in self.state.items()}
        save_file(tensors, target, metadata=dict(self.about))
        return target


def adapt(run: str | Path, data: str | Path, *, budget: Budget | None = None, client: str | None = None) -> Adapted:
    """Let a new client train what the run's method keeps private, on data from a file or folder.

    data     images as <class>/<image> or <client>/<class>/<image>, or a table with the run's columns
    budget   what the client can afford; by default what the run gives its clients, if that is one for all
    client   which client of several in the data; otherwise just a name
    """
    about = {"data": str(Path(data).expanduser().resolve()), "client": client or ""}
    adapted = _prepared(run, about, budget)
    endpoint = adapted.endpoint
    endpoint.store.put(adapted.card.id, endpoint.adapt(adapted.server, adapted.card, adapted.round))
    return adapted


def load(run: str | Path, file: str | Path) -> Adapted:
    """What `Adapted.save` wrote; the client's data is read again from where it lay."""
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: `pfedgate adapt {run} --data … --out {path}` writes it")
    state, about = files.tensors(path)
    if not {"data", "client", "budget"} <= set(about):
        raise ValueError(f"{path} was not written by `pfedgate adapt`")
    adapted = _prepared(run, about, json.loads(about["budget"]))
    adapted.endpoint.store.put(adapted.card.id, state)
    return adapted


def _prepared(run: str | Path, about: Mapping[str, str], budget: Budget | None) -> Adapted:
    folder = runfolder.load(run)
    plan = experiment.plan(folder.recipe)
    which = "best" if (folder.path / "best.safetensors").exists() else "last"
    name = about["client"]
    federation = newcomer(Path(about["data"]), plan.federation, folder.recipe.data.options, name)
    (id,) = federation.clients
    if budget is None:
        each = [card.budget for card in Roster.of(plan.federation, "clients", plan.options, plan.algorithm)]
        if any(value != each[0] for value in each):
            raise ValueError("the run's clients have different budgets: say what this one can afford with budget=…")
        budget = each[0]
    card = Card(id, federation.part(id, "train").n, budget)
    plan.algorithm.ready(card)
    endpoint = Endpoint(plan.algorithm, federation, MemoryStore())
    round = Round(max(0, len(folder.metrics) - 1), plan.options.rounds, plan.options.seed)
    return Adapted(plan, folder.server(which), endpoint, card, round, {**about, "budget": json.dumps(budget)})


def newcomer(path: Path, like: Any, options: Mapping[str, Any], client: str = "") -> Federation:
    """The federation of one new client, prepared as the data of a run (`like`) is, with its classes."""
    if path.suffix.lower() in TABLES:
        x, y, owners = _table(path, options)
    else:
        x, y, owners = _images(path, like.input_shape)
    names = sorted(set(owners) - {""})
    if client and names and client not in names:
        raise ValueError(f"{path}: {unknown('client', client, names)}")
    if not client and len(names) > 1:
        raise ValueError(f"{path} holds {len(names)} clients ({', '.join(names[:5])}, …): choose one with --client")
    client = client or (names[0] if names else path.stem)
    rows = np.array([not owner or owner == client for owner in owners])
    labels = _classes(np.asarray(y)[rows], like, path)
    seed = int(like.about.get("seed", 0))
    federation = from_arrays(
        np.asarray(x)[rows], labels, owners=[client] * int(rows.sum()), task=like.task, classes=like.classes,
        name=path.stem, seed=seed, channels="last" if path.is_dir() else None,
    )  # fmt: skip
    if federation.input_shape != tuple(like.input_shape):
        raise ValueError(f"{path} has inputs of shape {federation.input_shape}, the run {tuple(like.input_shape)}")
    federation.prepare, federation.class_names = like.prepare, like.class_names
    return federation


def _table(path: Path, options: Mapping[str, Any]) -> tuple[Any, list[Any], list[str]]:
    """Inputs, labels and owners; the columns are those that the run's own table has."""
    columns = read(path)
    owner, label, features = (options.get(key) for key in ("owner", "label", "features"))
    owner, label = owner or "client", label or "label"
    inputs = [features] if isinstance(features, str) else features or [n for n in columns if n not in (owner, label)]
    for name in (label, *inputs):
        if name not in columns:
            raise ValueError(f"{path}: {unknown('column', name, columns)}")
    y = list(columns[label])
    return (
        stack({name: columns[name] for name in inputs}, str(path)),
        y,
        list(map(str, columns.get(owner, [""] * len(y)))),
    )


def _images(root: Path, shape: tuple[int, ...]) -> tuple[Any, list[str], list[str]]:
    """Pictures in the run's size and colours."""
    found = sorted(file for depth in ("*/*", "*/*/*") for file in root.glob(depth) if file.suffix.lower() in IMAGES)
    if not found:
        raise FileNotFoundError(f"no images under {root}: they lie as <class>/<image>, or <client>/<class>/<image>")
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise ValueError(f"{root} holds images, but the run was trained on inputs of shape {tuple(shape)}")
    pixels, sizes = [], set()
    for file in found:
        with picture(file) as opened:
            plain = opened.convert("RGB" if shape[0] == 3 else "L")
            sizes.add(plain.size)
            pixels.append(np.asarray(plain.resize((shape[2], shape[1]))).reshape(*shape[1:], shape[0]))
    if other := sizes - {(shape[2], shape[1])}:
        width, height = sorted(other)[0]
        warn(f"{root}: images are resized to the run's {shape[1]} × {shape[2]}, such as one of {height} × {width}")
    deep = [len(file.relative_to(root).parts) == 3 for file in found]
    owners = [file.parent.parent.name if own else "" for file, own in zip(found, deep, strict=True)]
    return np.stack(pixels), [file.parent.name for file in found], owners


def _classes(y: Any, like: Any, path: Path) -> Any:
    """Labels as the run counts them: by the names of its classes, where these have names."""
    if like.task != "classification" or not like.class_names:
        return y
    codes = {name: code for code, name in enumerate(like.class_names)}
    for name in set(map(str, y)) - set(codes):
        raise ValueError(f"{path}: {unknown('class', name, like.class_names)}")
    return np.array([codes[str(name)] for name in y])
