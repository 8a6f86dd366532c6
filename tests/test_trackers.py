"""Trackers get the numbers of every round; without their package they say how to install it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from pfedgate import experiment, trackers
from pfedgate.cli import app

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


def test_a_run_that_cannot_be_tracked_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for name, told in (("mlflow", "not installed"), ("mlfow", "did you mean 'mlflow'")):
        result = CliRunner().invoke(app, ["run", "--track", name, "--out", str(tmp_path / "run")])
        assert result.exit_code != 0
        assert told in result.output.replace("\n", " ")
        assert not (tmp_path / "run").exists()


def test_only_numbers_are_sent() -> None:
    event = {"event": "round", "round": 1, "rounds": 2, "loss": None, "refusals": ["client 'a'"], "ok": True, "q": 0.5}
    assert trackers.scalars(event) == {"train/q": 0.5}


def run_with(tracker: Any) -> tuple[dict[int, float], float]:
    """Losses by round and the last accuracy of a real run that a tracker hears of."""
    result = experiment.run(RECIPE, callbacks=[tracker])
    return {record["round"]: record["loss"] for record in result.history}, result.summary["accuracy"]


# The packages themselves, where they are installed: fakes only know what we believe of them.
@pytest.mark.filterwarnings("default")
def test_the_real_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra 'track'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses, accuracy = run_with(trackers.build("tensorboard", tmp_path, RECIPE))
    written = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {e.step: e.value for e in written.Scalars("train/loss")} == pytest.approx(losses)
    assert [e.value for e in written.Scalars("after_broadcast/accuracy")] == pytest.approx([accuracy])


@pytest.mark.filterwarnings("default")
def test_the_real_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="needs the extra 'wandb'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = trackers.build("wandb", tmp_path, RECIPE)
    losses, accuracy = run_with(tracker)
    assert tracker._run.config["train.rounds"] == 2
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = written.read_bytes()  # values stand in it as JSON
    assert all(f"{value}".encode() in records for value in (*losses.values(), accuracy))
    assert b"after_broadcast/accuracy" in records
    assert wandb.run is None  # ended


@pytest.mark.filterwarnings("default")
def test_the_real_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra 'mlflow'")
    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    tracker = trackers.MLflow(RECIPE, uri=uri, name="first")
    losses, accuracy = run_with(tracker)
    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("pfedgate").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.params["algorithm.name"] == "fedavg"
    assert {m.step: m.value for m in client.get_metric_history(run.info.run_id, "train/loss")} == pytest.approx(losses)
    assert run.data.metrics["after_broadcast/accuracy"] == pytest.approx(accuracy)
