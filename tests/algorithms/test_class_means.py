"""FedPAC, GPFL and pFedFDA: what each is without its idea, its equations, and what PFLlib's code arrives at."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from tests.support.toys import clusters, dropout_mlp, local, normed_mlp, plain_mlp, run, task

from pfedgate import models
from pfedgate.algorithms import build
from pfedgate.algorithms.fedpac import HEADS, KNOWN, MEANS, OWN, SPREAD, STATISTICS, FedPAC, mixture, moments
from pfedgate.algorithms.gpfl import FREQUENCIES, GPFL
from pfedgate.algorithms.pfedfda import EPS, Gaussians, discriminant, measured, shares_of
from pfedgate.core.mergers import merge
from pfedgate.core.state import inside, split
from pfedgate.core.types import Card, Round, Update

LINEAR = partial(models.build, "mlp", (6,), 3, hidden=[8])


# -- FedPAC
@pytest.mark.parametrize("model", [dropout_mlp, normed_mlp, plain_mlp])
def test_fedpac_of_one_client_without_pull_is_fedrep(model: Any) -> None:
    federation, of = clusters((24,), novel=0), task(model)
    expected, found = run(build("fedrep", of), federation), run(build("fedpac", of, lam=0.0), federation)
    body, head = split(found.server, expected.server.__contains__)
    for name, value in expected.server.items():
        assert torch.equal(body[name], value)
    assert expected.store is not None
    own = inside("own/", expected.store.get("c0") or {})
    assert own
    for name, value in own.items():
        torch.testing.assert_close(head[f"{HEADS}c0/{name}"], value, rtol=1e-6, atol=1e-7)


def test_features_are_pulled_to_known_class_means_alone() -> None:
    of = replace(task(LINEAR, momentum=0.0, weight_decay=0.0, clip=None), batch=64)
    algorithm, here = build("fedpac", of, lam=0.7, head_epochs=0), local(clusters())
    got = algorithm.init_server(0)
    got[MEANS], got[KNOWN] = torch.randn(3, 8), torch.tensor([3.0, 0.0, 2.0])
    update, _ = algorithm.train(got, {}, here)
    weights = {name: got[name].clone().requires_grad_() for name in ("fc1.weight", "fc1.bias")}
    x, y = here.train.x, here.train.y
    features = F.relu(F.linear(x, *weights.values()))
    pull = sum((f - got[MEANS][label]).square().sum() for f, label in zip(features, y, strict=True) if label != 1)
    loss = F.cross_entropy(F.linear(features, got["out.weight"], got["out.bias"]), y) + 0.7 * pull / features.numel()
    for (name, value), slope in zip(weights.items(), torch.autograd.grad(loss, list(weights.values())), strict=True):
        torch.testing.assert_close(update.shared[name], (value - 0.1 * slope).detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(update.shared["out.weight"], got["out.weight"])


def test_moments_are_the_published_ones() -> None:
    draw = torch.Generator().manual_seed(0)
    features, y = torch.randn(20, 4, generator=draw), torch.randint(3, (20,), generator=draw)
    sums, spread = moments(features, y, 4)
    share = torch.bincount(y, minlength=4) / 20
    variance = 0.0
    for k in range(3):
        own = features[y == k]
        torch.testing.assert_close(sums[k], share[k] * own.mean(0))
        variance += float(share[k] * torch.trace(own.T @ own / len(own)) - share[k] ** 2 * own.mean(0).square().sum())
    assert float(spread) == pytest.approx(variance / 20, rel=1e-5)
    assert not sums[3].any()


@pytest.mark.parametrize("seed", range(4))
def test_mixtures_minimise_bias_and_variance(seed: int) -> None:
    random = np.random.default_rng(seed)
    statistics = [torch.from_numpy(random.normal(size=(3, 4)) * 0.3) for _ in range(6)]
    spreads = random.uniform(0.05, 0.6, 6).tolist()
    weights = np.array(mixture(2, statistics, spreads))
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    away = torch.stack([(statistics[2] - s).flatten() for s in statistics]).numpy()

    def loss(w: Any) -> float:
        return float(w @ (away @ away.T + np.diag(spreads)) @ w)

    best = minimize(
        loss, np.full(6, 1 / 6), bounds=[(0, 1)] * 6, constraints={"type": "eq", "fun": lambda w: w.sum() - 1}
    )
    assert loss(weights) <= best.fun + 1e-6
    assert weights == pytest.approx(best.x, abs=2e-3)


def test_the_server_averages_class_means_by_samples_and_mixes_heads_by_client() -> None:
    algorithm = build("fedpac", task(LINEAR))
    assert isinstance(algorithm, FedPAC)
    federation = clusters((24, 17, 30), novel=0)
    server, sent = algorithm.init_server(0), []
    for client in federation.clients:
        here = local(federation, client)
        sent.append((here.card, algorithm.train(algorithm.send(server, here.card, here.round), {}, here)[0]))
    merged = merge(algorithm.merger(server, Round()), sent)
    counts = torch.stack([update.shared["pac/counts"] for _, update in sent])
    means = torch.stack([update.shared[OWN] for _, update in sent])
    expected = (means * counts[:, :, None]).sum(0) / counts.sum(0)[:, None]
    torch.testing.assert_close(merged[MEANS], expected)
    assert torch.equal(merged[KNOWN], counts.sum(0))
    statistics = [update.shared[STATISTICS].double() for _, update in sent]
    spreads = [float(update.shared[SPREAD]) for _, update in sent]
    for at, (card, _) in enumerate(sent):
        weights = mixture(at, statistics, spreads)
        head = sum(w * update.shared["out.weight"] for w, (_, update) in zip(weights, sent, strict=True))
        torch.testing.assert_close(algorithm.send(merged, card, Round())["out.weight"], head)
    stranger = algorithm.send(merged, Card("nobody", 9), Round())
    assert torch.equal(stranger["out.weight"], merged["out.weight"])
    assert not any(name.startswith(HEADS) for name in stranger)


def test_wrong_statistics_are_refused() -> None:
    algorithm, here = build("fedpac", task(LINEAR)), local(clusters())
    got = algorithm.init_server(0)
    update, _ = algorithm.train(got, {}, here)
    assert algorithm.check(got, update) is None
    for name in (OWN, SPREAD, "pac/counts"):
        without = replace(update, shared={n: v for n, v in update.shared.items() if n != name})
        assert name in str(algorithm.check(got, without))
    wrong = Update({**update.shared, OWN: torch.zeros(3, 9)}, 1.0)
    assert OWN in str(algorithm.check(got, wrong))


# -- GPFL
def gpfl(of: Any, **options: Any) -> GPFL:
    algorithm = build("gpfl", of, **options)
    assert isinstance(algorithm, GPFL)
    return algorithm


def test_gpfl_trains_both_paths_by_the_published_loss() -> None:
    of = replace(task(LINEAR, momentum=0.0, weight_decay=0.0, clip=None), batch=64)
    algorithm, here = gpfl(of, lam=0.3), local(clusters())
    got = algorithm.init_server(0)
    private = algorithm.init_client(got, here)
    update, after = algorithm.train(got, private, here)
    x, y = here.train.x, here.train.y
    own = inside("own/", private)
    trained = ("fc1.weight", "fc1.bias", "out.embedding.weight", *(n for n in got if ".valve." in n))
    w = {name: got[name].clone().requires_grad_() for name in trained}
    w |= {name: own[name].clone().requires_grad_() for name in ("out.weight", "out.bias")}
    frozen = got["out.embedding.weight"]
    frequencies = torch.bincount(y, minlength=3) / len(y)
    assert torch.equal(private[FREQUENCIES], frequencies)

    def part(name: str, context: torch.Tensor) -> torch.Tensor:
        z = F.relu(F.linear(context, w[f"out.valve.{name}.0.weight"], w[f"out.valve.{name}.0.bias"]))
        return F.layer_norm(z, (8,), w[f"out.valve.{name}.2.weight"], w[f"out.valve.{name}.2.bias"])

    def valve(features: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return F.relu(features * (part("gamma", context) + 1) + part("beta", context))

    features = F.relu(F.linear(x, w["fc1.weight"], w["fc1.bias"]))
    personal = F.linear(valve(features, frequencies @ frozen), w["out.weight"], w["out.bias"])
    common = valve(features, frozen.mean(0))
    cosines = F.cosine_similarity(common[:, None], w["out.embedding.weight"][None], dim=2)
    loss = F.cross_entropy(personal, y) + F.cross_entropy(cosines, y) + 0.3 * (common - frozen[y]).norm()
    new = {**update.shared, **inside("own/", after)}
    for (name, value), slope in zip(w.items(), torch.autograd.grad(loss, list(w.values())), strict=True):
        torch.testing.assert_close(new[name], (value - 0.1 * slope).detach(), rtol=1e-4, atol=1e-6)


def test_a_client_is_scored_in_its_own_context_for_the_embeddings_it_got() -> None:
    algorithm, here = gpfl(task(LINEAR)), local(clusters())
    got = algorithm.init_server(0)
    private = algorithm.init_client(got, here)
    model, x = algorithm.predictor(got, private, here.card), here.train.x
    moved = {**got, "out.embedding.weight": got["out.embedding.weight"].flip(0)}
    assert not torch.allclose(algorithm.predictor(moved, private, here.card)(x), model(x))
    assert not any(name.startswith("frequencies") or name.endswith("context") for name in got)


def test_gpfl_starts_from_fedavgs_body_whatever_its_scale() -> None:
    of = replace(task(LINEAR), initial_scale=1.4)
    plain, ours = (build(name, of).init_server(3) for name in ("fedavg", "gpfl"))
    assert torch.equal(plain["fc1.weight"], ours["fc1.weight"])
    algorithm, here = gpfl(of), replace(local(clusters()), round=Round(seed=3))
    assert torch.equal(algorithm.init_client(ours, here)["own/out.weight"], plain["out.weight"])


# -- pFedFDA
def gaussians(seed: int = 0, size: int = 4) -> tuple[torch.Tensor, torch.Tensor, Gaussians]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (60,), generator=draw)
    centres = torch.randn(3, size, generator=draw, dtype=torch.float64) * 2
    features = centres[y] + torch.randn(60, size, generator=draw, dtype=torch.float64)
    return features, y, Gaussians(centres + 1, 2 * torch.eye(size, dtype=torch.float64))


def test_the_head_is_bayes_rule_for_gaussian_classes() -> None:
    features, _, of = gaussians()
    priors = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    weight, bias = discriminant(of, priors)
    noise = of.covariance * (1 - EPS) + EPS * torch.eye(4, dtype=torch.float64) * of.covariance.trace() / 4
    normal: Any = torch.distributions.MultivariateNormal
    logs = torch.stack([normal(mean, noise).log_prob(features) for mean in of.means], 1) + priors.log()
    torch.testing.assert_close((features @ weight.T + bias).softmax(1), logs.softmax(1))


def test_statistics_are_those_of_the_samples() -> None:
    features, y, shared = gaussians()
    y = y.clamp(max=1)
    own = measured(features, y, shared)
    for k in range(2):
        torch.testing.assert_close(own.means[k], features[y == k].mean(0))
    assert torch.equal(own.means[2], shared.means[2])
    centred = features - own.means[y]
    expected = sum(torch.outer(row, row) for row in centred) / 59 + EPS + torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(own.covariance, expected)


def test_shares_follow_what_predicts_better() -> None:
    features, y, shared = gaussians()
    right = Gaussians(measured(features, y, shared).means, torch.eye(4, dtype=torch.float64))
    wrong = Gaussians(shared.means.flip(0), shared.covariance)
    stream = torch.Generator().manual_seed(1)
    assert float(shares_of(features, y, wrong, None, stream)[0]) > 0.9
    few = torch.arange(8)
    assert float(shares_of(features[few], y[few], right, None, stream)[0]) < 0.6
    assert shares_of(features[:3], torch.tensor([0, 1, 2]), right, None, stream).tolist() == [0.0, 0.0]


def test_pfedfda_trains_the_body_alone_and_mixes_what_it_sends() -> None:
    of, federation = task(LINEAR), clusters(novel=0)
    algorithm, here = build("pfedfda", of), local(clusters())
    got = algorithm.init_server(0)
    assert not any(name.startswith("out.") for name in got)
    update, _ = algorithm.train(got, {}, here)
    assert set(update.shared) == set(got)
    assert not torch.equal(update.shared["fc1.weight"], got["fc1.weight"])
    found = run(algorithm, federation, 6)
    assert bool(found.server["fda/ready"])
    torch.linalg.cholesky(found.server["fda/covariance"])
    plain = run(build("fedavg", of), federation, 6)
    assert found.summary["accuracy"] > plain.summary["accuracy"] - 0.1
