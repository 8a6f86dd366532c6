"""A client met after training: data from a file, its gate into a file, and a small model of it."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.cli import call

import pfedgate
from pfedgate import data, export, novel
from pfedgate.engine.endpoint import NOVEL, Endpoint
from pfedgate.engine.store import MemoryStore


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("novel") / "run"
    sections = {"data": {"name": "digits", "clients": 5}, "train": {"rounds": 2}, "clients": {"budget": 0.5}}
    pfedgate.run(sections, run={"workers": 1}, out=folder)
    return folder


def pictures(root: Path, size: int = 8, client: str = "") -> Path:
    image = pytest.importorskip("PIL.Image")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    for at in range(60):
        folder = root / client / str(bunch.target[at])
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.rint(bunch.images[at] * (255 / 16)).astype(np.uint8)
        image.fromarray(pixels).resize((size, size)).save(folder / f"{at}.png")
    return root


def test_from_a_folder_to_a_small_model(run: Path, tmp_path: Path) -> None:
    photos = pictures(tmp_path / "dora")
    gate = tmp_path / "gate.safetensors"
    told = call("adapt", str(run), "--data", str(photos), "--budget", "0.3", "--out", str(gate))
    assert "client dora: accuracy " in told
    adapted = novel.load(run, gate)
    assert adapted.after.stats["density"] <= 0.3
    assert adapted.after.test.n == 12
    assert f"{100 * adapted.after.test.score:.1f} % after" in told
    # The same gate as in a run that holds the client out, and nothing shared has moved.
    endpoint = Endpoint(adapted.plan.algorithm, adapted.endpoint.federation, MemoryStore())
    (scored,) = endpoint.evaluate(adapted.server, adapted.round, [adapted.card], (NOVEL,))
    assert scored.test == adapted.after.test
    call("export", str(run), "--gate", str(gate), "--out", str(tmp_path / "dora.pt2"))
    small = torch.export.load(tmp_path / "dora.pt2").module()
    made = export.newcomer(run, gate)
    x = made.example.repeat(3, 1, 1, 1)
    torch.testing.assert_close(small(x), made.compact(x), atol=1e-4, rtol=1e-4)
    assert export.parameters(made.compact) < 0.4 * export.parameters(made.dense)


def test_one_of_several_clients_and_images_of_another_size(run: Path, tmp_path: Path) -> None:
    photos = pictures(pictures(tmp_path / "all", 16, "emil"), 16, "finn")
    warnings.simplefilter("ignore")
    with pytest.raises(ValueError, match=r"holds 2 clients \(emil, finn, …\): choose one with --client"):
        novel.adapt(run, photos)
    with pytest.raises(ValueError, match="unknown client 'fin': did you mean 'finn'"):
        novel.adapt(run, photos, client="fin")
    with pytest.warns(UserWarning, match="images are resized to the run's 8 × 8, such as one of 16 × 16"):
        adapted = novel.adapt(run, photos, client="finn")
    assert (adapted.card.id, adapted.card.budget) == ("finn", 0.5)


def test_mistakes_are_named(run: Path, tmp_path: Path) -> None:
    photos = pictures(tmp_path / "gina")
    (photos / "1").rename(photos / "one")
    with pytest.raises(ValueError, match="unknown class 'one'"):
        novel.adapt(run, photos)
    with pytest.raises(FileNotFoundError, match="no images under"):
        novel.adapt(run, tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"`pfedgate adapt .*` writes it"):
        novel.load(run, tmp_path / "no.safetensors")
    assert "whose model? Give --client" in call("export", str(run), "--out", "x.pt2", code=1)
    with pytest.raises(ValueError, match="exceed the budget"):
        novel.adapt(run, pictures(tmp_path / "hugo"), budget=0.001)


@pytest.mark.parametrize("method", ["fedper", "ditto", "fedavg"])
def test_other_methods_and_tables(method: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def table(name: str, owners: list[str]) -> Path:
        rows = [(who, *rng.normal(size=3).round(3)) for who in owners for _ in range(30)]
        lines = [f"{who},{'ill' if a > 0 else 'well'},{a},{b},{c}" for who, a, b, c in rows]
        (tmp_path / name).write_text("\n".join(["site,state,a,b,c", *lines]))
        return tmp_path / name

    own = {"name": "table", "path": str(table("t.csv", ["x", "y"])), "owner": "site", "label": "state",
           "standardise": True}  # fmt: skip
    pfedgate.run(data=own, algorithm=method, train={"rounds": 2}, out=tmp_path / "run")
    adapted = novel.adapt(tmp_path / "run", table("new.csv", ["z"]))
    assert adapted.card.id == "z"
    assert list(adapted.endpoint.federation.class_names) == ["ill", "well"]
    again = novel.load(tmp_path / "run", adapted.save(tmp_path / "z.safetensors"))
    assert again.after == adapted.after
    trained = data.load("digits", clients=4)  # another federation's classes do not fit
    with pytest.raises(ValueError, match="unknown class"):
        novel.newcomer(tmp_path / "new.csv", trained, own)
