"""Pages of documentation as programs: their code blocks, and how each kind is run.

    ```python              run, top to bottom; the blocks of a page share their names
    ```python title="f.py" written to that file, for the commands below it
    ```toml title="r.toml" the same, and it must be a recipe
    ```toml                must be a recipe
    ```sh                  every command is run (see `command`)
    ```text, ```bibtex     shows what something prints or looks like: nothing to run

A block that cannot be run here says why: <!-- not run: needs a network --> on the line before it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pfedgate.cli import app
from pfedgate.cli.base import in_words
from pfedgate.config import options as catalogue
from pfedgate.config import recipe as config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
BESIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "results/README.md", "recipes/tuning/README.md")]
PAGES = [*BESIDE, *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
# Defaults of digits while pages are tested: the same commands, on less. What a page sets itself stays as it is.
SMALL = {"data": {"alpha": 0.1, "clients": 5, "samples": 250}, "train": {"rounds": 2, "batch": 16, "lr": 0.1}}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str
    body: str
    reason: str  # why it is not run

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, _, options = match["info"].partition(" ")
        title = re.search(r'title="([^"]+)"', options)
        body = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, title[1] if title else "", body, match["reason"] or ""))
    return found


@contextlib.contextmanager
def elsewhere(folder: Path) -> Iterator[None]:
    """What a page writes must not stay; what it reads of a clone is there."""
    for name in ("recipes", "examples", "pyproject.toml"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    before, path, environment = Path.cwd(), list(sys.path), dict(os.environ)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """All blocks of a page in order, as a reader would; what they print."""
    monkeypatch.setitem(catalogue.FITTING, "digits", SMALL)
    names: dict[str, object] = {"__name__": page.stem}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), elsewhere(folder):
        for block in blocks(page):
            if block.reason or block.language in ("text", "bibtex"):
                continue
            try:
                _run(block, names)
            except Exception as error:
                raise AssertionError(f"{block}: {type(error).__name__}: {error}") from error
    return printed.getvalue()


def _run(block: Block, names: dict[str, object]) -> None:
    if block.language == "toml":
        tables = tomllib.loads(block.body)
        config.resolve(tables)
    if block.title:
        Path(block.title).parent.mkdir(parents=True, exist_ok=True)
        Path(block.title).write_text(block.body, encoding="utf-8")
    elif block.language == "python":
        # Not with this file's own `from __future__ import annotations`: a reader has none.
        exec(compile(block.body, str(block), "exec", dont_inherit=True), names)
    elif block.language == "sh":
        for line in block.body.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                run_command(words)


def run_command(words: list[str]) -> None:
    """One shell command: ours in this process, which saves seconds each; makefile targets and installs are checked."""
    name, *rest = words
    if name == "pfedgate":
        result = CliRunner().invoke(app, rest)
        print(result.output)
        assert result.exit_code == 0, f"{' '.join(words)}: {result.output}" + (
            in_words(result.exception) if isinstance(result.exception, Exception) else ""
        )
    elif name == "python" and rest[0] == "-m":
        _as_script(rest[1:], lambda: runpy.run_module(rest[1], run_name="__main__", alter_sys=True))
    elif name == "python":
        _as_script(rest, lambda: runpy.run_path(rest[0], run_name="__main__"))
    elif name == "make":
        assert rest[0] in targets(), f"no target {rest[0]} in the Makefile"
    elif name == "pip":
        wanted = set(re.findall(r"pfedgate\[([^\]]+)\]", " ".join(rest)))
        assert wanted <= extras(), f"no extra {wanted - extras()} in pyproject.toml"
    elif name in ("ls", "cat", "head", "mkdir", "cp"):
        subprocess.run(words, check=True, timeout=60)
    else:
        raise ValueError(f"no way to run {name!r} here: say <!-- not run: why --> before the block")


def _as_script(arguments: list[str], run: object) -> None:
    before = sys.argv
    sys.argv = list(arguments)
    try:
        run()  # type: ignore[operator]
    finally:
        sys.argv = before


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return set(project["project"]["optional-dependencies"])
