"""What runs are called: by their folders, or by what tells them apart."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pfedgate import report
from pfedgate.report.labels import describe, is_hash, labels_of
from pfedgate.runs import folder as runfolder


def cell(run: Path, folder: Path, name: str, **changes: str) -> Path:
    """A copy of a run under a checksum's name, with some lines of its configuration changed."""
    shutil.copytree(run, folder / name)
    told = (run / "config.toml").read_text()
    for old, new in changes.items():
        before, after = new.split(" -> ")
        assert f"\n{old} = {before}" in told
        told = told.replace(f"\n{old} = {before}", f"\n{old} = {after}")
    (folder / name / "config.toml").write_text(told)
    return folder / name


def test_labels_tell_runs_of_one_name_apart() -> None:
    paths = ("/a/x/run", "/a/y/run", "/a/z")
    assert labels_of([runfolder.Run(Path(path)) for path in paths[:2]]) == ["x/run", "y/run"]
    assert labels_of([runfolder.Run(Path(path)) for path in paths[1:]]) == ["run", "z"]


def test_the_same_run_twice_has_a_number() -> None:
    run = runfolder.Run(Path("/a/x/run"))
    assert labels_of([run, run, run]) == ["run", "run (2)", "run (3)"]
    assert labels_of([run, runfolder.Run(Path("/a/y/run")), run]) == ["x/run", "y/run", "x/run (2)"]


@pytest.mark.parametrize("name", ["pfedgate-lr=0.05", "digits-pfedgate", "deadbeef", "run-20251117", "a1b2c3"])
def test_names_that_people_gave_are_kept(name: str) -> None:
    assert not is_hash(name)


def test_checksums_give_way_to_settings(runs: Path, tmp_path: Path) -> None:
    ours = runs / "pfedgate"
    paths = [
        cell(ours, tmp_path, "digits-pfedgate-253bb8be98f6-2bd0b1bf"),
        cell(ours, tmp_path, "digits-pfedgate-01054ee5cb06-0268ba53", budget="0.5 -> 0.25"),
        cell(ours, tmp_path, "digits-pfedgate-1dd16fa36ad5-0268ba53", budget="0.5 -> 0.25", seed="0 -> 1"),
        cell(runs / "fedavg", tmp_path, "digits-fedavg-7ab14a398bd7-f955314b"),
        runs / "ditto",
    ]
    content = report.gather(report.open_runs(paths), baseline="digits-fedavg-7ab14a398bd7-f955314b")
    assert [run["label"] for run in content["runs"]] == [
        "pfedgate, budget 0.5, seed 0",
        "pfedgate, budget 0.25, seed 0",
        "pfedgate, budget 0.25, seed 1",
        "fedavg",
        "ditto",
    ]
    assert content["baseline"] == 3  # by its folder's name
    rows = [row["name"] for row in content["seeds"]["rows"]]
    assert "pfedgate, budget 0.25" in rows


def test_the_same_settings_twice(runs: Path, tmp_path: Path) -> None:
    names = ["digits-pfedgate-253bb8be98f6-2bd0b1bf", "digits-pfedgate-253bb8be98f6-0268ba53"]
    found = labels_of(report.open_runs([cell(runs / "pfedgate", tmp_path, name) for name in names]))
    assert found == [f"pfedgate ({name})" for name in names]


def test_no_more_settings_than_are_needed() -> None:
    common = {"data.name": "d", "algorithm.name": "a", "algorithm.resources": "all"}
    runs = [
        {**common, "train.lr": 0.1, "train.batch": 32, "run.workers": 1},
        {**common, "train.lr": 0.2, "train.batch": 64, "run.workers": 2},
    ]
    assert describe(runs) == ["a, lr 0.1", "a, lr 0.2"]
    some = [{**common, "clients.budget": s, "algorithm.smallest": k} for s, k in ((0.3, 0.05), (1.0, 0.05), (1.0, 0.1))]
    assert describe(some) == ["a, budget 0.3", "a, budget 1.0, smallest 0.05", "a, budget 1.0, smallest 0.1"]
    kinds = [{**common, "clients.budget": 0.3}, {**common, "clients.budget": 0.5, "algorithm.resources": "params"}]
    assert describe(kinds) == ["a, budget 0.3 of all", "a, budget 0.5 of params"]
    kinds[1]["clients.budget"] = 0.3
    assert describe(kinds) == ["a, budget 0.3 of all", "a, budget 0.3 of params"]
    assert describe([common, {**common, "data.name": "e"}]) == ["d a", "e a"]
