"""How an app's recipe and the settings of a run become one.

A deployed run reads the same recipe as `pfedgate run`, its section [deploy] included; settings go over it as on the
command line, separated by semicolons: `flwr run . fleet -c 'set="train.rounds=20; deploy.deadline=90"'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfedgate.config import recipe as config
from pfedgate.config.recipe import Recipe


def read(source: str | Path | Mapping[str, Any], run_config: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of an app with the settings of a run over it.

    >>> recipe = read({"train": {"rounds": 5}}, {"set": "train.rounds=2; deploy.quorum=1"})
    >>> recipe.train.rounds, recipe.deploy.quorum
    (2, 1.0)
    """
    given = [text.strip() for text in str((run_config or {}).get("set", "")).split(";")]
    return config.resolve(source, config.settings([text for text in given if text]))
