"""HeteroFL: full width is FedAvg, prefixes are exact, every element is averaged over those who have it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.toys import clusters, dropout_mlp, local, normed_mlp, plain_mlp, run, scores, small_cnn, task

from pfedgate import data, models
from pfedgate.algorithms import build
from pfedgate.algorithms.heterofl import HeteroFL
from pfedgate.algorithms.heterofl.narrow import INNER, Narrow, width_for
from pfedgate.core.mergers import merge
from pfedgate.core.modules import module
from pfedgate.core.state import equal, under
from pfedgate.core.types import Card, Optim, Round, State, Task, Update
from pfedgate.engine.wire import packed_size

IMAGES = {"cnn_femnist": ((1, 28, 28), 62), "cnn_cifar10": ((3, 32, 32), 10), "cnn_cifar100": ((3, 32, 32), 100)}


def given(model: Any = plain_mlp, shape: tuple[int, ...] = (6,), **optim: Any) -> Task:
    return replace(task(model, **optim), example=torch.zeros(4, *shape))


def heterofl(of: Task, **options: Any) -> HeteroFL:
    algorithm = build("heterofl", of, **options)
    assert isinstance(algorithm, HeteroFL)
    return algorithm


def network_task(name: str) -> Task:
    shape, classes = IMAGES[name]
    return Task(partial(models.build, name, shape, classes), example=torch.zeros(2, *shape))


# -- laws
@pytest.mark.parametrize("agg_norm", ["sampled", "all"])
@pytest.mark.parametrize("model", [dropout_mlp, normed_mlp])
def test_full_width_is_fedavg_bit_for_bit(model: Any, agg_norm: str) -> None:
    federation, of = clusters((24, 18, 30, 10, 20)), given(model)
    options = {"sample": 0.6, "agg_norm": agg_norm}
    expected = run(build("fedavg", of), federation, **options)
    found = run(heterofl(of), federation, **options)
    assert equal(found.server, expected.server)
    assert scores(found) == scores(expected)


@pytest.mark.parametrize(("model", "shape"), [(plain_mlp, (6,)), (normed_mlp, (6,)), (small_cnn, (1, 6, 6))])
@pytest.mark.parametrize("width", [0.3, 0.5, 0.8])
def test_a_narrow_model_is_the_whole_one_with_outgoing_weights_zeroed(model: Any, shape: Any, width: float) -> None:
    of = given(model, shape)
    narrow, state = Narrow(of.model, of.inputs, width), build("fedavg", of).init_server(0)
    for name, value in state.items():
        if "running_mean" in name:
            value.copy_(torch.randn(value.shape))
    alive = narrow.live
    zeroed = {name: value.clone() for name, value in state.items()}
    for name, axis in narrow.plan.network.reads.items():
        positions = alive.positions(narrow.plan.axes[name][axis]) if axis in narrow.plan.axes.get(name, {}) else None
        if positions is not None:
            gone = torch.ones(zeroed[name].shape[axis], dtype=torch.bool)
            gone[torch.from_numpy(positions)] = False
            zeroed[name].index_fill_(axis, gone.nonzero()[:, 0], 0.0)
    x = torch.randn(5, *shape)
    small = module(replace(of, model=narrow), under(INNER, narrow.take(state)))
    torch.testing.assert_close(small(x), module(of, zeroed)(x), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(small(x), module(of, state)(x))


def test_flattened_maps_keep_all_positions_of_kept_channels() -> None:
    of = network_task("cnn_cifar10")
    narrow = Narrow(of.model, of.inputs, 0.5)
    state = build("fedavg", of).init_server(0)
    part = narrow.take(state)
    assert {name: tuple(v.shape) for name, v in part.items() if name.endswith("weight")} == {
        "conv1.weight": (16, 3, 5, 5),
        "conv2.weight": (32, 16, 5, 5),
        "fc1.weight": (60, 32 * 25),
        "fc2.weight": (42, 60),
        "out.weight": (10, 42),
    }
    assert torch.equal(part["fc1.weight"], state["fc1.weight"][:60, : 32 * 25])
    assert torch.equal(part["out.bias"], state["out.bias"])


@pytest.mark.parametrize(("name", "half"), [("cnn_femnist", 0.264), ("cnn_cifar10", 0.2535), ("cnn_cifar100", 0.265)])
def test_half_of_the_parameters_is_more_than_half_the_width(name: str, half: float) -> None:
    of = network_task(name)
    card = Card("a", 10, 0.5)
    narrow = heterofl(of).width(card)
    assert 0.49 <= narrow.density <= 0.51
    assert narrow.width == pytest.approx(0.693, abs=0.008)
    level = heterofl(of, level="b")
    assert level.width(card).width == 0.5
    assert level.width(card).density == pytest.approx(half, abs=1e-3)
    assert level.width(Card("b", 10, 1.0)).width == 1.0
    dense = build("fedavg", of).init_server(0)
    sent = heterofl(of).send(dense, card, Round())
    assert packed_size(sent) / packed_size(dense) == pytest.approx(0.5, rel=0.05)


def test_ten_percent_full_ninety_percent_half_comes_from_the_budgets() -> None:
    federation = clusters((24,) * 10, novel=0)
    of = given(partial(models.build, "mlp", (6,), 3, hidden=[40, 40]))
    result = run(heterofl(of), federation, rounds=1, budget={1.0: 0.1, 0.5: 0.9})
    densities = sorted(score.stats["density"] for score in result.scores)
    assert densities[-1] == 1
    assert densities[0] == densities[-2] == pytest.approx(0.5, abs=0.01)
    assert result.history[0]["density"] == pytest.approx(0.55, abs=0.01)


def test_bounds_by_resource_are_kept() -> None:
    of = network_task("cnn_cifar10")
    for resource in ("params", "flops", "activation_bytes"):
        width = width_for(of, {resource: 0.3})
        cost = Narrow(of.model, of.inputs, width).live.cost
        assert 0.25 < cost[resource] <= 0.3
    with pytest.raises(ValueError, match="latency_ms"):
        width_for(of, {"latency_ms": 3.0})


# -- the server
def updates(algorithm: HeteroFL, server: State, clients: list[tuple[Card, float, float]]) -> list[tuple[Card, Update]]:
    sent = []
    for card, value, weight in clients:
        part = algorithm.send(server, card, Round())
        sent.append((card, Update({n: torch.full_like(v, value) for n, v in part.items()}, weight)))
    return sent


def test_the_prefix_is_everybodys_mean_and_the_rest_the_wide_clients() -> None:
    algorithm = heterofl(given(partial(models.build, "mlp", (6,), 3, hidden=[8, 8])), level="b")
    server = algorithm.init_server(0)
    wide, half = Card("a", 1, 1.0), Card("b", 1, 0.4)
    merged = merge(algorithm.merger(server, Round()), updates(algorithm, server, [(wide, 1.0, 1.0), (half, 5.0, 3.0)]))
    assert (merged["fc2.weight"][:4, :4] == 4.0).all()
    assert (merged["fc2.weight"][4:] == 1.0).all()
    assert (merged["fc2.weight"][:, 4:] == 1.0).all()
    assert (merged["out.bias"] == 4.0).all()
    alone = merge(algorithm.merger(server, Round()), updates(algorithm, server, [(half, 5.0, 3.0)]))
    assert (alone["fc2.weight"][:4, :4] == 5.0).all()
    assert torch.equal(alone["fc2.weight"][4:], server["fc2.weight"][4:])
    assert torch.equal(alone["fc2.weight"][:, 4:], server["fc2.weight"][:, 4:])


def test_what_no_sampled_client_has_keeps_its_bits_over_rounds() -> None:
    of = given(normed_mlp)
    result = run(heterofl(of, level="b"), clusters((24, 18, 30, 10, 20)), budget=0.3)
    start = heterofl(of).init_server(0)
    assert torch.equal(result.server["4.weight"][4:], start["4.weight"][4:])
    assert torch.equal(result.server["1.running_mean"][4:], start["1.running_mean"][4:])
    assert not torch.equal(result.server["1.running_mean"][:4], start["1.running_mean"][:4])
    assert not torch.equal(result.server["4.weight"][:4, :4], start["4.weight"][:4, :4])


def test_an_output_is_averaged_over_those_who_have_its_label() -> None:
    algorithm = heterofl(given(), label_mask="train")
    server = algorithm.init_server(0)
    sent = updates(algorithm, server, [(Card("a", 1, 1.0), 1.0, 1.0), (Card("b", 1, 1.0), 2.0, 1.0)])
    for (_, update), labels in zip(sent, ([1, 1, 0], [0, 1, 0]), strict=True):
        update.shared["labels"] = torch.tensor(labels, dtype=torch.bool)
        assert algorithm.check(server, update) is None
    merged = merge(algorithm.merger(server, Round()), sent)
    assert merged["5.bias"][:2].tolist() == [1.0, 1.5]
    assert merged["5.bias"][2] == server["5.bias"][2]
    assert merged["5.weight"][0].unique().tolist() == [1.0]
    assert merged["0.bias"].unique().tolist() == [1.5]
    assert "labels" in str(heterofl(given()).check(server, sent[0][1]))


def test_absent_classes_get_a_logit_of_zero_not_minus_infinity() -> None:
    algorithm, one = heterofl(given(), label_mask="both"), local(clusters())
    one.train.y[:] = one.train.y.clamp(max=1)
    got = algorithm.init_server(0)
    private = algorithm.init_client(got, one)
    assert private["labels"].tolist() == [True, True, False]
    update, private = algorithm.train(got, private, one)
    assert torch.equal(update.shared["5.bias"][2] * 0, torch.tensor(0.0))
    model = algorithm.predictor(got, private, one.card)
    logits = model(torch.randn(4, 6))
    assert (logits[:, 2] == 0).all()
    assert (logits[:, :2] != 0).all()
    plain = replace(algorithm, label_mask="train").predictor(got, private, one.card)
    assert (plain(torch.randn(4, 6))[:, 2] != 0).all()


# -- options
def test_the_scaler_divides_by_the_share_of_inputs_in_training_and_prediction() -> None:
    of = given(partial(models.build, "mlp", (6,), 3, hidden=[8, 8]))
    card = Card("a", 1, 0.4)
    on, off = heterofl(of, level="b"), heterofl(of, level="b", scaler=False)
    got = on.send(on.init_server(0), card, Round())
    x = torch.randn(5, 6)
    double = {n: v * 2 if n in ("fc2.weight", "out.weight") else v for n, v in got.items()}
    torch.testing.assert_close(on.predictor(got, {}, card)(x), off.predictor(double, {}, card)(x))


def test_a_novel_client_is_scored_as_it_is_or_tuned() -> None:
    algorithm, one = heterofl(given()), local(clusters(), "c4")
    one = replace(one, card=Card("c4", one.train.n, 0.4))
    got = algorithm.send(algorithm.init_server(0), one.card, one.round)
    assert algorithm.adapt(got, {}, one) == {}
    tuned = replace(algorithm, adapt_epochs=2).adapt(got, {}, one)
    before, after = (algorithm.predictor(got, p, one.card) for p in ({}, tuned))
    assert not equal(dict(before.state_dict()), dict(after.state_dict()))


def test_narrow_clients_compute_less() -> None:
    of = given(partial(models.build, "mlp", (6,), 3, hidden=[64, 64]))
    federation = clusters((64, 64), novel=0)
    dense, half = (run(heterofl(of), federation, rounds=1, budget=b).history[0] for b in (1.0, 0.5))
    assert half["flops"] / dense["flops"] == pytest.approx(0.5, rel=0.05)


def test_it_learns_with_mixed_budgets() -> None:
    federation = data.synthetic(clients=5, samples_per_client=80, features=16, classes=4, classes_per_client=4)
    of = Task(
        partial(models.build, "mlp", federation.input_shape, federation.classes, hidden=[32]),
        optim=Optim(lr=0.1),
        batch=16,
        example=torch.zeros(2, *federation.input_shape),
    )
    result = run(heterofl(of), federation, rounds=6, evaluate_every=6, budget={1.0: 0.4, 0.3: 0.6})
    assert result.summary["accuracy"] > 0.8


def test_wrong_options_and_a_missing_example_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="did you mean 'train'"):
        heterofl(given(), label_mask="trein")
    with pytest.raises(ValueError, match="level"):
        heterofl(given(), level="f")
    with pytest.raises(ValueError, match="example"):
        heterofl(task()).send({}, Card("a", 1), Round())
