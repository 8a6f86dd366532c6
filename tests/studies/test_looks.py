"""What studies want to know of trained cells is kept beside them: their state may be gone, as in committed results."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pfedgate.runs import folder as runfolder
from pfedgate.runs.folder import Run
from pfedgate.studies import cells, page, paper, reproduce, scales, schedule
from pfedgate.studies.cells import Cell, code_version
from pfedgate.studies.estimate import estimate
from pfedgate.studies.outcome import Outcomes
from pfedgate.studies.schedule import Order

SHORT = [{"train": {"rounds": 1}}]
TREES = "figure-clusters"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cells of two studies that look at trained gates."""
    out = tmp_path_factory.mktemp("looks")
    reproduce([TREES, "table10"], scale="tiny", out=out, over=SHORT)
    return out


@pytest.fixture
def bare(finished: Path, tmp_path: Path) -> Path:
    """The same as git would keep them: without the states of models."""
    shutil.copytree(finished, tmp_path / "out")
    for path in (tmp_path / "out/tiny/cells").iterdir():
        forget(path)
    return tmp_path / "out"


def forget(folder: Path, *looks: str) -> None:
    (folder / "checkpoint.safetensors").unlink()
    shutil.rmtree(folder / "private")
    for name in looks:
        (folder / f"look-{name}.json").unlink()


def told(out: Path, name: str = TREES) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "tiny/results" / f"{name}.json").read_text())
    return found


def first(out: Path, *, any_code: bool = False) -> tuple[Order, Cell]:
    order = Order(scales.TINY, out / "tiny", over=SHORT, any_code=any_code)
    return order, order.places(paper.get(TREES))[0].cell


def watching() -> tuple[list[str], Any]:
    ran: list[str] = []

    def watch(host: schedule.Cells, label: str | None) -> None:
        ran.extend([label] if label else [])

    return ran, watch


def test_pages_need_no_state(bare: Path) -> None:
    before = {name: told(bare, name)["rows"] for name in (TREES, "table10")}
    old = (bare / "tiny/results" / f"{TREES}.svg").read_bytes()
    shutil.rmtree(bare / "tiny/results")
    ran, watch = watching()
    reproduce([TREES, "table10"], scale="tiny", out=bare, over=SHORT, watch=watch)
    assert ran == []
    assert {name: told(bare, name)["rows"] for name in before} == before
    assert (bare / "tiny/results" / f"{TREES}.svg").read_bytes() == old


def test_every_gated_cell_is_looked_at_when_it_ends(tmp_path: Path) -> None:
    reproduce(["figure-gates"], scale="tiny", out=tmp_path, over=SHORT, part="s = 0.3")
    (cell,) = (tmp_path / "tiny/cells").iterdir()
    tree = cells.look(runfolder.load(cell), "tree")["tree"]
    clients = len(tree["clients"])
    assert clients == 4
    assert sorted(tree["leaves"]) == list(range(clients))
    assert len(tree["across"]) == clients - 1
    assert [len(row) for row in tree["counts"]] == [len(tree["classes"])] * clients
    assert not (cell / "look-global.json").exists()  # costs a round of training: only where a study asks


def test_a_cell_that_cannot_be_looked_at_is_run_anew(bare: Path) -> None:
    order, cell = first(bare)
    folder = cell.folder(order.root)
    (folder / "look-tree.json").unlink()
    (folder / "left.txt").touch()
    places = order.places(paper.get(TREES))
    assert [order.has(place) for place in places] == [False, True]
    assert estimate(places, order).cells == 1
    ran, watch = watching()
    reproduce([TREES], scale="tiny", out=bare, over=SHORT, watch=watch)
    assert ran == [places[0].label]
    assert not told(bare)["missing"]
    assert not (folder / "left.txt").exists()
    assert cells.usable(folder, ["global"])  # there is a state again


def test_a_state_that_is_there_is_enough(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "out")
    order, cell = first(tmp_path / "out")
    folder = cell.folder(order.root)
    before, metrics = (folder / "look-tree.json").read_text(), (folder / "metrics.jsonl").stat().st_mtime_ns
    (folder / "look-tree.json").unlink()
    assert estimate(order.places(paper.get(TREES)), order).cells == 0
    reproduce([TREES], scale="tiny", out=tmp_path / "out", over=SHORT)
    assert (folder / "look-tree.json").read_text() == before
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == metrics  # looked, not run


