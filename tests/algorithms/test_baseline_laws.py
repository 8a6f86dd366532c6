"""Laws that every baseline must obey: no leakage, no side effects, silence of those not sampled, honest schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.toys import CLASSES, Toy, clusters, dropout_mlp, first, local, normed_mlp, plain_mlp, run, task
from torch import Tensor

from pfedgate import algorithms
from pfedgate.algorithms import build
from pfedgate.core.state import clone, digest, equal
from pfedgate.core.types import Part, Round, State

BASELINES = (
    "fedprox", "pfedme", "mean_reg_mtl", "lg_fedavg", "ditto", "fedrep", "fedper", "fedbn", "apfl", "knn_per",
    "per_fedavg",
)  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in BASELINES),
    ("apfl", {"update_alpha": "batch"}),
    ("per_fedavg", {"order": "hf"}),
]
PERSONAL = ("mean_reg_mtl", "lg_fedavg", "ditto", "fedrep", "fedper", "apfl")  # private from the start
every = pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name}{o or ''}" for name, o in CASES])
SIZES = (24, 18, 30, 10, 20)


class Spy:
    """A part that notes who looks."""

    def __init__(self, part: Part, seen: list[str], name: str) -> None:
        self._part, self._seen, self._name = part, seen, name

    @property
    def n(self) -> int:
        return self._part.n

    @property
    def x(self) -> Tensor:
        self._seen.append(self._name)
        return self._part.x

    @property
    def y(self) -> Tensor:
        self._seen.append(self._name)
        return self._part.y


@every
def test_training_again_gives_the_same_bits_and_changes_nothing_given(name: str, options: dict[str, Any]) -> None:
    """Beside the laws of all methods (tests/laws): of every variant, with dropout, whatever torch's generator says."""
    algorithm, one = build(name, task(dropout_mlp), **options), local(clusters())
    got, private = first(algorithm, one)
    before = clone(got), clone(private)
    torch.manual_seed(5)
    update, after = algorithm.train(got, private, one)
    first_bits = digest(update.shared), digest(after)
    torch.manual_seed(6)
    again, after_again = algorithm.train(got, private, one)
    algorithm.personalise(got, algorithm.adapt(got, private, one), one)
    assert first_bits == (digest(update.shared), digest(after)) == (digest(again.shared), digest(after_again))
    assert update.metrics == again.metrics
    assert equal(got, before[0])
    assert equal(private, before[1])


@every
def test_a_novel_client_leaves_the_server_alone_and_reads_its_training_part(name: str, options: dict[str, Any]) -> None:
    federation, algorithm = clusters(SIZES), build(name, task(normed_mlp), **options)
    result = run(algorithm, federation, rounds=2)
    before, seen = digest(result.server), list[str]()
    one = local(federation, "c4", Round(index=1))
    one = replace(
        one,
        train=Spy(federation.part("c4", "train"), seen, "train"),
        val=Spy(federation.part("c4", "val"), seen, "val"),
    )
    got = algorithm.send(result.server, one.card, one.round)
    private = algorithm.adapt(got, algorithm.init_client(got, one), one)
    assert digest(result.server) == before
    assert set(seen) <= {"train"}
    private = algorithm.personalise(got, private, one)
    model = algorithm.predictor(got, private, one.card)
    assert model(torch.zeros(2, 6)).shape == (2, CLASSES)
    assert len(result.novel) == 1
    needs_data = name not in ("fedprox",)
    assert ("train" in seen) == needs_data


