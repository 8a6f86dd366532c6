"""One FedAvg round against a hand-written PyTorch loop, interleaved; CPU-seconds, and the ratio engine / loop.

    python benchmarks/engine.py [--workload w1 w2] [--repeats 5] [--workers 2]

w1: the CIFAR-10 network, 20 clients × 360 samples, batch 128.    must ≤ 1.02, aim ≤ .75; 2 workers: time ≤ .6
w2: 500 clients × 20 samples of a 64-64-10 MLP, batch 10.          must ≥ 5 ×, aim ≥ 10 × the loop's clients/s
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfedgate import algorithms, models
from pfedgate.data import from_arrays
from pfedgate.data.federation import Federation
from pfedgate.engine import Options, run
from pfedgate.exchange.processes import Processes
from pfedgate.types import Optim, Task

LR, MOMENTUM, DECAY = 0.05, 0.9, 5e-4
Clients = list[tuple[Tensor, Tensor]]


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
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimiser.step()
        for name, value in model.state_dict().items():
            mean[name] += value * (len(y) / total)
    model.load_state_dict(mean)


def workload(name: str) -> tuple[Federation, Task, Clients, nn.Module, int]:
    """(federation, task, the same samples for the loop, its model, batch)."""
    random = np.random.default_rng(0)
    count, size, batch, shape = (20, 360, 128, (32, 32, 3)) if name == "w1" else (500, 20, 10, (64,))
    whole = size * 5 // 4
    kind = "cnn_cifar10" if name == "w1" else "mlp"
    if name == "w1":
        x = random.integers(0, 256, (count * whole, *shape), dtype=np.uint8)
    else:
        x = random.standard_normal((count * whole, *shape)).astype(np.float32)
    y = random.integers(0, 10, count * whole)
    owners = np.repeat([f"client{at:03d}" for at in range(count)], whole)
    # A fifth is put aside for testing, so that what trains is the size that was asked for.
    federation = from_arrays(x, y, owners=owners, val=False, test=0.2)
    input_shape = (3, 32, 32) if name == "w1" else (64,)
    make = functools.partial(models.build, kind, input_shape, 10)
    task = Task(make, optim=Optim(lr=LR, momentum=MOMENTUM, weight_decay=DECAY), batch=batch)
    parts = [federation.part(client, "train") for client in federation.clients]
    # The loop gets the samples normalised once and for all, in PyTorch's default layout, as one would have them.
    clients = [(federation.prepare(part.x).contiguous(), part.y) for part in parts]
    return federation, task, clients, make(), batch


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """(CPU-seconds, seconds) of a call in this process."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


def compare(name: str, repeats: int, workers: int) -> None:
    federation, task, clients, model, batch = workload(name)
    algorithm = algorithms.build("fedavg", task)
    options = Options(rounds=1, evaluate_every=0)
    contenders: dict[str, Callable[[], object]] = {
        "loop": lambda: loop(model, clients, batch),
        "engine": lambda: run(algorithm, federation, options),
    }
    if name == "w2":
        contenders["engine, one by one"] = lambda: run(
            algorithm, federation, Options(rounds=1, evaluate_every=0, stack=0)
        )
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in contenders}
    for turn in range(repeats + 1):
        for label, call in contenders.items():
            taken = timed(call)
            if turn:  # the first turn warms up
                times[label].append(taken)
    base = statistics.median(cpu for cpu, _ in times["loop"])
    print(f"\n{name}: {len(clients)} clients")
    for label, taken in times.items():
        cpu = statistics.median(t for t, _ in taken)
        ratio = statistics.median(t / b for (t, _), (b, _) in zip(taken, times["loop"], strict=True))
        print(f"  {label:22} {cpu:8.3f} CPU-s  {len(clients) / cpu:9.0f} clients/s   ratio {ratio:.3f}")
    if name == "w1" and workers > 1:
        walls = []
        rounds = Options(rounds=repeats + 1, evaluate_every=0)
        reached: list[float] = []
        run(
            algorithm,
            federation,
            rounds,
            exchange=functools.partial(Processes, workers=workers),
            callbacks=[lambda event: reached.append(event["seconds"]) if event["event"] == "round" else None],
        )
        walls = [w / statistics.median(w for _, w in times["loop"]) for w in reached[1:]]
        print(f"  {workers} workers             time of a round / loop {statistics.median(walls):.3f} (idle machine?)")
    assert base > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=["w1", "w2"], choices=["w1", "w2"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.workload:
        compare(name, given.repeats, given.workers)


if __name__ == "__main__":
    main()
