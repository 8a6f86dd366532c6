"""kNN-Per: votes of remembered samples beside FedAvg's model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.toys import CLASSES, FEATURES, Rows, Toy, clusters, local, plain_mlp, run, task
from torch import Tensor, nn

from pfedgate.algorithms import build
from pfedgate.algorithms.knn_per import LAMS, KNNPer, Neighbours
from pfedgate.core.types import State, Task
from pfedgate.training.fit import evaluate


def knn(given: Task | None = None, **options: Any) -> KNNPer:
    algorithm = build("knn_per", task(plain_mlp) if given is None else given, **options)
    assert isinstance(algorithm, KNNPer)
    return algorithm


def predict(algorithm: KNNPer, x: Tensor, federation: Toy, got: State | None = None) -> Tensor:
    one = local(federation)
    got = algorithm.init_server(0) if got is None else got
    model = algorithm.predictor(got, algorithm.personalise(got, {}, one), one.card)
    found: Tensor = model(x)
    return found


def test_one_neighbour_alone_knows_every_training_sample() -> None:
    federation = clusters()
    algorithm, one = knn(k=1, lam=1.0), local(federation)
    got = algorithm.init_server(0)
    model = algorithm.predictor(got, algorithm.personalise(got, {}, one), one.card)
    assert evaluate(algorithm.task, model, one.train, one).accuracy == 1.0
    assert evaluate(algorithm.task, algorithm.predictor(got, {}, one.card), one.train, one).accuracy < 1.0


@pytest.mark.parametrize(("k", "scale", "lam"), [(1, 1.0, 1.0), (4, 0.3, 0.6), (10, 2.0, 0.5), (1000, 1.0, 0.9)])
def test_probabilities_are_those_of_the_formula(k: int, scale: float, lam: float) -> None:
    federation = clusters()
    algorithm, one = knn(k=k, scale=scale, lam=lam), local(federation)
    got = algorithm.init_server(0)
    model = plain_mlp()
    model.load_state_dict(got)
    x = one.val.x
    with torch.no_grad():
        mine, theirs, p = model[:5](one.train.x), model[:5](x), model(x).softmax(-1)  # type: ignore[index]
    for row in range(len(x)):
        distances = (mine - theirs[row]).square().sum(1)
        near = distances.argsort()[:k]
        votes = torch.exp(-distances[near] / (scale * mine.shape[1]))
        share = torch.stack([votes[one.train.y[near] == label].sum() for label in range(CLASSES)]) / votes.sum()
        p[row] = lam * share + (1 - lam) * p[row]
    found = predict(algorithm, x, federation)
    torch.testing.assert_close(found.exp(), p.clamp_min(1e-12), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(len(x)))


def test_neighbours_far_away_still_vote() -> None:
    """exp(−distance²) underflows to 0/0 where it is not normalised first."""
    federation = clusters()
    assert torch.isfinite(predict(knn(lam=1.0), 1e4 + torch.zeros(3, FEATURES), federation)).all()


def test_order_of_features_does_not_matter() -> None:
    federation, algorithm = clusters(), knn(lam=0.7)
    got = algorithm.init_server(0)
    order = torch.tensor([3, 1, 0, 6, 5, 4, 2])
    moved = {**got, "3.weight": got["3.weight"][order], "3.bias": got["3.bias"][order]}
    moved["5.weight"] = got["5.weight"][:, order]
    x = local(federation).val.x
    torch.testing.assert_close(predict(algorithm, x, federation, moved), predict(algorithm, x, federation, got))


def test_the_share_of_the_vote_is_chosen_on_validation() -> None:
    """Validation labels decide: the model's own predictions give 0, the nearest neighbour's 1."""
    federation = clusters((40, 10), novel=0)
    algorithm, one = knn(k=1), local(federation)
    got = algorithm.init_server(0)
    x = local(clusters((40, 10), novel=0, seed=9)).train.x
    near = predict(knn(k=1, lam=1.0), x, federation).argmax(-1)
    far = algorithm.predictor(got, {}, one.card)(x).argmax(-1)
    assert not torch.equal(near, far)
    chosen = []
    for labels in (far, near):
        parts = {"c0": {"train": one.train, "val": Rows(x, labels), "test": one.val}}
        private = algorithm.personalise(got, {}, local(Toy(parts)))
        chosen.append(float(private["knn/lam"]))
    # Accuracy alone would leave ties; likelihood breaks them, so the second need not be exactly 1.
    assert chosen[0] < 0.5 < chosen[1]
    assert all(round(lam, 1) in LAMS for lam in chosen)


def test_without_validation_data_both_count_alike() -> None:
    one = local(clusters())
    empty = Rows(torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.int64))
    federation = Toy({"c0": {"train": one.train, "val": empty, "test": one.val}})
    private = knn().personalise(knn().init_server(0), {}, local(federation))
    assert float(private["knn/lam"]) == 0.5


def test_scores_record_the_share_and_the_memory_is_not_kept() -> None:
    result = run(knn(), clusters(), rounds=2)
    assert 0 <= result.history[-1]["after_broadcast"]["lam"] <= 1
    assert result.store is not None
    assert result.store.clients() == []
    assert len(result.novel) == 1, "a novel client builds its memory like any other"


def test_memory_covers_all_samples_whatever_the_batches() -> None:
    from dataclasses import replace

    given = replace(task(plain_mlp), drop_last=True, eval_batch=7)
    private = knn(given, lam=0.5).personalise(knn(given).init_server(0), {}, local(clusters()))
    assert private["knn/features"].shape == (24, 7)
    assert sorted(private["knn/labels"].tolist()) == sorted(local(clusters()).train.y.tolist())


class _Sequence(nn.Module):
    """One prediction per position."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.body(x).relu())
        return found


def test_sequences_vote_position_by_position() -> None:
    x, y = torch.randn(6, 3, 4), torch.randint(CLASSES, (6, 3))
    rows = Rows(x, y)
    federation = Toy({"c0": {"train": rows, "val": rows, "test": rows}})
    algorithm, one = knn(Task(_Sequence), k=1, lam=1.0), local(federation)
    got = algorithm.init_server(0)
    private = algorithm.personalise(got, {}, one)
    assert private["knn/features"].shape == (18, 5)
    assert torch.equal(algorithm.predictor(got, private, one.card)(x).argmax(-1), y)


def test_a_layer_that_gives_no_vector_per_prediction_is_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, CLASSES))
    with pytest.raises(ValueError, match="choose another one with layer="):
        Neighbours(model, "0", 1, 1.0).features(torch.zeros(2, 1, 4, 4))
    with pytest.raises(ValueError, match="unknown layer 'ouf'"):
        knn(layer="ouf")


@pytest.mark.parametrize("options", [{"k": 0}, {"scale": 0.0}, {"lam": 1.5}])
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="k is at least 1"):
        knn(**options)
