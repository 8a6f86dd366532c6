"""Made-up data: the same from any question asked, learnable, and the conflict is a real one."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from pfedgate.data import conflicting, synthetic


def test_samples_do_not_depend_on_how_they_are_asked_for():
    federation = synthetic(clients=50, samples_per_client=10)
    pool = federation.pool
    every = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))
    x, y = pool.x(every), pool.y(every)
    for client in ("03", "41"):
        for name in ("train", "val", "test"):
            part = federation.part(client, name)
            places = [int((every == row).nonzero()) for row in part.rows]
            assert torch.equal(part.x, x[places])
            assert torch.equal(part.y, y[places])
    copy = pickle.loads(pickle.dumps(federation))
    assert torch.equal(copy.part("03", "train").x, federation.part("03", "train").x)


def test_parts_cover_each_client_once():
    federation = synthetic(clients=7, samples_per_client=11, novel=0.3)
    rows = [r for c in federation.ids for p in ("train", "val", "test") for r in federation.part(c, p).rows.tolist()]
    assert sorted(rows) == list(range(77))
    assert (len(federation.clients), len(federation.novel)) == (4, 3)
    assert federation.part("0", "test").n == 3
    assert synthetic(clients=3, samples_per_client=10, val=False).part("0", "val").n == 0


def test_clients_have_few_classes_and_can_be_learnt():
    federation = synthetic(clients=60, classes_per_client=2)
    counts = federation.histogram()
    assert (counts > 0).sum(1).max() <= 2
    parts = [(federation.part(c, "train"), federation.part(c, "test")) for c in federation.clients]
    x, y = (np.concatenate([getattr(train, k) for train, _ in parts]) for k in "xy")
    model = LogisticRegression(max_iter=500).fit(x, y)
    right = np.concatenate([model.predict(test.x) == test.y.numpy() for _, test in parts])
    assert right.mean() > 0.9


def test_seeds_differ():
    one, two = (synthetic(clients=3, seed=seed).part("0", "train").x for seed in (0, 1))
    assert not torch.equal(one, two)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (synthetic, {"samples_per_client": 2}, "at least 1 client and 3 samples"),
        (synthetic, {"classes_per_client": 11}, "between 1 and 10"),
        (conflicting, {"classes": 1}, "at least 2 classes"),
        (conflicting, {"nowel": 0.2}, "did you mean 'novel'"),
    ],
)
def test_bad_options_are_refused(make, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(clients=5, **options)


@pytest.mark.parametrize("classes", [2, 5])
def test_one_model_for_all_is_right_half_the_time_and_personal_ones_always(classes):
    federation = conflicting(clients=6, classes=classes)

    def fit(clients):
        parts = [federation.part(client, "train") for client in clients]
        return LogisticRegression(max_iter=500).fit(
            np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts])
        )

    shared = fit(federation.clients)
    tests = [federation.part(client, "test") for client in federation.clients]
    right = np.concatenate([shared.predict(test.x) == test.y.numpy() for test in tests])
    assert right.mean() < 0.62
    for client, test in zip(federation.clients, tests, strict=True):
        assert (fit([client]).predict(test.x) == test.y.numpy()).mean() > 0.95
