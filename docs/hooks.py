"""For the site only: the pages of commands and of recipes are written from the code and cannot be out of date.

`{{ commands }}` and `{{ recipes }}` in a page are replaced when the site is built, and so is
`{{ glossary … }}` with nouns by module. A page that mkdocs.yml does not list comes last in the section of its
folder, so that results and new pages are never lost.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src"
GLOSSARY = re.compile(r"\{\{ glossary\n(.*?)\n\}\}", re.DOTALL)  # lines of "module: Noun, Noun"

sys.path.insert(0, str(SOURCE))  # a build need not install the package


def on_config(config: Any) -> Any:
    """Called by mkdocs when it has read mkdocs.yml."""
    docs = Path(config["docs_dir"])
    listed = set(re.findall(r"[\w/-]+\.md", repr(config["nav"])))
    for page in sorted(docs.rglob("*.md")):
        name = page.relative_to(docs).as_posix()
        if name not in listed:
            _section(config["nav"], page.parent.name.capitalize()).append(name)
    return config


def _section(nav: list[Any], title: str) -> list[Any]:
    """The pages of a section, made now if there is none."""
    for entry in nav:
        if isinstance(entry, dict) and title in entry:
            found: list[Any] = entry[title]
            return found
    nav.append({title: []})
    return _section(nav, title)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    for name, make in (("commands", commands), ("recipes", recipes)):
        if f"{{{{ {name} }}}}" in markdown:
            markdown = markdown.replace(f"{{{{ {name} }}}}", make())
    return GLOSSARY.sub(lambda match: glossary(match[1]), markdown)


def commands() -> str:
    """Every command with its arguments and options."""
    import typer

    from pfedgate.cli import app

    return "\n\n".join(_command(path, found) for path, found in _walk("pfedgate", typer.main.get_command(app)))


def _walk(path: str, found: Any) -> Iterator[tuple[str, Any]]:
    below = getattr(found, "commands", None)
    if below is None:
        yield path, found
        return
    for name, child in below.items():
        yield from _walk(f"{path} {name}", child)


def _command(path: str, found: Any) -> str:
    rows = []
    for option in found.params:
        if option.name in ("help", "debug"):
            continue
        name = option.metavar or option.name.upper()
        if option.opts[0].startswith("-"):
            name = " / ".join([option.opts[0], *option.secondary_opts[:1]])
            name = name if option.is_flag else f"{name} {option.metavar or '…'}"
        set_to = "" if option.default in (None, False) else f" Default: {option.default}."
        rows.append(f"| <code>{_cell(name)}</code> | {_cell((option.help or '') + set_to)} |")
    table = "\n".join(["| option | |", "|---|---|", *rows]) if rows else ""
    return f"## {path}\n\n{_plain(inspect.cleandoc(found.help or ''))}\n\n{table}"


def recipes() -> str:
    """Every section with its keys, defaults and reasons."""
    from pfedgate.config import options as catalogue
    from pfedgate.config import toml

    parts = []
    for section in catalogue.SECTIONS:
        named = section in catalogue.NAMED
        example = {"data": "digits", "model": "mlp", "algorithm": "pfedgate"}.get(section, "")
        rows = [
            f"| `{key}` | <code>{_cell(_default(option.default, toml))}</code> | {_cell(option.why)} |"
            for key, option in catalogue.options_of(section, example).items()
        ]
        told = f"`name`, and the options of what it names. Those of `{example}`:" if named else ""
        parts.append("\n".join([f"## [{section}]", "", told, "", "| key | default | why |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _default(value: Any, toml: Any) -> str:
    if value is None or value is dataclasses.MISSING:
        return "none"
    try:
        return str(toml.dump(value))
    except (TypeError, ValueError):
        return "required"


def _cell(text: str) -> str:
    return _plain(text).replace("|", "&#124;").replace("\n", " ")


def _plain(text: str) -> str:
    return re.sub(r"\[/?(bold|dim|italic)\]", "", text)


def glossary(nouns: str) -> str:
    """A table of nouns, each with the first paragraph of its docstring in the code."""
    rows = ["| noun | meaning | where |", "|---|---|---|"]
    for line in nouns.splitlines():
        module, _, names = line.partition(": ")
        room = SOURCE.joinpath("pfedgate", *module.split("."))
        path = room / "__init__.py" if room.is_dir() else room.with_suffix(".py")
        where = path.relative_to(SOURCE.parent).as_posix()
        rows += [f"| **{name}** | {_cell(meaning(path, name))} | `{where}` |" for name in names.split(", ")]
    return "\n".join(rows)


def meaning(path: Path, name: str) -> str:
    """The first paragraph of a noun's docstring; for an alias the string below it, or the comment behind it."""
    source = path.read_text(encoding="utf-8")
    body = ast.parse(source).body
    for at, node in enumerate(body):
        if isinstance(node, ast.ClassDef) and node.name == name:
            text = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            below = body[at + 1].value if isinstance(body[at + 1], ast.Expr) else None  # type: ignore[attr-defined]
            comment = source.splitlines()[(node.end_lineno or 1) - 1].partition("  # ")[2]
            text = below.value if isinstance(below, ast.Constant) else comment[:1].upper() + comment[1:]
        else:
            continue
        if text:
            return inspect.cleandoc(text).split("\n\n")[0].replace("``", "`").rstrip(".") + "."
        raise ValueError(f"{name} in {path} has no docstring for the glossary")
    raise ValueError(f"the glossary names {name}, but {path} does not define it")
