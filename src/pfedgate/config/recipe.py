"""Recipes: what to run, as TOML, as a mapping or as settings on a command line, resolved into one checked `Recipe`.

    [data]       name, and the options of that data set (clients, alpha, partition, samples, …)
    [model]      name, and the options of that model
    [algorithm]  name, and the hyper-parameters of that algorithm; [algorithm.gate] those of pFedGate's gate
    [train], [clients], [server], [evaluate], [run], [deploy]     the same keys always: see `options`
    [tuned.fedavg]  settings of any section that hold only when the algorithm is fedavg: train.lr = 0.1;
                    also in NAME.tuned.toml beside the recipe, which `pfedgate tune --write` writes

Later layers go over earlier ones: defaults, what fits the data set, the recipe, its [tuned.…], then each setting. An
unknown section or key is an error that names the nearest; so is a value of the wrong type. Keys of earlier versions are
read and said.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pfedgate import algorithms
from pfedgate.config import code, toml
from pfedgate.config.options import (
    FITTING,
    FIXED,
    GIVEN,
    NAMED,
    NETWORKS,
    REQUIRED,
    SECTIONS,
    Clients,
    Deploy,
    Evaluate,
    Goal,
    Option,
    Session,
    Train,
    options_of,
    usual,
)
from pfedgate.core.attack import Attack
from pfedgate.core.errors import RecipeError, unknown, warn
from pfedgate.core.types import Optim, Privacy, Schedule, ServerOptim
from pfedgate.engine.roster import DEVICE, Options
from pfedgate.fleet.pace import Pace

__all__ = ["GIVEN", "PLACES", "Named", "Recipe", "RecipeError", "essence", "resolve", "settings"]

Tables = dict[str, dict[str, Any]]
Layer = Mapping[str, Any]

PLACES = ("data_dir", "cache_dir", "source")  # keys of [data] that say where it lies, not what it is

START: Tables = {"data": {"name": "digits"}, "model": {"name": "auto"}, "algorithm": {"name": "pfedgate"}}

# Keys of earlier versions, so that their recipes and run folders can still be read: under a new name, or gone. A key
# that is gone may only say what holds now; any other value is refused for the reason beside it.
GATE_FIELDS = {
    **{name: name for name in ("pre_norm", "post_norm", "activation", "weight_range", "shift", "ranking")},
    "spread": "initial_scale",
    "bias": "initial_bias",
    "predict": "scope",
}
RENAMED: dict[str, dict[str, str]] = {
    "algorithm.fedrep": {"head_lr": "own_lr"},
    "algorithm.pfedgate": {old: f"gate.{new}" for old, new in GATE_FIELDS.items()},
}
GONE: dict[str, dict[str, tuple[Any, str]]] = {
    "train": {
        "persist_momentum": (False, "momentum that outlives a round points to a model of rounds ago"),
    },
    "algorithm.pfedgate": {
        "half": (False, "float16 differences gained nothing beside upload, which caps what is sent"),
        "own": ([], "layers of a client's own gained nothing in long training; FedPer, FedRep and LG-FedAvg have them"),
        "straight_through": ("full", "gradients for live blocks alone gained nothing; pfedgate.gate still has them"),
        "deviations": ([], "the authors' code is bracketed in benchmarks/ now"),
        "ignore": (1.0, "believing a client's label counts altogether slowed the shared model"),
        "common_init": (True, "gates that start apart ended two points lower"),
        "gate_ones": (False, 'write algorithm.gate.init = "ones"'),
    },
    "algorithm.fedmask": {
        "base": ("fedavg", "masks over random weights cannot reach what masks over trained ones do; see warmup"),
        "intersection": ("two", "hardly an entry is kept by all clients of a round"),
    },
    "algorithm.heterofl": {
        "scored": ("own", "a client is scored with the part that it can afford"),
        "unweighted": (False, "updates are weighted by samples, as in all methods"),
    },
    "algorithm.lg_fedavg": {"warmup_rounds": (0, "hundreds of rounds of FedAvg are another run, of fedavg")},
    "algorithm.pfedme": {"personal": (True, "the shared model of pFedMe is no personal model")},
}


@dataclass(frozen=True)
class Named:
    """A section whose keys are the options of something with a name."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name to be shown: of code the function and its file, without folders.

        >>> Named("/home/ann/my_model.py:build").label, Named("mlp").label
        ('my_model.build', 'mlp')
        """
        if not code.is_code(self.name):
            return self.name
        named = code.Code.of(self.name)
        return f"{Path(named.file).stem}.{named.name}"


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run, checked. `toml()` writes it so that it reads back the same."""

    data: Named
    model: Named
    algorithm: Named
    task: Goal = field(default_factory=Goal)
    train: Train = field(default_factory=Train)
    clients: Clients = field(default_factory=Clients)
    fleet: Pace = field(default_factory=Pace)
    server: ServerOptim = field(default_factory=ServerOptim)
    privacy: Privacy = field(default_factory=Privacy)
    attack: Attack = field(default_factory=Attack)
    evaluate: Evaluate = field(default_factory=Evaluate)
    run: Session = field(default_factory=Session)
    deploy: Deploy = field(default_factory=Deploy)

    def optim(self) -> Optim:
        """The client optimiser."""
        t = self.train
        return Optim(t.optimiser, t.lr, t.momentum, t.weight_decay, t.betas, t.eps, t.clip)

    def schedule(self) -> Schedule:
        """The learning rate over rounds."""
        t = self.train
        return Schedule(t.schedule, t.milestones, t.gamma, t.floor, t.plateau, t.patience, t.warmup)

    def options(self) -> Options:
        """How the engine runs it."""
        return Options(
            rounds=self.train.rounds,
            sample=self.clients.fraction if self.clients.number is None else self.clients.number,
            seed=self.run.seed,
            evaluate_every=self.evaluate.every,
            points=self.evaluate.points,
            agg_norm=self.clients.agg_norm,
            budget=self.clients.budget,
            stack=self.run.stack,
            device=self.run.device,
            novel=self.evaluate.novel,
            stop_after=self.train.stop_after,
            checkpoint_every=self.run.checkpoint_every,
            keep_best=self.run.keep_best,
            fleet=self.fleet,
            server=self.server,
            privacy=self.privacy,
        )

    def tables(self) -> Tables:
        """Plain values, section by section; options that are None and sections that say nothing are left out."""
        tables: Tables = {}
        usual = {"task": Goal(), "fleet": Pace(), "server": ServerOptim(), "privacy": Privacy(), "attack": Attack(),
                 "deploy": Deploy()}  # fmt: skip
        silent = {name for name, default in usual.items() if getattr(self, name) == default}
        for section in [section for section in SECTIONS if section not in silent]:
            part = getattr(self, section)
            plain = {"name": part.name, **part.options} if isinstance(part, Named) else dict(vars(part))
            options = options_of(section, plain.get("name", ""))
            # None need not be said where it is the default, and must be where it is not.
            tables[section] = {
                key: value
                for key, value in plain.items()
                if value is not None or (key in options and options[key].default is not None)
            }
        return tables

    def toml(self, *, comments: bool = True) -> str:
        """The recipe as TOML, every key with the reason of its default; a key without a value is a comment."""
        lines: list[str] = []
        for section, values in self.tables().items():
            options, table = options_of(section, values.get("name", "")), section
            lines.append(f"[{section}]")
            # Dotted keys come last, under a header of their own: [algorithm.gate].
            for name in sorted(dict.fromkeys([*values, *options]), key=lambda name: "." in name):
                inner, _, key = name.rpartition(".")
                if inner and table != f"{section}.{inner}":
                    table = f"{section}.{inner}"
                    lines += ["", f"[{table}]"]
                option = options.get(name, Option(name, Any, REQUIRED))
                why = option.why if comments else ""
                if name not in values:
                    lines += [f"# {key}" + (f": {why}" if why else "")] if comments else []
                    continue
                if comments and option.default not in (values[name], REQUIRED):
                    why = f"[default {toml.dump(option.default)}] {why}".rstrip()
                lines.append(f"{key} = {toml.dump(values[name])}" + (f"  # {why}" if why else ""))
            lines.append("")
        return "\n".join(lines)


