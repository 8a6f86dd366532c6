"""`algorithms` and `models`: what there is, and what can be set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from pfedgate import algorithms as registry
from pfedgate import models as networks
from pfedgate.cli.base import Debug, app, command, out
from pfedgate.config import methods, toml
from pfedgate.config.options import options_of


@app.command()
@command
def algorithms(
    name: Annotated[str | None, typer.Argument(help="Show all there is to know about this one.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure traffic and compute of a round; takes seconds.")] = True,
    debug: Debug = False,
) -> None:
    """List the algorithms, or one with its hyper-parameters; costs of a round are measured, relative to FedAvg."""
    known = [registry.get(name).name] if name is not None else registry.names()
    with out().status("measuring a round of each …"):
        found = methods.methods(known, measure=measure)
    if name is not None:
        _one(found[0])
        return
    view = Table(title="algorithms", title_justify="left")
    for title in methods.COLUMNS:
        view.add_column(title, no_wrap=title in ("name", "down", "up", "compute"))
    for row in methods.rows(found):
        view.add_row(*row)
    out().print(view)
    out().print(f"down, up, compute: of a round, FedAvg = 1, clients at a budget of {methods.BUDGET}", highlight=False)
    out().print("pfedgate algorithms NAME explains one and its hyper-parameters", highlight=False)


def _one(method: methods.Method) -> None:
    down, up, compute = methods.cells(method.cost)
    out().print(f"{method.name}: {method.paper}", highlight=False, markup=False)
    out().print(f"{method.about}\n", highlight=False, markup=False)
    out().print(f"shared    {method.shares}", highlight=False, markup=False)
    out().print(f"private   {method.keeps}", highlight=False, markup=False)
    out().print(f"a round   down {down}, up {up}, compute {compute} (FedAvg = 1)", highlight=False, markup=False)
    _options("hyper-parameters", "algorithm", method.name, method.grid)


@app.command()
@command
def models(
    name: Annotated[str | None, typer.Argument(help="Show the options of this one.")] = None,
    debug: Debug = False,
) -> None:
    """List the models, or the options of one."""
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
    out().print("input and classes adapt to the data; shown are the defaults", highlight=False)


def _options(title: str, section: str, name: str, grid: Mapping[str, Sequence[Any]] | None = None) -> None:
    view = Table(title=title, title_justify="left")
    for column in ("option", "default", "why", *(("the paper's values",) if grid is not None else ())):
        view.add_column(column, no_wrap=column == "option")
    for option in options_of(section, name).values():
        tried = [] if grid is None else [", ".join(toml.dump(value) for value in grid.get(option.name, ()))]
        view.add_row(f"{section}.{option.name}", toml.dump(option.default), option.why, *tried)
    out().print(view)
