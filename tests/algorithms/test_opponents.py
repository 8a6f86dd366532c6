"""Opponents of today: what each is without its idea, and its authors' numbers.

The figures are norms of tensors after a step of the authors' code, or of PFLlib's, run beside ours on the same batches:
PFLlib d832e76 (FedDBE, FedRoD, FedALA, FedBABU), IFCA 61e44b8. Where it says 0 the bits were the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.support.toys import (
    CLASSES,
    PLAIN,
    clusters,
    dropout_mlp,
    first,
    local,
    normed_mlp,
    plain_mlp,
    run,
    scores,
    task,
)
from torch import Tensor, nn

from pfedgate.algorithms import build, get, names
from pfedgate.algorithms.fedavg import FedAvg
from pfedgate.algorithms.private_parts import PrivatePart, everything, features, head, parameters
from pfedgate.core.mergers import merge
from pfedgate.core.modules import initial
from pfedgate.core.state import equal, inside, split
from pfedgate.core.types import Local, Round, State, Task, Update
from pfedgate.training.fit import Batch, fit

AUTHORS = Task(plain_mlp, optim=replace(PLAIN, lr=0.1), batch=8)  # plain SGD, as in their code


FEDDBE = {
    "0.weight": 1.678593, "0.bias": 0.472725, "3.weight": 1.550585, "3.bias": 0.647111, "5.weight": 0.953726,
    "5.bias": 0.316057, "own/5.mean": 0.038825,
}  # fmt: skip
FEDROD = {
    "0.weight": 1.648066, "0.bias": 0.479487, "3.weight": 1.515517, "3.bias": 0.657729, "5.weight": 0.917332,
    "5.bias": 0.391092, "own/5.personal.weight": 0.908356, "own/5.personal.bias": 0.301042,
}  # fmt: skip
FEDBABU = {"0.weight": 1.6483, "0.bias": 0.48265, "3.weight": 1.520093, "3.bias": 0.640587}
FEDBABU_TUNED = {
    "0.weight": 1.699558, "0.bias": 0.470466, "3.weight": 1.575545, "3.bias": 0.62979, "5.weight": 1.005504,
    "5.bias": 0.362921,
}  # fmt: skip
IFCA = {
    "0/0.weight": 1.671645, "0/0.bias": 0.487511, "0/3.weight": 1.541765, "0/3.bias": 0.650534, "0/5.weight": 0.958257,
    "0/5.bias": 0.365202, "1/0.weight": 1.618953, "1/0.bias": 0.658164, "1/3.weight": 1.37551, "1/3.bias": 0.586791,
    "1/5.weight": 1.037493, "1/5.bias": 0.340881,
}  # fmt: skip
FEDALA = {
    "0.weight": 2.661892, "0.bias": 0.891407, "3.weight": 2.572691, "3.bias": 0.878832, "5.weight": 1.582633,
    "5.bias": 0.41081, "weights/5.weight": 3.345693, "weights/5.bias": 1.701146,
}  # fmt: skip


def norms(state: State) -> dict[str, float]:
    return {name: float(value.double().norm()) for name, value in state.items() if value.is_floating_point()}


def check_figures(state: State, figures: dict[str, float]) -> None:
    """The norms of these tensors, to 1e-6 as printed beside the authors' code."""
    assert {name: norms(state)[name] for name in figures} == pytest.approx(figures, abs=2e-6)


def model_of(server: State) -> State:
    """Without what FedDBE keeps beside the model."""
    return {name: value for name, value in server.items() if not name.startswith("dbe/")}


# -- FedDBE
@pytest.mark.parametrize("model", [dropout_mlp, normed_mlp])
def test_feddbe_without_mean_and_pull_is_fedavg(model: Any) -> None:
    federation, given = clusters((24, 18, 30, 10, 20)), task(model)
    expected = run(build("fedavg", given), federation, sample=0.6)
    found = run(build("feddbe", given, kappa=0.0, own_lr=0.0), federation, sample=0.6)
    assert equal(model_of(found.server), expected.server)
    assert scores(found) == scores(expected)


def test_feddbe_pulls_the_mean_of_features_to_the_consensus() -> None:
    away = []
    for kappa in (0.0, 1.0, 50.0):
        algorithm, one = build("feddbe", task(plain_mlp, momentum=0.0), kappa=kappa, own_lr=0.0), local(clusters())
        got, private = first(algorithm, one)
        got = {**got, "dbe/consensus": torch.full((7,), 0.3), "dbe/ready": torch.tensor(True)}
        update, private = algorithm.train(got, private, replace(one, round=Round(index=1)))
        model = algorithm.predictor(update.shared, private, one.card)
        with torch.no_grad():
            entered, _ = features(model, "5", one.train.x)
        away.append(float((entered.mean(0) - 0.3).square().mean()))
    assert away == sorted(away, reverse=True)
    assert away[-1] < 0.9 * away[0]


