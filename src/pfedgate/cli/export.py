"""`export`: a client's model as a small plain module, in a file for other runtimes."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pfedgate.cli.base import Debug, app, command, err, out
from pfedgate.core import measure
from pfedgate.export import FORMATS, Client, client, format_of, parameters, save
from pfedgate.runs.progress import percent, scaled, size


@app.command()
@command
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    name: Annotated[str, typer.Option("--client", help="Whose model; ids are in clients.csv of the run.")],
    file: Annotated[Path, typer.Option("--out", help="The file to write.")],
    budget: Annotated[
        float | None, typer.Option("--budget", help="Share of the dense model; by default the client's in the run.")
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", metavar="|".join(FORMATS), help="By default as the file's name ends.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a client's model without its gate: one choice of blocks for all its data, as smaller plain layers."""
    chosen = format_of(file, format)
    found = client(folder, name, budget=budget)
    with err().status(f"writing {file} …"):
        save(found.compact, found.example, file, chosen)
        view = _table(found, file, chosen)
    out().print(view)
    shape = " × ".join(["batch", *map(str, found.example.shape[1:])])
    kind = str(found.example.dtype).removeprefix("torch.")
    out().print(f"{file}: takes {shape} {kind}, prepared as in training", highlight=False, soft_wrap=True)


def _table(found: Client, file: Path, format: str) -> Table:
    """The compact module beside the dense one it comes from and the gated one it stands for."""
    with tempfile.TemporaryDirectory() as folder:
        dense = save(found.dense, found.example, Path(folder) / f"dense.{format}", format).stat().st_size
    view = Table(title=f"client {found.local.card.id}, test samples: {found.test.n}", title_justify="left")
    view.add_column("model", no_wrap=True)
    for title in ("parameters", "FLOP per sample", "file", "test accuracy"):
        view.add_column(title, justify="right", no_wrap=True)
    one = found.example[:1]
    for title, model, nbytes in (
        ("dense, shared", found.dense, dense),
        ("compact, one choice", found.compact, file.stat().st_size),
    ):
        flops = scaled(measure.flops(partial(model, one)), "FLOP")
        accuracy = "-" if model is found.dense else percent(found.score(model).accuracy)
        view.add_row(title, f"{parameters(model):,}", flops, size(nbytes), accuracy)
    scope = found.gated.gated.gate.config.scope
    view.add_row(f"gated, a choice per {scope}", "-", "-", "-", percent(found.score(found.gated).accuracy))
    return view
