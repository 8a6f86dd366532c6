"""Your own data: every kind of input, every mistake named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from pfedgate.data import from_arrays, from_dataset, from_folder, from_table

RNG = np.random.default_rng(0)
OWNERS = [f"o{i % 4}" for i in range(40)]
LABELS = np.arange(40) % 3
pytestmark = pytest.mark.usefixtures("own_cache")


def first_client(federation, part="train"):
    return federation.part(federation.clients[0], part)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize(
    ("shape", "dtype", "seen"),
    [
        ((40, 5), np.float64, (5,)),
        ((40, 12), np.int64, (12,)),
        ((40, 6, 4), np.float32, (6, 4)),
        ((40, 8, 8), np.uint8, (1, 8, 8)),
        ((40, 8, 9, 3), np.uint8, (3, 8, 9)),
        ((40, 3, 8, 9), np.float32, (3, 8, 9)),
    ],
)
def test_any_shape_of_input(kind, shape, dtype, seen):
    x = (RNG.random(shape) * 100).astype(dtype)
    federation = from_arrays(kind(x), kind(LABELS), owners=OWNERS)
    assert federation.input_shape == seen
    part = first_client(federation)
    ready = federation.prepare(part.x)
    assert ready.shape == (part.n, *seen)
    assert ready.is_floating_point() == (dtype is not np.int64)
    want = torch.from_numpy(x)[part.rows].float()
    if dtype is np.uint8:
        want = want.unsqueeze(1) if want.ndim == 3 else want.permute(0, 3, 1, 2)
        want = want / 255
    assert torch.allclose(ready.float(), want)


def test_labels_may_be_names_and_classes_may_be_more_than_seen():
    federation = from_arrays(RNG.random((40, 2)), ["cat", "dog"] * 20, owners=OWNERS)
    assert federation.class_names == ("cat", "dog")
    assert set(first_client(federation).y.tolist()) <= {0, 1}
    assert from_arrays(RNG.random((40, 2)), LABELS, owners=OWNERS, classes=7).classes == 7


def test_read_only_and_mapped_arrays_work(tmp_path):
    x = RNG.random((40, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for given in (mapped, tmp_path / "x.npy", str(tmp_path / "x.npy")):
        part = first_client(from_arrays(given, LABELS, owners=OWNERS))
        assert torch.equal(part.x, torch.from_numpy(x)[part.rows])


@pytest.mark.parametrize("partition", ["dirichlet", "iid", "pathological"])
def test_a_partition_instead_of_owners(partition):
    federation = from_arrays(
        RNG.random((300, 2)), np.arange(300) % 3, partition=partition, clients=6, novel=0.2, samples=200
    )
    assert (len(federation.clients), len(federation.novel)) == (4, 2)
    assert federation.describe()["samples"] == 200
    assert federation.about["partition"] == partition


def test_pachinko_takes_coarse_labels():
    fine = np.arange(300) % 6
    federation = from_arrays(np.zeros((300, 1)), fine, partition="pachinko", clients=5, coarse=fine // 2)
    assert federation.describe()["samples"] == 300


X = RNG.random((40, 2))
MISTAKES = {
    "who owns which sample": (X, LABELS, {}),
    "40 inputs but 39 labels": (X, LABELS[:-1], {"owners": OWNERS}),
    "40 inputs but 39 owners": (X, LABELS, {"owners": OWNERS[:-1]}),
    "needs clients": (X, LABELS, {"partition": "iid"}),
    "did you mean 'novel'": (X, LABELS, {"owners": OWNERS, "novels": 0.2}),
    "say channels='first'": (np.zeros((40, 3, 8, 3)), LABELS, {"owners": OWNERS}),
    "not a number": (X, np.full(40, np.nan), {"owners": OWNERS}),
    "not token ids": (np.ones((40, 2), dtype=np.int64), LABELS, {"owners": OWNERS, "standardise": True}),
    "classes=2, but a label is 2": (X, LABELS, {"owners": OWNERS, "classes": 2}),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_named(message):
    x, y, options = MISTAKES[message]
    with pytest.raises((ValueError, TypeError), match=message):
        from_arrays(x, y, **options)


def test_standardise_reads_only_training_samples_of_training_clients():
    x = np.concatenate([RNG.normal(5, 3, (400, 2)), np.full((400, 1), 7.0)], axis=1)
    owners = np.arange(400) % 10
    federation = from_arrays(x, np.zeros(400, dtype=int), owners=owners, standardise=True, novel=0.2)
    train = [federation.prepare(federation.part(client, "train").x) for client in federation.clients]
    every = torch.cat(train)
    assert torch.allclose(every.mean(0), torch.zeros(3), atol=1e-4)
    assert torch.allclose(every.std(0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-2)
    changed = x.copy()
    for client in federation.ids:
        for part in ("val", "test") if client in federation.clients else ("train", "val", "test"):
            changed[federation.part(client, part).rows.numpy()] = 1e6
    again = from_arrays(changed, np.zeros(400, dtype=int), owners=owners, standardise=True, novel=0.2)
    assert again.prepare.mean == federation.prepare.mean


def pictures(root: Path, side: int = 6, odd: int | None = None) -> None:
    for c, client in enumerate(("ann", "bob")):
        for k, label in enumerate(("cat", "dog")):
            folder = root / client / label
            folder.mkdir(parents=True)
            for i in range(4):
                size = odd if odd and (client, label, i) == ("bob", "dog", 3) else side
                Image.new("RGB", (size, size), (c * 100, k * 100, i)).save(folder / f"{i}.png")
    (root / "ann" / "cat" / "notes.txt").write_text("not a picture")


def test_a_folder_of_images(tmp_path):
    pictures(tmp_path / "photos")
    federation = from_folder(tmp_path / "photos", seed=3)
    assert list(federation.clients) == ["ann", "bob"]
    assert federation.name == "photos"
    for name, red in (("ann", 0), ("bob", 100)):
        for part in ("train", "val", "test"):
            mine = federation.part(name, part)
            assert (mine.x[:, 0] == red).all()
            assert torch.equal(mine.x[:, 1, 0, 0] // 100, mine.y.to(torch.uint8))
    assert from_folder(tmp_path / "photos", colour=False, size=(4, 5)).input_shape == (1, 4, 5)


def test_folder_mistakes(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="<client>/<class>/<image>"):
        from_folder(tmp_path / "empty")
    pictures(tmp_path / "odd", odd=9)
    with pytest.raises(ValueError, match=r"bob.dog.3.png: .*give size="):
        from_folder(tmp_path / "odd")


def test_a_table_in_csv_and_parquet_give_the_same(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    age, dose = np.arange(30.0), RNG.random(30).round(3)
    who, sick = [f"h{i % 3}" for i in range(30)], ["yes" if i % 2 else "no" for i in range(30)]
    lines = [f"{who[i]},{age[i]},{dose[i]},{sick[i]}" for i in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["client,age,dose,label", *lines]) + "\n")
    pq.write_table(pa.table({"client": who, "age": age, "dose": dose, "label": sick}), tmp_path / "t.parquet")
    csv, parquet = from_table(tmp_path / "t.csv"), from_table(tmp_path / "t.parquet")
    for client in ("h0", "h1", "h2"):
        one, two = csv.part(client, "train"), parquet.part(client, "train")
        assert torch.equal(one.x, two.x)
        assert torch.equal(one.y, two.y)
    part = csv.part("h1", "train")
    assert torch.allclose(part.x[:, 0], torch.from_numpy(age).float()[part.rows])
    assert from_table(tmp_path / "t.csv", features=["dose"]).input_shape == (1,)
    (tmp_path / "gap.csv").write_text("client,age,label\na,1,0\na,2\n")
    (tmp_path / "nan.csv").write_text("client,age,label\na,1,0\na,nan,1\n")
    for name, options, message in (
        ("t.csv", {"owner": "site"}, "unknown column 'site': .* Known: age, client, dose, label"),
        ("t.csv", {"features": ["age", "client"]}, "'client' is not all numbers"),
        ("gap.csv", {}, "line 3: 2 cells"),
        ("nan.csv", {}, "'age' has no number in row 1"),
    ):
        with pytest.raises(ValueError, match=message):
            from_table(tmp_path / name, **options)


def test_a_parquet_table_may_hold_images_or_lists(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq
    from tests.support.files import write_images

    x = RNG.integers(0, 256, (24, 5, 5, 3), dtype=np.uint8)
    names = [f"p{i % 2}" for i in range(24)]
    write_images(tmp_path / "i.parquet", "image", x, client=names, label=np.arange(24) % 2)
    part = first_client(from_table(tmp_path / "i.parquet", features="image"))
    assert np.array_equal(part.x.permute(0, 2, 3, 1).numpy(), x[part.rows])
    words = np.arange(24 * 4).reshape(24, 4)
    table = pa.table({"client": names, "tokens": words.tolist(), "label": np.arange(24) % 2})
    pq.write_table(table, tmp_path / "l.parquet")
    part = first_client(from_table(tmp_path / "l.parquet"))
    assert part.x.dtype is torch.int64
    assert np.array_equal(part.x.numpy(), words[part.rows])


class Pictures(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, at):
        return Image.new("RGB", (7, 5), (at, 0, 0)), "ab"[at % 2]


def test_any_torch_dataset():
    x, y = torch.randn(40, 3, 6, 3), torch.arange(40) % 3
    part = first_client(from_dataset(TensorDataset(x, y), OWNERS))
    assert torch.equal(part.x, x[part.rows])
    assert torch.equal(part.y, y[part.rows])
    federation = from_dataset(Pictures(), ["u", "v"] * 10)
    assert (federation.input_shape, federation.class_names) == ((3, 5, 7), ("a", "b"))
    assert first_client(federation).x[:, 0, 0, 0].tolist() == first_client(federation).rows.tolist()
    with pytest.raises(ValueError, match="20 samples but 2 owners"):
        from_dataset(Pictures(), ["u", "v"])
    ragged = [(torch.zeros(2), 0), (torch.zeros(3), 0)]
    with pytest.raises(ValueError, match="sample 1 has shape"):
        from_dataset(ragged, ["u", "v"])
