"""Inference of compact models against the dense ones they come from, with torch and with ONNX Runtime.

One thread, fresh networks with random weights, s = .3 of parameters, FLOPs and activations. Dense and compact run in
turn, channels-last in torch; each time is the least processor time of many passes, which other processes of a busy
machine hardly touch.
`--bert` measures an encoder of BERT-base's size instead (110 million parameters, 4 texts of 128 tokens, two minutes,
needs transformers): its training step under half of the FLOPs and parameters, and the compact model of .5 and .3.
Rows are written to benchmarks/results/infer.json. Needs the extra `export`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # processor time of one thread; read when torch is imported

import torch
from torch import Tensor, nn

import pfedgate
from pfedgate import Budget, export, models
from pfedgate.engine.workers import steady
from pfedgate.runs.environment import environment

RESULTS = Path(__file__).parent / "results" / "infer.json"
NETWORKS = ("cnn_cifar10", "cnn_femnist", "vit")
BATCHES = (1, 32)
HEAD = ("network", "what", "s", "runtime", "batch", "dense, ms", "small, ms", "small / dense")


def least(functions: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Least processor seconds of each function, called in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.process_time()
            function()
            times[name].append(time.process_time() - start)
    return {name: min(values[1:]) for name, values in times.items()}  # the first pass plans memory


def row(network: str, what: str, s: float, runtime: str, batch: int, seconds: Mapping[str, float]) -> dict[str, Any]:
    dense, small = seconds["dense"], seconds["small"]
    cells = (network, what, s, runtime, batch, 1e3 * dense, 1e3 * small, small / dense)
    return dict(zip(HEAD, cells, strict=True))


def inference(name: str, s: float, repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    dense, x = models.build(name).eval(), models.example(name, max(BATCHES), torch.Generator().manual_seed(0))
    layout = torch.channels_last if x.ndim == 4 else torch.preserve_format
    x, dense = x.to(memory_format=layout), dense.to(memory_format=layout)
    small = pfedgate.compact(pfedgate.gate(copy.deepcopy(dense), x, s), x).to(memory_format=layout)
    rows = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        both: dict[str, dict[str, nn.Module]] = {"torch": {"dense": dense, "small": small}, "ONNX Runtime": {}}
        with torch.inference_mode(False):
            for kind, model in both["torch"].items():
                both["ONNX Runtime"][kind] = export.InFile(export.save(model, x, f"{folder}/{kind}.onnx"))
        for runtime, two in both.items():
            for batch in BATCHES:
                seconds = least({kind: lambda m=model, b=batch: m(x[:b]) for kind, model in two.items()}, repeats)
                rows.append(row(name, "inference", s, runtime, batch, seconds))
    return rows


def bert(batch: int, length: int, repeats: int) -> list[dict[str, Any]]:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    dense = BertForSequenceClassification(BertConfig(num_labels=2))
    x = torch.randint(0, 30_000, (batch, length))
    gated = pfedgate.gate(
        copy.deepcopy(dense), x, Budget(params=0.5, flops=0.5), generator=torch.Generator().manual_seed(0)
    )
    print(f"wrapped after {time.process_time():.0f} s of the processor", flush=True)
    steps = {
        "dense": step(dense.train(), torch.optim.SGD(dense.parameters(), lr=1e-4), x),
        "small": step(gated.train(), gated.optimizer("sgd", lr=1e-4), x),
    }
    rows = [row("BERT base", "training step, gated", 0.5, "torch", batch, least(steps, repeats))]
    print(rows[0], gated.last, flush=True)
    del steps
    dense.eval()
    for s in (0.5, 0.3):
        small = pfedgate.compact(gated.rebudget(Budget(params=s, flops=s)).eval(), x)
        with torch.inference_mode():
            for b in (1, batch):
                seconds = least({"dense": lambda b=b: dense(x[:b]), "small": lambda b=b, m=small: m(x[:b])}, repeats)
                rows.append(row("BERT base", "inference", s, "torch", b, seconds))
    return rows


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        optimizer.zero_grad()
        model(x).logits.square().mean().backward()
        optimizer.step()

    return run


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for cells in rows:
        *first, dense, small, ratio = cells.values()
        lines.append(f"| {' | '.join(map(str, first))} | {dense:.3g} | {small:.3g} | **{ratio:.2f}** |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument("--budget", type=float, default=0.3)
    parser.add_argument("--bert", action="store_true")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    steady()
    if args.bert:
        rows = bert(4, 128, args.repeats or 6)
    else:
        names = args.network or NETWORKS
        rows = [found for name in names for found in inference(name, args.budget, args.repeats or 100)]
    before = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    measured = {tuple(found[name] for name in HEAD[:5]) for found in rows}
    rows = [old for old in before if tuple(old[name] for name in HEAD[:5]) not in measured] + rows
    args.out.write_text(json.dumps({**environment(), "load": os.getloadavg()[0], "rows": rows}, indent=1) + "\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
