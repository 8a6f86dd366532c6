"""`run`, `resume` and `compare`: the commands that train, and how they report what was learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from pfedgate.cli.base import (
    BudgetOption,
    Data,
    DataDir,
    Debug,
    Model,
    Rounds,
    Seeds,
    Settings,
    app,
    command,
    err,
    label,
    of_method,
    out,
    over,
    say,
    short,
    split,
    tuned_note,
)  # fmt: skip
from pfedgate.core.errors import RecipeError

if TYPE_CHECKING:
    from pfedgate.experiment import Experiment
    from pfedgate.runs.folder import Run

RUNS = Path("runs")
Out = Annotated[Path | None, typer.Option("--out", help="Folder for the results; by default a new one under runs/.")]
Tell = Annotated[bool, typer.Option("--report", help="Also write report.html into the folder.")]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", metavar="tensorboard|wandb|mlflow", help="Send numbers of rounds there too. May repeat."),
]
Show = Annotated[bool, typer.Option("--show", help="Print the resolved recipe as TOML and stop.")]
# Columns of a report that a terminal has room for.
SHOWN = {
    "last round": ("accuracy", "bottom_decile"),
    "best on validation": ("best_accuracy", "best_bottom_decile"),
    "after local": ("accuracy_after_local",),
    "novel": ("novel",),
    "share used": ("density",),
    "uploaded": ("bytes_up",),
    "compute": ("flops",),
    "time": ("seconds",),
}


@app.command()
@command
def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[METHOD|RECIPE.TOML]...", help="An algorithm, a recipe or both; else pFedGate on digits."
        ),
    ] = None,
    rounds: Rounds = None,
    data: Data = None,
    model: Model = None,
    budget: BudgetOption = None,
    seeds: Seeds = 1,
    set: Settings = None,
    out_dir: Out = None,
    data_dir: DataDir = None,
    show: Show = False,
    report: Tell = False,
    track: Track = None,
    debug: Debug = False,
) -> None:
    """Train one method on one data set, as a recipe says."""
    from pfedgate import experiment
    from pfedgate.config.recipe import resolve
    from pfedgate.runs import folder as runfolder
    from pfedgate.runs import trackers

    methods, recipe = split(words or ())
    if len(methods) > 1:
        raise RecipeError(f"one method at a time: pfedgate compare {' '.join(methods)} trains several")
    layers = [short(rounds, data, model, budget), *over(set, data_dir)]
    resolved = of_method(recipe, layers, methods[0]) if methods else resolve(recipe, *layers)
    if seeds > 1 and not show:
        _note(recipe, [resolved.algorithm.name])
        _compare(recipe, layers, methods or [resolved.algorithm.name], out_dir, report, track, seeds)
        return
    if show:
        say(resolved.toml().removesuffix("\n"))
        return
    trackers.check(track or ())
    _note(recipe, [resolved.algorithm.name])
    title = f"{resolved.data.label}-{resolved.algorithm.name}"
    if out_dir is not None:
        runfolder.vacant(out_dir)
    planned = experiment.plan(resolved)  # what cannot run leaves no folder
    folder = runfolder.create(out_dir or runfolder.free(RUNS, title), resolved)
    _train(folder, track=track, planned=planned)
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
    from pfedgate.runs import folder as runfolder
    from pfedgate.runs import trackers

    trackers.check(track or ())
    runs = runfolder.load_all(folder)
    for one in runs:
        if rounds is not None:
            runfolder.extend(one, rounds)
        if not one.finished:
            _train(one, again=folder, track=track)
    _report(runs)


@app.command(name="compare")
@command
def compare(
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD... [RECIPE.TOML]",
            help="Algorithms, and optionally a recipe. A method may bring settings of its own, and a name: "
            "small=pfedgate:clients.budget=0.3,gate_lr=0.5",
        ),
    ],
    rounds: Rounds = None,
    data: Data = None,
    model: Model = None,
    budget: BudgetOption = None,
    seeds: Seeds = 1,
    set: Settings = None,
    out_dir: Out = None,
    data_dir: DataDir = None,
    report: Tell = False,
    track: Track = None,
    debug: Debug = False,
) -> None:
    """Train several methods on the same data and print one table.

    With --seeds it shows differences to the first method, paired by seed and client, with 95 % intervals.
    """
    names, recipe = split(methods)
    if not names:
        raise RecipeError("name the methods to compare, such as: pfedgate compare pfedgate fedavg")
    _note(recipe, names)
    layers = [short(rounds, data, model, budget), *over(set, data_dir)]
    _compare(recipe, layers, names, out_dir, report, track, seeds)


# The demo: ours beside its strongest cheap opponents. Settings were chosen on validation data of another seed, by the
# trials that docs/results/demo.md lists.
# Models are scored as received and after an epoch of the client's own: the second column of FedAvg is FedAvg-FT.
DEMO = {
    "data": {"name": "fashion"},
    "train": {"rounds": 15},
    "evaluate": {"every": 3, "points": ["after_broadcast", "after_local"], "local_lr": 0.003},
}
OPPONENTS = (
    "pfedgate-0.3=pfedgate:clients.budget=0.3,gate_lr=0.1",
    "fedavg=fedavg:train.correction=none,train.initial_scale=1.0",
    "fedavg-corrected=fedavg",
    "narrow-corrected=fedavg:model.width=0.37,train.lr=0.1",
)


@app.command()
@command
def demo(set: Settings = None, out_dir: Out = None, debug: Debug = False) -> None:
    """Train pFedGate beside its strongest cheap opponents on 6,000 images: a table and a report, in a minute or two."""
    _compare(None, [DEMO, *over(set, None)], OPPONENTS, out_dir, True, None)


def _compare(
    recipe: str | None,
    layers: Sequence[Mapping[str, Any]],
    methods: Sequence[str],
    out_dir: Path | None,
    report: bool,
    track: Sequence[str] | None,
    seeds: int = 1,
) -> None:
    from pfedgate import experiment
    from pfedgate.runs import folder as runfolder
    from pfedgate.runs import trackers

    resolved = {label(method): of_method(recipe, layers, method) for method in methods}
    if len(resolved) < len(methods):
        raise RecipeError(f"the same method twice in {' '.join(methods)}")
    trackers.check(track or ())
    first = next(iter(resolved.values()))
    folder = runfolder.vacant(out_dir or runfolder.free(RUNS, f"compare-{first.data.label}"))
    for one_of in resolved.values():
        experiment.plan(one_of)  # an error of the last method is better raised before the first one trains
    named = resolved if seeds == 1 else {
        f"{name}-seed{seed}": replace(recipe, run=replace(recipe.run, seed=seed))
        for name, recipe in resolved.items()
        for seed in range(recipe.run.seed, recipe.run.seed + seeds)
    }  # fmt: skip
    runs = runfolder.create_comparison(folder, named)
    for one in runs:
        _train(one, again=folder, track=track)
    _report(runs, folder)
    if report:
        _write_report([folder], folder)


def _note(recipe: str | None, methods: Sequence[str]) -> None:
    if note := tuned_note(recipe, methods):
        say(note, err())


def _train(
    run: Run, again: Path | None = None, track: Sequence[str] | None = None, planned: Experiment | None = None
) -> None:
    """Run or go on, with progress; Ctrl-C leaves a folder that can be resumed and says so."""
    from pfedgate import experiment
    from pfedgate.runs import trackers
    from pfedgate.runs.progress import Progress

    recipe = run.recipe
    console = err()
    title = f"{recipe.data.label} · {run.name if again else recipe.algorithm.name}"
    try:
        with trackers.tracking(track or (), run.path, recipe) as listeners, Progress(title, console) as progress:
            experiment.resume(run.path, callbacks=[progress, *listeners], planned=planned)
    except KeyboardInterrupt:
        say(
            f"\nStopped; {len(run.metrics)} of {recipe.train.rounds} rounds are kept. "
            f"Go on with: pfedgate resume {again or run.path}",
            console,
        )
        raise typer.Exit(130) from None


def _report(runs: Sequence[Run], folder: Path | None = None) -> None:
    if len(runs) > 1:
        out().print(table(runs))
        say(f"{folder or runs[0].path.parent}: one folder per method, each with metrics.jsonl, clients.csv and more:")
        say("\n".join(f"  {run.path}" for run in runs))
        if len({run.recipe.run.seed for run in runs}) > 1:
            out().print(differences(runs))
    else:
        say(learnt(runs[0]))
        say(f"{runs[0].path}: metrics.jsonl (rounds), clients.csv (clients), config.toml (to run it again)")


def _write_report(folders: Sequence[Path], folder: Path) -> None:
    from pfedgate.report import write

    say(f"report: {write(folders, folder / 'report.html')[0].resolve()}")


def differences(runs: Sequence[Run]) -> Table:
    """Means over seeds, and each method minus the first one; runs of one method have names that end with their seed."""
    from pfedgate.report.paired import paired, scores
    from pfedgate.report.tables import percent

    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.name.removesuffix(f"-seed{run.recipe.run.seed}"), []).append(run)
    first, base = next(iter(methods.items()))
    metric, seeds = base[0].metric, len(base)
    unit, show = (", %", percent) if metric.share else ("", "{:.4g}".format)
    view = Table(title=f"{seeds} seeds", caption="95 % intervals over seeds, never narrower than clients make them")
    gaps = [f"− {first}, {'points' if metric.share else metric.name}"] if len(methods) > 1 else []
    for title in ("method", *(f"{what}{unit}" for what in (metric.name, "bottom decile", "worst tenth")), *gaps):
        view.add_column(title, justify="left" if title == "method" else "right")
    clients = {name: {run.recipe.run.seed: scores(run) for run in own} for name, own in methods.items()}
    for name, own in methods.items():
        cells = []
        for key in (metric.name, "bottom_decile", "worst_tenth"):
            values = [float(value) for run in own if (value := run.summary.get(key)) is not None]
            spread = f" ± {show(stdev(values))}" if len(values) > 1 else ""
            cells.append(f"{show(fmean(values))}{spread}" if values else "-")
        gap = None if name == first else paired(clients[name], clients[first])
        if gaps:
            plain = "" if gap is None else f"{gap.mean:+.4g} [{gap.low:+.4g}, {gap.high:+.4g}]"
            cells.append(str(gap or "") if metric.share else plain)
        view.add_row(name, *cells)
    return view


def table(runs: Sequence[Run]) -> Table:
    """One row per run, as in a report, the best of each column in bold."""
    from pfedgate.report import tables

    metric = runs[0].metric
    summary = tables.summarise({run.name: tables.numbers(run.summary) for run in runs}, metric=metric)
    at = {column["key"]: index for index, column in enumerate(summary["head"])}
    groups = {title: [at[key] for key in keys] for title, keys in SHOWN.items() if all(key in at for key in keys)}
    first = runs[0]
    view = Table(
        title=f"{first.recipe.data.label}, {first.recipe.model.label}, {first.summary.get('rounds', 0)} rounds"
    )
    view.add_column("method", no_wrap=True)
    for title in groups:
        view.add_column(title, justify="right")
    for row in summary["rows"]:
        cells = [Text(cell["text"], style="bold green" if cell["best"] else "") for cell in row["cells"]]
        view.add_row(row["name"], *(Text(" / ").join(cells[index] for index in group) for group in groups.values()))
    view.caption = (
        f"{metric.name} / bottom decile{' in %' if metric.share else ''} of each client's model after the broadcast, "
        "on test data: in the last round and in the one that was best on validation data; bold: best of all"
    )
    return view


def learnt(run: Run) -> Text:
    """A few sentences about one run."""
    from pfedgate.runs.progress import clock, percent, scaled, size

    recipe, summary, name, show = run.recipe, run.summary, run.metric.name, run.metric.show
    lines = [
        Text.assemble(
            (f"{recipe.algorithm.name} on {recipe.data.label}", "bold"),
            f": {summary['rounds']} rounds, {summary.get('clients', 0)} clients, {recipe.model.label}, "
            f"{clock(summary['seconds'])} of training",
        )
    ]
    if summary.get(name) is not None:
        lines.append(
            Text.assemble(
                f"{name} ",
                (show(summary[name]), "bold"),
                f", bottom decile {show(summary['bottom_decile'])}, spread {show(summary['spread'])}"
                f" (each client's own model on its test data)",
            )
        )
        if summary.get("best_round") is not None:
            lines.append(
                Text(f"best on validation: round {summary['best_round']}, {show(summary[f'best_{name}'])} on test")
            )
    if summary.get(f"{name}_after_local") is not None:
        lines.append(Text(f"after a further local epoch: {show(summary[f'{name}_after_local'])}"))
    if summary.get("novel"):
        novel = summary["novel"]
        lines.append(Text(f"{novel['clients']} clients never seen in training: {show(novel[name])}"))
    costs = [f"up {size(summary['bytes_up'])}", f"down {size(summary['bytes_down'])}", scaled(summary["flops"], "FLOP")]
    if summary.get("density") is not None:
        costs.insert(0, f"{percent(summary['density'])} of the model used")
    lines.append(Text("cost: " + ", ".join(costs) + f", peak memory {size(summary['resident_bytes'])}"))
    if "epsilon" in summary:
        spent = "not private, as there is no noise" if summary["epsilon"] is None else f"ε = {summary['epsilon']:.3g}"
        lines.append(Text(f"privacy of each {recipe.privacy.level}: {spent} at δ = {summary['delta']:g}"))
    if summary.get("stopped_after"):
        lines.append(Text(f"stopped early: {summary['stopped_after']} evaluations brought nothing better"))
    if summary.get("refused"):
        lines.append(Text(f"{summary['refused']} updates were refused: see metrics.jsonl", style="yellow"))
    return Text("\n").join(lines)
