"""What makes gating work: one factor of the gate at a time, judged on validation data.

    python benchmarks/gate_trials.py                 all trials that are not in the file yet (a minute or two each)
    python benchmarks/gate_trials.py --only "plain"  those whose name has this in it
    python benchmarks/gate_trials.py --table         the results as Markdown

On a small copy of CIFAR-10: 24,000 images averaged to 16×16, 40 clients, label Dirichlet 0.4, 6:2:2, a network of
31,582 parameters, batch 128, 60 rounds. And, where a name says so, on 25 writers of FEMNIST: the paper's network, batch
32, 30 rounds. One local epoch, SGD with momentum 0.9, one seed. Small enough to try things, too small to publish: what
wins here is tried at full size by `pfedgate reproduce`. The file also has trials of ideas that were not taken up and
left the code: they are printed and cannot be repeated.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pfedgate import algorithms, data, models
from pfedgate.config.recipe import resolve
from pfedgate.core.types import Optim, Task
from pfedgate.engine import server as engine
from pfedgate.runs import gates

OUT = Path(__file__).parent / "results" / "gate_trials.jsonl"
# What trials do not say is as it was before M started at 1.4; NOW is as it is since, but for the gate's rate.
BEFORE: dict[str, Any] = {"bias": 0.0, "compensate": "share", "gate_lr": 0.03, "ranking": "random"}
NOW: dict[str, Any] = {"bias": 0.85, "compensate": "sqrt"}
SLOW: dict[str, Any] = {"gate_lr": 0.01}
NESTED: dict[str, Any] = {**NOW, **SLOW, "ranking": "nested"}
# Where every trial of the gate starts from: as our prototype had it.
FIRST: dict[str, Any] = {"start": "random", "spread": 1.0, "gate_lr": 0.1}
PARAMS: dict[str, Any] = {"resources": "params"}

Trial = dict[str, Any]


def gate(lr: float = 0.3, **options: Any) -> Trial:
    """A trial of pFedGate; `budget` is the clients', the rest its options."""
    return {"method": "pfedgate", "lr": lr, **options}


def around(start: str, usual: Trial, changes: Mapping[str, Trial]) -> dict[str, Trial]:
    """One factor at a time around a trial; what is changed completes its name."""
    return {f"{start}, {name}" if name else start: gate(**{**usual, **change}) for name, change in changes.items()}


TRIALS: dict[str, Trial] = {
    "FedPer, lr 0.3": {"method": "fedper", "lr": 0.3},
    "literally as published": gate(0.1, variant="paper", gate_lr=0.1, **PARAMS),
    "plain, prototype": gate(0.1, **FIRST),
    "plain, prototype, model's lr .3": gate(**FIRST),
    "plain, spread .1, gate's lr .03": gate(start="random"),
    "plain, + start from labels (the default)": gate(),
    "plain, M starts at 1.4, lr 0.2": gate(0.2, bias=0.85),
    **around(
        "shift, now, s = 0.5, params",
        {"lr": 0.2, "shift": True, "budget": 0.5, "smallest": 0.1, **PARAMS, **NOW},
        {
            "lr 0.1": {"lr": 0.1},
            "": {},
            "lr 0.3": {"lr": 0.3},
            "gate's lr .1": {"gate_lr": 0.1},
            "gate's lr .01": SLOW,
        },
    ),
    **around(
        "shift, nested, s = 0.5, params",
        {"lr": 0.2, "shift": True, "budget": 0.5, **PARAMS, **NESTED},
        {"": {}},
    ),
    **around(
        "shift, nested, s = 0.3, all",
        {"lr": 0.2, "shift": True, "budget": 0.3, **NESTED},
        {
            "": {"resources": "all"},
            "post-norm over the batch": {"post_norm": "batch"},
            "no post-norm": {"post_norm": "none"},
            "no pre-norm": {"pre_norm": False},
            "linear M": {"activation": "linear"},
            "M within .5 of 1": {"weight_range": 0.5},
            "spread 1": {"spread": 1.0},
            "decided per client": {"predict": "client"},
            "no compensation": {"compensate": "none"},
            "divided by the share": {"compensate": "share"},
            "5 blocks a layer": {"blocks": 5},
            "20 blocks a layer": {"blocks": 20},
            "Adam": {"optim": "adam", "lr": 0.003, "gate_lr": 0.003},
        },
    ),
}

