"""What studies want to know of trained cells is kept beside them: their state may be gone, as in committed results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.studies import page_data

from pfedgate.runs import folder as runfolder
from pfedgate.studies import Sweep, cells, paper, reproduce
from pfedgate.studies.cells import Cell
from pfedgate.studies.declare import TINY
from pfedgate.studies.sweep import Campaign, estimate

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


def first_cell(out: Path) -> tuple[Campaign, Cell]:
    campaign = Campaign(TINY, out / "tiny", over=SHORT)
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
    folder = cell.folder(campaign.out / "cells")
    (folder / "look-tree.json").unlink()
    (folder / "left.txt").touch()
    places = campaign.places(paper.get(TREES))
    assert [campaign.has(place) for place in places] == [False, True]
    assert estimate([paper.get(TREES)], campaign).cells == 1
    ran, watch = watching()
    reproduce([TREES], scale="tiny", out=bare, over=SHORT, watch=watch)
    assert ran == [places[0].label]
    assert not page_data(bare / "tiny/results", TREES)["missing"]
    assert not (folder / "left.txt").exists()
    assert cells.usable(folder, ["global"])  # there is a state again


def test_a_state_that_is_there_is_enough(copied: Path) -> None:
    campaign, cell = first_cell(copied)
    folder = cell.folder(campaign.out / "cells")
    before, metrics = (folder / "look-tree.json").read_text(), (folder / "metrics.jsonl").stat().st_mtime_ns
    (folder / "look-tree.json").unlink()
    assert estimate([paper.get(TREES)], campaign).cells == 0
    reproduce([TREES], scale="tiny", out=copied, over=SHORT)
    assert (folder / "look-tree.json").read_text() == before
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == metrics  # looked, not run


def test_a_figure_of_nothing_is_left_out(bare: Path) -> None:
    campaign, cell = first_cell(bare)
    (cell.folder(campaign.out / "cells") / "look-tree.json").write_text('{"tree": null}')
    picture = bare / "tiny/results" / f"{TREES}.png"
    before = picture.read_bytes()
    written = reproduce([TREES], scale="tiny", out=bare, over=SHORT)
    assert picture not in written
    assert picture.read_bytes() == before
    text = (bare / "tiny/results" / f"{TREES}.md").read_text()
    assert "No figure: there is nothing" in text
    assert "![" not in text


def test_every_point_is_scored_and_own_epochs_choose_their_rate_on_validation(tmp_path: Path) -> None:
    reproduce(["table-b"], scale="tiny", out=tmp_path, over=SHORT, part="FedPer/")
    reproduce(["table-b"], scale="tiny", out=tmp_path, over=SHORT, part="pFedGate, s = 0.3/")
    for cell in (tmp_path / "tiny/cells").iterdir():
        run = runfolder.load(cell)
        seen = cells.look(run, "points")
        gated = run.recipe.algorithm.name == "pfedgate"
        assert set(seen) == {"round", "a", "b", "tried", *(("batch_1", "per_client") if gated else ())}
        last = {row["client"]: row["accuracy"] for row in run.clients if row["n_test"]}
        assert {name: accuracy for name, (_, accuracy) in seen["a"]["clients"].items()} == pytest.approx(last, abs=1e-5)
        best = max(seen["tried"], key=lambda entry: entry["val_accuracy"])
        assert {name: seen["b"][name] for name in best} == best
        rates = sorted({entry["lr"] for entry in seen["tried"]})
        assert {*cells.RATES} <= {*rates}
        farther = (len(rates) - len(cells.RATES)) == cells.FARTHER
        assert rates[0] < best["lr"] < rates[-1] or farther, "an optimum at an edge extends the grid"
        assert seen["b"]["flops"] > 0
