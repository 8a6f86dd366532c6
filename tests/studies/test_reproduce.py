"""Studies end to end: every table and figure at the tiny scale; nothing is run twice, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.cli import call
from tests.support.studies import RECIPES, page_data

import pfedgate
from pfedgate.cli.base import over
from pfedgate.engine.checkpoint import alone
from pfedgate.runs import folder as runfolder
from pfedgate.studies import Sweep, cells, names, page, paper, reproduce
from pfedgate.studies.cells import finished
from pfedgate.studies.declare import TINY
from pfedgate.studies.sweep import Campaign


@pytest.mark.timeout(1800)
def test_all_studies_run(tmp_path: Path) -> None:
    """What CI knows of `pfedgate reproduce all`: seconds of work, every file, sensible numbers."""
    written = reproduce(["all"], scale="tiny", out=tmp_path, workers=2)
    results = tmp_path / "tiny" / "results"
    for name in names():
        study, content = paper.get(name), page_data(results, name)
        text = (results / f"{name}.md").read_text()
        assert not content["missing"]
        assert len({(row["row"], row["column"]) for row in content["rows"]}) == len(content["rows"])
        assert {row["row"] for row in content["rows"]} == {row.name for row in study.rows}
        assert content["seconds"] > 0
        assert content["machine"][0]["cores"]
        assert f"`pfedgate reproduce {name} --scale tiny`" in text
        for kind in ("svg", "png"):
            assert (results / f"{name}.{kind}" in written) == bool(study.figure)
    _check_accuracies(page_data(results, "table-a"))
    _check_costs(page_data(results, "table5"), page_data(results, "table2"))
    _check_words(results)
    novel = page_data(results, "table8")["rows"][0]["numbers"]
    gap = novel["accuracy"]["mean"] - novel["novel"]["mean"]
    assert novel["accuracy-minus-novel"]["mean"] == pytest.approx(gap)
    assert all(0 < row["numbers"]["global_trained"]["mean"] < 1 for row in page_data(results, "table10")["rows"])
    again: list[str | None] = []
    reproduce(["all"], scale="tiny", out=tmp_path, workers=1, watch=lambda sweep, label: again.append(label))
    assert set(again) == {""}  # looked, and ran nothing


def test_pages_of_what_is_there(tmp_path: Path) -> None:
    some = ["reproduce", "table9", "--scale", "tiny", "--out", str(tmp_path), "--workers", "1"]
    call(*some, "--cells", "*FedAvg*", "--pages", code=1)
    call(*some, "--cells", "*FedAvg*")
    call(*some, "--pages")
    content = page_data(tmp_path / "tiny/results", "table9")
    missing = len(paper.get("table9").rows) - 1
    assert [row["row"] for row in content["rows"]] == ["FedAvg"]
    assert len(content["missing"]) == missing
    assert f"Not finished: {missing} cells are still missing" in (tmp_path / "tiny/results/table9.md").read_text()
    assert len(list((tmp_path / "tiny/cells").iterdir())) == 1


def _check_words(results: Path) -> None:
    """A page explains what it shows, and nothing else."""
    names = ("table-a", "table2", "table4", "table9", "table13")
    texts = {name: " ".join((results / f"{name}.md").read_text().split()) for name in names}
    said = {
        "the share of the parameters that a client may use": {"table-a", "table4", "table9", "table13"},
        "FedMask's s is of": {"table-a", "table13"},
        "q̄ is the share uploaded": {"table13"},
        "± is the standard deviation": {"table-a"},
        "Student's 95 % interval": {"table-a"},
        "One seed": {"table4", "table9", "table13"},
    }
    for words, pages in said.items():
        assert {name for name, text in texts.items() if words in text} == pages, words


def test_a_page_says_which_data_is_missing(tmp_path: Path) -> None:
    for worlds, left in (((), []), (("femnist",), ["CIFAR-10"])):
        reproduce(["table8"], scale="small", out=tmp_path, results=tmp_path, worlds=worlds, only_pages=True)
        assert page_data(tmp_path, "table8")["left_out"] == left
        assert ("- Not run: CIFAR-10\n" in (tmp_path / "table8.md").read_text()) == bool(left)


def _check_accuracies(content: dict[str, Any]) -> None:
    rows = {row["row"]: row for row in content["rows"]}
    for row in rows.values():
        worst, decile, accuracy = (
            row["numbers"][f"a_{n}"]["mean"] for n in ("worst_tenth", "bottom_decile", "accuracy")
        )
        assert 0 <= worst <= decile <= accuracy <= 1
    for name, row in rows.items():
        if "pFedGate, s = 0.3" in name:
            assert row["numbers"]["density"]["mean"] <= 0.3
    repeated = [name for name, row in rows.items() if row["seeds"] == [0, 1]]
    assert {"FedAvg", "FedAvg, as published"} <= {*repeated}
    assert len(repeated) < len(rows)  # which others: test_cells and test_claims
    assert rows["Local"]["numbers"]["up"]["mean"] == 0


def _check_costs(complexity: dict[str, Any], steps: dict[str, Any]) -> None:
    lines = {(line["quantity"], line["row"]): line for line in complexity["complexity"]}
    assert lines["communication, up", "FedEM"]["ratio"] == pytest.approx(3, rel=0.05)
    assert lines["inference, client, per sample", "FedEM"]["ratio"] == pytest.approx(3, rel=0.05)
    assert lines["storage, server", "pFedHN"]["ratio"] > 100  # which the published formula leaves out
    assert lines["inference, client, per sample", "pFedGate, s = 0.5, all resources"]["ratio"] <= 0.55
    assert all(cost["ms"] > 0 for batch in steps["measured"].values() for cost in batch.values())


def test_parts_of_a_study_come_to_the_whole(tmp_path: Path) -> None:
    for part in ("1/2", "2/2"):
        assert reproduce(["table9"], scale="tiny", out=tmp_path / "parts", part=part) == []
    ran: list[str | None] = []
    reproduce(["table9"], scale="tiny", out=tmp_path / "parts", watch=lambda sweep, label: ran.append(label))
    assert not any(ran)
    reproduce(["table9"], scale="tiny", out=tmp_path / "whole")
    parts, whole = (page_data(tmp_path / name / "tiny/results", "table9")["rows"] for name in ("parts", "whole"))
    assert parts == whole


def test_settings_go_over_every_cell_and_are_told(tmp_path: Path) -> None:
    reproduce(["figure-clusters"], scale="tiny", out=tmp_path, over=[{"train": {"rounds": 1}}])
    content = page_data(tmp_path / "tiny/results", "figure-clusters")
    assert content["rows"][0]["settings"]["train.rounds"] == 1
    assert content["command"].endswith("--set train.rounds=1")
    run = runfolder.load(next((tmp_path / "tiny/cells").iterdir()))
    assert len(run.metrics) == 1
    assert (run.path / "checkpoint.safetensors").exists()  # its gates can be looked at


def test_the_command_of_a_page_can_be_typed(tmp_path: Path) -> None:
    budget = {"0.5": 0.5, "1.0": 0.5}
    campaign = Campaign(TINY, tmp_path, over=[{"clients": {"budget": budget}}], recipes=Path("my own"))
    words = shlex.split(page.command(paper.get("table4"), campaign))
    assert words[:4] == ["pfedgate", "reproduce", "table4", "--scale"]
    assert words[-2:] == ["--recipes", "my own"]
    assert over([words[words.index("--set") + 1]], None)[0] == {"clients": {"budget": budget}}


def test_a_page_is_not_replaced_by_one_with_less(tmp_path: Path) -> None:
    results = tmp_path / "tiny/results"
    reproduce(["figure-clusters"], scale="tiny", out=tmp_path)
    before = (results / "figure-clusters.md").read_bytes()
    shutil.rmtree(next((tmp_path / "tiny/cells").iterdir()))
    with pytest.warns(UserWarning, match="figure-clusters.md is kept: 1 cells are missing now"):
        assert not reproduce(["figure-clusters"], scale="tiny", out=tmp_path, only_pages=True)
    assert (results / "figure-clusters.md").read_bytes() == before
    assert results / "figure-clusters.md" in reproduce(["figure-clusters"], scale="tiny", out=tmp_path)


def test_trials_of_other_settings_leave_the_documentation_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    asked = ["reproduce", "table9", "--scale", "small", "--pages", "--data", "cifar10"]
    (tmp_path / "recipes").symlink_to(RECIPES)
    for more in (["--rounds", "2"], ["--set", "train.lr=1"], ["--recipes", str(RECIPES)]):
        call(*asked, *more)
        (tmp_path / "runs/reproduce/small/results/table9.md").unlink()
        assert not (tmp_path / "docs/results").exists()
    call(*asked)
    assert (tmp_path / "docs/results/table9.md").exists()


def fail_or_die(job: cells.Job, tick: object = None) -> float:
    """Work in place of a cell's."""
    if "Ditto" in job.label:
        os._exit(9)
    if "FedPer" in job.label:
        raise ValueError("no")
    return 1.0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cell_that_fails_does_not_stop_the_others(tmp_path: Path, workers: int) -> None:
    names = ["FedPer", "FedEM", *(["Ditto"] if workers > 1 else [])]
    campaign = Campaign(TINY, tmp_path, workers=workers)
    sweep = Sweep(campaign)
    sweep.add([place for place in campaign.places(paper.get("figure-clients")) if place.row.name in names])
    sweep.run(fail_or_die)
    assert sweep.done == sweep.total == len(names)
    errors = {label.split("/")[2]: str(error) for label, error in sweep.failed.items()}
    assert errors.pop("FedPer") == "no"
    assert all("worker process died" in error for error in errors.values())
    assert list(errors) == ["Ditto"] * (workers - 1)
    with pytest.raises(RuntimeError, match=rf"{len(sweep.failed)} of {len(names)} cells failed; figure-clients/"):
        sweep.check()