FEMNIST: dict[str, Trial] = {
    "FedAvg, lr 0.05": {"method": "fedavg", "lr": 0.05},
    **around("plain", {}, {f"lr {lr}": {"lr": lr} for lr in (0.05, 0.1)}),
    **around(
        "gate's lr .01",
        {"lr": 0.05, **SLOW},
        {"lr 0.03": {"lr": 0.03}, "lr 0.05": {}, "M starts at 1.4": {"bias": 0.85}},
    ),
    **around(
        "gate's lr .01, s = 0.5, all, M starts at 1.4",
        {"lr": 0.05, "bias": 0.85, "budget": 0.5, **SLOW},
        {
            "divided by share": {"compensate": "share", "resources": "all"},
            "divided by sqrt": {"compensate": "sqrt", "resources": "all"},
            "divided by sqrt, lr 0.03": {"compensate": "sqrt", "lr": 0.03},
        },
    ),
    **around(
        "gate's lr .01, s = 0.3, all, M starts at 1.4, divided by sqrt",
        {"lr": 0.05, "budget": 0.3, **NOW, **SLOW},
        {"": {"resources": "all"}, "lr 0.03": {"lr": 0.03}},
    ),
    **around("nested, s = 0.5, params", {"budget": 0.5, **PARAMS, **NESTED}, {"lr 0.05": {"lr": 0.05}}),
    **around(
        "nested, s = 0.3",
        {"budget": 0.3, **NESTED},
        {
            "params, lr 0.05": {"lr": 0.05, **PARAMS},
            "params, lr 0.03": {"lr": 0.03, **PARAMS},
            "all, lr 0.1": {"lr": 0.1, "resources": "all"},
            "all, lr 0.03": {"lr": 0.03, "resources": "all"},
        },
    ),
    **around(
        "nested, s = 0.5, params",
        {"lr": 0.05, "budget": 0.5, **PARAMS, **NESTED},
        {"32 blocks a layer, gate's lr .03": {"blocks": 32, "gate_lr": 0.03}},
    ),
    # Since then: layers begin with the widths of the largest product, in steps of four units, .1 of each always kept.
    **around(
        "widest product, s = 0.3, all",
        {"lr": 0.05, "budget": 0.3, "smallest": 0.1, **NESTED},
        {
            "": {},
            "lr 0.07": {"lr": 0.07},
            "shift": {"shift": True},
            "gate's lr .03": {"gate_lr": 0.03},
            "M starts at 1.7": {"bias": 1.73},
            "two epochs": {"epochs": 2},
            "two epochs, lr 0.03": {"epochs": 2, "lr": 0.03},
        },
    ),
    "M fixed at 1.4, gate frozen": gate(0.05, gate_lr=0.0, start="random", spread=0.0, bias=0.85),
    **around(
        "gate's lr .01",
        {"lr": 0.05, **SLOW},
        {
            "s = 0.5, params": {"budget": 0.5, **PARAMS},
            "s = 0.5, all": {"budget": 0.5, "resources": "all"},
            "s = 0.3, all": {"budget": 0.3, "resources": "all"},
        },
    ),
}
TRIALS |= {f"FEMNIST: {name}": {"data": "femnist", **trial} for name, trial in FEMNIST.items()}


