"""What a report says is what the run folders hold."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from tests.support.runs import SMALL, cut

from pfedgate import experiment
from pfedgate.report import gather, open_runs, tables
from pfedgate.report.content import _matching, choose_baseline
from pfedgate.runs import folder as runfolder


def seeded(run: Path, to: Path, seed: int, accuracy: float | None = None) -> Path:
    """A copy of a run as if it had another seed, and perhaps another accuracy."""
    shutil.copytree(run, to)
    told = (to / "config.toml").read_text()
    (to / "config.toml").write_text(told.replace("\nseed = 0", f"\nseed = {seed}"))
    if accuracy is not None:
        summary = json.loads((to / "summary.json").read_text())
        (to / "summary.json").write_text(json.dumps({**summary, "accuracy": accuracy}))
    return to


def marks(table: dict, title: str = "accuracy, %") -> dict[str, bool]:
    at = [column["title"] for column in table["head"]].index(title)
    return {row["name"]: row["cells"][at]["best"] for row in table["rows"]}


@pytest.fixture(scope="module")
def content(runs: Path) -> dict:
    return gather(open_runs([runs / "pfedgate", runs / "fedavg", runs / "ditto"]))


def test_content_is_json_and_names_every_run(content: dict) -> None:
    again = json.loads(json.dumps(content, allow_nan=False))
    assert [run["label"] for run in again["runs"]] == ["pfedgate", "fedavg", "ditto"]
    assert again["baseline"] == 1  # FedAvg, though it is not the last
    assert [run["baseline"] for run in again["runs"]] == [1, None, 1]
    assert content["seeds"] == {}, "no two runs differ in their seed only"


def test_curves_add_up_what_was_spent(content: dict, runs: Path) -> None:
    run = runfolder.load(runs / "pfedgate")
    curves = content["runs"][0]["curves"]
    assert curves["round"] == [2, 4]
    spent = sum(r["bytes_up"] + r["bytes_down"] for r in run.metrics)
    assert curves["bytes"][-1] == pytest.approx(spent, rel=1e-4)
    assert curves["seconds"][-1] == pytest.approx(run.seconds, rel=1e-4)
    assert curves["accuracy"] == pytest.approx([v for _, v in run.curve("accuracy")], rel=1e-4)


def test_table_marks_the_best_of_each_column(content: dict) -> None:
    table = content["table"]
    titles = [column["title"] for column in table["head"]]
    accuracy, uploaded = titles.index("accuracy, %"), titles.index("uploaded")
    for column, better in ((accuracy, max), (uploaded, min)):
        values = [row["cells"][column]["value"] for row in table["rows"]]
        for row, value in zip(table["rows"], values, strict=True):
            assert row["cells"][column]["best"] == (value == better(values))
    assert any(row["cells"][uploaded]["best"] for row in table["rows"])


def test_copies_hold_the_numbers(content: dict) -> None:
    table = content["table"]
    rows = list(csv.reader(io.StringIO(table["csv"])))
    assert [row[0] for row in rows] == ["run", "pfedgate", "fedavg", "ditto"]
    assert float(rows[1][1]) == pytest.approx(100 * content["runs"][0]["summary"]["accuracy"], rel=1e-4)
    units = [title for title in rows[0] if title.startswith(("uploaded", "compute", "time"))]
    assert units == ["uploaded, B", "compute, FLOP", "time, s"]
    client = list(csv.reader(io.StringIO(content["clients"]["csv"])))[1]
    assert float(client[1]) == pytest.approx(float(content["clients"]["rows"][0]["cells"][0]["text"]), abs=0.006)
    assert table["latex"].count(r"\\") == 4
    assert r"\textbf{" in table["latex"]
    assert len(table["markdown"].splitlines()) == 5


def test_a_copied_table_computes_nothing() -> None:
    table = {
        "first": "run",
        "head": [{"title": "@x"}],
        "rows": [{"name": "=cmd|' /C calc'!A0", "cells": [{"value": 1}]}],
    }
    assert list(csv.reader(io.StringIO(tables.as_csv(table)))) == [["run", "'@x"], ["'=cmd|' /C calc'!A0", "1"]]


def test_only_runs_on_the_same_data_that_have_ended_can_win() -> None:
    rows = {
        name: {"accuracy": value, "bytes_up": 1e6} for name, value in zip("abcd", (0.5, 0.6, 0.9, 0.7), strict=True)
    }
    told = tables.summarise(rows, {"a": "digits", "b": "digits", "c": "letters", "d": None})
    assert [row["cells"][0]["best"] for row in told["rows"]] == [False, True, False, False]
    close = tables.summarise({"a": {"seconds": 5.1}, "b": {"seconds": 5.2}})
    assert not any(row["cells"][0]["best"] for row in close["rows"]), "0:05 and 0:05 are a tie of all"


def test_runs_that_have_not_begun_are_left_out(runs: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    shutil.copytree(runs / "fedavg", begun)
    waiting = runfolder.create(tmp_path / "waiting", runfolder.load(begun).recipe)
    with pytest.warns(UserWarning, match="left out, because no round is finished there yet: .*waiting"):
        assert [run.path for run in open_runs([begun, waiting.path])] == [begun]
    with pytest.raises(ValueError, match="no round is finished"):
        open_runs([waiting.path])


def test_runs_on_other_data_are_not_compared(runs: Path, tmp_path: Path) -> None:
    other = {**SMALL, "data": {**SMALL["data"], "clients": 3}, "algorithm": {"name": "fedavg"}}
    experiment.run(other, out=tmp_path / "other")
    told = gather(open_runs([runs / "fedavg", tmp_path / "other"]))
    assert not any(cell["best"] for row in told["table"]["rows"] for cell in row["cells"])
    assert " and 3 clients" in told["subtitle"]
    assert [run["league"] for run in told["runs"]] == [0, 1]


def test_a_pipe_is_no_border_of_a_table() -> None:
    cell = {"text": "a|b", "value": 1, "best": True}
    made = tables.markdown({"first": "c|d", "head": [{"title": "e|f"}], "rows": [{"name": "g|h", "cells": [cell]}]})
    assert made.splitlines() == [r"| c\|d | e\|f |", "|---|---:|", r"| g\|h | **a\|b** |"]


def test_runs_differ_in_what_they_differ_in(content: dict) -> None:
    assert [row["name"] for row in content["differences"]["rows"]] == ["algorithm.name", "clients.budget"]


def test_runs_of_several_seeds_become_one_row(runs: Path, tmp_path: Path) -> None:
    summary = json.loads((runs / "pfedgate" / "summary.json").read_text())
    scores = (summary["accuracy"], summary["accuracy"] + 0.1)
    copies = [seeded(runs / "pfedgate", tmp_path / f"pfedgate-seed={n}", n, score) for n, score in enumerate(scores)]
    paths = [runs / "fedavg", *copies]
    table = gather(open_runs(paths))["seeds"]
    assert [(row["name"], row["cells"][0]["text"]) for row in table["rows"]] == [("fedavg", "1"), ("pfedgate", "2")]
    mean, deviation = table["rows"][1]["cells"][1]["text"].split(" ± ")
    assert float(mean) == pytest.approx(100 * summary["accuracy"] + 5, abs=0.01)
    assert float(deviation) == pytest.approx(10 / 2**0.5, abs=0.01)
    assert "±" not in table["rows"][0]["cells"][1]["text"]


def test_a_seed_that_has_not_ended_is_not_counted(runs: Path, tmp_path: Path) -> None:
    paths = [seeded(runs / "fedavg", tmp_path / f"fedavg-seed={seed}", seed, 0.5) for seed in (0, 1)]
    paths += [seeded(runs / "ditto", tmp_path / f"ditto-seed={seed}", seed, 0.4) for seed in (0, 1)]
    early = seeded(runs / "ditto", tmp_path / "whole", 2)
    paths.append(cut(early, tmp_path / "ditto-seed=2", 2))
    table = gather(open_runs(paths))["seeds"]
    assert [row["cells"][1]["text"] for row in table["rows"]] == ["50.00 ± 0.00", "40.00 ± 0.00"]
    assert table["unfinished"] == ["ditto-seed=2"]
    assert list(marks(table).values()) == [True, False]


def test_settings_win_over_seeds_only_against_those_of_the_same_seeds(runs: Path, tmp_path: Path) -> None:
    paths = [seeded(runs / "fedavg", tmp_path / f"fedavg-seed={seed}", seed, 0.5) for seed in (0, 1)]
    paths += [seeded(runs / "ditto", tmp_path / f"ditto-seed={seed}", seed, 0.4) for seed in (0, 2)]
    assert not any(marks(gather(open_runs(paths))["seeds"]).values())
    same = [*paths[:3], seeded(runs / "ditto", tmp_path / "ditto-seed=1", 1, 0.4)]
    assert list(marks(gather(open_runs(same))["seeds"]).values()) == [True, False]


def test_means_that_look_the_same_win_nothing() -> None:
    groups = {"a": [{"accuracy": 0.5}, {"accuracy": 0.6}], "b": [{"accuracy": 0.5}, {"accuracy": 0.60001}]}
    assert not any(marks(tables.over_seeds(groups)).values())


def test_runs_of_different_length_are_not_compared(runs: Path, tmp_path: Path) -> None:
    early = cut(runs / "fedavg", tmp_path / "early", 2)
    later = cut(runs / "ditto", tmp_path / "later", 4)
    assert not any(marks(gather(open_runs([early, later]))["table"]).values())  # none has ended
    also = cut(runs / "pfedgate", tmp_path / "also", 4)
    found = gather(open_runs([early, later, also]))
    assert [run["league"] for run in found["runs"]] == [0, 1, 1]
    assert sum(marks(found["table"]).values()) == 1
    assert not marks(found["table"])["early"]


def test_data_is_the_same_wherever_it_lies(runs: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(runs / "fedavg", moved)
    config = (moved / "config.toml").read_text()
    place = f'[data]\ndata_dir = "{tmp_path}"\ncache_dir = "{tmp_path}"'
    (moved / "config.toml").write_text(config.replace("[data]", place).replace('source = "auto"', 'source = "local"'))
    told = gather(open_runs([runs / "ditto", moved]), baseline="moved")
    assert [run["league"] for run in told["runs"]] == [0, 0]
    assert told["runs"][0]["baseline"] == 1
    assert any(cell["best"] for row in told["table"]["rows"] for cell in row["cells"])


def test_clients_are_compared_on_the_same_data_only() -> None:
    keys, names = ["0", "0", "1", "1", "2"], ["fedavg", "ditto", "ditto", "fedavg", "ditto"]
    assert [_matching(at, 0, keys, names) for at in range(5)] == [None, 0, 3, None, None]
    assert _matching(1, None, keys, names) is None


def test_gates_keep_within_the_budget(content: dict, runs: Path) -> None:
    gates = content["runs"][0]["gates"]
    assert len(gates["clients"]) == 6  # of 8, two are novel
    assert set(gates["clients"]) == set(runfolder.load(runs / "pfedgate").store().clients())
    assert all(len(bits) == len(gates["blocks"]) for bits in gates["kept"])
    assert all(0 < density <= 0.5 + 1e-6 for density in gates["density"])
    assert sorted(gates["tree"]["leaves"]) == list(range(6))
    assert content["runs"][1]["gates"] is None


def test_partition_counts_every_sample(content: dict) -> None:
    (partition,) = content["partitions"]  # one for all three runs
    assert sum(map(sum, partition["counts"])) == 500
    assert sum(partition["novel"]) == 2


def test_without_the_data_a_report_is_still_made(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: object, **options: object) -> None:
        raise FileNotFoundError("no such data here")

    monkeypatch.setattr("pfedgate.config.options.federation", gone)
    content = gather(open_runs([runs / "pfedgate"]))
    gates = content["runs"][0]["gates"]
    assert content["partitions"] == []
    assert "no such data here" in gates["reason"]
    assert gates["tree"] is None
    assert len(gates["kept"]) == 6  # from gates.jsonl


def test_a_run_that_is_still_going(runs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "going"
    shutil.copytree(runs / "pfedgate", copy)
    for name in ("summary.json", "clients.csv"):
        (copy / name).unlink()
    (entry,) = gather(open_runs([copy]))["runs"]
    assert not entry["finished"]
    assert entry["clients"] == []
    assert entry["summary"]["accuracy"] == pytest.approx(entry["curves"]["accuracy"][-1])


def test_a_run_that_goes_on_shows_no_clients_of_its_old_end(runs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "longer"
    shutil.copytree(runs / "fedavg", copy)
    assert runfolder.load(copy).clients
    runfolder.extend(runfolder.load(copy), 6)
    (entry,) = gather(open_runs([copy]))["runs"]
    assert not entry["finished"]
    assert entry["clients"] == entry["novel"] == []


def test_before_the_first_evaluation_nobody_has_counted_clients(runs: Path, tmp_path: Path) -> None:
    (early,) = gather(open_runs([cut(runs / "fedavg", tmp_path / "early", 1)]))["runs"]
    assert early["clients_total"] is None
    told = gather(open_runs([tmp_path / "early"]))
    assert told["subtitle"] == "cnn_digits, 1 rounds"


def test_a_client_without_test_data_has_no_accuracy(runs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "untested"
    shutil.copytree(runs / "fedavg", copy)
    rows = list(csv.DictReader(io.StringIO((copy / "clients.csv").read_text())))
    rows[0] |= {"accuracy": "nan", "loss": "nan"}
    with (copy / "clients.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    told = gather(open_runs([copy, runs / "ditto"]))
    assert told["runs"][0]["clients"][0] == {"client": rows[0]["client"], "n": 11}
    row = next(row for row in told["clients"]["rows"] if row["name"] == rows[0]["client"])
    assert row["cells"][0]["text"] == "–"


def test_baselines() -> None:
    labels, algorithms = ["one", "two"], ["ditto", "fedem"]
    assert choose_baseline(None, labels, algorithms) == 1
    assert choose_baseline("ditto", labels, algorithms) == 0
    assert choose_baseline("two", labels, algorithms) == 1
    assert choose_baseline(None, ["one"], ["fedavg"]) is None
    with pytest.raises(ValueError, match="did you mean 'ditto'"):
        choose_baseline("dito", labels, algorithms)
