"""Following a run in the terminal."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pfedgate import experiment
from pfedgate.cli import app
from pfedgate.runs import folder as runfolder
from pfedgate.runs import watch


def run_folder(folder: Path, rounds: int) -> Path:
    """A folder as a run of 10 rounds leaves it after some."""
    recipe = experiment.recipe_of({"algorithm": {"name": "fedavg"}, "train": {"rounds": 10}})
    runfolder.create(folder, recipe)
    for number in range(1, rounds + 1):
        record: dict[str, Any] = {"round": number, "loss": 2.0 / number, "bytes_up": 1000, "bytes_down": 2000}
        if number % 2 == 0:
            record["after_broadcast"] = {"accuracy": number / 10, "bottom_decile": number / 20}
        timing = {"round": number, "seconds": 2.0, "seconds_evaluation": 1.0}
        for name, line in (("metrics", record), ("timing", timing)):
            with (folder / f"{name}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
    return folder


def age(path: Path) -> None:
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))


def shown(folder: Path) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(watch.view(runfolder.load_all(folder)))
    return console.export_text()


def test_what_is_shown(tmp_path: Path) -> None:
    text = shown(run_folder(tmp_path / "run", 4))
    assert "4 / 10" in text
    assert "40.0 %" in text
    assert "up 4.0 kB" in text or "up 4 kB" in text
    assert "0:18 left" in text  # six rounds of three seconds


def test_before_the_first_round(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", 0)
    assert "training has not begun" in shown(folder)
    (folder / "environment.json").write_text("[]")
    assert "no round is finished yet" in shown(folder)
    age(folder / "environment.json")
    assert "pfedgate resume" in shown(folder)  # it may have died before the first round


def test_a_run_that_fell_silent(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", 3)
    age(folder / "metrics.jsonl")
    assert "pfedgate resume" in shown(folder)
    (folder / "environment.json").write_text("[]")  # as resume does: now it is heard of again
    assert "left" in shown(folder)


def comparison(folder: Path, done: int, runs: int = 8) -> Path:
    """A comparison as it is while a run goes on: some before it have ended, those after it wait."""
    for at in range(runs):
        run = run_folder(folder / f"method{at}", 10 if at < done else 4 if at == done else 0)
        if at < done:
            (run / "summary.json").write_text("{}")
    (folder / "comparison.json").write_text(json.dumps([f"method{at}" for at in range(runs)]))
    return folder


@pytest.mark.parametrize("done", [0, 5, 7])
def test_the_run_that_goes_on_is_on_the_screen(tmp_path: Path, done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file, frames = comparison(tmp_path, done), io.StringIO(), []

    def finish(_: float) -> None:
        frames.append(file.getvalue())
        for run in runfolder.load_all(folder):
            (run.path / "summary.json").write_text("{}")

    text = shown(folder)
    monkeypatch.setattr(time, "sleep", finish)
    watch.follow(folder, Console(width=120, height=24, file=file, force_terminal=True, color_system=None))
    seen = [line for line in frames[0].splitlines() if "method" in line]
    assert [line.partition("method")[2][0] for line in seen] == [str(done), *(str(n) for n in range(8) if n != done)]
    assert "fedavg on digits" in seen[0]
    assert text.count("finished") == done
    assert text.count("100.0 %") == done  # what they reached
    assert text.count("training has not begun") == 7 - done


def test_more_runs_than_there_is_room_for(tmp_path: Path) -> None:
    names = ["silent", "one", "two", "three"]
    for name in names:
        run_folder(tmp_path / name, 3)
    age(tmp_path / "silent" / "metrics.jsonl")
    (tmp_path / "comparison.json").write_text(json.dumps(names))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(watch.view(runfolder.load_all(tmp_path), 24))
    text = console.export_text()
    assert len(text.splitlines()) <= 24
    assert text.count("so far") == 2  # in full: runs that go on, before one that fell silent
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["silent", "three"]
    assert "nothing new for 1:00:00" in text


def test_a_half_written_line_is_not_read(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", 3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "lo')
    assert "3 / 10" in shown(folder)


def test_follow_ends_with_the_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", 10)

    def finish() -> None:
        time.sleep(0.3)
        (folder / "summary.json").write_text("{}")

    other = threading.Thread(target=finish)
    other.start()
    console = Console(width=120, file=io.StringIO())
    watch.follow(folder, console, every=0.05)
    other.join()
    assert "finished" in watch.state(runfolder.load(folder))


def test_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["watch", "--once", str(run_folder(tmp_path / "run", 2))])
    assert result.exit_code == 0, result.output
    assert "2 / 10" in result.output
    assert CliRunner().invoke(app, ["watch", str(tmp_path)]).exit_code == 1


def test_sparks() -> None:
    assert watch.spark([]) == ""
    assert watch.spark([1.0, 1.0]) == "▁▁"
    many = watch.spark([float(i) for i in range(100)], width=10)
    assert len(many) == 10
    assert many[-1] == "█"
    with pytest.raises(ValueError, match="more than 0"):
        watch.follow(".", Console(), every=0)