def network() -> nn.Module:
    """Two convolutions of 3×3 and three linear layers."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


@lru_cache(maxsize=1)
def federation(name: str, data_dir: str | None) -> data.Federation:
    """25 writers of FEMNIST, or CIFAR-10 averaged to 16×16."""
    if name == "femnist":
        return data.load("femnist", clients=25, data_dir=data_dir)
    whole = data.load("cifar10", clients=1, partition="iid", data_dir=data_dir)
    parts = [whole.part(whole.clients[0], name) for name in ("train", "val", "test")]
    x = torch.cat([part.x for part in parts]).float()  # [N, 3, 32, 32], bytes
    y = torch.cat([part.y for part in parts])
    small = nn.functional.avg_pool2d(x, 2).round().byte()
    images = np.ascontiguousarray(small.permute(0, 2, 3, 1).numpy())
    return data.from_arrays(
        images, y.numpy(), partition="dirichlet", clients=40, alpha=0.4, samples=24_000, standardise=True
    )


def run(trial: Trial, data_dir: str | None) -> dict[str, Any]:
    """Train once; the curve and the end, on validation data, and test accuracy for the record."""
    options = dict(trial)
    method, lr, budget = options.pop("method"), options.pop("lr"), options.pop("budget", 1.0)
    name, epochs = options.pop("data", "cifar10"), options.pop("epochs", 1)
    optim = Optim(options.pop("optim", "sgd"), lr=lr, clip=10.0)
    if method == "pfedgate":
        options = {**BEFORE, **options}
    fed = federation(name, data_dir)
    femnist = name == "femnist"
    model = partial(models.build, "cnn_femnist", fed.input_shape, fed.classes) if femnist else network
    task = Task(
        model,
        example=fed.prepare(fed.part(fed.clients[0], "train").x[:32]),
        optim=optim,
        batch=32 if femnist else 128,
        epochs=epochs,
    )
    started, curve = time.process_time(), []
    # Trials are on file under the names that options had then: a recipe knows them by today's names.
    recipe = resolve({"algorithm": {"name": method, **options}})
    algorithm = algorithms.build(method, task, **recipe.algorithm.options)
    how = engine.Options(rounds=30 if femnist else 60, budget=budget, evaluate_every=10 if femnist else 20)
    result = engine.run(
        algorithm, fed, how,
        callbacks=[lambda event: curve.append(event["after_broadcast"]) if "after_broadcast" in event else None],
    )  # fmt: skip
    last = curve[-1]
    assert result.store is not None
    masks = {seen.kept.tobytes() for seen in gates.look(algorithm, fed, result.server, result.store, how, how.rounds)}
    return {
        "validation": [round(100 * point["val_accuracy"], 1) for point in curve],
        "test": round(100 * last["accuracy"], 1),
        "bottom decile": round(100 * last["bottom_decile"], 1),
        "density": round(result.summary.get("density") or 1.0, 2),
        "masks": len(masks),
        "cpu seconds": round(time.process_time() - started),
    }


def recorded(path: Path) -> dict[str, dict[str, Any]]:
    """The records of a file by name, also of trials whose options are gone."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def table(records: Mapping[str, dict[str, Any]]) -> list[str]:
    """A line for every record."""
    lines = [
        "| trial | lr | validation at a third, two thirds, the end | test | bottom decile | density | masks |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, record in records.items():
        curve = ", ".join(f"{value:.1f}" for value in record["validation"])
        cells = [name, record["trial"]["lr"], curve, record["test"], record["bottom decile"]]
        lines.append("| " + " | ".join(map(str, [*cells, f"{record['density']:.2f}", record.get("masks", "–")])) + " |")
    return lines


def main() -> None:
    """Run the trials that are not in the file yet, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="trials whose name has this in it")
    parser.add_argument("--data-dir", default=None, help="folder of the data set; without: PFEDGATE_DATA or the hub")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--table", action="store_true", help="print the records and stop")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    records = recorded(arguments.out)
    for name, trial in TRIALS.items():
        if not arguments.table and arguments.only in name and name not in records:
            records[name] = {"name": name, "trial": trial, **run(trial, arguments.data_dir)}
            arguments.out.parent.mkdir(exist_ok=True)
            with arguments.out.open("a") as file:
                file.write(json.dumps(records[name]) + "\n")
            print(name, records[name]["validation"], flush=True)
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
