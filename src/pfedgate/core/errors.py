"""Errors that several rooms raise or catch, and the message for a name that does not exist."""

from __future__ import annotations

import difflib
import inspect
import sysconfig
import warnings
from collections.abc import Iterable
from pathlib import Path

# Where code lies that is nobody's script: this library, packages and Python itself.
NOT_THE_USERS = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("purelib", "stdlib")),
    "<frozen",
)


class RecipeError(ValueError):
    """A recipe or a setting that cannot be used; the message says where and what to write instead."""


def unknown(kind: str, name: str, existing: Iterable[str]) -> str:
    """The message for a name that does not exist: the nearest one first, then all of them.

    >>> unknown("model", "resnett", ["mlp", "resnet"])
    "unknown model 'resnett': did you mean 'resnet'? Known: mlp, resnet"
    >>> unknown("client", "3", ["13", "03"])
    "unknown client '3': did you mean '03'? Known: 03, 13"
    >>> unknown("option", "x", [])
    "unknown option 'x': there are none"
    """
    names = sorted(existing)
    if not names:
        return f"unknown {kind} {name!r}: there are none"
    padded = [other for other in names if name.isdecimal() and other.lstrip("0") == name.lstrip("0")]  # 3 for '03'
    near = padded or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}: {hint}Known: {', '.join(names)}"


def warn(message: str) -> None:
    """Warn at the line of the user's code that led here, not at one of this library's or of a package between them."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and (frame.f_code.co_filename.startswith(NOT_THE_USERS)):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=2 if frame is None else level)


class ClientError(RuntimeError):
    """Something failed on a client; the message names the client, the round (from 1) and the stage."""

    def __init__(self, client: str, round: int, stage: str, reason: str) -> None:
        super().__init__(f"client {client!r}, round {round}, {stage}: {reason}")
        self.client, self.round, self.stage, self.reason = client, round, stage, reason

    def __reduce__(self) -> tuple[type[ClientError], tuple[str, int, str, str]]:
        return type(self), (self.client, self.round, self.stage, self.reason)
