"""What the curious server of `reproduce leakage` is given is enough to be right where it should be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.studies import page_data

from pfedgate import experiment
from pfedgate.config.recipe import resolve
from pfedgate.core.seeds import seeded
from pfedgate.core.types import Round
from pfedgate.engine.endpoint import Endpoint, serve
from pfedgate.engine.roster import Roster
from pfedgate.engine.store import MemoryStore
from pfedgate.studies import leakage, reproduce

DIGITS = {"data": {"name": "digits", "clients": 4, "samples": 400}}


@pytest.mark.parametrize(("method", "budget"), [("fedavg", 1.0), ("pfedgate", 1.0), ("pfedgate", 0.4)])
def test_the_true_picture_explains_the_update_exactly_and_another_one_does_not(method: str, budget: float) -> None:
    """With the true weights of blocks; with weights of 1 it comes near, which is what makes gates leak."""
    over = {"algorithm.name": method, "clients.budget": budget}
    recipe = resolve(DIGITS, over, leakage.BARE, leakage.STEP)
    plan = experiment.plan(recipe)
    algorithm = plan.algorithm
    card = next(iter(Roster.of(plan.federation, "clients", plan.options, algorithm)))
    with seeded(0, "init_server"):
        server = algorithm.init_server(0)
    reach = Endpoint(algorithm, plan.federation, MemoryStore())
    local = leakage.one_sample(reach.local(card, Round()))
    seen = leakage.Seen.of(algorithm, server, serve(algorithm, server, reach.store, local), recipe.train.lr)
    x, y = local.prepare(local.train.x), local.train.y

    def apart(x: torch.Tensor, weights: torch.Tensor | None) -> float:
        return float(seen.loss(algorithm, x, y, weights).detach())

    assert apart(x, seen.weights) < 1e-4
    assert apart(x.flip(-1), seen.weights) > 0.05
    if seen.kept is not None:
        assert seen.weights is not None
        assert torch.equal(seen.kept, seen.weights > 0), "the set of tiles tells which blocks were kept"
        assert 1e-4 < apart(x, seen.kept.float()) < 0.3
        assert len(seen.places) < sum(v.numel() for v in server.values()) or budget == 1


def test_an_inversion_comes_nearer_than_its_start() -> None:
    recipe = resolve(DIGITS, {"algorithm.name": "fedavg"}, leakage.BARE, leakage.STEP)
    first, later = (leakage.pictures(recipe, 1, steps)[0] for steps in (1, 80))
    assert later["match"] < 0.6 * first["match"]
    assert later["psnr"] > first["psnr"] + 1
    assert later["truth"] == first["truth"]


def test_what_is_left_out_is_predicted_from_the_others() -> None:
    """Sets of blocks that follow from labels give them away; sets that do not, do not."""
    random = np.random.default_rng(0)
    shares = random.dirichlet(np.ones(5), size=40)
    telling, mute = (shares > 0.2).astype(float), random.integers(0, 2, (40, 5)).astype(float)
    many = shares > 0.2
    assert leakage.auc(leakage.left_out(telling, shares).ravel(), many.ravel()) > 0.9
    assert abs(leakage.auc(leakage.left_out(mute, shares).ravel(), many.ravel()) - 0.5) < 0.12


def test_the_page_says_what_was_measured(tmp_path: Path) -> None:
    files = reproduce(["leakage"], scale="tiny", out=tmp_path, over=[{"train": {"rounds": 1}}])
    assert {path.name for path in files} >= {"leakage.md", "leakage.json"}
    measured = page_data(tmp_path / "tiny/results", "leakage")["measured"]
    assert list(measured) == ["leakage-0", "leakage-1", "leakage-trained-0", "leakage-trained-1"]
    for name, rows in measured.items():
        assert list(rows) == [row.name for row in leakage.ROWS]
        for row, costs in rows.items():
            if "trained" in name:
                assert 0.4 < costs["update"] <= 1
                assert ("changed" in costs) == (row != "FedAvg")
            else:
                assert len(costs["pictures"]) == {"FedAvg": 1, leakage.CHOSEN.name: 0}.get(row, 3)
