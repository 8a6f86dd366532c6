"""Every partition: nothing twice, nothing lost, a floor that always holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pfedgate.data import partition as p


def labels_of(samples: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, samples)


def assert_disjoint(part: p.Partition, samples: int, *, covers: bool = True) -> None:
    assert len(np.unique(part.rows)) == len(part.rows)
    assert part.offsets[0] == 0
    assert part.offsets[-1] == len(part.rows)
    assert len(set(part.ids.tolist())) == len(part.ids) == len(part.offsets) - 1
    if covers:
        assert sorted(part.rows.tolist()) == list(range(samples))


@settings(max_examples=40, deadline=None)
@given(
    clients=st.integers(1, 60),
    alpha=st.floats(0.005, 100),
    spare=st.integers(0, 300),
    floor=st.integers(0, 12),
    classes=st.integers(1, 12),
    seed=st.integers(0, 10_000),
)
@example(clients=1, alpha=0.01, spare=0, floor=1, classes=1, seed=0)
def test_dirichlet_is_a_partition_with_a_floor(clients, alpha, spare, floor, classes, seed):
    samples = clients * max(floor, 1) + spare
    labels = labels_of(samples, classes, seed)
    part = p.dirichlet(labels, clients, alpha=alpha, min_samples=floor, seed=seed)
    assert_disjoint(part, samples)
    assert part.sizes().min() >= floor


@settings(max_examples=8, deadline=None)
@given(alpha=st.sampled_from([0.01, 0.1, 0.4]) | st.floats(0.001, 1.0), seed=st.integers(0, 1000))
@example(alpha=0.01, seed=0)
def test_dirichlet_ends_at_a_thousand_clients(alpha, seed):
    labels = labels_of(20_000, 10, seed)
    part = p.dirichlet(labels, 1000, alpha=alpha, min_samples=10, seed=seed)
    assert_disjoint(part, 20_000)
    assert part.sizes().min() >= 10
    assert part.about["draws"] <= p.RETRIES


def test_a_floor_with_nothing_to_spare_is_met_exactly():
    part = p.dirichlet(labels_of(1000, 10), 100, alpha=0.01, min_samples=10)
    assert part.sizes().tolist() == [10] * 100
    assert part.about["moved"] > 0


def test_repair_is_recorded_and_only_used_when_needed():
    easy = p.dirichlet(labels_of(10_000, 10), 10, alpha=5.0)
    assert easy.about["repaired"] == []
    assert easy.about["moved"] == 0
    assert easy.about["draws"] == 1
    hard = p.dirichlet(labels_of(10_000, 10), 500, alpha=0.01)
    assert hard.about["draws"] == p.RETRIES
    repaired = {int(client) for client in hard.about["repaired"]}
    assert repaired
    # A repaired client was below the floor and was lifted to it, no further.
    assert all(hard.sizes()[client] == 10 for client in repaired)


def test_resampling_stops_at_the_first_draw_that_holds():
    labels = labels_of(600, 10)
    draws = [p.dirichlet(labels, 20, alpha=0.4, min_samples=8, seed=seed).about for seed in range(30)]
    assert any(1 < about["draws"] < p.RETRIES and not about["repaired"] for about in draws)


def test_dirichlet_shares_are_over_clients_for_each_label():
    # Var of one client's share of a label under Dirichlet(α·1_C) is (1/C)(1 − 1/C)/(Cα + 1).
    clients, alpha, classes = 20, 0.4, 400
    labels = np.repeat(np.arange(classes), 500)
    part = p.dirichlet(labels, clients, alpha=alpha, min_samples=0, seed=3)
    shares = np.zeros((clients, classes))
    for client in range(clients):
        shares[client] = np.bincount(labels[part.of(client)], minlength=classes) / 500
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert shares.var() == pytest.approx(expected, rel=0.1)
    assert shares.mean(axis=1) == pytest.approx(np.full(clients, 1 / clients), abs=0.02)


def test_class_clusters_share_one_distribution_of_clients():
    labels = np.tile(np.arange(10), 2000)
    one = p.dirichlet(labels, 5, alpha=0.4, clusters=1, seed=1)
    for client in range(5):
        mine = np.bincount(labels[one.of(client)], minlength=10) / one.sizes()[client]
        assert mine == pytest.approx(np.full(10, 0.1), abs=4 * np.sqrt(0.09 / one.sizes()[client]))
    many = p.dirichlet(labels, 5, alpha=0.4, seed=1)
    mine = np.bincount(labels[many.of(0)], minlength=10) / many.sizes()[0]
    assert mine.max() > 0.2


def test_groups_of_classes_put_the_smaller_first():
    sizes = [len(group) for group in p.class_groups(10, 3, np.random.default_rng(0))]
    assert sizes == [3, 3, 4]
    with pytest.raises(ValueError, match="between 1 and 10"):
        p.class_groups(10, 11, np.random.default_rng(0))


@settings(max_examples=30, deadline=None)
@given(clients=st.integers(1, 30), shards=st.integers(1, 4), seed=st.integers(0, 99))
def test_pathological_gives_few_classes_and_loses_nothing(clients, shards, seed):
    labels = labels_of(clients * shards * 5 + 3, 10, seed)
    part = p.pathological(labels, clients, shards=shards, seed=seed)
    assert_disjoint(part, len(labels))
    assert part.sizes().max() - part.sizes().min() <= shards


def test_pathological_shards_bound_the_classes():
    labels = np.repeat(np.arange(10), 100)
    part = p.pathological(labels, 10, shards=2)
    assert max(len(set(labels[part.of(client)].tolist())) for client in range(10)) <= 2
    assert part.rows.tolist() != p.pathological(labels, 10, shards=2, seed=1).rows.tolist()


def test_pachinko_fills_every_client_and_follows_the_tree():
    fine = np.repeat(np.arange(20), 60)
    part = p.pachinko(fine, fine // 5, 10, alpha=0.1, seed=2)
    assert_disjoint(part, len(fine))
    assert part.sizes().tolist() == [120] * 10
    # With a small alpha the early clients live in few coarse labels, and spread over fine ones inside them.
    first = fine[part.of(0)]
    top = np.bincount(first // 5, minlength=4)
    assert top.max() > 0.4 * top.sum()
    assert len(set(first[first // 5 == top.argmax()].tolist())) >= 3


@settings(max_examples=15, deadline=None)
@given(alpha=st.sampled_from([0.001, 0.4, 50.0]), clients=st.integers(1, 40), seed=st.integers(0, 99))
def test_pachinko_survives_exhausted_labels(alpha, clients, seed):
    fine = labels_of(400, 12, seed)
    part = p.pachinko(fine, fine // 3, clients, alpha=alpha, seed=seed)
    assert_disjoint(part, 400, covers=False)
    assert set(part.sizes().tolist()) == {400 // clients}


def test_pachinko_needs_a_tree():
    with pytest.raises(ValueError, match="two coarse labels"):
        p.pachinko(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), 2)


def test_owners_keep_their_names_in_every_order_of_rows():
    owners = np.array(["w3", "w1", "w2", "w10"] * 5 + ["tiny"])
    part = p.by_owner(owners)
    assert part.ids.tolist() == ["w1", "w10", "w2", "w3"]
    for at, name in enumerate(part.ids):
        assert set(owners[part.of(at)].tolist()) == {name}
    assert part.about["dropped"] == 1
    assert len(part.rows) == 20
    numbers = p.by_owner(np.repeat([2, 10, 1], 4))
    assert numbers.ids.tolist() == ["1", "10", "2"]
    assert [set(numbers.of(i).tolist()) for i in range(3)] == [{8, 9, 10, 11}, {4, 5, 6, 7}, {0, 1, 2, 3}]


def test_a_choice_of_owners_is_seeded_and_sorted():
    owners = np.repeat([f"w{i:02d}" for i in range(40)], 3)
    some = p.by_owner(owners, keep=10, seed=1)
    assert len(some.ids) == 10
    assert some.ids.tolist() == sorted(some.ids.tolist())
    assert some.ids.tolist() == p.by_owner(owners, keep=0.25, seed=1).ids.tolist()
    assert some.ids.tolist() != p.by_owner(owners, keep=10, seed=2).ids.tolist()
    with pytest.raises(ValueError, match="cannot keep 41 of 40"):
        p.by_owner(owners, keep=41)


def test_an_empty_owner_and_too_small_shards_are_refused():
    with pytest.raises(ValueError, match="2 samples have an empty owner"):
        p.by_owner(np.array(["a", "", "a", "", "a"]))
    with pytest.raises(ValueError, match="give a client 9, fewer than 10"):
        p.pathological(np.zeros(100, dtype=np.int64), 10, shards=3, min_samples=10)


def test_iid_looks_like_the_pool():
    labels = np.repeat(np.arange(4), 1000)
    part = p.iid(labels, 4)
    assert_disjoint(part, 4000)
    counts = np.bincount(labels[part.of(0)], minlength=4)
    assert counts.min() > 200


@pytest.mark.parametrize("make", [p.iid, p.dirichlet, p.pathological])
def test_too_many_clients_says_how_many_fit(make):
    with pytest.raises(ValueError, match="at most 5 clients or min_samples of at most 2"):
        make(np.zeros(50, dtype=np.int64), 20, min_samples=10)
    with pytest.raises(ValueError, match="at least 1"):
        make(np.zeros(50, dtype=np.int64), 0)


def test_bad_alpha_is_refused():
    for alpha in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="alpha must be positive"):
            p.dirichlet(np.zeros(50, dtype=np.int64), 2, alpha=alpha)