def settings(given: Sequence[str], section: str = "") -> Layer:
    """`["train.rounds=3", "algorithm.name=fedavg"]` as a layer; values are TOML, plain words need no quotes.

    >>> settings(["train.rounds=3", "algorithm.name=fedavg"])
    {'train': {'rounds': 3}, 'algorithm': {'name': 'fedavg'}}
    """
    layer: Tables = {}
    for text in given:
        path, equals, value = text.partition("=")
        if not equals:
            raise RecipeError(f"{text!r}: settings are written section.key=value, such as train.rounds=20")
        first, dot, key = path.strip().partition(".")
        if not dot:
            first, key = section, first
        if not first:
            raise RecipeError(_homeless(key))
        layer.setdefault(first, {})[key] = toml.value(value)
    return layer


def _homes(key: str) -> list[str]:
    """The sections that have this key when no layer says anything."""
    return [place for place in SECTIONS if key in options_of(place, START.get(place, {}).get("name", ""))]


def _homeless(key: str) -> str:
    if homes := _homes(key):
        return f"{key!r} is set as " + " or ".join(f"{place}.{key}=…" for place in homes)
    keys = {name: place for place in SECTIONS for name in options_of(place, START.get(place, {}).get("name", ""))}
    near = difflib.get_close_matches(key, [*SECTIONS, *keys], n=1, cutoff=0.6)
    hint = "".join(f"; did you mean {f'{keys[name]}.{name}' if name in keys else name}?" for name in near)
    return f"{key!r} names no section: settings are written section.key=value, such as train.rounds=20{hint}"


