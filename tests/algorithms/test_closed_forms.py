"""Quadratics, where every method's result is known: f_i(theta) = ½‖theta − c_i‖², or with a Hessian."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.toys import CENTRES, MEAN, WEIGHTS, Point, Rows, Toy, first, local, points, quadratic, run
from torch import Tensor

from pfedgate.algorithms import build
from pfedgate.algorithms.per_fedavg import PerFedAvg
from pfedgate.core.state import inside
from pfedgate.core.types import CPU, Round, State, Task
from pfedgate.training.fit import Batch, workspace


def personal(result: Any, prefix: str) -> Tensor:
    """The private points of all clients."""
    return torch.stack([inside(prefix, result.store.get(f"c{at}"))["theta"] for at in range(3)])


def trained_from(name: str, task: Task, w: Tensor, client: str = "c0", **options: Any) -> tuple[Tensor, State]:
    """What a client sends when it got w, and its private State."""
    algorithm, one = build(name, task, **options), local(points(), client)
    update, private = algorithm.train({"theta": w.clone()}, algorithm.init_client({}, one), one)
    return update.shared["theta"], private


START = torch.tensor([0.5, -1.0, 2.0])


# -- FedProx
def test_fedprox_at_eta_mu_one_stays_one_gradient_step_from_the_received_model() -> None:
    eta = 0.25
    w, steps = START, 4
    expected = w.clone()
    for _ in range(steps):
        expected = w - eta * (expected - CENTRES[0])
    found, _ = trained_from("fedprox", quadratic(eta, epochs=steps), w, mu=1 / eta)
    torch.testing.assert_close(found, expected)


def test_fedprox_drifts_less_the_stronger_the_pull() -> None:
    drifts = [
        float((trained_from("fedprox", quadratic(0.05, epochs=10), START, mu=mu)[0] - START).norm())
        for mu in (0.0, 0.01, 0.1, 1.0, 10.0)
    ]
    assert drifts == sorted(drifts, reverse=True)
    assert drifts[-1] < 0.3 * drifts[0]


def test_fedprox_finds_the_proximal_point() -> None:
    found, _ = trained_from("fedprox", quadratic(0.2, epochs=200), START, mu=0.5)
    torch.testing.assert_close(found, (CENTRES[0] + 0.5 * START) / 1.5)


# -- pFedMe
def test_pfedme_with_many_inner_steps_reaches_the_proximal_point_and_moves_w_towards_it() -> None:
    lam, eta = 3.0, 0.1
    sent, private = trained_from("pfedme", quadratic(0.2), START, lam=lam, inner_steps=100, outer_lr=eta)
    theta = (CENTRES[0] + lam * START) / (1 + lam)
    torch.testing.assert_close(private["theta/theta"], theta)
    torch.testing.assert_close(sent, START - eta * lam * (START - theta))
    assert not torch.equal(sent, private["theta/theta"]), "theta is an alias of w"


def test_pfedme_warm_starts_theta_and_follows_the_moving_w() -> None:
    lam, eta, inner, steps = 2.0, 0.2, 0.1, 3
    w = theta = START
    for _ in range(steps):
        for _ in range(2):
            theta = theta - inner * (theta - CENTRES[0] + lam * (theta - w))
        w = w - eta * lam * (w - theta)
    sent, private = trained_from(
        "pfedme", quadratic(epochs=steps), START, lam=lam, inner_steps=2, inner_lr=inner, outer_lr=eta
    )
    torch.testing.assert_close(private["theta/theta"], theta)
    torch.testing.assert_close(sent, w)


def test_pfedme_converges_to_the_weighted_mean_of_centres() -> None:
    algorithm = build("pfedme", quadratic(0.3), lam=2.0, inner_steps=30, outer_lr=0.25)
    result = run(algorithm, points(), rounds=80, evaluate_every=0)
    torch.testing.assert_close(result.server["theta"], MEAN, atol=1e-4, rtol=0)
    torch.testing.assert_close(personal(result, "theta/"), (CENTRES + 2 * MEAN) / 3, atol=1e-3, rtol=0)


def test_pfedme_without_a_pull_leaves_w_alone_and_is_plain_descent() -> None:
    sent, private = trained_from("pfedme", quadratic(0.1, epochs=3), START, lam=0.0, inner_steps=2)
    assert torch.equal(sent, START)
    torch.testing.assert_close(private["theta/theta"], CENTRES[0] + 0.9**6 * (START - CENTRES[0]))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 2.0])
def test_pfedme_beta_is_the_share_of_the_way_to_the_mean(beta: float) -> None:
    task = quadratic(0.2)
    whole, part = (run(build("pfedme", task, lam=1.0, beta=b), points(), rounds=1).server["theta"] for b in (1.0, beta))
    start = build("pfedme", task).init_server(0)["theta"]
    torch.testing.assert_close(part, start + beta * (whole - start))
    assert not torch.equal(whole, start)
    assert torch.equal(part, start) == (beta == 0)


def test_pfedme_with_one_inner_step_and_eta_lam_one_sends_theta() -> None:
    sent, private = trained_from("pfedme", quadratic(0.1, epochs=3), START, lam=4.0, inner_steps=1, outer_lr=0.25)
    torch.testing.assert_close(sent, private["theta/theta"])


def test_pfedme_inner_rate_never_overshoots_unless_told() -> None:
    for lr in (0.05, 0.5, 5.0):
        _, private = trained_from("pfedme", quadratic(lr, epochs=50), START, lam=15.0)
        assert torch.isfinite(private["theta/theta"]).all()


# -- mean-regularised multi-task learning
def test_mean_regularised_models_reach_their_joint_fixed_point() -> None:
    mu = 0.5
    result = run(build("mean_reg_mtl", quadratic(0.3), mu=mu), points(), rounds=150, evaluate_every=0)
    torch.testing.assert_close(result.server["theta"], MEAN, atol=1e-4, rtol=0)
    torch.testing.assert_close(personal(result, "model/"), (CENTRES + mu * MEAN) / (1 + mu), atol=1e-4, rtol=0)


def test_mean_regularised_model_continues_from_its_own_point_not_from_the_mean() -> None:
    algorithm, one = build("mean_reg_mtl", quadratic(0.1), mu=1.0), local(points())
    own = torch.tensor([5.0, 5.0, 5.0])
    update, private = algorithm.train({"theta": START}, {"model/theta": own}, one)
    expected = own - 0.1 * (own - CENTRES[0] + (own - START))
    torch.testing.assert_close(update.shared["theta"], expected)
    torch.testing.assert_close(private["model/theta"], expected)


# -- Ditto
def test_ditto_reaches_the_proximal_point_of_fedavgs_model() -> None:
    lam = 0.5
    result = run(build("ditto", quadratic(0.3), lam=lam), points(), rounds=100, evaluate_every=0)
    torch.testing.assert_close(result.server["theta"], MEAN, atol=1e-4, rtol=0)
    torch.testing.assert_close(personal(result, "model/"), (CENTRES + lam * MEAN) / (1 + lam), atol=1e-4, rtol=0)


def test_ditto_is_held_to_the_received_model_not_to_the_trained_one() -> None:
    eta, steps = 0.2, 5
    algorithm, one = build("ditto", quadratic(eta, epochs=steps), lam=1 / eta), local(points())
    v = torch.tensor([7.0, 0.0, -7.0])
    update, private = algorithm.train({"theta": START}, {"model/theta": v}, one)
    for _ in range(steps):
        v = START - eta * (v - CENTRES[0])  # eta·lam = 1: one gradient step from w, wherever v was
    torch.testing.assert_close(private["model/theta"], v)
    assert not torch.allclose(update.shared["theta"], START)


# -- APFL
@pytest.mark.parametrize("update", ["never", "round", "batch"])
def test_apfl_follows_its_equations(update: str) -> None:
    eta, steps, alpha = 0.1, 3, 0.4
    algorithm = build("apfl", quadratic(eta, epochs=steps), alpha=alpha, update_alpha=update)
    v, w, a = torch.tensor([2.0, 0.0, 1.0]), START, torch.tensor(alpha)
    sent, private = algorithm.train({"theta": w}, {"model/theta": v, "alpha": a}, local(points()))
    for step in range(steps):
        point = [t.clone().requires_grad_() for t in (v, a)]
        mixed = point[1] * point[0] + (1 - point[1]) * w
        slopes = torch.autograd.grad(0.5 * (mixed - CENTRES[0]).square().sum(), point)
        v, w = v - eta * slopes[0], w - eta * (w - CENTRES[0])
        if update == "batch" or (update == "round" and step == 0):
            a = (a - eta * slopes[1]).clamp(0, 1)
    torch.testing.assert_close(private["model/theta"], v)
    torch.testing.assert_close(private["alpha"], a)
    torch.testing.assert_close(sent.shared["theta"], w)
    assert (float(a) == pytest.approx(alpha)) == (update == "never")
    model = algorithm.predictor({"theta": START}, private, local(points()).card)
    torch.testing.assert_close(model.state_dict()["theta"], a * v + (1 - a) * START)


def test_apfl_keeps_alpha_between_zero_and_one() -> None:
    algorithm = build("apfl", quadratic(0.5, epochs=1), update_alpha="batch")
    for v in (torch.full((3,), 50.0), -torch.full((3,), 50.0), CENTRES[0]):
        private = {"model/theta": v, "alpha": torch.tensor(0.5)}
        _, private = algorithm.train({"theta": 10 * START}, private, local(points()))
        assert 0 <= float(private["alpha"]) <= 1


# -- Per-FedAvg
HESSIAN = torch.tensor([[2.0, 0.3, 0.0], [0.3, 1.0, -0.2], [0.0, -0.2, 0.5]])


def bowl(output: Tensor, y: Tensor) -> Tensor:
    """½(theta − c)ᵀH(theta − c) per sample."""
    away = output - y
    return 0.5 * (away @ HESSIAN.to(away.dtype) * away).sum(-1)


@pytest.mark.parametrize("order", ["first", "hf"])
def test_per_fedavg_directions_on_a_quadratic(order: str) -> None:
    alpha, beta = 0.3, 0.05
    task = replace(quadratic(beta), loss=bowl)
    sent, _ = trained_from("per_fedavg", task, START, order=order, alpha=alpha)
    u = START - alpha * HESSIAN @ (START - CENTRES[0])
    g = HESSIAN @ (u - CENTRES[0])
    direction = g if order == "first" else g - alpha * HESSIAN @ g
    torch.testing.assert_close((START - sent) / beta, direction, atol=2e-4, rtol=1e-4)


def test_per_fedavg_minimises_the_loss_after_the_personal_step() -> None:
    """With equal Hessians the meta-objective is minimal at the mean; a personal step then goes towards c_i."""
    task = replace(quadratic(0.3), loss=bowl)
    algorithm = build("per_fedavg", task, order="hf", alpha=0.3)
    result = run(algorithm, points(), rounds=150, evaluate_every=0)
    torch.testing.assert_close(result.server["theta"], MEAN, atol=5e-3, rtol=0)
    one = local(points(), "c2", Round(factor=0.01))
    private = algorithm.personalise(result.server, {}, one)
    away = result.server["theta"] - CENTRES[2]
    torch.testing.assert_close(private["personal/theta"], result.server["theta"] - 0.3 * HESSIAN @ away)


def test_per_fedavg_hessian_product_survives_single_precision() -> None:
    task = replace(quadratic(), loss=bowl)
    work = workspace(Point, None, CPU)
    batch = Batch(torch.zeros(4, 1), CENTRES[:1].repeat(4, 1), torch.arange(4))
    for scale in (1e-4, 1.0, 1e4):
        w, g = 3 * START, scale * CENTRES[1]
        algorithm = build("per_fedavg", task, order="hf")
        assert isinstance(algorithm, PerFedAvg)
        work.load({"theta": w})
        found = algorithm._hessian(work, w, g, batch)
        torch.testing.assert_close(found / scale, HESSIAN @ CENTRES[1], atol=5e-3, rtol=1e-3)


# -- shared by all that average
def test_fedavg_itself_averages_by_sample_counts() -> None:
    result = run(build("fedavg", quadratic(1.0)), points(), rounds=1)
    torch.testing.assert_close(result.server["theta"], (WEIGHTS[:, None] * CENTRES).sum(0) / WEIGHTS.sum())


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("ditto", lambda w, c: w - 0.1 * (w - c)),
        ("mean_reg_mtl", lambda w, c: w - 0.1 * (w - c)),
        ("apfl", lambda w, c: w - 0.1 * 0.5 * (w - c)),
    ],
)
def test_a_novel_client_takes_one_epoch_from_the_shared_model(name: str, target: Any) -> None:
    algorithm, one = build(name, quadratic(0.1)), local(points())
    got, private = first(algorithm, one)
    got = {"theta": START.clone()}
    adapted = algorithm.adapt(got, private, one)
    torch.testing.assert_close(adapted["model/theta"], target(START, CENTRES[0]))
    assert torch.equal(got["theta"], START)


def test_a_novel_client_of_pfedme_is_scored_with_its_proximal_point() -> None:
    algorithm = build("pfedme", quadratic(0.2), lam=3.0, inner_steps=100)
    one = local(points())
    private = algorithm.adapt({"theta": START}, {}, one)
    model = algorithm.predictor({"theta": START}, private, one.card)
    torch.testing.assert_close(model.state_dict()["theta"], (CENTRES[0] + 3 * START) / 4)


def test_a_client_without_samples_keeps_what_it_has() -> None:
    empty = Rows(torch.zeros(0, 1), torch.zeros(0, 3))
    federation = Toy({"c0": {"train": empty, "val": empty, "test": empty}})
    for name in ("ditto", "mean_reg_mtl", "apfl", "pfedme", "per_fedavg", "fedprox"):
        algorithm, one = build(name, quadratic()), local(federation)
        got, private = first(algorithm, one)
        adapted = algorithm.personalise(got, algorithm.adapt(got, private, one), one)
        model = algorithm.predictor(got, adapted, one.card)
        assert torch.equal(model.state_dict()["theta"], got["theta"]), name