def test_a_cell_that_another_process_is_at_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of a command that was killed: both would add their rounds to one folder."""
    monkeypatch.setattr(cells, "WAIT", 0.01)
    campaign = Campaign(TINY, tmp_path)
    place = campaign.places(paper.get("table9"))[0]
    folder = campaign.folder(place)
    job = cells.Job(place.label, folder, place.cell.recipe.tables())
    heard: list[bool] = []
    other = contextlib.ExitStack()
    other.enter_context(alone(folder))

    def tick() -> None:
        heard.append((folder / "timing.jsonl").exists())
        if len(heard) == 3:
            other.close()

    cells.work(job, tick)
    assert heard[:3] == [False] * 3  # nothing was trained meanwhile
    run = runfolder.load(folder)
    assert [line["round"] for line in run.metrics] == [1, 2]
    assert len(run.environments) == 1, "waiting is no start"


@pytest.mark.slow
def test_kill_9_loses_no_finished_cell(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pfedgate", "reproduce", "table9", "--out", str(tmp_path), "--workers", "2"]
    env = {**os.environ, "PYTHONPATH": str(Path(pfedgate.__file__).parent.parent)}
    quiet: Any = {"env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet)
    root, deadline = tmp_path / "tiny/cells", time.monotonic() + 600
    while time.monotonic() < deadline and not (root.exists() and any(map(finished, root.iterdir()))):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = {path: (path / "summary.json").stat().st_mtime_ns for path in root.iterdir() if finished(path)}
    assert kept
    subprocess.run(command, check=True, **quiet)
    assert all((path / "summary.json").stat().st_mtime_ns == when for path, when in kept.items())
    assert not page_data(tmp_path / "tiny/results", "table9")["missing"]
    for path in root.iterdir():
        assert [line["round"] for line in runfolder.load(path).metrics] == [1, 2], "two processes at one cell"


@pytest.mark.filterwarnings("default")
def test_all_says_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    given = ["--scale", "small", "--recipes", str(RECIPES), "--out", str(tmp_path), "--workers", "2", "--estimate"]
    everything = call("reproduce", "all", *given)
    assert "all at scale small is without table6 and table11" in " ".join(everything.split())
    named = call("reproduce", "table6", *given)
    assert "without" not in named
    assert "cells to run, about" in named


def test_the_command_lists_asks_and_corrects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    listed = call("reproduce")
    assert all(name in listed for name in names())
    assert "did you mean 'table1'" in call("reproduce", "tabel1", code=1)
    given = ["reproduce", "figure-gates", "--scale", "paper", "--recipes", str(RECIPES), "--out", str(tmp_path)]
    assert "3 cells to run, about" in call(*given, "--workers", "2", input="n\n")
    assert not list(tmp_path.iterdir())
