"""What the documentation shows runs, what it links to exists, and the site builds without a warning."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.browser import Browser, find
from tests.support.pages import PAGES, ROOT, blocks, run_command, run_page, targets

import pfedgate

KNOWN = {"python", "sh", "toml", "text", "bibtex"}
NAMES_CODE = [ROOT / "docs" / "explanation" / "architecture.md", ROOT / "CONTRIBUTING.md"]
WITH_COMMANDS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "index.md"]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.filterwarnings("ignore:this recipe runs code")  # it is meant to
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page != ROOT / "README.md"], ids=name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(page, tmp_path, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(blocks(page)), "a fence that the tests do not see"
    assert not [str(block) for block in blocks(page) if block.language not in KNOWN and not block.reason]
    unfenced = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"\n\n {4}(?:pfedgate|python|pip|make|import|from) .*", unfenced), "code that no test sees"


def test_the_readme_runs_and_keeps_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run_page(ROOT / "README.md", tmp_path, monkeypatch)
    shares = dict(re.findall(r"^(parameters|FLOP a sample) .* (\d+)%$", printed, re.MULTILINE))
    assert shares.keys() == {"parameters", "FLOP a sample"}
    assert all(0 < int(share) <= 30 for share in shares.values())


def test_a_broken_block_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "page.md"
    monkeypatch.setattr("tests.support.pages.ROOT", tmp_path)
    (tmp_path / "w").mkdir()
    for text in ("```python\n1 / 0\n```\n", "```sh\npfedgate run --set train.lrr=1\n```\n", "```toml\n[trian]\n```\n"):
        broken.write_text(text, encoding="utf-8")
        with pytest.raises(AssertionError, match=r"page\.md:1"):
            run_page(broken, tmp_path / "w", monkeypatch)


def test_unknown_commands_and_targets_are_noticed() -> None:
    with pytest.raises(ValueError, match="not run"):
        run_command(["curl", "https://example.org"])
    for wrong in (["make", "coffee"], ["pip", "install", "pfedgate[no-such-extra]"]):
        with pytest.raises(AssertionError):
            run_command(wrong)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_and_pictures_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)|(?:src|href)=\"([^\"#]+)\"", page.read_text(encoding="utf-8"))
    local = [link for pair in links for link in pair if link and "://" not in link]
    assert not [link for link in local if not (page.parent / link).exists()]


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """What a file or a class defines: functions, classes, their methods and fields, constants."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield prefix + ast.unparse(target)


@pytest.mark.parametrize("page", NAMES_CODE, ids=name)
def test_files_and_names_of_the_code_exist(page: Path) -> None:
    """`src/pfedgate/core/types.py#Card` is a file, and a name that it defines."""
    places = re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]+)(?:#([\w.]+))?`", page.read_text(encoding="utf-8"))
    assert places
    assert not [path for path, _ in places if not (ROOT / path).exists()]
    missing = [
        f"{path}#{symbol}"
        for path, symbol in places
        if symbol and symbol not in definitions(ast.parse((ROOT / path).read_text(encoding="utf-8")).body)
    ]
    assert not missing


def test_the_glossary_explains_every_noun_once() -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    tables = [hooks["glossary"](nouns) for nouns in hooks["GLOSSARY"].findall(page)]
    nouns = re.findall(r"^\| \*\*(\w+)\*\* \| .{10,} \|", "\n".join(tables), re.MULTILINE)
    assert len(nouns) == len(set(nouns)) == sum(table.count("\n") - 1 for table in tables)
    with pytest.raises(ValueError, match="Crad"):
        hooks["glossary"]("core.types: Crad")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"], ids=name)
def test_prose_is_wrapped(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.lstrip().startswith(("|", "<", "!", "-"))]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_make_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = [block.body for block in blocks(page)] + re.findall(r"`([^`\n]+)`", text)
    named = set(re.findall(r"\bmake ([a-z-]+)(?=\s|`|$)", "\n".join(code)))
    assert named
    assert named <= targets()


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs the extra docs, which dev has")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert built.returncode == 0, built.stderr  # not with --quiet: it hides warnings from --strict
    assert "WARNING" not in built.stderr
    pages = {page.relative_to(ROOT / "docs").with_suffix("") for page in PAGES if page.is_relative_to(ROOT / "docs")}
    missing = [
        p for p in pages if not (tmp_path / "site" / (p.parent if p.name == "index" else p) / "index.html").exists()
    ]
    assert not missing
    reference = (tmp_path / "site" / "reference" / "gating" / "index.html").read_text(encoding="utf-8")
    assert "pfedgate.gate" in reference
    if (path := find()) is not None:
        with Browser(path) as browser:
            check_tables(browser, tmp_path / "site" / "results")


def check_tables(browser: Browser, results: Path) -> None:
    """Tables of the site sort, fold and scroll in their own box, and nothing is loaded from elsewhere."""
    loaded = "document.readyState === 'complete'"
    browser.open(results / "index.html", width=390, theme="dark", ready=loaded)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    column = (
        "[...document.querySelectorAll('table')[0].tBodies[0].rows].map((row) => parseFloat(row.cells[1].innerText))"
    )
    browser.run("document.querySelector('table th.sorts').click()")
    assert (largest := browser.run(column)) == sorted(largest, reverse=True)
    browser.run("document.querySelector('table th.sorts').click()")
    assert browser.run(column) == largest[::-1]
    browser.open(results / "table1" / "index.html", ready=loaded)
    shown = "[...document.querySelectorAll('table')[0].rows[0].cells].filter((cell) => !cell.hidden).length"
    assert browser.run(shown) == 6
    browser.run("document.querySelector('.fold').click()")
    assert browser.run(shown) > 6
    assert [url for url in browser.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_the_citation_names_this_version() -> None:
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (\S+)$", cited, re.MULTILINE)[1] == pfedgate.__version__  # type: ignore[index]
