"""What a round costs a client, measured: seconds, peak memory, FLOPs, bytes, storage; and the tables of it.

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
from pfedgate.core.version import RESULTS
from pfedgate.engine.endpoint import Endpoint, Reply, own_part
from pfedgate.engine.files import write_atomically
from pfedgate.engine.metrics import Record
from pfedgate.engine.roster import Roster
from pfedgate.engine.server import one_thread
from pfedgate.engine.store import MemoryStore
from pfedgate.engine.workers import steady
from pfedgate.runs.environment import environment
from pfedgate.runs.progress import size
from pfedgate.studies import complexity
from pfedgate.studies.cells import Cell
from pfedgate.studies.complexity import line
from pfedgate.studies.declare import Column, Row, Study, World, columns_of, recipe_of
from pfedgate.studies.paper import FEDAVG, FEDEM, gate
from pfedgate.studies.sweep import Campaign

LATEST = "counted"  # the newest number of `Bench.costs`: records without it are measured anew
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
        plan = experiment.plan(recipe)
        roster = Roster.of(plan.federation, "clients", plan.options, plan.algorithm)
        card = max(roster, key=lambda card: card.n_train)
        seed, task = plan.options.seed, plan.algorithm.task
        reach = Endpoint(plan.algorithm, plan.federation, MemoryStore())
        with seeded(seed, "init_server"):
            server = plan.algorithm.init_server(seed)
        whole, rest = divmod(card.n_train, task.batch)
        batches = max(1, whole + (rest > 0 and not task.drop_last)) * task.epochs
        bench = cls(plan.algorithm, reach, server, card, Round(0, ROUNDS, seed), batches)
        for index in range(ROUNDS - 1):
            bench.round = Round(index, ROUNDS, seed)
            bench.merge(bench.train())
        bench.round = Round(ROUNDS - 1, ROUNDS, seed)
        return bench

    def train(self) -> Reply:
        """The round of the one client, measured or not."""
        return next(iter(self.reach.train(self.server, self.round, [[self.card]])))

    def merge(self, reply: Reply) -> None:
        """The server's part of the round."""
        assert reply.update is not None
        with seeded(0, "merge"):
            self.server = merge(self.algorithm.merger(self.server, self.round), [(reply.card, reply.update)])

    def model(self) -> nn.Module:
        """The client's model, as it is used."""
        got = self.algorithm.send(self.server, self.card, self.round)
        local = self.reach.local(self.card, self.round)
        own, private = own_part(self.algorithm, self.reach.store.get(self.card.id) or {}, local)
        method = own.method(self.algorithm)
        return own.model(method, method.predictor(got, method.personalise(got, private, local), self.card)).eval()

    def counted(self) -> float:
        """FLOPs of a client's round, as torch counts them; without what a server does to make what it sends."""
        sent = measure.flops(lambda: self.algorithm.send(self.server, self.card, self.round))
        return float(measure.flops(self.train) - sent)

    def costs(self, seconds: float) -> Record:
        """All that is measured, beside the seconds of a round."""
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
            **complexity.shares(model),
        }


def measured(recipes: Mapping[str, Recipe], turns: int) -> dict[str, Record]:
    """Costs of some methods, which take turns."""
    steady()
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        benches = {name: Bench.of(recipe) for name, recipe in recipes.items()}
        steps = {name: bench.train for name, bench in benches.items()}
        seconds = measure.interleaved(steps, turns, 1)
        return {name: bench.costs(seconds[name]) for name, bench in benches.items()}


def _measure(campaign: Campaign, wanted: Mapping[str, Mapping[str, Recipe]]) -> dict[str, Record]:
    """Measured costs by name, from disk if the same was measured before."""
    return recall(campaign, wanted, LATEST, measured, campaign.scale.turns)


def recall(
    campaign: Campaign,
    wanted: Mapping[str, Mapping[str, Recipe]],
    latest: str,
    how: Callable[..., dict[str, Record]],
    *given: Any,
) -> dict[str, Record]:
    """What `how(recipes, *given)` says of recipes, by name; from disk if it holds the newest number, `latest`."""
    records: dict[str, Record] = {}
    with _fresh() as process:
        for name, recipes in wanted.items():
            keys = {label: Cell(recipe).key for label, recipe in recipes.items()}
            path = campaign.out / "measures" / f"{name}.json"
            record: Record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            complete = all(latest in cost for cost in record.get("costs", {}).values())
            if record.get("cells") != keys or not complete or record.get("version") != RESULTS:
                began, first = time.perf_counter(), next(iter(recipes.values()))
                costs = process.submit(how, dict(recipes), *given).result()
                record = {
                    "cells": keys, "version": RESULTS, "costs": costs,
                    "data": f"{first.data.name}, {first.model.name}, batch {first.train.batch}",
                    "seconds": time.perf_counter() - began, "environment": environment(),
                }  # fmt: skip
                write_atomically(path, json.dumps(record, indent=1).encode())
            records[name] = record
    return records


