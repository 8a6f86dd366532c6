from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.world import federation, small_task

from pfedgate.algorithms.fedavg import FedAvg
from pfedgate.core.state import equal
from pfedgate.core.types import CPU, Card, Local, Round, State, Update
from pfedgate.engine import processes
from pfedgate.engine.files import Scratch
from pfedgate.engine.processes import Processes
from pfedgate.engine.roster import Roster
from pfedgate.engine.server import ClientError, Options, run
from pfedgate.engine.store import MemoryStore, TemporaryStore
from pfedgate.engine.workers import WorkerDied, status

OPTIONS = Options(rounds=1, evaluate_every=0, novel=False, stack=0)


@dataclass(frozen=True)
class Troubled(FedAvg):
    """FedAvg in which one client fails, or takes its process with it."""

    fails: str = ""
    kills: str = ""

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        if local.card.id == self.fails:
            raise ZeroDivisionError("of this client")
        if local.card.id == self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(got, private, local)


def exchange_of(count: int = 2, **trouble: str) -> Processes:
    return Processes(Troubled(small_task(), **trouble), federation(), TemporaryStore(), CPU, workers=count)


def gone(pids: list[Any], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while any(_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def chunks() -> list[list[Card]]:
    return [[card] for card in Roster.of(federation(), "clients", OPTIONS)]


def test_an_error_names_the_client_and_workers_go_on() -> None:
    exchange = exchange_of(fails=federation().clients[3])
    server = exchange_server()
    try:
        with pytest.raises(ClientError, match="round 1, train: ZeroDivisionError: of this client") as caught:
            list(exchange.train(server, Round(), chunks()))
        assert federation().clients[3] in str(caught.value)
        good = [chunk for chunk in chunks() if chunk[0].id != federation().clients[3]]
        assert len(list(exchange.train(server, Round(), good))) == 5
    finally:
        exchange.close()


def exchange_server() -> State:
    return FedAvg(small_task()).init_server(0)


def test_a_dead_worker_is_noticed() -> None:
    exchange = exchange_of(kills=federation().clients[2])
    try:
        with pytest.raises(RuntimeError, match=r"a worker died \(exit code"):
            list(exchange.train(exchange_server(), Round(), chunks()))
    finally:
        exchange.close()


def test_stopping_early_leaves_the_workers_usable() -> None:
    exchange = exchange_of()
    try:
        replies = exchange.train(exchange_server(), Round(), chunks())
        first = next(replies)
        replies.close()  # type: ignore[attr-defined]
        again = list(exchange.train(exchange_server(), Round(), chunks()))
        assert [reply.card.id for reply in again] == sorted(federation().clients)
        assert first.update is not None
        assert again[0].update is not None
        assert equal(first.update.shared, again[0].update.shared)
    finally:
        exchange.close()


def test_closing_leaves_nothing_behind() -> None:
    exchange = exchange_of()
    list(exchange.train(exchange_server(), Round(), chunks()))
    pids = [child.pid for child in exchange._children]
    folder = exchange._folder
    assert exchange.resident_bytes > 10**7
    exchange.close()
    assert gone(pids)
    assert not folder.exists()


def test_private_states_must_be_reachable() -> None:
    with pytest.raises(TypeError, match="DiskStore"):
        Processes(FedAvg(small_task()), federation(), MemoryStore())


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers(workers: int) -> None:
    options = replace(OPTIONS, rounds=2, evaluate_every=1, stack=2)
    here = run(FedAvg(small_task()), federation(), options)
    there = run(FedAvg(small_task()), federation(), options, exchange=partial(Processes, workers=workers))
    assert equal(here.server, there.server)
    assert here.history == there.history
    assert here.scores == there.scores


def test_workers_are_stopped_when_a_run_fails() -> None:
    made: list[Processes] = []

    def exchange(*args: Any) -> Processes:
        made.append(Processes(*args, workers=1))
        return made[0]

    exchange.shared_store = True  # type: ignore[attr-defined]
    call: Callable[..., Any] = exchange
    with pytest.raises(ClientError):
        run(Troubled(small_task(), fails=federation().clients[0]), federation(), OPTIONS, exchange=call)
    assert gone([child.pid for child in made[0]._children])


def _train_and_wait(pipe: Any) -> None:
    exchange = exchange_of()
    list(exchange.train(exchange_server(), Round(), chunks()))
    pipe.send([child.pid for child in exchange._children])
    time.sleep(60)


def test_workers_end_with_a_parent_that_was_killed() -> None:
    ours, theirs = multiprocessing.Pipe()
    parent = multiprocessing.get_context("spawn").Process(target=_train_and_wait, args=(theirs,))
    parent.start()
    pids = ours.recv()
    parent.kill()
    assert gone(pids)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("stopped", [1, 2])
def test_a_stopped_worker_ends_the_run_in_time(stopped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PATIENCE", 1.0)
    exchange = exchange_of()
    try:
        list(exchange.train(exchange_server(), Round(), chunks()))
        for child in exchange._children[:stopped]:
            os.kill(child.pid, signal.SIGSTOP)
        try:
            list(exchange.train(exchange_server(), Round(), chunks()))
            assert stopped == 1  # it held no chunk, and the other did them all
        except WorkerDied as error:
            assert "was one stopped" in str(error)  # noqa: PT017
            assert gone([child.pid for child in exchange._children])
    finally:
        exchange.close()


@pytest.mark.timeout(120)
def test_who_gives_up_does_not_wait_for_a_stopped_worker() -> None:
    """Ctrl-C, or an error elsewhere: nobody continues what somebody has stopped."""
    exchange = exchange_of()
    try:
        replies = exchange.train(exchange_server(), Round(), chunks())
        next(replies)
        for child in exchange._children:
            os.kill(child.pid, signal.SIGSTOP)
            while status(child)[0] != "T":
                time.sleep(0.01)
        replies.close()  # type: ignore[attr-defined]
    finally:
        exchange.close()
    assert gone([child.pid for child in exchange._children])


def _scratch_of(pid: int) -> set[Path]:
    """Folders in memory or for temporary files that a process holds."""
    handles = [os.readlink(handle) for handle in Path(f"/proc/{pid}/fd").iterdir() if handle.is_symlink()]
    return {Path(name).parent for name in handles if name.endswith("/alive")}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_run_that_is_killed_or_loses_its_terminal_leaves_no_memory_behind(number: int, tmp_path: Path) -> None:
    """By SIGKILL until the next start; by SIGHUP at once, and the run can go on."""
    folder = tmp_path / "run"
    options = [
        "--out",
        str(folder),
        "--set",
        "run.workers=2",
        "--set",
        "train.rounds=100000",
        "--set",
        "data.clients=4",
    ]
    command = [sys.executable, "-m", "pfedgate", "run", "fedavg", "--data", "digits", *options]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # tests may run under nohup, which a run obeys
    ) as process:
        until = time.monotonic() + 120
        while not (folder / "checkpoint.safetensors").exists() and time.monotonic() < until:
            time.sleep(0.05)
        held = _scratch_of(process.pid)
        workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert held, said
    assert gone(workers)
    if number == signal.SIGKILL:
        assert any(place.exists() for place in held)
        for root in {place.parent for place in held}:
            Scratch(root).close()
    else:
        assert process.returncode == 130, said
        assert f"pfedgate resume {folder}" in said
    assert not any(place.exists() for place in held)


def _leave(pipe: Any) -> None:
    scratch = Scratch()
    (scratch.path / "server").write_bytes(bytes(1000))
    pipe.send(str(scratch.path))
    time.sleep(60)


def test_what_a_killed_process_left_is_reclaimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ours, theirs = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork")
    dies, lives = (fork.Process(target=_leave, args=(theirs,)) for _ in range(2))
    dies.start()
    left = Path(ours.recv())
    lives.start()
    used = Path(ours.recv())
    (tmp_path / "pfedgate-foreign").mkdir()
    assert left.exists()
    dies.kill()
    dies.join()
    Scratch().close()
    assert not left.exists()
    assert used.exists()
    assert (tmp_path / "pfedgate-foreign").exists()
    lives.kill()
    lives.join()
