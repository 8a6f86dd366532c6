"""kill -9 at any moment, then resume: the same bytes as if nothing had happened."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.world import federation, private_digests, small_task

from pfedgate import algorithms
from pfedgate.core.state import digest
from pfedgate.core.types import Optim, Schedule
from pfedgate.engine import checkpoint, files, store
from pfedgate.engine.checkpoint import FolderBusy, RunFolder, alone
from pfedgate.engine.files import DamagedError
from pfedgate.engine.processes import Processes
from pfedgate.engine.server import Options, run

FORK = multiprocessing.get_context("fork")
FILES = ("metrics.jsonl", "participation.jsonl", "clients.csv")


def train_in_folder(folder: Path, rounds: int, checkpoint_every: int = 1, workers: int = 0) -> None:
    """A run with everything that could be forgotten: private models, a plateau, the best State."""
    from dataclasses import replace

    chosen = replace(small_task(), optim=Optim(lr=0.1), schedule=Schedule("plateau", patience=1, factor_plateau=0.5))
    options = Options(rounds=rounds, sample=0.5, evaluate_every=2, seed=5, checkpoint_every=checkpoint_every)
    how: dict[str, Any] = {"exchange": partial(Processes, workers=workers)} if workers else {}
    run(algorithms.build("ditto", chosen), federation(), options, folder=folder, resume=True, **how)


def run_contents(folder: Path) -> dict[str, Any]:
    """All that must not differ."""
    found: dict[str, Any] = {name: (folder / name).read_bytes() for name in FILES}
    files = RunFolder(folder, resume=True)
    last, best = files.load(), load_file(folder / "best.safetensors")
    assert last is not None
    found |= {"server": digest(last.server), "best": (digest(best), files.best_round())}
    kept = store.DiskStore(folder / "private" / "best")
    found["private best"] = {client: digest(kept.get(client) or {}) for client in kept.clients()}
    return found | {"private": private_digests(folder)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    found = {}
    for rounds in (3, 40):
        folder = tmp_path_factory.mktemp("whole")
        train_in_folder(folder, rounds)
        found[rounds] = run_contents(folder)
    return found


def killed_after(seconds: float, *args: Any) -> bool:
    """Run in a process of its own and kill it; whether it was still running."""
    process = FORK.Process(target=train_in_folder, args=args)
    process.start()
    process.join(seconds)
    running = process.is_alive()
    process.kill()
    process.join()
    assert running or process.exitcode == 0
    return running


def _kill(tmp_path: Path, whole: dict[str, Any], count: int, seconds: float) -> None:
    """Kill runs so many times at random moments; each run that ends has the bytes of an undisturbed one."""
    moments = random.Random(count)
    kills, ended, folder, begun = 0, 0, tmp_path / "0", time.monotonic()
    while kills < count and time.monotonic() - begun < seconds:
        if killed_after(moments.uniform(0.05, 0.5), folder, 40):
            kills += 1
        else:  # it came to its end between two kills: begin another
            assert run_contents(folder) == whole
            ended += 1
            folder = tmp_path / str(ended)
    assert kills == count
    train_in_folder(folder, 40)
    assert run_contents(folder) == whole
    print(f"{kills} kills, {ended + 1} runs came to their end")


def test_killed_at_twenty_random_moments(tmp_path: Path, undisturbed: dict[int, dict[str, Any]]) -> None:
    _kill(tmp_path, undisturbed[40], 20, 120)


@pytest.mark.long
def test_killed_five_hundred_times(tmp_path: Path, undisturbed: dict[int, dict[str, Any]]) -> None:
    _kill(tmp_path, undisturbed[40], 500, 7000)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """Two that add their rounds to the same files would leave a run that looks finished and is not."""
    folder = tmp_path / "run"
    with alone(folder), pytest.raises(FolderBusy, match="another process is training"):
        train_in_folder(folder, 3)
    train_in_folder(folder, 3)
    assert [record["round"] for record in _metrics(folder)] == [1, 2, 3]


def test_what_two_processes_have_written_is_refused(tmp_path: Path) -> None:
    train_in_folder(tmp_path, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"round": 1', '"round": 2'))  # as long as before, so nothing is cut off
    with pytest.raises(ValueError, match=r"metrics.jsonl is damaged.*no earlier checkpoint"):
        RunFolder(tmp_path, resume=True).load()


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# -- folders that are not what was written


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Another header in the checkpoint, as anybody may write it."""

    def edit(folder: Path) -> None:
        for name in ("checkpoint", "previous"):
            path = folder / f"{name}.safetensors"
            about = json.loads(files.metadata(path)["pfedgate"])
            change(about)
            path.write_bytes(store.pack_file(load_file(path), {"pfedgate": json.dumps(about)}))

    return edit


