"""Methods that split the model: FedPer, FedRep, LG-FedAvg, FedBN. What moves, what travels, what stays."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.toys import clusters, first, local, normed_mlp, personal_digests, plain_mlp, run, small_cnn, task

from pfedgate import models as library
from pfedgate.algorithms import build
from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms.private_parts import batch_norms, head, head_layer, layers, upper
from pfedgate.core.state import digest, equal, inside, pick, split
from pfedgate.core.types import Card, Round, State, Task
from pfedgate.engine.wire import packed_size
from pfedgate.training.fit import fit

SPLIT = ("fedper", "fedrep", "lg_fedavg", "fedbn")
BODY_AND_HEAD = ("fedper", "fedrep")


def library_task(name: str, **options: Any) -> Task:
    return Task(partial(library.build, name, **options))


# -- choosing parts
@pytest.mark.parametrize("name", library.names())
def test_the_last_layer_of_every_model_of_the_library_is_its_head(name: str) -> None:
    assert head_layer(library_task(name)) == "out"
    assert {tensor.split(".")[0] for tensor in head(library_task(name), None)} == {"out"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cnn_cifar10", {"fc1", "fc2", "out"}),
        ("cnn_femnist", {"fc1", "out"}),
        ("resnet", {"out"}),
        ("text_cnn", {"out"}),
        ("mlp", {"out"}),
    ],
)
def test_the_upper_part_follows_the_convolutions(name: str, expected: set[str]) -> None:
    assert {tensor.split(".")[0] for tensor in upper(library_task(name))} == expected


def test_without_convolutions_the_upper_part_is_the_upper_half_as_in_the_official_code() -> None:
    found = upper(library_task("mlp", hidden=[9, 8, 7, 6]))
    assert {tensor.split(".")[0] for tensor in found} == {"fc3", "fc4", "out"}  # 3 of 5 layers


def test_batchnorm_is_found_by_type_with_its_statistics() -> None:
    found = batch_norms(task(normed_mlp))
    assert found == {
        f"{at}.{tensor}"
        for at in (1, 5)
        for tensor in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }


def test_a_name_may_be_a_tensor_a_layer_or_a_module_above_layers() -> None:
    resnet = library_task("resnet")
    assert parts.choose(resnet, "out.bias", "x") == {"out.bias"}
    assert parts.choose(resnet, ["out"], "x") == {"out.weight", "out.bias"}
    stage = parts.choose(resnet, ["stage3"], "x")
    assert stage
    assert all(name.startswith("stage3.") for name in stage)
    assert any("running_mean" in name for name in stage), "buffers belong to their layers"


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedper", {"head": ["ouf"]}), ("fedrep", {"head": "ouf"}), ("lg_fedavg", {"global_part": ["fc1", "ouf"]})],
)
def test_a_wrong_layer_fails_at_once_and_names_the_nearest(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"'ouf': did you mean 'out'\? Known: conv1, conv2, fc1, fc2, out"):
        build(name, library_task("cnn_cifar10"), **options)


def test_a_model_without_parameters_has_no_head() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        build("fedper", Task(torch.nn.Identity))


# -- a round
@pytest.mark.parametrize("name", SPLIT)
def test_shared_tensors_are_alike_and_private_ones_differ_after_a_round(name: str) -> None:
    federation = clusters((24, 18, 30, 10, 20))
    algorithm = build(name, task(normed_mlp))
    result = run(algorithm, federation, rounds=2)
    own = algorithm.own  # type: ignore[attr-defined]
    assert own
    assert set(result.server) == set(build("fedavg", task(normed_mlp)).init_server(0)) - own, "the server holds it"
    assert result.store is not None
    kept = [result.store.get(client) for client in federation.clients]
    for tensor in own:
        if "num_batches" not in tensor:
            values = {digest({"_": state[f"own/{tensor}"]}) for state in kept if state}
            assert len(values) == len(federation.clients), tensor


@pytest.mark.parametrize("name", SPLIT)
def test_only_what_is_shared_travels(name: str) -> None:
    algorithm = build(name, task(normed_mlp))
    one = local(clusters())
    got, private = first(algorithm, one)
    update, after = algorithm.train(got, private, one)
    own = algorithm.own  # type: ignore[attr-defined]
    assert not set(update.shared) & own
    assert set(update.shared) == set(got)
    assert set(inside("own/", after)) == own
    sent = {digest({"_": value}) for value in update.shared.values() if value.is_floating_point()}
    assert not sent & {digest({"_": value}) for value in after.values() if value.is_floating_point()}


@pytest.mark.parametrize(
    ("name", "model", "options", "share"),
    [
        # d of EMNIST 2,278,334 and CIFAR-10 256,830; the shares are the table's.
        ("fedrep", "cnn_femnist", {}, 0.944),
        ("fedrep", "cnn_cifar10", {}, 0.997),
        ("fedper", "cnn_femnist", {}, 0.944),
        ("lg_fedavg", "cnn_femnist", {}, 0.977),
        ("lg_fedavg", "cnn_cifar10", {}, 0.791),
        ("lg_fedavg", "cnn_femnist", {"global_part": "lower"}, 0.023),
        ("lg_fedavg", "cnn_cifar10", {"global_part": "lower"}, 0.209),
        ("fedbn", "cnn_cifar10", {}, 1.0),
    ],
)
def test_traffic_is_that_of_the_table(name: str, model: str, options: dict[str, Any], share: float) -> None:
    given = library_task(model)
    whole = packed_size(build("fedavg", given).init_server(0))
    algorithm = build(name, given, **options)
    down = packed_size(algorithm.send(algorithm.init_server(0), Card("a", 1), Round()))
    assert down / whole == pytest.approx(share, rel=0.05, abs=0.0006)


# -- FedRep's phases
@pytest.mark.parametrize("model", [plain_mlp, normed_mlp])
def test_fedrep_moves_the_head_on_a_frozen_body_then_the_body_under_a_frozen_head(model: Any) -> None:
    given = task(model)  # momentum 0.9 and decay on
    algorithm, one = build("fedrep", given), local(clusters())
    got, private = first(algorithm, one)
    whole, own = parts.join(got, private), parts.head(given, None)
    head_phase = fit(given, whole, one, names=parts.parameters(given, own))
    mine, body = split(head_phase.state, own.__contains__)
    assert equal(body, got), "the frozen body moved"
    assert not equal(mine, inside("own/", private))
    body_phase = fit(given, {**got, **mine}, one, names=parts.parameters(given, parts.everything(given) - own))
    update, after = algorithm.train(got, private, one)
    assert equal(inside("own/", after), mine), "the head of the first phase did not survive the second"
    assert equal(update.shared, pick(body_phase.state, got))
    assert not equal(update.shared, got)


def test_fedrep_without_body_epochs_never_changes_the_body() -> None:
    algorithm = build("fedrep", task(normed_mlp), body_epochs=0)
    result = run(algorithm, clusters((24, 18, 30, 10, 20)))
    assert equal(result.server, algorithm.init_server(0))
    assert len(set(personal_digests(algorithm, result, clusters()).values())) > 1


def test_fedrep_without_head_epochs_never_changes_heads() -> None:
    algorithm, federation = build("fedrep", task(normed_mlp), head_epochs=0), clusters((24, 18, 30, 10, 20))
    result = run(algorithm, federation)
    assert result.store is not None
    for client in federation.clients:
        kept = result.store.get(client)
        assert kept is not None
        assert equal(inside("own/", kept), inside("own/", first(algorithm, local(federation, client))[1]))
    assert not equal(result.server, algorithm.init_server(0))


def test_fedrep_head_rate_and_epochs_concern_the_head_alone() -> None:
    one = local(clusters())
    base = build("fedrep", task(), body_epochs=0)
    got, private = first(base, one)
    still = build("fedrep", task(weight_decay=0.0), own_lr=0.0).train(got, private, one)
    assert equal(inside("own/", still[1]), inside("own/", private))
    assert not equal(still[0].shared, got)
    once = base.train(got, private, one)[1]
    twice = build("fedrep", task(), body_epochs=0, head_epochs=2).train(got, private, one)[1]
    assert digest(once) != digest(twice)


# -- novel clients
@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg_fedavg"])
def test_a_novel_client_trains_its_part_from_the_common_start_on_the_frozen_rest(name: str) -> None:
    algorithm, federation = build(name, task(normed_mlp)), clusters((24, 18, 30, 10, 20))
    result, one = run(algorithm, federation), local(federation, "c4")
    before = digest(result.server)
    _, private = first(algorithm, one)
    adapted = algorithm.adapt(result.server, private, one)
    assert digest(result.server) == before
    assert set(adapted) == set(private)
    assert not equal(adapted, private)
    none = build(name, task(normed_mlp), adapt_epochs=0).adapt(result.server, private, one)
    assert equal(none, private)


def test_a_novel_client_of_fedbn_measures_statistics_and_trains_nothing() -> None:
    federation = clusters((24, 18, 30, 10, 200))
    given = replace(task(normed_mlp), batch=200)
    algorithm, one = build("fedbn", given), local(federation, "c4")
    got, private = first(algorithm, one)
    adapted = algorithm.adapt(got, private, one)
    for name in ("1.weight", "1.bias", "5.weight", "5.bias"):
        assert torch.equal(adapted[f"own/{name}"], private[f"own/{name}"])
    seen = torch.nn.functional.linear(one.train.x, got["0.weight"], got["0.bias"])
    torch.testing.assert_close(adapted["own/1.running_mean"], seen.mean(0))
    torch.testing.assert_close(adapted["own/1.running_var"], seen.var(0))


def test_fedbn_keeps_clients_without_data_as_they_are() -> None:
    federation = clusters((24, 1, 30, 10, 0))
    algorithm = build("fedbn", task(normed_mlp))
    for client in ("c1", "c4"):
        got, private = first(algorithm, local(federation, client))
        assert equal(algorithm.adapt(got, private, local(federation, client)), private)


def test_the_direction_can_be_turned_round() -> None:
    up, down = (build("lg_fedavg", task(small_cnn), global_part=part) for part in ("upper", "lower"))
    assert set(up.init_server(0)) == {"6.weight", "6.bias", "8.weight", "8.bias"}
    assert not set(up.init_server(0)) & set(down.init_server(0))
    assert set(up.init_server(0)) | set(down.init_server(0)) == {
        n for ts in layers(task(small_cnn)).values() for n in ts
    }


def test_tied_weights_belong_to_the_layer_that_is_registered_first() -> None:
    given = Task(_tied)
    assert head(given, None) == {"1.bias"}
    assert parts.everything(given) == {"0.weight", "0.bias", "1.bias"}
    algorithm = build("fedper", given)
    one = local(clusters(shape=(4,)))
    got, private = first(algorithm, one)
    update, _ = algorithm.train(got, private, one)
    assert set(update.shared) == {"0.weight", "0.bias"}


def _tied() -> torch.nn.Module:
    a, b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    b.weight = a.weight
    return torch.nn.Sequential(a, b)


# -- a rate of its own for what is never averaged
OWN_RATES = {"fedper": "own_lr", "fedrep": "own_lr", "lg_fedavg": "own_lr", "fedbn": "own_lr", "apfl": "own_lr",
             "ditto": "personal_lr"}  # fmt: skip


@pytest.mark.parametrize(("name", "option"), OWN_RATES.items())
def test_the_private_part_has_a_rate_of_its_own(name: str, option: str) -> None:
    federation, given = clusters((24, 18, 30, 10, 20)), task(normed_mlp, clip=None)
    one = local(federation)

    def trained(**options: Any) -> tuple[State, State]:
        algorithm = build(name, given, **options)
        update, private = algorithm.train(*first(algorithm, one), one)
        return update.shared, {
            n: v for n, v in private.items() if "running" not in n and "num_batches" not in n and n != "alpha"
        }

    usual, same, still, slow = (trained(**o) for o in ({}, {option: 0.1}, {option: 0.0}, {option: 0.001}))
    assert equal(usual[0], same[0])
    assert equal(usual[1], same[1])
    start = build("fedavg", given).init_server(0)
    assert all(torch.equal(value, start[tensor.partition("/")[2]]) for tensor, value in still[1].items())
    assert not equal(slow[1], still[1])
    assert not equal(slow[1], usual[1])
