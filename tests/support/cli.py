"""The command, called in this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from pfedgate.cli import app


def call(*words: str, code: int = 0, **given: Any) -> str:
    """All that `pfedgate ...` prints, after a check of its exit code."""
    result = CliRunner().invoke(app, list(words), **given)
    assert result.exit_code == code, result.output
    return result.output
