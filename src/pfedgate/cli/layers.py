"""From what is typed to recipes: settings, methods with settings of their own, and names for folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedgate.config import recipe as config
from pfedgate.config import toml
from pfedgate.config.recipe import Recipe


def over(given: Sequence[str] | None, data_dir: Path | None) -> list[Mapping[str, Any]]:
    """The layers of --data-dir and --set."""
    layers = [config.settings(given or [])]
    return [{"data": {"data_dir": str(data_dir)}}, *layers] if data_dir else layers


def of_method(recipe: str | Path | None, over: Sequence[Mapping[str, Any]], method: str) -> Recipe:
    """The recipe for one method of a comparison; `name:key=value,section.key=value` sets what is its own."""
    name, _, own = method.partition(":")
    settings = [text for text in toml.split(own) if text]
    return config.resolve(recipe, {"algorithm": name}, *over, config.settings(settings, section="algorithm"))


def tuned_note(recipe: Path | None, methods: Sequence[str]) -> str:
    """Which of some methods take settings from the file of tuned settings beside a recipe; empty if none does."""
    path = None if recipe is None else config.tuned_path(recipe)
    if path is None or not path.exists():
        return ""
    sections = toml.read(path).get("tuned", {}).keys() - toml.read(str(recipe)).get("tuned", {}).keys()
    names = [name for name in dict.fromkeys(method.partition(":")[0] for method in methods) if name in sections]
    return f"tuned settings of {', '.join(names)}: {path}" if names else ""


def label(method: str) -> str:
    """A method as the name of a folder.

    >>> label("pfedgate:clients.budget=0.3")
    'pfedgate-budget=0.3'
    """
    name, _, own = method.partition(":")
    told = [text.rpartition("=") for text in toml.split(own) if text]
    parts = [name, *(f"{key.rpartition('.')[2]}={value}" for key, _, value in told)]
    return "-".join("".join(c if c.isalnum() or c in "._=" else "_" for c in part) for part in parts)
