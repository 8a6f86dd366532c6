"""`report`, `watch` and `export`: looking at runs, finished or not, and taking a model out of one."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from pfedgate.cli.base import Debug, app, command, err, out, say

if TYPE_CHECKING:
    from pfedgate.export import Client


@app.command()
@command
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Runs, or comparisons of runs.")],
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="Run or algorithm that clients are compared with; else fedavg.")
    ] = None,
    figures: Annotated[
        str | None, typer.Option("--figures", metavar="pdf|svg|png", help="Also write the figures as files.")
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="The HTML file; by default report.html in the runs' folder.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="Heading of the report.")] = None,
    debug: Debug = False,
) -> None:
    """Write one self-contained HTML report of some runs."""
    from pfedgate.report import write

    files = write(folders, out_file, baseline=baseline, figures=figures, title=title)
    say(f"report: {files[0]}")
    if len(files) > 1:
        say(f"figures: {len(files) - 1} files in {files[1].parent}")


@app.command()
@command
def watch(
    folder: Annotated[Path, typer.Argument(help="The folder of a run or of a comparison.")],
    every: Annotated[float, typer.Option("--every", help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and stop.")] = False,
    debug: Debug = False,
) -> None:
    """Follow a run in the terminal; it may run anywhere, this only reads its folder. Ctrl-C leaves it running."""
    from pfedgate.runs import folder as runfolder
    from pfedgate.runs.watch import follow, view

    if once:
        out().print(view(runfolder.load_all(folder)))
        return
    follow(folder, out(), every=every)


@app.command()
@command
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    file: Annotated[Path, typer.Option("--out", help="The file to write.")],
    name: Annotated[
        str | None, typer.Option("--client", help="Whose model; ids are in clients.csv of the run.")
    ] = None,
    gate: Annotated[Path | None, typer.Option("--gate", help="That of a new client, from `pfedgate adapt`.")] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", help="Share of the dense model; by default the client's in the run.")
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", metavar="pt2|onnx|pte", help="By default as the file's name ends.")
    ] = None,
    quantise: Annotated[
        bool, typer.Option("--quantise", help="Weights of 8 bits (onnx); prints what that costs in accuracy.")
    ] = False,
    licence: Annotated[
        str, typer.Option("--licence", help="For the file's metadata: under which terms it may be used.")
    ] = "",
    debug: Debug = False,
) -> None:
    """Write a client's model without its gate: one choice of blocks for all its data, as smaller plain layers."""
    from pfedgate.export import client, format_of, need, newcomer, save
    from pfedgate.export import quantise as quantised

    kind = format_of(file, format)
    need(kind)
    if quantise and kind != "onnx":
        raise ValueError(f"only onnx files are quantised, not {kind}: give --out a name that ends with .onnx")
    if (name is None) == (gate is None):
        raise ValueError("whose model? Give --client with an id of the run, or --gate with a file of `pfedgate adapt`")
    model = newcomer(folder, gate, budget=budget) if gate else client(folder, str(name), budget=budget)
    with err().status(f"writing {file} …"):
        save(model.compact, model.example, file, kind, model.facts(licence))
        view = _table(model, file, kind)
        if quantise:
            quantised(file, file)
            _add_quantised(view, model, file)
    out().print(view)
    shape = " × ".join(["batch", *map(str, model.example.shape[1:])])
    dtype = str(model.example.dtype).removeprefix("torch.")
    if kind == "pte":
        shape = shape.replace("batch", "1")
    say(f"{file}: takes {shape} {dtype}, prepared as in training (its metadata says how)")


@app.command()
@command
def adapt(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    data: Annotated[
        Path, typer.Option("--data", help="The new client's: images as <class>/<image>, or a table as the run's.")
    ],
    file: Annotated[Path, typer.Option("--out", help="The file to write, such as gate.safetensors.")],
    budget: Annotated[
        float | None, typer.Option("--budget", help="Share of the dense model; by default that of all clients.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--client", help="Which client of several in the data, or a name.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Let a client that took no part train its gate on its own data; the shared model stands still."""
    from pfedgate.novel import adapt as learn

    adapted = learn(folder, data, budget=budget, client=name)
    before, after, metric = adapted.before, adapted.after, adapted.plan.algorithm.task.metric
    adapted.save(file)
    share = "" if "density" not in after.stats else f", {after.stats['density']:.3f} of the model in use"
    say(
        f"client {adapted.card.id}: {metric.name} {metric.show(before.test.score)} before, "
        f"{metric.show(after.test.score)} after, on {after.test.n} test samples{share}"
    )
    say(f"{file}: what it keeps; `pfedgate export {folder} --gate {file} --out client.onnx` makes a small model of it")


def _table(client: Client, file: Path, format: str) -> Table:
    """The compact module beside the dense one it comes from and the gated one it stands for."""
    from pfedgate.core import measure
    from pfedgate.export import parameters, save
    from pfedgate.runs.progress import scaled, size

    metric = client.task.metric
    with tempfile.TemporaryDirectory() as folder:
        dense = save(client.dense, client.example, Path(folder) / f"dense.{format}", format).stat().st_size
    view = Table(title=f"client {client.local.card.id}, test samples: {client.test.n}", title_justify="left")
    view.add_column("model", no_wrap=True)
    for title in ("parameters", "FLOP per sample", "file", f"test {metric.name}"):
        view.add_column(title, justify="right", no_wrap=True)
    one = client.example[:1]
    for title, model, nbytes in (
        ("dense, shared", client.dense, dense),
        ("compact, one choice", client.compact, file.stat().st_size),
    ):
        flops = scaled(measure.flops(partial(model, one)), "FLOP")
        score = "-" if model is client.dense else metric.show(client.score(model).score)
        view.add_row(title, f"{parameters(model):,}", flops, size(nbytes), score)
    scope = client.gated.gated.gate.config.scope
    view.add_row(f"gated, a choice per {scope}", "-", "-", "-", metric.show(client.score(client.gated).score))
    return view


def _add_quantised(view: Table, client: Client, file: Path) -> None:
    """The file that was written in the end, as ONNX Runtime runs it."""
    from pfedgate.export import InFile, parameters
    from pfedgate.runs.progress import size

    score = client.task.metric.show(client.score(InFile(file)).score)
    view.add_row("compact, 8 bits", f"{parameters(client.compact):,}", "-", size(file.stat().st_size), score)
