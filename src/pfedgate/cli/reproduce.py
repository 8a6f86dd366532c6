"""`reproduce`: the paper's tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markdown import Markdown
from rich.table import Table

from pfedgate.cli.base import DataDir, Debug, Settings, app, command, err, out, over, say
from pfedgate.core.errors import unknown

if TYPE_CHECKING:
    from pfedgate.studies import Sweep

SCALES = "tiny|quick|small|paper"


@app.command()
@command
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="STUDY...", help="table1, …, figure-gates, pareto, or all.")
    ] = None,
    scale: Annotated[
        str, typer.Option("--scale", metavar=SCALES, help="How large: seconds, an hour, many hours, days.")
    ] = "tiny",
    cells: Annotated[
        str,
        typer.Option(
            "--cells", metavar="I/N|PATTERN", help="Only these cells, and no pages: 1/4 on the first of four machines."
        ),
    ] = "",
    data: Annotated[
        list[str] | None, typer.Option("--data", help="Data sets of the scale, instead of the usual.")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Instead of the scale's.")] = None,
    set: Settings = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Cells at a time; one per core.")] = None,
    on: Annotated[str, typer.Option("--on", metavar="ray", help="Spread cells over a Ray cluster.")] = "",
    out_dir: Annotated[
        Path, typer.Option("--out", help="Where cells are kept; finished ones are never run again.")
    ] = Path("runs/reproduce"),
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            help="Where pages go: docs/results; of tiny studies, or with other settings, --out.",
        ),
    ] = None,
    recipes: Annotated[
        Path | None, typer.Option("--recipes", help="Folder of the recipes with the tuned settings.")
    ] = None,
    pages: Annotated[bool, typer.Option("--pages", help="Train nothing, write the pages of finished cells.")] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="Say how long it will take and stop.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before days of work (--scale paper).")] = False,
    data_dir: DataDir = None,
    debug: Debug = False,
) -> None:
    """Run the paper's tables and figures and write them as pages; without a name: list them.

    Cells (method, data, seed) are shared between studies, and what was interrupted goes on with the same command.
    """
    from pfedgate import studies
    from pfedgate.engine.workers import cores
    from pfedgate.runs.progress import Steps, size
    from pfedgate.studies import sweep

    if not names:
        out().print(_list())
        return
    declared = studies.select(names, studies.scale_of(scale))
    layers = [*over(set, data_dir), *([{"train": {"rounds": rounds}}] if rounds else [])]
    layers = [layer for layer in layers if layer]
    console, workers = err(), workers or cores()
    if on not in ("", "ray"):
        raise ValueError(f"--on: {unknown('place', on, ['ray'])}")
    if pages and cells:
        raise ValueError("--cells runs some cells and writes no pages, --pages the other way round: give one of them")
    if estimate or (scale == "paper" and not pages):
        campaign = studies.Campaign(
            studies.scale_of(scale), out_dir / scale, tuple(data or ()), layers, recipes, cells, workers
        )
        ahead = sweep.estimate(declared, campaign)
        say(
            f"{ahead.cells} cells to run, about {sweep.long(ahead.seconds)} with {workers} at a time, "
            f"{size(ahead.disk)} on disk. Split it with --cells 1/4, 2/4, …"
        )
        if estimate or not (yes or typer.confirm("Start?", err=True)):
            return
    usual = not (set or rounds or recipes)  # trials of other settings must not replace what documentation shows
    if results is None and scale != "tiny" and usual and Path("docs").is_dir():
        results = Path("docs/results")
    with Steps(f"reproduce {scale}", "cell", console) as steps:

        def watch(now: Sweep, label: str | None) -> None:
            steps.at(now.done, now.total, label, share=now.share)

        try:
            written = studies.reproduce(
                [study.name for study in declared], scale=scale, out=out_dir, results=results, worlds=data or (),
                part=cells, workers=workers, over=layers, recipes=recipes,
                only_pages=pages, on=on, watch=watch,
            )  # fmt: skip
        except KeyboardInterrupt:
            say("\nStopped; what is done is kept. The same command goes on.", console)
            raise typer.Exit(130) from None
    texts = [path for path in written if path.suffix == ".md"]
    if len(texts) == 1:
        out().print(Markdown(texts[0].read_text(encoding="utf-8")))
    for path in written:
        say(str(path))


def _list() -> Table:
    from pfedgate import studies

    caption = f"pfedgate reproduce STUDY... --scale {SCALES}; all: every one of them, but for those with a note"
    view = Table(title="studies", caption=caption)
    for title in ("name", "what it shows", "methods", "data", "note"):
        view.add_column(title)
    for study in (*studies.STUDIES, *studies.APART):
        data = ", ".join(dict.fromkeys(column.title for column in study.columns))
        long = [scale.name for scale in studies.SCALES.values() if study.name in scale.not_in_all]
        note = f"too long for all at scale {', '.join(long)}" if long else ""
        view.add_row(study.name, study.title, str(len(study.rows) or "-"), data or "measured", note)
    return view
