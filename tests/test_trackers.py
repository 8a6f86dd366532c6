"""Trackers get the numbers of every round; without their package they say how to install it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from pfedgate import experiment
from pfedgate.cli import app
from pfedgate.runs import folder as runfolder
from pfedgate.runs import trackers

SMALL: dict[str, Any] = {"data": {"name": "digits", "clients": 4, "samples": 200}, "algorithm": {"name": "fedavg"}}
RECIPE = experiment.recipe_of(SMALL, {"train": {"rounds": 2}, "evaluate": {"every": 2}, "run": {"workers": 1}})


class Writer:
    """What TensorBoard's writer does, remembered."""

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.scalars, self.texts, self.open = folder, purge_step, {}, {}, True
        Writer.last = self

    last: Any
    breaks: tuple[int, BaseException] | None = None  # a round that ends in this

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert self.open
        if Writer.breaks and Writer.breaks[0] == step:
            raise Writer.breaks[1]
        self.scalars[name, step] = value

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts[name] = text

    def flush(self) -> None:
        assert self.open

    def close(self) -> None:
        self.open = False


class WandBRun:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.logged, self.summary, self.exit_code = options, {}, {}, None
        self.id = options.get("id") or "fresh"
        WandBRun.last = self

    last: Any

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged[step] = values

    def finish(self, exit_code: int) -> None:
        assert self.exit_code is None, "closed twice"
        self.exit_code = exit_code


class MlflowException(Exception):
    pass


class Client:
    """What MLflow's client does, remembered; runs outlive it, as on a server."""

    runs: dict[str, str]  # their states
    last: Any

    def __init__(self, tracking_uri: str | None) -> None:
        self.uri, self.metrics, self.params = tracking_uri, {}, {}
        Client.last = self

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, number: str, run_name: str | None) -> Any:
        assert number == "7"
        name = f"run{len(self.runs)}"
        self.runs[name] = "RUNNING"
        return SimpleNamespace(info=SimpleNamespace(run_id=name))

    def update_run(self, run: str, status: str) -> None:
        if run not in self.runs:
            raise MlflowException(f"no run {run}")
        self.runs[run] = status

    def log_param(self, run: str, key: str, value: str) -> None:
        self.params[key] = value

    def log_metric(self, run: str, key: str, value: float, step: int) -> None:
        assert self.runs[run] == "RUNNING"
        self.metrics[key, step] = value

    def set_terminated(self, run: str, status: str) -> None:
        assert self.runs[run] == "RUNNING", "closed twice"
        self.runs[run] = status


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    board, wandb, mlflow = ModuleType("torch.utils.tensorboard"), ModuleType("wandb"), ModuleType("mlflow")
    board.SummaryWriter = Writer  # type: ignore[attr-defined]
    wandb.init = lambda **options: WandBRun(options)  # type: ignore[attr-defined]
    mlflow.tracking = SimpleNamespace(MlflowClient=Client)  # type: ignore[attr-defined]
    mlflow.exceptions = SimpleNamespace(MlflowException=MlflowException)  # type: ignore[attr-defined]
    monkeypatch.setattr(Client, "runs", {}, raising=False)
    monkeypatch.setattr(Writer, "breaks", None)
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
    assert writer.scalars["summary/accuracy", 2] == accuracy
    assert not writer.open

    run = wandb._run
    assert {step: values["train/loss"] for step, values in run.logged.items()} == losses
    assert run.options["project"] == "pfedgate"
    assert run.options["mode"] == "offline"
    assert run.options["config"]["train.rounds"] == 2
    assert run.summary["accuracy"] == accuracy
    assert run.exit_code == 0

    client = Client.last
    assert {step: client.metrics["train/loss", step] for step in losses} == losses
    assert client.params["algorithm.name"] == "fedavg"
    assert client.uri == "file:somewhere"
    assert client.metrics["summary/accuracy", 2] == accuracy
    assert client.runs == {"run0": "FINISHED"}


@pytest.mark.usefixtures("fakes")
def test_by_name(tmp_path: Path) -> None:
    trackers.build("tensorboard", tmp_path)({"event": "start", "round": 0})
    assert Writer.last.folder == str(tmp_path / "tensorboard")
    assert trackers.build("wandb", tmp_path)._run.options["name"] == tmp_path.name
    with pytest.raises(ValueError, match="did you mean 'wandb'"):
        trackers.build("wandbb", tmp_path)


def tracked(folder: Path, *more: str, names: tuple[str, ...] = ("tensorboard", "wandb", "mlflow")) -> Any:
    return CliRunner().invoke(app, [*more, *(part for name in names for part in ("--track", name))])


