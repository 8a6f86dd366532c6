"""Data as users have it: every form becomes the same federation, and what cannot be read is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pfedgate
from pfedgate import data
from pfedgate.config.recipe import RecipeError

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
WHO = [("ann", "bob", "eve")[at % 3] for at in range(60)]


class Frame:
    """As much of a DataFrame as is used."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = {name: np.asarray(values) for name, values in columns.items()}
        self.columns = list(columns)

    def __getitem__(self, name: str) -> Any:
        return type("Series", (), {"to_numpy": lambda _: self._columns[name]})()

    def to_numpy(self) -> None:
        raise AssertionError("columns are read one by one")


class Hub:
    """As much of a Hugging Face dataset as is used: rows are dictionaries."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns, self.column_names = columns, list(columns)

    def __getitem__(self, key: Any) -> Any:
        return self._columns[key] if isinstance(key, str) else {n: v[key] for n, v in self._columns.items()}

    def __len__(self) -> int:
        return 60


FLAT = {**{f"f{at}": X[:, at] for at in range(4)}, "label": Y, "who": WHO}
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "arrays": ({"x": X, "y": Y, "who": WHO}, {"owner": "who"}),
    "tensors": ({"x": torch.from_numpy(X), "y": torch.from_numpy(Y), "owner": WHO}, {}),
    "columns": (FLAT, {"owner": "who"}),
    "frame": (Frame(FLAT), {"owner": "who"}),
    "hub": (Hub({"x": X.tolist(), "label": Y.tolist(), "client": WHO}), {}),
    "pair": ((X, Y), {"owner": WHO}),
    "dataset": (torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), {"owner": WHO}),
    "owners beside columns": ({"x": X, "y": Y}, {"owner": WHO}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_federation(form: str) -> None:
    source, given = FORMS[form]
    federation, expected = data.adopt(source, **given), data.from_arrays(X, Y, owners=WHO)
    assert list(federation.clients) == list(expected.clients)
    for client in expected.clients:
        for part in ("train", "val", "test"):
            ours, theirs = federation.part(client, part), expected.part(client, part)
            torch.testing.assert_close(ours.x, theirs.x)
            assert torch.equal(ours.y, theirs.y)


@pytest.mark.parametrize("form", ["arrays", "dataset", "hub", "frame"])
def test_a_run_takes_them(form: str) -> None:
    source, given = FORMS[form]
    result = pfedgate.run(data=source, **given, algorithm="fedavg", train={"rounds": 1})
    assert sorted(result.clients) == ["ann", "bob", "eve"]


def test_a_file_becomes_part_of_the_recipe(tmp_path: Path) -> None:
    table = tmp_path / "visits.csv"
    lines = [",".join(map(str, (*row, y, who))) for row, y, who in zip(X, Y, WHO, strict=True)]
    table.write_text("\n".join(["a,b,c,d,outcome,hospital", *lines]))
    result = pfedgate.run(
        data=table, owner="hospital", label="outcome", algorithm="fedavg", train={"rounds": 1}, out=tmp_path / "run"
    )
    assert sorted(result.clients) == ["ann", "bob", "eve"]
    assert pfedgate.load(tmp_path / "run").clients["ann"].predict(torch.from_numpy(X[:3])).shape == (3,)


@pytest.mark.parametrize(
    ("source", "given", "message"),
    [
        ({"x": X, "y": Y}, {}, "which column is the owner. Give owner=…: the data unknown column"),
        (
            {"x": X, "label": Y, "y": Y, "owner": WHO},
            {},
            "which column is the label.*the data has label and y",
        ),
        ({"x": X, "y": Y, "who": WHO}, {"owner": "whoo"}, "unknown column 'whoo': did you mean 'who'"),
        ({"train": Hub({"x": X})}, {}, r"has the splits train: give one of them, such as data\['train'\]"),
        ((X, Y), {"owner": "who"}, "names a column, which tuple has not: give one owner per row"),
        (torch.utils.data.TensorDataset(torch.from_numpy(X)), {}, "who owns which of 60 samples"),
        (torch.utils.data.TensorDataset(torch.from_numpy(X)), {"owner": WHO}, r"not a pair \(input, label\)"),
        (3, {}, "cannot read data from int"),
        ("nowhere", {}, "no data in nowhere"),
        (data.from_arrays(X, Y, owners=WHO), {"owner": WHO}, "has owners and labels already"),
    ],
)
def test_what_cannot_be_read_is_said(source: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        data.adopt(source, **given)


def test_owner_without_data_is_refused() -> None:
    with pytest.raises(RecipeError, match="owner= and label= say what is in data"):
        pfedgate.run(owner="who")


def test_owners_with_too_few_samples_are_said() -> None:
    with pytest.warns(UserWarning, match="1 of 4 owners are left out, because they have fewer than 3 samples"):
        data.from_arrays(X, Y, owners=[*WHO[:-1], "lone"])


def test_a_size_may_be_one_number(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for client in ("ann", "bob"):
        for label in ("cat", "dog"):
            (tmp_path / "photos" / client / label).mkdir(parents=True)
            for at in range(4):
                image.new("RGB", (20, 30), (at, 0, 0)).save(tmp_path / "photos" / client / label / f"{at}.png")
    federation = data.adopt(tmp_path / "photos", size=16, cache_dir=tmp_path)
    assert federation.input_shape == (3, 16, 16)
