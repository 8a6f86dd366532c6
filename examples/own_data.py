"""A federated run with your own arrays, your own module, and a budget for every client.

python examples/own_data.py --rounds 20 --out runs/sensors
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from torch import nn

import pfedgate
from pfedgate import data

# What each device can afford: a phone, a tablet and a server share one model.
BUDGETS = {"phone-0": 0.2, "phone-1": 0.2, "tablet-0": 0.5, "server-0": 1.0, "default": 0.5}


def readings(samples: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sensor readings of six devices. What a pattern is called differs from device to device, as preferences do."""
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(4, 40))
    x, y, owners = [], [], []
    for number, owner in enumerate(["phone-0", "phone-1", "tablet-0", "tablet-1", "server-0", "server-1"]):
        pattern = rng.integers(4, size=samples)
        x.append(patterns[pattern] + rng.normal(scale=0.8, size=(samples, 40)))
        y.append((pattern + number % 2) % 4)
        owners += [owner] * samples
    return np.concatenate(x).astype(np.float32), np.concatenate(y), np.array(owners)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", help="keep the run in this folder, to be resumed or reported")
    chosen = parser.parse_args(given)

    x, y, owners = readings()
    federation = data.from_arrays(x, y, owners=owners, standardise=True, name="sensors")
    # Clients that contradict each other need gates that move faster than by default.
    methods = {"pfedgate": {"name": "pfedgate", "gate_lr": 0.3}, "fedavg": {"name": "fedavg"}}
    results = {}
    for algorithm, options in methods.items():
        results[algorithm] = pfedgate.run(
            data=federation,
            model=network,
            algorithm=options,
            clients={"budget": BUDGETS},
            train={"rounds": chosen.rounds, "batch": 32, "lr": 0.1},
            out=None if chosen.out is None else f"{chosen.out}/{algorithm}",
        )
    print(f"{'client':10} {'budget':>6} {'density':>8} {'pFedGate':>9} {'FedAvg':>7}")
    for ours, other in zip(results["pfedgate"].scores, results["fedavg"].scores, strict=True):
        budget = BUDGETS.get(ours.client, BUDGETS["default"])
        accuracies = f"{ours.test.accuracy:9.2f} {other.test.accuracy:7.2f}"
        print(f"{ours.client:10} {budget:6.2f} {ours.stats['density']:8.2f} {accuracies}")


if __name__ == "__main__":
    main()
