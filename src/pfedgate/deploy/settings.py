"""[deploy] of a recipe, and how an app's recipe and the settings of a run become one.

A deployed run reads the same recipe as `pfedgate run`, with one more section; settings go over it as on the command
line, separated by semicolons: `flwr run . fleet -c 'set="train.rounds=20; deploy.deadline=90"'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfedgate import config, schema, toml
from pfedgate.config import Recipe
from pfedgate.schema import RecipeError

SECTION = "deploy"


@dataclass(frozen=True)
class Deploy:
    """[deploy]: how long to wait, and for how many."""

    nodes: int = 1  # training starts when so many nodes have told which clients they hold
    start: float = 300.0  # seconds to wait for them; a node needs some 10 to come up
    deadline: float = 600.0  # seconds a round may take, an evaluation likewise; who is late is left out
    quorum: float = 0.5  # share of a round's clients whose updates must have come by then, else the run stops
    classes: tuple[str, ...] = ()  # names of all classes, where a node may hold data of some of them only

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.start <= 0 or self.deadline <= 0:
            raise RecipeError("[deploy] nodes is at least 1; start and deadline are seconds > 0")
        if not 0 <= self.quorum <= 1:
            raise RecipeError(f"[deploy] quorum is a share from 0 to 1, got {self.quorum}")


@dataclass(frozen=True)
class Order:
    """What a deployed run is: the recipe, and its section [deploy]."""

    recipe: Recipe
    deploy: Deploy


def read(source: str | Path | Mapping[str, Any], run_config: Mapping[str, Any] | None = None) -> Order:
    """The recipe of an app with the settings of a run over it.

    >>> order = read({"train": {"rounds": 5}}, {"set": "train.rounds=2; deploy.quorum=1"})
    >>> order.recipe.train.rounds, order.deploy.quorum
    (2, 1.0)
    """
    first = dict(toml.read(source) if isinstance(source, (str, Path)) else source)
    given = [text.strip() for text in str((run_config or {}).get("set", "")).split(";")]
    over = dict(config.settings([text for text in given if text]))
    section = {**first.pop(SECTION, {}), **over.pop(SECTION, {})}
    deploy = Deploy(**schema.settle(section, schema.of_dataclass(Deploy), SECTION))
    return Order(config.resolve(first, over), deploy)