@every
def test_clients_never_sampled_stay_as_they_were_and_are_scored(name: str, options: dict[str, Any]) -> None:
    federation, algorithm = clusters(SIZES), build(name, task(normed_mlp), **options)
    result = run(algorithm, federation, rounds=2, sample=1)
    assert len(result.scores) == len(federation.clients)
    assert result.store is not None
    trained = result.store.clients()
    assert len(trained) <= 2
    shared = build("fedavg", task(normed_mlp))
    still = [client for client in federation.clients if client not in trained]
    for client in still:
        one = local(federation, client, Round(index=1))
        got = algorithm.send(result.server, one.card, one.round)
        private = algorithm.init_client(got, one)
        if name in PERSONAL:
            fresh = {n.partition("/")[2]: v for n, v in private.items() if "/" in n}
            start = shared.init_server(0)
            assert all(torch.equal(value, start[tensor]) for tensor, value in fresh.items())
        model = algorithm.predictor(got, algorithm.personalise(got, private, one), one.card)
        with torch.no_grad():
            hits = (
                model(one.prepare(federation.part(client, "test").x)).argmax(-1).eq(federation.part(client, "test").y)
            )
        assert float(hits.float().mean()) == pytest.approx(
            next(s.test.accuracy for s in result.scores if s.client == client)
        )


@every
def test_a_round_at_rate_zero_moves_no_parameter(name: str, options: dict[str, Any]) -> None:
    """Every rate follows the schedule of the global round, also those of private branches."""
    algorithm = build(name, task(plain_mlp), **options)
    still = local(clusters(), round=Round(index=5, factor=0.0))
    got, private = first(algorithm, still)
    update, after = algorithm.train(got, private, still)
    assert all(torch.equal(value, got[tensor]) for tensor, value in update.shared.items())
    start: State = {**build("fedavg", task(plain_mlp)).init_server(0), "alpha": torch.tensor(0.5)}
    for tensor, value in after.items():
        torch.testing.assert_close(value, start[tensor.rpartition("/")[2]], rtol=0, atol=0)


@every
def test_every_rate_follows_the_schedule_of_the_round(name: str, options: dict[str, Any]) -> None:
    """Half the factor is half the rate, in every branch, whatever the client did before."""
    outer = {"pfedme": "outer_lr"}.get(name)
    digests = []
    for lr, factor in ((0.02, 0.5), (0.01, 1.0)):
        extra = {outer: lr} if outer else {}
        algorithm = build(name, task(plain_mlp, lr=lr), **options, **extra)
        one = local(clusters(), round=Round(index=5, factor=factor))
        update, private = algorithm.train(*first(algorithm, one), one)
        digests.append((digest(update.shared), digest(private)))
    assert digests[0] == digests[1]


@every
def test_other_optimisers_will_do(name: str, options: dict[str, Any]) -> None:
    result = run(build(name, task(normed_mlp, name="adam", lr=0.01), **options), clusters(SIZES), rounds=1)
    assert result.history[0]["refused"] == 0
    assert all(value.isfinite().all() for value in result.server.values())


@every
def test_averaging_over_all_clients_damps_what_is_shared(name: str, options: dict[str, Any]) -> None:
    federation, algorithm = clusters(SIZES), build(name, task(plain_mlp), **options)
    start = algorithm.init_server(0)
    everyone, sampled = (
        run(algorithm, federation, rounds=1, sample=1, agg_norm=norm, evaluate_every=0).server
        for norm in ("all", "sampled")
    )
    ratios = [
        (everyone[n] - start[n]).norm() / (sampled[n] - start[n]).norm()
        for n in start
        if start[n].is_floating_point() and not torch.equal(sampled[n], start[n])
    ]
    assert ratios or (name == "fedbn" and not start)
    share = {n / sum(SIZES[:4]) for n in SIZES[:4]}
    assert all(min(abs(float(r) - s) for s in share) < 1e-3 for r in ratios)


@pytest.mark.parametrize("name", BASELINES)
def test_what_a_paper_searched_can_be_built(name: str) -> None:
    cls = algorithms.get(name)
    assert any(year in cls.paper for year in map(str, range(2016, 2024)))
    for option, values in cls.grid.items():
        for value in values:
            build(name, task(), **{option: value})


def test_a_federation_of_one_is_enough() -> None:
    federation = Toy({"c0": clusters().parts["c0"]})
    for name in BASELINES:
        assert len(run(build(name, task()), federation, rounds=1).scores) == 1, name
