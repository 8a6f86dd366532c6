"""Errors a user can mend: a wrong recipe, and names that do not exist, with the nearest one that does."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RecipeError(ValueError):
    """A recipe or a setting that cannot be used; the message says where and what to write instead."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that does not exist: the nearest one first, then all of them.

    >>> unknown("model", "resnett", ["mlp", "resnet"])
    "unknown model 'resnett': did you mean 'resnet'? Known: mlp, resnet"
    >>> unknown("option", "x", [])
    "unknown option 'x': there are none"
    """
    names = sorted(known)
    if not names:
        return f"unknown {kind} {name!r}: there are none"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}: {hint}Known: {', '.join(names)}"
