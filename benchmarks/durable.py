"""What it costs that a power cut loses nothing: rounds with and without fsync, in turns; must: at most 3 % more.

    python benchmarks/durable.py [--repeats 7] [--rounds 3]

The demo's network and data, pFedGate at .3 of all resources, a checkpoint each round. "without" makes `os.fsync` do
nothing, which leaves everything else as it is. Wall time, because waiting for a disk takes no processor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

from pfedgate import experiment

TABLES = {
    "data": {"name": "fashion"}, "model": {"name": "cnn_femnist"}, "clients": {"budget": 0.3},
    "algorithm": {"name": "pfedgate", "resources": "all"}, "evaluate": {"every": 0}, "run": {"workers": 1},
}  # fmt: skip


def seconds(rounds: int, durable: bool) -> float:
    """Time of a run in a new folder."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, mock.patch("os.fsync", wraps=os.fsync) as sync:
        if not durable:
            sync.side_effect = lambda handle: None
        began = time.perf_counter()
        experiment.run(TABLES, train={"rounds": rounds}, out=Path(folder) / "run")
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    seconds(1, True)
    pairs = [(seconds(given.rounds, True), seconds(given.rounds, False)) for _ in range(given.repeats)]
    ratio = statistics.median(durable / plain for durable, plain in pairs)
    times = [statistics.median(times) / given.rounds for times in zip(*pairs, strict=True)]
    print(f"a round {1e3 * times[0]:.0f} ms, without fsync {1e3 * times[1]:.0f} ms: ratio {ratio:.3f} (must: 1.03)")


if __name__ == "__main__":
    main()
