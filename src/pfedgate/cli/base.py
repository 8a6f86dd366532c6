"""What all commands share: the app, consoles, options, and errors that are one readable paragraph."""

from __future__ import annotations

import functools
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from pfedgate import __version__

app = typer.Typer(
    help="Personalised federated learning with sparse gates.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # our own errors are shorter, and --debug shows all of it
    rich_markup_mode="rich",
)

P = ParamSpec("P")
R = TypeVar("R")

Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Go over the recipe: train.rounds=20. Repeat it freely."),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder with local copies of data sets (or set PFEDGATE_DATA).")
]
WIDTH = 120  # of tables that go to a file or a pipe


def out() -> Console:
    """Where results go."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH)


def err() -> Console:
    """Where progress and errors go."""
    return Console(stderr=True)


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Errors of a command as one paragraph on standard error and exit code 1; with --debug as they come."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with _terminable(), _warnings():
                return function(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except Exception as error:
            if kwargs.get("debug"):
                raise
            err().print(Text.assemble(("error: ", "bold red"), told(error)), soft_wrap=True)
            raise typer.Exit(1) from None

    return guarded


# What a user can cause: the message says it all. Anything else is ours, so it says what kind it is and what to do.
EXPECTED = (ValueError, OSError, ImportError, TypeError, KeyError, RuntimeError)


def told(error: Exception) -> str:
    """An error in words.

    >>> told(KeyError("unknown algorithm 'x'"))
    "unknown algorithm 'x'"
    >>> told(KeyError("x"))
    'KeyError: x. Run it again with --debug for details.'
    """
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, EXPECTED) and " " in text:
        return text
    return f"{type(error).__name__}: {text}. Run it again with --debug for details."


@contextmanager
def _warnings() -> Iterator[None]:
    """Warnings as one line each, without the source code that raised them."""

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        err().print(Text.assemble(("warning: ", "yellow"), str(message)), soft_wrap=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def _terminable() -> Iterator[None]:
    """End as with Ctrl-C when asked to by a scheduler or `kill`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _version(wanted: bool) -> None:
    if wanted:
        out().print(f"pfedgate {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Personalised federated learning with sparse gates.

    [bold]pfedgate run[/bold] trains pFedGate on digits; every command explains itself with --help.
    """
