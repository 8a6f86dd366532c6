"""What studies want to know of trained cells is kept beside them: their state may be gone, as in committed results."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.studies import page_data

from pfedgate.core.version import RESULTS
from pfedgate.runs import folder as runfolder
from pfedgate.runs.folder import Run
from pfedgate.studies import Sweep, cells, page, paper, reproduce
from pfedgate.studies.cells import Cell
from pfedgate.studies.declare import TINY
from pfedgate.studies.outcome import Outcomes
from pfedgate.studies.sweep import Campaign, estimate_of

SHORT = [{"train": {"rounds": 1}}]
TREES = "figure-clusters"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cells of two studies that look at trained gates."""
    out = tmp_path_factory.mktemp("looks")
    reproduce([TREES, "table10"], scale="tiny", out=out, over=SHORT)
    return out


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "out")


@pytest.fixture
def bare(copied: Path) -> Path:
    """The same as git would keep them: without the states of models."""
    for cell in (copied / "tiny/cells").iterdir():
        (cell / "checkpoint.safetensors").unlink()
        shutil.rmtree(cell / "private")
    return copied


def first_cell(out: Path, *, any_version: bool = False) -> tuple[Campaign, Cell]:
    campaign = Campaign(TINY, out / "tiny", over=SHORT, any_version=any_version)
    return campaign, campaign.places(paper.get(TREES))[0].cell


def watching() -> tuple[list[str], Any]:
    ran: list[str] = []

    def watch(sweep: Sweep, label: str | None) -> None:
        ran.extend([label] if label else [])

    return ran, watch


def test_pages_need_no_state(bare: Path) -> None:
    before = {name: page_data(bare / "tiny/results", name)["rows"] for name in (TREES, "table10")}
    old = (bare / "tiny/results" / f"{TREES}.svg").read_bytes()
    shutil.rmtree(bare / "tiny/results")
    ran, watch = watching()
    reproduce([TREES, "table10"], scale="tiny", out=bare, over=SHORT, watch=watch)
    assert ran == []
    assert {name: page_data(bare / "tiny/results", name)["rows"] for name in before} == before
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
    campaign, cell = first_cell(bare)
    folder = cell.folder(campaign.root)
    (folder / "look-tree.json").unlink()
    (folder / "left.txt").touch()
    places = campaign.places(paper.get(TREES))
    assert [campaign.has(place) for place in places] == [False, True]
    assert estimate_of(places, campaign).cells == 1
    ran, watch = watching()
    reproduce([TREES], scale="tiny", out=bare, over=SHORT, watch=watch)
    assert ran == [places[0].label]
    assert not page_data(bare / "tiny/results", TREES)["missing"]
    assert not (folder / "left.txt").exists()
    assert cells.usable(folder, ["global"])  # there is a state again


def test_a_state_that_is_there_is_enough(copied: Path) -> None:
    campaign, cell = first_cell(copied)
    folder = cell.folder(campaign.root)
    before, metrics = (folder / "look-tree.json").read_text(), (folder / "metrics.jsonl").stat().st_mtime_ns
    (folder / "look-tree.json").unlink()
    assert estimate_of(campaign.places(paper.get(TREES)), campaign).cells == 0
    reproduce([TREES], scale="tiny", out=copied, over=SHORT)
    assert (folder / "look-tree.json").read_text() == before
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == metrics  # looked, not run


def test_another_version_counts_if_it_was_looked_at(bare: Path) -> None:
    campaign, cell = first_cell(bare, any_version=True)
    own = cell.folder(campaign.root)
    stem = own.name.removesuffix(f"v{RESULTS}")
    looked, newer = own.with_name(f"{stem}00000000"), own.with_name(f"{stem}11111111")
    shutil.copytree(own, newer)
    own.rename(looked)
    (newer / "look-tree.json").unlink()
    os.utime(looked / "summary.json", (1, 1))
    assert cell.folder(campaign.root, any_version=True) == newer
    assert cell.folder(campaign.root, any_version=True, looks=["tree"]) == looked
    shutil.rmtree(looked)
    assert cell.folder(campaign.root, any_version=True, looks=["tree"]) == own  # to be run
    reproduce([TREES], scale="tiny", out=bare, over=SHORT, any_version=True)
    assert not page_data(bare / "tiny/results", TREES)["missing"]
    assert (newer / "summary.json").exists()  # what other code made is never cleared


def test_a_state_that_only_another_version_can_read_is_no_error(copied: Path) -> None:
    campaign, cell = first_cell(copied, any_version=True)
    own = cell.folder(campaign.root)
    other = own.rename(own.with_name(own.name.removesuffix(f"v{RESULTS}") + "00000000"))
    (other / "look-tree.json").unlink()
    (other / "checkpoint.safetensors").write_bytes(b"of another form")
    assert cell.folder(campaign.root, any_version=True, looks=["tree"]) == other
    reproduce([TREES], scale="tiny", out=copied, over=SHORT, any_version=True)
    assert cells.finished(own, ["tree"])
    assert "cannot read its state" in (own / "warnings.json").read_text()
    assert not page_data(copied / "tiny/results", TREES)["missing"]


def test_a_figure_of_nothing_is_left_out(bare: Path) -> None:
    campaign, cell = first_cell(bare)
    (cell.folder(campaign.root) / "look-tree.json").write_text('{"tree": null}')
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
    campaign = Campaign(TINY, Path("nowhere"))
    assert [p.cell.recipe.algorithm.options["start"] for p in campaign.places(study)] == ["labels", "random"]
    assert "by construction" in study.note


def test_a_page_says_which_version_a_row_is_of(bare: Path) -> None:
    campaign, cell = first_cell(bare)
    own = cell.folder(campaign.root)
    assert "--any-version" not in page_data(bare / "tiny/results", TREES)["command"]
    assert "| version |" not in (bare / "tiny/results" / f"{TREES}.md").read_text()
    own.rename(own.with_name(own.name.removesuffix(f"v{RESULTS}") + "00000000"))
    reproduce([TREES], scale="tiny", out=bare, over=SHORT, any_version=True)
    content, text = page_data(bare / "tiny/results", TREES), (bare / "tiny/results" / f"{TREES}.md").read_text()
    assert content["command"].endswith("--any-version")
    assert [row["versions"] for row in content["rows"]] == [[0], [RESULTS]]
    lines = [line for line in text.splitlines() if line.startswith("| pFedGate")]
    assert [line.split(" | ")[-1] for line in lines] == ["0 |", f"{RESULTS} |"]


def test_a_matrix_says_it_in_a_table_of_its_own() -> None:
    study = paper.get("table9")
    outcomes = Outcomes(study)
    for at, row in enumerate(study.rows[:2]):
        run = Run(Path(f"digits-x-{at}-v{at}"))
        outcomes.runs[row.name, "A", 0] = run
        outcomes._read[run.path] = {"best_accuracy": 0.5, "rounds_to_90": 3}
    text = "\n".join(page._matrix(outcomes))
    assert f"| {study.rows[1].name} | 1 |" in text.partition("## Version")[2]
    outcomes.runs.pop((study.rows[1].name, "A", 0))
    assert "## Version" not in "\n".join(page._matrix(outcomes))
