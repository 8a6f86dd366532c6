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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from pfedgate.config.recipe import Recipe
from pfedgate.core.errors import unknown
from pfedgate.engine.store import write_atomically

FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"  # how a run ended; the words are MLflow's
IDS = "trackers.json"  # in a run's folder: which run of W&B or MLflow it is, so that resuming goes on with it
EXTRAS = {"tensorboard": "track", "wandb": "wandb", "mlflow": "mlflow"}
Event = Mapping[str, Any]


def scalars(event: Event) -> dict[str, float]:
    """The numbers of a round by path: training at the top, scores under the point they were taken at.

    >>> scalars({"event": "round", "round": 3, "rounds": 9, "loss": 0.5, "after_broadcast": {"accuracy": 0.9}})
    {'train/loss': 0.5, 'after_broadcast/accuracy': 0.9}
    """
    numbers: dict[str, float] = {}
    for name, value in event.items():
        if isinstance(value, Mapping):
            numbers |= {f"{name}/{key}": float(item) for key, item in value.items() if _is_number(item)}
        elif _is_number(value) and name not in ("round", "rounds"):
            numbers[f"train/{name}"] = float(value)
    return numbers


def settings(recipe: Recipe | None) -> dict[str, Any]:
    """The recipe in one flat table: {"train.lr": 0.05, …}."""
    if recipe is None:
        return {}
    tables = recipe.tables()
    return {f"{section}.{key}": value for section, values in tables.items() for key, value in values.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{package} is not installed: pip install 'pfedgate[{EXTRAS[package]}]', or leave this tracker out"
        ) from error


class Tracker(ABC):
    """A callback that hears of rounds and is closed once, in whatever way the run ends."""

    def __init__(self) -> None:
        self._round, self._open = 0, True

    def __call__(self, event: Event) -> None:
        """Hear of a start, a round or the end."""
        self._round = int(event.get("round", self._round))
        if event["event"] == "round":
            self._send(scalars(event), self._round)
        elif event["event"] == "end":
            self._sum_up({name.removeprefix("train/"): value for name, value in scalars(event).items()}, self._round)
            self.close()

    def close(self, status: str = FINISHED) -> None:
        """Say how the run ended: "FINISHED", "FAILED" or "KILLED". Only the first time counts."""
        if self._open:
            self._open = False
            self._close(status)

    def __enter__(self: Some) -> Some:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        killed = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.close(FINISHED if kind is None else KILLED if killed else FAILED)

    @abstractmethod
    def _send(self, values: dict[str, float], round: int) -> None: ...
    @abstractmethod
    def _sum_up(self, values: dict[str, float], round: int) -> None: ...
    @abstractmethod
    def _close(self, status: str) -> None: ...


Some = TypeVar("Some", bound=Tracker)


class TensorBoard(Tracker):
    """Event files of a run, shown by `tensorboard --logdir`."""

    def __init__(self, folder: str | Path, recipe: Recipe | None = None) -> None:
        super().__init__()
        self._make: Callable[..., Any] = _load(MODULES["tensorboard"], "tensorboard").SummaryWriter
        self._folder, self._recipe = str(folder), recipe
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        """Hear of a start, a round or the end."""
        if event["event"] == "start":
            self._begin(int(event["round"]))
        super().__call__(event)

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

    def _sum_up(self, values: dict[str, float], round: int) -> None:
        self._send({f"summary/{name}": value for name, value in values.items()}, round)

    def _close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB(Tracker):
    """A run of Weights & Biases; further arguments go to `wandb.init` (project, mode="offline", dir, …).

    id  of a run to go on with
    """

    def __init__(self, recipe: Recipe | None = None, *, id: str | None = None, **options: Any) -> None:
        super().__init__()
        module = _load("wandb", "wandb")
        again = {} if id is None else {"id": id, "resume": "allow", "allow_val_change": True}
        self._run = module.init(config=settings(recipe), **{"project": "pfedgate", **again, **options})
        self.id: str = self._run.id

    def _send(self, values: dict[str, float], round: int) -> None:
        self._run.log(values, step=round)

    def _sum_up(self, values: dict[str, float], round: int) -> None:
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
        self._module = _load("mlflow", "mlflow")
        # A client of its own, not the module's global run: several runs may be tracked at once.
        self._client = self._module.tracking.MlflowClient(tracking_uri=uri)
        if id is not None and self._reopen(id):
            self.id = id
            return
        existing = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if existing is None else existing.experiment_id
        self.id = str(self._client.create_run(number, run_name=name or None).info.run_id)
        for key, value in settings(recipe).items():
            self._client.log_param(self.id, key, str(value)[:500])

    def _reopen(self, id: str) -> bool:
        try:
            self._client.update_run(id, status="RUNNING")
        except self._module.exceptions.MlflowException:
            return False
        return True

    def _send(self, values: dict[str, float], round: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self.id, name, value, step=round)

    def _sum_up(self, values: dict[str, float], round: int) -> None:
        self._send({f"summary/{name}": value for name, value in values.items()}, round)

    def _close(self, status: str) -> None:
        self._client.set_terminated(self.id, status=status)


TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def check(names: Iterable[str]) -> None:
    """Fail before there is a run, if a tracker is unknown or its package is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(unknown("tracker", name, TRACKERS))
        _load(MODULES[name], name)


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
def tracking(
    names: Iterable[str], folder: str | Path, recipe: Recipe | None = None
) -> Iterator[list[Callable[..., None]]]:
    """Trackers by name, told how the run ended even if it is an error or Ctrl-C."""
    with ExitStack() as stack:
        callbacks: list[Callable[..., None]] = []
        for name in names:
            tracker = build(name, folder, recipe)
            if isinstance(tracker, Tracker):  # else any function that takes events, which nobody has to close
                stack.enter_context(tracker)
            callbacks.append(tracker)
        yield callbacks