def _link(name: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        path = folder / name
        if path.is_dir():
            path.rename(folder.parent / "away")
            path.symlink_to(folder.parent / "away")
        else:
            path.unlink(missing_ok=True)
            path.symlink_to(folder.parent / "victim")

    return plant


def _hard_link(folder: Path) -> None:
    (folder / "timing.jsonl").unlink()
    os.link(folder.parent / "victim", folder / "timing.jsonl")


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_edit(lambda about: about["lengths"].update({"../victim": 0})), "lengths"),
        (_edit(lambda about: about.update(lengths={})), "lengths"),
        (_edit(lambda about: about["lengths"].update({"metrics.jsonl": -5})), "lengths"),
        (_edit(lambda about: about["lengths"].update({"metrics.jsonl": 10**9})), "are expected"),
        (_edit(lambda about: about.update(commit="x/../../victims")), "no commit"),
        (_edit(lambda about: about.update(commit="/../../victims")), "no commit"),
        (_edit(lambda about: about.update(commit=3)), "cannot be read"),
        (_edit(lambda about: about.update(about={"seed": []})), "table of texts"),
        (_edit(lambda about: about.clear()), "cannot be read"),
        (_link("metrics.jsonl"), "is a link"),
        (_link("checkpoint.safetensors.new"), "is a link"),
        (_link("private"), "is a link"),
        (_link("private/current"), "is a link"),
        (_link(".lock"), "is a link"),
        (_hard_link, "no file of its own"),
    ],
)
def test_a_planted_folder_harms_nothing_outside_it(tmp_path: Path, harm: Callable[[Path], None], says: str) -> None:
    (tmp_path / "victim").write_text("v" * 5000)
    (tmp_path / "victims").mkdir()
    (tmp_path / "victims" / "a").write_text("a")
    train_in_folder(tmp_path / "run", 3)
    harm(tmp_path / "run")
    with pytest.raises(DamagedError, match=says) as refusal:
        train_in_folder(tmp_path / "run", 4)
    assert str(tmp_path / "run") in str(refusal.value)
    assert (tmp_path / "victim").read_text() == "v" * 5000
    assert (tmp_path / "victims" / "a").exists()


def test_temporary_names_cannot_be_guessed_and_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 16)
    (tmp_path / ".a.0000000000000000.new").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        files.write_atomically(tmp_path / "a", b"x")
    assert not (tmp_path / "victim").exists()


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "metrics.jsonl"])
def test_a_flipped_bit_costs_one_round(tmp_path: Path, undisturbed: dict[int, dict[str, Any]], name: str) -> None:
    train_in_folder(tmp_path, 3)
    _flip(tmp_path / name, -8)
    with pytest.warns(UserWarning, match="going on from the checkpoint before it, after round 2"):
        train_in_folder(tmp_path, 3)
    assert run_contents(tmp_path) == undisturbed[3]


def _states(folder: Path) -> list[Path]:
    return sorted((folder / "private" / "current").rglob("*.safetensors"))


def test_the_best_private_states_are_checked_too(tmp_path: Path) -> None:
    train_in_folder(tmp_path, 3)
    best = store.DiskStore(tmp_path / "private/best")
    total = files.metadata(tmp_path / "best.safetensors")["private"]
    assert best.verify(total)[0] == len(best.clients()) > 0
    next((tmp_path / "private/best").rglob("*.safetensors")).unlink()
    with pytest.raises(DamagedError, match=r"best/current is not what .* removed, added or exchanged"):
        best.verify(total)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda folder: _flip(_states(folder)[0], -1), "is damaged: its contents"),
        (lambda folder: os.replace(*_states(folder)[:2]), "were removed, added or exchanged"),
        (lambda folder: _states(folder)[0].unlink(), "were removed, added or exchanged"),
        (lambda folder: shutil.rmtree(folder / "private"), "were removed, added or exchanged"),
        (lambda folder: (folder / "checkpoint.safetensors").unlink(), "is missing, but .* holds a run of 3 rounds"),
        (lambda folder: _flip(folder / "metrics.jsonl", 3), "no earlier checkpoint"),
        (lambda folder: (folder / "participation.jsonl").write_text(""), "no earlier checkpoint"),
        (lambda folder: (folder / "timing.jsonl").unlink(), "no earlier checkpoint"),
        (lambda folder: (folder / "checkpoint.safetensors").write_bytes(b"\xff" * 40), "previous.safetensors"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(tmp_path: Path, harm: Callable[[Path], Any], says: str) -> None:
    train_in_folder(tmp_path, 3)
    for path in (tmp_path / "private").glob("pending-*"):
        shutil.rmtree(path)  # second names of the same files
    if "previous" in says:
        (tmp_path / "previous.safetensors").unlink()
    harm(tmp_path)
    with pytest.raises(DamagedError, match=says) as refusal:
        train_in_folder(tmp_path, 5)
    assert str(tmp_path) in str(refusal.value)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*safetensors"):
        train_in_folder(tmp_path, 3)


def test_private_states_are_their_owners_alone(tmp_path: Path) -> None:
    train_in_folder(tmp_path, 2)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in _states(tmp_path)} == {0o600}


