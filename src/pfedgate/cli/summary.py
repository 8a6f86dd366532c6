"""What was learnt, in words and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from pfedgate.runs.folder import Run
from pfedgate.runs.progress import clock, percent, scaled, size

# What a terminal has room for, of the columns of a report.
SHOWN = {
    "last round": ("accuracy", "bottom_decile"),
    "best on validation": ("best_accuracy", "best_bottom_decile"),
    "after local": ("accuracy_after_local",),
    "novel": ("novel",),
    "density": ("density",),
    "uploaded": ("bytes_up",),
    "compute": ("flops",),
    "time": ("seconds",),
}


def table(runs: Sequence[Run]) -> Table:
    """One row per run, as in a report, the best of each column in bold."""
    from pfedgate.report import tables

    made = tables.summarise({run.name: tables.numbers(run.summary) for run in runs})
    at = {column["key"]: index for index, column in enumerate(made["head"])}
    shown = {title: [at[key] for key in keys] for title, keys in SHOWN.items() if all(key in at for key in keys)}
    first = runs[0]
    view = Table(title=f"{first.recipe.data.name}, {first.recipe.model.name}, {first.summary.get('rounds', 0)} rounds")
    view.add_column("method", no_wrap=True)
    for title in shown:
        view.add_column(title, justify="right")
    for row in made["rows"]:
        cells = [Text(cell["text"], style="bold green" if cell["best"] else "") for cell in row["cells"]]
        view.add_row(row["name"], *(Text(" / ").join(cells[index] for index in group) for group in shown.values()))
    view.caption = (
        "accuracy / bottom decile in % of each client's model after the broadcast, on test data: in the last round and "
        "in the one that was best on validation data; bold: best of all"
    )
    return view


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
