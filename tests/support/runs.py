"""Folders of small runs on digits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "data": {"name": "digits", "clients": 8, "samples": 500},
    "train": {"rounds": 4},
    "evaluate": {"every": 2},
    "run": {"workers": 1},
}
# Of parameters alone and with a fast gate, every client soon has a mask of its own.
GATED = {"name": "pfedgate", "resources": "params", "gate_lr": 30.0}


def cut(run: Path, to: Path, rounds: int) -> Path:
    """A copy of a run as it was after so many rounds."""
    shutil.copytree(run, to)
    for name in ("summary.json", "clients.csv"):
        (to / name).unlink()
    lines = (to / "metrics.jsonl").read_text().splitlines()[:rounds]
    (to / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return to
