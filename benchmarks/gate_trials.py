"""What makes gating work: one factor of the gate at a time, judged on validation data.

    python benchmarks/gate_trials.py                 all trials that are not in the file yet (a minute or two each)
    python benchmarks/gate_trials.py --only "plain"  those whose name has this in it
    python benchmarks/gate_trials.py --table         the results as Markdown

On a small copy of CIFAR-10: 24,000 images averaged to 16×16, 40 clients, label Dirichlet 0.4, 6:2:2, a network of
31,582 parameters, batch 128, 60 rounds. And, where a name says so, on 25 writers of FEMNIST: the paper's network, batch
32, 30 rounds. One local epoch, SGD with momentum 0.9, one seed. Small enough to try things, too small to publish: what
wins here is tried at full size by `pfedgate reproduce`.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pfedgate import algorithms, data, engine, models
from pfedgate.types import Optim, Task

OUT = Path(__file__).parent / "results" / "gate_trials.jsonl"
# What trials do not say is as it was before M started at 1.4; NOW is as it is since, but for the gate's rate.
BEFORE: dict[str, Any] = {"bias": 0.0, "compensate": "share", "gate_lr": 0.03, "ranking": "random"}
NOW: dict[str, Any] = {"bias": 0.85, "compensate": "sqrt"}
# Where every trial of the gate starts from: as our prototype had it.
FIRST: dict[str, Any] = {"start": "random", "spread": 1.0, "gate_lr": 0.1}
HALF: dict[str, Any] = {"budget": 0.5, "smallest": 0.1}
THIRD: dict[str, Any] = {"budget": 0.3, "smallest": 0.1}


def gate(lr: float = 0.3, **options: Any) -> dict[str, Any]:
    """A trial of pFedGate; `budget` is the clients', the rest its options."""
    return {"method": "pfedgate", "lr": lr, **options}


TRIALS: dict[str, dict[str, Any]] = {
    **{f"FedAvg, lr {lr}": {"method": "fedavg", "lr": lr} for lr in (0.1, 0.3)},
    **{f"FedAvg-FT, lr {lr}": {"method": "fedavg_ft", "lr": lr} for lr in (0.1, 0.3)},
    **{f"Local, lr {lr}": {"method": "local_only", "lr": lr} for lr in (0.1, 0.3)},
    **{f"FedPer, lr {lr}": {"method": "fedper", "lr": lr} for lr in (0.1, 0.2, 0.3, 0.5)},
    **{f"FedRep, lr {lr}": {"method": "fedrep", "lr": lr} for lr in (0.1, 0.3)},
    "literally as published": gate(0.1, variant="paper", gate_lr=0.1, resources="params"),
    "plain, prototype": gate(0.1, **FIRST),
    "plain, prototype, model's lr .3": gate(**FIRST),
    "plain, gate's lr .5": gate(0.2, **{**FIRST, "gate_lr": 0.5}),
    "plain, spread .1": gate(**{**FIRST, "spread": 0.1}),
    "plain, spread .1, gate's lr .03": gate(start="random"),
    "plain, + start from labels (the default)": gate(),
    "plain, default, gate's lr .1": gate(gate_lr=0.1),
    "plain, default, gate's lr .3": gate(gate_lr=0.3),
    "plain, default, spread 1": gate(spread=1.0),
    "plain, default, linear M": gate(activation="linear"),
    "plain, default, no pre-norm": gate(pre_norm=False),
    "plain, default, post-norm over the batch": gate(post_norm="batch"),
    "plain, default, decided per client": gate(predict="client"),
    "plain, default, separate initial gates": gate(common_init=False),
    "shift, prototype": gate(shift=True, **FIRST),
    "shift, default": gate(shift=True),
    "shift, default, gate's lr .01": gate(shift=True, gate_lr=0.01),
    "shift, default, gate's lr .1": gate(shift=True, gate_lr=0.1),
    "shift, start at 0": gate(shift=True, start="random"),
    "shift fixed at the labels, gate frozen": gate(shift=True, gate_lr=0.0, spread=0.0, ignore=0.0),
    **{
        f"{kind}, default, s = {budget['budget']}, {resources}": gate(
            shift=kind == "shift", resources=resources, **budget
        )
        for kind in ("plain", "shift")
        for budget in (HALF, THIRD)
        for resources in ("params", "all")
    },
    "plain, labels believed altogether": gate(ignore=0.0),
    **{f"plain, M starts at 1.4, lr {lr}": gate(lr, bias=0.85) for lr in (0.1, 0.2, 0.3)},
    **{
        f"plain, M starts at 1.4, divided by sqrt, s = {budget['budget']}, {resources}": gate(
            0.2, bias=0.85, compensate="sqrt", resources=resources, **budget
        )
        for budget in (HALF, THIRD)
        for resources in ("params", "all")
    },
    **{
        f"shift, now, s = 0.5, params{told}": gate(
            **{"lr": 0.2, "shift": True, "resources": "params", **HALF, **NOW, **changes}
        )
        for told, changes in {
            ", lr 0.1": {"lr": 0.1},
            "": {},
            ", lr 0.3": {"lr": 0.3},
            ", gate's lr .1": {"gate_lr": 0.1},
            ", gate's lr .01": {"gate_lr": 0.01},
            ", 20 blocks a layer": {"blocks": 20},
            ", divided by the share, M starts at 1": {"bias": 0.0, "compensate": "share"},
            ", decided per client": {"predict": "client"},
            ", smallest .3": {"smallest": 0.3},
            ", separate initial gates": {"common_init": False},
        }.items()
    },
    **{
        f"{kind}, nested, s = {budget}, {resources}": gate(
            0.2, shift=kind == "shift", gate_lr=0.01, resources=resources, budget=budget, ranking="nested", **NOW
        )
        for kind in ("plain", "shift")
        for budget in (0.5, 0.3, 0.1)
        for resources in ("params", "all")
    },
    "shift, nested, s = 0.5, params, separate initial gates": gate(
        0.2, shift=True, gate_lr=0.01, resources="params", budget=0.5, ranking="nested", common_init=False, **NOW
    ),
    "plain, s = 0.5 all, no compensation": gate(compensate="none", **HALF),
    "plain, s = 0.5 all, 1/sqrt compensation": gate(compensate="sqrt", **HALF),
    "plain, s = 0.3 all, 5 blocks a layer": gate(blocks=5, **THIRD),
    "plain, s = 0.3 all, 20 blocks a layer": gate(blocks=20, **THIRD),
}

