"""A client's model out of a run, as a small plain module, and into a file for other runtimes.

anna = client("runs/digits-pfedgate", "anna", budget=0.3)
anna.gated, anna.compact              the model that was scored, and the same with one choice of blocks
save(anna.compact, anna.example, "client.onnx", facts=anna.facts("CC-BY-4.0"))
print(savings(gated, x))              a gated module before and after: widths, parameters, FLOPs, ms, bytes of the file
"""

from __future__ import annotations

import importlib.util
import tempfile
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pfedgate import experiment, novel
from pfedgate.algorithms.pfedgate.personal import Personal
from pfedgate.core import measure
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import unknown
from pfedgate.core.prior import Added
from pfedgate.core.types import Budget, Card, Federation, Local, Part, Round, State, Task
from pfedgate.engine.endpoint import Endpoint, own_part
from pfedgate.engine.roster import Roster
from pfedgate.export.formats import FORMATS, NEEDS, InFile, facts, format_of, need, quantise, save
from pfedgate.gating.model import GatedModel
from pfedgate.gating.slicing.compact import compact
from pfedgate.runs import folder as runfolder
from pfedgate.runs.gates import has_gates
from pfedgate.runs.progress import scaled, size
from pfedgate.training.fit import Score, evaluate

FEW = 30  # clients whose names fit into a message


@dataclass(frozen=True)
class Client:
    """One client of a run: its gated model, and what it takes to decide once and to score."""

    gated: Personal
    task: Task
    local: Local
    test: Part
    classes: tuple[str, ...] = ()  # by name, where the data source knows names

    @cached_property
    def compact(self) -> nn.Module:
        """The small module with one choice of blocks: what the gate makes of all of the client's training data."""
        batches = None
        if self.gated.gated.gate.config.scope != "client":
            batches = map(self.local.prepare, torch.split(self.local.train.x, self.task.batch))
        small = compact(self.gated, batches)
        return small if self.gated.added is None else folded(small, self.gated.added, self.example)

    @property
    def dense(self) -> nn.Module:
        """The shared model without a gate."""
        return self.gated.gated.model

    @property
    def example(self) -> Tensor:
        """Two prepared samples: what the module takes."""
        return self.local.prepare(self.local.train.x[:1]).repeat_interleave(2, 0)

    def facts(self, licence: str = "") -> dict[str, str]:
        """What a device has to know, for `save`: how samples are prepared, and the names of classes."""
        from pfedgate import __version__

        raw, made = self.local.train.x[:1].dtype, f"pfedgate {__version__}"
        return facts(self.local.prepare, raw, classes=self.classes, licence=licence, producer=made)

    def score(self, model: nn.Module) -> Score:
        """Loss and accuracy on the client's test data."""
        return evaluate(self.task, model, self.test, self.local)


def client(
    run: str | Path | runfolder.Run, id: str, *, budget: Budget | None = None, data: Any = None, model: Any = None
) -> Client:
    """A client's gated model, from the round that was best on validation data if it was kept, else the last one.

    `budget` may be another one than in training. A run whose `data` or `model` was a Python object needs it again.
    """
    run = run if isinstance(run, runfolder.Run) else runfolder.load(run)
    plan = experiment.plan(run.recipe, data=data, model=model)
    if not has_gates(plan.algorithm):
        raise ValueError(
            f"{run.path} was trained by {plan.algorithm.name}, which has no gates, so there is nothing to leave out; "
            f"pfedgate.load({str(run.path)!r}).clients[{id!r}].model() gives the client's model"
        )
    which = "best" if (run.path / "best.safetensors").exists() else "last"
    server, store = run.server(which), run.store(which)
    card = _card(Roster.of(plan.federation, "clients", plan.options, plan.algorithm), id)
    card = card if budget is None else replace(card, budget=budget)
    round = Round(max(0, len(run.metrics) - 1), plan.options.rounds, plan.options.seed)
    local = Endpoint(plan.algorithm, plan.federation, store).local(card, round)
    private = store.get(id)
    if private is None:
        raise ValueError(f"client {id!r} never trained in {run.path}, so it has no gate: choose another one")
    return _client(plan.algorithm, plan.algorithm.send(server, card, round), private, local, plan.federation)


def newcomer(run: str | Path, gate: str | Path, *, budget: Budget | None = None) -> Client:
    """The same of a client that took no part, from the file that `pfedgate adapt` wrote."""
    adapted = novel.load(run, gate)
    algorithm, card = adapted.plan.algorithm, adapted.card
    if not has_gates(algorithm):
        raise ValueError(f"{run} was trained by {algorithm.name}, which has no gates, so there is nothing to leave out")
    local = adapted.endpoint.local(card if budget is None else replace(card, budget=budget), adapted.round)
    got = algorithm.send(adapted.server, local.card, adapted.round)
    return _client(algorithm, got, adapted.state, local, adapted.endpoint.federation)


