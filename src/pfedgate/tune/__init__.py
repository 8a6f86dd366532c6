"""Search for good settings of a method, on validation data only: what `pfedgate tune` does.

    found = tune("ditto", "recipes/cifar10-quick.toml", trials=12, rounds=40, out="runs/tuned")
    found.best.params           {"train.lr": 0.03, "algorithm.lam": 0.1}

Every method gets the same number of trials. The folder METHOD/ holds them (journal.log); `tuned.write` keeps the best
settings beside the recipe. The same call again goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pfedgate import experiment
from pfedgate.config.recipe import Recipe
from pfedgate.engine.checkpoint import alone
from pfedgate.tune.search import SEARCHES, Search, SearchSpec, Trial, base
from pfedgate.tune.space import Axis, Choices, Range, axis, choices, space_of

__all__ = ["SEARCHES", "Choices", "Range", "Search", "SearchSpec", "Trial", "axis", "choices", "tune"]


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
    resolved = experiment.recipe_of(recipe, layer, data=data, model=model)
    label = label or resolved.algorithm.name
    spec = SearchSpec(label, base(resolved, rounds), space_of(resolved, params), search, prune, seed)
    with alone(Path(out) / label):
        result = Search(spec, Path(out) / label, trials, watch)
        result.run(workers, data=data, model=model)
    if result.best is None:
        first = result.trials[0].error if result.trials else "no trial"
        raise RuntimeError(f"{label}: no trial ended well; the first: {first}")
    return result