def test_other_code_counts_if_it_was_looked_at(bare: Path) -> None:
    order, cell = first(bare, any_code=True)
    own = cell.folder(order.root)
    stem = own.name.removesuffix(code_version())
    looked, newer = own.with_name(f"{stem}00000000"), own.with_name(f"{stem}11111111")
    shutil.copytree(own, newer)
    own.rename(looked)
    (newer / "look-tree.json").unlink()
    os.utime(looked / "summary.json", (1, 1))
    assert cell.folder(order.root, any_code=True) == newer
    assert cell.folder(order.root, any_code=True, looks=["tree"]) == looked
    shutil.rmtree(looked)
    assert cell.folder(order.root, any_code=True, looks=["tree"]) == own  # to be run
    reproduce([TREES], scale="tiny", out=bare, over=SHORT, any_code=True)
    assert not told(bare)["missing"]
    assert (newer / "summary.json").exists()  # what other code made is never cleared


def test_a_state_that_only_other_code_can_read_is_no_error(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "out")
    order, cell = first(tmp_path / "out", any_code=True)
    own = cell.folder(order.root)
    other = own.rename(own.with_name(own.name.removesuffix(code_version()) + "00000000"))
    (other / "look-tree.json").unlink()
    (other / "checkpoint.safetensors").write_bytes(b"of another form")
    assert cell.folder(order.root, any_code=True, looks=["tree"]) == other
    reproduce([TREES], scale="tiny", out=tmp_path / "out", over=SHORT, any_code=True)
    assert cells.there(own, ["tree"])
    assert "cannot read its state" in (own / "warnings.json").read_text()
    assert not told(tmp_path / "out")["missing"]


def test_a_figure_of_nothing_is_left_out(bare: Path) -> None:
    order, cell = first(bare)
    (cell.folder(order.root) / "look-tree.json").write_text('{"tree": null}')
    picture = bare / "tiny/results" / f"{TREES}.png"
    before = picture.read_bytes()
    written = reproduce([TREES], scale="tiny", out=bare, over=SHORT)
    assert picture not in written
    assert picture.read_bytes() == before
    text = (bare / "tiny/results" / f"{TREES}.md").read_text()
    assert "No figure: there is nothing" in text
    assert "![" not in text


def test_gates_that_start_at_labels_are_shown_beside_others() -> None:
    study = paper.get(TREES)
    order = Order(scales.TINY, Path("nowhere"))
    assert [p.cell.recipe.algorithm.options["start"] for p in order.places(study)] == ["labels", "random"]
    assert "by construction" in study.note


def test_a_page_says_which_code_made_a_row(bare: Path) -> None:
    order, cell = first(bare)
    own = cell.folder(order.root)
    assert "--any-code" not in told(bare)["command"]
    assert "| code |" not in (bare / "tiny/results" / f"{TREES}.md").read_text()
    own.rename(own.with_name(own.name.removesuffix(code_version()) + "00000000"))
    reproduce([TREES], scale="tiny", out=bare, over=SHORT, any_code=True)
    content, text = told(bare), (bare / "tiny/results" / f"{TREES}.md").read_text()
    assert content["command"].endswith("--any-code")
    assert [row["code"] for row in content["rows"]] == [["00000000"], [code_version()]]
    lines = [line for line in text.splitlines() if line.startswith("| pFedGate")]
    assert [line.split(" | ")[-1] for line in lines] == ["00000000 |", f"{code_version()} |"]


def test_a_matrix_says_it_in_a_table_of_its_own() -> None:
    study = paper.get("table9")
    outcomes = Outcomes(study)
    for at, row in enumerate(study.rows[:2]):
        run = Run(Path(f"digits-x-{at}-{at:08d}"))
        outcomes.runs[row.name, "A", 0] = run
        outcomes._read[run.path] = {"best_accuracy": 0.5, "rounds_to_90": 3}
    text = "\n".join(page._matrix(outcomes))
    assert f"| {study.rows[1].name} | 00000001 |" in text.partition("## Code")[2]
    outcomes.runs.pop((study.rows[1].name, "A", 0))
    assert "## Code" not in "\n".join(page._matrix(outcomes))
