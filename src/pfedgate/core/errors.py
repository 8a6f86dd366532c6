"""Errors that several rooms raise or catch, and the message for a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RecipeError(ValueError):
    """A recipe or a setting that cannot be used; the message says where and what to write instead."""


def unknown(kind: str, name: str, existing: Iterable[str]) -> str:
    """The message for a name that does not exist: the nearest one first, then all of them.

    >>> unknown("model", "resnett", ["mlp", "resnet"])
    "unknown model 'resnett': did you mean 'resnet'? Known: mlp, resnet"
    >>> unknown("option", "x", [])
    "unknown option 'x': there are none"
    """
    names = sorted(existing)
    if not names:
        return f"unknown {kind} {name!r}: there are none"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}: {hint}Known: {', '.join(names)}"


class ClientError(RuntimeError):
    """Something failed on a client; the message names the client, the round (from 1) and the stage."""

    def __init__(self, client: str, round: int, stage: str, reason: str) -> None:
        super().__init__(f"client {client!r}, round {round}, {stage}: {reason}")
        self.client, self.round, self.stage, self.reason = client, round, stage, reason

    def __reduce__(self) -> tuple[type[ClientError], tuple[str, int, str, str]]:
        return type(self), (self.client, self.round, self.stage, self.reason)
