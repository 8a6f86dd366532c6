"""Runs in TensorBoard, Weights & Biases or MLflow: callbacks for `experiment.run` and the engine.

    from pfedgate import trackers
    with trackers.TensorBoard("runs/board") as board:
        experiment.run("recipe.toml", callbacks=[board])

The end of a run closes its trackers; with `with`, so do an error and Ctrl-C. Each is an extra, imported when a tracker
is made. What is sent are numbers of rounds and the recipe: never a model, a gate or anything of a single client.
"""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pfedgate.config.recipe import Recipe
from pfedgate.core.errors import unknown
from pfedgate.engine.files import write_atomically

FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"  # how a run ended; the words are MLflow's
IDS = "trackers.json"  # in a run's folder: which run of W&B or MLflow it is, so that resuming goes on with it
# The module of each tracker and the extra that installs it.
MODULES = {
    "tensorboard": ("torch.utils.tensorboard", "track"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
}
Event = Mapping[str, Any]


def scalars(event: Event) -> dict[str, float]:
    """The numbers of a round by path: training at the top, scores under the point they were taken at.

    >>> scalars({"event": "round", "round": 3, "rounds": 9, "loss": 0.5, "after_broadcast": {"accuracy": 0.9}})
    {'train/loss': 0.5, 'after_broadcast/accuracy': 0.9}
    """
    values: dict[str, Any] = {}
    for name, value in event.items():
        if isinstance(value, Mapping):
            values |= {f"{name}/{key}": item for key, item in value.items()}
        elif name not in ("round", "rounds"):
            values[f"train/{name}"] = value
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def settings(recipe: Recipe | None) -> dict[str, Any]:
    """The recipe in one flat table: {"train.lr": 0.05, …}."""
    tables = {} if recipe is None else recipe.tables()
    return {f"{section}.{key}": value for section, values in tables.items() for key, value in values.items()}


def _load(package: str) -> Any:
    module, extra = MODULES[package]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{package} is not installed: pip install 'pfedgate[{extra}]', or leave this tracker out"
        ) from error


class Tracker(ABC):
    """A callback that hears of rounds and is closed once, in whatever way the run ends."""

    def __init__(self) -> None:
        self._round, self._open = 0, True

    def __call__(self, event: Event) -> None:
        """Hear of a start, a round or the end."""
        self._round = int(event.get("round", self._round))
        if event["event"] == "start":
            self._begin(self._round)
        elif event["event"] == "round":
            self._send(scalars(event), self._round)
        elif event["event"] == "end":
            self._sum_up({name.removeprefix("train/"): value for name, value in scalars(event).items()})
            self.close()

    def close(self, status: str = FINISHED) -> None:
        """Say how the run ended: "FINISHED", "FAILED" or "KILLED". Only the first time counts."""
        if self._open:
            self._open = False
            self._close(status)

    def __enter__(self: Some) -> Some:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        failed = KILLED if kind is not None and issubclass(kind, KeyboardInterrupt) else FAILED
        self.close(FINISHED if kind is None else failed)

    def _begin(self, done: int) -> None:  # noqa: B027 (only TensorBoard needs it)
        pass

    def _sum_up(self, values: dict[str, float]) -> None:
        self._send({f"summary/{name}": value for name, value in values.items()}, self._round)

    @abstractmethod
    def _send(self, values: dict[str, float], round: int) -> None: ...
    @abstractmethod
    def _close(self, status: str) -> None: ...


Some = TypeVar("Some", bound=Tracker)


class TensorBoard(Tracker):
    """Event files of a run, shown by `tensorboard --logdir`."""

    def __init__(self, folder: str | Path, recipe: Recipe | None = None) -> None:
        super().__init__()
        self._make: Callable[..., Any] = _load("tensorboard").SummaryWriter
        self._folder, self._recipe = str(folder), recipe
        self._writer: Any = None

    def _begin(self, done: int) -> None:
        # Rounds after the last checkpoint are written again: TensorBoard forgets the first ones from this step on.
        self._writer = self._make(self._folder, purge_step=done + 1 if done else 0)
        if self._recipe is not None and not done:
            # TensorBoard renders Markdown; an indented block is shown as it is.
            self._writer.add_text("recipe", "\n".join("    " + line for line in self._recipe.toml().splitlines()), 0)

    def _send(self, values: dict[str, float], round: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def _close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB(Tracker):
    """A run of Weights & Biases; further arguments go to `wandb.init` (project, mode="offline", dir, …).

    id  of a run to go on with
    """

    def __init__(self, recipe: Recipe | None = None, *, id: str | None = None, **options: Any) -> None:
        super().__init__()
        again = {} if id is None else {"id": id, "resume": "allow", "allow_val_change": True}
        self._run = _load("wandb").init(config=settings(recipe), **{"project": "pfedgate", **again, **options})
        self.id: str = self._run.id

    def _send(self, values: dict[str, float], round: int) -> None:
        self._run.log(values, step=round)

    def _sum_up(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._run.summary[name] = value

    def _close(self, status: str) -> None:
        self._run.finish(exit_code={FINISHED: 0, FAILED: 1, KILLED: 130}[status])


class MLflow(Tracker):
    """A run of MLflow, at `uri` (a server or a folder; by default where MLflow's own settings say).

    id  of a run to go on with; if there is none (any more), a new one is made
    """

    def __init__(
        self,
        recipe: Recipe | None = None,
        *,
        uri: str | None = None,
        experiment: str = "pfedgate",
        name: str = "",
        id: str | None = None,
    ) -> None:
        super().__init__()
        module = _load("mlflow")
        # A client of its own, not the module's global run: several runs may be tracked at once.
        self._client = module.tracking.MlflowClient(tracking_uri=uri)
        if id is not None:
            with suppress(module.exceptions.MlflowException):
                self._client.update_run(id, status="RUNNING")
                self.id = id
                return
        existing = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if existing is None else existing.experiment_id
        self.id = str(self._client.create_run(number, run_name=name or None).info.run_id)
        for key, value in settings(recipe).items():
            self._client.log_param(self.id, key, str(value)[:500])

    def _send(self, values: dict[str, float], round: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self.id, name, value, step=round)

    def _close(self, status: str) -> None:
        self._client.set_terminated(self.id, status=status)


def check(names: Iterable[str]) -> None:
    """Fail before there is a run, if a tracker is unknown or its package is not installed."""
    for name in names:
        if name not in MODULES:
            raise ValueError(unknown("tracker", name, MODULES))
        _load(name)


def build(name: str, folder: str | Path, recipe: Recipe | None = None) -> Tracker:
    """A tracker by name, for a run in a folder; it goes on with what it began there."""
    check([name])
    path = Path(folder)
    if name == "tensorboard":
        return TensorBoard(path / "tensorboard", recipe)
    ids = json.loads((path / IDS).read_text(encoding="utf-8")) if (path / IDS).exists() else {}
    before = ids.get(name)
    tracker: WandB | MLflow
    if name == "wandb":
        tracker = WandB(recipe, id=before, name=path.name, dir=str(path))
    else:
        tracker = MLflow(recipe, id=before, name=path.name)
    if tracker.id != before:
        write_atomically(path / IDS, json.dumps({**ids, name: tracker.id}).encode())
    return tracker


@contextmanager
def tracking(names: Iterable[str], folder: str | Path, recipe: Recipe | None = None) -> Iterator[list[Tracker]]:
    """Trackers by name, told how the run ended even if it is an error or Ctrl-C."""
    with ExitStack() as stack:
        yield [stack.enter_context(build(name, folder, recipe)) for name in names]
