"""FedRolex and FjORD: FedAvg at full width; windows roll and land where they belong; prefixes are nested models."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.toys import clusters, dropout_mlp, local, normed_mlp, plain_mlp, run, scores, small_cnn, task

from pfedgate import models
from pfedgate.algorithms import build
from pfedgate.algorithms.fedrolex import WINDOW, FedRolex
from pfedgate.algorithms.fjord import FjORD
from pfedgate.algorithms.heterofl.narrow import INNER, Narrow, NarrowModel
from pfedgate.core.mergers import merge
from pfedgate.core.modules import module
from pfedgate.core.state import equal, under
from pfedgate.core.types import Card, Optim, Round, State, Task, Update
from pfedgate.engine.wire import packed_size
from pfedgate.fleet.pace import Pace

FULL = {"fedrolex": {}, "fjord": {"widths": ()}}


def given(model: Any = plain_mlp, shape: tuple[int, ...] = (6,), **optim: Any) -> Task:
    return replace(task(model, **optim), example=torch.zeros(4, *shape))


def fedrolex(of: Task) -> FedRolex:
    algorithm = build("fedrolex", of, scaler=False)
    assert isinstance(algorithm, FedRolex)
    return algorithm


def fjord(of: Task, **options: Any) -> FjORD:
    algorithm = build("fjord", of, **options)
    assert isinstance(algorithm, FjORD)
    return algorithm


# -- laws
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("agg_norm", ["sampled", "all"])
@pytest.mark.parametrize("model", [dropout_mlp, normed_mlp])
def test_full_width_is_fedavg_bit_for_bit(name: str, model: Any, agg_norm: str) -> None:
    federation, of = clusters((24, 18, 30, 10, 20)), given(model)
    options = {"sample": 0.6, "agg_norm": agg_norm}
    expected = run(build("fedavg", of), federation, **options)
    found = run(build(name, of, **FULL[name]), federation, **options)
    server = {n: value for n, value in found.server.items() if n != WINDOW}
    assert equal(server, expected.server)
    assert scores(found) == scores(expected)


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("budget", [0.2, 0.5])
def test_bytes_and_operations_stay_within_the_budget(name: str, budget: float) -> None:
    of = Task(partial(models.build, "cnn_femnist", (1, 28, 28), 10), example=torch.zeros(2, 1, 28, 28), batch=8)
    federation = clusters((16, 16), novel=0, shape=(1, 28, 28))
    dense, found = (run(build(n, of), federation, 1, budget=b) for n, b in (("fedavg", 1.0), (name, budget)))
    record, whole = found.history[0], dense.history[0]
    assert record["density"] == pytest.approx(budget, abs=0.02)
    assert record["bytes_up"] <= 1.03 * budget * whole["bytes_up"]
    assert record["bytes_down"] <= 1.03 * budget * whole["bytes_down"]
    within = run(build(name, of), federation, 1, budget={"flops": budget})
    assert within.history[0]["flops"] <= budget * whole["flops"]


# -- FedRolex
def test_the_window_rolls_over_every_unit() -> None:
    algorithm = fedrolex(given(partial(models.build, "mlp", (6,), 3, hidden=[8])))
    server, card = algorithm.init_server(0), Card("a", 10, 0.5)
    width = len(algorithm.send(server, card, Round(0))["fc1.bias"])
    for index in range(11):
        rows = sorted((index + at) % 8 for at in range(width))  # the paper's equation 1
        sent = algorithm.send(server, card, Round(index))
        assert torch.equal(sent["fc1.weight"], server["fc1.weight"][rows])
        assert torch.equal(sent["out.weight"], server["out.weight"][:, rows])
        assert torch.equal(sent["out.bias"], server["out.bias"])


def full_of(value: float, sent: State) -> State:
    return {name: torch.full_like(v, value) if v.is_floating_point() else v for name, v in sent.items()}


def test_the_mean_is_that_of_who_has_an_element_and_a_late_window_lands_where_it_was() -> None:
    algorithm = fedrolex(given(partial(models.build, "mlp", (6,), 3, hidden=[8])))
    server, half, late = algorithm.init_server(0), Card("a", 1, 0.5), Card("b", 1, 0.5)
    width = len(algorithm.send(server, half, Round(0))["fc1.bias"])
    updates = [
        (half, Update(full_of(1.0, algorithm.send(server, half, Round(5))), 1.0)),
        (late, Update(full_of(4.0, algorithm.send(server, late, Round(3))), 2.0)),
    ]
    merged = merge(algorithm.merger(server, Round(5)), updates)
    assert WINDOW not in merged
    for unit in range(8):
        now, then = ((unit - start) % 8 < width for start in (5, 3))
        expected = {(True, True): 3.0, (True, False): 1.0, (False, True): 4.0}.get((now, then))
        if expected is None:
            assert torch.equal(merged["fc1.weight"][unit], server["fc1.weight"][unit])
        else:
            assert (merged["fc1.weight"][unit] == expected).all()


def test_a_window_that_was_not_sent_is_refused() -> None:
    algorithm = fedrolex(given())
    card = Card("c0", 24, 0.5)
    got = algorithm.send(algorithm.init_server(0), card, Round(2))
    update, _ = algorithm.train(got, {}, replace(local(clusters(), round=Round(2)), card=card))
    assert algorithm.check(got, update) is None
    other = replace(update, shared={**update.shared, WINDOW: torch.tensor(3)})
    assert "window" in str(algorithm.check(got, other))
    without = replace(update, shared={name: v for name, v in update.shared.items() if name != WINDOW})
    assert "window" in str(algorithm.check(got, without))


def test_a_client_that_trains_nothing_moves_nothing_however_late_it_comes() -> None:
    """Late updates are moved by what the server learnt meanwhile: windows of two rounds must not be mixed up."""
    of = replace(given(lr=0.0, weight_decay=0.0), epochs=1)
    pace = Pace(devices="phones", policy="asynchronous", buffer=1.0)
    done = run(fedrolex(of), clusters((24, 17, 30, 9), novel=0), 6, budget=0.4, fleet=pace)
    start = build("fedavg", of).init_server(0)
    for name, value in start.items():
        torch.testing.assert_close(done.server[name], value, rtol=0, atol=1e-6)


# -- FjORD
@pytest.mark.parametrize(("model", "shape"), [(plain_mlp, (6,)), (normed_mlp, (6,)), (small_cnn, (1, 6, 6))])
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("width", [0.2, 0.5])
def test_a_network_within_another_is_the_narrower_network(model: Any, shape: Any, start: int, width: float) -> None:
    of = given(model, shape)
    state, x = build("fedavg", of).init_server(0), torch.randn(5, *shape)
    outer, inner = (Narrow(of.model, of.inputs, w, start=start) for w in (0.7, width))
    small = module(replace(of, model=inner), under(INNER, inner.take(state)))
    large = module(replace(of, model=outer), under(INNER, outer.take(state)))
    assert isinstance(large, NarrowModel)
    torch.testing.assert_close(large.within(x, inner), small(x), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(large(x), small(x))


@pytest.mark.parametrize("distil", [False, True])
def test_training_is_ordered_dropout(distil: bool) -> None:
    """The published step on plain tensors: prefixes of every layer, one optimiser over the client's whole part."""
    of = given(partial(models.build, "mlp", (6,), 3, hidden=[8, 7]), momentum=0.9, weight_decay=0.01, clip=None)
    algorithm, here = fjord(of, distil=distil), local(clusters(), round=Round(4, 9))
    got = algorithm.init_server(0)
    update, _ = algorithm.train(got, {}, here)

    values = {name: value.clone().requires_grad_() for name, value in got.items()}
    optimiser = torch.optim.SGD(values.values(), lr=0.1, momentum=0.9, weight_decay=0.01)
    draw, drawn = here.generator("width"), set[float]()

    def forward(x: torch.Tensor, p: float) -> torch.Tensor:
        for layer, size in (("fc1", 8), ("fc2", 7)):
            out = math.ceil(size * p - 1e-9)
            weight, bias = values[f"{layer}.weight"][:out, : x.shape[1]], values[f"{layer}.bias"][:out]
            x = F.relu(F.linear(x, weight, bias))
        return F.linear(x, values["out.weight"][:, : x.shape[1]], values["out.bias"])

    from pfedgate.training.fit import loop

    def step(batch: Any) -> torch.Tensor:
        p = [*algorithm.widths, 1.0][int(torch.randint(5, (), generator=draw))]
        drawn.add(p)
        optimiser.zero_grad()
        target = batch.y
        if distil:
            full = forward(batch.x, 1.0)
            F.cross_entropy(full, batch.y).backward()
            target = full.detach().softmax(1)
        loss = F.cross_entropy(forward(batch.x, p), target)
        loss.backward()
        optimiser.step()
        return loss.detach()

    loop(of, here, step)
    assert len(drawn) > 1
    for name, value in values.items():
        torch.testing.assert_close(update.shared[name], value.detach(), rtol=1e-5, atol=1e-6)


