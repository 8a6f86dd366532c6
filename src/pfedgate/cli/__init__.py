"""The command line: `pfedgate run`, `resume`, `compare`, `export`, `tune`, `reproduce`, `data`, `deploy`, and lists.

base         the app and what all commands share: options, consoles, errors
commands     run, resume, compare
results      report, watch, export
lists        algorithms, models, data
deploy, tune, reproduce
"""

from __future__ import annotations

from pfedgate.cli import commands, deploy, lists, reproduce, results, tune  # each adds its commands to the app
from pfedgate.cli.base import app

__all__ = ["app", "commands", "deploy", "lists", "main", "reproduce", "results", "tune"]


def main() -> None:
    """Run `pfedgate` with the arguments of the process."""
    app()
