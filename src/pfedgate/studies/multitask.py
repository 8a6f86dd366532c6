"""Several tasks on one shared model, a gate for each: what the paper names as future work. `reproduce multitask`.

A client with several tasks (digits, upper and lower case) is a client for each of them: it keeps one shared model of d
parameters and E gates, so d + E·d_φ, and every block is averaged over all clients and tasks that had it live. Set
beside it: a model for every task, and one dense model for all of them without gates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pfedgate
from pfedgate.config.recipe import Recipe
from pfedgate.core.state import nbytes
from pfedgate.engine.metrics import Record
from pfedgate.report.paired import paired
from pfedgate.runs.progress import scaled, size
from pfedgate.studies.bench import recall, recipes_of
from pfedgate.studies.complexity import line
from pfedgate.studies.declare import Column, Row, Study
from pfedgate.studies.sweep import Campaign

TASKS = {"femnist": ("0-9", "10-35", "36-61")}  # digits, upper case, lower case
HALVES = ("0-4", "5-9")  # of data with ten classes


@dataclass(frozen=True)
class Way:
    """One way to serve all tasks: with one model for all or with one for each."""

    name: str
    row: Row
    apart: bool = False


def _gate(budget: float) -> Row:
    settings = {"clients.budget": budget, "algorithm.resources": "all"}
    return Row(f"pFedGate, s = {budget:g}", "pfedgate", settings)


FEDAVG = Row("FedAvg", "fedavg")
WAYS = (
    *(Way(f"one model, a gate per task, s = {s:g}", _gate(s)) for s in (1.0, 0.5, 0.3)),
    Way("one model, no gates (FedAvg)", FEDAVG),
    Way("a model per task (FedAvg)", FEDAVG, apart=True),
    Way("a model per task (pFedGate, s = 0.5)", _gate(0.5), apart=True),
)
SIZES = {"tiny": (4, 2), "small": (30, 60)}  # clients and rounds
# A task has a third of a client's few samples: small batches give enough steps, half the width affords the rounds.
SMALL: dict[str, Any] = {"train__batch": 16, "model__width": 0.5}


def trained(recipes: Mapping[str, Recipe]) -> dict[str, Record]:
    """Train recipes; of each every client's score in the last round, and what devices store and send."""
    records = {}
    for name, recipe in recipes.items():
        result = pfedgate.run(recipe)
        states = [result.store.get(client) or {} for client in result.clients] if result.store else []
        records[name] = {
            "clients": {id: [one.metrics["n_test"], one.metrics["accuracy"]] for id, one in result.clients.items()},
            "val": result.summary[f"best_{result.metric.name}"],
            "model": nbytes(result.server),
            "private": statistics.fmean(nbytes(state) for state in states) if states else 0.0,
            "up": result.summary["bytes_up"] / len(result.history),
            "flops": result.summary["flops"] / len(result.history),
        }
    return records


def measure(study: Study, campaign: Campaign) -> Record:
    """{seed: {way: numbers}}."""
    scale = campaign.scale
    name = "femnist" if "femnist" in scale.worlds else scale.usual[0]
    clients, rounds = SIZES.get(scale.name, SIZES["small"])
    tasks, wanted, plans = TASKS.get(name, HALVES), {}, {}
    for seed in range(min(3, scale.seeds)):
        recipes: dict[str, Recipe] = {}
        plans[seed] = {way.name: ([[task] for task in tasks] if way.apart else [list(tasks)]) for way in WAYS}
        for way in WAYS:
            for own in plans[seed][way.name]:
                settings: dict[str, Any] = {"data__tasks": own, "data__clients": clients, "data__seed": seed}
                settings |= SMALL if name == "femnist" else {}
                settings |= {"train__rounds": rounds, "evaluate__every": rounds, "run__workers": 1}
                made = recipes_of(campaign, (way.row,), Column(name, name), scale.worlds[name], **settings)
                recipe = made[way.row.name]
                recipes[_label(way.name, own)] = replace(recipe, run=replace(recipe.run, seed=seed))
        wanted[f"{study.name}-{seed}"] = recipes
    content = {}
    for seed, record in enumerate(recall(campaign, wanted, "up", trained).values()):
        costs = record["costs"]
        ways = {way: together([costs[_label(way, own)] for own in every]) for way, every in plans[seed].items()}
        content[str(seed)] = {**record, "costs": ways}
    return content


def _label(way: str, tasks: list[str]) -> str:
    return f"{way}: {' '.join(tasks)}"


def together(records: list[Record]) -> Record:
    """The runs of one way as one: scores of all clients and tasks; what a device with all tasks stores and sends."""
    clients = {id: tuple(score) for record in records for id, score in record["clients"].items()}
    tasks = sorted({id.rpartition("/")[2] for id in clients}, key=lambda task: int(task.partition("-")[0]))
    devices = len({id.rpartition("/")[0] for id in clients})
    every = len(tasks) / len(records)  # gates beside each model
    return {
        "clients": clients,
        "accuracy": _mean(clients),
        "tasks": {task: _mean({id: s for id, s in clients.items() if id.endswith(f"/{task}")}) for task in tasks},
        "disk": sum(record["model"] + every * record["private"] for record in records),
        "down": sum(record["model"] for record in records),
        "up": sum(record["up"] for record in records) / devices,
        "flops": sum(record["flops"] for record in records) / devices,
    }


def _mean(clients: Mapping[str, Any]) -> float:
    total = math.fsum(n for n, _ in clients.values())
    return math.fsum(n * accuracy for n, accuracy in clients.values()) / total


def tables(content: Record) -> list[str]:
    """The lines of the page."""
    seeds = content["measured"]
    first = next(iter(seeds.values()))
    tasks = next(iter(first.values()))["tasks"]
    base = "a model per task (FedAvg)"
    heads = [f"classes {task}, %" for task in tasks]
    lines = [line(["way", "accuracy, %", *heads, "− a model per task, points", "disk", "down", "up", "compute"])]
    lines.append("|---|" + "---:|" * (len(tasks) + 6))
    for way in first:
        rows = [seed[way] for seed in seeds.values()]
        cells = [_spread([100 * row["accuracy"] for row in rows])]
        cells += [_spread([100 * row["tasks"][task] for row in rows]) for task in tasks]
        scores = [{int(at): seed[one]["clients"] for at, seed in seeds.items()} for one in (way, base)]
        cells.append("" if way == base else str(paired(*scores)))
        cells += [size(statistics.fmean(row[key] for row in rows)) for key in ("disk", "down", "up")]
        lines.append(line([way, *cells, scaled(statistics.fmean(row["flops"] for row in rows), "FLOP")]))
    return [*lines, "", NOTE, ""]


NOTE = (
    "Last round; ± is the standard deviation over seeds, brackets are 95 % intervals over seeds, paired by client and "
    "task. Of a device that has all tasks, per round: it stores and receives a shared model once, and sends for each "
    "task what was live. A device could average its tasks before it sends, which is not counted. Settings are the "
    "recipe's, with batches of 16 and half the width of the model; none was searched. All methods know their labels' "
    "frequencies, so that a dense model for all tasks knows which task it is used for."
)


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"
