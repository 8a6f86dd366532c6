"""Cost of a round and memory with 1,000 to 1,000,000 registered devices, 1,000 of them sampled a round.

    python benchmarks/scale.py [--clients 1000 1000000] [--algorithms fedavg ditto] [--sample 1000] [--rounds 5]

Must hold: a round costs the same whatever the number registered, memory is flat, and finding and timing the clients
takes at most 5 % of a round. `ditto` keeps a whole private model per client, on disk. Devices are phones and their
time is virtual. Every figure comes from a process of its own, so that peaks do not mix.
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
from typing import Any

import torch


def measure(clients: int, name: str, sample: int, rounds: int) -> None:
    """One configuration, in this process; prints JSON."""
    from pfedgate import algorithms, models
    from pfedgate.core.types import Task
    from pfedgate.data import synthetic
    from pfedgate.engine.metrics import resident_bytes
    from pfedgate.engine.policies import Policy
    from pfedgate.engine.roster import Roster
    from pfedgate.engine.server import Options, run
    from pfedgate.fleet.pace import Pace

    torch.set_num_threads(1)
    before = resident_bytes()
    started = time.process_time()
    federation = synthetic(clients=clients)
    task = Task(functools.partial(models.build, "mlp", (64,), 10), batch=10)
    marks: list[float] = []

    def note(event: dict[str, object]) -> None:
        if event["event"] in ("start", "round"):
            marks.append(time.process_time())

    scheduling = [0.0]

    def timed(method: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            begun = time.process_time()
            answer = method(*given, **named)
            scheduling[0] += time.process_time() - begun
            return answer

        return call

    Roster.draw, Policy.timed = timed(Roster.draw), timed(Policy.timed)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        options = Options(rounds=rounds, sample=min(sample, clients), evaluate_every=0, fleet=Pace(devices="phones"))
        result = run(algorithms.build(name, task), federation, options, folder=folder, callbacks=[note])
        states = 0 if result.store is None else len(result.store.clients())
    taken = [b - a for a, b in itertools.pairwise(marks)]
    costs = {"start": marks[0] - started, "round": statistics.median(taken[1:]), "states": states}
    costs["scheduling"] = scheduling[0] / sum(taken)
    print(json.dumps({**costs, "peak": resident_bytes(), "before": before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--algorithms", nargs="+", default=["fedavg", "ditto"])
    parser.add_argument("--sample", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(int(given.measure[0]), given.measure[1], given.sample, given.rounds)
        return
    print("algorithm   clients  start CPU-s  round CPU-s  ratio  scheduling  peak MB  states")
    for name in given.algorithms:
        base = None
        for clients in given.clients:
            call = [sys.executable, __file__, "--rounds", str(given.rounds), "--sample", str(given.sample)]
            call += ["--measure", str(clients), name]
            done = subprocess.run(call, capture_output=True, text=True, check=True)
            costs = json.loads(done.stdout.splitlines()[-1])
            base = base or costs["round"]
            line = f"{name:10} {clients:8} {costs['start']:12.2f} {costs['round']:12.4f} {costs['round'] / base:6.2f}"
            print(f"{line} {costs['scheduling']:10.1%} {costs['peak'] / 1e6:8.0f} {costs['states']:7}", flush=True)


if __name__ == "__main__":
    main()
