"""`data show` and `data prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pfedgate import data as datasets
from pfedgate.cli.base import DataDir, Debug, app, command, out
from pfedgate.config import options as catalogue
from pfedgate.config import recipe as config
from pfedgate.config.recipe import Recipe
from pfedgate.data import show as showing
from pfedgate.data.options import Options

group = typer.Typer(help="Look at data sets and fetch them.", no_args_is_help=True)
app.add_typer(group, name="data")

Name = Annotated[str, typer.Argument(help="digits, cifar10, cifar100, emnist, femnist, …")]
Options_ = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Options of the data: clients=50, alpha=0.1, clients.novel=0.2."),
]


@group.command("show")
@command
def show(
    name: Name = "digits",
    set: Options_ = None,
    data_dir: DataDir = None,
    plot: Annotated[Path | None, typer.Option(help="Where to draw it (png, svg, pdf).")] = None,
    limit: Annotated[int, typer.Option(help="Clients to list.")] = 40,
    debug: Debug = False,
) -> None:
    """Print how a data set is shared out among clients, and draw it to a file."""
    recipe = _recipe(name, set, data_dir)
    federation = catalogue.federation(name, recipe.data.options, novel=recipe.clients.novel, seed=recipe.run.seed)
    console = out()
    view = Table(title=f"{name}: samples of each client", title_justify="left")
    head = showing.header(federation)
    # The table of classes is the picture's job when there are many of them.
    columns = len(head) if federation.classes <= 20 else len(head) - federation.classes
    for title in head[:columns]:
        view.add_column(title, justify="left" if title in ("client", "kind") else "right")
    for line in showing.table(federation, limit):
        view.add_row(*(str(cell) if cell else "·" for cell in line[:columns]))
    console.print(view)
    if len(federation.ids) > limit:
        console.print(f"… and {len(federation.ids) - limit} more: --limit {len(federation.ids)}", highlight=False)
    for fact, text in showing.facts(federation).items():
        console.print(f"{fact + ':':12}{text}", highlight=False, markup=False, soft_wrap=True)
    drawn = showing.plot(federation, plot or Path(f"{name}-partition.png"))
    console.print(f"drawn in {drawn}", highlight=False, soft_wrap=True)


@group.command("prepare")
@command
def prepare(name: Name, set: Options_ = None, data_dir: DataDir = None, debug: Debug = False) -> None:
    """Fetch and decode a data set once, so that runs start at once and need no network."""
    if name == "digits":
        out().print("digits needs no preparation: it is part of scikit-learn", highlight=False)
        return
    known = _recipe(name, set, data_dir).data.options
    chosen = {key: known[key] for key in ("source", "data_dir", "cache_dir", "repo", "revision") if key in known}
    folder = datasets.prepare(name, Options(**chosen))
    out().print(f"{name} is ready in {folder}", highlight=False, soft_wrap=True)


def _recipe(name: str, given: list[str] | None, data_dir: Path | None) -> Recipe:
    over = {"data.data_dir": str(data_dir)} if data_dir else {}
    return config.resolve({"data": name, "algorithm": "fedavg"}, over, config.settings(given or [], section="data"))
