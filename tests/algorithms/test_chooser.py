"""A chooser: every sample under the candidate that suits it, so that a client of two kinds has two masks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.toys import Rows, Toy, run

import pfedgate
from pfedgate import algorithms, models
from pfedgate.algorithms.pfedgate import PFedGate
from pfedgate.core.types import Optim, Task
from pfedgate.engine.server import Options
from pfedgate.gating.gate.config import GateConfig
from pfedgate.runs.gates import jaccard, look

pytestmark = pytest.mark.filterwarnings("ignore:the gate has")  # the models are toys
FEATURES, CLASSES = 16, 5


def gated(candidates: int = 3, **options: Any) -> Any:
    model = models.build("mlp", (FEATURES,), 3, hidden=[40])
    gate = {
        "candidates": candidates,
        "core": 0.0,
        "ranking": "nested",
        "chooser": True,
        "pool": 0,
        "max_share": 9.0,
        **options,
    }
    return pfedgate.gate(model, torch.randn(8, FEATURES), budget={"params": 0.4}, gate=gate)


def taught(module: Any) -> Any:
    """Samples of positive, negative or no first half each prefer a candidate."""
    x = torch.randn(60, FEATURES, generator=torch.Generator().manual_seed(0)) * 0.1
    kind = torch.arange(60) % 3
    x[:, : FEATURES // 2] += (kind - 1)[:, None].float()
    losses = torch.ones(3, 60)
    losses[kind, torch.arange(60)] = 0.0
    module.gate.learn(x, losses, sharpness=5.0)
    return x, kind


def test_every_sample_goes_where_it_loses_least() -> None:
    module = gated()
    x, kind = taught(module)
    groups = module.gate.groups(x)
    assert [candidate for candidate, _ in groups] == [0, 1, 2]
    for candidate, rows in groups:
        assert (kind[rows] == candidate).float().mean() > 0.95
    masks = module.masks(x)
    assert len(masks) == 3
    assert jaccard(masks) > 0


def test_a_mixed_batch_is_its_groups_each_under_its_candidate() -> None:
    module = gated().eval()
    x, _ = taught(module)
    whole = module(x)
    for candidate, rows in module.gate.groups(x):
        module.gate.choice.fill_(candidate)
        with module.under_choice():
            torch.testing.assert_close(module(x[rows]), whole[rows])
        module.gate.choice.fill_(0)
    assert int(module.gate.choice) == 0


def test_one_sample_at_a_time_has_the_mask_it_has_in_a_batch() -> None:
    module = gated().eval()
    x, _ = taught(module)
    for candidate, rows in module.gate.groups(x):
        for row in rows[:3].tolist():
            assert module.gate.groups(x[row : row + 1]) == [(candidate, torch.tensor([0]))]


def test_training_steps_along_all_groups() -> None:
    module = gated()
    x, _ = taught(module)
    optimizer = module.optimizer(lr=0.1)
    before = [p.detach().clone() for p in module.model.parameters()]
    loss: Any = torch.nn.functional.cross_entropy(module(x), torch.arange(60) % 3)
    loss.backward()
    optimizer.step()
    kept = torch.from_numpy(sum(module.masks(x)) > 0)
    moved = (before[0] != next(module.model.parameters()).detach()).any(1)
    assert moved.any()
    assert kept.sum() > torch.from_numpy(module.masks(x)[0]).sum()


def test_in_training_nobody_is_alone() -> None:
    module = gated()
    x, kind = taught(module)
    rows = torch.cat([(kind == 0).nonzero()[:5, 0], (kind == 1).nonzero()[:1, 0]])
    assert [len(group) for _, group in module.train().gate.groups(x[rows])] == [6]
    assert len(module.eval().gate.groups(x[rows])) == 2


def test_a_chooser_needs_candidates() -> None:
    with pytest.raises(ValueError, match="chooses among candidates"):
        GateConfig(chooser=True)
    with pytest.raises(ValueError, match="chooses among candidates"):
        GateConfig(chooser=True, candidates=3, scope="sample")


# -- in a federation
def domains(seed: int = 0) -> Toy:
    """Two kinds of samples that look different and are labelled the other way round; the last clients have both."""
    rng = torch.Generator().manual_seed(seed)
    centres = 1.5 * torch.randn(CLASSES, FEATURES // 2, generator=rng)

    def part(n: int, kinds: tuple[int, ...]) -> Rows:
        kind = torch.tensor(kinds)[torch.randint(len(kinds), (n,), generator=rng)]
        cluster = torch.randint(CLASSES, (n,), generator=rng)
        x = torch.randn(n, FEATURES, generator=rng) * 0.4
        x[:, : FEATURES // 2] += centres[cluster]  # what is to be named
        x[:, FEATURES // 2 :] += (2 * kind - 1)[:, None]  # where it is from
        return Rows(x, (cluster + kind) % CLASSES)

    owners = [(0,), (1,), (0,), (1,), (0, 1), (0, 1)]
    parts = {
        f"c{at}": {name: part(n, kinds) for name, n in (("train", 80), ("val", 20), ("test", 60))}
        for at, kinds in enumerate(owners)
    }
    return Toy(parts)


TASK = Task(
    partial(models.build, "mlp", (FEATURES,), CLASSES, hidden=[20]),
    optim=Optim(lr=0.1),
    batch=16,
    example=torch.zeros(4, FEATURES),
)


def choosing(**options: Any) -> PFedGate:
    inner = {"gate.candidates": 2, "gate.core": 0.0, "gate.max_share": 9.0, "gate.pool": 0, **options}
    algorithm = algorithms.build("pfedgate", TASK, resources="params", probe=32, **inner)
    assert isinstance(algorithm, PFedGate)
    return algorithm


def test_a_client_of_two_kinds_uses_two_masks_where_that_pays() -> None:
    federation, options = domains(), {"budget": 0.3, "evaluate_every": 15, "seed": 1}
    points = ("after_broadcast", "batch_1")
    one, many = (
        run(choosing(**{"gate.chooser": on}), federation, 15, points=points, **options) for on in (False, True)
    )

    def mixed(result: Any, point: str) -> float:
        scores = [s.test.accuracy for s in result.scores if s.client in ("c4", "c5") and s.point == point]
        assert len(scores) == 2
        return float(sum(scores) / 2)

    assert mixed(many, "after_broadcast") > mixed(one, "after_broadcast") + 0.1
    assert mixed(many, "batch_1") == pytest.approx(mixed(many, "after_broadcast"), abs=0.05)
    assert many.store is not None
    algorithm = choosing(**{"gate.chooser": True})
    seen = {
        s.client: s
        for s in look(algorithm, federation, many.server, many.store, Options(rounds=15, seed=1, budget=0.3), 15)
    }
    assert all(seen[client].batches > 0 for client in ("c4", "c5"))


def test_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match="leave microbatches out"):
        algorithms.build("pfedgate", replace(TASK), microbatches=2, **{"gate.candidates": 2, "gate.chooser": True})
