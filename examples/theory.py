"""Predicted beside measured, on scikit-learn's digits: gradient norm, q and generalisation gap.

    python examples/theory.py                        figures and numbers into docs/explanation/theory/ (some minutes)
    python examples/theory.py --tiny --out somewhere the same, too short to mean anything (seconds)

What is drawn is explained in docs/explanation/theory.md; the formulas are in `pfedgate.theory`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import LogLocator, ScalarFormatter

import pfedgate
from pfedgate import experiment, theory
from pfedgate.core.types import Card, Round, State
from pfedgate.engine import server as engine
from pfedgate.engine.endpoint import Endpoint, Reply
from pfedgate.runs.environment import environment
from pfedgate.training.fit import evaluate

OUT = Path(__file__).resolve().parent.parent / "docs" / "explanation" / "theory"


@dataclass(frozen=True)
class Scale:
    """How much is run."""

    clients: int
    samples: int
    lengths: tuple[int, ...]  # T' of Theorem 2: one run each
    epochs: tuple[int, ...]  # local epochs: how many batches a round has
    budgets: tuple[float, ...]
    rounds: int
    seeds: tuple[int, ...]


FULL = Scale(6, 480, (8, 16, 32, 64, 128, 256), (1, 2, 4, 8), (0.2, 0.3, 0.5, 0.7, 1.0), 20, (0, 1, 2))
TINY = Scale(3, 120, (1, 2), (1, 2), (0.3, 1.0), 1, (0,))


class Watched(Endpoint):
    """The usual exchange, which also notes every client's reply and, if asked to, its gradient before each round."""

    def __init__(self, *given: Any, gradients: bool) -> None:
        super().__init__(*given)
        self.gradients = gradients
        self.squares: list[list[float]] = []  # per round, per client
        self.replies: list[Reply] = []

    def train(self, server: State, round: Round, chunks: Iterable[Sequence[Card]]) -> Iterator[Reply]:
        groups = [list(chunk) for chunk in chunks]
        if self.gradients:
            self.squares.append([self._square(server, round, card) for group in groups for card in group])
        for reply in super().train(server, round, groups):
            self.replies.append(reply)
            yield reply

    def _square(self, server: State, round: Round, card: Card) -> float:
        """‖∇_θ f(θ ⊛ g(x))‖² over the client's training data, as one batch."""
        local = self.local(card, round)
        private = self.store.get(card.id) or self.algorithm.init_client(server, local)
        model = self.algorithm.predictor(server, private, card)
        shared = list(model.gated.parameters_shared())
        loss = self.algorithm.task.loss(model(local.prepare(local.train.x)), local.train.y).mean()
        found = torch.autograd.grad(loss, shared, allow_unused=True)
        return sum(float(g.square().sum()) for g in found if g is not None)


def planned(scale: Scale, budget: float, seed: int = 0, **train: Any) -> experiment.Experiment:
    recipe = experiment.recipe_of(
        {
            "data": {"name": "digits", "clients": scale.clients, "samples": scale.samples},
            "clients": {"budget": budget},
            "train": {"rounds": scale.rounds, **train},
            "evaluate": {"every": 0},
            "run": {"seed": seed, "workers": 1},
        }
    )
    return experiment.plan(recipe)


def watch(plan: experiment.Experiment, gradients: bool = False) -> Watched:
    """Run a plan and return what was noted."""
    made: list[Watched] = []

    def exchange(*given: Any) -> Watched:
        made.append(Watched(*given, gradients=gradients))
        return made[0]

    engine.run(plan.algorithm, plan.federation, plan.options, exchange=exchange)
    return made[0]


def convergence(scale: Scale) -> dict[str, Any]:
    """Theorem 2: the mean squared gradient of runs of different length, each with η = η₀/√T'."""
    eta_0, found = 0.8, []
    for rounds in scale.lengths:
        # Plain SGD, as the theorem asks for.
        rate = theory.learning_rate(eta_0, rounds)
        plan = planned(scale, 0.5, rounds=rounds, lr=rate, momentum=0.0, weight_decay=0.0, clip=None)
        squares = watch(plan, gradients=True).squares
        clients = [statistics.mean(column) for column in zip(*squares, strict=True)]
        found.append({"rounds": rounds, "mean": statistics.mean(clients), "worst": max(clients)})
    return {"budget": 0.5, "eta_0": eta_0, "runs": found}


