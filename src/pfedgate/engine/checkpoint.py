"""A run's folder: metrics, checkpoints and private states, consistent after a kill at any moment.

metrics.jsonl            one line per round; the same bytes whether or not the run was interrupted
participation.jsonl      one line per round and sampled client: bytes, FLOPs, loss, …; likewise
timing.jsonl             seconds of every round, which are never the same twice
checkpoint.safetensors   the server's State and, as text, everything else; replaced atomically
best.safetensors         the server's State that was best on validation; private/best beside it
private/                 see `store`
clients.csv, summary.json   written at the end
.lock                    held by the process that trains here
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import load

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.types import State
from pfedgate.engine.endpoint import Scored
from pfedgate.engine.metrics import Record, clean
from pfedgate.engine.roster import Options
from pfedgate.engine.store import DiskStore, pack_file, write_atomically

FORMAT = 1
LINES = ("metrics.jsonl", "participation.jsonl", "timing.jsonl")
SUMS = {"training_rounds", "training_bytes_up", "training_bytes_down", "training_flops"}  # in clients.csv, not means


@dataclass(frozen=True)
class Checkpoint:
    """All a run needs to go on, private states excepted: those are in the store, up to `commit`."""

    server: State
    history: list[Record]
    commit: str


def fingerprint(algorithm: Algorithm, options: Options) -> dict[str, str]:
    """What must not change when a run is resumed, as text."""
    task = algorithm.task
    texts = {"algorithm": repr(algorithm.name or type(algorithm).__qualname__)}
    groups: list[tuple[str, Any, Iterable[str]]] = [
        ("algorithm.", algorithm, algorithm.options()),
        ("task.", task, ("optim", "schedule", "batch", "epochs", "steps", "drop_last", "kind")),
        ("task.", task, ("initial_scale", "correction", "shift", "shift_lr")),
        ("", options, ("sample", "seed", "evaluate_every", "agg_norm", "budget", "stack")),
    ]
    if task.schedule.name in ("multi_step", "cosine"):
        groups.append(("", options, ["rounds"]))  # the schedule depends on it; a constant one may be continued
    for prefix, owner, names in groups:
        for name in names:
            text = repr(getattr(owner, name))
            digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            texts[prefix + name] = text if len(text) < 200 else digest
    return texts


class FolderBusy(RuntimeError):
    """Another process trains in this folder."""


@contextmanager
def alone(path: str | Path) -> Iterator[None]:
    """Train in a folder as the only process: two would both add their rounds. A lock ends with its process."""
    Path(path).mkdir(parents=True, exist_ok=True)
    lock = FileLock(Path(path) / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise FolderBusy(
            f"another process is training in {path}: `pfedgate watch {path}` shows how far it is"
        ) from None
    try:
        yield
    finally:
        lock.release()


class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self.private = self.path / "private"
        self._checkpoint = self.path / "checkpoint.safetensors"
        if self._checkpoint.exists() and not resume:
            raise FileExistsError(
                f"{self.path} already holds a run: `pfedgate resume {self.path}` goes on; or choose another folder"
            )
        self.path.mkdir(parents=True, exist_ok=True)

    def load(self, about: dict[str, str] | None = None) -> Checkpoint | None:
        """The last checkpoint, or None. Lines written after it are cut off, as they will be written again.

        `about` is the fingerprint of the run that wants to go on: it must be that of the run that was begun.
        """
        if not self._checkpoint.exists():
            for name in LINES:
                (self.path / name).unlink(missing_ok=True)
            return None
        with safe_open(self._checkpoint, "pt") as file:
            header = json.loads(file.metadata()["pfedgate"])
        if header["format"] != FORMAT:
            raise ValueError(f"{self._checkpoint} has format {header['format']}, this version reads {FORMAT}")
        # Optim had an option more once; a run that did not use it goes on.
        before = {name: text.replace(", persist_momentum=False", "") for name, text in header["about"].items()}
        after = {name: text for name, text in (about or {}).items() if before.get(name, text) != text}
        if after:
            said = "; ".join(f"{name} was {before[name]}, is {after[name]}" for name in sorted(after))
            raise ValueError(f"{self.path} cannot be resumed with other settings: {said}")
        for name, length in header["lengths"].items():
            os.truncate(self.path / name, length)
        history = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        if [record["round"] for record in history] != list(range(1, len(history) + 1)):
            raise ValueError(f"{self.path}/metrics.jsonl does not have every round once: begin anew in another folder")
        return Checkpoint(load(self._checkpoint.read_bytes()), history, header["commit"])

    def note(self, record: Record, replies: Sequence[Record], timing: Record) -> None:
        """Append a round to the files of `LINES`."""
        lines = ([record], replies, [{"round": record["round"], **timing}])
        for name, records in zip(LINES, lines, strict=True):
            with (self.path / name).open("a") as file:
                file.write("".join(json.dumps(clean(line)) + "\n" for line in records))

    def save(self, checkpoint: Checkpoint, about: dict[str, str]) -> None:
        """Put a checkpoint in place of the last one, in one step."""
        lengths = {name: (self.path / name).stat().st_size for name in LINES}
        header = {"format": FORMAT, "commit": checkpoint.commit, "lengths": lengths, "about": about}
        write_atomically(self._checkpoint, pack_file(checkpoint.server, {"pfedgate": json.dumps(header)}), sync=True)

    def keep_best(self, server: State, store: DiskStore, round: int) -> None:
        """Keep the State that is best on validation so far, with the private states that belong to it."""
        store.snapshot(self.private / "best")
        write_atomically(self.path / "best.safetensors", pack_file(server, {"round": str(round)}))

    def best_round(self) -> int | None:
        """The round of the State kept as the best on validation."""
        path = self.path / "best.safetensors"
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            return int(file.metadata()["round"])

    def finish(self, summary: Record, scores: Sequence[Scored], metrics: Sequence[str] = ("accuracy",)) -> None:
        """The last files: every client's scores and costs, and the summary."""
        # Of every client that took part: rounds, bytes and FLOPs in all, means of its other numbers.
        costs: dict[str, Record] = {}
        with (self.path / "participation.jsonl").open() as lines:
            for line in map(json.loads, lines):
                cost = costs.setdefault(line.pop("client"), {"training_rounds": 0})
                cost["training_rounds"] += 1
                del line["round"]
                for name, value in line.items():
                    if value is not None:
                        cost[f"training_{name}"] = cost.get(f"training_{name}", 0.0) + value
        for cost in costs.values():
            for name in cost.keys() - SUMS:
                cost[name] /= cost["training_rounds"]
        stats = sorted(set().union(*(score.stats for score in scores)))
        path = self.path / "clients.csv"
        with path.with_suffix(".new").open("w", newline="") as file:
            main, *others = metrics
            head = ["client", "point", "n_test", main, "loss", "n_val", f"val_{main}", "val_loss", *others]
            table = csv.DictWriter(file, [*head, *stats, *sorted(set().union(*costs.values()))], restval="")
            table.writeheader()
            for s in scores:
                numbers = (s.test.n, s.test.score, s.test.loss, s.val.n, s.val.score, s.val.loss, *s.test.more)
                row = dict(zip(head, (s.client, s.point, *numbers), strict=True))
                table.writerow({**row, **s.stats, **costs.get(s.client, {})})
        os.replace(path.with_suffix(".new"), path)
        summary["seconds"] = sum(json.loads(t)["seconds"] for t in (self.path / LINES[2]).read_text().splitlines())
        write_atomically(self.path / "summary.json", json.dumps(clean(summary), indent=2).encode())
