"""`report` and `watch`: looking at runs, finished or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pfedgate.cli.base import Debug, app, command, out
from pfedgate.runs import folder as runfolder


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

    written = write(folders, out_file, baseline=baseline, figures=figures, title=title)
    out().print(f"report: {written[0]}", highlight=False, soft_wrap=True)
    if len(written) > 1:
        out().print(f"figures: {len(written) - 1} files in {written[1].parent}", highlight=False, soft_wrap=True)


@app.command()
@command
def watch(
    folder: Annotated[Path, typer.Argument(help="The folder of a run or of a comparison.")],
    every: Annotated[float, typer.Option("--every", help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and stop.")] = False,
    debug: Debug = False,
) -> None:
    """Follow a run in the terminal; it may run anywhere, this only reads its folder. Ctrl-C leaves it running."""
    from pfedgate.runs.watch import follow, view

    if once:
        out().print(view(runfolder.load_all(folder)))
        return
    follow(folder, out(), every=every)
