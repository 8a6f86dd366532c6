"""A study as data: rows (methods) × columns (data) × seeds, and the numbers shown of each cell; and its sizes.

A scale (tiny: digits, seconds; small: hours on two cores; paper: days) knows its data sets, "worlds", by the names that
studies use. Columns whose data a scale lacks are left out; a study that has no other is run on the scale's first world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pfedgate.config.recipe import Recipe, resolve
from pfedgate.core.errors import RecipeError, unknown
from pfedgate.data.partition import numbered
from pfedgate.data.pool import LOOKS
from pfedgate.data.sharing import dealt
from pfedgate.report.tables import percent
from pfedgate.runs.progress import clock, scaled, size

Settings = Mapping[str, Any]  # by full name: {"train.lr": 0.1, "clients.budget": 0.5}
Show = Callable[[float], str]


@dataclass(frozen=True)
class Row:
    """A method as one line of a table.

    A value "@near" stands for what the column's data calls so, "@domains" for every client's domain.
    """

    name: str
    method: str
    settings: Settings = field(default_factory=dict)
    control: bool = False  # shown beside the others, on no side of a claim that does not name it
    tuned: str = ""  # the search whose settings it takes; by default its method's
    narrow: tuple[str, float] | None = None  # trained densely, as cheap as a gate: `controls.settings`
    longer: int = 1  # times as many rounds, where a round trains only some of the clients that other rows' train


@dataclass(frozen=True)
class Column:
    """Data, under the name that scales know, and what else is special about it."""

    title: str
    data: str
    settings: Settings = field(default_factory=dict)
    what: str = ""  # the special thing in words

    @property
    def name(self) -> str:
        """The title and the special thing."""
        return f"{self.title}, {self.what}" if self.what else self.title


@dataclass(frozen=True)
class Number:
    """One number of a cell. `key` names it in an outcome; `minus`: the difference to that other key."""

    key: str
    title: str
    show: Show = percent
    best: Callable[..., float] | None = max  # max, min, or None: nothing to win
    minus: str = ""
    over_first: bool = False  # divided by that of the study's first row
    reach: bool = False  # the sum over rounds until the best accuracy on validation data of the study's first row

    @property
    def name(self) -> str:
        """The number's key in JSON."""
        marks = {"-reach": self.reach, f"-minus-{self.minus}": bool(self.minus), "-ratio": self.over_first}
        return self.key + "".join(mark for mark, wanted in marks.items() if wanted)


ACC = Number("best_accuracy", "Acc, %")
WORST = Number("best_bottom_decile", "bottom decile, %")
LAST = Number("accuracy", "last round, %")
VALIDATION = Number("val", "best on validation, %")
DENSITY = Number("density", "s̄'", "{:.3f}".format, None)
Q = Number("q", "q̄", "{:.3f}".format, None)
UP = Number("up", "up per round", size, min)
FLOPS = Number("flops", "compute per round", lambda value: scaled(value, "FLOP"), min)
SECONDS = Number("seconds", "time", clock, None)
RATIO = Number("flops", "compute, × FedAvg", "{:.2f}".format, min, over_first=True)
USUAL = (ACC, WORST, LAST, DENSITY, Q, UP, FLOPS, SECONDS)


def numbers_of(point: str) -> tuple[Number, ...]:
    """The numbers of a table that shows one point of `cells.points`."""
    scores = (
        Number(f"{point}_accuracy", "Acc, %"),
        Number(f"{point}_bottom_decile", "bottom decile, %"),
        Number(f"{point}_worst_tenth", "worst tenth, %"),
    )
    if point == "a":
        beside = (
            Number("batch_1_accuracy", "one at a time, %"),
            Number("per_client_accuracy", "a choice per client, %"),
        )
        return (*scores, *beside, RATIO, DENSITY, UP)
    own = (Number("b_lr", "rate", "{:g}".format, None), Number("b_epochs", "epochs", "{:.0f}".format, None))
    return (*scores, *own, RATIO, Number("b_flops", "own epochs", lambda value: scaled(value, "FLOP"), min))


@dataclass(frozen=True)
class Claim:
    """A difference that matters: the best of some rows on validation data, minus the best of others on test data."""

    title: str
    ours: tuple[str, ...] = ()  # none: all rows of pFedGate that are no controls
    others: tuple[str, ...] = ()  # none: all rows of other methods
    ours_flops: float | None = None  # only rows with at most this share of FedAvg's FLOPs
    others_flops: float | None = None
    must: float | None = 0.0  # points; 0: the whole interval is above 0
    aim: float | None = None


