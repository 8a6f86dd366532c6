"""Search for good settings of a method, on validation data only: what `pfedgate tune` does.

    found = tune("ditto", "recipes/cifar10-quick.toml", trials=12, rounds=40, out="runs/tuned")
    found.best.params           {"train.lr": 0.03, "algorithm.lam": 0.1}

Every method gets the same number of trials. The folder holds METHOD/trials.jsonl (one line per trial) and a copy of
the recipe with the best settings in its section [tuned.METHOD]. The same call again goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pfedgate import experiment
from pfedgate.config.recipe import Recipe
from pfedgate.tune.recipe import with_tuned
from pfedgate.tune.search import SEARCHES, Plan, Search, base
from pfedgate.tune.space import Axis, Choices, Range, axis, choices, space_of
from pfedgate.tune.trials import Trial

__all__ = ["SEARCHES", "Choices", "Plan", "Range", "Search", "Trial", "axis", "choices", "tune", "with_tuned"]


def tune(
    method: str | None = None,
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    *,
    trials: int = 10,
    rounds: int | None = None,
    search: str = "tpe",
    prune: bool = True,
    workers: int = 1,
    params: Mapping[str, Axis] | None = None,
    seed: int = 0,
    out: str | Path,
    label: str | None = None,
    watch: Callable[[Search], None] = lambda _: None,
    data: Any = None,
    model: Any = None,
) -> Search:
    """Search settings of one method; returns all trials, of which `.best` is the best on validation data.

    method   an algorithm; by default the recipe's own
    search   "tpe" (guided by the trials so far), "random" (no point twice) or "grid" (all points)
    prune    end a trial whose best accuracy so far is below the median of finished ones at the same round
    workers  trials at a time, each in a process of one thread
    params   settings to search beside or instead of the usual ones: {"train.lr": choices([0.1, 0.2])}
    out      folder; trials there are not repeated
    """
    layer = {} if method is None else {"algorithm": method}
    chosen = experiment.recipe_of(recipe, layer, data=data, model=model)
    label = label or chosen.algorithm.name
    plan = Plan(label, base(chosen, rounds), space_of(chosen, params), search, prune, seed)
    found = Search(plan, Path(out) / label, trials, watch)
    found.run(workers, data=data, model=model)
    if found.best is None:
        first = found.trials[0].error if found.trials else "no trial"
        raise RuntimeError(f"{label}: no trial ended well; the first: {first}")
    return found