def _fresh() -> ProcessPoolExecutor:
    """A process of its own: memory as a client would have it. It starts when something is to be measured."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's chatter; read when torch is imported
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


STEP_ROWS = (
    FEDAVG, FEDEM, gate(1.0), *(gate(s, resources=resources) for resources in ("all", "params") for s in (0.5, 0.3)),
)  # fmt: skip
COMPLEXITY_ROWS = (FEDAVG, Row("pFedHN", "pfedhn"), FEDEM, gate(0.5, resources="all"), gate(0.5))


def recipes_of(
    campaign: Campaign, rows: Sequence[Row], column: Column, world: World, **settings: Any
) -> dict[str, Recipe]:
    """The recipes of some rows; settings are named train__batch=32."""
    over = [{name.replace("__", "."): value for name, value in settings.items()}, *campaign.over]
    return {
        row.name: recipe_of(row, column, world, campaign.scale, over=over, recipes=campaign.recipes) for row in rows
    }


def data_of(campaign: Campaign) -> tuple[Column, World]:
    """The data that costs are measured on: CIFAR-10, or the scale's first."""
    worlds = campaign.worlds or campaign.scale.usual
    name = "cifar10" if "cifar10" in worlds else worlds[0]
    return Column(name, name), campaign.scale.worlds[name]


def steps(study: Study, campaign: Campaign) -> Record:
    """Table 2: {batch: {method: costs}}; few clients, so that the largest batch can be filled."""
    column, world = data_of(campaign)
    few = {} if campaign.scale.name == "tiny" else {"data__clients": 10}
    recipes = {
        str(batch): recipes_of(campaign, STEP_ROWS, column, world, train__batch=batch, train__drop_last=True, **few)
        for batch in campaign.scale.batches
    }
    records = _measure(campaign, {f"{study.name}-{batch}": recipes[batch] for batch in recipes})
    return {batch: records[f"{study.name}-{batch}"] for batch in recipes}


def all_costs(study: Study, campaign: Campaign) -> Record:
    """Table 5: {"all": {method: costs}}."""
    recipes = recipes_of(campaign, COMPLEXITY_ROWS, *data_of(campaign))
    return {"all": _measure(campaign, {study.name: recipes})[study.name]}


def times(study: Study, campaign: Campaign) -> Record:
    """Step times of every row, by column."""
    columns = columns_of(study, campaign.scale, campaign.worlds)
    wanted = {
        f"{study.name}-{column.data}": recipes_of(campaign, study.rows, column, world) for column, world in columns
    }
    records = _measure(campaign, wanted)
    return {column.name: records[f"{study.name}-{column.data}"] for column, _ in columns}


def step_tables(content: Record) -> list[str]:
    """Table 2: a table for every size of batch."""
    head = ["method", "time, ms", "× FedAvg", "peak memory", "× FedAvg", "FLOPs, × FedAvg"]
    lines = []
    for batch, costs_of in content["measured"].items():
        base = next(iter(costs_of.values()))
        lines += [f"## Batch {batch}", "", line(head), "|---|" + "---:|" * (len(head) - 1)]
        for name, cost in costs_of.items():
            cells = [name, f"{cost['ms']:.2f}", f"{cost['ms'] / base['ms']:.2f}", size(cost["peak"])]
            lines.append(line([*cells, *(f"{cost[key] / base[key]:.2f}" for key in ("peak", "flops"))]))
        lines.append("")
    note = "One client's round divided by its batches, with all that a client does in it; one thread, methods in turn."
    return [*lines, note, ""]


def time_tables(content: Record) -> list[str]:
    """Step times of the Pareto figure."""
    lines = []
    for column, costs_of in content["measured"].items():
        base = costs_of["FedAvg"]
        lines += [f"## {column}: measured step", "", line(["method", "ms per batch", "× FedAvg"]), "|---|---:|---:|"]
        lines += [line([n, f"{c['ms']:.2f}", f"{c['ms'] / base['ms']:.2f}"]) for n, c in costs_of.items()]
        lines.append("")
    return lines


# By a study's `measure`: measuring, and the lines of its page.
MEASURES: dict[str, tuple[Callable[[Study, Campaign], Record], Callable[[Record], list[str]]]] = {
    "steps": (steps, step_tables),
    "complexity": (all_costs, complexity.table),
    "times": (times, time_tables),
}