def _client(algorithm: Algorithm, got: State, private: State, local: Local, federation: Federation) -> Client:
    own, private = own_part(algorithm, private, local)
    method = own.method(algorithm)
    predictor = method.predictor(got, method.personalise(got, private, local), local.card)
    assert isinstance(predictor, Personal)
    classes = getattr(federation, "class_names", None) or ()
    return Client(predictor, algorithm.task, local, federation.part(local.card.id, "test"), tuple(classes))


@torch.no_grad()
def folded(module: nn.Module, added: Tensor, example: Tensor) -> nn.Module:
    """A module whose outputs are larger by a value per class: in the bias of its last layer, where that gives them.

    >>> layer = nn.Linear(3, 2)
    >>> before = layer(torch.ones(1, 3)).detach()
    >>> more = folded(layer, torch.tensor([1.0, 0.0]), torch.ones(2, 3))
    >>> more is layer, (more(torch.ones(1, 3)).detach() - before).round().tolist()
    (True, [[1.0, 0.0]])
    """
    layers = [m for m in module.modules() if isinstance(m, nn.Linear) and m.bias is not None]
    if layers and layers[-1].out_features == len(added):
        wanted = module(example) + added
        layers[-1].bias.add_(added)
        if torch.allclose(module(example), wanted, atol=1e-4):
            return module
        layers[-1].bias.sub_(added)
    return Added(module, added)


def _card(roster: Roster, id: str) -> Card:
    if id not in roster.ids and len(roster) <= FEW:
        raise ValueError(unknown("client", id, roster.ids))
    return roster.card(roster.ids.index(id))


@dataclass(frozen=True)
class Savings:
    """A module before gating and after, for one batch; printed, it is a table."""

    widths: dict[str, tuple[int, int]]  # outputs of each layer that has weights
    costs: dict[
        str, tuple[float, float]
    ]  # "parameters", "FLOP a sample", "ms a batch" and the bytes of the file, by its name

    def __str__(self) -> str:
        lines = [f"{'':14}{'before':>12}{'after':>12}"]
        lines += [f"{name:14}{before:>12,}{after:>12,}" for name, (before, after) in self.widths.items()]
        for name, (before, after) in self.costs.items():
            shown = (_short(name, value) for value in (before, after))
            lines.append(f"{name:14}{''.join(f'{text:>12}' for text in shown)}{after / before:>8.0%}")
        return "\n".join(lines)


def _short(name: str, value: float) -> str:
    """A cost in its usual unit.

    >>> _short("parameters", 2171786), _short("FLOP a sample", 1.5e9), _short("ms a batch", 4.256)
    ('2,171,786', '1.5 G', '4.26')
    >>> _short("ONNX file", 8.7e6)
    '8.7 MB'
    """
    if name in ("parameters", "ms a batch"):
        return f"{value:,}" if name == "parameters" else f"{value:.3g}"
    return size(value) if name.endswith("file") else scaled(value, "").strip()


def savings(gated: GatedModel, x: Tensor) -> Savings:
    """What a gate saves on a batch: the module as it was, beside the small one that `compact` makes for the batch.

    Times are medians of forward passes taken in turn. The file is ONNX where the extra `export` is installed, else a
    `torch.export` program.

    >>> import pfedgate
    >>> from pfedgate import models
    >>> model = models.build("cnn_digits")
    >>> result = pfedgate.savings(pfedgate.gate(model, (64, 1, 8, 8), budget=0.3), torch.randn(64, 1, 8, 8))
    >>> before, after = result.costs["FLOP a sample"]
    >>> result.widths["out"], after < 0.3 * before
    ((10, 10), True)
    """
    dense, small = deepcopy(gated.model).eval(), compact(gated, x).eval()
    both = (dense, small)
    after = {name: width for name, part in small.named_modules() if (width := _width(part))}
    kind = "onnx" if all(importlib.util.find_spec(name) for name in NEEDS["onnx"][0]) else "pt2"
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        flops = [measure.flops(partial(model, x)) for model in both]
        seconds = measure.interleaved({"dense": partial(dense, x), "small": partial(small, x)})
        files = [save(model, x[:2], Path(folder) / f"{at}.{kind}").stat().st_size for at, model in enumerate(both)]
    return Savings(
        {name: (_width(dense.get_submodule(name)), width) for name, width in after.items()},
        {
            "parameters": (parameters(dense), parameters(small)),
            "FLOP a sample": (flops[0] / len(x), flops[1] / len(x)),
            "ms a batch": (1000 * seconds["dense"], 1000 * seconds["small"]),
            f"{kind.upper()} file": (files[0], files[1]),
        },
    )


def _width(part: nn.Module) -> int:
    """The outputs of a layer; 0 of what has no matrix of weights."""
    weight = getattr(part, "weight", None)
    return len(weight) if isinstance(weight, Tensor) and weight.ndim > 1 else 0


def parameters(module: nn.Module) -> int:
    """Number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


__all__ = [
    "FORMATS", "NEEDS", "Client", "InFile", "Savings", "client", "facts", "format_of", "need", "parameters", "quantise",
    "save", "savings",
]  # fmt: skip