@dataclass(frozen=True)
class Study:
    """A table or figure, and the rows, columns and numbers that it shows."""

    name: str
    title: str
    rows: tuple[Row, ...] = ()
    columns: tuple[Column, ...] = ()
    numbers: tuple[Number, ...] = USUAL
    note: str = ""
    point: str = ""  # of `cells.points`: what is compared client by client, with intervals
    matrix: bool = False  # columns side by side instead of a table each
    more_seeds: bool = False  # repeat with other seeds, as far as the scale does
    seeds: int = 0  # of every row, whatever the scale says
    drops: tuple[tuple[str, str], ...] = ()  # also show the first of these kinds of columns minus the second
    claims: tuple[Claim, ...] = ()
    look: str = ""  # at each trained cell: a name in `cells.LOOKS`
    figure: str = ""  # a name that `figures.draw` knows
    measure: str = ""  # beside or instead of cells: a name in `bench.MEASURES`
    worlds: tuple[str, ...] = ()  # taken instead of the scale's usual ones, as far as it has them

    @property
    def looks(self) -> tuple[str, ...]:
        """Names of looks that each of its cells needs."""
        return (self.look,) if self.look else ()

    @property
    def validation(self) -> Number:
        """The number that rows are ranked by."""
        return Number(f"{self.point}_val_accuracy", "") if self.point else VALIDATION


@dataclass(frozen=True)
class World:
    """A data set at some size: a recipe, with the tuned settings of methods, and settings over it."""

    title: str
    recipe: str | None = None  # a file of recipes/
    settings: Settings = field(default_factory=dict)
    near: str = "glyphs"  # public data like ours, for methods that need some
    far: str = "photos"
    images: int = 0  # in all clients together; this and the rest are for estimates only
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
    asked: tuple[str, ...] = ()  # worlds taken only where they are asked for
    seeds: int = 1  # that repeated studies get
    within: float | None = None  # rows are repeated that are within so much of the best on validation; None: all
    trials: int = 0  # of the search that every row's settings come from; 0: none, the recipes' own are taken
    trial_rounds: int = 0
    tuned_at: str = ""  # a smaller scale whose searches serve this one, as far as they have ended
    batches: tuple[int, ...] = (32, 128, 512)  # that table 2 has
    turns: int = 9  # that measurements of time take
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
        ),
        "cifar10": World(
            "CIFAR-10, 20 clients, 4,000 images", "cifar10-quick.toml",
            {"data.name": "cifar10", "data.clients": 20, "data.samples": 4000, "train.batch": 32}, "digits", "digits",
            4_000, 20,
        ),
    },
    {"train.rounds": 2, "evaluate.every": 1},
    ("digits",),
    asked=("cifar10",),  # every machine has the data of the others
    seeds=2,
    within=0.0,
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
        "cifar100": World(
            "CIFAR-100, 40 clients, 24,000 images", "cifar100-quick.toml",
            {"data.name": "cifar100", "data.clients": 40, "data.samples": 24000, "data.alpha": 0.4}, "cifar10",
            "femnist", 24_000, 40, classes=100,
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
        "fashion": World(
            "Fashion-MNIST, 20 clients, 6,000 images", settings={"data.name": "fashion"}, near="femnist",
            images=6_000, clients=20, shape=(1, 28, 28),
        ),
        "mixture": World(
            "FEMNIST digits, letters and Fashion-MNIST, 24 clients, 6,000 images",
            settings={"data.name": "mixture", "data.clients": 24, "data.samples": 6000, "train.batch": 32},
            near="femnist", images=6_000, clients=24, shape=(1, 28, 28), classes=72,
        ),
    },
    {"train.rounds": 60, "evaluate.every": 5},
    ("cifar10", "cifar100", "femnist"),
    seeds=5,
    within=0.03,
    trials=12,
    trial_rounds=30,
    not_in_all=("table6", "table11"),  # five passes per step, eight epochs: longer than all the others
)  # fmt: skip

# An hour on one core: twenty rounds, three seeds, and every method as it is by default. Nothing is searched.
QUICK = Scale(
    "quick",
    {
        "digits": World(
            "digits, 20 clients, 1,797 images", settings={"data.name": "digits"}, near="femnist", images=1_797,
            clients=20, shape=(1, 8, 8),
        ),
        **{name: SMALL.worlds[name] for name in ("fashion", "mixture")},
    },
    {"train.rounds": 20, "evaluate.every": 5},
    ("digits", "fashion"),
    seeds=3,
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
    seeds=1,  # a seed is days; the small scale says what seeds change
    tuned_at="small",
)  # fmt: skip