def test_what_is_beyond_every_width_drawn_does_not_move() -> None:
    of = given(partial(models.build, "mlp", (6,), 3, hidden=[10]), momentum=0.0, weight_decay=0.0)
    algorithm = fjord(of, widths=(0.3,))
    here = local(clusters((8,), novel=0))  # a batch, so one width
    got = algorithm.init_server(0)
    beyond = []
    for index in range(6):
        update, _ = algorithm.train(got, {}, replace(here, round=Round(index)))
        assert update.shared["fc1.weight"].shape == (10, 6)
        moved = (update.shared["fc1.weight"] != got["fc1.weight"]).any(1)
        assert moved[:3].any()
        beyond.append(bool(moved[3:].any()))
    assert sorted(set(beyond)) == [False, True]


def test_ordered_dropout_costs_less_than_the_clients_own_width() -> None:
    of, federation = given(), clusters((24, 17), novel=0)
    dropped, plain = (run(build(n, of), federation, 2, budget=0.5).history for n in ("fjord", "heterofl"))
    assert dropped[0]["flops"] < plain[0]["flops"]
    assert dropped[0]["bytes_up"] == plain[0]["bytes_up"]
    taught = run(fjord(of, distil=True), federation, 2, budget=0.5).history
    assert plain[0]["flops"] < taught[0]["flops"] < 2 * plain[0]["flops"]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="shares of units"):
        fjord(given(), widths=(0.2, 1.2))
    with pytest.raises(ValueError, match="distil needs classes"):
        fjord(replace(given(), kind="regression", loss=None, metrics=()), distil=True)


def test_a_client_is_sent_its_part_and_no_more() -> None:
    of = given(partial(models.build, "mlp", (6,), 3, hidden=[40, 40]), **vars(Optim(lr=0.1)))
    for name in FULL:
        algorithm = build(name, of)
        server = algorithm.init_server(0)
        sent = algorithm.send(server, Card("a", 10, 0.5), Round(7))
        assert packed_size(sent) / packed_size(server) == pytest.approx(0.5, rel=0.1)
