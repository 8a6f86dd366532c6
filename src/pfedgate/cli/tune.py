"""`tune`: good settings for methods, found on validation data."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from pfedgate import tune as tuning
from pfedgate.cli.base import DataDir, Debug, Settings, app, command, err, out
from pfedgate.cli.layers import label, of_method, over
from pfedgate.config import toml
from pfedgate.config.recipe import Recipe, RecipeError
from pfedgate.engine.store import write_atomically
from pfedgate.runs.environment import environment
from pfedgate.runs.progress import Steps, clock, percent
from pfedgate.tune.search import Search
from pfedgate.tune.space import Axis, axis, checked
from pfedgate.tune.trials import COMPLETE, PRUNED

MOST_ROWS = 12  # of a table of trials; all of them are in trials.jsonl


@app.command()
@command
def tune(
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...",
            help="Algorithms, tuned one after another. One may bring settings of its own: pfedgate:clients.budget=0.3",
        ),
    ],
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="The recipe to tune for; without one: digits.")
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Settings tried, the same for every method.")] = 10,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Rounds of a trial; by default the recipe's.")
    ] = None,
    search: Annotated[
        str, typer.Option("--search", metavar="tpe|random|grid", help="How settings are chosen.")
    ] = "tpe",
    prune: Annotated[bool, typer.Option(help="End trials early that are worse than the median so far.")] = True,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Trials at a time, one process each.")] = 1,
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="SECTION.KEY=VALUES",
            help="What to search beside or instead of the usual: train.lr=0.02,0.05 or algorithm.lam=log:0.01:1 "
            "(also lin: and int:). May repeat.",
        ),
    ] = None,
    set: Settings = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the search; that of the runs is run.seed.")] = 0,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the search; the same again goes on.")] = Path(
        "runs/tune"
    ),
    write: Annotated[bool, typer.Option("--write", help="Write the best into the recipe itself.")] = False,
    data_dir: DataDir = None,
    debug: Debug = False,
) -> None:
    """Search settings of methods on validation data; the best go into a copy of the recipe, as \\[tuned.METHOD].

    Finished trials are kept: after an interruption the same command goes on.
    """
    params = dict(map(_param, param or []))
    layers = over(set, data_dir)
    plans = {label(method): of_method(recipe, layers, method) for method in methods}
    _check(methods, plans, recipe, write)
    checked(params, list(plans.values()))
    found: list[Search] = []
    console = err()
    for method, (name, plan) in zip(methods, plans.items(), strict=True):
        with Steps(f"tune {plan.data.name} · {name}", "trial", console) as steps:
            try:
                done = tuning.tune(
                    recipe=plan, trials=trials, rounds=rounds, search=search, prune=prune, workers=workers,
                    params=params, seed=seed, out=out_dir, label=name, watch=_watch(steps),
                )  # fmt: skip
            except KeyboardInterrupt:
                console.print("\nStopped; finished trials are kept. The same command goes on.", highlight=False)
                raise typer.Exit(130) from None
        found.append(done)
        out().print(_trials(done))
        # What was set for the search alone is no part of the recipe, so it is said beside what was found.
        target = _keep(done, recipe, out_dir, write, [*(set or ()), *filter(None, [method.partition(":")[2]])])
    if len(found) > 1:
        out().print(_methods(found))
    out().print(
        f"{out_dir}: METHOD/trials.jsonl (every trial); the best settings are in {target}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip


def _param(text: str) -> tuple[str, Axis]:
    name, equals, values = text.partition("=")
    if not equals or "." not in name:
        raise RecipeError(f"{text!r}: --param is written section.key=values, such as train.lr=0.02,0.05,0.1")
    return name.strip(), axis(values.strip())


def _check(methods: Sequence[str], plans: dict[str, Recipe], recipe: Path | None, write: bool) -> None:
    names = [plan.algorithm.name for plan in plans.values()]
    if len(plans) < len(methods):
        raise RecipeError(f"the same method twice in {' '.join(methods)}")
    if len(set(names)) < len(names):
        raise RecipeError(
            "a recipe has one section [tuned.…] for an algorithm: tune its variants with a recipe or --out each"
        )
    if write and recipe is None:
        raise RecipeError("--write needs a --recipe to write into")
    text = "" if recipe is None else recipe.read_text(encoding="utf-8")
    for name in names:  # what cannot be written into is better told before hours of search
        tuning.with_tuned(text, name, {"train.lr": 0.1})


def _watch(steps: Steps) -> Any:
    def tell(search: Search) -> None:
        best = search.best
        steps.at(
            len(search.trials),
            search.wanted,
            "" if best is None else f"best {percent(best.value)} with {_words(best.params)}",
        )

    return tell


def _words(params: dict[str, Any]) -> str:
    return ", ".join(f"{name.partition('.')[2]}={toml.dump(value)}" for name, value in params.items())


def _trials(search: Search) -> Table:
    recipe = search.plan.recipe
    view = Table(title=f"{search.plan.label} on {recipe.data.name}, {recipe.train.rounds} rounds")
    view.add_column("trial", justify="right")
    for name in search.plan.space:
        view.add_column(name, justify="right", overflow="fold")
    for title in ("validation", "at round", "time"):
        view.add_column(title, justify="right")
    view.add_column("state")
    ranked = sorted(search.trials, key=lambda t: (t.state != COMPLETE, -(t.value or 0.0), t.trial))
    for trial in ranked[:MOST_ROWS]:
        won = search.best is not None and trial.trial == search.best.trial
        cells = [toml.dump(trial.params[name]) for name in search.plan.space]
        told = trial.state if not trial.error else f"{trial.state}: {trial.error[:60]}"
        view.add_row(
            str(trial.trial), *cells, percent(trial.value), str(trial.best_round or "-"), clock(trial.seconds), told,
            style="bold green" if won else "",
        )  # fmt: skip
    hidden = len(ranked) - MOST_ROWS
    view.caption = "accuracy on validation data, the best of the rounds scored; test data is never looked at"
    if hidden > 0:
        view.caption = f"and {hidden} more; {view.caption}"
    return view


def _methods(found: Sequence[Search]) -> Table:
    view = Table(title="the best of each method, on validation data")
    for title in ("method", "validation", "settings", "trials", "ended early", "time"):
        view.add_column(title, justify="left" if title in ("method", "settings") else "right")
    ranked = sorted(found, key=lambda s: -((s.best.value or 0.0) if s.best else 0.0))
    for search in ranked:
        best = search.best
        assert best is not None
        view.add_row(
            search.plan.label, percent(best.value), _words(best.params), str(len(search.trials)),
            str(sum(trial.state == PRUNED for trial in search.trials)),
            clock(sum(trial.seconds for trial in search.trials)),
        )  # fmt: skip
    return view


def _keep(search: Search, recipe: Path | None, folder: Path, write: bool, given: Sequence[str]) -> Path:
    """The best settings into the recipe, or into its copy in the folder."""
    best = search.best
    assert best is not None
    copy = folder / (recipe.name if recipe is not None else "tuned.toml")
    target = recipe if write and recipe is not None else copy
    source = target if target.exists() else recipe
    text = source.read_text(encoding="utf-8") if source is not None else ""
    plan = search.plan
    commit = (environment()["commit"] or "")[:12]
    note = (
        f"{percent(best.value)} on validation, the best of {len(search.trials)} trials of "
        f"{plan.recipe.train.rounds} rounds ({plan.search}), {time.strftime('%Y-%m-%d')}"
        + (f", with {' '.join(given)}" if given else "")
    ) + (f", commit {commit}" if commit else "")
    fresh = tuning.with_tuned(text, plan.recipe.algorithm.name, best.params, note)
    write_atomically(target, fresh.encode())
    return target
