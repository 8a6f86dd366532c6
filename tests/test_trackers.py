"""Trackers get the numbers of every round; without their package they say how to install it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pfedgate import experiment, trackers

SMALL: dict[str, Any] = {"data": {"name": "digits", "clients": 4, "samples": 200}, "algorithm": {"name": "fedavg"}}
RECIPE = experiment.recipe_of(SMALL, {"train": {"rounds": 2}, "evaluate": {"every": 2}, "run": {"workers": 1}})


class Writer:
    """What TensorBoard's writer does, remembered."""

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars, self.texts, self.open = folder, {}, {}, True
        Writer.last = self

    last: Any

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert self.open
        self.scalars[name, step] = value

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts[name] = text

    def flush(self) -> None:
        assert self.open

    def close(self) -> None:
        self.open = False


class WandBRun:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.logged, self.summary, self.finished = options, {}, {}, False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged[step] = values

    def finish(self) -> None:
        self.finished = True


class Client:
    """What MLflow's client does, remembered."""

    def __init__(self, tracking_uri: str | None) -> None:
        self.uri, self.metrics, self.params, self.ended = tracking_uri, {}, {}, []
        Client.last = self

    last: Any

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, number: str, run_name: str | None) -> Any:
        assert number == "7"
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def log_param(self, run: str, key: str, value: str) -> None:
        self.params[key] = value

    def log_metric(self, run: str, key: str, value: float, step: int) -> None:
        self.metrics[key, step] = value

    def set_terminated(self, run: str) -> None:
        self.ended.append(run)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    board, wandb, mlflow = ModuleType("torch.utils.tensorboard"), ModuleType("wandb"), ModuleType("mlflow")
    board.SummaryWriter = Writer  # type: ignore[attr-defined]
    wandb.init = lambda **options: WandBRun(options)  # type: ignore[attr-defined]
    mlflow.tracking = SimpleNamespace(MlflowClient=Client)  # type: ignore[attr-defined]
    for module in (board, wandb, mlflow):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("fakes")
def test_trackers_hear_every_round() -> None:
    board = trackers.TensorBoard("somewhere", RECIPE)
    wandb = trackers.WandB(RECIPE, mode="offline")
    mlflow = trackers.MLflow(RECIPE, uri="file:somewhere")
    result = experiment.run(RECIPE, callbacks=[board, wandb, mlflow])
    losses = {record["round"]: record["loss"] for record in result.history}
    accuracy = result.summary["accuracy"]
    assert len(losses) == 2

    writer = Writer.last
    assert {step: writer.scalars["train/loss", step] for step in losses} == losses
    assert writer.scalars["after_broadcast/accuracy", 2] == accuracy
    assert ("after_broadcast/accuracy", 1) not in writer.scalars
    assert 'name = "fedavg"' in writer.texts["recipe"]
    assert not writer.open

    run = wandb._run
    assert {step: values["train/loss"] for step, values in run.logged.items()} == losses
    assert run.options["project"] == "pfedgate"
    assert run.options["mode"] == "offline"
    assert run.options["config"]["train.rounds"] == 2
    assert run.summary["accuracy"] == accuracy
    assert run.finished

    client = Client.last
    assert {step: client.metrics["train/loss", step] for step in losses} == losses
    assert client.params["algorithm.name"] == "fedavg"
    assert client.uri == "file:somewhere"
    assert client.ended == ["abc"]


@pytest.mark.usefixtures("fakes")
def test_by_name() -> None:
    trackers.build("tensorboard", "runs/x")
    assert Writer.last.folder.endswith("x/tensorboard")
    assert trackers.build("wandb", "runs/x")._run.options["name"] == "x"
    with pytest.raises(ValueError, match="did you mean 'wandb'"):
        trackers.build("wandbb", "runs/x")


@pytest.mark.parametrize(
    ("module", "make", "hint"),
    [
        ("torch.utils.tensorboard", lambda: trackers.TensorBoard("x"), r"pfedgate\[track\]"),
        ("wandb", trackers.WandB, r"pfedgate\[wandb\]"),
        ("mlflow", trackers.MLflow, r"pfedgate\[mlflow\]"),
    ],
)
def test_without_the_package(monkeypatch: pytest.MonkeyPatch, module: str, make: Any, hint: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=hint):
        make()


def test_only_numbers_are_sent() -> None:
    event = {"event": "round", "round": 1, "rounds": 2, "loss": None, "refusals": ["client 'a'"], "ok": True, "q": 0.5}
    assert trackers.scalars(event) == {"train/q": 0.5}