def tracked_run(folder: Path, **options: Any) -> Any:
    """A run of five rounds that is kept after every second one."""
    settings = {"data.clients": 4, "data.samples": 200, "algorithm.name": "fedavg", "train.rounds": 5, "run.workers": 1}
    settings |= {"run.checkpoint_every": 2, "run.keep_best": "false"}
    given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    return tracked(folder, "run", "--out", str(folder), *given, **options)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("error", "status", "code", "said"),
    [(KeyboardInterrupt(), "KILLED", 130, "Go on with"), (OSError("disk full"), "FAILED", 1, "disk full")],
)
def test_trackers_are_told_how_it_ended_and_resumed(
    tmp_path: Path, error: BaseException, status: str, code: int, said: str
) -> None:
    folder = tmp_path / "run"
    Writer.breaks = 3, error
    result = tracked_run(folder)
    assert (result.exit_code, said in result.output) == (code, True), result.output
    assert not Writer.last.open
    assert WandBRun.last.exit_code == code
    assert Client.runs == {"run0": status}

    Writer.breaks = None
    result = tracked(folder, "resume", str(folder))
    assert result.exit_code == 0, result.output
    assert Writer.last.purge_step == 3  # two rounds were kept: what TensorBoard has of the third goes
    assert "recipe" not in Writer.last.texts
    assert WandBRun.last.options["id"] == "fresh"
    assert WandBRun.last.options["resume"] == "allow"
    assert WandBRun.last.exit_code == 0
    assert list(WandBRun.last.logged) == [3, 4, 5]
    assert Client.runs == {"run0": "FINISHED"}
    assert {step for _, step in Client.last.metrics} == {3, 4, 5}


@pytest.mark.usefixtures("fakes")
def test_a_run_that_mlflow_no_longer_has_is_made_anew(tmp_path: Path) -> None:
    first = trackers.build("mlflow", tmp_path, RECIPE)
    trackers.build("wandb", tmp_path)
    assert trackers.build("mlflow", tmp_path).id == first.id
    Client.runs = {"another": "RUNNING"}
    again = trackers.build("mlflow", tmp_path, RECIPE)
    assert again.id != first.id
    assert Client.last.params["algorithm.name"] == "fedavg"
    assert trackers.build("mlflow", tmp_path).id == again.id
    assert trackers.build("wandb", tmp_path).id == "fresh"


@pytest.mark.usefixtures("fakes")
def test_a_tracker_that_cannot_be_made_closes_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(**options: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(sys.modules["wandb"], "init", offline)
    assert "no network" in tracked_run(tmp_path / "run", names=("mlflow", "wandb")).output
    assert Client.runs == {"run0": "FAILED"}


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


def interrupted(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """A run that a tracker hears of, stopped in its third round and resumed; returns its losses by round."""
    real = trackers.Tracker.__call__

    def stop(tracker: trackers.Tracker, event: dict[str, Any]) -> None:
        real(tracker, event)
        if event.get("round") == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trackers.Tracker, "__call__", stop)
        assert tracked_run(folder, names=(name,)).exit_code == 130
    result = tracked(folder, "resume", str(folder), names=(name,))
    assert result.exit_code == 0, result.output
    return {record["round"]: record["loss"] for record in runfolder.load(folder).metrics}


# The packages themselves, where they are installed: fakes only know what we believe of them.
@pytest.mark.filterwarnings("default")
def test_the_real_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra 'track'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses, accuracy = run_with(trackers.build("tensorboard", tmp_path, RECIPE))
    written = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {e.step: e.value for e in written.Scalars("train/loss")} == pytest.approx(losses)
    assert [e.value for e in written.Scalars("after_broadcast/accuracy")] == pytest.approx([accuracy])
    assert [e.value for e in written.Scalars("summary/accuracy")] == pytest.approx([accuracy])

    losses = interrupted(tmp_path / "run", "tensorboard", monkeypatch)
    written = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert [(e.step, e.value) for e in written.Scalars("train/loss")] == [
        (step, pytest.approx(loss)) for step, loss in losses.items()
    ]  # each round once, though the third was written twice
    assert len(written.Tensors("recipe/text_summary")) == 1


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

    losses = interrupted(tmp_path / "run", "wandb", monkeypatch)
    parts = sorted(tmp_path.glob("run/wandb/offline-run-*/*.wandb"))
    assert len({part.name for part in parts}) == 1  # one run, by its id
    records = b"".join(part.read_bytes() for part in parts)
    assert all(f"{value}".encode() in records for value in losses.values())
    assert wandb.run is None


@pytest.mark.filterwarnings("default")
def test_the_real_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra 'mlflow'")
    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    tracker = trackers.MLflow(RECIPE, uri=uri, name="first")
    losses, accuracy = run_with(tracker)
    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    number = client.get_experiment_by_name("pfedgate").experiment_id
    (run,) = client.search_runs([number])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.params["algorithm.name"] == "fedavg"
    assert {m.step: m.value for m in client.get_metric_history(run.info.run_id, "train/loss")} == pytest.approx(losses)
    assert run.data.metrics["after_broadcast/accuracy"] == pytest.approx(accuracy)
    assert run.data.metrics["summary/accuracy"] == pytest.approx(accuracy)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    losses = interrupted(tmp_path / "second", "mlflow", monkeypatch)
    (run,) = [found for found in client.search_runs([number]) if found.info.run_name == "second"]
    assert run.info.status == "FINISHED"
    assert {m.step: m.value for m in client.get_metric_history(run.info.run_id, "train/loss")} == pytest.approx(losses)
    with pytest.raises(ZeroDivisionError), trackers.MLflow(uri=uri, name="third"):
        raise ZeroDivisionError
    (run,) = [found for found in client.search_runs([number]) if found.info.run_name == "third"]
    assert run.info.status == "FAILED"
