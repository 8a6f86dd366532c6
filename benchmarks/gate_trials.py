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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gate_ideas import Tried
from pfedgate import algorithms, data, models
from pfedgate.config.sections import GONE, RENAMED
from pfedgate.core.types import Optim, Task
from pfedgate.engine import server as engine
from pfedgate.engine.endpoint import Scored
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
SEPARATE: dict[str, Any] = {"common_init": False}
TRIED: dict[str, Any] = {"method": "pfedgate_tried"}  # see gate_ideas.py

Trial = dict[str, Any]
Found = dict[str, dict[str, Any]]  # what was measured, by name


def gate(lr: float = 0.3, **options: Any) -> Trial:
    """A trial of pFedGate; `budget` is the clients', the rest its options."""
    return {"method": "pfedgate", "lr": lr, **options}


def around(start: str, usual: Trial, changes: Mapping[str, Trial]) -> dict[str, Trial]:
    """One factor at a time around a trial; what is changed completes its name."""
    return {f"{start}, {told}" if told else start: gate(**{**usual, **change}) for told, change in changes.items()}


TRIALS: dict[str, Trial] = {
    "FedPer, lr 0.3": {"method": "fedper", "lr": 0.3},
    "literally as published": gate(0.1, variant="paper", gate_lr=0.1, **PARAMS),
    "plain, prototype": gate(0.1, **FIRST),
    "plain, prototype, model's lr .3": gate(**FIRST),
    "plain, spread .1, gate's lr .03": gate(start="random"),
    "plain, + start from labels (the default)": gate(),
    "shift fixed at the labels, gate frozen": gate(shift=True, gate_lr=0.0, spread=0.0, ignore=0.0),
    "plain, labels believed altogether": gate(ignore=0.0),
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
            "separate initial gates": SEPARATE,
        },
    ),
    **around(
        "shift, nested, s = 0.5, params",
        {"lr": 0.2, "shift": True, "budget": 0.5, **PARAMS, **NESTED},
        {"": {}, "separate initial gates": SEPARATE},
    ),
    **around(
        "shift, nested, s = 0.3, all",
        {"lr": 0.2, "shift": True, "budget": 0.3, **NESTED},
        {
            "": {"resources": "all"},
            "explored, noise 1": {**TRIED, "noise": 1.0},
            "explored, noise 3": {**TRIED, "noise": 3.0},
            "explored, noise 3, gate's lr .1": {**TRIED, "noise": 3.0, "gate_lr": 0.1},
            "separate initial gates": SEPARATE,
            "every third step whole": {**TRIED, "whole_every": 3},
            "budget from 1 in 20 rounds": {**TRIED, "warm_up": 20},
            "patches": {**TRIED, "features": "patches"},
            "outputs may be dropped": {**TRIED, "keep_output": False},
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
    # Until here gradients were multiplied with (live share of inputs)^1.5; from here on as gate_ideas.STEPS says.
    **around(
        "shift, nested, s = 0.3, all, steps",
        {"lr": 0.2, "shift": True, "budget": 0.3, **NESTED, **TRIED},
        {
            "by inputs": {"steps": "inputs"},
            "by the root (the default)": {"steps": "root"},
            "by units": {"steps": "units"},
            "by the root, first layer's activations": {"features": "first layer"},
            "by the root, compensation learned by M": {"compensate": "none", "gate_lr": 0.1},
        },
    ),
    **around(
        "shift, nested, s = 0.5, params, steps",
        {"lr": 0.2, "shift": True, "budget": 0.5, **PARAMS, **NESTED, **TRIED},
        {"by the root": {"steps": "root"}, "by units": {"steps": "units"}},
    ),
    **around(
        "shift, nested, s = 0.5, params, steps, by the root, labels choose",
        {"lr": 0.2, "shift": True, "budget": 0.5, **PARAMS, **NESTED, **TRIED},
        {"half of the blocks": {"common": 0.5}, "all blocks": {"common": 0.0}},
    ),
    **around(
        "shift, nested, s = 0.3, all, steps, by the root, labels choose",
        {"lr": 0.2, "shift": True, "budget": 0.3, **NESTED, **TRIED},
        {"half of the blocks": {"common": 0.5}, "all blocks": {"common": 0.0}},
    ),
    **around(  # what it costs a client is what .3 of the narrow one costs
        "shift, nested, s = 0.15, all, steps, by the root, twice as wide",
        {"lr": 0.2, "shift": True, "budget": 0.15, "width": 2, **NESTED, **TRIED},
        {"": {}, "labels choose half of the blocks": {"common": 0.5}, "labels choose all": {"common": 0.0}},
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
            "shift, budget from 1 in 10 rounds": {**TRIED, "shift": True, "warm_up": 10},
        },
    ),
    **around(
        "s = 0.3, all, shift, steps",
        {"lr": 0.05, "budget": 0.3, "smallest": 0.1, "shift": True, **NESTED, **TRIED},
        {
            "by the root": {},
            "by units": {"steps": "units"},
            "by units, lr 0.03": {"steps": "units", "lr": 0.03},
            "by units in the first layer, lr 0.1": {"steps": "first layer", "lr": 0.1},
            "by the root, two microbatches": {"microbatches": 2},
            "by the root, four microbatches": {"microbatches": 4},
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


def network(width: int = 1) -> nn.Module:
    """Two convolutions of 3×3 and three linear layers."""
    c1, c2, f1, f2 = (width * units for units in (16, 32, 120, 84))
    return nn.Sequential(
        nn.Conv2d(3, c1, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(c1, c2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(4 * c2, f1), nn.ReLU(), nn.Linear(f1, f2), nn.ReLU(), nn.Linear(f2, 10),
    )  # fmt: skip


@lru_cache(maxsize=1)
def federation(name: str, data_dir: str | None, seed: int = 0) -> data.Federation:
    """25 writers of FEMNIST, or CIFAR-10 averaged to 16×16."""
    if name == "femnist":
        return data.load("femnist", clients=25, data_dir=data_dir, seed=seed)
    whole = data.load("cifar10", clients=1, partition="iid", data_dir=data_dir)
    parts = [whole.part(whole.clients[0], name) for name in ("train", "val", "test")]
    x = torch.cat([part.x for part in parts]).float()  # [N, 3, 32, 32], bytes
    y = torch.cat([part.y for part in parts])
    small = nn.functional.avg_pool2d(x, 2).round().byte()
    images = np.ascontiguousarray(small.permute(0, 2, 3, 1).numpy())
    return data.from_arrays(
        images, y.numpy(), partition="dirichlet", clients=40, alpha=0.4, samples=24_000, standardise=True
    )


def built(method: str, task: Task, options: dict[str, Any]) -> Any:
    """The algorithm of a trial. Trials keep the names that options had when they were run."""
    if not method.startswith("pfedgate"):
        return algorithms.build(method, task, **options)
    renamed, gone = RENAMED["algorithm.pfedgate"], GONE["algorithm.pfedgate"]
    for name in options.keys() & gone.keys():
        raise SystemExit(f"{name} is gone ({gone[name][1]}): this trial needs commit 647a3d2")
    options = {renamed.get(name, name): value for name, value in options.items()}
    if method == "pfedgate":
        return algorithms.build(method, task, **options)
    switches = {name.removeprefix("gate."): options.pop(name) for name in [*options] if name.startswith("gate.")}
    return Tried(task, gate=replace(algorithms.options("pfedgate")["gate"], **switches), **options)


def run(
    trial: Trial,
    data_dir: str | None,
    seed: int = 0,
    more: Callable[[Sequence[Scored]], dict[str, Any]] = lambda scores: {},
) -> dict[str, Any]:
    """Train once; the curve and the end, on validation data, and test accuracy for the record."""
    options = dict(trial)
    method, lr, budget = options.pop("method"), options.pop("lr"), options.pop("budget", 1.0)
    name, epochs = options.pop("data", "cifar10"), options.pop("epochs", 1)
    optim = Optim(options.pop("optim", "sgd"), lr=lr, clip=10.0)
    if method.startswith("pfedgate"):
        options = {**BEFORE, **options}
    fed = federation(name, data_dir, seed)
    femnist = name == "femnist"
    small = partial(network, options.pop("width", 1))
    model = partial(models.build, "cnn_femnist", fed.input_shape, fed.classes) if femnist else small
    task = Task(
        model,
        example=fed.prepare(fed.part(fed.clients[0], "train").x[:32]),
        optim=optim,
        batch=32 if femnist else 128,
        epochs=epochs,
    )
    started, curve = time.process_time(), []
    algorithm = built(method, task, options)
    how = engine.Options(rounds=30 if femnist else 60, budget=budget, evaluate_every=10 if femnist else 20, seed=seed)
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
        **more(result.scores),
        "density": round(result.summary.get("density") or 1.0, 2),
        "masks": len(masks),
        "cpu seconds": round(time.process_time() - started),
    }


def table(found: Found) -> str:
    """All trials in their order."""
    lines = [
        "| trial | lr | validation at a third, two thirds, the end | test | bottom decile | density | masks |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, trial in TRIALS.items():
        if (done := found.get(name)) is not None:
            curve = ", ".join(f"{value:.1f}" for value in done["validation"])
            density = f"{done['density']:.2f}"
            cells = [name, trial["lr"], curve, done["test"], done["bottom decile"], density, done.get("masks", "–")]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(
    trials: dict[str, Trial] = TRIALS,
    out: Path = OUT,
    one: Callable[[Trial, str | None], dict[str, Any]] = run,
    table: Callable[[Found], str] = table,
    told: str | None = __doc__,
) -> None:
    """The command line of a list of trials: run what is not in the file yet, print the table."""
    asked = argparse.ArgumentParser(description=told, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--only", default="", help="trials whose name has this in it")
    asked.add_argument("--data-dir", default=None, help="folder of the data set; without: PFEDGATE_DATA or the hub")
    asked.add_argument("--out", type=Path, default=out)
    asked.add_argument("--table", action="store_true", help="print what is there and stop")
    chosen = asked.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = chosen.out.read_text().splitlines() if chosen.out.exists() else []
    found = {
        record["name"]: record for record in map(json.loads, lines) if record["trial"] == trials.get(record["name"])
    }
    if not chosen.table:
        for name, trial in trials.items():
            if chosen.only not in name or name in found:
                continue
            found[name] = {"name": name, "trial": trial, **one(trial, chosen.data_dir)}
            chosen.out.parent.mkdir(exist_ok=True)
            with chosen.out.open("a") as file:
                file.write(json.dumps(found[name]) + "\n")
            print(name, found[name]["validation"], flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
