"""Shared by all commands: the app, consoles, options, errors of one paragraph, and settings as layers of a recipe.

No module of this package imports torch at its top: commands import the rooms they need, so that --help is quick.
"""

from __future__ import annotations

import functools
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from pfedgate import __version__

if TYPE_CHECKING:
    from pfedgate.config.recipe import Recipe

app = typer.Typer(
    help="Personalised federated learning with sparse gates.",
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,  # click does it already
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
WIDTH = 120  # columns of tables that go to a file or a pipe


def out() -> Console:
    """The console that results go to."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH)


def err() -> Console:
    """The console for progress and errors."""
    return Console(stderr=True)


def say(line: str | Text, console: Console | None = None) -> None:
    """Print a line as it is, however long: no markup, no colours of its own."""
    (console or out()).print(line, highlight=False, markup=False, soft_wrap=True)


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
            say(Text.assemble(("error: ", "bold red"), in_words(error)), err())
            raise typer.Exit(1) from None

    return guarded


# Errors that a user can cause: the message is enough. Any other error is a fault of ours and is shown with its kind.
EXPECTED = (ValueError, OSError, ImportError, TypeError, KeyError, RuntimeError)


def in_words(error: Exception) -> str:
    """An error in words.

    >>> in_words(KeyError("unknown algorithm 'x'"))
    "unknown algorithm 'x'"
    >>> in_words(KeyError("x"))
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
        say(Text.assemble(("warning: ", "yellow"), str(message)), err())

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, from a scheduler or `kill`, and SIGHUP, of a terminal that closes, end a command as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    ends = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in ends}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # as `nohup` wants it
                signal.signal(number, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


Rounds = Annotated[int | None, typer.Option("--rounds", help="train.rounds.")]
Data = Annotated[
    str | None,
    typer.Option("--data", help="data.name; or a folder of images, a CSV or Parquet file, FILE.py:FUNCTION."),
]
Model = Annotated[str | None, typer.Option("--model", help="model.name, or FILE.py:FUNCTION.")]
BudgetOption = Annotated[
    str | None, typer.Option("--budget", help="clients.budget: a share of the dense model, or a CSV of devices.")
]
Seeds = Annotated[
    int, typer.Option("--seeds", min=1, help="Runs, each with another partition and start: 5 tell chance.")
]


def over(given: Sequence[str] | None, data_dir: Path | None) -> list[Mapping[str, Any]]:
    """The layers of --data-dir and --set."""
    from pfedgate.config import recipe as config

    layers = [config.settings(given or [])]
    return [{"data": {"data_dir": str(data_dir)}}, *layers] if data_dir else layers


def short(rounds: int | None, data: str | None, model: str | None, budget: str | None) -> Mapping[str, Any]:
    """The layer of the options that everybody sets; --set goes over it."""
    from pfedgate.config import toml
    from pfedgate.data.adopt import of_name

    layer: dict[str, Any] = {}
    if rounds is not None:
        layer["train"] = {"rounds": rounds}
    if data is not None:
        layer["data"] = of_name(data, None, None) or {"name": data}
    if model is not None:
        layer["model"] = {"name": model}
    if budget is not None:
        layer["clients"] = {"budget": toml.value(budget)}
    return layer


def split(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Methods and the recipe among the arguments of a command; a recipe is what looks like a file.

    >>> split(["fedavg", "mine.toml"]), split(["pfedgate:clients.budget=0.3"])
    ((['fedavg'], 'mine.toml'), (['pfedgate:clients.budget=0.3'], None))
    """
    from pfedgate.core.errors import RecipeError

    recipes = [word for word in words if word.endswith(".toml") or Path(word).exists()]
    if len(recipes) > 1:
        raise RecipeError(f"there is one recipe to run, got {' and '.join(recipes)}")
    return [word for word in words if word not in recipes], recipes[0] if recipes else None


def of_method(recipe: str | Path | None, over: Sequence[Mapping[str, Any]], method: str) -> Recipe:
    """The recipe for one method of a comparison; `name:key=value,section.key=value` goes over it alone."""
    from pfedgate.config import recipe as config
    from pfedgate.config import toml

    name, _, own = _split(method)[1].partition(":")
    settings = [text for text in toml.split(own) if text]
    return config.resolve(recipe, {"algorithm": name}, *over, config.settings(settings, section="algorithm"))


def tuned_note(recipe: str | Path | None, methods: Sequence[str]) -> str:
    """Which of some methods take settings from the file of tuned settings beside a recipe; empty if none does."""
    from pfedgate.config import recipe as config
    from pfedgate.config import toml

    path = None if recipe is None else config.tuned_path(recipe)
    if path is None or not path.exists():
        return ""
    sections = toml.read(path).get("tuned", {}).keys() - toml.read(str(recipe)).get("tuned", {}).keys()
    names = [name for name in dict.fromkeys(_split(one)[1].partition(":")[0] for one in methods) if name in sections]
    return f"tuned settings of {', '.join(names)}: {path}" if names else ""


def _split(method: str) -> tuple[str, str]:
    """The name that a method was given, or none, and the method: `narrow=fedavg:model.width=0.3`."""
    name, _, rest = method.partition("=")
    return (name, rest) if rest and ":" not in name else ("", method)


def label(method: str) -> str:
    """A method as the name of a folder: what it was called, or its settings.

    >>> label("pfedgate:clients.budget=0.3"), label("narrow=fedavg:model.width=0.3")
    ('pfedgate-budget=0.3', 'narrow')
    """
    from pfedgate.config import toml

    given, method = _split(method)
    name, _, own = (given or method).partition(":")
    settings = [text.rpartition("=") for text in toml.split(own) if text]
    parts = [name, *(f"{key.rpartition('.')[2]}={value}" for key, _, value in settings)]
    return "-".join("".join(c if c.isalnum() or c in "._=-" else "_" for c in part) for part in parts)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"pfedgate {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    no_code: Annotated[
        bool, typer.Option("--no-code", help="Refuse recipes and runs that name code (or set PFEDGATE_NO_CODE=1).")
    ] = False,
) -> None:
    """Personalised federated learning with sparse gates.

    [bold]pfedgate run[/bold] trains pFedGate on digits; every command explains itself with --help.
    """
    if no_code:
        os.environ["PFEDGATE_NO_CODE"] = "1"  # worker processes see it, too
