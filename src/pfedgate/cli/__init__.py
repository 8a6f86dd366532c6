"""The command line: `pfedgate run`, `resume`, `compare`, `tune`, `reproduce`, `data`, `deploy`, `algorithms`, `models`.

A module of this package adds its commands to `app`; what they share is in `base`.
"""

from __future__ import annotations

from pfedgate.cli import commands, data, deploy, lists, report, reproduce, tune
from pfedgate.cli.base import app

__all__ = ["app", "commands", "data", "deploy", "lists", "main", "report", "reproduce", "tune"]


def main() -> None:
    """What the command `pfedgate` calls."""
    app()
