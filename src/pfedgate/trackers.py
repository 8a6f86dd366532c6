"""Runs in TensorBoard, Weights & Biases or MLflow: callbacks for `experiment.run` and the engine.

    from pfedgate import trackers
    experiment.run("recipe.toml", callbacks=[trackers.TensorBoard("runs/board")])

Each is an extra, imported when a tracker is made. What is sent are numbers of rounds and the recipe: never a model, a
gate or anything of a single client.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pfedgate.config import Recipe
from pfedgate.names import unknown

EXTRAS = {"tensorboard": "track", "wandb": "wandb", "mlflow": "mlflow"}
Event = Mapping[str, Any]


def scalars(event: Event) -> dict[str, float]:
    """The numbers of a round by path: training at the top, scores under the point they were taken at.

    >>> scalars({"event": "round", "round": 3, "rounds": 9, "loss": 0.5, "after_broadcast": {"accuracy": 0.9}})
    {'train/loss': 0.5, 'after_broadcast/accuracy': 0.9}
    """
    found: dict[str, float] = {}
    for name, value in event.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": float(item) for key, item in value.items() if _is_number(item)}
        elif _is_number(value) and name not in ("round", "rounds"):
            found[f"train/{name}"] = float(value)
    return found


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


class TensorBoard:
    """Curves for `tensorboard --logdir`."""

    def __init__(self, folder: str | Path, recipe: Recipe | None = None) -> None:
        self._writer = _load(MODULES["tensorboard"], "tensorboard").SummaryWriter(str(folder))
        if recipe is not None:
            # TensorBoard renders Markdown; an indented block is shown as it is.
            self._writer.add_text("recipe", "\n".join("    " + line for line in recipe.toml().splitlines()), 0)

    def __call__(self, event: Event) -> None:
        """Hear of a start, a round or the end."""
        if event["event"] == "round":
            for name, value in scalars(event).items():
                self._writer.add_scalar(name, value, int(event["round"]))
            self._writer.flush()
        elif event["event"] == "end":
            self._writer.close()


class WandB:
    """A run of Weights & Biases; further arguments go to `wandb.init` (project, mode="offline", dir, …)."""

    def __init__(self, recipe: Recipe | None = None, **options: Any) -> None:
        module = _load("wandb", "wandb")
        self._run = module.init(config=settings(recipe), **{"project": "pfedgate", **options})

    def __call__(self, event: Event) -> None:
        """Hear of a start, a round or the end."""
        if event["event"] == "round":
            self._run.log(scalars(event), step=int(event["round"]))
        elif event["event"] == "end":
            for name, value in scalars(event).items():
                self._run.summary[name.removeprefix("train/")] = value
            self._run.finish()


class MLflow:
    """A run of MLflow, at `uri` (a server or a folder; by default where MLflow's own settings say)."""

    def __init__(
        self, recipe: Recipe | None = None, *, uri: str | None = None, experiment: str = "pfedgate", name: str = ""
    ) -> None:
        module = _load("mlflow", "mlflow")
        # A client of its own, not the module's global run: several runs may be tracked at once.
        self._client = module.tracking.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._id = self._client.create_run(number, run_name=name or None).info.run_id
        for key, value in settings(recipe).items():
            self._client.log_param(self._id, key, str(value)[:500])

    def __call__(self, event: Event) -> None:
        """Hear of a start, a round or the end."""
        if event["event"] == "round":
            for name, value in scalars(event).items():
                self._client.log_metric(self._id, name, value, step=int(event["round"]))
        elif event["event"] == "end":
            self._client.set_terminated(self._id)


TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def check(names: Iterable[str]) -> None:
    """Fail before there is a run, if a tracker is unknown or its package is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(unknown("tracker", name, TRACKERS))
        _load(MODULES[name], name)


def build(name: str, folder: str | Path, recipe: Recipe | None = None) -> Any:
    """A tracker by name, for a run in a folder."""
    check([name])
    if name == "tensorboard":
        return TensorBoard(Path(folder) / "tensorboard", recipe)
    if name == "wandb":
        return WandB(recipe, name=Path(folder).name, dir=str(folder))
    return MLflow(recipe, name=Path(folder).name)
