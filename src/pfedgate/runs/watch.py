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


def left(run: Run) -> float | None:
    """Seconds until the end at the pace of the last rounds, evaluation included; None before the first."""
    timing = run.timing[-20:]
    if not timing:
        return None
    each = sum(line["seconds"] + line.get("seconds_evaluation", 0.0) for line in timing) / len(timing)
    return float(each * (run.recipe.train.rounds - len(run.metrics)))


def quiet(run: Run) -> float:
    """Seconds since the run last wrote a line or, if that was later, was last started."""
    paths = [run.path / "metrics.jsonl", run.path / runfolder.ENVIRONMENT]
    return max(0.0, time.time() - max((path.stat().st_mtime for path in paths if path.exists()), default=time.time()))


def begun(run: Run) -> bool:
    """Whether training ever began: runs of a comparison wait for each other, and data is loaded first."""
    return bool((run.path / runfolder.ENVIRONMENT).exists() or run.metrics)


def silent(run: Run) -> bool:
    """Whether it wrote nothing for so long that it may have died."""
    each = (left(run) or 0.0) / max(1, run.recipe.train.rounds - len(run.metrics))
    return quiet(run) > max(QUIET, 5 * each)


def state(run: Run) -> str:
    """How the run is, in a few words."""
    if run.finished:
        return f"finished, {clock(run.seconds)} of training"
    if not begun(run):
        return "training has not begun"
    if silent(run):
        return f"nothing new for {clock(quiet(run))}: if it was stopped, pfedgate resume {run.path} goes on"
    return f"running, about {clock(left(run))} left" if run.metrics else "no round is finished yet"


def view(runs: Sequence[Run], height: int | None = None) -> RenderableType:
    """What there is to see now: first the runs that go on, in full; then the others, in a line each.

    height  lines there are; runs for which there is no room get a line, too
    """
    going = sorted((run for run in runs if begun(run) and not run.finished), key=silent)
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
        scores = [r["after_broadcast"].get("accuracy") for r in records if "after_broadcast" in r]
        rounds = f"{len(records)} / {run.recipe.train.rounds}"
        grid.add_row(Text(run.name), rounds, percent(scores[-1]) if scores else "-", state(run))
    return grid


def _panel(run: Run) -> Panel:
    records, recipe = run.metrics, run.recipe
    done, rounds = len(records), recipe.train.rounds
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(no_wrap=True)
    grid.add_row("rounds", f"{done} / {rounds}", ProgressBar(total=max(1, rounds), completed=done, width=40))
    for title, name, show in (
        ("accuracy", "accuracy", percent),
        ("bottom decile", "bottom_decile", percent),
    ):
        values = [r["after_broadcast"].get(name) for r in records if "after_broadcast" in r]
        if values:
            grid.add_row(title, show(values[-1]), Text(spark(values), style="green"))
    for title, name, tell in _TRAINING:
        values = [record.get(name) for record in records]
        if any(value is not None for value in values):
            grid.add_row(title, tell(values[-1]), Text(spark(values), style="cyan"))
    spent = {name: sum(r.get(name) or 0 for r in records) for name in ("bytes_up", "bytes_down", "flops", "refused")}
    cost = f"up {size(spent['bytes_up'])}, down {size(spent['bytes_down'])}, {scaled(spent['flops'], 'FLOP')}"
    parts: list[RenderableType] = [grid, Text(f"so far: {cost}", style="dim")]
    if spent["refused"]:
        parts.append(Text(f"{spent['refused']} updates were refused: see metrics.jsonl", style="yellow"))
    title = f"{run.name} · {recipe.algorithm.name} on {recipe.data.name}, {recipe.model.name}"
    return Panel(Group(*parts), title=Text(title, style="bold"), title_align="left", subtitle=Text(state(run)))


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


_TRAINING: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("training loss", "loss", _plain),
    ("density", "density", percent),
    ("q", "q", percent),
)


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
