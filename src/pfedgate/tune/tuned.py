"""The file of tuned settings beside a recipe: NAME.tuned.toml, a section [tuned.METHOD] for every method.

`pfedgate tune --write` makes it, and whoever reads the recipe reads it, too. A section of the recipe itself wins.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedgate.config import toml
from pfedgate.config.recipe import RecipeError, tuned_path
from pfedgate.engine.files import write_atomically
from pfedgate.runs.environment import environment
from pfedgate.runs.progress import percent
from pfedgate.tune.search import Search

HEAD = "# Written by `pfedgate tune` and read with the recipe beside it, whose own [tuned.METHOD] sections win.\n\n"


def check(recipe: Path | None, methods: Sequence[str]) -> None:
    """An error if a recipe has tuned settings of a method itself: those in the file would have no effect."""
    tables = {} if recipe is None else toml.read(recipe).get("tuned", {})
    for method in methods:
        if method in tables:
            raise RecipeError(
                f"{recipe} has tuned settings of {method} itself, which win over any that are written beside it: take "
                f"them out of the recipe, or move them into {tuned_path(Path(str(recipe)))}"
            )


def write(search: Search, recipe: Path | None, folder: Path, *, beside: bool, given: Sequence[str] = ()) -> Path:
    """Keep the best settings of a search; returns the file.

    beside  write beside the recipe; else beside a copy of it in the folder
    given   settings of the search alone: no part of the recipe, so they are noted
    """
    best, spec = search.best, search.spec
    assert best is not None
    if recipe is None:
        path = folder / "tuned.toml"
    elif beside:
        path = tuned_path(recipe)
    else:
        copy = folder / recipe.name
        shutil.copyfile(recipe, copy)
        path = tuned_path(copy)
        if not path.exists() and tuned_path(recipe).exists():
            shutil.copyfile(tuned_path(recipe), path)
    commit = (environment()["commit"] or "")[:12]
    note = (
        f"{percent(best.value)} on validation, the best of {len(search.trials)} trials of "
        f"{spec.recipe.train.rounds} rounds ({spec.search}), {time.strftime('%Y-%m-%d')}"
        + (f", with {' '.join(given)}" if given else "")
        + (f", commit {commit}" if commit else "")
    )
    text = path.read_text(encoding="utf-8") if path.exists() else HEAD
    write_atomically(path, with_section(text, spec.recipe.algorithm.name, best.params, note).encode())
    return path


def with_section(text: str, method: str, params: Mapping[str, Any], note: str) -> str:
    """The text of such a file with these settings in [tuned.METHOD], over those that it had there.

    >>> text = "[tuned.ditto]\\ntrain.lr = 1.0\\nclients.fraction = 0.5\\n"
    >>> print(with_section(text, "ditto", {"train.lr": 0.1}, "39 %"))
    [tuned.ditto]
    # pfedgate tune: 39 %
    train.lr = 0.1
    clients.fraction = 0.5
    <BLANKLINE>
    """
    before = toml.parse(text).get("tuned", {}).get(method, {})
    settings = {f"{section}.{key}": value for section, table in before.items() for key, value in table.items()}
    lines = [f"[tuned.{method}]", f"# pfedgate tune: {note}"]
    lines += [f"{name} = {toml.dump(value)}" for name, value in {**settings, **params}.items()]
    head, *sections = re.split(r"(?m)^(?=\[tuned\.)", text)
    at = next((at for at, old in enumerate(sections) if old.startswith(f"[tuned.{method}]")), len(sections))
    sections[at : at + 1] = ["\n".join(lines)]
    return head + "\n\n".join(section.rstrip("\n") for section in sections) + "\n"
