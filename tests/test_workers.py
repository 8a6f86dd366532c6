"""Jobs in worker processes: the same results as in this process, one thread each, and an end with their parent."""

import multiprocessing
import os
import signal
import sys
import time

import pytest
import torch

from pfedgate.engine import workers
from pfedgate.engine.workers import WorkerDied, completed, steady


def square(job: int, tick: object = None) -> tuple[int, int]:
    if job < 0:
        time.sleep(600)
    return job * job, torch.get_num_threads()


def test_workers_change_no_result_and_end_with_their_parent() -> None:
    alone = [(job, future.result()[0]) for job, future in completed(square, iter([1, 2, 3, None]).__next__)]
    running = completed(square, iter([1, 2, 3, -1, None, None]).__next__, workers=2)
    results = [(job, future.result()) for job, future in (next(running) for _ in range(3))]
    assert sorted((job, square) for job, (square, _) in results) == alone
    assert {threads for _, (_, threads) in results} == {1}
    began = time.monotonic()
    running.close()  # type: ignore[attr-defined]  # as Ctrl-C does: one job would sleep for minutes yet
    assert time.monotonic() - began < 300
    assert not multiprocessing.active_children()


def stops(job: int, tick: object = None) -> int:
    if job == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return job


def test_a_job_whose_worker_is_stopped_is_lost_in_time_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 2.0)
    ended = dict(completed(stops, iter([1, 2, 3, 4, *[None] * 9]).__next__, workers=2))
    assert {job: future.result() for job, future in ended.items() if job != 2} == {1: 1, 3: 3, 4: 4}
    with pytest.raises(WorkerDied, match="killed or stopped"):
        ended[2].result()


def test_memory_settings_stay_where_the_user_or_another_system_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert steady.__wrapped__() is False
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert steady.__wrapped__() is False
