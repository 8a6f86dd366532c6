"""The command line: `pfedgate run`, `resume`, `compare`, `data`, `algorithms`, `models`.

A module of this package adds its commands to `app`; what they share is in `base`.
"""

from __future__ import annotations

from pfedgate.cli import commands, data, lists
from pfedgate.cli.base import app

__all__ = ["app", "commands", "data", "lists", "main"]


def main() -> None:
    """What the command `pfedgate` calls."""
    app()