SCALES = {scale.name: scale for scale in (TINY, QUICK, SMALL, PAPER)}


NARROWED = ("cnn_cifar10", "cnn_cifar100", "cnn_femnist", "cnn_digits")  # models that can be narrow


def scale_of(name: str) -> Scale:
    """A scale by its name."""
    if name not in SCALES:
        raise ValueError(unknown("scale", name, SCALES))
    return SCALES[name]


def columns_of(study: Study, scale: Scale, worlds: Sequence[str] = ()) -> list[tuple[Column, World]]:
    """The columns of a study that a scale has data for, each with its world.

    >>> from pfedgate.studies import paper
    >>> [column.name for column, _ in columns_of(paper.get("table1"), SMALL)]
    ['CIFAR-10', 'FEMNIST', 'CIFAR-100']
    >>> [column.name for column, _ in columns_of(paper.get("table12"), TINY)]
    ['digits, α = 0.4', 'digits, α = 0.2', 'digits, α = 0.1', 'digits, α = 0.01']
    """
    for name in worlds:
        if name not in scale.worlds:
            raise ValueError(f"scale {scale.name}: {unknown('data', name, scale.worlds)}")
    own = [name for name in study.worlds if name in scale.worlds and name not in scale.asked]
    names = list(worlds or own or scale.usual)
    columns = [(column, scale.worlds[column.data]) for column in study.columns if column.data in names]
    if columns or not study.columns:
        return columns
    # None of its data: the study's first data set is replaced by the scale's first.
    first = scale.worlds[names[0]]
    stands = [column for column in study.columns if column.data == study.columns[0].data]
    return [(replace(column, title=first.title, data=names[0]), first) for column in stands]


def recipe_of(
    row: Row, column: Column, world: World, scale: Scale, tuned: Settings | None = None, *, seed: int = 0,
    over: Sequence[Mapping[str, Any]] = (), recipes: Path | None = None,
) -> Recipe:  # fmt: skip
    """The recipe of one cell; `tuned` are its search's settings, `over` are settings from outside and win."""
    stands = {"@near": world.near, "@far": world.far}
    own = {name: stands.get(value, value) if isinstance(value, str) else value for name, value in row.settings.items()}
    last: dict[str, Any] = {"run.seed": seed, "run.workers": 1}
    file = _file(world, recipes)
    layers = [world.settings, scale.settings, {"clients.budget": 1.0}, tuned or {}, column.settings]
    if row.narrow is not None:
        from pfedgate.studies.controls import settings

        model = resolve(file, *layers[:2]).model.name
        if model in NARROWED:
            key, value = settings(*row.narrow, model, world.classes, world.shape)
            own = {key: value, **own}
    if "@domains" in own.values():
        own = {name: _domains(column, world, seed) if value == "@domains" else value for name, value in own.items()}
    recipe = resolve(file, {"algorithm": row.method}, *layers, own, *over, last)
    recipe = replace(
        recipe,
        train=replace(recipe.train, rounds=recipe.train.rounds * row.longer),
        evaluate=replace(recipe.evaluate, every=recipe.evaluate.every * row.longer),
    )
    # The gates of a round are noted from its checkpoint, so there is one whenever models are scored.
    return replace(recipe, run=replace(recipe.run, checkpoint_every=recipe.evaluate.every or 1))


def _domains(column: Column, world: World, seed: int) -> dict[str, int]:
    """The domain of every client by its id, as loaders deal them; without domains all clients are of one."""
    kinds, clients = column.settings.get("data.domains"), world.clients
    number = max(LOOKS[kind] for kind in kinds.split("+")) if kinds else 1
    return dict(zip(numbered(clients).tolist(), dealt(clients, number, seed).tolist(), strict=True))


def _file(world: World, folder: Path | None) -> Path | None:
    """The world's recipe in a folder: by default recipes/ here or, in a checkout, beside the source."""
    if world.recipe is None:
        return None
    if folder is None:
        folder = Path("recipes") if Path("recipes").is_dir() else Path(__file__).parents[3] / "recipes"
    path = folder / world.recipe
    if path.exists():
        return path
    if world.recipe in ("cifar10-quick.toml", "femnist-quick.toml"):
        raise RecipeError(f"{path} is missing: run in a checkout of the source, or give --recipes DIR")
    return None  # Nobody has tuned for it yet: methods run with their defaults.
