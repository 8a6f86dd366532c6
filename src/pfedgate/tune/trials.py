"""Trials, and the file that keeps them: trials.jsonl, a line each."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pfedgate.engine.store import write_atomically
from pfedgate.tune.space import Point

COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"


@dataclass(frozen=True)
class Trial:
    """One point tried. `value`: the best accuracy on validation data over the rounds that were scored."""

    trial: int
    params: dict[str, Any]
    state: str
    value: float | None = None
    best_round: int | None = None
    seconds: float = 0.0
    curve: tuple[tuple[int, float], ...] = ()  # (round, validation accuracy)
    error: str = ""
    point: Point = field(default_factory=dict)  # params as places in the space


def append(log: Path, trial: Trial) -> None:
    """Keep a trial."""
    with log.open("a", encoding="utf-8") as file:
        file.write(_line(trial))


def read(log: Path) -> list[Trial]:
    """The trials of a file; a line cut short by a kill is dropped, so that its trial is done again."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8").split("\n")
    trials = [_read(line) for line in lines[:-1]]
    if lines[-1]:
        write_atomically(log, "".join(map(_line, trials)).encode())
    return trials


def _line(trial: Trial) -> str:
    return json.dumps(trial.__dict__) + "\n"


def _read(line: str) -> Trial:
    told = json.loads(line)
    return Trial(**{**told, "curve": tuple((r, v) for r, v in told["curve"])})
