"""From a recipe to a result: the one way to run, used by Python and by the command line alike.

run()                                                  pFedGate on scikit-learn's digits
run("recipes/cifar10-quick.toml", out="runs/c10")      a recipe, kept in a folder; resume("runs/c10") goes on
run(data="digits", algorithm="fedavg", train={"rounds": 20}, clients={"budget": 0.5})
run(data=my_federation, model=my_module)               your own data and module
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pfedgate import algorithms, models
from pfedgate.config import code
from pfedgate.config import options as catalogue
from pfedgate.config.code import Code
from pfedgate.config.recipe import GIVEN, Recipe, RecipeError, resolve
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import warn
from pfedgate.core.kinds import KINDS, METRICS, fits
from pfedgate.core.kinds import check as check_labels
from pfedgate.core.modules import fresh
from pfedgate.core.seeds import seeded
from pfedgate.core.types import DataShape, Example, Federation, Task
from pfedgate.data.adopt import adopt, of_name
from pfedgate.data.federation import PARTS
from pfedgate.engine import server as engine
from pfedgate.engine.cluster import Cluster
from pfedgate.engine.endpoint import NOVEL, Endpoint
from pfedgate.engine.hostile import Hostile
from pfedgate.engine.private import possible
from pfedgate.engine.processes import Processes
from pfedgate.engine.roster import Roster
from pfedgate.engine.server import Callback, Options, choose_device
from pfedgate.engine.workers import cores
from pfedgate.runs import folder as runfolder
from pfedgate.runs.gates import GateLog
from pfedgate.runs.result import Trained, read_scores
from pfedgate.training.workspace import flops_per_sample

__all__ = ["Experiment", "build", "load", "plan", "recipe_of", "resume", "run", "shape_of"]

Source = str | Path | Mapping[str, Any] | Recipe | None
# Floating-point operations of a whole run from which on worker processes repay their start (about a minute's work).
WORTH_WORKERS = 1e12
FITTING_MODELS = {"segmentation": "unet", "language": "token_gru"}  # for data that came as an object
SMALLEST_IMAGE = 16  # pixels a side that two convolutions of 5×5 and their pooling need


@dataclass(frozen=True)
class Experiment:
    """A recipe made real: data loaded, task and algorithm built. `pfedgate.engine.server.run` takes these."""

    recipe: Recipe
    algorithm: Algorithm
    federation: Federation
    options: Options

    @property
    def workers(self) -> int:
        """Processes that will be used."""
        workers = self.recipe.run.workers
        if isinstance(workers, int):
            return workers
        if choose_device(self.options.device).type != "cpu":
            return 1  # several processes would fight over one accelerator
        return cores() if _work(self) >= WORTH_WORKERS else 1

    def run(
        self, *, folder: str | Path | None = None, resume: bool = False, callbacks: Sequence[Callback] = ()
    ) -> Trained:
        """Train all rounds, or those that are left in a folder."""
        parts, workers = (self.algorithm, self.federation, self.options), self.workers
        exchange: Callable[..., engine.Exchange] = Cluster if self.recipe.run.exchange == "ray" else Endpoint
        if self.recipe.attack.kind != "none":
            exchange = functools.partial(Hostile, attack=self.recipe.attack, seed=self.options.seed)
        elif exchange is Endpoint and workers > 1:
            exchange = functools.partial(Processes, workers=workers)
        result = engine.run(
            *parts,
            exchange=exchange,
            folder=folder,
            resume=resume,
            callbacks=[*GateLog.wanted(*parts, folder), *map(Code.of, self.recipe.run.callbacks), *callbacks],
        )
        return Trained(
            **vars(result),
            plan=lambda: self,
            metrics=self.algorithm.task.metrics,
            title=_title(self.recipe),
            path=None if folder is None else Path(folder),
        )


@dataclass(frozen=True)
class Network:
    """A model by name, made when called. Equal ones are equal, so that each process builds a workspace only once."""

    name: str
    input_shape: tuple[int, ...]
    classes: int
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self) -> nn.Module:
        return models.build(self.name, self.input_shape, self.classes, **dict(self.options))


def run(
    recipe: Source = None, /, *, out: str | Path | None = None, callbacks: Sequence[Callback] = (), **sections: Any
) -> Trained:
    """Train as a recipe says and return what was learnt.

    recipe     a path, a mapping of sections, a `Recipe`, or nothing: pFedGate on digits
    out        keep everything in this folder (see `runfolder`); without it nothing is written
    callbacks  called with {"event": "start" | "round" | "end", …}
    sections   go over the recipe: train={"rounds": 3}; data, model and algorithm may be just a name;
               data may be data as you have it (a Dataset, a DataFrame, a mapping of arrays, a file, a folder; see
               `pfedgate.data.adopt`), with owner= and label= naming columns; model a module or a function

    >>> result = run(algorithm="fedavg", train={"rounds": 2}, data={"name": "digits", "clients": 4})
    >>> len(result.history), result.summary["clients"]
    (2, 4)
    """
    if callable(callbacks):
        raise TypeError("callbacks is a list of functions: callbacks=[function]")
    given, sections = objects(sections)
    resolved = recipe_of(recipe, sections, **given)
    if out is not None:
        runfolder.vacant(out)
    experiment = plan(resolved, **given)  # what cannot run leaves no folder
    if out is not None:
        runfolder.note_environment(runfolder.create(out, resolved))
    return experiment.run(folder=out, callbacks=callbacks)


def resume(
    path: str | Path,
    *,
    data: Any = None,
    model: Any = None,
    owner: Any = None,
    label: Any = None,
    callbacks: Sequence[Callback] = (),
    planned: Experiment | None = None,
) -> Trained:
    """Go on with the run in a folder; the result is the same, bit for bit, as without the interruption.

    A run whose `data` or `model` was a Python object needs the same again, with `owner` and `label` where `run` had
    them. `planned` saves loading data again.
    """
    folder = runfolder.load(path)
    experiment = planned or plan(folder.recipe, data=_again(folder.recipe, data, owner, label), model=model)

    def note(event: Mapping[str, Any]) -> None:
        if event["event"] == "start":  # when the folder is ours: one that another process trains in is left alone
            runfolder.note_environment(folder)

    return experiment.run(folder=folder.path, resume=True, callbacks=[note, *callbacks])


def load(
    path: str | Path,
    *,
    which: str = "last",
    data: Any = None,
    model: Any = None,
    owner: Any = None,
    label: Any = None,
) -> Trained:
    """What a finished run in a folder gave: the same object as `run` returned, its last models or the "best" ones.

    Data is loaded when a model is asked for. A run whose `data` or `model` was a Python object needs the same again,
    with `owner` and `label` where `run` had them.
    """
    folder = runfolder.load(path)
    if not folder.finished:
        raise ValueError(
            f"{path} has not ended ({len(folder.metrics)} rounds so far): `pfedgate resume {path}` goes on"
        )
    rows = folder.clients
    others = (METRICS[name] for name in (rows[0] if rows else ()) if name in METRICS and name != folder.metric.name)
    metrics = (folder.metric, *others)
    scores = read_scores(rows, metrics)
    return Trained(
        server=folder.server(which),
        history=folder.metrics,
        summary=folder.summary,
        scores=[score for score in scores if score.point != NOVEL],
        novel=[score for score in scores if score.point == NOVEL],
        store=folder.store(which),
        plan=functools.cache(lambda: plan(folder.recipe, data=_again(folder.recipe, data, owner, label), model=model)),
        metrics=metrics,
        title=_title(folder.recipe),
        path=folder.path,
    )


def _again(recipe: Recipe, data: Any, owner: Any, label: Any) -> Any:
    """Data of a run, given again in any form in which `run` takes it."""
    task = {} if recipe.task.kind == "auto" else {"task": recipe.task.kind}
    given, _ = objects({"data": data, "owner": owner, "label": label, **task})
    return given.get("data")


def _title(recipe: Recipe) -> str:
    return f"{recipe.algorithm.name} on {recipe.data.label}, {recipe.model.label}"


def recipe_of(source: Source = None, *layers: Any, data: Any = None, model: Any = None) -> Recipe:
    """The resolved recipe of a source and the layers over it; `data` and `model` are objects instead of names."""
    first = source.tables() if isinstance(source, Recipe) else source
    given: dict[str, Any] = {}
    if data is not None:
        given["data"] = {"name": GIVEN}
        shape, kind = tuple(getattr(data, "input_shape", ())), getattr(data, "task", "")
        if kind in FITTING_MODELS:
            given["model"] = {"name": FITTING_MODELS[kind]}
        elif len(shape) == 3 and min(shape[1:]) >= SMALLEST_IMAGE:
            given["model"] = {"name": "cnn_cifar10"}
    if model is not None:
        given["model"] = {"name": GIVEN}
    if data is not None and isinstance(first, Mapping):
        first = {key: value for key, value in first.items() if key.partition(".")[0] != "data"}
    return resolve(first, given, *layers)


def plan(recipe: Recipe, *, data: Any = None, model: Any = None) -> Experiment:
    """Load the data and build the algorithm of a recipe."""
    _check_given("data", recipe.data.name, data)
    _check_given("model", recipe.model.name, model)  # before data is loaded
    if data is None:
        named, novel, seed = recipe.data, recipe.clients.novel, recipe.run.seed
        data = catalogue.federation(named.name, named.options, novel=novel, seed=seed, task=recipe.task.kind)
    algorithm = build(recipe, shape_of(data), model)
    if recipe.clients.budget != 1 and not algorithm.budgeted:
        warn(
            f"{algorithm.name} trains the whole model on every client: it ignores clients.budget="
            f"{recipe.clients.budget!r}; pfedgate and heterofl keep to it"
        )
    experiment = Experiment(recipe, algorithm, data, recipe.options())
    check(experiment)
    return experiment


SEEN = 50  # clients of each group whose data is looked at before training begins


def check(experiment: Experiment) -> None:
    """Refuse what could only fail, or silently go wrong, in training: labels, inputs and budgets that do not fit."""
    task, federation = experiment.algorithm.task, experiment.federation
    possible(experiment.algorithm, experiment.options)
    if choose_device(experiment.options.device).type != "cuda" and task.amp:
        warn("run.amp is for CUDA devices: this run computes in float32")
    clients = [*federation.clients[:SEEN], *federation.novel[:SEEN]]
    parts = [(client, federation.part(client, name)) for client in clients for name in PARTS]
    samples = [(f"client {client!r}", part) for client, part in parts if part.n]
    if not samples:
        raise ValueError("no client has training data")
    kind, numbers = KINDS[task.kind], samples[0][1].x.is_floating_point()
    for where, part in samples:
        fits(kind, part.y, where)
        if numbers and not bool(torch.isfinite(part.x).all()):
            raise ValueError(f"an input of {where} is not a number (NaN or infinite): fill or leave out such samples")
    if kind.classes:
        only = samples[0][1].y.flatten()[0]
        # Parts are read up to the first that has another label.
        everyone = (*federation.clients, *federation.novel)
        rest = (federation.part(client, name).y for client in everyone for name in PARTS)
        if all(bool((labels == only).all()) for labels in chain((part.y for _, part in samples), rest)):
            called = (getattr(federation, "class_names", None) or {int(only): int(only)})[int(only)]
            warn(f"every label is {called!r}: with one class there is nothing to learn; are these the right labels?")
    where, part = max(samples, key=lambda sample: int(sample[1].y.max())) if kind.classes else samples[0]
    rows = part.y.reshape(part.n, -1).amax(1).argsort(descending=True)[:3]  # the highest label shows what is missing
    rows = rows.repeat(3)[:3]
    x, y = part.x[rows], part.y[rows]
    model = fresh(task.model).eval()
    inputs = federation.prepare(x)
    try:
        with seeded(0, "check"), torch.no_grad():
            output = model(inputs)
    except Exception as error:
        raise ValueError(
            f"the model cannot take the data, a batch of shape {tuple(inputs.shape)} and type "
            f"{str(inputs.dtype).removeprefix('torch.')}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(output, torch.Tensor):
        raise ValueError(f"the model returns {type(output).__name__}; a model returns one tensor of outputs")
    check_labels(kind, task.loss, output, y, where)
    for metric in task.metrics:
        try:
            for n in (2, 3):  # a number of rows may be that of classes, which hides what does not fit
                metric.value(metric.sums(output[:n], y[:n]), n)
        except RecipeError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ValueError(f"the metric {metric.name!r} cannot be computed for {kind.name}: {error}") from error
    for group in ("clients", "novel"):
        roster = Roster.of(federation, group, experiment.options, experiment.algorithm)
        for card in {str(card.budget): card for card in roster}.values():
            experiment.algorithm.ready(card)


def build(recipe: Recipe, shape: DataShape, model: Any = None) -> Algorithm:
    """The algorithm of a recipe for data of this shape; no data is needed, so a server without any can build it."""
    _check_given("model", recipe.model.name, model)
    train, goal = recipe.train, recipe.task
    kind = shape.kind if goal.kind == "auto" else goal.kind
    if kind != "classification" and (train.correction == "prediction" or train.shift):  # not the default: asked for
        warn(f"train.correction and train.shift are skipped: {kind} has no classes to count")
    task = Task(
        model=_network(recipe, shape) if model is None else _factory(model),
        optim=recipe.optim(),
        schedule=recipe.schedule(),
        batch=train.batch,
        epochs=train.epochs,
        steps=train.steps,
        drop_last=train.drop_last,
        eval_batch=recipe.evaluate.batch,
        amp=recipe.run.amp,
        kind=kind,
        loss=None if goal.loss == "auto" else _named(goal.loss),  # type: ignore[arg-type]  # names become functions
        metrics=tuple(map(_named, goal.metrics)),
        classes=(shape.classes or None) if kind == "classification" else None,
        initial_scale=train.initial_scale if model is None and not code.is_code(recipe.model.name) else 1.0,
        correction=train.correction,
        shift=train.shift,
        shift_lr=train.shift_lr,
        private=recipe.privacy if recipe.privacy.level == "sample" else None,
        local_lr=recipe.evaluate.local_lr,
        local_epochs=recipe.evaluate.local_epochs,
        example=Example((train.batch, *shape.shape), shape.dtype),
    )
    return algorithms.build(recipe.algorithm.name, task, **recipe.algorithm.options)


def shape_of(federation: Federation) -> DataShape:
    """The form of a federation's data, read from one prepared sample.

    >>> from pfedgate.data import load
    >>> shape_of(load("digits", clients=4))
    DataShape(classes=10, shape=(1, 8, 8), dtype=torch.float32, kind='classification')
    """
    for client in chain(federation.clients, federation.novel):
        sample = federation.part(client, "train").x[:1]
        if len(sample):
            x = federation.prepare(sample)
            kind = getattr(federation, "task", "classification")
            return DataShape(int(getattr(federation, "classes", 0)), tuple(x.shape[1:]), x.dtype, kind)
    raise ValueError("no client has training data")


def objects(sections: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Data and model that came as Python objects, ready for `plan`, and the sections of a recipe."""
    given, rest = dict[str, Any](), dict(sections)
    owner, label = rest.pop("owner", None), rest.pop("label", None)
    if rest.get("model") is not None and not isinstance(rest["model"], (str, Mapping)):
        given["model"] = rest.pop("model")
    value = rest.get("data")
    columns = isinstance(value, Mapping) and (
        {"x", "y"} <= set(value) or any(hasattr(v, "shape") for v in value.values())
    )
    if (named := of_name(value, owner, label)) is not None:
        rest["data"] = named
    elif value is not None and not isinstance(value, str) and (columns or not isinstance(value, Mapping)):
        goal = rest.get("task") or {}
        task = goal if isinstance(goal, str) else goal.get("kind")
        options = {} if task is None or hasattr(value, "part") else {"task": task}
        given["data"] = adopt(rest.pop("data"), owner=owner, label=label, **options)
    elif owner is not None or label is not None:
        raise RecipeError("owner= and label= say what is in data=…: give data as an object or the path of a file")
    return given, rest


