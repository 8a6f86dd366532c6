"""What a round costs a client, measured: seconds, peak memory, FLOPs, bytes, what is kept.

Each method trains the same client for a few rounds, as the engine would; the last one is measured, the methods in turn
so that a noisy machine disturbs all alike. One thread, this process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pfedgate import experiment
from pfedgate.config.recipe import Recipe
from pfedgate.core import measure
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.mergers import merge
from pfedgate.core.seeds import seeded
from pfedgate.core.state import nbytes
from pfedgate.core.types import Card, Round, State
from pfedgate.engine.endpoint import Endpoint, Reply
from pfedgate.engine.metrics import Record
from pfedgate.engine.roster import Roster
from pfedgate.engine.server import one_thread
from pfedgate.engine.store import MemoryStore, write_atomically
from pfedgate.engine.workers import steady
from pfedgate.runs.environment import environment
from pfedgate.studies import complexity as formulas
from pfedgate.studies import rows, scales
from pfedgate.studies.cells import Cell, code_version
from pfedgate.studies.declare import Column, Row, Study
from pfedgate.studies.scales import World
from pfedgate.studies.schedule import Order

LATEST = "counted"  # what was added last to `Bench.told`: records without it are measured anew
ROUNDS = 4  # the first ones may differ: a warm-up, something sent or made once


@dataclass
class Bench:
    """One method ready to be measured: after all rounds but the last."""

    algorithm: Algorithm
    reach: Endpoint
    server: State
    card: Card
    round: Round
    batches: int

    @classmethod
    def of(cls, recipe: Recipe) -> Bench:
        """The client with most training samples, of a federation of its own."""
        made = experiment.plan(recipe)
        roster = Roster.of(made.federation, "clients", made.options)
        card = max(roster, key=lambda card: card.n_train)
        seed, task = made.options.seed, made.algorithm.task
        reach = Endpoint(made.algorithm, made.federation, MemoryStore())
        with seeded(seed, "init_server"):
            server = made.algorithm.init_server(seed)
        whole, rest = divmod(card.n_train, task.batch)
        batches = max(1, whole + (rest > 0 and not task.drop_last)) * task.epochs
        bench = cls(made.algorithm, reach, server, card, Round(0, ROUNDS, seed), batches)
        for index in range(ROUNDS - 1):
            bench.round = Round(index, ROUNDS, seed)
            bench.merge(bench.train())
        bench.round = Round(ROUNDS - 1, ROUNDS, seed)
        return bench

    def train(self) -> Reply:
        """One client's round."""
        return next(iter(self.reach.train(self.server, self.round, [[self.card]])))

    def merge(self, reply: Reply) -> None:
        """The server's part of it."""
        assert reply.update is not None
        with seeded(0, "merge"):
            self.server = merge(self.algorithm.merger(self.server, self.round), [(reply.card, reply.update)])

    def model(self) -> nn.Module:
        """The client's model, as it is used."""
        got = self.algorithm.send(self.server, self.card, self.round)
        local = self.reach.local(self.card, self.round)
        private = self.algorithm.personalise(got, self.reach.store.get(self.card.id) or {}, local)
        return self.algorithm.predictor(got, private, self.card).eval()

    def counted(self) -> float:
        """FLOPs of a client's round, as torch counts them; without what a server does to make what it sends."""
        sent = measure.flops(lambda: self.algorithm.send(self.server, self.card, self.round))
        return float(measure.flops(self.train) - sent)

    def told(self, seconds: float) -> Record:
        """Everything but time, and that."""
        reply = self.train()
        assert reply.update is not None
        got = self.algorithm.send(self.server, self.card, self.round)
        model, example = self.model(), self.algorithm.task.inputs.batch()
        with torch.no_grad():
            inference = measure.flops(lambda: model(example)) / len(example)
        server_bytes = nbytes(self.server)
        merging = measure.interleaved({"": lambda: self.merge(reply)}, 5, 1)[""]
        return {
            "ms": 1e3 * seconds / self.batches,
            "peak": measure.peak_bytes(self.train),
            "flops": reply.update.metrics.get("flops", 0.0) / self.batches,
            "counted": self.counted() / self.batches,
            "inference": inference,
            "up": reply.up,
            "down": reply.down,
            "disk": nbytes(got) + nbytes(self.reach.store.get(self.card.id) or {}),
            "server": server_bytes,
            "merge_ms": 1e3 * merging,
            "q": reply.update.metrics.get("q"),
            "density": reply.update.metrics.get("density"),
            "batches": self.batches,
            "k": getattr(self.algorithm, "components", 1),
            **formulas.shares(model),
        }


