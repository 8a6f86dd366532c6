"""`run`, `resume` and `compare`: everything that trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pfedgate import experiment
from pfedgate.cli.base import DataDir, Debug, Settings, app, command, err, out
from pfedgate.cli.layers import label, of_method, over, tuned_note
from pfedgate.cli.summary import learnt, table, where
from pfedgate.config import recipe as config
from pfedgate.config.recipe import Recipe, RecipeError
from pfedgate.runs import folder as runfolder
from pfedgate.runs import trackers
from pfedgate.runs.folder import Run
from pfedgate.runs.progress import Progress

RUNS = Path("runs")
Out = Annotated[Path | None, typer.Option("--out", help="Folder for the results; by default a new one under runs/.")]
Tell = Annotated[bool, typer.Option("--report", help="Also write report.html into the folder.")]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", metavar="tensorboard|wandb|mlflow", help="Send numbers of rounds there too. May repeat."),
]
Show = Annotated[bool, typer.Option("--show", help="Print the resolved recipe as TOML and stop.")]


@app.command()
@command
def run(
    recipe: Annotated[Path | None, typer.Argument(help="A TOML file; without one: pFedGate on digits.")] = None,
    set: Settings = None,
    out_dir: Out = None,
    data_dir: DataDir = None,
    show: Show = False,
    report: Tell = False,
    track: Track = None,
    debug: Debug = False,
) -> None:
    """Train one method on one data set, as a recipe says."""
    chosen = config.resolve(recipe, *over(set, data_dir))
    if show:
        out().print(chosen.toml(), markup=False, highlight=False, soft_wrap=True, end="")
        return
    trackers.check(track or ())
    _note(recipe, [chosen.algorithm.name])
    folder = runfolder.create(out_dir or runfolder.free(RUNS, _title(chosen)), chosen)
    _train(folder, track=track)
    _report([folder])
    if report:
        _write_report([folder.path], folder.path)


@app.command()
@command
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run or of a comparison.")],
    rounds: Annotated[int | None, typer.Option("--rounds", help="Train up to this round instead.")] = None,
    track: Track = None,
    debug: Debug = False,
) -> None:
    """Go on with what was interrupted; the result is the same, bit for bit, as without the interruption."""
    trackers.check(track or ())
    runs = runfolder.load_all(folder)
    for found in runs:
        if rounds is not None:
            runfolder.extend(found, rounds)
        if not found.finished:
            _train(found, again=folder, track=track)
    _report(runs)


@app.command(name="compare")
@command
def compare(
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD... [RECIPE.TOML]",
            help="Algorithms, and optionally a recipe. A method may bring settings of its own: "
            "pfedgate:clients.budget=0.3,gate_lr=0.5",
        ),
    ],
    set: Settings = None,
    out_dir: Out = None,
    data_dir: DataDir = None,
    report: Tell = False,
    track: Track = None,
    debug: Debug = False,
) -> None:
    """Train several methods on the same data and print one table."""
    recipes = [name for name in methods if name.endswith(".toml")]
    if len(recipes) > 1:
        raise RecipeError(f"a comparison has one recipe, got {' and '.join(recipes)}")
    names = [name for name in methods if not name.endswith(".toml")]
    if not names:
        raise RecipeError("name the methods to compare, such as: pfedgate compare pfedgate fedavg")
    base, layers = (recipes[0] if recipes else None), over(set, data_dir)
    plans = {label(name): of_method(base, layers, name) for name in names}
    if len(plans) < len(names):
        raise RecipeError(f"the same method twice in {' '.join(names)}")
    trackers.check(track or ())
    _note(None if base is None else Path(base), names)
    first = next(iter(plans.values()))
    folder = out_dir or runfolder.free(RUNS, f"compare-{first.data.name}")
    runs = runfolder.create_comparison(folder, plans)
    for found in runs:
        _train(found, again=folder, track=track)
    _report(runs, folder)
    if report:
        _write_report([folder], folder)


def _note(recipe: Path | None, methods: Sequence[str]) -> None:
    note = tuned_note(recipe, methods)
    if note:
        err().print(note, highlight=False, markup=False, soft_wrap=True)


def _title(recipe: Recipe) -> str:
    return f"{recipe.data.name}-{recipe.algorithm.name}"


def _train(found: Run, again: Path | None = None, track: Sequence[str] | None = None) -> None:
    """Run or go on, with progress; Ctrl-C leaves a folder that can be resumed and says so."""
    recipe = found.recipe
    console = err()
    title = f"{recipe.data.name} · {found.name if again else recipe.algorithm.name}"
    try:
        with trackers.tracking(track or (), found.path, recipe) as listeners, Progress(title, console) as progress:
            experiment.resume(found.path, callbacks=[progress, *listeners])
    except KeyboardInterrupt:
        kept = len(found.metrics)
        console.print(
            f"\nStopped; {kept} of {recipe.train.rounds} rounds are kept. "
            f"Go on with: pfedgate resume {again or found.path}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(130) from None


def _report(runs: Sequence[Run], folder: Path | None = None) -> None:
    console = out()
    if len(runs) > 1:
        console.print(table(runs))
    else:
        console.print(learnt(runs[0]), highlight=False, soft_wrap=True)
    console.print(where(runs, folder), highlight=False, soft_wrap=True)


def _write_report(folders: Sequence[Path], folder: Path) -> None:
    from pfedgate.report import write

    path = write(folders, folder / "report.html")[0]
    out().print(f"report: {path.resolve()}", highlight=False, soft_wrap=True)
