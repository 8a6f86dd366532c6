"""`tune`: good settings for methods, found on validation data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from pfedgate.cli.base import DataDir, Debug, Settings, app, command, err, label, of_method, out, over, say
from pfedgate.core.errors import RecipeError

if TYPE_CHECKING:
    from pfedgate.tune.search import Search
    from pfedgate.tune.space import Axis

MOST_ROWS = 12  # of a table of trials; the journal has all of them


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
    write: Annotated[bool, typer.Option("--write", help="Write the best beside the recipe: NAME.tuned.toml.")] = False,
    data_dir: DataDir = None,
    debug: Debug = False,
) -> None:
    """Search settings of methods on validation data; the best go beside a copy of the recipe, as \\[tuned.METHOD].

    Finished trials are kept: after an interruption the same command goes on.
    """
    from pfedgate import tune as tuning
    from pfedgate.runs.progress import Steps
    from pfedgate.tune import tuned
    from pfedgate.tune.space import checked

    params = dict(map(_param, param or []))
    layers = over(set, data_dir)
    recipes = {label(method): of_method(recipe, layers, method) for method in methods}
    names = [resolved.algorithm.name for resolved in recipes.values()]
    if len(recipes) < len(methods):
        raise RecipeError(f"the same method twice in {' '.join(methods)}")
    if len(dict.fromkeys(names)) < len(names):
        raise RecipeError(
            "a recipe has one section [tuned.…] for an algorithm: tune its variants with a recipe or --out each"
        )
    if write and recipe is None:
        raise RecipeError("--write needs a --recipe to write beside")
    tuned.check(recipe, names)  # An error is better raised before hours of search.
    checked(params, list(recipes.values()))
    searches: list[Search] = []
    console = err()
    for method, (name, resolved) in zip(methods, recipes.items(), strict=True):
        with Steps(f"tune {resolved.data.name} · {name}", "trial", console) as steps:

            def watch(now: Search, steps: Steps = steps) -> None:
                best = "" if now.best is None else f"best {_score(now.best.value)} with {_words(now.best.params)}"
                steps.at(len(now.trials), now.wanted, best)

            try:
                search_of = tuning.tune(
                    recipe=resolved, trials=trials, rounds=rounds, search=search, prune=prune, workers=workers,
                    params=params, seed=seed, out=out_dir, label=name, watch=watch,
                )  # fmt: skip
            except KeyboardInterrupt:
                say("\nStopped; finished trials are kept. The same command goes on.", console)
                raise typer.Exit(130) from None
        searches.append(search_of)
        out().print(_trials(search_of))
        given = [*(set or ()), *filter(None, [method.partition(":")[2]])]
        target = tuned.write(search_of, recipe, out_dir, beside=write, given=given)
    if len(searches) > 1:
        out().print(_methods(searches))
    say(f"{out_dir}: METHOD/journal.log (every trial); the best settings are in {target}")


def _param(text: str) -> tuple[str, Axis]:
    from pfedgate.tune.space import axis

    name, equals, values = text.partition("=")
    if not equals or "." not in name:
        raise RecipeError(f"{text!r}: --param is written section.key=values, such as train.lr=0.02,0.05,0.1")
    return name.strip(), axis(values.strip())


def _score(value: float | None) -> str:
    """A score of a search, in which more is better: what is better small is negative there."""
    return "-" if value is None else f"{100 * value:.1f} %" if 0 <= value <= 1 else f"{abs(value):.4g}"


def _words(params: dict[str, Any]) -> str:
    from pfedgate.config import toml

    return ", ".join(f"{name.partition('.')[2]}={toml.dump(value)}" for name, value in params.items())


def _trials(search: Search) -> Table:
    from pfedgate.config import toml
    from pfedgate.runs.progress import clock
    from pfedgate.tune.search import COMPLETE

    recipe = search.spec.recipe
    view = Table(title=f"{search.spec.label} on {recipe.data.name}, {recipe.train.rounds} rounds")
    view.add_column("trial", justify="right")
    for name in search.spec.space:
        view.add_column(name, justify="right", overflow="fold")
    for title in ("validation", "at round", "time"):
        view.add_column(title, justify="right")
    view.add_column("state")
    ranked = sorted(search.trials, key=lambda t: (t.state != COMPLETE, -(t.value or 0.0), t.slot))
    for trial in ranked[:MOST_ROWS]:
        won = search.best is not None and trial.slot == search.best.slot
        cells = [toml.dump(trial.params[name]) for name in search.spec.space]
        state = trial.state if not trial.error else f"{trial.state}: {trial.error[:60]}"
        view.add_row(
            str(trial.slot), *cells, _score(trial.value), str(trial.best_round or "-"), clock(trial.seconds), state,
            style="bold green" if won else "",
        )  # fmt: skip
    hidden = len(ranked) - MOST_ROWS
    view.caption = "scores on validation data, the best of the rounds scored; test data is never looked at"
    if hidden > 0:
        view.caption = f"and {hidden} more; {view.caption}"
    return view


def _methods(searches: Sequence[Search]) -> Table:
    from pfedgate.runs.progress import clock
    from pfedgate.tune.search import PRUNED

    view = Table(title="the best of each method, on validation data")
    for title in ("method", "validation", "settings", "trials", "ended early", "time"):
        view.add_column(title, justify="left" if title in ("method", "settings") else "right")
    ranked = sorted(searches, key=lambda s: -((s.best.value or 0.0) if s.best else 0.0))
    for search in ranked:
        best = search.best
        assert best is not None
        view.add_row(
            search.spec.label, _score(best.value), _words(best.params), str(len(search.trials)),
            str(sum(trial.state == PRUNED for trial in search.trials)),
            clock(sum(trial.seconds for trial in search.trials)),
        )  # fmt: skip
    return view
