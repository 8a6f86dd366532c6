"""`algorithms`, `models` and `data`: names to choose from, their options, and how data is shared out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from pfedgate.cli.base import DataDir, Debug, app, command, out, say

if TYPE_CHECKING:
    from pfedgate.config.recipe import Recipe

group = typer.Typer(help="Look at data sets and fetch them.", no_args_is_help=True)
app.add_typer(group, name="data")

Name = Annotated[str, typer.Argument(help="digits, cifar10, cifar100, emnist, femnist, …")]
DataSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Options of the data: clients=50, alpha=0.1, clients.novel=0.2."),
]


@app.command()
@command
def algorithms(
    name: Annotated[str | None, typer.Argument(help="Show all there is to know about this one.")] = None,
    debug: Debug = False,
) -> None:
    """List the algorithms, or one with its hyper-parameters; costs of a round are measured, relative to FedAvg."""
    from pfedgate import algorithms as registry
    from pfedgate.config import methods

    if name is not None:
        (method,) = methods.methods([registry.get(name).name])
        down, up, compute = methods.cells(method.cost)
        say(f"{method.name}: {method.paper}\n{method.about}\n")
        say(f"shared    {method.shares}\nprivate   {method.keeps}")
        say(f"a round   down {down}, up {up}, compute {compute} (FedAvg = 1)")
        _options("hyper-parameters", "algorithm", method.name, method.grid)
        return
    view = Table(title="algorithms", title_justify="left")
    for title in methods.COLUMNS:
        view.add_column(title, no_wrap=title in ("name", "down", "up", "compute"))
    for row in methods.rows(methods.methods()):
        view.add_row(*row)
    out().print(view)
    say(f"down, up, compute: of a round, FedAvg = 1, clients at a budget of {methods.BUDGET}")
    say("pfedgate algorithms NAME explains one and its hyper-parameters")


@app.command()
@command
def models(
    name: Annotated[str | None, typer.Argument(help="Show the options of this one.")] = None,
    debug: Debug = False,
) -> None:
    """List the models, or the options of one."""
    from pfedgate import models as networks

    if name is not None:
        _options(name, "model", name)
        return
    view = Table(title="models", title_justify="left")
    for title in ("name", "input", "classes", "parameters", "options", "what"):
        view.add_column(title, no_wrap=title == "name", justify="right" if title == "parameters" else "left")
    for info in networks.describe():
        shape = " × ".join(map(str, info.input_shape))
        options = ", ".join(info.options) or "-"
        view.add_row(info.name, shape, str(info.classes), f"{info.params:,}", options, info.what)
    out().print(view)
    say("input and classes adapt to the data; shown are the defaults")


def _options(title: str, section: str, name: str, grid: Mapping[str, Sequence[Any]] | None = None) -> None:
    from pfedgate.config import toml
    from pfedgate.config.options import options_of

    view = Table(title=title, title_justify="left")
    for column in ("option", "default", "why", *(("the paper's values",) if grid is not None else ())):
        view.add_column(column, no_wrap=column == "option")
    for option in options_of(section, name).values():
        values = [] if grid is None else [", ".join(toml.dump(value) for value in grid.get(option.name, ()))]
        view.add_row(f"{section}.{option.name}", toml.dump(option.default), option.why, *values)
    out().print(view)


@group.command("show")
@command
def show(
    name: Name = "digits",
    set: DataSettings = None,
    data_dir: DataDir = None,
    plot: Annotated[Path | None, typer.Option(help="Where to draw it (png, svg, pdf).")] = None,
    limit: Annotated[int, typer.Option(help="Clients to list.")] = 40,
    debug: Debug = False,
) -> None:
    """Print how a data set is shared out among clients, and draw it to a file."""
    from pfedgate.config import options as catalogue
    from pfedgate.data import show as showing

    recipe = _recipe(name, set, data_dir)
    federation = catalogue.federation(
        recipe.data.name, recipe.data.options, novel=recipe.clients.novel, seed=recipe.run.seed
    )
    console = out()
    view = Table(title=f"{name}: samples of each client", title_justify="left")
    head = showing.header(federation)
    # Many classes do not fit beside each other: the picture shows them.
    columns = len(head) if federation.classes <= 20 else len(head) - federation.classes
    for title in head[:columns]:
        view.add_column(title, justify="left" if title in ("client", "kind") else "right")
    for line in showing.table(federation, limit):
        view.add_row(*(str(cell) if cell else "·" for cell in line[:columns]))
    console.print(view)
    if len(federation.ids) > limit:
        say(f"… and {len(federation.ids) - limit} more: --limit {len(federation.ids)}")
    for fact, text in showing.facts(federation).items():
        say(f"{fact + ':':12}{text}")
    try:
        picture = showing.plot(federation, plot or Path(f"{Path(name).stem}-partition.png"))
        say(f"drawn in {picture}")
    except ImportError as error:
        if plot is not None:
            raise
        say(f"not drawn: {error}")


@group.command("prepare")
@command
def prepare(name: Name, set: DataSettings = None, data_dir: DataDir = None, debug: Debug = False) -> None:
    """Fetch and decode a data set once, so that runs start at once and need no network."""
    from pfedgate import data as datasets

    if name in datasets.EMBEDDED:
        say(f"{name} needs no preparation: it is installed already")
        return
    options = _recipe(name, set, data_dir).data.options
    sources = {key: options[key] for key in ("source", "data_dir", "cache_dir", "repo", "revision") if key in options}
    folder = datasets.prepare(name, datasets.Options(**sources))
    say(f"{name} is ready in {folder}")


def _recipe(name: str, given: list[str] | None, data_dir: Path | None) -> Recipe:
    from pfedgate.config import recipe as config
    from pfedgate.data.adopt import of_name

    over = {"data.data_dir": str(data_dir)} if data_dir else {}
    return config.resolve(
        {"data": of_name(name, None, None) or name, "algorithm": "fedavg"},
        over,
        config.settings(given or [], section="data"),
    )
