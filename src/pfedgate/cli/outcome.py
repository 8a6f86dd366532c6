"""What was learnt, in words and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pfedgate.progress import clock, percent, scaled, size
from pfedgate.runfolder import Run


@dataclass(frozen=True)
class Column:
    """One number of a comparison."""

    title: str
    key: str
    show: Callable[[float], str]
    best: Callable[[Sequence[float]], float] | None  # max, min, or None: nothing to win
    always: bool = False  # shown even if all methods have the same


COLUMNS = (
    Column("accuracy", "accuracy", percent, max, True),
    Column("bottom decile", "bottom_decile", percent, max, True),
    Column("spread", "spread", percent, min, True),
    Column("after local", "accuracy_after_local", percent, max),
    Column("novel", "novel", percent, max),
    Column("density", "density", "{:.2f}".format, None),
    Column("uploaded", "bytes_up", size, min, True),
    Column("compute", "flops", lambda value: scaled(value, "FLOP"), min, True),
    Column("time", "seconds", clock, min, True),
)


def table(runs: Sequence[Run]) -> Table:
    """One row per run, the best of each column in bold."""
    rows = [_numbers(run) for run in runs]
    first = runs[0].recipe
    view = Table(title=f"{first.data.name}, {first.model.name}, {rows[0].get('rounds', 0)} rounds")
    view.add_column("method", no_wrap=True)
    shown = [c for c in COLUMNS if c.always or any(row.get(c.key) is not None for row in rows)]
    for column in shown:
        view.add_column(column.title, justify="right")
    for run, row in zip(runs, rows, strict=True):
        cells = []
        for column in shown:
            values = [other[column.key] for other in rows if other.get(column.key) is not None]
            value = row.get(column.key)
            won = column.best is not None and len(values) > 1 and value == column.best(values)
            cells.append(Text("-" if value is None else column.show(value), style="bold green" if won else ""))
        view.add_row(run.name, *cells)
    view.caption = "accuracy on test data of each client's model after the broadcast; bold: best of a column"
    return view


def _numbers(run: Run) -> dict[str, Any]:
    found = dict(run.summary)
    found["novel"] = found.get("novel", {}).get("accuracy")
    if found.get("density") is None:
        found["density"] = 1.0  # a method that says nothing uses the whole model
    return found


def learnt(run: Run) -> Text:
    """A few sentences about one run."""
    recipe, told = run.recipe, run.summary
    clients = told.get("clients", 0)
    lines = [
        Text.assemble(
            (f"{recipe.algorithm.name} on {recipe.data.name}", "bold"),
            f": {told['rounds']} rounds, {clients} clients, {recipe.model.name}, {clock(told['seconds'])} of training",
        )
    ]
    if told.get("accuracy") is not None:
        lines.append(
            Text.assemble(
                "accuracy ",
                (percent(told["accuracy"]), "bold"),
                f", bottom decile {percent(told['bottom_decile'])}, spread {percent(told['spread'])}"
                f" (each client's own model on its test data)",
            )
        )
        if told.get("best_round") is not None:
            lines.append(
                Text(f"best on validation: round {told['best_round']}, {percent(told['best_accuracy'])} on test")
            )
    if told.get("accuracy_after_local") is not None:
        lines.append(Text(f"after a further local epoch: {percent(told['accuracy_after_local'])}"))
    if told.get("novel"):
        novel = told["novel"]
        lines.append(Text(f"{novel['clients']} clients never seen in training: {percent(novel['accuracy'])}"))
    costs = [f"up {size(told['bytes_up'])}", f"down {size(told['bytes_down'])}", scaled(told["flops"], "FLOP")]
    if told.get("density") is not None:
        costs.insert(0, f"{percent(told['density'])} of the model used")
    lines.append(Text("cost: " + ", ".join(costs) + f", peak memory {size(told['peak_bytes'])}"))
    if told.get("refused"):
        lines.append(Text(f"{told['refused']} updates were refused: see metrics.jsonl", style="yellow"))
    return Text("\n").join(lines)


def where(runs: Sequence[Run], folder: Path | None = None) -> Text:
    """Where to look."""
    if len(runs) == 1:
        path = runs[0].path
        return Text(f"{path}: metrics.jsonl (rounds), clients.csv (clients), config.toml (to run it again)")
    told = f"{folder or runs[0].path.parent}: one folder per method, each with metrics.jsonl, clients.csv, config.toml"
    return Text("\n".join([told, *(f"  {run.path}" for run in runs)]))
