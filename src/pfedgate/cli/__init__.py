"""The command line: `pfedgate run`, `resume`, `compare`, `export`, `tune`, `reproduce`, `data`, `deploy`, and lists.

A module of this package adds its commands to `app`; what they share is in `base`.
"""

from __future__ import annotations

from pfedgate.cli import commands, data, deploy, export, lists, report, reproduce, tune
from pfedgate.cli.base import app

__all__ = ["app", "commands", "data", "deploy", "export", "lists", "main", "report", "reproduce", "tune"]


def main() -> None:
    """What the command `pfedgate` calls."""
    app()
