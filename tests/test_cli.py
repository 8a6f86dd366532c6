"""The command line: the same results as from Python, readable errors, and no round lost to a kill."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

import pfedgate
from pfedgate import algorithms, experiment, models
from pfedgate.cli import app
from pfedgate.cli.commands import table
from pfedgate.config import toml
from pfedgate.core.state import equal
from pfedgate.runs import folder as runfolder
from pfedgate.runs.progress import Progress, Steps

TINY = [
    "data.clients=4", "model.name=mlp", "model.hidden=[64]", "train.rounds=2", "train.batch=64", "evaluate.every=1",
]  # fmt: skip


@pytest.fixture
def pf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command in an empty folder; `settings` become --set options."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def invoke(*arguments: object, settings: list[str] | None = None, code: int = 0) -> Any:
        given = [str(argument) for argument in arguments]
        for setting in settings or []:
            given += ["--set", setting]
        result = CliRunner().invoke(app, given)
        assert result.exit_code == code, result.output + str(result.exception)
        return result

    return invoke


def test_version_and_help(pf: Callable[..., Any]) -> None:
    told = subprocess.run([sys.executable, "-m", "pfedgate", "--version"], capture_output=True, text=True, check=True)
    assert pf("--version").stdout == told.stdout == f"pfedgate {pfedgate.__version__}\n"
    told = pf("--help").stdout
    for command in ("run", "resume", "compare", "data", "algorithms", "models"):
        assert command in told


def test_command_line_and_python_give_the_same_bytes(pf: Callable[..., Any]) -> None:
    told = pf("run", "--out", "cli", settings=TINY)
    layer = {
        "data": {"clients": 4}, "model": {"name": "mlp", "hidden": [64]}, "train": {"rounds": 2, "batch": 64},
        "evaluate": {"every": 1},
    }  # fmt: skip
    result = experiment.run(layer, out="python")
    for name in ("metrics.jsonl", "clients.csv", "participation.jsonl", "config.toml"):
        assert Path("cli", name).read_bytes() == Path("python", name).read_bytes(), name
    assert equal(runfolder.load("cli").server("best"), runfolder.load("python").server("best"))
    accuracy = result.summary["accuracy"]
    assert f"accuracy {100 * accuracy:.1f} %" in told.stdout
    assert told.stdout.splitlines()[-1].startswith("cli: metrics.jsonl")
    assert "round 2/2" in told.stderr


def test_without_a_name_every_run_gets_a_folder_of_its_own(pf: Callable[..., Any]) -> None:
    for _ in range(2):
        pf("run", settings=[*TINY, "algorithm.name=fedavg"])
    assert sorted(path.name for path in Path("runs").iterdir()) == ["digits-fedavg", "digits-fedavg-2"]


def test_show_prints_a_recipe_that_is_the_run(pf: Callable[..., Any]) -> None:
    text = pf("run", "--show", settings=TINY).stdout
    assert not list(Path().iterdir())
    Path("shown.toml").write_text(text)
    pf("run", "shown.toml", "--out", "shown")
    assert runfolder.load("shown").recipe == experiment.recipe_of(toml.parse(text))
    assert runfolder.load("shown").recipe.model.options["hidden"] == (64,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "--set", "train.roundz=3"],
            "error: [train] unknown key 'roundz': did you mean 'rounds'? Known: batch",
        ),
        (["run", "--set", "rounds=3"], "error: 'rounds' is set as train.rounds=…"),
        (["run", "nothing.toml"], "error: no recipe nothing.toml"),
        (["run", "--set", "data.clients=5000"], "error: "),
        (["compare", "fedavgg"], "did you mean 'fedavg'"),
        (["compare", "a.toml"], "name the methods to compare"),
        (["compare", "fedavg", "fedavg"], "the same method twice"),
        (["compare", "pfedgate", "fedavg", "--set", "algorithm.gate_lr=1.0"], "[algorithm] unknown key 'gate_lr'"),
        (["resume", "nowhere"], "nowhere holds no run"),
        (["data", "show", "cifra10"], "did you mean 'cifar10'"),
        (["data", "show", "digits", "--set", "alhpa=1"], "did you mean 'alpha'"),
        (["algorithms", "dito"], "did you mean 'ditto'"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_errors_are_one_paragraph(pf: Callable[..., Any], arguments: list[str], message: str) -> None:
    told = pf(*arguments, code=1)
    assert message in told.stderr
    assert "Traceback" not in told.output
    assert len(told.stderr.strip().splitlines()) == 1
    assert not Path("runs").exists() or arguments[-1] == "data.clients=5000"


def test_debug_shows_the_error_as_it_is() -> None:
    result = CliRunner().invoke(app, ["run", "--debug", "--set", "train.roundz=3"])
    assert isinstance(result.exception, ValueError)


def test_a_warning_is_one_line(pf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fedavg = algorithms.get("fedavg")

    def warn(name: str) -> Any:
        warnings.warn("this may be slow", stacklevel=1)
        return fedavg

    monkeypatch.setattr("pfedgate.algorithms.get", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert set(pf("algorithms", "fedavg").stderr.splitlines()) == {"warning: this may be slow"}


def test_an_option_that_does_not_exist_is_a_usage_error(pf: Callable[..., Any]) -> None:
    assert "No such option" in pf("run", "--roundz", "3", code=2).stderr


def start_process(*arguments: str) -> subprocess.Popen[str]:
    source = Path(pfedgate.__file__).parent.parent
    return subprocess.Popen(
        [sys.executable, "-m", "pfedgate", *arguments],
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests may themselves run in the background of a shell, where Ctrl-C is ignored and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_rounds(process: subprocess.Popen[str], folder: Path, rounds: int) -> None:
    until = time.monotonic() + 120
    while len(runfolder.Run(folder).metrics) < rounds:
        assert process.poll() is None, f"ended before round {rounds}: {process.communicate()}"
        assert time.monotonic() < until
        time.sleep(0.005)


def test_killed_then_interrupted_then_resumed_equals_never_stopped(pf: Callable[..., Any], tmp_path: Path) -> None:
    settings = [*TINY[:3], "train.rounds=30", "evaluate.every=10", "train.schedule=plateau"]
    options = [part for setting in settings for part in ("--set", setting)]
    folder = tmp_path / "stopped"

    process = start_process("run", "--out", str(folder), *options)
    wait_for_rounds(process, folder, 2)
    process.kill()
    process.communicate()
    kept = len(runfolder.load(folder).metrics)
    assert 2 <= kept < 30

    process = start_process("resume", str(folder))
    wait_for_rounds(process, folder, kept + 2)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert f"of 30 rounds are kept. Go on with: pfedgate resume {folder}" in told
    assert not runfolder.load(folder).finished

    pf("resume", folder)
    pf("run", "--out", "whole", settings=settings)
    for name in ("metrics.jsonl", "participation.jsonl", "clients.csv"):
        assert (folder / name).read_bytes() == Path("whole", name).read_bytes(), name
    assert equal(runfolder.load(folder).server("best"), runfolder.load("whole").server("best"))
    assert len(runfolder.load(folder).environments) == 3
    before = (folder / "environment.json").read_bytes()
    assert "30 rounds" in pf("resume", folder).stdout
    assert (folder / "environment.json").read_bytes() == before, "a finished run is only reported"


def test_compare_prints_a_table_and_the_folders(pf: Callable[..., Any]) -> None:
    told = pf("compare", "pfedgate", "fedavg", "pfedgate:clients.budget=0.5,gate_lr=0.2", "--out", "c", settings=TINY)
    names = ["pfedgate", "fedavg", "pfedgate-budget=0.5-gate_lr=0.2"]
    runs = runfolder.load_all("c")
    assert [run.name for run in runs] == names
    assert runs[2].recipe.clients.budget == 0.5
    assert runs[2].recipe.algorithm.options["gate_lr"] == 0.2
    for run in runs:
        row = next(line for line in told.stdout.splitlines() if f"│ {run.name} " in line)
        for kind in ("", "best_"):
            assert _pair(run.summary[f"{kind}accuracy"], run.summary[f"{kind}bottom_decile"]) in row
        assert told.stdout.rstrip().split("one folder per method")[1].count(str(run.path)) >= 1
    alone = experiment.run(runs[1].recipe)
    assert alone.history == runs[1].metrics

    (runs[1].path / "summary.json").unlink()  # as if it had been stopped just before the end
    again = pf("resume", "c").stdout
    assert "fedavg" in again
    assert runs[1].summary["accuracy"] == alone.summary["accuracy"]
    assert "c already holds a run" in pf("compare", "fedavg", "--out", "c", settings=TINY, code=1).stderr
    with pytest.raises(FileNotFoundError, match="comparison of several runs"):
        runfolder.load("c")


def test_a_method_of_a_comparison_may_have_a_name(pf: Callable[..., Any]) -> None:
    pf("compare", "small=pfedgate:clients.budget=0.3", "fedavg", "--out", "c", settings=TINY)
    runs = runfolder.load_all("c")
    assert [run.name for run in runs] == ["small", "fedavg"]
    assert (runs[0].recipe.algorithm.name, runs[0].recipe.clients.budget) == ("pfedgate", 0.3)
    assert "the same method twice" in pf("compare", "a=fedavg", "a=ditto", settings=TINY, code=1).stderr


def test_the_demo_compares_and_writes_a_report(pf: Callable[..., Any]) -> None:
    few = ["--set", "data.samples=300", "--set", "data.clients=4", "--set", "train.rounds=1", "--set", "run.workers=1"]
    said = pf("demo", "--out", "d", *few).stdout
    names = [run.name for run in runfolder.load_all("d")]
    assert names == ["pfedgate-0.3", "fedavg", "fedavg-corrected", "narrow-corrected"]
    assert all(f"│ {name} " in said for name in names)
    assert Path("d/report.html").stat().st_size > 500_000
    costs = {run.name: run.summary["flops"] for run in runfolder.load_all("d")}
    assert costs["narrow-corrected"] == pytest.approx(costs["pfedgate-0.3"], rel=0.1), "a narrow network of equal FLOPs"


def test_a_comparison_shows_the_last_round_and_the_one_best_on_validation(pf: Callable[..., Any]) -> None:
    pf("compare", "fedavg", "local_only", "--out", "c", settings=TINY)
    summaries = [  # the last round alone would tell another story
        {"accuracy": 0.8, "bottom_decile": 0.5, "best_accuracy": 0.9, "best_bottom_decile": 0.75},
        {"accuracy": 0.85, "bottom_decile": 0.5, "best_accuracy": 0.875, "best_bottom_decile": 0.7},
    ]
    for run, told in zip(runfolder.load_all("c"), summaries, strict=True):
        (run.path / "summary.json").write_text(json.dumps(run.summary | told), encoding="utf-8")
    shown = table(runfolder.load_all("c"))
    last, best = (list(column.cells) for column in shown.columns[1:3])
    assert [cell.plain for cell in last] == ["80.00 / 50.00", "85.00 / 50.00"]
    assert [cell.plain for cell in best] == ["90.00 / 75.00", "87.50 / 70.00"]

    def bold(cell: Text) -> list[str]:
        return [cell.plain[span.start : span.end] for span in cell.spans if "bold" in str(span.style)]

    assert [bold(cell) for cell in last] == [[], ["85.00"]], "equal ones are no victory"
    assert [bold(cell) for cell in best] == [["90.00", "75.00"], []]


def _pair(accuracy: float, bottom_decile: float) -> str:
    return f"{100 * accuracy:.2f} / {100 * bottom_decile:.2f}"


def test_compare_takes_a_recipe_with_tuned_settings(pf: Callable[..., Any]) -> None:
    Path("r.toml").write_text('[algorithm]\nname = "pfedgate"\ngate_lr = 0.3\n[tuned.ditto]\ntrain.lr = 0.01\n')
    pf("compare", "ditto", "fedavg", "r.toml", "--out", "c", settings=TINY)
    assert [run.recipe.train.lr for run in runfolder.load_all("c")] == [0.01, 0.1]


def test_data_show_prints_and_draws(pf: Callable[..., Any]) -> None:
    told = pf(
        "data", "show", "digits", "--plot", "p.svg", settings=["clients=6", "alpha=0.1", "clients.novel=0.3"]
    ).stdout
    assert "4 train, 2 novel" in told
    assert "alpha=0.1" in told
    assert Path("p.svg").read_text().count("<path") > 10
    assert "needs no preparation" in pf("data", "prepare", "digits").stdout


def test_data_show_needs_no_extra_unless_a_picture_is_asked_for(
    pf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plot(*given: object) -> Path:
        raise ImportError("drawing needs another package")

    monkeypatch.setattr("pfedgate.data.show.plot", plot)
    assert "not drawn: drawing needs" in pf("data", "show", "digits").stdout
    assert "drawing needs" in pf("data", "show", "digits", "--plot", "p.svg", code=1).stderr


def test_lists_are_complete(pf: Callable[..., Any]) -> None:
    told = pf("algorithms").stdout
    assert all(f"│ {name} " in told for name in algorithms.names())
    told = pf("models").stdout
    assert all(f"│ {name} " in told for name in models.names())
    assert "256,830" in told
    assert "algorithm.gate_lr" in pf("algorithms", "pfedgate").stdout
    assert "model.hidden" in pf("models", "mlp").stdout


EVENTS: list[dict[str, Any]] = [
    {"event": "start", "round": 2, "rounds": 4},
    {"event": "round", "round": 3, "rounds": 4, "loss": 1.25, "after_broadcast": {"accuracy": 0.5}},
    {"event": "round", "round": 4, "rounds": 4, "loss": 1.0},
    {"event": "end"},
]  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_rounds_accuracy_and_time_left(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
    with Progress("digits", console) as progress:
        for event in EVENTS:
            progress(event)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("digits", "accuracy 50.0 %", "0:00 left", "4/4" if terminal else "round 3/4"):
        assert part in shown
    assert ("\x1b[" in shown) == terminal


def test_time_left_counts_this_session_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("pfedgate.runs.progress.time.monotonic", lambda: now[0])
    steps = Steps("a search", "trial", Console(file=io.StringIO()))
    steps.at(10, 20)
    assert steps.left() is None
    now[0] += 6
    steps.at(12, 20)
    now[0] += 1
    assert steps.left() == 8 * 3 - 1
