"""Tuning: on validation data only, no trial lost or done twice, the same settings however often it was interrupted."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import pfedgate
from pfedgate import algorithms, experiment
from pfedgate.cli import app
from pfedgate.cli.base import tuned_note
from pfedgate.config import toml
from pfedgate.config.recipe import RecipeError, resolve
from pfedgate.data import from_arrays
from pfedgate.tune import Search, SearchSpec, choices, tune
from pfedgate.tune import search as room
from pfedgate.tune.search import JOURNAL, _study, base
from pfedgate.tune.space import Range, axis, checked, default, space_of, values
from pfedgate.tune.tuned import with_section

pytest.importorskip("optuna")

TINY = {
    "data": {"name": "synthetic", "clients": 3}, "model": {"name": "mlp", "hidden": [4]}, "train": {"batch": 32},
}  # fmt: skip
SPACE = {"train.lr": choices([0.01, 0.1, 0.3]), "train.momentum": choices([0.0, 0.5, 0.9])}


def search(folder: Path, trials: int = 6, **options: Any) -> Search:
    recipe = base(resolve(TINY, {"algorithm": "fedavg"}), 8)
    return Search(SearchSpec("fedavg", recipe, SPACE, **options), folder, trials)


def play(found: Search, score: Any, most: int = 99) -> None:
    """Trials without training: `score(params, round)` is what a run would have reached."""
    for _ in range(most):
        trial = found.ask()
        if trial is None:
            return
        state = "complete"
        for round in (2, 4, 6, 8):
            trial.report(score(found.params(trial), round), round)
            if found.spec.prune and round < 8 and trial.should_prune():
                state = "pruned"
                break
        ended: Future[tuple[str, str]] = Future()
        ended.set_result((state, ""))
        found.tell(trial, ended)


def hill(params: dict[str, float], round: int) -> float:
    return round * (1 - abs(params["train.lr"] - 0.1) - 0.1 * params["train.momentum"]) / 10


def without_seconds(found: Search) -> list[Any]:
    return [dataclasses.replace(trial, seconds=0.0) for trial in found.trials]


def test_space_is_rates_and_the_methods_own_grid() -> None:
    recipe = resolve({"algorithm": "fedprox"})
    assert list(space_of(recipe)) == ["train.lr", "algorithm.mu"]
    over = space_of(recipe, {"algorithm.mu": axis("log:0.01:1"), "algorithm.lam": axis("1,2")})
    assert over["algorithm.mu"] == Range(0.01, 1, log=True)
    assert "algorithm.lam" not in over  # another method's
    assert "algorithm.components" not in space_of(resolve({"algorithm": "fedem"}))  # one value is no choice
    assert values(over, default(over, recipe))["train.lr"] == recipe.train.lr


def test_wrong_settings_are_told() -> None:
    recipes = [resolve({"algorithm": "ditto"}), resolve({"algorithm": "fedavg"})]
    with pytest.raises(RecipeError, match="did you mean 'lam'"):
        checked({"algorithm.lamb": axis("1,2")}, recipes)
    with pytest.raises(RecipeError, match=r"train\.lr must be a number"):
        checked({"train.lr": axis("fast,0.1")}, recipes)
    for text in ("log:0:1", "log:1:0.1", "lin:1"):
        with pytest.raises(RecipeError, match="range"):
            axis(text)


def test_a_search_finds_the_top_without_trying_a_point_twice(tmp_path: Path) -> None:
    for kind in ("tpe", "random", "grid"):
        found = search(tmp_path / kind, 20, search=kind, prune=False)
        play(found, hill)
        points = [tuple(trial.params.values()) for trial in found.trials]
        assert len(points) == len(set(points)) == 9  # all there are, though 20 were asked for
        assert found.best is not None
        assert found.best.params == {"train.lr": 0.1, "train.momentum": 0.0}


@pytest.mark.parametrize("kind", ["tpe", "random"])
def test_interrupted_equals_uninterrupted(tmp_path: Path, kind: str) -> None:
    whole = search(tmp_path / "whole", search=kind)
    play(whole, hill)
    for done in (1, 3):
        folder = tmp_path / f"cut-{done}"
        play(search(folder, search=kind), hill, most=done)
        cut = search(folder, search=kind)
        assert cut.ask() is not None  # started and never ended: a kill
        with (folder / JOURNAL).open("a") as file:
            file.write('{"op_code": 5, "wor')  # and one line half written
        again = search(folder, search=kind)
        play(again, hill)
        assert without_seconds(again) == without_seconds(whole)
        assert without_seconds(search(folder, search=kind)) == without_seconds(whole)
        assert search(folder, search=kind).ask() is None


def test_a_bad_trial_ends_early_and_a_late_one_does_not(tmp_path: Path) -> None:
    found = search(tmp_path / "pruned", 9, search="grid")
    play(found, lambda params, round: round * (0.1 if params["train.lr"] < 0.3 else 0.001))
    ended = {trial.params["train.lr"] for trial in found.trials if trial.state == "pruned"}
    assert ended == {0.3}
    assert all(len(trial.curve) == 1 for trial in found.trials if trial.state == "pruned")
    kept = search(tmp_path / "kept", 9, search="grid", prune=False)
    play(kept, lambda params, round: round * (0.1 if params["train.lr"] < 0.3 else 0.001))
    assert all(trial.state == "complete" for trial in kept.trials)


class Breaks(torch.nn.Linear):
    """A model that training breaks."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            raise ArithmeticError("diverged")
        return super().forward(input)