FEMNIST: dict[str, dict[str, Any]] = {
    **{f"FedAvg, lr {lr}": {"method": "fedavg", "lr": lr} for lr in (0.03, 0.05, 0.1)},
    "FedAvg-FT": {"method": "fedavg_ft", "lr": 0.05},
    "FedPer": {"method": "fedper", "lr": 0.1},
    "HeteroFL, s = 0.5": {"method": "heterofl", "lr": 0.03, "budget": 0.5},
    **{f"plain, lr {lr}": gate(lr) for lr in (0.05, 0.1)},
    "plain, labels believed altogether": gate(0.1, ignore=0.0),
    "plain, labels not used": gate(0.1, start="random"),
    "shift, lr 0.05": gate(0.05, shift=True),
    **{
        f"plain, s = {budget}, {resources}, lr {lr}": gate(lr, resources=resources, budget=budget)
        for budget, rates in ((0.5, (0.05, 0.1)), (0.3, (0.05,)))
        for resources in ("params", "all")
        for lr in rates
    },
    "plain, s = 0.5, all, gate frozen": gate(0.1, gate_lr=0.0, budget=0.5),
    "plain, s = 0.5, all, decided per client": gate(0.05, predict="client", budget=0.5),
    **{f"gate's lr .01, lr {lr}": gate(lr, gate_lr=0.01) for lr in (0.03, 0.05, 0.1)},
    **{f"gate's lr .01, M starts at {m}": gate(0.05, gate_lr=0.01, bias=b) for m, b in ((1.4, 0.85), (1.7, 1.73))},
    **{
        f"gate's lr .01, s = {budget}, {resources}, M starts at 1.4, divided by {how}": gate(
            0.05, gate_lr=0.01, resources=resources, budget=budget, bias=0.85, compensate=how
        )
        for budget in (0.5, 0.3)
        for resources in ("params", "all")
        for how in ("share", "sqrt")
    },
    "gate's lr .01, s = 0.5, all, M starts at 1.4, divided by sqrt, lr 0.03": gate(
        0.03, gate_lr=0.01, budget=0.5, bias=0.85, compensate="sqrt"
    ),
    "gate's lr .01, s = 0.3, all, M starts at 1.4, divided by sqrt, lr 0.03": gate(
        0.03, gate_lr=0.01, budget=0.3, bias=0.85, compensate="sqrt"
    ),
    **{
        f"nested, s = {budget}, {resources}, lr {lr}": gate(
            lr, gate_lr=0.01, resources=resources, budget=budget, ranking="nested", **NOW
        )
        for budget in (0.5, 0.3, 0.1)
        for resources in ("params", "all")
        for lr in (0.1, 0.05, 0.03)
    },
    **{
        f"nested, s = 0.5, params, {told}": gate(
            **{"lr": 0.05, "gate_lr": 0.01, "resources": "params", "budget": 0.5, "ranking": "nested", **NOW, **changes}
        )
        for told, changes in {
            "32 blocks a layer": {"blocks": 32},
            "32 blocks a layer, gate's lr .03": {"blocks": 32, "gate_lr": 0.03},
            "shift": {"shift": True},
        }.items()
    },
    # Since then: layers begin with the widths of the largest product, in steps of four units, .1 of each always kept.
    **{
        f"widest product, s = {budget}, all{told}": gate(
            **{"lr": 0.05, "gate_lr": 0.01, "budget": budget, "smallest": 0.1, "ranking": "nested", **NOW, **changes}
        )
        for budget in (0.5, 0.3)
        for told, changes in {
            "": {},
            ", lr 0.07": {"lr": 0.07},
            ", shift": {"shift": True},
            ", gate's lr .03": {"gate_lr": 0.03},
            ", M starts at 1.7": {"bias": 1.73},
            ", two epochs": {"epochs": 2},
            ", two epochs, lr 0.03": {"epochs": 2, "lr": 0.03},
        }.items()
    },
    "M fixed at 1.4, gate frozen": gate(0.05, gate_lr=0.0, start="random", spread=0.0, bias=0.85),
    "gate's lr .01, shift": gate(0.05, gate_lr=0.01, shift=True),
    **{
        f"gate's lr .01, s = {budget}, {resources}": gate(0.05, gate_lr=0.01, resources=resources, budget=budget)
        for budget in (0.5, 0.3)
        for resources in ("params", "all")
    },
}
TRIALS |= {f"FEMNIST: {name}": {"data": "femnist", **trial} for name, trial in FEMNIST.items()}