def _check_given(kind: str, name: str, value: Any) -> None:
    if (name == GIVEN) != (value is not None):
        raise RecipeError(
            f"this run's {kind} was a Python object: give the same again, load(path, {kind}=…) or resume(…, {kind}=…)"
            if value is None
            else f"this recipe names its own {kind}, {name!r}: leave out {kind}=…"
        )


def _network(recipe: Recipe, shape: DataShape) -> Callable[[], nn.Module]:
    name, options = recipe.model.name, recipe.model.options
    if code.is_code(name):
        known = {"input_shape": shape.shape, "classes": shape.classes}
        return Code.of(name, **options, **{key: known[key] for key in code.arguments(name) if key in known})
    if not shape.classes:
        raise RecipeError("a model by name needs data with `classes`, how many there are; or give model=…")
    return Network(recipe.model.name, shape.shape, shape.classes, tuple(sorted(recipe.model.options.items())))


def _named(text: str) -> Any:
    """A loss or metric by name as it is, or the function in a file."""
    return Code.of(text) if code.is_code(text) else text


def _factory(model: Any) -> Callable[[], nn.Module]:
    """A module is copied, weights included; a function is called for every fresh model."""
    if isinstance(model, nn.Module):
        return functools.partial(copy.deepcopy, model)
    if not callable(model):
        raise TypeError(f"model is a name, a torch module or a function that makes one, got {type(model).__name__}")
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        raise TypeError(
            f"model is called without arguments ({error}): give lambda: Net(…) with them, or a module"
        ) from None
    except ValueError:  # a built-in says nothing of its arguments
        pass
    factory: Callable[[], nn.Module] = model
    return factory


def _work(experiment: Experiment) -> float:
    """Floating-point operations of all rounds, estimated as if every method trained the dense model once."""
    task, options, federation = experiment.algorithm.task, experiment.options, experiment.federation
    each = flops_per_sample(task.model, None, torch.Size(task.inputs.shape[1:]), task.inputs.dtype, True)
    seen = federation.clients[:200]  # the mean of some will do, and there may be very many
    mean = sum(federation.part(client, "train").n for client in seen) / max(1, len(seen))
    number = len(federation.clients)
    sampled = options.sample * number if isinstance(options.sample, float) else options.sample
    samples = mean * task.epochs if task.steps is None else task.steps * task.batch
    return each * samples * min(sampled, number) * options.rounds