def test_training_that_breaks_is_an_outcome(tmp_path: Path) -> None:
    sizes = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"no trial ended well.*diverged"):
            tune("fedavg", trials=2, rounds=1, out=tmp_path, data=two_sided(), model=Breaks(6, 2))
        sizes.append((tmp_path / "fedavg" / JOURNAL).stat().st_size)
    assert sizes[0] == sizes[1]  # the second time they are not repeated


def test_a_trial_that_could_not_begin_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = experiment.plan, []

    def plan(*given: Any, **options: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:  # the second trial: the search itself looks first
            raise FileNotFoundError("the disk is gone")
        return real(*given, **options)

    monkeypatch.setattr(experiment, "plan", plan)
    told = {"trials": 3, "rounds": 1, "out": tmp_path, "data": two_sided()}
    first = tune("fedavg", TINY, **told)
    assert [trial.state for trial in first.trials] == ["complete", "failed", "complete"]
    again = tune("fedavg", TINY, **told)
    assert [trial.state for trial in again.trials] == ["complete"] * 3
    assert [trial.slot for trial in again.trials] == [0, 2, 1]
    assert len(calls) == 6  # one look and three trials, then one look and one trial
    tune("fedavg", TINY, **told)
    assert len(calls) == 6  # nothing to do: the data is not even read


def test_missing_data_is_told_at_once_and_spoils_nothing(tmp_path: Path) -> None:
    file, away = tmp_path / "visits.csv", tmp_path / "away.csv"
    away.write_text("\n".join(["client,dose,label", *(f"h{i % 3},{i % 7},{i % 2}" for i in range(90))]))
    given = ["tune", "fedavg", "--trials", "2", "--rounds", "1", "--out", str(tmp_path / "out")]
    given += ["--set", "data.name=table", "--set", f"data.path={file}", "--set", "model.hidden=[4]"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 1
    assert "no file" in result.output.replace("\n", " ")
    assert "no trial" not in result.output
    away.rename(file)
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert "complete" in result.output


def test_data_without_a_validation_part_is_told_before_training(tmp_path: Path) -> None:
    x = np.zeros((30, 6), dtype=np.float32)
    data = from_arrays(x, np.arange(30) % 2, owners=np.arange(30) % 3, val=0.0)
    with pytest.raises(ValueError, match="validation part"):
        tune("fedavg", TINY, trials=1, rounds=1, out=tmp_path, data=data)


def test_another_search_in_the_folder_is_refused(tmp_path: Path) -> None:
    play(search(tmp_path, 2), hill)
    with pytest.raises(ValueError, match=r"search: tpe then, random now.*another --out"):
        search(tmp_path, 2, search="random")
    assert len(search(tmp_path, 5).trials) == 2  # but more trials of the same are welcome
    with pytest.raises(ValueError, match="9 points, more than --trials 2"):
        search(tmp_path / "grid", 2, search="grid")


def test_one_search_at_a_time_in_a_folder(tmp_path: Path) -> None:
    from pfedgate.engine.checkpoint import FolderBusy, alone

    with alone(tmp_path / "fedavg"), pytest.raises(FolderBusy, match="another process is training in"):
        tune("fedavg", {"data": "digits"}, trials=1, rounds=1, out=tmp_path)


def test_the_same_data_elsewhere_is_the_same_search(tmp_path: Path) -> None:
    def at(place: str, **more: Any) -> Search:
        data = {"name": "cifar10", "data_dir": str(tmp_path / place), "cache_dir": str(tmp_path / place), **more}
        recipe = base(resolve({"data": data, "algorithm": "fedavg"}), 8)
        return Search(SearchSpec("fedavg", recipe, SPACE), tmp_path / "out", 4)

    play(at("here"), hill, most=2)
    there = at("there", source="local")
    assert len(there.trials) == 2
    assert there.spec.recipe.data.options["data_dir"] == str(tmp_path / "there")  # and that is where it is read
    with pytest.raises(ValueError, match=r"recipe\.data\.clients"):
        at("here", clients=7)


@dataclasses.dataclass(frozen=True)
class Scrambled:
    """A federation whose test labels are all wrong."""

    real: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def part(self, client: str, which: str) -> Any:
        part = self.real.part(client, which)
        return SimpleNamespace(n=part.n, x=part.x, y=1 - part.y) if which == "test" else part


def two_sided() -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(180, 6)).astype(np.float32)
    return from_arrays(x, (x[:, 0] > 0).astype(np.int64), owners=np.arange(180) % 3)


def test_test_labels_choose_nothing(tmp_path: Path) -> None:
    trials, tested = [], []
    for name in ("fedavg", "ditto"):
        for scrambled in (False, True):
            data = Scrambled(two_sided()) if scrambled else two_sided()
            tested.append(data.part(data.clients[0], "test").y.tolist())
            found = tune(
                name, {"model": {"name": "mlp", "hidden": [16]}, "train": {"batch": 8}}, trials=3, rounds=3,
                out=tmp_path / f"{name}-{scrambled}", data=data,
            )  # fmt: skip
            trials.append(without_seconds(found))
    assert tested[0] != tested[1]
    assert trials[0] == trials[1]
    assert trials[2] == trials[3]
    assert len({trial.value for trial in trials[0]}) > 1


def test_tuned_settings_lie_beside_the_recipe_which_wins(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("train.lr = 3.0\n[tuned.fedavg]\ntrain.lr = 2.0\n")
    text = with_section("# mine\n\n", "ditto", {"train.lr": 0.1, "algorithm.lam": 0.5}, "old")
    text = with_section(text, "fedavg", {"train.lr": 0.2, "train.milestones": (1, 2)}, "other")
    (tmp_path / "mine.tuned.toml").write_text(with_section(text, "ditto", {"train.lr": 0.3}, "new"))
    text = (tmp_path / "mine.tuned.toml").read_text()
    assert text.startswith("# mine\n\n[tuned.ditto]\n# pfedgate tune: new\ntrain.lr = 0.3\nalgorithm.lam = 0.5\n\n[")
    assert text.count("# pfedgate tune: ") == 2
    ditto = resolve(recipe, {"algorithm": "ditto"})
    assert (ditto.train.lr, ditto.algorithm.options["lam"]) == (0.3, 0.5)
    assert resolve(recipe, {"algorithm": "fedavg"}).train.lr == 2.0
    assert resolve(recipe, {"algorithm": "fedper"}).train.lr == 3.0
    assert resolve(recipe, {"algorithm": "ditto"}, {"train.lr": 1.0}).train.lr == 1.0
    assert "ditto: " in tuned_note(recipe, ["ditto:lam=1", "fedavg", "fedper"])


def test_settings_that_would_have_no_effect_are_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("tuned.ditto.train.lr = 2.0\n")
    result = CliRunner().invoke(app, ["tune", "ditto", "--recipe", str(recipe), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "has tuned settings of ditto itself" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()  # before the search, not after it


def tune_words(folder: Path, *more: str) -> list[str]:
    return [
        "tune", "fedavg", "ditto", "--recipe", str(folder / "recipe.toml"), "--trials", "4", "--rounds", "4",
        "--param", "train.lr=0.01,0.1", "--out", str(folder / "out"), *more,
    ]  # fmt: skip


def write_recipe(folder: Path) -> Path:
    lines = ["# keep me"]
    for section, table in TINY.items():
        lines += [f"[{section}]", *(f"{name} = {toml.dump(value)}" for name, value in table.items()), ""]
    path = folder / "recipe.toml"
    path.write_text("\n".join(lines))
    return path


def test_the_command_tunes_all_methods_of_a_recipe(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    before = recipe.read_text()
    result = CliRunner().invoke(app, tune_words(tmp_path, "--write"))
    assert result.exit_code == 0, result.output
    assert "ditto on synthetic" in result.output
    assert recipe.read_text() == before
    tuned = toml.read(tmp_path / "recipe.tuned.toml")["tuned"]
    assert set(tuned) == {"fedavg", "ditto"}
    assert set(tuned["ditto"]["algorithm"]) == {"lam", "personal_lr"}
    assert resolve(recipe, {"algorithm": "ditto"}).algorithm.options["lam"] == tuned["ditto"]["algorithm"]["lam"]
    copied = CliRunner().invoke(app, [*tune_words(tmp_path), "--trials", "1", "--out", str(tmp_path / "copy")])
    assert copied.exit_code == 0, copied.output
    assert (tmp_path / "copy/recipe.toml").read_text() == before
    assert set(toml.read(tmp_path / "copy/recipe.tuned.toml")["tuned"]) == {"fedavg", "ditto"}
    compared = CliRunner().invoke(app, ["compare", "ditto", str(recipe), "--out", str(tmp_path / "runs")])
    assert "tuned settings of ditto: " in compared.output.replace("\n", " ")
    wrong = CliRunner().invoke(app, [*tune_words(tmp_path), "--search", "hill"])
    assert "unknown search 'hill'" in wrong.output


@pytest.mark.slow
def test_kill_9_loses_and_repeats_no_finished_trial(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    run = [sys.executable, "-m", "pfedgate", *tune_words(tmp_path, "--workers", "2", "--no-prune")]
    env = {**os.environ, "PYTHONPATH": str(Path(pfedgate.__file__).parent.parent)}
    process = subprocess.Popen(run, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    log, deadline = tmp_path / "out/ditto" / JOURNAL, time.monotonic() + 240
    while time.monotonic() < deadline and not (log.exists() and '"state":1' in log.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    ended = log.read_text()
    subprocess.run(run, check=True, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    assert log.read_text().startswith(ended[: ended.rfind("\n") + 1])
    records = _study(log, 4).trials
    assert sorted(t.user_attrs["slot"] for t in records if "lost" not in t.user_attrs) == [0, 1, 2, 3]
    assert not any(t.state.name == "RUNNING" for t in records)


def test_without_optuna_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install 'pfedgate\[tune\]'"):
        search(tmp_path)


@pytest.mark.parametrize("best", [0.07, 0.1, 0.13])
def test_a_best_trial_at_an_edge_extends_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: float) -> None:
    """Until the best one has worse neighbours on both sides, or the steps beyond an end are used up."""
    tried: list[float] = []

    def attempt(job: room.Attempt, tick: Any = None) -> tuple[str, str]:
        lr = job.recipe["train"]["lr"]
        tried.append(lr)
        trial = optuna.trial.Trial(room._study(job.journal, 1), job.id)
        trial.report(-abs(math.log(lr / best)), 1)
        return room.COMPLETE, ""

    optuna = room._optuna()
    monkeypatch.setattr(room, "attempt", attempt)
    recipe = room.base(resolve({"algorithm": "fedavg", "data.clients": 2, "data.samples": 60}))
    spec = SearchSpec("fedavg", recipe, {"train.lr": choices([0.09, 0.1, 0.11])}, search="grid")
    searching = Search(spec, tmp_path, 3, extend=True)
    searching.run()
    assert tried[:3] == [0.09, 0.1, 0.11]
    assert len(tried) <= 3 + room.FARTHER
    if best == 0.1:
        assert len(tried) == 3
    else:
        beyond = tried[3:]
        assert beyond == sorted(beyond, reverse=best < 0.1)
        assert all(lr < 0.09 if best < 0.1 else lr > 0.11 for lr in beyond)
    again = Search(spec, tmp_path, 3, extend=True)
    again.run()
    assert len(again.trials) == len(tried), "what has ended stays ended"


def test_settings_are_searched_on_another_seed_than_is_reported() -> None:
    recipe = resolve({"algorithm": "fedavg", "run.seed": 4})
    assert room.base(recipe).run.seed == 4 + room.OTHER_SEED


def test_what_the_task_offers_can_be_searched_for_every_method() -> None:
    for name in algorithms.names():
        space = space_of(resolve({"algorithm": name}), care=True)
        assert {"train.schedule", "train.correction", "train.initial_scale"} <= set(space)
