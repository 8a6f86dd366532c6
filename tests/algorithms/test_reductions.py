"""The lattice of reductions: a method with its idea switched off is FedAvg or Local, bit for bit.

With momentum, decay, clipping, dropout, clients of unequal size and partial participation, because these are what an
extra branch disturbs.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.toys import (
    ALL_LAYERS,
    CLASSES,
    FEATURES,
    clusters,
    dropout_mlp,
    local,
    normed_mlp,
    personal_digests,
    plain_mlp,
    run,
    scores,
    task,
)  # fmt: skip
from torch import nn

from pfedgate.algorithms import build
from pfedgate.algorithms.private_parts import layers
from pfedgate.core.state import equal
from pfedgate.core.types import Round

EVERY = list(ALL_LAYERS)

FEDAVG: list[tuple[str, dict[str, Any]]] = [
    ("fedprox", {"mu": 0.0}),
    ("lg_fedavg", {"global_part": EVERY}),
    ("fedrep", {"head": ()}),
    ("fedper", {"head": ()}),
    ("fedbn", {}),
    ("knn_per", {"lam": 0.0}),
    ("per_fedavg", {"alpha": 0.0, "beta": 0.1}),
    ("per_fedavg", {"alpha": 0.0, "order": "hf"}),
    ("apfl", {"alpha": 0.0, "update_alpha": "never"}),
]
SHARED: list[tuple[str, dict[str, Any]]] = [
    ("ditto", {"lam": 0.7}),
    ("ditto", {"lam": 0.0, "personal_lr": 0.3, "personal_epochs": 2}),
    ("apfl", {"alpha": 0.3}),
    ("apfl", {"alpha": 0.9, "update_alpha": "batch"}),
    ("knn_per", {}),
]
LOCAL: list[tuple[str, dict[str, Any]]] = [
    ("ditto", {"lam": 0.0}),
    ("lg_fedavg", {"global_part": ()}),
    ("fedrep", {"head": EVERY}),
    ("fedper", {"head": EVERY}),
    ("apfl", {"alpha": 1.0, "update_alpha": "never"}),
    ("mean_reg_mtl", {"mu": 0.0, "momentum": 0.9}),
]


def ids(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [f"{name}-{at}" for at, (name, _) in enumerate(cases)]


@pytest.mark.parametrize(("name", "options"), FEDAVG, ids=ids(FEDAVG))
def test_is_fedavg_when_switched_off(name: str, options: dict[str, Any]) -> None:
    federation, given = clusters(), task(dropout_mlp)
    expected = run(build("fedavg", given), federation, sample=0.6)
    found = run(build(name, given, **options), federation, sample=0.6)
    assert equal(found.server, expected.server)
    assert scores(found) == scores(expected)


@pytest.mark.parametrize(("name", "options"), SHARED, ids=ids(SHARED))
@pytest.mark.parametrize("model", [dropout_mlp, normed_mlp])
def test_the_shared_branch_is_fedavg_whatever_the_personal_one_does(
    name: str, options: dict[str, Any], model: Any
) -> None:
    federation, given = clusters((24, 18, 30, 10, 20)), task(model)
    expected = run(build("fedavg", given), federation, sample=0.6)
    found = run(build(name, given, **options), federation, sample=0.6)
    assert equal(found.server, expected.server)
    assert scores(found) != scores(expected), "the personal branch does nothing"


@pytest.mark.parametrize(("name", "options"), LOCAL, ids=ids(LOCAL))
def test_is_local_when_nothing_is_shared(name: str, options: dict[str, Any]) -> None:
    # APFL's two branches need two streams of dropout, so one of them is not the other methods'.
    federation, given = clusters(), task(plain_mlp if name == "apfl" else dropout_mlp)
    alone, method = build("local_only", given), build(name, given, **options)
    expected, found = run(alone, federation, sample=0.6), run(method, federation, sample=0.6)
    assert personal_digests(method, found, federation) == personal_digests(alone, expected, federation)
    assert scores(found) == scores(expected)


@pytest.mark.parametrize(("name", "options"), [c for c in LOCAL if c[0] in ("lg_fedavg", "fedrep", "fedper")])
def test_what_shares_nothing_sends_nothing(name: str, options: dict[str, Any]) -> None:
    record = run(build(name, task(), **options), clusters(), rounds=1).history[0]
    assert (record["bytes_up"], record["bytes_down"]) == (0, 0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("per_fedavg", {"alpha": 0.0, "order": "hf"}),
        ("fedrep", {"head": ()}),
        ("fedper", {"head": ()}),
        ("fedprox", {"mu": 0.0}),
    ],
)
def test_running_statistics_are_fedavgs_too(name: str, options: dict[str, Any]) -> None:
    federation, given = clusters((24, 18, 30, 10, 20)), task(normed_mlp)
    expected, found = run(build("fedavg", given), federation), run(build(name, given, **options), federation)
    assert any("running_mean" in tensor for tensor in found.server)
    assert equal(found.server, expected.server)


def test_lg_with_all_layers_by_any_name_is_fedavg_on_a_normed_model() -> None:
    federation, given = clusters((24, 18, 30, 10, 20)), task(normed_mlp)
    found = run(build("lg_fedavg", given, global_part=list(layers(given))), federation)
    assert equal(found.server, run(build("fedavg", given), federation).server)


def _without_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8, bias=False), nn.ReLU(), nn.Linear(8, CLASSES))


@pytest.mark.parametrize("still", [True, False])
def test_fedper_is_fedrep_only_when_the_body_gets_no_gradient(still: bool) -> None:
    federation, given = clusters(), task(_without_bias, weight_decay=0.0)
    if still:
        for client in federation.parts.values():
            client["train"].x.zero_()
    found = [run(build(name, given), federation) for name in ("fedper", "fedrep")]
    assert equal(found[0].server, found[1].server) == still
    assert (scores(found[0]) == scores(found[1])) == still


@pytest.mark.parametrize(("name", "options"), FEDAVG[:1] + FEDAVG[3:5] + FEDAVG[7:8])
def test_reductions_hold_in_the_middle_of_a_run(name: str, options: dict[str, Any]) -> None:
    """At a later round, with a scheduled rate: no counter restarts."""
    federation, given = clusters(), task(dropout_mlp)
    one = local(federation, round=Round(index=7, rounds=9, seed=3, factor=0.1))
    plain, method = (
        build("fedavg", given),
        build(name, given, **(options | {"beta": None} if "beta" in options else options)),
    )
    got = plain.init_server(3)
    assert equal(method.train(got, {}, one)[0].shared, plain.train(got, {}, one)[0].shared)