def test_feddbe_consensus_is_the_mean_of_the_first_round_for_good() -> None:
    federation, algorithm = clusters(), build("feddbe", task(plain_mlp))
    rounds = [run(algorithm, federation, rounds=count).server["dbe/consensus"] for count in (1, 3)]
    assert torch.equal(*rounds)
    assert rounds[0].abs().sum() > 0


def test_feddbe_step_is_pfllibs() -> None:
    algorithm, one = build("feddbe", AUTHORS, kappa=5.0, momentum=0.3), local(clusters())
    got, private = first(algorithm, one)
    update, private = algorithm.train(got, private, one)
    got = {**got, **update.shared, "dbe/consensus": update.shared["dbe/consensus"] + 0.1}
    update, private = algorithm.train(got, private, replace(one, round=Round(index=1)))
    check_figures({**update.shared, **private}, FEDDBE)  # apart by 0


# -- FedRoD
@dataclass(frozen=True)
class Balanced(FedAvg):
    """FedAvg with the balanced softmax."""

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        counts = torch.bincount(local.train.y, minlength=CLASSES).float().log()

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            return self.task.loss(model(batch.x) + counts, batch.y).mean()

        return Update(fit(self.task, got, local, objective=objective).state, local.n), {}


@pytest.mark.parametrize("model", [dropout_mlp, normed_mlp])
def test_fedrod_without_its_private_head_is_fedavg_with_a_balanced_loss(model: Any) -> None:
    federation, given = clusters((24, 18, 30, 10, 20)), task(model)
    found = run(build("fedrod", given), federation, sample=0.6)
    expected = run(Balanced(given), federation, sample=0.6)
    assert equal(found.server, expected.server)
    assert scores(found) != scores(expected), "the private head does nothing"


def test_fedrod_scores_the_sum_of_both_heads() -> None:
    algorithm, one = build("fedrod", task(plain_mlp)), local(clusters())
    got, private = first(algorithm, one)
    x = one.val.x
    body = plain_mlp()
    body.load_state_dict(got)
    twice = algorithm.predictor(got, private, one.card)(x)
    torch.testing.assert_close(twice, 2 * body(x))  # the private head starts as a copy


@pytest.mark.parametrize("name", [name for name in names() if issubclass(get(name), PrivatePart)])
def test_what_a_method_does_not_add_begins_as_in_fedavg(name: str) -> None:
    """Also with a larger start of hidden layers: a second head is no further layer, a norm in a valve none of ours."""
    large = replace(task(plain_mlp), initial_scale=1.4)
    algorithm, plain = build(name, large), initial(large, 0)
    got = algorithm.init_server(0)
    begun = {**got, **inside("own/", algorithm.init_client(got, local(clusters())))}
    assert equal({tensor: begun[tensor] for tensor in plain}, plain)


def test_fedrod_step_is_pfllibs() -> None:
    algorithm, one = build("fedrod", AUTHORS), local(clusters())
    update, private = algorithm.train(*first(algorithm, one), one)
    check_figures({**update.shared, **private}, FEDROD)  # apart by 0


# -- FedBABU
@dataclass(frozen=True)
class FrozenHead(FedAvg):
    """FedAvg that never trains the head."""

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        body = parameters(self.task, everything(self.task) - head(self.task, None))
        return Update(fit(self.task, got, local, names=body).state, local.n), {}


@pytest.mark.parametrize("model", [dropout_mlp, normed_mlp])
def test_fedbabu_before_fine_tuning_is_fedavg_with_a_frozen_head(model: Any) -> None:
    federation, given = clusters((24, 18, 30, 10, 20)), task(model)
    found = run(build("fedbabu", given, tune_epochs=0), federation, sample=0.6)
    expected = run(FrozenHead(given), federation, sample=0.6)
    assert equal(found.server, split(expected.server, found.server.__contains__)[0])
    assert scores(found) == scores(expected)
    assert scores(run(build("fedbabu", given), federation, sample=0.6)) != scores(expected)


@pytest.mark.parametrize(("part", "moved"), [("all", {"0", "3", "5"}), ("head", {"5"}), ("body", {"0", "3"})])
def test_fedbabu_tunes_the_part_it_is_told(part: str, moved: set[str]) -> None:
    algorithm, one = build("fedbabu", task(plain_mlp), tune_part=part), local(clusters())
    got, private = first(algorithm, one)
    before = dict(algorithm.predictor(got, private, one.card).state_dict())
    tuned = inside("tuned/", algorithm.personalise(got, private, one))
    assert {name.split(".")[0] for name in tuned if not torch.equal(tuned[name], before[name])} == moved


