"""pFedHN: differences of models are gradients of the hypernetwork; one product per client; novel vectors only."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.toys import clusters, local, normed_mlp, plain_mlp, run, task
from torch.func import functional_call

from pfedgate import data, models
from pfedgate.algorithms import build
from pfedgate.algorithms.pfedhn import HYPER, MOMENTUM, OVER, VECTOR, PFedHN, _place, generate, new_hyper, pull_back
from pfedgate.core.mergers import merge
from pfedgate.core.modules import module
from pfedgate.core.state import equal, flat, inside, shapes, unflat
from pfedgate.core.types import Card, Optim, Round, State, Task, Update
from pfedgate.engine.wire import packed_size
from pfedgate.training.fit import fit, loop


def pfedhn(of: Task | None = None, **options: Any) -> PFedHN:
    algorithm = build("pfedhn", of or task(plain_mlp), **{"vector": 4, "hidden": 10, **options})
    assert isinstance(algorithm, PFedHN)
    return algorithm


# -- the hypernetwork
def test_models_start_around_the_common_one() -> None:
    given = task(plain_mlp)
    algorithm = pfedhn(given, spread=0.1)
    start, server = build("fedavg", given).init_server(0), algorithm.init_server(0)
    for name in ("a", "b"):
        sent = algorithm.send(server, Card(name, 1), Round())
        apart = (flat(sent) - flat(start)).std() / flat(start).std()
        assert 0.02 < apart < 0.5
    assert equal(pfedhn(given, spread=0.0).send(pfedhn(given, spread=0.0).init_server(0), Card("a", 1), Round()), start)


def test_the_product_is_the_gradient_of_an_inner_product() -> None:
    hyper = new_hyper({"w": torch.randn(5), "b": torch.zeros(2)}, 3, [4, 4], 1.0, torch.Generator().manual_seed(0))
    hyper = {name: value.double() for name, value in hyper.items()}
    vector, difference = torch.randn(3).double(), torch.randn(7).double()
    of_hyper, of_vector = pull_back(hyper, vector, difference)
    step = 1e-6
    for at in range(3):
        moved = vector.clone()
        moved[at] += step
        slope = (generate(hyper, moved) - generate(hyper, vector)) @ difference / step
        assert float(of_vector[at]) == pytest.approx(float(slope), rel=1e-4, abs=1e-7)
    whole = flat(hyper)
    for at in (0, 5, 20, len(whole) - 1):
        moved = whole.clone()
        moved[at] += step
        slope = (generate(unflat(moved, shapes(hyper)), vector) - generate(hyper, vector)) @ difference / step
        assert float(of_hyper[at]) == pytest.approx(float(slope), rel=1e-4, abs=1e-7)


# -- laws
def test_one_plain_step_is_the_end_to_end_gradient() -> None:
    """S = 1, plain SGD: H's gradient is the client's rate times dL(H(v))/dH."""
    given = replace(task(plain_mlp, lr=0.3, momentum=0.0, weight_decay=0.0, clip=None), steps=1)
    algorithm, one = pfedhn(given), local(clusters())
    server = algorithm.init_server(0)
    got = algorithm.send(server, one.card, one.round)
    update, _ = algorithm.train(got, {}, one)
    hyper = inside(HYPER, server)
    vector = algorithm.vector_of(server, one.card, one.round)
    found, of_vector = pull_back(hyper, vector, flat(got) - flat(update.shared))

    leaves = {name: value.clone().requires_grad_() for name, value in hyper.items()}
    v = vector.clone().requires_grad_()
    seen: list[Any] = []

    def see(batch: Any) -> torch.Tensor:
        seen.append(batch)
        return torch.zeros(())

    loop(given, one, see)
    output = functional_call(module(given, got), algorithm._model(leaves, v), (seen[0].x,))
    given.loss(output, seen[0].y).mean().backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([leaf.grad.reshape(-1) for leaf in leaves.values()])  # type: ignore[union-attr]
    torch.testing.assert_close(found, 0.3 * expected, rtol=1e-3, atol=1e-6)
    assert v.grad is not None
    torch.testing.assert_close(of_vector, 0.3 * v.grad, rtol=1e-3, atol=1e-6)

    after = merge(algorithm.merger(server, one.round), [(one.card, update)])
    plain = pfedhn(given, server_momentum=0.0, server_decay=0.0, server_lr=1.0, server_clip=1e9)
    moved = merge(plain.merger(server, one.round), [(one.card, update)])
    torch.testing.assert_close(flat(inside(HYPER, server)) - flat(inside(HYPER, moved)), found, rtol=1e-3, atol=1e-6)
    nets = [module(given, algorithm.send(state, one.card, one.round)) for state in (server, after)]
    before, then = (given.loss(net(one.train.x), one.train.y).mean().item() for net in nets)
    assert then < before, "the wrong sign"


def test_a_linear_network_of_unit_vectors_keeps_clients_apart() -> None:
    federation = clusters((24, 24, 24), novel=0)
    algorithm = pfedhn(vector=3, hidden_layers=0, server_decay=0.0, server_momentum=0.0, server_lr=1.0)
    server = algorithm.init_server(0)
    for at, name in enumerate(federation.clients):
        server[_place(Card(name, 1))] = torch.eye(3)[at]
    one = local(federation, "c1")
    update, _ = algorithm.train(algorithm.send(server, one.card, one.round), {}, one)
    after = merge(algorithm.merger(server, one.round), [(one.card, update)])
    columns, before = after[HYPER + "out.weight"], server[HYPER + "out.weight"]
    assert torch.equal(columns[:, [0, 2]], before[:, [0, 2]])
    assert not torch.equal(columns[:, 1], before[:, 1])
    common = after[HYPER + "out.bias"] - server[HYPER + "out.bias"]
    other = local(federation, "c2").card
    change = flat(algorithm.send(after, other, one.round)) - flat(algorithm.send(server, other, one.round))
    torch.testing.assert_close(change, common, rtol=1e-4, atol=1e-6)


def test_only_the_rounds_vectors_move() -> None:
    algorithm, federation = pfedhn(), clusters()
    server = algorithm.init_server(0)
    ones = [local(federation, name) for name in ("c0", "c1", "c2")]
    sent = [(one.card, algorithm.train(algorithm.send(server, one.card, one.round), {}, one)[0]) for one in ones]
    first = merge(algorithm.merger(server, Round(0, 5)), sent)
    second = merge(algorithm.merger(first, Round(1, 5)), sent[:1])
    for card in (ones[1].card, ones[2].card):
        assert torch.equal(first[_place(card)], second[_place(card)])
    assert not torch.equal(first[_place(ones[0].card)], second[_place(ones[0].card)])
    assert sum(name.startswith(VECTOR) for name in second) == 3
    assert any(name.startswith(MOMENTUM) for name in second)


def test_clients_train_what_they_got_as_in_fedavg() -> None:
    algorithm, one = pfedhn(), local(clusters())
    got = algorithm.send(algorithm.init_server(0), one.card, one.round)
    assert equal(algorithm.train(got, {}, one)[0].shared, fit(algorithm.task, got, one).state)


def test_buffers_are_averaged() -> None:
    federation = clusters((24, 18, 30, 10, 20))
    given = task(normed_mlp)
    result = run(pfedhn(given), federation, rounds=2)
    assert float(result.server["buffer/1.num_batches_tracked"]) > 0
    assert result.server["buffer/1.running_mean"].any()


# -- novel clients
def test_a_novel_client_learns_its_vector_only() -> None:
    algorithm, federation = pfedhn(), clusters()
    result = run(algorithm, federation, rounds=2)
    assert bool(result.server[OVER])
    one = local(federation, "c4", Round(1, 2))
    got = algorithm.send(result.server, one.card, one.round)
    before = {name: value.clone() for name, value in got.items()}
    adapted = algorithm.adapt(got, {}, one)
    assert set(adapted) == {"vector"}
    assert equal(got, before)
    assert adapted["vector"].shape == (4,)
    start, end = (algorithm.predictor(got, private, one.card) for private in ({}, adapted))
    losses = [algorithm.task.loss(m(one.train.x), one.train.y).mean().item() for m in (start, end)]
    assert losses[1] < losses[0]


def test_the_hypernetwork_travels_to_newcomers_and_only_when_training_is_over() -> None:
    algorithm, federation = pfedhn(), clusters()
    result = run(algorithm, federation, rounds=2)
    known, new = Card("c0", 1), Card("c4", 1)
    assert not any(name.startswith(HYPER) for name in algorithm.send(result.server, known, Round(1, 2)))
    assert any(name.startswith(HYPER) for name in algorithm.send(result.server, new, Round(1, 2)))
    going_on = {**result.server, OVER: torch.tensor(False)}
    assert not any(name.startswith(HYPER) for name in algorithm.send(going_on, new, Round(1, 2)))


# -- whole runs
def test_conflicting_labels() -> None:
    federation = data.conflicting(clients=6, samples_per_client=60, novel=0.3)
    model = partial(models.build, "mlp", federation.input_shape, federation.classes, hidden=[16])
    algorithm = build("pfedhn", Task(model, optim=Optim(lr=0.1), batch=16))
    result = run(algorithm, federation, rounds=15, evaluate_every=15)
    assert result.summary["accuracy"] > 0.9
    assert result.summary["novel"]["accuracy"] > 0.9


def test_traffic_is_a_model_each_way() -> None:
    given = Task(partial(models.build, "mlp", (16,), 4, hidden=[64]))
    algorithm = build("pfedhn", given)
    dense: State = build("fedavg", given).init_server(0)
    assert packed_size(algorithm.send(algorithm.init_server(0), Card("a", 1), Round())) == packed_size(dense)
    hyper = inside(HYPER, algorithm.init_server(0))
    d = sum(value.numel() for value in dense.values())
    assert hyper["out.weight"].numel() == 100 * d, "the term that the paper's table leaves out"


def test_a_damaged_update_is_named() -> None:
    algorithm = pfedhn()
    got = algorithm.send(algorithm.init_server(0), Card("a", 1), Round())
    assert "expected" in str(algorithm.check(got, Update({"0.weight": torch.zeros(2)}, 1.0)))
    with pytest.raises(ValueError, match="hidden_layers"):
        pfedhn(hidden_layers=-1)


def test_the_order_in_which_a_file_lists_tensors_does_not_matter() -> None:
    algorithm, one = pfedhn(), local(clusters())
    server = algorithm.init_server(0)
    for index in range(2):
        update, _ = algorithm.train(algorithm.send(server, one.card, one.round), {}, one)
        turned = dict(reversed(list(server.items())))
        server, other = (
            merge(algorithm.merger(state, Round(index, 9)), [(one.card, update)]) for state in (server, turned)
        )
        assert equal(server, other)