def from_peak(runs: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Theorem 2 speaks of long enough runs: those from the one with the largest mean on (at least two)."""
    peak = max(range(len(runs) - 1), key=lambda at: runs[at]["mean"])
    return list(runs[peak:])


def slope(runs: Sequence[dict[str, float]]) -> float:
    return theory.fit_rate([run["rounds"] for run in runs], [run["mean"] for run in runs]).slope


def uploads(scale: Scale) -> dict[str, Any]:
    """q: what clients touched in a round, beside what independent batches would have touched."""
    found = []
    for epochs in scale.epochs:
        plan = planned(scale, 0.5, epochs=epochs)
        rows = []
        for reply in watch(plan).replies:
            told, batches = reply.update.metrics, epochs * -(-reply.card.n_train // plan.algorithm.task.batch)
            independent = theory.touched_if_independent(told["density"], batches)
            rows.append((told["q"], told["density"], batches, independent))
        means = [statistics.mean(column) for column in zip(*rows, strict=True)]
        found.append({"epochs": epochs, **dict(zip(("q", "density", "batches", "independent"), means, strict=True))})
    return {"budget": 0.5, "rounds": scale.rounds, "runs": found}


def generalisation(scale: Scale) -> dict[str, Any]:
    """Theorem 1: expected minus empirical loss after training, at several budgets."""
    found = []
    for budget in scale.budgets:
        gaps, shares = [], []
        for seed in scale.seeds:
            plan = planned(scale, budget, seed)
            result = engine.run(plan.algorithm, plan.federation, plan.options)
            gaps.append(_gap(plan, result))
            shares.append(result.summary["density_training"])
        found.append(
            {
                "budget": budget,
                "density": statistics.mean(shares),
                "gap": statistics.mean(gaps),
                "deviation": statistics.pstdev(gaps),
                "bound": _bound(plan, budget),
            }
        )
    return {"rounds": scale.rounds, "seeds": len(scale.seeds), "runs": found}


def _gap(plan: experiment.Experiment, result: engine.Result) -> float:
    """|loss on test data − loss on training data| of a client's own model, the mean over clients."""
    endpoint = Endpoint(plan.algorithm, plan.federation, result.store)
    gaps = []
    for client in plan.federation.clients:
        card = Card(client, plan.federation.part(client, "train").n, plan.options.budget)
        local = endpoint.local(card, Round(plan.options.rounds - 1, plan.options.rounds, plan.options.seed))
        model = plan.algorithm.predictor(result.server, result.store.get(client), card)
        seen = evaluate(plan.algorithm.task, model, local.train, local)
        unseen = evaluate(plan.algorithm.task, model, plan.federation.part(client, "test"), local)
        gaps.append(abs(unseen.loss - seen.loss))
    return statistics.mean(gaps)


def _bound(plan: experiment.Experiment, budget: float) -> float:
    """Theorem 1 for this model and these clients, all unknown constants taken as 1."""
    with torch.random.fork_rng():
        model = plan.algorithm.task.model()
    gated = pfedgate.gate(model, plan.algorithm.task.inputs.batch(), budget)
    clients = plan.federation.clients
    bound = theory.Generalisation(gated.plan.size, gated.gate.size, len(clients), sparsity=budget)
    return bound.gap(statistics.mean(plan.federation.part(client, "train").n for client in clients))


def draw(results: dict[str, Any], out: Path) -> None:
    plt.rcParams.update({"svg.hashsalt": "pfedgate", "svg.fonttype": "none", "font.size": 9, "axes.grid": True})
    plt.rcParams.update({"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})

    figure, axes = plt.subplots(figsize=(4.8, 3.2), layout="constrained")
    runs = results["convergence"]["runs"]
    lengths = [run["rounds"] for run in runs]
    late = from_peak(runs)
    start = late[0]["mean"] * late[0]["rounds"] ** 0.5
    axes.loglog(lengths, [run["mean"] for run in runs], "o-", color="#00796b", label="measured, mean of clients")
    axes.loglog(lengths, [run["worst"] for run in runs], "^:", color="#80a8a3", label="measured, worst client")
    axes.loglog(
        [run["rounds"] for run in late],
        [theory.rate(run["rounds"], start) for run in late],
        "--",
        color="#b71c1c",
        label="1/√T′ (Theorem 2)",
    )
    axes.set(xlabel="rounds of the run, T′", ylabel="mean squared gradient norm", xticks=lengths)
    axes.set_xticklabels([str(t) for t in lengths])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.legend(frameon=False)
    _save(figure, out / "convergence.svg")

    figure, axes = plt.subplots(figsize=(4.8, 3.2), layout="constrained")
    runs = results["uploads"]["runs"]
    batches = [run["batches"] for run in runs]
    axes.plot(
        batches, [run["independent"] for run in runs], "--", color="#b71c1c", label="1 − (1 − s)ⁿ: batches differ"
    )
    axes.plot(batches, [run["q"] for run in runs], "o-", color="#00796b", label="measured q")
    axes.plot(batches, [run["density"] for run in runs], ":", color="#555", label="s: batches agree")
    axes.set(xlabel="batches of a client's round, n", ylabel="share of the model", ylim=(0, 1.05))
    axes.legend(frameon=False)
    _save(figure, out / "q.svg")

    figure, axes = plt.subplots(figsize=(4.8, 3.2), layout="constrained")
    runs = results["generalisation"]["runs"]
    budgets = [run["budget"] for run in runs]
    scaled = runs[-1]["gap"] / runs[-1]["bound"]
    gaps, deviations = ([run[name] for run in runs] for name in ("gap", "deviation"))
    axes.errorbar(budgets, gaps, deviations, fmt="o-", color="#00796b", capsize=3, label="measured")
    axes.plot(
        budgets, [run["bound"] * scaled for run in runs], "--", color="#b71c1c", label="Theorem 1, scaled at s = 1"
    )
    axes.set(xlabel="budget, s", ylabel="test loss − training loss", ylim=(0, None))
    axes.legend(frameon=False)
    _save(figure, out / "generalisation.svg")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def measure(scale: Scale) -> dict[str, Any]:
    began, where = time.perf_counter(), environment()  # now: files may change while it runs
    results = {part.__name__: part(scale) for part in (convergence, uploads, generalisation)}
    about = {"cpu": where["machine"]["cpu"], "torch": where["packages"]["torch"], "commit": where["commit"]}
    return {**results, "about": {**about, "seconds": round(time.perf_counter() - began), "scale": asdict(scale)}}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder for theory.json and the figures")
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--draw", action="store_true", help="draw theory.json again, run nothing")
    chosen = parser.parse_args(given)
    numbers = chosen.out / "theory.json"
    if chosen.draw:
        results = json.loads(numbers.read_text(encoding="utf-8"))
    else:
        results = measure(TINY if chosen.tiny else FULL)
        chosen.out.mkdir(parents=True, exist_ok=True)
        numbers.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(results, chosen.out)
    late = from_peak(results["convergence"]["runs"])
    print(f"slope from T' = {late[0]['rounds']} on: {slope(late):.2f} (Theorem 2: -0.5)")
    for run in results["uploads"]["runs"]:
        print(f"{run['batches']:5.1f} batches: q {run['q']:.2f}, if independent {run['independent']:.2f}")
    for run in results["generalisation"]["runs"]:
        print(f"s = {run['budget']}: gap {run['gap']:.3f} ± {run['deviation']:.3f}")
    print(f"{chosen.out}: {results['about']['seconds']} s, {results['about']['cpu']}")


if __name__ == "__main__":
    main()