def test_a_folder_whose_optimiser_had_an_option_more_goes_on(tmp_path: Path) -> None:
    train_in_folder(tmp_path, 3)
    files = RunFolder(tmp_path, resume=True)
    last = files.load()
    assert last is not None
    files.save(last, {"task.optim": "Optim(lr=0.1, clip=10.0, persist_momentum=False)"})
    assert files.load({"task.optim": "Optim(lr=0.1, clip=10.0)"}) is not None
    with pytest.raises(ValueError, match=r"clip=10.0\), is Optim\(lr=0.1, clip=5.0\)"):
        files.load({"task.optim": "Optim(lr=0.1, clip=5.0)"})


CALLS = ("os.replace", "shutil.rmtree", "os.truncate", "os.link", "os.fsync")


def _train_until(number: int, folder: Path, before: bool) -> None:
    """Train, and kill this very process at the given one of all calls that change files."""
    left = number

    def lethal(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for name in CALLS:
        module, _, function = name.partition(".")
        for owner in (store, checkpoint):
            if hasattr(owner, module):
                target = getattr(owner, module)
                if not getattr(getattr(target, function), "lethal", False):
                    changed = lethal(getattr(target, function))
                    changed.lethal = True
                    setattr(target, function, changed)
    train_in_folder(folder, 3)


# Between two such calls only lines are appended, so killing after one is nearly killing before the next.
@pytest.mark.parametrize("before", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_killed_at_every_change_of_a_file(tmp_path: Path, undisturbed: dict[int, dict[str, Any]], before: bool) -> None:
    """Not by chance: once at each call that moves, removes, cuts, links or flushes a file."""
    killed = 0
    for number in range(1, 500):
        folder = tmp_path / str(number)
        process = FORK.Process(target=_train_until, args=(number, folder, before))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        killed += 1
        if number % 2 == 0:  # and once more on the way back
            again = FORK.Process(target=_train_until, args=(2, folder, before))
            again.start()
            again.join()
        train_in_folder(folder, 3)
        assert run_contents(folder) == undisturbed[3], f"killed at change {number}"
    assert killed > 20


def test_killed_between_checkpoints(tmp_path: Path, undisturbed: dict[int, dict[str, Any]]) -> None:
    moments = random.Random(1)
    for _ in range(5):
        killed_after(moments.uniform(0.1, 0.6), tmp_path, 40, 7)
    train_in_folder(tmp_path, 40, 7)
    found = run_contents(tmp_path)
    assert found == undisturbed[40]


def test_killed_with_workers(tmp_path: Path, undisturbed: dict[int, dict[str, Any]]) -> None:
    """The workers of a killed server must go away by themselves and must not disturb its successor."""
    moments = random.Random(2)
    spawn = multiprocessing.get_context("spawn")
    for _ in range(2):
        process = spawn.Process(target=train_in_folder, args=(tmp_path, 40, 3, 2))
        process.start()
        for _ in _until(lambda: (tmp_path / "checkpoint.safetensors").exists(), 60):
            time.sleep(0.05)
        time.sleep(moments.uniform(0, 0.3))
        process.kill()
        process.join()
    train_in_folder(tmp_path, 40, 3, 2)
    assert run_contents(tmp_path) == undisturbed[40]


def _until(condition: Any, seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        yield


def test_torch_runs_after_a_fork() -> None:
    """What the tests above rely on."""
    process = FORK.Process(target=lambda: torch.nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward())
    process.start()
    process.join(30)
    assert process.exitcode == 0
