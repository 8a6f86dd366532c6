"""Tuning: on validation data only, no trial lost or done twice, the same settings however often it was interrupted."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

import pfedgate
from pfedgate import experiment
from pfedgate.cli import app
from pfedgate.config import recipe as config
from pfedgate.config import toml
from pfedgate.config.recipe import RecipeError, resolve
from pfedgate.data import from_arrays
from pfedgate.tune import Plan, Search, choices, tune, with_tuned
from pfedgate.tune.search import base
from pfedgate.tune.space import Range, axis, checked, default, space_of, values

pytest.importorskip("optuna")

TINY = {
    "data": {"name": "synthetic", "clients": 3}, "model": {"name": "mlp", "hidden": [4]}, "train": {"batch": 32},
}  # fmt: skip
SPACE = {"train.lr": choices([0.01, 0.1, 0.3]), "train.momentum": choices([0.0, 0.5, 0.9])}


def search(folder: Path, trials: int = 6, **options: Any) -> Search:
    recipe = base(resolve(TINY, {"algorithm": "fedavg"}), 8)
    return Search(Plan("fedavg", recipe, SPACE, **options), folder, trials)


def play(found: Search, score: Any, most: int = 99) -> None:
    """Trials without training: `score(params, round)` is what a run would have reached."""
    for _ in range(most):
        job = found.next()
        if job is None:
            return
        curve = []
        for round in (2, 4, 6, 8):
            curve.append([round, score(job["params"], round)])
            if found.said(job, curve[-1]):
                break
        state = "complete" if len(curve) == 4 else "pruned"
        found.ended(job, {"state": state, "curve": curve, "seconds": 0.0, "error": ""})


def hill(params: dict[str, float], round: int) -> float:
    return round * (1 - abs(params["train.lr"] - 0.1) - 0.1 * params["train.momentum"]) / 10


def plain(found: Search) -> list[Any]:
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
        assert cut.next() is not None  # started and never ended: a kill
        with (folder / "trials.jsonl").open("a") as file:
            file.write('{"trial": 5, "par')  # and one half written
        again = search(folder, search=kind)
        play(again, hill)
        assert plain(again) == plain(whole)
        assert len((folder / "trials.jsonl").read_text().splitlines()) == 6
        assert plain(search(folder, search=kind)) == plain(whole)


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
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"no trial ended well.*diverged"):
            tune("fedavg", trials=2, rounds=1, out=tmp_path, data=federation(), model=Breaks(6, 2))
        lines = [json.loads(line) for line in (tmp_path / "fedavg/trials.jsonl").read_text().splitlines()]
        assert [line["state"] for line in lines] == ["failed", "failed"]  # and the second time they are not repeated


def test_a_trial_that_could_not_begin_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = experiment.plan, []

    def plan(*given: Any, **options: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:  # the second trial: the search itself looks first
            raise FileNotFoundError("the disk is gone")
        return real(*given, **options)

    monkeypatch.setattr(experiment, "plan", plan)
    told = {"trials": 3, "rounds": 1, "out": tmp_path, "data": federation()}
    first = tune("fedavg", TINY, **told)
    assert [trial.state for trial in first.trials] == ["complete", "failed", "complete"]
    again = tune("fedavg", TINY, **told)
    assert [trial.state for trial in again.trials] == ["complete"] * 3
    assert [trial.trial for trial in again.trials] == [0, 2, 1]
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


def test_the_same_data_elsewhere_is_the_same_search(tmp_path: Path) -> None:
    def at(place: str, **more: Any) -> Search:
        data = {"name": "cifar10", "data_dir": str(tmp_path / place), "cache_dir": str(tmp_path / place), **more}
        recipe = base(resolve({"data": data, "algorithm": "fedavg"}), 8)
        return Search(Plan("fedavg", recipe, SPACE), tmp_path / "out", 4)

    play(at("here"), hill, most=2)
    there = at("there", source="local")
    assert len(there.trials) == 2
    assert there.plan.recipe.data.options["data_dir"] == str(tmp_path / "there")  # and that is where it is read
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


def federation() -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(180, 6)).astype(np.float32)
    return from_arrays(x, (x[:, 0] > 0).astype(np.int64), owners=np.arange(180) % 3)


def test_test_labels_choose_nothing(tmp_path: Path) -> None:
    trials, tested = [], []
    for name in ("fedavg", "ditto"):
        for scrambled in (False, True):
            data = Scrambled(federation()) if scrambled else federation()
            tested.append(data.part(data.clients[0], "test").y.tolist())
            found = tune(
                name, {"model": {"name": "mlp", "hidden": [16]}, "train": {"batch": 8}}, trials=3, rounds=3,
                out=tmp_path / f"{name}-{scrambled}", data=data,
            )  # fmt: skip
            trials.append(plain(found))
    assert tested[0] != tested[1]
    assert trials[0] == trials[1]
    assert trials[2] == trials[3]
    assert len({trial.value for trial in trials[0]}) > 1


def test_best_settings_go_into_the_recipe() -> None:
    text = '# mine\n[data]\nname = "digits"  # small\n\n[tuned.ditto]\n# pfedgate tune: old\ntrain.lr = 1.0  # why\n'
    text += "clients.fraction = 0.5\n\n# lucky\n[run]\nseed = 3\n"
    fresh = with_tuned(text, "ditto", {"train.lr": 0.1, "algorithm.lam": 0.5}, "new")
    changed = text.replace("tune: old", "tune: new").replace("= 1.0", "= 0.1")
    assert fresh == changed.replace("fraction = 0.5\n", "fraction = 0.5\nalgorithm.lam = 0.5\n")
    recipe = resolve(toml.parse(fresh), {"algorithm": "ditto"})
    assert (recipe.train.lr, recipe.algorithm.options["lam"], recipe.clients.fraction) == (0.1, 0.5, 0.5)
    assert recipe.run.seed == 3
    assert resolve(toml.parse(fresh), {"algorithm": "fedavg"}).clients.fraction == 1.0
    assert with_tuned(fresh, "ditto", {"train.lr": 0.1}, "new") == fresh


FORMS = (  # ways to write settings of ditto; some hold those of fedavg, too
    "",
    "[tuned.ditto]\ntrain.lr = 1.0  # fast\ntrain.milestones = [\n  1,  # one\n  2,\n]\n",
    "[tuned.ditto]\ntrain.milestones = [\n  1,\n]\n# pfedgate tune: old\ntrain.lr = 1.0\n",
    '[tuned."ditto"]\ntrain = { lr = 1.0 }\n',
    "[tuned.ditto.train]\nlr = 1.0\n",
    '[tuned.ditto]\n"train.lr" = 1.0\n',
    "[tuned]\nditto.train.lr = 1.0  # fast\nfedavg.train.lr = 2.0\nditto.train.eps = 0.5\n",
    "[tuned]\nditto = { train = { lr = 1.0 } }  # fast\n",
    "[tuned]\nfedavg.train.lr = 2.0\nditto = { train.lr = 1.0 }\n",
    "tuned.ditto.train.lr = 1.0\n",
    "tuned = { ditto = { train.lr = 1.0 }, fedavg = { train.lr = 2.0 } }\n",
)
OTHERS = (
    '# data\n[data]\nname = "digits"\n',
    "# run\n#\n\n[run]\nseed = 3\n",
    "# fedavg\n[tuned.fedavg]\ntrain.lr = 2.0\n",
    "# here too\n[tuned.ditto.clients]\nfraction = 0.5\n",
)


def comments(text: str) -> list[str]:
    return [line.partition("#")[2] for line in text.splitlines() if "#" in line and "# pfedgate tune" not in line]


@given(
    form=st.sampled_from(FORMS),
    others=st.permutations(OTHERS),
    many=st.integers(0, len(OTHERS)),
    at=st.integers(0, len(OTHERS)),
    gap=st.sampled_from(["", "\n"]),
    end=st.sampled_from(["", "# the end\n", "\n\n"]),
)
def test_all_else_in_a_recipe_stays(form: str, others: list[str], many: int, at: int, gap: str, end: str) -> None:
    text = gap.join([*others[:many][:at], form, *others[:many][at:]]) + end
    assume("[tuned]" not in form or "# here too" not in text)  # settings of a method in two places: refused
    try:
        ditto, fedavg = (resolve(toml.parse(text), {"algorithm": name}) for name in ("ditto", "fedavg"))
    except RecipeError:
        assume(False)
    found = {"train.lr": 0.1, "train.momentum": 0.9, "algorithm.lam": 0.5}
    fresh = with_tuned(text, "ditto", found, "new")
    after = toml.parse(fresh)
    assert resolve(after, {"algorithm": "ditto"}) == resolve(ditto.tables(), found)
    assert resolve(after, {"algorithm": "fedavg"}) == fedavg
    assert comments(fresh) == comments(text)
    lines = [line for line in fresh.splitlines() if "# pfedgate tune" not in line]
    for comment in {"# data", "# fedavg", "# here too"} & set(lines):
        assert lines[lines.index(comment) + 1].startswith("[")  # still above their sections
    assert fresh.count("# pfedgate tune: ") <= 1
    assert "tune: old" not in fresh
    assert with_tuned(fresh, "ditto", found, "new") == fresh


def test_a_recipe_that_cannot_be_changed_without_harm_is_refused(tmp_path: Path) -> None:
    text = "tuned = { fedavg = { train.lr = 2.0 } }\n"
    with pytest.raises(RecipeError, match=r"section \[tuned\.ditto\] of its own.*train\.lr = 0\.1"):
        with_tuned(text, "ditto", {"train.lr": 0.1})
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    result = CliRunner().invoke(app, ["tune", "ditto", "--recipe", str(recipe), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert not (tmp_path / "out").exists()  # before the search, not after it
    assert recipe.read_text() == text


def command(folder: Path, *more: str) -> list[str]:
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
    result = CliRunner().invoke(app, command(tmp_path, "--write"))
    assert result.exit_code == 0, result.output
    assert "ditto on synthetic" in result.output
    text = recipe.read_text()
    assert text.startswith("# keep me\n")
    assert text.count("# pfedgate tune: ") == 2
    best = json.loads((tmp_path / "out/ditto/trials.jsonl").read_text().splitlines()[0])["params"]
    assert set(best) == {"train.lr", "algorithm.lam"}
    tuned = toml.parse(text)["tuned"]
    assert set(tuned) == {"fedavg", "ditto"}
    assert config.resolve(recipe, {"algorithm": "ditto"}).algorithm.options["lam"] == tuned["ditto"]["algorithm"]["lam"]
    wrong = CliRunner().invoke(app, [*command(tmp_path), "--search", "hill"])
    assert "unknown search 'hill'" in wrong.output


@pytest.mark.slow
def test_kill_9_loses_and_repeats_no_finished_trial(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    run = [sys.executable, "-m", "pfedgate", *command(tmp_path, "--workers", "2", "--no-prune")]
    env = {**os.environ, "PYTHONPATH": str(Path(pfedgate.__file__).parent.parent)}
    process = subprocess.Popen(run, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    log = tmp_path / "out/ditto/trials.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (log.exists() and log.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = log.read_text()
    assert kept
    subprocess.run(run, check=True, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    lines = log.read_text()
    assert lines.startswith(kept[: kept.rfind("\n") + 1])
    assert sorted(json.loads(line)["trial"] for line in lines.splitlines()) == [0, 1, 2, 3]


def test_without_optuna_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install 'pfedgate\[tune\]'"):
        search(tmp_path)