# Options that moved to the task: where to, and what their values are called there.
MOVED: dict[tuple[str, str], tuple[str, str, dict[Any, Any]]] = {
    ("pfedgate", "start"): ("train", "correction", {"labels": "training", "random": "none"}),
}


def _moved(layer: Tables) -> Tables:
    """A layer with its moved options in their new places, and said."""
    method = layer.get("algorithm", {})
    for (name, key), (section, new, values) in MOVED.items():
        if key in method and method.get("name", name) == name:
            value = values.get(method.pop(key), None)
            if value is None:
                raise RecipeError(f"algorithm.{key} is {section}.{new} now: one of {', '.join(values.values())}")
            layer.setdefault(section, {}).setdefault(new, value)
            warn(f"[algorithm] is of an earlier version: {key} is {section}.{new} now")
    return layer


def resolve(*layers: Layer | str | Path | None) -> Recipe:
    """One recipe from layers, each a path, a mapping of sections, or None; the last one wins.

    >>> recipe = resolve({"algorithm": "fedavg"}, {"train.rounds": 3})
    >>> recipe.algorithm.name, recipe.train.rounds, recipe.model.name
    ('fedavg', 3, 'cnn_digits')
    >>> resolve({"train": {"lrr": 1}})
    Traceback (most recent call last):
    pfedgate.core.errors.RecipeError: [train] unknown key 'lrr': did you mean 'lr'? Known: batch, betas, ...
    """
    stack = [_spread(read(each) if isinstance(each, (str, Path)) else each) for each in layers if each is not None]
    names = _names(stack)
    merged: Tables = {section: {} for section in SECTIONS}
    named = {section: table["name"] for section, table in START.items()}
    for layer in [START, FITTING.get(names["data"], {}), *stack]:
        for section in SECTIONS:
            table = layer.get(section, {})
            named[section] = table.get("name", named.get(section))
            # Options of a model or algorithm that is not used in the end mean nothing, or something else, to the one
            # that is. Data keeps them: how to share samples out is a question of its own.
            if table and (section not in ("model", "algorithm") or named[section] == names[section]):
                merged[section].update(_current(table, section, names))
        tuned = layer.get("tuned", {}).get(names["algorithm"], {})
        for section, table in _spread(tuned).items() if tuned else ():
            if section == "tuned" or "name" in table:
                raise RecipeError(f"[tuned.{names['algorithm']}] may not change {section}.name")
            merged[section].update(_current(table, section, names))
    return _checked(merged)


