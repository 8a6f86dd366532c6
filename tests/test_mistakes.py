"""What users get wrong is said in words, before anything is trained or written, and where they wrote it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import pfedgate
from pfedgate import data
from pfedgate.cli import app
from pfedgate.config.options import options_of
from pfedgate.core.kinds import METRICS
from pfedgate.report.content import common_target

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
WHO = ["ann", "bob", "eve"] * 30
FLAT = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


def gap(x: Any) -> Any:
    holed = x.copy()
    holed[4, 2] = np.nan
    return holed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train": {"rounds": 0}}, r"train\.rounds is a whole number from 1 on, got 0"),
        ({"data": (gap(X), Y), "owner": WHO}, r"an input of client 'bob' is not a number \(NaN or infinite\)"),
        ({"data": (X[:, 0], Y), "owner": WHO}, r"inputs of shape \(90,\): give rows of features"),
        ({"data": (X, X[:, 0]), "owner": WHO}, 'labels are numbers with a fraction.*task="regression"'),
        ({"data": (X, np.stack([Y, Y], 1)), "owner": WHO}, r"labels have the shape \(90, 2\), not one per row"),
        ({"data": (X, Y + 5), "owner": WHO, "model": nn.Linear(6, 2)}, "2 outputs, but a label of client '.*' is 6"),
        *(
            (
                {"data": "digits", "model": FLAT, "algorithm": method},
                "5 outputs, but a label .* is 9 .*: give the model 10",
            )
            for method in ("fedavg", "pfedgate", "heterofl")
        ),
        ({"data": "./photoz"}, r"no file or folder \./photoz: data is a name, a folder of images or a table"),
        ({"dat": "digits"}, "'dat' names no section.*did you mean data"),
        ({"rouns": 3}, r"'rouns' names no section.*did you mean train\.rounds"),
        ({"run": {"device": "cuda"}}, "torch finds none on this machine: set run.device to auto or cpu"),
        ({"clients": {"budget": {"05": 0.3, "50": 0.3, "default": 1.0}}}, "a budget for '50', which is no client"),
        ({"data": (np.array([["a", "b"]] * 90), Y), "owner": WHO}, "inputs are numbers, got values of type <U1"),
        ({"data": ([[1, 2], [3]] * 45, Y), "owner": WHO}, "inputs must be equally long, one row per sample"),
        ({"data": (X, Y), "owner": [None, *WHO[1:]]}, "a sample has no owner"),
        ({"data": (X, Y)}, r"who owns which sample\? Give owner=\[one name per row\]"),
        ({"task": {"loss": nn.functional.mse_loss}}, "task.loss is a text.*FILE.py:mse_loss"),
        ({"clients": {"budget": 0.0001}}, r"smallest feasible .* in a recipe algorithm\.smallest"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_it_is_said_before_a_folder_exists(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    if given.get("run") and torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(ValueError, match=re.compile(message, re.S)):
        pfedgate.run(**given, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "."], ". is a folder: give the path of a TOML file"),
        (["run", "--set", "train.rounds=0", "--out", "r"], "train.rounds is a whole number from 1 on"),
        (["run", "--set", "clients.budget=0.0001"], "smallest feasible"),
        (["compare", "fedavg", "pfedgate:clients.budget=0.0001"], "smallest feasible"),
        (["run", "--set", "data.name=table", "--set", "data.path=no.csv"], "no file"),
        (["run", "--budget", "30%"], "a budget is a share such as 0.3, or the path of a CSV of devices"),
        (["run", "--set", "task.loss=squared"], "the loss 'squared' cannot be computed from outputs of shape (3, 10)"),
        (["run", "--set", 'task.metrics=["mae"]'], "the metric 'mae' cannot be computed for classification"),
        (["data", "show", "./photoz"], "no file or folder ./photoz"),
    ],
)
def test_a_command_that_cannot_work_leaves_no_folder(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_files_that_are_not_what_they_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.toml").write_bytes(b'[data]\nname = "d\xe9"\n')
    Path("file").touch()
    Path("boom.py").write_text("def build():\n    raise KeyError('weights')\n")
    (tmp_path / "runs/one").mkdir(parents=True)
    Path("runs/one/config.toml").touch()
    for words, message in (
        (["run", "latin.toml"], "latin.toml is not text in UTF-8"),
        (["run", "--rounds", "1", "--out", "file"], "file is a file: a run needs a folder of its own"),
        (["run", "--rounds", "1", "--out", "/proc/x"], "cannot write a run into /proc/x"),
        (["report", "runs"], "runs holds no run: there is no config.toml in it; it has the runs runs/one"),
        (["run", "--model", "boom.py:build"], "boom.py failed: KeyError: 'weights'"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            told = CliRunner().invoke(app, words)
        assert told.exit_code == 1, words
        assert message in told.stderr, words


def test_what_is_no_recipe_or_list_is_said() -> None:
    federation = data.from_arrays(X, Y, owners=WHO)
    with pytest.raises(ValueError, match=r"got Federation: data goes to data=…, a model to model=…"):
        pfedgate.run(federation)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"callbacks=\[function\]"):
        pfedgate.run(callbacks=print)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model is called without arguments .*: give lambda: Net"):
        pfedgate.run(data=federation, model=lambda width: nn.Linear(6, width))
    result = pfedgate.run(data=(X, X[:, 0]), owner=WHO, task="regression", algorithm="fedavg", train={"rounds": 1})
    assert result.metric.name == "mae"
    with pytest.raises(ValueError, match=r"the client's are \(n, 6\) and float32, one row per sample"):
        result.clients["ann"].predict(X[:, :3])


def test_a_misspelt_command_is_corrected_once() -> None:
    told = CliRunner().invoke(app, ["rnu"])
    assert told.exit_code == 2
    assert told.stderr.count("Did you mean") == 1
    assert "'run'" in told.stderr


def test_a_client_may_lack_its_zeros(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pfedgate.run(data={"name": "digits", "clients": 12}, train={"rounds": 1}, out=folder)
    told = CliRunner().invoke(app, ["export", str(folder), "--client", "3", "--out", str(tmp_path / "x.pt2")])
    assert "did you mean '03'?" in told.stderr


def warned(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return caught


@pytest.mark.parametrize(
    "call",
    [
        lambda: data.from_arrays(X, Y, owners=[*WHO[:-1], "lone"]),
        lambda: pfedgate.run(algorithm="fedavg", train={"rounds": 1}, clients={"budget": 0.5}, data={"clients": 4}),
        lambda: pfedgate.gate(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)), (4, 6), budget=0.9),
        torch.no_grad()(lambda: data.from_arrays(X, Y, owners=[*WHO[:-1], "lone"])),
    ],
    ids=["data", "run", "gate", "within torch"],
)
def test_a_warning_points_at_the_users_line(call: Callable[[], Any]) -> None:
    caught = warned(call)
    assert caught
    assert {warning.filename for warning in caught} == {__file__}


def test_a_gate_that_is_too_large_names_keys_that_exist() -> None:
    def build(**given: Any) -> Any:
        return pfedgate.gate(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)), (4, 6), budget=0.9, **given)

    (warning,) = warned(build)
    text = str(warning.message)
    allowed = float(text.split("'max_share': ")[1].split("}")[0])
    assert not warned(lambda: build(gate={"max_share": allowed}))
    assert {"blocks", "gate.pool", "gate.paths", "gate.max_share"} <= set(options_of("algorithm", "pfedgate"))
    assert "algorithm.blocks, algorithm.gate.pool, .paths and .max_share" in text


def test_rounds_to_a_share_count_to_the_same_target() -> None:
    slow = {"curves": {"round": [1, 2, 3], "accuracy": [0.5, 0.5, 0.8]}, "summary": {}}
    fast = {"curves": {"round": [1, 2, 3], "accuracy": [0.4, 0.85, None]}, "summary": {}}
    other = {"curves": {"round": [1], "accuracy": [0.1]}, "summary": {}}
    common_target([slow, fast, other], [0, 0, 1], METRICS["accuracy"])
    assert [run["summary"]["rounds_to_90"] for run in (slow, fast, other)] == [3, 2, 1]


def test_a_hugging_face_dataset_is_data() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({
        "x": datasets.Sequence(datasets.Value("float32")), "label": datasets.ClassLabel(names=["no", "yes"]),
        "user": datasets.Value("string"),
    })  # fmt: skip
    hub = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist(), "user": WHO}, features=features)
    result = pfedgate.run(data=hub, algorithm="fedavg", train={"rounds": 1})
    assert list(result.clients) == ["ann", "bob", "eve"]
    with pytest.raises(ValueError, match="has the splits train: give one of them"):
        pfedgate.run(data=datasets.DatasetDict({"train": hub}))
    with pytest.raises(ValueError, match="unknown column 'usr': did you mean 'user'"):
        pfedgate.run(data=hub, owner="usr")
    with pytest.raises(ValueError, match=r"not a pair \(input, label\): a data set of columns goes to"):
        data.from_dataset(hub, owners=WHO)


def test_a_data_frame_is_data() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({**{f"f{at}": X[:, at] for at in range(6)}, "hospital": WHO, "label": Y})
    result = pfedgate.run(data=frame, owner="hospital", algorithm="fedavg", train={"rounds": 1})
    shown = result.to_frame()
    assert list(shown["client"]) == ["ann", "bob", "eve"]
    assert shown["accuracy"].between(0, 1).all()
