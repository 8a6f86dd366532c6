"""A run's folder: metrics, checkpoints and private states, consistent after a kill at any moment.

metrics.jsonl            one line per round; the same bytes whether or not the run was interrupted
participation.jsonl      one line per round and sampled client: bytes, FLOPs, loss, …; likewise
timing.jsonl             seconds of every round, which are never the same twice
checkpoint.safetensors   the server's State and, as text, everything else; replaced atomically
previous.safetensors     the checkpoint before it, used if that one is damaged
best.safetensors         the server's State that was best on validation; private/best beside it
private/                 see `store`
clients.csv, summary.json   written at the end
noise.key                   with [privacy], until the end
.lock                    held by the process that trains here

A checkpoint is written when all that it refers to has reached the disk, and it holds digests of that. A folder may
come from anywhere: names, lengths and tags in it are believed only if they can be what this module writes.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import warn
from pfedgate.core.state import digest, inside, under
from pfedgate.core.types import State
from pfedgate.engine import files
from pfedgate.engine.endpoint import Scored
from pfedgate.engine.files import DamagedError, write_atomically
from pfedgate.engine.metrics import Record, clean
from pfedgate.engine.roster import Options
from pfedgate.engine.store import COMMIT, KEY, DiskStore, pack_file

FORMAT = 1
FLIGHTS = "flights:"  # tensors in a checkpoint that are no part of the server's State
LINES = ("metrics.jsonl", "participation.jsonl", "timing.jsonl")
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "'")
SUMS = {"training_rounds", "training_bytes_up", "training_bytes_down", "training_flops"}  # in clients.csv, not means


@dataclass(frozen=True)
class Checkpoint:
    """All a run needs to go on, private states excepted: those are in the store, up to `commit`."""

    server: State
    history: list[Record]
    commit: str
    private: str = ""  # the store's digest of all states; empty in folders of earlier versions
    undo: bool = False  # the checkpoint after this one is damaged, and its commit is taken back
    flights: State = field(default_factory=dict)  # what a policy has in flight, and moments of the server's optimiser
    flying: list[Record] = field(default_factory=list)


def fingerprint(algorithm: Algorithm, options: Options) -> dict[str, str]:
    """What must not change when a run is resumed, as text."""
    task = algorithm.task
    texts = {"algorithm": repr(algorithm.name or type(algorithm).__qualname__)}
    groups: list[tuple[str, Any, Iterable[str]]] = [
        ("algorithm.", algorithm, algorithm.options()),
        ("task.", task, ("optim", "schedule", "batch", "epochs", "steps", "drop_last", "kind")),
        ("task.", task, ("initial_scale", "correction", "shift", "shift_lr")),
        (
            "",
            options,
            ("sample", "seed", "evaluate_every", "agg_norm", "budget", "stack", "fleet", "server", "privacy"),
        ),
    ]
    if task.schedule.name in ("multi_step", "cosine"):
        groups.append(("", options, ["rounds"]))  # the schedule depends on it; a constant one may be continued
    for prefix, owner, names in groups:
        for name in names:
            text = repr(getattr(owner, name)).replace(", chooser=False", "")  # runs begun before there was one go on
            digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            texts[prefix + name] = text if len(text) < 200 else digest
    return texts


class FolderBusy(RuntimeError):
    """Another process trains in this folder."""


@contextmanager
def alone(path: str | Path) -> Iterator[None]:
    """Train in a folder as the only process: two would both add their rounds. A lock ends with its process."""
    files.make_folder(Path(path), durable=True)
    lock = FileLock(Path(path) / ".lock")
    if Path(lock.lock_file).is_symlink():
        raise DamagedError(f"{lock.lock_file} is a link: a run's folder holds none")
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


def header(path: Path) -> dict[str, Any]:
    """What a checkpoint says beside its tensors, checked."""
    with files.naming(path):
        about: dict[str, Any] = json.loads(files.metadata(path)["pfedgate"])
        if about["format"] != FORMAT:
            raise DamagedError(f"{path} has format {about['format']}, this version reads {FORMAT}")
        if set(about["lengths"]) != set(LINES) or not all(type(n) is int and n >= 0 for n in about["lengths"].values()):
            raise ValueError(f"lengths of {', '.join(map(str, about['lengths']))}")
        if not COMMIT.fullmatch(about["commit"]):
            raise ValueError(f"{about['commit']!r} is no commit")
        for name in ("about", "digests"):
            if not all(isinstance(text, str) for text in about.setdefault(name, {}).values()):
                raise ValueError(f"{name} is no table of texts")
    return about


def plain(text: str) -> str:
    """A text that a spreadsheet does not compute, although it begins like a formula; `unmarked` takes the mark off.

    >>> plain("=1+1"), plain("anna"), unmarked(plain("=1+1"))
    ("'=1+1", 'anna', '=1+1')
    """
    return f"'{text}" if text.startswith(FORMULAS) else text


def unmarked(cell: str) -> str:
    """The text behind `plain`."""
    return cell[1:] if cell[:1] == "'" and cell[1:].startswith(FORMULAS) else cell


class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self.private = self.path / "private"
        self._checkpoint, self._previous = self.path / "checkpoint.safetensors", self.path / "previous.safetensors"
        self._sums = {name: hashlib.blake2b(digest_size=16) for name in LINES}  # of the lines written so far
        if self._checkpoint.exists() and not resume:
            raise FileExistsError(
                f"{self.path} already holds a run: `pfedgate resume {self.path}` goes on; or choose another folder"
            )
        self.path.mkdir(parents=True, exist_ok=True)

    def load(self, about: dict[str, str] | None = None, every: int = 1) -> Checkpoint | None:
        """The last checkpoint, or None. Lines written after it are cut off, as they will be written again.

        about  the fingerprint of the run that wants to go on: it must be that of the run that was begun
        every  rounds between two checkpoints
        """
        files.settle(self.path, "private")
        if not self._checkpoint.exists():
            self._check_new(every)
            for name in LINES:
                (self.path / name).unlink(missing_ok=True)
            return None
        try:
            return self._open(self._checkpoint, about)
        except (DamagedError, FileNotFoundError) as error:
            try:
                earlier = self._open(self._previous, about)
            except (DamagedError, FileNotFoundError) as other:
                raise DamagedError(
                    f"{error}; and there is no earlier checkpoint to use ({other}). Restore the folder from a copy, or "
                    "begin anew in another one"
                ) from error
            done = len(earlier.history)
            warn(f"{error}: going on from the checkpoint before it, after round {done}")
            os.replace(self._previous, self._checkpoint)
            return dataclasses.replace(earlier, undo=True)

    def _check_new(self, every: int) -> None:
        """Refuse to wipe a run that has lost its checkpoint."""
        metrics = self.path / "metrics.jsonl"
        rounds = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        left = [self._previous, self.path / "best.safetensors", self.path / "summary.json"]
        if rounds > every or any(path.exists() for path in left) or any(self.private.glob("current/*/*.safetensors")):
            raise DamagedError(
                f"{self._checkpoint} is missing, but {self.path} holds a run of {rounds} rounds: restore the file from "
                "a copy, or begin anew in another folder"
            )

    def _open(self, path: Path, about: dict[str, str] | None) -> Checkpoint:
        head = header(path)
        # Optim had an option more once; a run that did not use it goes on.
        before = {name: text.replace(", persist_momentum=False", "") for name, text in head["about"].items()}
        after = {name: text for name, text in (about or {}).items() if before.get(name, text) != text}
        if after:
            said = "; ".join(f"{name} was {before[name]}, is {after[name]}" for name in sorted(after))
            raise ValueError(f"{self.path} cannot be resumed with other settings: {said}")
        whole, _ = files.tensors(path)
        digests = head["digests"]
        if digests.get("server", "") not in ("", digest(whole)):
            raise DamagedError(f"{path} is damaged: its tensors are not those that were written")
        for name, length in head["lengths"].items():
            self._sums[name] = self._sum(name, length)
            if digests.get(name, "") not in ("", self._sums[name].hexdigest()):
                raise DamagedError(f"{self.path / name} is damaged: its lines are not those that {path} refers to")
        for name, length in head["lengths"].items():
            with files.existing(self.path / name, os.O_RDWR) as file:
                file.truncate(length)
        with files.naming(self.path / "metrics.jsonl"):
            history = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
            if [record["round"] for record in history] != list(range(1, len(history) + 1)):
                raise DamagedError(
                    f"{self.path}/metrics.jsonl does not have every round once: begin anew in another folder"
                )
        flights = inside(FLIGHTS, whole)
        server = {name: value for name, value in whole.items() if not name.startswith(FLIGHTS)}
        commit, flying = head["commit"], head.get("flying", [])
        return Checkpoint(server, history, commit, digests.get("private", ""), flights=flights, flying=flying)

    def _sum(self, name: str, length: int) -> Any:
        """The running digest of the first bytes of a file, all of which must be there."""
        running, left = hashlib.blake2b(digest_size=16), length
        with files.existing(self.path / name, os.O_RDONLY) as file:
            while left and (piece := file.read(min(left, 1 << 20))):
                running.update(piece)
                left -= len(piece)
        if left:
            raise DamagedError(f"{self.path / name} has {length - left} bytes, {length} are expected")
        return running

    def key(self, fresh: bytes) -> bytes:
        """The secret key of the run's noise: a resumed run draws the same, so that a round is told only once.

        It is a file that only its owner reads, and goes when the run ends: nobody then can take the noise off.
        """
        return files.secret(self.path / KEY, fresh)

    def note(self, record: Record, replies: Sequence[Record], timing: Record) -> None:
        """Append a round to the files of `LINES`."""
        lines = ([record], replies, [{"round": record["round"], **timing}])
        for name, records in zip(LINES, lines, strict=True):
            text = "".join(json.dumps(clean(line)) + "\n" for line in records)
            files.append(self.path / name, text)
            self._sums[name].update(text.encode())

    def save(self, checkpoint: Checkpoint, about: dict[str, str]) -> None:
        """Put a checkpoint in place of the last one, in one step; all that it refers to reaches the disk before it."""
        files.sync([*(self.path / name for name in LINES), self.path])
        lengths = {name: (self.path / name).stat().st_size for name in LINES}
        digests = {name: running.hexdigest() for name, running in self._sums.items()}
        whole = {**checkpoint.server, **under(FLIGHTS, checkpoint.flights)}
        digests |= {"server": digest(whole), "private": checkpoint.private}
        head = {"format": FORMAT, "commit": checkpoint.commit, "lengths": lengths, "about": about, "digests": digests}
        if checkpoint.flying:
            head["flying"] = checkpoint.flying
        if self._checkpoint.exists():
            fresh = self.path / f".previous.{os.urandom(8).hex()}.new"
            os.link(self._checkpoint, fresh)
            os.replace(fresh, self._previous)
        write_atomically(self._checkpoint, pack_file(whole, {"pfedgate": json.dumps(head)}), sync=True)

    def keep_best(self, server: State, store: DiskStore, round: int) -> None:
        """Keep the State that is best on validation so far, with the private states that belong to it."""
        store.snapshot(self.private / "best")
        content = pack_file(server, {"round": str(round), "digest": digest(server), "private": store.total})
        write_atomically(self.path / "best.safetensors", content, sync=True)

    def best_round(self) -> int | None:
        """The round of the State kept as the best on validation."""
        path = self.path / "best.safetensors"
        return int(files.metadata(path)["round"]) if path.exists() else None

    def finish(
        self,
        summary: Record,
        scores: Sequence[Scored],
        metrics: Sequence[str] = ("accuracy",),
        spent: Callable[[str, int], float] | None = None,
    ) -> None:
        """The last files: scores and costs of clients, the summary; `spent`: epsilon by client and rounds."""
        # Of every client that took part: rounds, bytes and FLOPs in all, means of its other numbers.
        costs: dict[str, Record] = {}
        with (self.path / "participation.jsonl").open() as lines:
            for line in map(json.loads, lines):
                cost = costs.setdefault(line.pop("client"), {"training_rounds": 0})
                cost["training_rounds"] += 1
                del line["round"]
                for name, value in line.items():
                    if isinstance(value, int | float):
                        cost[f"training_{name}"] = cost.get(f"training_{name}", 0.0) + value
        for client, cost in costs.items():
            for name in cost.keys() - SUMS:
                cost[name] /= cost["training_rounds"]
            if spent is not None:
                cost["epsilon"] = spent(client, int(cost["training_rounds"]))
        stats = sorted(set().union(*(score.stats for score in scores)))
        file = io.StringIO(newline="")
        main, *others = metrics
        head = ["client", "point", "n_test", main, "loss", "n_val", f"val_{main}", "val_loss", *others]
        table = csv.DictWriter(file, [*head, *stats, *sorted(set().union(*costs.values()))], restval="")
        table.writeheader()
        for s in scores:
            numbers = (s.test.n, s.test.score, s.test.loss, s.val.n, s.val.score, s.val.loss, *s.test.more)
            row = dict(zip(head, (plain(s.client), s.point, *numbers), strict=True))
            table.writerow({**row, **s.stats, **costs.get(s.client, {})})
        write_atomically(self.path / "clients.csv", file.getvalue().encode(), sync=True)
        summary["seconds"] = sum(json.loads(t)["seconds"] for t in (self.path / LINES[2]).read_text().splitlines())
        write_atomically(self.path / "summary.json", json.dumps(clean(summary), indent=2).encode(), sync=True)
        (self.path / KEY).unlink(missing_ok=True)
