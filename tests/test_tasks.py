"""Every algorithm on every kind of task it can do, through recipes; what does not fit is said before training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pfedgate
from pfedgate import algorithms, data, experiment
from pfedgate.config.recipe import RecipeError, resolve
from pfedgate.core.kinds import KINDS
from pfedgate.runs import folder as runfolder

DATA: dict[str, dict[str, Any]] = {
    "tags": {"clients": 4, "samples_per_client": 40},
    "meters": {"clients": 4, "samples_per_client": 40},
    "shapes": {"clients": 3, "samples_per_client": 15, "size": 8},
    "babble": {"clients": 4, "samples_per_client": 20},
}
MODELS = {"shapes": {"name": "unet", "width": 0.5}, "babble": {"name": "token_gru", "hidden": 16}}
# Methods that need layers of a kind, or parts that a recipe must name.
NEEDS = {"fedbn": "a norm"}


def recipe(name: str, method: str, **more: Any) -> dict[str, Any]:
    model = MODELS.get(name, {"name": "mlp", "hidden": [16]})
    budget = 0.6 if algorithms.get(method).budgeted else 1.0
    return {
        "data": {"name": name, **DATA[name]}, "model": model, "algorithm": method, "clients": {"budget": budget},
        "train": {"rounds": 2, "batch": 8, "lr": 0.05}, "run": {"workers": 1, "device": "cpu"}, **more,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("method", [name for name in algorithms.names() if name not in NEEDS])
def test_every_algorithm_learns_or_refuses_by_name(name: str, method: str) -> None:
    kind = getattr(data.exercises, name)(clients=3).task
    if kind not in algorithms.get(method).kinds:
        with pytest.raises(ValueError, match=rf"algorithm '{method}' learns .*, not {kind}"):
            experiment.plan(resolve(recipe(name, method)))
        return
    result = pfedgate.run(recipe(name, method, evaluate={"every": 1}))
    main = KINDS[kind].metrics[0]
    summary = result.summary
    assert summary.get("metric", "accuracy") == main
    for name in (main, f"best_{main}", "bottom_decile", "loss", *KINDS[kind].metrics):
        assert np.isfinite(summary[name]), name
    assert all(np.isfinite(record["loss"]) for record in result.history)


@pytest.mark.parametrize(("name", "rounds", "lr"), [("tags", 15, 0.1), ("meters", 15, 0.05), ("babble", 15, 0.3)])
def test_a_personal_model_is_better_than_one_for_all(name: str, rounds: int, lr: float) -> None:
    scores = {}
    for method in ("fedavg", "local_only"):
        layer = recipe(name, method, train={"rounds": rounds, "batch": 8, "lr": lr}, evaluate={"every": 0})
        layer["evaluate"] = {"every": rounds}
        result = pfedgate.run(layer)
        metric = experiment.plan(resolve(layer)).algorithm.task.metric
        scores[method] = result.summary[metric.name]
    assert metric.better(scores["local_only"], scores["fedavg"]), scores


def test_less_is_better_where_it_is(tmp_path: Path) -> None:
    result = pfedgate.run(recipe("meters", "fedavg_ft", evaluate={"every": 1}), train={"rounds": 4}, out=tmp_path / "r")
    curve = [record["after_broadcast"]["val_mae"] for record in result.history]
    assert result.summary["best_round"] == 1 + int(np.argmin(curve))
    scores = [score.test.score for score in result.scores]
    assert result.summary["bottom_decile"] == max(scores)
    rows = runfolder.load(tmp_path / "r").clients
    assert [row["mae"] for row in rows] == scores
    assert {"rmse", "r2", "val_mae"} <= set(rows[0])


def test_corrections_by_labels_are_skipped_with_a_word_if_asked_for(recwarn: pytest.WarningsRecorder) -> None:
    experiment.plan(resolve(recipe("meters", "fedavg")))
    assert not recwarn.list
    for asked in ({"correction": "prediction"}, {"shift": True}):
        with pytest.warns(UserWarning, match=r"train\.correction and train\.shift are skipped: regression has no cla"):
            experiment.plan(resolve(recipe("meters", "fedavg"), {"train": asked}))


@pytest.mark.parametrize("labels", [[0], [3], ["cat"]])
def test_one_class_is_said(labels: list[Any]) -> None:
    given = {"x": X, "y": np.array(labels * 60), "owner": OWNERS}
    with pytest.warns(UserWarning, match=f"every label is {labels[0]!r}: with one class there is nothing to learn"):
        pfedgate.run(data=given, algorithm="fedavg", model="mlp", train={"rounds": 1})


def test_a_metric_of_another_kind_is_refused_at_once() -> None:
    """Also where the number of rows that are looked at is by chance that of classes."""
    for classes in (2, 3):
        given = {"x": X, "y": np.arange(60) % classes, "owner": OWNERS}
        with pytest.raises(ValueError, match="the metric 'f1' cannot be computed for classification"):
            pfedgate.run(data=given, algorithm="fedavg", model="mlp", task={"metrics": ["f1"]})


def test_data_is_given_again_as_it_was(tmp_path: Path) -> None:
    given = {"x": X, "y": np.arange(60) % 2}
    how: dict[str, Any] = {"data": given, "owner": OWNERS}
    first = pfedgate.run(**how, algorithm="fedavg", model="mlp", train={"rounds": 1}, out=tmp_path / "run")
    again = pfedgate.load(tmp_path / "run", **how).clients["bob"].predict(X[:3])
    assert torch.equal(again, first.clients["bob"].predict(X[:3]))
    assert pfedgate.resume(tmp_path / "run", **how).summary["accuracy"] == first.summary["accuracy"]
    with pytest.raises(ValueError, match=r"give the same again, load\(path, data=…\)"):
        pfedgate.load(tmp_path / "run").clients["bob"].model()


def test_clients_of_one_class_each_are_no_such_case(recwarn: pytest.WarningsRecorder) -> None:
    owners = [f"owner {at // 10:02d}" for at in range(600)]
    y = np.repeat([0] * 55 + [1] * 5, 10)  # the first fifty clients have the same
    given = {"x": np.zeros((600, 5), np.float32), "y": y, "owner": owners}
    pfedgate.run(data=given, algorithm="fedavg", model="mlp", train={"rounds": 1})
    assert not [warning for warning in recwarn.list if "every label" in str(warning.message)]


X = np.random.default_rng(0).normal(size=(60, 5)).astype("float32")
OWNERS = ["ann", "bob", "eve"] * 20


def test_fractions_never_become_classes(tmp_path: Path) -> None:
    y = X @ np.ones(5)
    for given in (y, torch.from_numpy(y), y.tolist(), [f"{value:.3f}" for value in y]):
        with pytest.raises(ValueError, match=r'labels are numbers with a fraction.*task="regression"'):
            data.from_arrays(X, given, owners=OWNERS)
        assert data.from_arrays(X, given, owners=OWNERS, task="regression").classes == 1
    assert data.from_arrays(X, (y > 0).astype(float), owners=OWNERS).classes == 2
    table = tmp_path / "t.csv"
    table.write_text("client,label,a\n" + "\n".join(f"c{i % 3},{v:.4f},{i}" for i, v in enumerate(y)))
    with pytest.raises(ValueError, match="numbers with a fraction"):
        data.from_table(table)
    layer = {"data": {"name": "table", "path": str(table)}, "task": {"kind": "regression"}, "algorithm": "fedavg"}
    assert pfedgate.run(layer, train={"rounds": 1}).summary["metric"] == "mae"


@pytest.mark.parametrize(
    ("y", "task", "message"),
    [
        (
            np.zeros((60, 3), int),
            None,
            r"labels have the shape \(60, 3\), not one per row: say what they are with task=",
        ),
        (np.full((60, 3), 0.5), "multilabel", "they are not all 0 or 1"),
        (np.zeros(60, int), "segmentaton", "did you mean 'segmentation'"),
        (["a"] * 60, "regression", "labels for regression are numbers, got 'a'"),
        (np.zeros(60), "language", r"they have the shape \(12,\)"),
    ],
)
def test_labels_of_the_wrong_form_are_named(y: Any, task: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pfedgate.run(data=data.from_arrays(X, y, owners=OWNERS, task=task), algorithm="fedavg")


def test_the_wrong_column_of_labels_is_suspected() -> None:
    with pytest.warns(UserWarning, match="60 classes in 60 samples, such as 'n0': is this the right column"):
        data.from_arrays(X, [f"n{at}" for at in range(60)], owners=OWNERS)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: torch.nn.Linear(5, 2), "the model has 2 outputs, but a label of client '.*' is 2"),
        (lambda: torch.nn.Linear(4, 3), "the model cannot take the data, a batch of shape"),
        (lambda: torch.nn.LSTM(5, 3), "the model returns tuple"),
        (lambda: torch.nn.Flatten(0), "has the labels' shape and one number for each class"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_a_folder_exists(model: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        pfedgate.run(
            data=data.from_arrays(X, np.arange(60) % 3, owners=OWNERS), model=model, algorithm="fedavg",
            out=tmp_path / "run",
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_an_infeasible_budget_is_refused_before_a_folder_exists(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="budget"):
        pfedgate.run(clients={"budget": 0.001}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_goals_of_recipes_are_checked() -> None:
    for layer, message in (
        ({"task": {"kind": "regresion"}}, "did you mean 'regression'"),
        ({"task": {"loss": "sqared"}}, "did you mean 'squared'"),
        ({"task": {"metrics": ["acuracy"]}}, "did you mean 'accuracy'"),
    ):
        with pytest.raises(RecipeError, match=message):
            resolve(layer)
    again = resolve({"task": {"metrics": ["loss", "accuracy"]}})
    assert resolve(again.tables()) == again
    assert "task" not in resolve().tables()
    layer = {"data": {"clients": 4}, "train": {"rounds": 1}, "algorithm": "fedavg"}
    assert pfedgate.run(again.tables(), **layer).summary["metric"] == "loss"


PLAY = "\n\n".join(
    f"{role}:\n{line}"
    for at in range(9)
    for role, line in (("FIRST CITIZEN", f"Speak, {at}!" * 4), ("ALL", "Resolved, resolved. " * 3))
)


def test_shakespeare_by_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_text(PLAY, encoding="utf-8")
    monkeypatch.setenv("PFEDGATE_DATA", str(tmp_path))
    federation = data.shakespeare(length=12)
    assert list(federation.clients) == ["ALL", "FIRST CITIZEN"]
    part = federation.part("ALL", "train")
    letters = sorted(set(PLAY))
    for x, y in zip(part.x, part.y, strict=True):
        assert torch.equal(x[1:], y[:-1]), "labels are the next characters"
        words = "".join(letters[code] for code in x)
        assert words in "Resolved, resolved. " * 99 or "\n" in words
    layer = {"data": {"name": "shakespeare", "length": 12}, "algorithm": "fedavg", "train": {"rounds": 1}}
    summary = pfedgate.run(layer, model={"hidden": 8}).summary
    assert 0 < summary["accuracy"] < 1 < summary["perplexity"]
    with pytest.raises(ValueError, match="no role says more than 4000"):
        data.shakespeare(length=4000)
    with pytest.raises(FileNotFoundError, match="no text file"):
        data.shakespeare("nowhere.txt")


def test_shakespeare_without_a_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **more: Any) -> None:
        raise OSError("no network")

    monkeypatch.delenv("PFEDGATE_DATA", raising=False)
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(ConnectionError, match=r"Save that file as shakespeare/input\.txt"):
        data.shakespeare(cache_dir=tmp_path)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]


def test_workers_take_tasks_of_all_kinds() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = pfedgate.run(recipe("shapes", "pfedgate"))
        together = pfedgate.run(recipe("shapes", "pfedgate"), run={"workers": 2})
    assert alone.history == together.history
