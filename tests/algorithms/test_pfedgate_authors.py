"""pFedGate as in the authors' code, run on the engine: every switch alone and all together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.algorithms.toys import build, clusters, local, plain_mlp, run, task

from pfedgate.algorithms.pfedgate import PFedGate
from pfedgate.algorithms.pfedgate.tiles import BLOCKS
from pfedgate.core.state import flat, pick
from pfedgate.core.types import Card, Local
from pfedgate.gating.authors import NUMBERS, AuthorsModel

# The gate of a tiny model is larger than the paper's share of it; that is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:the gate has")


def make(*changes: str, variant: str | None = "authors") -> PFedGate:
    given = replace(task(plain_mlp), example=torch.zeros(4, 6))
    algorithm = build("pfedgate", given, variant=variant, deviations=changes)
    assert isinstance(algorithm, PFedGate)
    return algorithm


def one(budget: float = 0.5) -> Local:
    found = local(clusters())
    return replace(found, card=Card("c0", found.n, budget))


def trained(algorithm: PFedGate, budget: float = 0.5) -> tuple[Any, Any, Any, Any]:
    client = one(budget)
    got = algorithm.init_server(0)
    private = algorithm.init_client(got, client)
    update, after = algorithm.train(got, private, client)
    return got, private, update, after


@pytest.mark.parametrize("switch", [*NUMBERS, ""])
def test_every_switch_runs_alone(switch: str) -> None:
    algorithm = make(*([switch] if switch else []), variant="paper")
    got, private, update, after = trained(algorithm)
    assert algorithm.check(got, update) is None
    assert 0 < update.metrics["density"] <= 0.5
    assert any(not torch.equal(after[name], private[name]) for name in private)


def test_all_together_run_and_may_break_a_small_budget() -> None:
    result = run(make(), clusters(), rounds=2, budget=0.1, points=("after_broadcast", "after_local"))
    assert result.summary["density"] > 0.1
    assert {score.point for score in result.scores} == {"after_broadcast", "after_local"}, "both are labelled (D1)"
    half = run(make(), clusters(), rounds=1, budget=0.5)
    assert half.summary["density"] <= 0.5
    assert len(half.novel) == 1


def test_upload_is_dense_d24_and_only_then() -> None:
    for changes, dense in (((), True), (("-D24",), False)):
        algorithm = make(*changes)
        _, _, update, _ = trained(algorithm)
        assert (len(update.shared[BLOCKS]) == algorithm.tiles.count) == dense
        assert (update.metrics["q"] == 1) == dense


def test_nothing_is_sparse_in_what_changed_d25() -> None:
    for changes, everywhere in (((), True), (("-move_dropped",), False)):
        algorithm = make(*changes)
        got, _, update, _ = trained(algorithm)
        names = algorithm._workspace().names
        after = algorithm.landed(got, update)
        moved = (flat(pick(after, names)) != flat(pick(got, names))).float().mean().item()
        assert (moved > 0.99) == everywhere


def test_gate_first_then_model_d27() -> None:
    joint, apart = trained(make("-D16")), trained(make("-D16", "D27"))
    assert apart[2].metrics["flops"] == pytest.approx(2 * joint[2].metrics["flops"], rel=0.05)
    assert any(not torch.equal(joint[3][name], apart[3][name]) for name in joint[3])


def test_copies_for_prediction_keep_the_deviations() -> None:
    algorithm = make()
    got, _, _, private = trained(algorithm)
    model = algorithm.predictor(got, private, one().card)
    assert isinstance(model.gated, AuthorsModel)
    assert (model(torch.randn(8, 6)) >= 0).all(), "ReLU on the logits"


def test_wrong_names_fail_at_once() -> None:
    with pytest.raises(ValueError, match="variant='paper'"):
        make("D17", variant=None)
    with pytest.raises(ValueError, match="did you mean 'D17'"):
        make("D177")
    with pytest.raises(ValueError, match="variant"):
        make(variant="author")
