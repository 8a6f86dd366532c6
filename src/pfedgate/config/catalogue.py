"""What can be named in a recipe, and which options each name has: data sets, models, algorithms, fixed sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from pfedgate import algorithms, models
from pfedgate.config import options as schema
from pfedgate.config.options import Option, RecipeError
from pfedgate.config.sections import Clients, Deploy, Evaluate, Session, Train
from pfedgate.core.errors import unknown
from pfedgate.data import DATASETS, Federation, conflicting, from_folder, from_table, load, synthetic
from pfedgate.data.options import Options as DataOptions
from pfedgate.data.options import Sharing

GIVEN = "given"  # the name of data or a model that came as a Python object
FIXED: dict[str, type[Any]] = {
    "train": Train, "clients": Clients, "evaluate": Evaluate, "run": Session, "deploy": Deploy
}  # fmt: skip
NAMED = ("data", "model", "algorithm")
SECTIONS = ("data", "model", "train", "algorithm", "clients", "evaluate", "run", "deploy")

# Data that is not in the table of data sets, but can be had by name.
MADE: dict[str, Callable[..., Federation]] = {
    "synthetic": synthetic,
    "conflicting": conflicting,
    "folder": from_folder,
    "table": from_table,
}

SEED = Option("seed", int | None, None, "of the partition and the split; by default the run's")
# What `from_folder` and `from_table` hand on to `from_arrays`, as far as a text file can say it.
ARRAYS = {
    "classes": Option("classes", int | None, None, "how many there are, if the data does not show all of them"),
    "standardise": Option("standardise", bool, False, "mean 0 and deviation 1, measured on the training samples"),
    "mean": Option("mean", float | tuple[float, ...], (), "per channel or feature"),
    "std": Option("std", float | tuple[float, ...], (), "per channel or feature"),
}


def options_of(section: str, name: str = "") -> dict[str, Option]:
    """What can be set in a section; for [data], [model] and [algorithm] it depends on the name there.

    >>> sorted(options_of("model", "mlp")), options_of("evaluate")["every"].default
    (['dropout', 'hidden'], 5)
    """
    if section in FIXED:
        return schema.of_dataclass(FIXED[section])
    if name == GIVEN or (section == "model" and name == "auto"):
        return {}
    if section == "algorithm":
        try:
            return schema.of_dataclass(algorithms.get(name), leave_out=["task"])
        except KeyError as error:
            raise RecipeError(f"[algorithm] {error.args[0]}") from None
    return _of_model(name) if section == "model" else _of_data(name)


@lru_cache(maxsize=64)
def _of_model(name: str) -> dict[str, Option]:
    if name not in models.names():
        raise RecipeError(f"[model] {unknown('model', name, [*models.names(), 'auto'])}")
    return {key: Option(key, _type(value), value) for key, value in models.options(name).items()}


def _type(default: Any) -> Any:
    """The type of a model's option, told by its default."""
    if isinstance(default, (list, tuple)) and default:
        return tuple[type(default[0]), ...]  # type: ignore[misc]
    return Any if default is None or default == () else type(default)


def _of_data(name: str) -> dict[str, Option]:
    if name in DATASETS:
        return {**schema.of_dataclass(DataOptions, leave_out=["novel"]), "seed": SEED}
    if name not in MADE:
        raise RecipeError(f"[data] {unknown('data set', name, [*DATASETS, *MADE])}")
    own = {**schema.of_function(MADE[name], leave_out=["novel"]), "seed": SEED}
    if name == "synthetic":
        return own
    arrays = {} if name == "conflicting" else ARRAYS
    return {**schema.of_dataclass(Sharing, leave_out=["novel"]), **arrays, **own}


def usual(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a data set with its own defaults written out, where they do not depend on the copy at hand.

    >>> usual("digits", {"clients": None, "partition": None})
    {'clients': 20, 'partition': 'dirichlet'}
    """
    if name not in DATASETS:
        return options
    data, filled = DATASETS[name], dict(options)
    filled["partition"] = options.get("partition") or data.partition
    if data.samples is not None and options.get("samples") is None:
        filled["samples"] = data.samples
    # How many owners there are only the data can tell.
    if filled["partition"] != "owner" and options.get("clients") is None and options.get("writers") is None:
        filled["clients"] = data.clients
    return filled


def federation(name: str, options: Mapping[str, Any], *, novel: float = 0.0, seed: int = 0) -> Federation:
    """The federation that a name and its options describe; `seed` counts if the options have none."""
    given = {key: value for key, value in options.items() if value != ()}
    given["seed"] = seed if given.get("seed") is None else given["seed"]
    return load(name, novel=novel, **given) if name in DATASETS else MADE[name](novel=novel, **given)
