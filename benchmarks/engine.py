"""One FedAvg round against a hand-written PyTorch loop, in turns; CPU-seconds, and the ratio engine / loop.

    python benchmarks/engine.py [--workload w1 w2] [--repeats 5] [--workers 2]

w1: the CIFAR-10 network, 20 clients × 360 samples, batch 128.    must ≤ 1.02, aim ≤ .75; 2 workers: time ≤ .6
    pFedGate with budget .3 on the same: must ≤ .5 of the engine's FedAvg
w2: 500 clients × 20 samples of a 64-64-10 MLP, batch 10.         must ≤ .2 (5 × the clients/s), aim ≤ .1

Loop and engine each have a process of their own, because the engine changes how its process keeps memory
(`pfedgate.engine.workers`) and the loop must not profit. They take turns, so that a noisy machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfedgate import algorithms, models
from pfedgate.core.types import Optim, Task
from pfedgate.data import from_arrays
from pfedgate.data.federation import Federation
from pfedgate.engine.processes import Processes
from pfedgate.engine.server import Options, run

LR, MOMENTUM, DECAY, CLIP = 0.05, 0.9, 5e-4, 10.0
Clients = list[tuple[Tensor, Tensor]]
ONE_BY_ONE, PFEDGATE = "engine, one by one", "pFedGate s = .3"
SIZES = {"w1": (20, 360, 128), "w2": (500, 20, 10)}  # clients, samples, batch


def loop(model: nn.Module, clients: Clients, batch: int) -> None:
    """The yardstick: what one writes in an afternoon. A round of FedAvg over clients held in memory."""
    total = sum(len(y) for _, y in clients)
    start = copy.deepcopy(model.state_dict())
    mean = {name: torch.zeros_like(value) for name, value in start.items()}
    for x, y in clients:
        model.load_state_dict(start)
        optimiser = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        order = torch.randperm(len(y))
        for at in range(0, len(y), batch):
            rows = order[at : at + batch]
            optimiser.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimiser.step()
        for name, value in model.state_dict().items():
            mean[name] += value * (len(y) / total)
    model.load_state_dict(mean)


def workload(name: str) -> tuple[Federation, Task, Clients, nn.Module, int]:
    """(federation, task, the same samples for the loop, its model, batch)."""
    random = np.random.default_rng(0)
    count, size, batch = SIZES[name]
    rows = count * size * 5 // 4  # a fifth is put aside for testing; what trains has the size asked for
    if name == "w1":
        x = random.integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8)
        make = functools.partial(models.build, "cnn_cifar10", (3, 32, 32), 10)
    else:
        x = random.standard_normal((rows, 64)).astype(np.float32)
        make = functools.partial(models.build, "mlp", (64,), 10)
    owners = np.repeat([f"client{at:03d}" for at in range(count)], rows // count)
    federation = from_arrays(x, random.integers(0, 10, rows), owners=owners, val=False, test=0.2)
    task = Task(make, optim=Optim(lr=LR, momentum=MOMENTUM, weight_decay=DECAY, clip=CLIP), batch=batch)
    if name == "w1":
        first = federation.part(federation.clients[0], "train")
        task = dataclasses.replace(task, example=federation.prepare(first.x[:8]))
    parts = [federation.part(client, "train") for client in federation.clients]
    assert {part.n for part in parts} == {size}
    # The loop has its samples normalised once and for all, in PyTorch's default layout, as one would have them.
    clients = [(federation.prepare(part.x).contiguous(), part.y) for part in parts]
    return federation, task, clients, make(), batch


def contender(pipe: Connection, name: str, label: str) -> None:
    """A process that runs one round each time it is asked to and answers (CPU-seconds, seconds)."""
    torch.set_num_threads(1)
    federation, task, clients, model, batch = workload(name)
    gated = label == PFEDGATE
    algorithm = algorithms.build("pfedgate" if gated else "fedavg", task)
    options = Options(
        rounds=1, evaluate_every=0, stack=0 if label == ONE_BY_ONE else "auto", budget=0.3 if gated else 1.0
    )
    calls: dict[str, Callable[[], object]] = {"loop": lambda: loop(model, clients, batch)}
    call = calls.get(label) or (lambda: run(algorithm, federation, options))
    while pipe.recv():
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        pipe.send((time.process_time() - cpu, time.perf_counter() - wall))


def compare(name: str, repeats: int, workers: int) -> None:
    labels = ["loop", "engine", ONE_BY_ONE if name == "w2" else PFEDGATE]
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for label in labels:
        pipes[label], theirs = context.Pipe()
        processes.append(context.Process(target=contender, args=(theirs, name, label), daemon=True))
        processes[-1].start()
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in labels}
    for turn in range(repeats + 1):
        for label, pipe in pipes.items():
            pipe.send(True)
            taken = pipe.recv()
            if turn:  # the first turn warms up
                times[label].append(taken)
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(False)
        process.join()
    count = SIZES[name][0]
    print(f"\n{name}: {count} clients, median of {repeats}")
    for label, measured in times.items():
        cpu = statistics.median(t for t, _ in measured)
        ratio = statistics.median(t / b for (t, _), (b, _) in zip(measured, times["loop"], strict=True))
        print(f"  {label:20} {cpu:8.3f} CPU-s  {count / cpu:8.0f} clients/s   ratio {ratio:.3f}")
    if name == "w1":
        pairs = zip(times[PFEDGATE], times["engine"], strict=True)
        print(f"  pFedGate / FedAvg on the engine: {statistics.median(t / b for (t, _), (b, _) in pairs):.3f}")
    if name == "w1" and workers > 1:
        base = statistics.median(wall for _, wall in times["loop"])
        walls = rounds_with_workers(name, repeats + 1, workers)[1:]
        print(f"  {workers} workers: time of a round / loop {statistics.median(walls) / base:.3f} (on an idle machine)")


def rounds_with_workers(name: str, rounds: int, workers: int) -> list[float]:
    """Seconds of every round with worker processes."""
    federation, task, _, _, _ = workload(name)
    taken: list[float] = []
    run(
        algorithms.build("fedavg", task),
        federation,
        Options(rounds=rounds, evaluate_every=0),
        exchange=functools.partial(Processes, workers=workers),
        callbacks=[lambda event: taken.append(event["seconds"]) if event["event"] == "round" else None],
    )
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.workload:
        compare(name, given.repeats, given.workers)


if __name__ == "__main__":
    main()
