"""Crooked clients of a simulated run: each attack does what it says, and honest clients are as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pfedgate
from pfedgate import experiment
from pfedgate.algorithms.pfedgate.tiles import BLOCKS
from pfedgate.config.recipe import resolve
from pfedgate.core.attack import ATTACKS, Attack
from pfedgate.core.state import equal
from pfedgate.core.types import Round, State, Update
from pfedgate.engine.endpoint import Endpoint
from pfedgate.engine.hostile import Altered, Hostile, triggered
from pfedgate.engine.roster import Roster
from pfedgate.engine.store import MemoryStore

SMALL: dict[str, Any] = {
    "data": {"name": "digits", "clients": 6, "samples": 300}, "model": {"name": "mlp", "hidden": [32]},
    "train": {"rounds": 2, "batch": 16}, "evaluate.every": 2, "run.workers": 1,
}  # fmt: skip
FIRST = Round(0, 1, 0)


def sent(
    kind: str, method: str = "fedavg", **attack: Any
) -> tuple[Hostile, State, dict[str, Update], dict[str, Update]]:
    """The first round with crooked clients, and the same round without."""
    plan = experiment.plan(resolve({**SMALL, "algorithm.name": method, "clients.budget": 0.5}))
    hostile = Hostile(plan.algorithm, plan.federation, MemoryStore(), attack=Attack(kind, **attack), seed=0)
    server, roster = plan.algorithm.init_server(0), Roster.of(plan.federation, "clients", plan.options)
    plain = Endpoint(plan.algorithm, plan.federation, MemoryStore())
    both = ({r.card.id: r.update for r in one.train(server, FIRST, [[c] for c in roster])} for one in (hostile, plain))
    there, here = both
    assert all(update is not None for update in here.values())
    return hostile, server, there, here  # type: ignore[return-value]


def moves(server: State, update: Update) -> torch.Tensor:
    return torch.cat([(value - server[name]).flatten() for name, value in update.shared.items()])


@pytest.mark.filterwarnings("ignore:.* ignores clients.budget")
@pytest.mark.parametrize("kind", [kind for kind in ATTACKS if kind not in ("none", "label_flip")])
def test_crooked_clients_send_what_the_attack_says_and_the_others_what_they_always_do(kind: str) -> None:
    hostile, server, there, here = sent(kind, strength=7.0)
    assert len(hostile.crooked) == 2
    for client, update in there.items():
        if client not in hostile.crooked:
            assert equal(update.shared, here[client].shared)
            continue
        if kind == "absent":
            assert update is None
            continue
        if kind == "one_block":
            assert len(update.shared) == 1
            assert float(moves(server, update).norm() / moves(server, here[client]).norm()) == pytest.approx(
                7, rel=0.01
            )
            continue
        moved, honest = moves(server, update), moves(server, here[client])
        if kind == "free_rider":
            assert not moved.any()
        elif kind == "sign_flip":
            torch.testing.assert_close(moved, -7 * honest, atol=1e-4, rtol=1e-3)
        elif kind == "scaling":
            torch.testing.assert_close(moved, 7 * honest, atol=1e-4, rtol=1e-3)
        elif kind in ("noise", "collusion"):
            assert float(moved.norm() / honest.norm()) == pytest.approx(7, rel=0.1)
        if kind == "collusion":
            assert float(moved.std()) < 1e-4 * float(moved.mean())


@pytest.mark.filterwarnings("ignore:the gate has")
@pytest.mark.parametrize("kind", ["all_blocks", "one_block"])
def test_masks_can_be_poisoned(kind: str) -> None:
    hostile, _, there, here = sent(kind, "pfedgate", strength=1.0)
    for client in hostile.crooked:
        crooked, honest = there[client].shared[BLOCKS], here[client].shared[BLOCKS]
        assert len(honest) > 1
        assert len(crooked) == (1 if kind == "one_block" else int(hostile.algorithm.tiles.count))  # type: ignore[attr-defined]


def test_data_can_be_poisoned() -> None:
    class Rows:
        n, x, y = 4, torch.rand(4, 8, 8), torch.tensor([0, 1, 2, 9])

    flipped, backdoor = Altered(Rows(), "label_flip", 10), Altered(Rows(), "backdoor", 10)
    assert flipped.y.tolist() == [9, 8, 7, 0]
    assert torch.equal(flipped.x, Rows.x)
    assert backdoor.y.tolist() == [0, 0, 1, 9]
    assert torch.equal(backdoor.x[2:], Rows.x[1::2])
    assert bool((backdoor.x[:2, :3, :3] == Rows.x[::2].max()).all())
    assert triggered(torch.zeros(2, 5)).shape == (2, 5)


def test_scores_are_those_of_honest_clients() -> None:
    done = pfedgate.run(SMALL, algorithm="fedavg", attack={"kind": "backdoor", "share": 0.3})
    assert len(done.scores) == 4
    assert 0 <= done.summary["success"] <= 1
    assert "success" not in pfedgate.run(SMALL, algorithm="fedavg").summary


def test_one_long_update_is_left_out_by_name_or_shortened() -> None:
    attack = {"kind": "scaling", "number": 1, "strength": 1000.0}
    clipped = pfedgate.run(SMALL, algorithm="fedavg", attack=attack, server={"robust": "clip"})
    assert [record["refused"] for record in clipped.history] == [1, 1]
    assert all("times as far as is usual in this round" in record["refusals"][0] for record in clipped.history)
    absent = pfedgate.run(SMALL, algorithm="fedavg", attack={"kind": "absent", "number": 1}, server={"robust": "clip"})
    apart, way = (
        torch.cat([(one[name] - clipped.server[name]).flatten() for name in one]).norm()
        for one in (absent.server, experiment.plan(resolve(SMALL, {"algorithm": "fedavg"})).algorithm.init_server(0))
    )
    assert apart < way  # the median of a round counts the crooked one, too
    guarded = pfedgate.run(SMALL, algorithm="fedavg", attack=attack)
    assert [record["clipped"] for record in guarded.history] == [1, 1]


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ({"kind": "sign_flop"}, "did you mean 'sign_flip'"),
        ({"kind": "noise", "share": 1.0}, "share is in"),
        ({"kind": "noise", "number": 6}, "nobody would be left"),
    ],
)
def test_attacks_that_cannot_be_are_refused(attack: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pfedgate.run(SMALL, algorithm="fedavg", attack=attack)
