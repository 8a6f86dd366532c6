"""How long studies will take and how much room they need, before they are started. Rough: within a factor of two."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from pfedgate import models
from pfedgate.config import methods
from pfedgate.config.recipe import Recipe
from pfedgate.core.seeds import seeded
from pfedgate.engine.server import choose_device, one_thread
from pfedgate.studies.cells import usable
from pfedgate.studies.declare import Study
from pfedgate.studies.outcome import Place
from pfedgate.studies.paper import meant
from pfedgate.studies.scales import World
from pfedgate.studies.schedule import Order

TRAINING = 0.6  # share of a client's samples
SCORING = 1.25  # evaluation every few rounds, on top of training
BATCH, STEPS = 128, 3


@dataclass(frozen=True)
class Estimate:
    """Of the cells that are not finished."""

    cells: int
    seconds: float  # with the workers asked for
    kept: float  # bytes on disk in the end
    peak: float  # and while cells run


def estimate(places: Sequence[Place], order: Order) -> Estimate:
    """What is ahead."""
    ahead = {}
    for place in places:
        looks = place.study.looks
        if not usable(place.cell.folder(order.root, any_code=order.any_code, looks=looks), looks):
            ahead[place.cell.key] = place
    worlds = order.scale.worlds
    seconds, kept, largest = 0.0, 0.0, 0.0
    for place in ahead.values():
        recipe, world = place.cell.recipe, worlds[place.column.data]
        size = 4.0 * _size(recipe.model.name, world.shape, world.classes, tuple(sorted(recipe.model.options.items())))
        seconds += _seconds(recipe, world)
        kept += 1e6 + (size * (1 + 0.063 * world.clients) if recipe.algorithm.name == "pfedgate" else 0.0)
        largest = max(largest, 2 * size * world.clients)  # some methods keep a whole model per client, old and new
    return Estimate(len(ahead), seconds / order.workers, kept, kept + largest * order.workers)


def long(seconds: float) -> str:
    """A long time in words.

    >>> long(90), long(7200), long(400_000)
    ('2 minutes', '2.0 hours', '4.6 days')
    """
    if seconds < 3600:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


def repeats(order: Order, studies: Sequence[Study]) -> list[Place]:
    """Places of all seeds: where it is not known yet which rows are repeated, the first ones stand for them."""
    found: list[Place] = []
    for study in meant(studies, [study.name for study in studies], order.scale):
        places = order.all_places(study)
        seeds = {place.seed for place in places}
        if study.more_seeds and len(seeds) < order.scale.seeds and order.scale.best is not None:
            rows = [row.name for row in study.rows][-order.scale.best - 1 :]
            for seed in range(1, order.scale.seeds):
                places += order.places(study, seed, rows)
        found += places
    return found


def _seconds(recipe: Recipe, world: World) -> float:
    options = tuple(sorted(recipe.model.options.items()))
    step = _step(recipe.model.name, world.shape, world.classes, options, recipe.run.device)
    clients = recipe.clients.fraction if recipe.clients.number is None else recipe.clients.number / world.clients
    batches = TRAINING * world.images / BATCH * clients * recipe.train.epochs * recipe.train.rounds
    return step * batches * _work(recipe) * SCORING


def _work(recipe: Recipe) -> float:
    """How many dense training passes a method does, measured; of pFedGate the budget and its gate."""
    budget = recipe.clients.budget
    if recipe.algorithm.name == "pfedgate":
        return 0.15 + (float(budget) if isinstance(budget, (int, float)) else 0.5)
    cost = methods.cost_of(recipe.algorithm.name)
    return 1.0 if cost is None else cost.compute


@lru_cache(maxsize=16)
def _size(name: str, shape: tuple[int, ...], classes: int, options: tuple[Any, ...]) -> int:
    with seeded(0, "estimate"):
        return sum(p.numel() for p in models.build(name, shape, classes, **dict(options)).parameters())


@lru_cache(maxsize=16)
def _step(name: str, shape: tuple[int, ...], classes: int, options: tuple[Any, ...], device: str) -> float:
    """Seconds of a dense training step on this machine, one thread or one accelerator."""
    where = choose_device(device)
    # Processor time where that is what counts: what else the machine does now says nothing about tomorrow.
    clock = time.process_time if where.type == "cpu" else time.perf_counter
    with seeded(0, "estimate"), one_thread():
        model = models.build(name, shape, classes, **dict(options)).to(where)
        x = torch.zeros(BATCH, *shape, device=where)
        seconds = []
        for _ in range(1 + STEPS):
            began = clock()
            model(x).sum().backward()
            if where.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(clock() - began)
    return min(seconds[1:])
