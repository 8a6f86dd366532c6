"""A run's folder: metrics, checkpoints and private states, consistent after a kill at any moment.

metrics.jsonl            one line per round; the same bytes whether or not the run was interrupted
timing.jsonl             seconds of every round, which are never the same twice
checkpoint.safetensors   the server's State and, as text, everything else; replaced atomically
best.safetensors         the server's State that was best on validation; private/best beside it
private/                 see `store`
clients.csv, summary.json  written at the end
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file

from pfedgate.metrics import Record
from pfedgate.serve import Scored
from pfedgate.store import DiskStore, pack_file, write_atomically
from pfedgate.types import State

FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """All a run needs to go on, private states excepted: those are in the store, up to `commit`."""

    server: State
    history: list[Record]
    commit: int


class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self.private = self.path / "private"
        self._checkpoint = self.path / "checkpoint.safetensors"
        if self._checkpoint.exists() and not resume:
            raise FileExistsError(
                f"{self.path} already holds a run: `pfedgate resume {self.path}` goes on with it; "
                "or choose another folder"
            )
        self.path.mkdir(parents=True, exist_ok=True)

    def load(self) -> Checkpoint | None:
        """The last checkpoint, or None. Lines written after it are cut off, as they will be written again."""
        if not self._checkpoint.exists():
            for name in ("metrics.jsonl", "timing.jsonl"):
                (self.path / name).unlink(missing_ok=True)
            return None
        with safe_open(self._checkpoint, "pt") as file:
            about = json.loads(file.metadata()["pfedgate"])
        if about["format"] != FORMAT:
            raise ValueError(f"{self._checkpoint} has format {about['format']}, this version reads {FORMAT}")
        for name, length in about["lengths"].items():
            path = self.path / name
            if path.exists():
                os.truncate(path, length)
        history = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        return Checkpoint(load_file(self._checkpoint), history, about["commit"])

    def note(self, record: Record, timing: Record) -> None:
        """Add a round's lines."""
        for name, line in (("metrics.jsonl", record), ("timing.jsonl", {"round": record["round"], **timing})):
            with (self.path / name).open("a") as file:
                file.write(json.dumps(line) + "\n")

    def save(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint in place of the last one, in one step."""
        lengths = {n: (self.path / n).stat().st_size for n in ("metrics.jsonl", "timing.jsonl")}
        about = {"format": FORMAT, "commit": checkpoint.commit, "lengths": lengths}
        content = pack_file(checkpoint.server, {"pfedgate": json.dumps(about)})
        write_atomically(self._checkpoint, content, sync=True)

    def keep_best(self, server: State, store: DiskStore, round: int) -> None:
        """Keep the State that is best on validation so far, with the private states that belong to it."""
        store.snapshot(self.private / "best")
        write_atomically(self.path / "best.safetensors", pack_file(server, {"round": str(round)}))

    def best(self) -> tuple[State, int] | None:
        """The server's State that was best on validation, and its round."""
        path = self.path / "best.safetensors"
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            round = int(file.metadata()["round"])
        return load_file(path), round

    def finish(self, summary: Record, scores: Sequence[Scored]) -> None:
        """The last files: per client scores, and the summary."""
        stats = sorted({name for score in scores for name in score.stats})
        with (self.path / "clients.csv.new").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["client", "point", "n_test", "accuracy", "loss", "n_val", "val_accuracy", *stats])
            for s in scores:
                values = [s.client, s.point, s.test.n, s.test.accuracy, s.test.loss, s.val.n, s.val.accuracy]
                table.writerow([*values, *(s.stats.get(name, "") for name in stats)])
        os.replace(self.path / "clients.csv.new", self.path / "clients.csv")
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2).encode())
