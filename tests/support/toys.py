"""Small federations, models and runs shared by the tests of algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.state import digest
from pfedgate.core.types import Card, Federation, Local, Optim, Round, State, Task
from pfedgate.engine import server as engine
from pfedgate.engine.server import Result

FEATURES, CLASSES = 6, 3
PLAIN = Optim(lr=0.1, momentum=0.0, weight_decay=0.0, clip=None)


@dataclass(frozen=True)
class Rows:
    """A part that lies in memory."""

    x: Tensor
    y: Tensor

    @property
    def n(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Toy:
    """A federation of parts by client."""

    parts: Mapping[str, Mapping[str, Rows]]
    novel: Sequence[str] = ()
    prepare: Callable[[Tensor], Tensor] = torch.Tensor.float
    budget: Any = field(default=1.0)

    @property
    def clients(self) -> list[str]:
        return [name for name in self.parts if name not in self.novel]

    def part(self, client: str, name: str) -> Rows:
        return self.parts[client][name]


def clusters(
    sizes: Sequence[int] = (24, 17, 30, 9, 20), novel: int = 1, seed: int = 0, shape: tuple[int, ...] = (FEATURES,)
) -> Toy:
    """Clients of unequal size; each shifts and labels the same clusters in its own way."""
    rng = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(CLASSES, *shape, generator=rng)

    def part(client: int, n: int) -> Rows:
        kind = torch.randint(CLASSES, (n,), generator=rng)
        x = centres[kind] + torch.randn(n, *shape, generator=rng) + 0.3 * client
        return Rows(x, (kind + client % 2) % CLASSES)

    parts = {f"c{at}": {"train": part(at, n), "val": part(at, 8), "test": part(at, 12)} for at, n in enumerate(sizes)}
    return Toy(parts, [f"c{at}" for at in range(len(sizes) - novel, len(sizes))])


def _mlp(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, CLASSES)
    )


plain_mlp = partial(_mlp, 0.0)
dropout_mlp = partial(_mlp, 0.3)
ALL_LAYERS = ("0", "3", "5")  # of both


def normed_mlp() -> nn.Module:
    """BatchNorm inside a Sequential: no name tells."""
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8), nn.BatchNorm1d(8),
        nn.ReLU(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def task(model: Callable[[], nn.Module] = dropout_mlp, **optim: Any) -> Task:
    """Momentum, decay and clipping on, several batches a round: what hides mistakes in reductions."""
    return Task(model, optim=replace(Optim(lr=0.1, momentum=0.9, weight_decay=5e-3, clip=3.0), **optim), batch=8)


class Point(nn.Module):
    """A model that is a point: its output is its parameter, for every sample."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.expand(len(x), -1)


def half_square(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (output - y).square().sum(-1)


def quadratic(lr: float = 0.1, **settings: Any) -> Task:
    """f_i(theta) = ½‖theta − c_i‖², one full batch a step."""
    return Task(Point, optim=replace(PLAIN, lr=lr), kind="regression", loss=half_square, batch=64, **settings)


CENTRES = torch.tensor([[1.0, 2.0, -1.0], [3.0, -2.0, 0.5], [-4.0, 1.0, 2.0]])
WEIGHTS = torch.tensor([4.0, 1.0, 3.0])
MEAN = (WEIGHTS[:, None] * CENTRES).sum(0) / WEIGHTS.sum()


def points() -> Toy:
    """Three clients with the centres above and as many samples as their weights say."""
    parts = {}
    for at, centre in enumerate(CENTRES):
        rows = Rows(torch.zeros(int(WEIGHTS[at]), 1), centre.repeat(int(WEIGHTS[at]), 1))
        parts[f"c{at}"] = {"train": rows, "val": rows, "test": rows}
    return Toy(parts)


def run(algorithm: Algorithm, federation: Federation, rounds: int = 3, **options: Any) -> Result:
    """Clients one after the other: stacked ones agree to 1e-7 only."""
    options = {"evaluate_every": 1, "stack": 0, "device": "cpu", **options}
    return engine.run(algorithm, federation, engine.Options(rounds=rounds, **options))


def local(federation: Federation, client: str = "c0", round: Round = Round()) -> Local:  # noqa: B008
    train, val = federation.part(client, "train"), federation.part(client, "val")
    return Local(Card(client, train.n), train, val, round, prepare=federation.prepare)


def first(algorithm: Algorithm, one: Local) -> tuple[State, State]:
    """What a client gets in its first round, and its private State."""
    got = algorithm.send(algorithm.init_server(one.round.seed), one.card, one.round)
    return got, algorithm.init_client(got, one)


def personal_digests(algorithm: Algorithm, result: Result, federation: Federation) -> dict[str, str]:
    """Digests of all clients' personal models, as they are without a further look at data."""
    assert result.store is not None
    found = {}
    for name in federation.clients:
        one = local(federation, name, Round(index=len(result.history) - 1))
        got = algorithm.send(result.server, one.card, one.round)
        private = result.store.get(name)
        if private is None:
            private = algorithm.init_client(got, one)
        found[name] = digest(dict(algorithm.predictor(got, private, one.card).state_dict()))
    return found


def scores(result: Result) -> list[tuple[str, float, float]]:
    return [(score.client, score.test.accuracy, score.test.loss) for score in result.scores]