def test_fedbabu_round_and_fine_tuning_are_pfllibs() -> None:
    algorithm, one = build("fedbabu", AUTHORS, tune_epochs=2), local(clusters())
    got, private = first(algorithm, one)
    update, private = algorithm.train(got, private, one)
    check_figures(update.shared, FEDBABU)  # apart by 0
    check_figures(inside("tuned/", algorithm.personalise(update.shared, private, one)), FEDBABU_TUNED)  # by 0


# -- IFCA
def test_ifca_with_one_cluster_is_fedavg() -> None:
    federation, given = clusters(), task(dropout_mlp)
    expected = run(build("fedavg", given), federation, sample=0.6)
    for share in (False, True):
        found = run(build("ifca", given, clusters=1, share=share), federation, sample=0.6)
        assert equal({name.removeprefix("0/"): value for name, value in found.server.items()}, expected.server)
        assert scores(found) == scores(expected)


def test_ifca_tells_two_kinds_of_clients_apart() -> None:
    """Clients with an odd number name the same clusters differently."""
    federation = clusters((40,) * 6, novel=2)
    for share in (False, True):
        algorithm = build("ifca", task(plain_mlp, clip=None), clusters=2, share=share)
        result = run(algorithm, federation, rounds=15, evaluate_every=15)
        assert result.store is not None
        kinds = [int((result.store.get(f"c{at}") or {})["cluster"]) for at in range(4)]
        assert kinds[0] == kinds[2] != kinds[1] == kinds[3]
        assert result.summary["novel"]["accuracy"] > 0.8


def test_ifca_sends_one_model_up_and_one_body_if_it_is_shared() -> None:
    one = local(clusters())
    for share, up, down in ((False, 6, 18), (True, 6, 4 + 3 * 2)):
        algorithm = build("ifca", task(plain_mlp), clusters=3, share=share)
        got, private = first(algorithm, one)
        assert (len(algorithm.train(got, private, one)[0].shared), len(got)) == (up, down)


def test_ifca_round_is_the_authors() -> None:
    federation = clusters((24,) * 4, novel=0)
    algorithm = build("ifca", replace(AUTHORS, batch=64, epochs=3), clusters=2)
    server, clients = algorithm.init_server(0), [local(federation, f"c{at}") for at in range(4)]
    sent = [algorithm.train(server, {}, one) for one in clients]
    assert [int(private["cluster"]) for _, private in sent] == [1, 0, 1, 0]
    merged = merge(
        algorithm.merger(server, Round()), [(one.card, update) for one, (update, _) in zip(clients, sent, strict=True)]
    )
    check_figures(merged, IFCA)  # apart by 6e-8


# -- FedALA
def test_fedala_with_weights_of_one_is_fedavg() -> None:
    federation, given = clusters((24, 18, 30, 10, 20)), task(normed_mlp)
    expected = run(build("fedavg", given), federation, sample=0.6)
    found = run(build("fedala", given, eta=0.0), federation, sample=0.6)
    assert equal(found.server, expected.server)
    assert scores(found) == scores(expected)
    assert scores(run(build("fedala", given), federation, sample=0.6)) != scores(expected)


def test_fedala_mixes_upper_layers_between_the_last_model_and_the_received_one() -> None:
    algorithm, one = build("fedala", task(plain_mlp), layers=2, eta=5.0), local(clusters())
    got = algorithm.init_server(0)
    last = {f"last/{n}": v + 1 for n, v in got.items() if n[0] in "35"}
    mixed, private, flops = algorithm.mix(got, last, one)  # type: ignore[attr-defined]
    assert flops > 0
    moved = {name for name in got if not torch.equal(mixed[name], got[name])}
    assert "5.weight" in moved <= {name.removeprefix("last/") for name in last}
    for name in private:
        if name.startswith("weights/"):
            assert 0 <= float(private[name].min()) <= float(private[name].max()) <= 1


def test_fedala_mixing_is_pfllibs() -> None:
    algorithm, one = build("fedala", replace(AUTHORS, batch=64), share=1.0, eta=2.0), local(clusters())
    start, rng = algorithm.init_server(0), torch.Generator().manual_seed(3)
    got = {name: value + 0.3 * torch.randn(value.shape, generator=rng) for name, value in start.items()}
    private = {f"last/{name}": start[name] for name in ("5.weight", "5.bias")}
    _, private, _ = algorithm.mix(got, private, one)  # type: ignore[attr-defined]
    later = {name: value + 0.1 for name, value in got.items()}
    mixed, private, _ = algorithm.mix(later, private, one)  # type: ignore[attr-defined]
    check_figures({**mixed, **private}, FEDALA)  # apart by 6e-8