def tuned_path(recipe: str | Path) -> Path:
    """The file beside a recipe that `pfedgate tune --write` writes.

    >>> tuned_path("recipes/mine.toml").name
    'mine.tuned.toml'
    """
    return Path(recipe).with_suffix(".tuned.toml")


def read(path: str | Path) -> Layer:
    """A recipe's file, and the tuned settings beside it of methods for which it has no [tuned.METHOD] itself."""
    tables, beside = code.beside(toml.read(path), Path(path).parent), tuned_path(path)
    if beside.exists():
        tables["tuned"] = {**toml.read(beside).get("tuned", {}), **tables.get("tuned", {})}
    return tables


def _spread(layer: Layer) -> Tables:
    """A layer as sections: dotted keys unfolded, a plain text for a named section taken as the name."""
    tables: Tables = {}
    if not isinstance(layer, Mapping):
        raise RecipeError(
            f"a recipe is the path of a TOML file or a mapping of sections, got {type(layer).__name__}: data goes to "
            "data=…, a model to model=…"
        )
    for key, value in layer.items():
        section, _, name = str(key).partition(".")
        if section not in (*SECTIONS, "tuned"):
            hint = _homeless(section) if not name and not isinstance(value, Mapping) else ""
            raise RecipeError(hint or unknown("section", section, SECTIONS))
        if name:
            value = {name: value}
        elif isinstance(value, str) and (section in NAMED or section == "task"):
            value = {"kind" if section == "task" else "name": value}
        if not isinstance(value, Mapping):
            raise RecipeError(f"[{section}] is a section: give it a table of settings, got {value!r}")
        tables.setdefault(section, {}).update(value)
    return _moved(tables)


def _current(table: Layer, section: str, names: Mapping[str, str]) -> dict[str, Any]:
    """A section under today's names: inner tables as dotted keys, keys of earlier versions renamed, and said."""
    place = f"{section}.{names[section]}" if section in names else section
    options = options_of(section, names[section]) if section == "algorithm" else {}
    inner = {key.partition(".")[0] for key in options if "." in key}
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if key in inner and not isinstance(value, Mapping):
            raise RecipeError(f"{section}.{key} is a table of settings, got {value!r}")
        flat |= {f"{key}.{name}": item for name, item in value.items()} if key in inner else {key: value}
    names_now, gone, notes = RENAMED.get(place, {}), GONE.get(place, {}), []
    current: dict[str, Any] = {}
    for key, value in flat.items():
        if key in gone:
            default, reason = gone[key]
            if (list(value) if isinstance(value, tuple) else value) != default:
                raise RecipeError(f"{section}.{key} = {toml.dump(value)} is no longer possible: {reason}")
            notes.append(f"{key} is gone")
        else:
            current[names_now.get(key, key)] = value
            notes += [f"{key} is {names_now[key]} now"] if key in names_now else []
    if notes:
        warn(f"[{section}] is of an earlier version: {', '.join(notes)}")
    return current


