"""How large a study is run: tiny (digits, seconds), small (hours on two cores) or as in the paper (days).

A scale knows its data sets ("worlds") by the names that studies use. Columns whose data a scale lacks are left out;
a study that has no other is run on the scale's first world.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pfedgate.config import toml
from pfedgate.config.recipe import Recipe, resolve
from pfedgate.core.errors import RecipeError, unknown
from pfedgate.studies.declare import Column, Row, Settings, Study


@dataclass(frozen=True)
class World:
    """A data set at some size: a recipe (with the tuned settings of methods) and what goes over it."""

    title: str
    recipe: str | None = None  # a file of recipes/
    settings: Settings = field(default_factory=dict)
    near: str = "glyphs"  # public data like ours, for methods that need some
    far: str = "photos"
    images: int = 0  # used in all; this and the rest are for estimates only
    clients: int = 0
    shape: tuple[int, ...] = (3, 32, 32)
    classes: int = 10


@dataclass(frozen=True)
class Scale:
    """Worlds, and how often everything is repeated."""

    name: str
    worlds: Mapping[str, World]
    settings: Settings
    usual: tuple[str, ...]  # worlds taken unless others are asked for
    seeds: int = 1  # of studies that are repeated
    best: int | None = None  # rows that are repeated, the best on validation (and FedAvg); None: all
    batches: tuple[int, ...] = (32, 128, 512)  # of table 2
    turns: int = 9  # of measurements of time
    not_in_all: tuple[str, ...] = ()  # studies too long for this scale's machines: run only when they are named


TINY = Scale(
    "tiny",
    {
        "digits": World(
            "digits",
            settings={
                "data.name": "digits", "data.clients": 4, "data.samples": 400, "data.alpha": 0.4,
                "model.name": "mlp", "model.hidden": [128], "train.batch": 32, "train.lr": 0.1,
            },
            images=400,
            clients=4,
            shape=(1, 8, 8),
        )
    },
    {"train.rounds": 2, "evaluate.every": 1},
    ("digits",),
    seeds=2,
    best=1,
    batches=(8, 16),
    turns=1,
)  # fmt: skip

SMALL = Scale(
    "small",
    {
        "cifar10": World(
            "CIFAR-10, 40 clients, 24,000 images", "cifar10-quick.toml",
            {"data.name": "cifar10", "data.clients": 40, "data.samples": 24000}, "photos", "femnist", 24_000, 40,
        ),
        "femnist": World(
            "FEMNIST, 50 writers", "femnist-quick.toml", {"data.name": "femnist", "data.clients": 50},
            "emnist_sd19", "cifar10", 11_000, 50, (1, 28, 28), 62,
        ),
        "emnist": World(
            "EMNIST (from NIST SD 19), 50 clients, 20,000 images", "emnist-quick.toml",
            {"data.name": "emnist_sd19", "data.clients": 50, "data.samples": 20000}, "femnist", "cifar10", 20_000, 50,
            (1, 28, 28), 62,
        ),
    },
    {"train.rounds": 60, "evaluate.every": 5},
    ("cifar10", "femnist"),
    seeds=3,
    best=5,
    not_in_all=("table6", "table11"),  # five passes per step, eight epochs: longer than all the others
)  # fmt: skip

PAPER = Scale(
    "paper",
    {
        "cifar10": World(
            "CIFAR-10, 100 clients", "cifar10-quick.toml",
            {"data.name": "cifar10", "data.clients": 100, "data.samples": "none"}, "cifar100", "femnist", 60_000, 100,
        ),
        "femnist": World(
            "FEMNIST, 15 % of the writers (539)", "femnist-quick.toml",
            {"data.name": "femnist", "data.clients": 0.15}, "emnist+transpose+invert", "cifar10", 121_000,
            539, (1, 28, 28), 62,
        ),
        "emnist": World(
            "EMNIST, 100 clients, 81,425 images", "emnist-quick.toml",
            {"data.name": "emnist", "data.clients": 100, "data.samples": 0.1}, "femnist", "cifar10", 81_425,
            100, (1, 28, 28), 62,
        ),
        "cifar100": World(
            "CIFAR-100, 50 clients", "cifar100-quick.toml",
            {"data.name": "cifar100", "data.clients": 50, "data.samples": "none"}, "cifar10", "femnist", 60_000, 50,
            classes=100,
        ),
    },
    {"train.rounds": 400, "evaluate.every": 5, "evaluate.points": ["after_broadcast", "after_local"]},
    ("emnist", "femnist", "cifar10", "cifar100"),
    seeds=3,
)  # fmt: skip

SCALES = {scale.name: scale for scale in (TINY, SMALL, PAPER)}


def get(name: str) -> Scale:
    """A scale by name."""
    if name not in SCALES:
        raise ValueError(unknown("scale", name, SCALES))
    return SCALES[name]


def columns_of(study: Study, scale: Scale, worlds: Sequence[str] = ()) -> list[tuple[Column, World]]:
    """The columns of a study that a scale has data for, each with its world.

    >>> from pfedgate.studies import paper
    >>> [column.name for column, _ in columns_of(paper.get("table1"), SMALL)]
    ['FEMNIST', 'CIFAR-10']
    >>> [column.name for column, _ in columns_of(paper.get("table12"), TINY)]
    ['digits, α = 0.4', 'digits, α = 0.2', 'digits, α = 0.1', 'digits, α = 0.01']
    """
    for name in worlds:
        if name not in scale.worlds:
            raise ValueError(f"scale {scale.name}: {unknown('data', name, scale.worlds)}")
    chosen = list(worlds or scale.usual)
    found = [(column, scale.worlds[column.data]) for column in study.columns if column.data in chosen]
    if found or not study.columns:
        return found
    # None of its data: the study's first data set is replaced by the scale's first.
    first = scale.worlds[chosen[0]]
    stands = [column for column in study.columns if column.data == study.columns[0].data]
    return [(replace(column, title=first.title, data=chosen[0]), first) for column in stands]


def recipe_of(
    row: Row, column: Column, world: World, scale: Scale, *, seed: int = 0, over: Sequence[Mapping[str, Any]] = (),
    recipes: Path | None = None,
) -> Recipe:  # fmt: skip
    """The recipe of one cell; `over` are settings from outside and win."""
    stands = {"@near": world.near, "@far": world.far}
    own = {name: stands.get(value, value) if isinstance(value, str) else value for name, value in row.settings.items()}
    last: dict[str, Any] = {"run.seed": seed, "run.keep_best": False, "run.workers": 1}
    layers = [world.settings, scale.settings, {"clients.budget": 1.0}, column.settings, own, *over, last]
    made = resolve(_file(world, recipes), {"algorithm": row.method}, *layers)
    # The gates of a round are noted from its checkpoint, so there is one whenever models are scored.
    return replace(made, run=replace(made.run, checkpoint_every=made.evaluate.every or 1))


def _file(world: World, recipes: Path | None) -> dict[str, Any]:
    if world.recipe is None:
        return {}
    folder = recipes or default_recipes()
    path = folder / world.recipe
    if path.exists():
        return toml.read(path)
    if world.recipe in ("cifar10-quick.toml", "femnist-quick.toml"):
        raise RecipeError(f"{path} is missing: run in a checkout of the source, or give --recipes DIR")
    return {}  # nobody has tuned for it yet: the defaults of the methods


def default_recipes() -> Path:
    """recipes/ here or, in a checkout, beside the source."""
    here = Path("recipes")
    return here if here.is_dir() else Path(__file__).parents[3] / "recipes"
