"""What must not change bit for bit: recipes to run, modules to gate, an old run to resume.

    python tests/golden/cases.py                      digests as JSON
    python tests/golden/cases.py --only pfedgate      of the cases whose names begin so
    python tests/golden/cases.py --write              digests.json anew, for a change of results that is meant
    python tests/golden/cases.py --old-run            old-run/ anew: two of four rounds, by the code of today

How they are run, and on what machine: `digesting`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also found when this file is run by its path

from tests.golden import digesting
from tests.golden.digesting import Case

from pfedgate.core.version import RESULTS

HERE = Path(__file__).resolve().parent
DIGESTS, OLD_RUN = HERE / "digests.json", HERE / "old-run"

CNN: Case = {"model": "cnn_digits", "model.width": 0.25}
MLP: Case = {"model": "mlp", "model.hidden": [24]}
TEXT: Case = {"data": "tokens", "model.vocabulary": 40, "model.dim": 16}
BASE: Case = {
    "data": "digits", "data.clients": 4, "data.samples": 240, "data.alpha": 0.4,
    "train.rounds": 2, "train.batch": 16, "evaluate.every": 2, "run.device": "cpu", "run.workers": 1, "run.seed": 7,
}  # fmt: skip

# What single algorithms need to be run by default: layers of their kind, or less work.
NEEDS: dict[str, Case] = {
    "fedbn": {"model": "resnet", "model.width": 0.25},
    "fedmd": {"algorithm.align": 24, "algorithm.pretrain_epochs": 1, "algorithm.public": "noise"},
}


def _pfedgate(**cases: Case) -> dict[str, Case]:
    """Half of the model, where a case says nothing else."""
    common = {"algorithm": "pfedgate", "clients.budget": 0.5}
    return {f"pfedgate/{name.replace('_', '-')}": {**common, **case} for name, case in cases.items()}


VARIATIONS: dict[str, Case] = {
    **_pfedgate(
        half_of_all={},
        third_of_all={"clients.budget": 0.3},
        third_of_params={"clients.budget": 0.3, "algorithm.resources": "params"},
        params_and_flops={"clients.budget": 0.4, "algorithm.resources": "params+flops"},
        mixed={"clients.budget": [0.3, 1.0, 0.5, 0.7]},
        distribution={"clients.budget": {"0.5": 0.5, "1.0": 0.5}},
        per_resource={"clients.budget": {"params": 0.5, "flops": 0.4, "activation_bytes": 0.7}},
        shift={"algorithm.shift": True},
        upload={"algorithm.upload": 0.25},
        microbatches={"clients.budget": 0.3, "algorithm.microbatches": 4},
        flat={"algorithm.split": "flat", "algorithm.resources": "params"},
        paper={"algorithm.variant": "paper", "algorithm.resources": "params"},
        predict_client={"algorithm.predict": "client"},
        random={"algorithm.ranking": "random", "train.correction": "none"},
        chooser={"algorithm.gate.candidates": 4, "algorithm.gate.chooser": True, "clients.budget": 0.3},
        share={"algorithm.compensate": "share"},
        fraction={"clients.fraction": 0.5},
        novel={"clients.novel": 0.25},
        agg_norm={"clients.fraction": 0.5, "clients.agg_norm": "all"},
        cosine={"train.schedule": "cosine", "train.warmup": 1},
        adam={"train.optimiser": "adam", "train.lr": 0.01},
        steps={"train.steps": 3, "train.clip": 0.5, "train.drop_last": True},
        after_local={"evaluate.points": ["after_broadcast", "after_local"]},
        mlp=MLP,
        resnet={"model": "resnet", "model.width": 0.5, "data.samples": 120},
        vit={"model": "vit", "model.dim": 16, "model.ffn": 32, "model.depth": 2, "data.samples": 120},
        text={**TEXT, "model": "text_cnn", "model.channels": 24},
        gru={**TEXT, "model": "text_gru", "model.hidden": 24},
    ),
    # Clients trained together where the method can, and one by one.
    **{
        f"{name}/{word}": {**MLP, "algorithm": name, "run.stack": stack}
        for name in ("fedavg", "fedavg_ft", "knn_per", "local_only")
        for word, stack in (("stacked", 4), ("alone", 0))
    },
    "fedavg/fraction": {"algorithm": "fedavg", "clients.fraction": 0.5, "clients.agg_norm": "all"},
    "fedavg/plateau-adamw": {"algorithm": "fedavg", "train.optimiser": "adamw", "train.schedule": "plateau"},
    **{
        f"{name}/mixed": {"algorithm": name, "clients.budget": [0.3, 1.0, 0.5, 0.7]}
        for name in ("heterofl", "fedrolex", "fjord", "fiarse", "dispfl")
    },
    "fedavg/server-yogi": {"algorithm": "fedavg", "server.optimiser": "yogi"},
    "fedem/refresh": {"algorithm": "fedem", "algorithm.refresh": True, "clients.novel": 0.25},
    "per_fedavg/novel": {"algorithm": "per_fedavg", "clients.novel": 0.25, "train.clip": 1.0},
    "fedrep/epochs": {"algorithm": "fedrep", "train.epochs": 2},
    "ditto/novel": {"algorithm": "ditto", "clients.novel": 0.25},
}

# What a number bound when old-run was interrupted.
THEN = {share: dict.fromkeys(("params", "flops", "activation_bytes"), share) for share in (0.5, 0.7)}
# Residuals and the schedule's memory must survive an interruption.
RESUMED: Case = {
    **BASE, **CNN, "algorithm": "pfedgate", "train.rounds": 4, "evaluate.every": 1, "data.clients": 3,
    "clients.fraction": 0.7, "clients.budget": [THEN[0.5], 1.0, THEN[0.7]], "clients.agg_norm": "all",
    "algorithm.upload": 0.4,
    "train.schedule": "plateau", "train.patience": 1, "algorithm.shift": True,
    "algorithm.blocks": 6, "algorithm.gate_lr": 0.03,
}  # fmt: skip

# Gating alone: a module (of `digesting.MODULES`), what `gate` is told, the optimiser.
GATING: dict[str, tuple[str, dict[str, Any], str]] = {
    "gate/mlp": ("mlp", {"budget": 0.5, "gate": {"shift": True}}, "sgd"),
    "gate/mlp-flat": ("mlp", {"budget": {"params": 0.5}, "split": "flat", "blocks": 5}, "sgd"),
    "gate/mlp-paper": ("mlp", {"budget": {"params": 0.5}, "variant": "paper"}, "sgd"),
    "gate/conv": ("convolutions", {"budget": 0.5}, "sgd"),
    "gate/conv-masked": ("convolutions", {"budget": {"params": 0.5, "flops": 0.6}, "execution": "masked"}, "adam"),
    "gate/conv-one-path": ("convolutions", {"budget": 0.6, "gate": {"paths": 1}}, "sgd"),
    "gate/resnet": ("resnet", {"budget": 0.5}, "adamw"),
    "gate/vit": ("vit", {"budget": 0.6}, "adam"),
    "gate/gru": ("gru", {"budget": 0.6, "straight_through": "kept"}, "sgd"),
}


def recipes() -> dict[str, Case]:
    """All recipes by name: every algorithm as it is by default, then the variations."""
    plain = {name: {**NEEDS.get(name, {}), "algorithm": name} for name in digesting.algorithms.names()}
    cases = {**plain, **VARIATIONS}
    return {name: {**BASE, **({} if "model" in case else CNN), **case} for name, case in cases.items()}


def digests(only: str = "") -> dict[str, digesting.Digests]:
    """Of all cases whose names begin with `only`, in this process."""
    calls: dict[str, Any] = {name: (digesting.digest_of, case) for name, case in recipes().items()}
    calls |= {name: (digesting.gating, *case) for name, case in GATING.items()}
    calls |= {"old-run/whole": (digesting.digest_of, RESUMED), "old-run/resumed": (digesting.resume, OLD_RUN)}
    results: dict[str, digesting.Digests] = {}
    with digesting.reproducibly():
        for name, (call, *given) in calls.items():
            if name.startswith(only):
                try:
                    results[name] = call(*given)
                except Exception as error:  # the others are still worth comparing
                    results[name] = {"error": f"{type(error).__name__}: {error}"}
    return results


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    """This file in a process of its own, pinned to what every machine can do."""
    command = [sys.executable, str(Path(__file__).resolve()), "--here", *arguments]
    return subprocess.run(command, env=digesting.pinned(), stdout=subprocess.PIPE, text=True, check=False)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--old-run", action="store_true")
    parser.add_argument("--here", action="store_true", help="in this process, in the environment as it is")
    options = parser.parse_args()
    if not options.here:
        done = child("--old-run") if options.old_run else child("--only", "" if options.write else options.only)
        if options.write and not done.returncode and '"error"' not in done.stdout:
            DIGESTS.write_text(done.stdout)
        else:
            print(done.stdout, end="")
        return done.returncode
    if options.old_run:
        with digesting.reproducibly():
            digesting.interrupt(RESUMED, OLD_RUN, after=2)
        return 0
    document = {"results": RESULTS, "made with": digesting.versions(), "cases": digests(options.only)}
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    os.chdir(HERE)  # no case may depend on the folder that a user stands in
    sys.exit(main())