def network() -> nn.Module:
    """Two convolutions of 3×3 and three linear layers."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
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


def run(trial: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """Train once; the curve and the end, on validation data, and test accuracy for the record."""
    options = dict(trial)
    method, lr, budget = options.pop("method"), options.pop("lr"), options.pop("budget", 1.0)
    name, epochs = options.pop("data", "cifar10"), options.pop("epochs", 1)
    if method == "pfedgate":
        options = {**BEFORE, **options}
    fed = federation(name, data_dir)
    femnist = name == "femnist"
    model = partial(models.build, "cnn_femnist", fed.input_shape, fed.classes) if femnist else network
    task = Task(
        model,
        example=fed.prepare(fed.part(fed.clients[0], "train").x[:32]),
        optim=Optim(lr=lr, clip=10.0),
        batch=32 if femnist else 128,
        epochs=epochs,
    )
    started, curve = time.process_time(), []
    result = engine.run(
        algorithms.build(method, task, **options),
        fed,
        engine.Options(rounds=30 if femnist else 60, budget=budget, evaluate_every=10 if femnist else 20),
        callbacks=[lambda event: curve.append(event["after_broadcast"]) if "after_broadcast" in event else None],
    )
    last = curve[-1]
    return {
        "validation": [round(100 * point["val_accuracy"], 1) for point in curve],
        "test": round(100 * last["accuracy"], 1),
        "bottom decile": round(100 * last["bottom_decile"], 1),
        "density": round(result.summary.get("density") or 1.0, 2),
        "cpu seconds": round(time.process_time() - started),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """All trials in their order."""
    lines = [
        "| trial | lr | validation at a third, two thirds, the end | test | bottom decile | density |",
        "|---|---|---|---|---|---|",
    ]
    for name, trial in TRIALS.items():
        if (done := found.get(name)) is not None:
            curve = ", ".join(f"{value:.1f}" for value in done["validation"])
            density = f"{done['density']:.2f}"
            cells = [name, trial["lr"], curve, done["test"], done["bottom decile"], density]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("--only", default="", help="trials whose name has this in it")
    told.add_argument("--data-dir", default=None, help="folder of the data set; without: PFEDGATE_DATA or the hub")
    told.add_argument("--out", type=Path, default=OUT)
    told.add_argument("--table", action="store_true", help="print what is there and stop")
    chosen = told.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = chosen.out.read_text().splitlines() if chosen.out.exists() else []
    found = {
        record["name"]: record for record in map(json.loads, lines) if record["trial"] == TRIALS.get(record["name"])
    }
    if not chosen.table:
        for name, trial in TRIALS.items():
            if chosen.only not in name or name in found:
                continue
            found[name] = {"name": name, "trial": trial, **run(trial, chosen.data_dir)}
            chosen.out.parent.mkdir(exist_ok=True)
            with chosen.out.open("a") as file:
                file.write(json.dumps(found[name]) + "\n")
            print(name, found[name]["validation"], flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
