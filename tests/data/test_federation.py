"""Parts do not overlap, ids are the same everywhere, test sets do not move, workers share memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.world import scrambled

from pfedgate.core.ids import Ids
from pfedgate.data import Federation, from_arrays, load, synthetic
from pfedgate.data.federation import PARTS, Part
from pfedgate.data.pool import Normalise
from pfedgate.data.sharing import carve


def rows(federation: Federation, client: str, part: str) -> list[int]:
    return federation.part(client, part).rows.tolist()


@pytest.mark.parametrize("listed", [True, False])
def test_parts_read_together_are_those_read_one_by_one(listed: bool) -> None:
    federation = (
        load("digits", clients=7, seed=3)
        if listed
        else from_arrays(np.arange(40.0)[:, None], np.arange(40) % 2, owners=np.repeat(["a", "b"], 20))
    )
    parts = [federation.part(client, name) for client in reversed(federation.clients) for name in PARTS]
    both = Part.together(parts)
    assert both is not None
    assert torch.equal(both[0], torch.cat([part.x for part in parts]))
    assert torch.equal(both[1], torch.cat([part.y for part in parts]))
    assert Part.together([*parts, load("digits", clients=2).part("0", "train")]) is None


@settings(max_examples=30, deadline=None)
@given(
    clients=st.integers(2, 25),
    novel=st.sampled_from([0.0, 0.2, 0.5, 0.9]),
    val=st.booleans(),
    seed=st.integers(0, 1000),
    alpha=st.sampled_from([0.01, 0.4, 10.0]),
)
def test_parts_never_overlap_and_cover_everything(clients, novel, val, seed, alpha):
    federation = load("digits", clients=clients, novel=novel, val=val, seed=seed, alpha=alpha)
    seen = [row for client in federation.ids for part in PARTS for row in rows(federation, client, part)]
    assert sorted(seen) == list(range(1797))
    assert not set(federation.clients) & set(federation.novel)
    assert sorted([*federation.clients, *federation.novel]) == sorted(federation.ids)
    assert len(federation.clients) >= 1
    for client in federation.ids:
        assert all(len(rows(federation, client, part)) >= 1 for part in PARTS if val or part != "val")


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), novel=st.sampled_from([0.0, 0.2]))
def test_test_sets_do_not_depend_on_validation_or_novel_clients(seed, novel):
    with_val = load("digits", seed=seed, novel=novel)
    without = load("digits", seed=seed, val=False)
    for client in with_val.ids:
        assert rows(with_val, client, "test") == rows(without, client, "test")
        trained = rows(with_val, client, "train") + rows(with_val, client, "val")
        assert sorted(trained) == sorted(rows(without, client, "train"))
        assert rows(without, client, "val") == []


@given(n=st.integers(3, 100_000))
def test_sizes_are_six_two_two_with_test_rounded_up(n):
    test = int(carve(np.array([n]), 0.2)[0])
    val = int(carve(np.array([n - test]), 0.25)[0])
    assert test == n - 4 * n // 5
    assert val == (n - test) - 3 * (n - test) // 4
    assert min(test, val, n - test - val) >= 1


@pytest.mark.parametrize(("n", "sizes"), [(10, [6, 2, 2]), (11, [6, 2, 3]), (3, [1, 1, 1]), (99, [59, 20, 20])])
def test_a_client_of_n_samples_is_cut_so(n, sizes):
    federation = from_arrays(np.zeros((n, 1)), np.zeros(n, dtype=int), owners=["a"] * n)
    assert [federation.part("a", part).n for part in PARTS] == sizes


def test_the_split_is_shuffled_not_in_pool_order():
    federation = from_arrays(np.zeros((100, 2)), np.zeros(100, dtype=int), owners=["a"] * 100)
    for part in PARTS:
        mine = rows(federation, "a", part)
        assert mine != sorted(mine)
        assert min(mine) < 20
        assert max(mine) >= 80


def test_a_client_is_split_the_same_whoever_else_is_there():
    x, y, owners = np.zeros((60, 2)), np.zeros(60, dtype=int), np.repeat(["a", "b", "c"], 20)
    everyone = from_arrays(x, y, owners=owners)
    # Merged with one neighbour, and moved from the middle to the front by the other one's new name.
    others = from_arrays(x, y, owners=np.where(owners == "a", "z", owners))
    fewer = from_arrays(x, y, owners=np.where(owners == "c", "a", owners))
    for part in PARTS:
        assert rows(everyone, "b", part) == rows(others, "b", part) == rows(fewer, "b", part)


def test_novel_clients_are_a_fifth_and_chosen_by_seed():
    federation = load("digits", clients=20, novel=0.2)
    assert (len(federation.clients), len(federation.novel)) == (16, 4)
    assert list(federation.novel) != list(load("digits", clients=20, novel=0.2, seed=1).novel)
    # Holding clients out must not change what any client holds.
    everyone = load("digits", clients=20)
    assert all(rows(federation, c, "train") == rows(everyone, c, "train") for c in everyone.ids)


def test_too_small_a_client_is_named():
    with pytest.raises(ValueError, match=r"client 'b' has 2 samples: 3 are needed"):
        from_arrays(np.zeros((7, 1)), np.zeros(7, dtype=int), owners=list("aaaaabb"), min_samples=1)


def test_the_same_seed_gives_the_same_federation_in_another_process():
    options = {"alpha": 0.1, "novel": 0.2, "seed": 5, "samples": 900}
    code = (
        f"from pfedgate.data import load; f = load('digits', **{options})\n"
        "print([(c, f.part(c, p).rows.tolist()) for c in [*f.clients, *f.novel] for p in ('train', 'val', 'test')])"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    mine = load("digits", **options)
    here = [(c, rows(mine, c, part)) for c in [*mine.clients, *mine.novel] for part in PARTS]
    assert done.stdout.strip() == str(here)


def test_sub_samples_are_seeded_and_exact():
    federation = load("digits", samples=600, clients=5)
    assert federation.describe()["samples"] == 600
    assert load("digits", samples=0.5, clients=5).describe()["samples"] == 898
    again = load("digits", samples=600, clients=5)
    other = load("digits", samples=600, clients=5, seed=1)
    used = [{row for c in f.ids for part in PARTS for row in rows(f, c, part)} for f in (federation, again, other)]
    assert used[0] == used[1]
    assert len(used[0] & used[2]) < 400  # about a third is shared by chance
    # The partition is of the chosen samples: rows from the whole pool, labels as the shards say.
    shards = load("digits", samples=600, clients=5, partition="pathological", shards=1)
    assert max(max(rows(shards, client, "train")) for client in shards.ids) > 1000
    assert (shards.histogram() > 0).sum(1).max() <= 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cifar-10", {}, "did you mean 'cifar10'"),
        ("digits", {"alhpa": 0.1}, "did you mean 'alpha'"),
        ("digits", {"partition": "dirichlett"}, "did you mean 'dirichlet'"),
        ("digits", {"partition": "owner"}, "digits has no owners"),
        ("digits", {"samples": 2000}, "the pool has 1797"),
    ],
)
def test_unknown_names_suggest_the_nearest(name, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        load(name, **options)


def test_an_unknown_client_or_part_is_named():
    federation = load("digits", clients=12)
    with pytest.raises(KeyError, match="no client '1' among 12; did you mean"):
        federation.part("1", "train")
    with pytest.raises(ValueError, match="train, val, test"):
        federation.part("01", "validation")


def test_parts_are_lazy_and_hold_the_right_samples():
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    y = np.arange(20) % 3
    federation = from_arrays(x, y, owners=["a"] * 10 + ["b"] * 10)
    part = federation.part("b", "train")
    assert "x" not in part.__dict__
    assert len(part) == part.n == 6
    assert torch.equal(part.x, torch.from_numpy(x)[part.rows])
    assert torch.equal(part.y, torch.from_numpy(y)[part.rows])
    assert part.y.dtype is torch.int64
    assert part.rows.min() >= 10


def test_images_come_out_normalised_and_channels_last():
    federation = load("digits")
    raw = federation.part("00", "train").x
    before = raw.clone()
    ready = federation.prepare(raw)
    assert torch.equal(raw, before)
    assert ready.dtype is torch.float32
    assert ready.shape[1:] == federation.input_shape == (1, 8, 8)
    expected = (raw.double() / 255 - 0.3053) / 0.3761
    assert torch.allclose(ready.double(), expected, atol=1e-5)
    every = torch.cat([federation.prepare(federation.part(c, p).x) for c in federation.ids for p in PARTS])
    assert abs(every.mean()) < 1e-2
    assert abs(every.std() - 1) < 1e-2
    colour = torch.randint(0, 256, (6, 5, 4, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    for batch in (colour, colour.contiguous(), colour[torch.tensor([3, 1])]):
        ready = Normalise((0.1, 0.2, 0.3), (1.0, 2.0, 4.0))(batch)
        assert ready.is_contiguous(memory_format=torch.channels_last)
        mean, std = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
        assert torch.allclose(ready, (batch / 255 - mean) / std, atol=1e-6)


def test_other_inputs_pass_through_prepare():
    tokens = torch.randint(0, 1000, (4, 7))
    assert Normalise((5.0,), (2.0,))(tokens) is tokens
    floats = torch.randn(4, 3, dtype=torch.float64)
    assert Normalise()(floats).dtype is torch.float32
    scaled = Normalise((1.0, 2.0, 3.0), (1.0, 2.0, 4.0))(floats)
    assert torch.allclose(scaled, ((floats - torch.tensor([1, 2, 3])) / torch.tensor([1, 2, 4])).float())
    with pytest.raises(ValueError, match="must be positive"):
        Normalise((0.0,), (0.0,))


def test_scrambled_labels_change_one_part_only():
    federation = load("digits", clients=5)
    other = scrambled(federation, "test")
    for client in federation.ids:
        for part in ("train", "val"):
            assert torch.equal(federation.part(client, part).y, other.part(client, part).y)
            assert torch.equal(federation.part(client, part).x, other.part(client, part).x)
    mine = torch.cat([federation.part(c, "test").y for c in federation.ids])
    theirs = torch.cat([other.part(c, "test").y for c in federation.ids])
    assert (mine != theirs).float().mean() > 0.7


def test_histogram_and_description_agree_with_the_parts():
    federation = load("digits", clients=6, novel=0.3)
    counts = federation.histogram()
    for at, client in enumerate(federation.ids):
        labels = torch.cat([federation.part(client, part).y for part in PARTS])
        assert counts[at].tolist() == torch.bincount(labels, minlength=10).tolist()
        assert federation.sizes("test")[at] == federation.part(client, "test").n
        tests = torch.bincount(federation.part(client, "test").y, minlength=10).tolist()
        assert federation.histogram(["test"])[at].tolist() == tests
    about = federation.describe()
    assert about["samples"] == 1797 == sum(about["parts"].values())
    assert about["histogram"][federation.ids[2]] == counts[2].tolist()
    assert about["partition"] == "dirichlet"


def test_ids_behave_like_a_list():
    ids = Ids(np.array(["b", "a", "cc"]))
    assert list(ids) == ["b", "a", "cc"] == [ids[0], ids[1], ids[-1]]
    assert ids == ["b", "a", "cc"]
    assert ids != ["b", "a"]
    assert ids[1:] == ["a", "cc"]
    assert "a" in ids
    assert "c" not in ids
    assert 3 not in ids
    assert not Ids(np.array([], dtype=str))
    assert all(type(name) is str for name in ids)


def _sum(federation: Federation, queue: multiprocessing.Queue) -> None:
    part = federation.part("1", "train")
    shared = federation.pool.share  # the pool arrived whole
    queue.put((int(part.x.sum()), part.y.tolist(), callable(shared)))


def test_a_shared_federation_reaches_a_spawned_worker_without_its_data():
    x = np.random.default_rng(0).integers(0, 256, (4000, 16, 16, 3), dtype=np.uint8)
    federation = from_arrays(x, np.arange(4000) % 10, owners=np.arange(4000) % 4, channels="last")
    assert len(pickle.dumps(federation)) > x.nbytes
    federation.share()
    assert len(bytes(ForkingPickler.dumps(federation))) < 5_000
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue = context.Queue()
    worker = context.Process(target=_sum, args=(federation, queue))
    worker.start()
    total, labels, _ = queue.get(timeout=120)
    worker.join()
    part = federation.part("1", "train")
    assert total == int(part.x.sum())
    assert labels == part.y.tolist()


def test_a_mapped_federation_pickles_as_a_path(tmp_path):
    x = np.random.default_rng(0).normal(size=(500, 30)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    federation = from_arrays(tmp_path / "x.npy", np.zeros(500, dtype=int), owners=np.arange(500) % 5)
    sent = pickle.dumps(federation)
    assert len(sent) < x.nbytes / 4
    assert torch.equal(pickle.loads(sent).part("3", "test").x, federation.part("3", "test").x)
    # Mapped copy-on-write: no one can write into the file by accident.
    federation.part("3", "test").x.zero_()
    federation.pool._x.tensor[0] = 7.0
    assert np.array_equal(np.load(tmp_path / "x.npy"), x)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the memory of the process from /proc")
def test_a_hundred_thousand_clients_cost_megabytes():
    synthetic(clients=10)  # imports and first allocations
    before = _resident()
    federation = synthetic(clients=100_000)
    for client in ("00000", "54321", "99999"):
        assert federation.part(client, "train").x.shape == (12, 64)
    assert _resident() - before < 80e6
    assert federation.clients[99_999] == "99999"
    assert len(federation.share().clients) == 100_000
    assert len(bytes(ForkingPickler.dumps(federation))) < 3e6
