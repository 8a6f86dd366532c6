"""Cost of a round and memory with 1,000, 10,000 and 100,000 registered clients, 100 sampled a round.

    python benchmarks/scale.py [--clients 1000 10000 100000] [--algorithms fedavg ditto] [--rounds 10]

Must hold: the round costs the same whatever the number registered; everything inside 2 GB. `ditto` keeps a whole
private model per client, on disk. Every figure comes from a process of its own, so that peaks do not mix.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time

import torch


def measure(clients: int, name: str, rounds: int) -> None:
    """One configuration, in this process; prints JSON."""
    from pfedgate import algorithms, models
    from pfedgate.core.types import Task
    from pfedgate.data import synthetic
    from pfedgate.engine.metrics import resident_bytes
    from pfedgate.engine.server import Options, run

    torch.set_num_threads(1)
    before = resident_bytes()
    started = time.process_time()
    federation = synthetic(clients=clients)
    task = Task(functools.partial(models.build, "mlp", (64,), 10), batch=10)
    marks: list[float] = []

    def note(event: dict[str, object]) -> None:
        if event["event"] in ("start", "round"):
            marks.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        options = Options(rounds=rounds, sample=100, evaluate_every=0)
        result = run(algorithms.build(name, task), federation, options, folder=folder, callbacks=[note])
        states = 0 if result.store is None else len(result.store.clients())
    taken = [b - a for a, b in itertools.pairwise(marks)]
    told = {"start": marks[0] - started, "round": statistics.median(taken[1:]), "states": states}
    print(json.dumps({**told, "peak": resident_bytes(), "before": before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=[1_000, 10_000, 100_000])
    parser.add_argument("--algorithms", nargs="+", default=["fedavg", "ditto"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(int(given.measure[0]), given.measure[1], given.rounds)
        return
    print("algorithm   clients  start CPU-s  round CPU-s  ratio  peak MB  states")
    for name in given.algorithms:
        base = None
        for clients in given.clients:
            call = [sys.executable, __file__, "--rounds", str(given.rounds), "--measure", str(clients), name]
            done = subprocess.run(call, capture_output=True, text=True, check=True)
            told = json.loads(done.stdout.splitlines()[-1])
            base = base or told["round"]
            line = f"{name:10} {clients:8} {told['start']:12.2f} {told['round']:12.4f} {told['round'] / base:6.2f}"
            print(f"{line} {told['peak'] / 1e6:8.0f} {told['states']:7}", flush=True)


if __name__ == "__main__":
    main()
