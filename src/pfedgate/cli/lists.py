"""`algorithms` and `models`: what there is, and what can be set."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from pfedgate import algorithms as registry
from pfedgate import models as networks
from pfedgate import toml
from pfedgate.catalogue import options_of
from pfedgate.cli.base import Debug, app, command, out


@app.command()
@command
def algorithms(
    name: Annotated[str | None, typer.Argument(help="Show the hyper-parameters of this one.")] = None,
    debug: Debug = False,
) -> None:
    """List the algorithms, or the hyper-parameters of one."""
    if name is not None:
        kind = registry.get(name)
        _options(f"{name}: {kind.paper}", "algorithm", name)
        return
    view = Table(title="algorithms", title_justify="left")
    for title in ("name", "shares", "keeps private", "hyper-parameters", "paper"):
        view.add_column(title, no_wrap=title == "name")
    for found in registry.names():
        kind = registry.get(found)
        view.add_row(found, kind.shares, kind.keeps, ", ".join(registry.options(found)) or "-", kind.paper)
    out().print(view)
    out().print("pfedgate algorithms NAME explains the hyper-parameters of one", highlight=False)


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


def _options(title: str, section: str, name: str) -> None:
    view = Table(title=title, title_justify="left")
    for column in ("option", "default", "why"):
        view.add_column(column, no_wrap=column == "option")
    for option in options_of(section, name).values():
        view.add_row(f"{section}.{option.name}", toml.dump(option.default), option.why)
    out().print(view)