def _names(stack: Sequence[Tables]) -> dict[str, str]:
    """The names that hold in the end; they decide what else applies."""
    names = {section: str(START[section]["name"]) for section in NAMED}
    for layer in stack:
        for section in NAMED:
            name = layer.get(section, {}).get("name", names[section])
            names[section] = toml.convert(name, str, f"{section}.name")
    for name in (name for layer in stack for name in layer.get("tuned", {})):
        if name not in algorithms.names():  # a misspelt one would never apply
            raise RecipeError(f"[tuned.{name}] {unknown('algorithm', name, algorithms.names())}")
    return names


def _checked(tables: Tables) -> Recipe:
    tables, parts = code.beside(tables, Path()), dict[str, Any]()
    for section in NAMED:
        table = dict(tables[section])
        name = table.pop("name")
        if section == "model" and name == "auto":
            name = NETWORKS.get(tables["data"]["name"], "mlp")
        options = options_of(section, name)
        values = {key: option.default for key, option in options.items()} | _settle(table, options, section)
        if section == "data":
            values = usual(name, values)
        for key, value in values.items():
            if value is REQUIRED:
                raise RecipeError(f"[{section}] {name} needs {key}: set {section}.{key}")
        parts[section] = Named(name, values)
    for section, cls in FIXED.items():
        parts[section] = cls(**_settle(tables[section], options_of(section), section))
    recipe = Recipe(**parts)
    try:
        recipe.optim(), recipe.schedule(), recipe.options()
    except ValueError as error:
        raise RecipeError(str(error)) from None
    return recipe


def essence(tables: Mapping[str, Any]) -> Tables:
    """A recipe's tables without what cannot change its result, as JSON would read them back.

    >>> essence({"data": {"name": "digits", "data_dir": "/mnt"}, "run": {"seed": 1, "workers": 2}, "deploy": {}})
    {'data': {'name': 'digits'}, 'run': {'seed': 1}}
    """
    plain: Tables = json.loads(json.dumps(tables, default=str))
    run = plain.get("run", {})
    plain["run"] = {"seed": run.get("seed", 0), **({"amp": True} if run.get("amp") else {})}
    for name in PLACES:
        plain.get("data", {}).pop(name, None)
    plain.pop("deploy", None)
    return plain


def _settle(given: Mapping[str, Any], options: Mapping[str, Option], section: str) -> dict[str, Any]:
    """Converted values; paths become absolute, so that a run can be resumed from another folder."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in options:
            if homes := [place for place in _homes(key) if place != section]:
                places = " or ".join(f"[{home}]" for home in sorted(homes))
                raise RecipeError(f"[{section}] has no key {key!r}: it belongs in {places}")
            raise RecipeError(f"[{section}] {unknown('key', key, options)}")
        if callable(value) and options[key].type is not Any:
            raise RecipeError(
                f"{section}.{key} is a text, so that the run can be repeated: put the function into a file and name "
                f'it, "FILE.py:{getattr(value, "__name__", "function")}"'
            )
        values[key] = toml.convert(value, options[key].type, f"{section}.{key}")
        if key == "budget":
            values[key] = _budget(values[key])
        elif section == "data" and key in ("data_dir", "cache_dir", "path") and values[key] is not None:
            values[key] = str(Path(values[key]).expanduser().resolve())
    return values


def _budget(value: Any) -> Any:
    """Absolute paths; and 0.5 as a bare TOML key, which means {"0": {"5": …}}, put together again.

    >>> _budget({"0": {"5": 0.25, "1": 0.75}})
    {'0.5': 0.25, '0.1': 0.75}
    """
    if value == DEVICE:
        return value
    if isinstance(value, str):
        return str(Path(value).expanduser().resolve())
    if isinstance(value, Mapping):
        whole: dict[str, Any] = {}
        for key, inner in value.items():
            split = str(key).isdigit() and isinstance(inner, Mapping) and all(str(name).isdigit() for name in inner)
            whole.update({f"{key}.{name}": v for name, v in inner.items()} if split else {str(key): inner})
        return whole
    # A list as TOML would read it back, so that a resumed run finds the same.
    return list(value) if isinstance(value, tuple) else value
