"""Following runs in a terminal: everything shown is read from their folders, so they may run anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pfedgate.runs import folder as runfolder
from pfedgate.runs.folder import Run
from pfedgate.runs.progress import clock, percent, scaled, size

STEPS = "▁▂▃▄▅▆▇█"
QUIET = 600.0  # seconds without a new line after which a run may have died
PANEL = 10  # lines of a run in full, at most


def spark(values: Sequence[float | None], width: int = 40) -> str:
    """Numbers as a line of bars; of many, the last in each of `width` stretches.

    >>> spark([0.0, 0.5, None, 1.0])
    '▁▅█'
    """
    heights = [value for value in values if value is not None]
    if len(heights) > width:
        heights = [heights[round((at + 1) * len(heights) / width) - 1] for at in range(width)]
    if not heights:
        return ""
    low, high = min(heights), max(heights)
    scale = (len(STEPS) - 1) / (high - low) if high > low else 0.0
    return "".join(STEPS[int((value - low) * scale + 0.5)] for value in heights)


def begun(run: Run) -> bool:
    """Whether training ever began: runs of a comparison wait for each other, and data is loaded first."""
    return bool((run.path / runfolder.ENVIRONMENT).exists() or run.metrics)


def pace(run: Run) -> tuple[float | None, float, bool]:
    """Seconds until the end (None before the first round), seconds of silence, and whether it may have died.

    The pace is that of the last rounds, evaluation included. Starting counts as the end of a silence.
    """
    timing, rest = run.timing[-20:], run.recipe.train.rounds - len(run.metrics)
    spent = sum(line["seconds"] + line.get("seconds_evaluation", 0.0) for line in timing)
    left = spent / len(timing) * rest if timing else None
    paths = [run.path / "metrics.jsonl", run.path / runfolder.ENVIRONMENT]
    last = max((path.stat().st_mtime for path in paths if path.exists()), default=time.time())
    quiet = max(0.0, time.time() - last)
    return left, quiet, quiet > max(QUIET, 5 * (left or 0.0) / max(1, rest))


def state(run: Run) -> str:
    """How the run is, in a few words."""
    if run.finished:
        return f"finished, {clock(run.seconds)} of training"
    if not begun(run):
        return "training has not begun"
    left, quiet, silent = pace(run)
    if silent:
        return f"nothing new for {clock(quiet)}: if it was stopped, pfedgate resume {run.path} goes on"
    return f"running, about {clock(left)} left" if run.metrics else "no round is finished yet"


def view(runs: Sequence[Run], height: int | None = None) -> RenderableType:
    """What there is to see now: first the runs that go on, in full; then the others, in a line each.

    height  lines there are; runs for which there is no room get a line, too
    """
    going = sorted((run for run in runs if begun(run) and not run.finished), key=lambda run: pace(run)[2])
    full = going or (list(runs) if len(runs) == 1 else [])
    if height is not None:
        full = full[: max(1, (height - len(runs)) // PANEL)]
    shown = {run.path for run in full}
    rest = [run for run in runs if run.path not in shown]
    return Group(*(_panel(run) for run in full), *([_lines(rest)] if rest else []))


def _lines(runs: Sequence[Run]) -> Table:
    grid = Table.grid(padding=(0, 2), expand=True)
    for justify in ("left", "right", "right"):
        grid.add_column(no_wrap=True, justify=justify)
    grid.add_column(no_wrap=True, overflow="ellipsis", style="dim", ratio=1)
    for run in runs:
        records = run.metrics
        scores = _scores(records, run.metric.name)
        rounds = f"{len(records)} / {run.recipe.train.rounds}"
        grid.add_row(Text(run.name), rounds, run.metric.show(scores[-1]) if scores else "-", state(run))
    return grid


def _panel(run: Run) -> Panel:
    records, recipe = run.metrics, run.recipe
    done, rounds = len(records), recipe.train.rounds
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(no_wrap=True)
    grid.add_row("rounds", f"{done} / {rounds}", ProgressBar(total=max(1, rounds), completed=done, width=40))
    curves: list[tuple[str, list[Any], Callable[[Any], str], str]] = [
        (run.metric.name, _scores(records, run.metric.name), run.metric.show, "green"),
        ("bottom decile", _scores(records, "bottom_decile"), run.metric.show, "green"),
        ("training loss", [record.get("loss") for record in records], "{:.3f}".format, "cyan"),
        ("density", [record.get("density") for record in records], percent, "cyan"),
        ("q", [record.get("q") for record in records], percent, "cyan"),
    ]
    for title, values, show, style in curves:
        if any(value is not None for value in values):
            grid.add_row(title, "-" if values[-1] is None else show(values[-1]), Text(spark(values), style=style))
    spent = {name: sum(r.get(name) or 0 for r in records) for name in ("bytes_up", "bytes_down", "flops", "refused")}
    cost = f"up {size(spent['bytes_up'])}, down {size(spent['bytes_down'])}, {scaled(spent['flops'], 'FLOP')}"
    parts: list[RenderableType] = [grid, Text(f"so far: {cost}", style="dim")]
    if spent["refused"]:
        parts.append(Text(f"{spent['refused']} updates were refused: see metrics.jsonl", style="yellow"))
    title = f"{run.name} · {recipe.algorithm.name} on {recipe.data.label}, {recipe.model.label}"
    return Panel(Group(*parts), title=Text(title, style="bold"), title_align="left", subtitle=Text(state(run)))


def _scores(records: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return [record["after_broadcast"].get(name) for record in records if "after_broadcast" in record]


def follow(folder: str | Path, console: Console, *, every: float = 1.0) -> None:
    """Show the runs of a folder until all have ended."""
    if every <= 0:
        raise ValueError(f"seconds between looks must be more than 0, got {every}")
    runs = runfolder.load_all(folder)
    with Live(view(runs, console.height), console=console, auto_refresh=False) as live:
        while not all(run.finished for run in runs):
            time.sleep(every)
            live.update(view(runs, console.height), refresh=True)
        live.update(view(runs, console.height), refresh=True)