def measured(recipes: Mapping[str, Recipe], turns: int) -> dict[str, Record]:
    """Costs of some methods."""
    steady()
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        benches = {name: Bench.of(recipe) for name, recipe in recipes.items()}
        steps = {name: bench.train for name, bench in benches.items()}
        seconds = measure.interleaved(steps, turns, 1)
        return {name: bench.told(seconds[name]) for name, bench in benches.items()}


def kept(order: Order, wanted: Mapping[str, Mapping[str, Recipe]]) -> dict[str, Record]:
    """Measured costs by name, from disk if the same was measured with the same code."""
    found: dict[str, Record] = {}
    with _fresh() as process:
        for name, recipes in wanted.items():
            told = {label: Cell(recipe).key for label, recipe in recipes.items()}
            path = order.out / "measures" / f"{name}.json"
            before: Record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            complete = all(LATEST in cost for cost in before.get("costs", {}).values())
            if before.get("cells") != told or not complete or not (order.any_code or before["code"] == code_version()):
                began = time.perf_counter()
                costs = process.submit(measured, dict(recipes), order.scale.turns).result()
                before = {"cells": told, "code": code_version(), "costs": costs}
                first = next(iter(recipes.values()))
                before["data"] = f"{first.data.name}, {first.model.name}, batch {first.train.batch}"
                before |= {"seconds": time.perf_counter() - began, "environment": environment()}
                write_atomically(path, json.dumps(before, indent=1).encode())
            found[name] = before
    return found


def _fresh() -> ProcessPoolExecutor:
    """A process of its own: memory as a client would have it. It starts when something is to be measured."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's chatter; read when torch is imported
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


STEP_ROWS = (
    rows.FEDAVG,
    rows.FEDEM,
    rows.plain(1.0),
    *(rows.plain(s, resources=r) for r in ("all", "params") for s in (0.5, 0.3)),
)
COMPLEXITY_ROWS = (
    rows.FEDAVG,
    Row("pFedHN", "pfedhn"),
    rows.FEDEM,
    rows.plain(0.5, resources="all"),
    rows.plain(0.5),
)


def _recipes(order: Order, of: Sequence[Row], column: Column, world: World, **more: Any) -> dict[str, Recipe]:
    over = [{name.replace("__", "."): value for name, value in more.items()}, *order.over]
    made = {}
    for row in of:
        made[row.name] = scales.recipe_of(row, column, world, order.scale, over=over, recipes=order.recipes)
    return made


def _first(order: Order) -> tuple[Column, World]:
    """The data that costs are measured on: the scale's first."""
    name = (order.worlds or order.scale.usual)[0]
    name = "cifar10" if "cifar10" in (order.worlds or order.scale.usual) else name
    return Column(name, name), order.scale.worlds[name]


def steps(study: Study, order: Order) -> Record:
    """Table 2: {batch: {method: costs}}; few clients, so that the largest batch can be filled."""
    column, world = _first(order)
    few = {} if order.scale.name == "tiny" else {"data__clients": 10}
    recipes = {
        f"{study.name}-{batch}": _recipes(
            order, STEP_ROWS, column, world, train__batch=batch, train__drop_last=True, **few
        )
        for batch in order.scale.batches
    }
    return {name.rpartition("-")[2]: found for name, found in kept(order, recipes).items()}


def complexity(study: Study, order: Order) -> Record:
    """Table 5: {"all": {method: costs}}."""
    column, world = _first(order)
    return {"all": kept(order, {study.name: _recipes(order, COMPLEXITY_ROWS, column, world)})[study.name]}


def times(study: Study, order: Order) -> Record:
    """Step times of every row, by column."""
    columns = scales.columns_of(study, order.scale, order.worlds)
    wanted = {f"{study.name}-{column.data}": _recipes(order, study.rows, column, world) for column, world in columns}
    found = kept(order, wanted)
    return {column.name: found[f"{study.name}-{column.data}"] for column, _ in columns}


MEASURES: dict[str, Callable[[Study, Order], Record]] = {"steps": steps, "complexity": complexity, "times": times}
