"""A small ready app for Flower: pyproject, recipe, server and client of two lines each, README."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from pfedgate import __version__
from pfedgate.config import toml
from pfedgate.deploy import settings

PACKAGE = "pfedgate_app"
FILES = {
    "pyproject.toml": "pyproject.toml.in",
    "README.md": "README.md.in",
    f"{PACKAGE}/__init__.py": "init.py.in",
    f"{PACKAGE}/server.py": "server.py.in",
    f"{PACKAGE}/client.py": "client.py.in",
}


def write(folder: str | Path, recipe: str | Path | None = None, *, name: str | None = None) -> Path:
    """Write the app into a new or empty folder; the recipe is checked first, and copied as it is."""
    place = Path(folder)
    if place.exists() and any(place.iterdir()):
        raise FileExistsError(f"{place} is not empty: choose another folder")
    text = _template("recipe.toml.in") if recipe is None else Path(recipe).expanduser().read_text(encoding="utf-8")
    settings.read(toml.parse(text, str(recipe or "the recipe")))
    title = name or place.resolve().name
    values = {"NAME": re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "pfedgate-app", "VERSION": __version__}
    for path, template in FILES.items():
        content = _template(template)
        for key, value in values.items():
            content = content.replace(f"@{key}@", value)
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(content, encoding="utf-8")
    (place / PACKAGE / "recipe.toml").write_text(text, encoding="utf-8")
    return place


def _template(name: str) -> str:
    return resources.files("pfedgate.deploy").joinpath("templates", name).read_text(encoding="utf-8")
