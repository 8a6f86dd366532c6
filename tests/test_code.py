"""Code that a recipe names: used, copied with its digest, never run by looking, and forbidden on demand."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import pfedgate
from pfedgate import report
from pfedgate.cli import app
from pfedgate.config import code
from pfedgate.config.recipe import RecipeError, resolve
from pfedgate.core.modules import module
from pfedgate.deploy import flower
from pfedgate.deploy.node import Node
from pfedgate.deploy.starter import write_app
from pfedgate.runs import folder as runfolder

FILE = """
from pathlib import Path

import numpy as np
import torch
from torch import nn


def build(input_shape, classes, *, width=8, activation=nn.ReLU):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], width), activation(), nn.Linear(width, classes))


def load(rows, noise=0.1, seed=None):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6)).astype("float32")
    y = (x[:, 0] + noise * rng.normal(size=rows) > 0).astype(int)
    return {"x": x, "y": y, "owner": [f"c{at % 4}" for at in range(rows)]}


def gentle(output, labels):
    return nn.functional.cross_entropy(output, labels, reduction="none", label_smoothing=0.1)


def misses(output, labels):
    return output.argmax(-1).ne(labels).float()


misses.higher = False


def note(event):
    if event["event"] == "round":
        with Path("noted.txt").open("a") as file:
            file.write(f"{event['round']}\\n")


Path("ran.txt").touch()
"""
RECIPE = """
model = { name = "mine.py:build", width = 12 }
data = { name = "mine.py:load", rows = 120 }
algorithm = "fedavg"
task = { loss = "mine.py:gentle", metrics = ["mine.py:misses", "accuracy"] }
train = { rounds = 2, batch = 16 }
evaluate = { every = 1 }
run = { callbacks = ["mine.py:note"] }
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe and its code in a folder; another one is the working folder."""
    monkeypatch.setenv(code.FORBID, "0")
    (tmp_path / "own").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "own/mine.py").write_text(FILE)
    (tmp_path / "own/recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path / "work")
    code._module.cache_clear()
    return tmp_path / "own"


def test_a_recipe_may_name_code(place: Path) -> None:
    with pytest.warns(UserWarning, match=r"this recipe runs code: .*mine\.py"):
        result = pfedgate.run(place / "recipe.toml", out="run")
    assert result.metric.name == "misses"
    assert not result.metric.higher
    assert set(result.clients["c1"].metrics) >= {"misses", "accuracy", "val_misses"}
    misses, accuracy = (result.summary[name] for name in ("misses", "accuracy"))
    assert misses == pytest.approx(1 - accuracy)
    assert result.clients["c1"].model()[1].out_features == 12
    assert Path("noted.txt").read_text() == "1\n2\n"


@pytest.mark.filterwarnings("ignore:this recipe runs code")
def test_the_folder_holds_the_code_and_refuses_another_one(place: Path) -> None:
    before = pfedgate.run(place / "recipe.toml", out="run")
    digest = code.digest(place / "mine.py")
    assert f'name = "code/mine.py:build#{digest}"' in Path("run/config.toml").read_text()
    shutil.rmtree(place)
    shutil.move("run", "moved")
    code._module.cache_clear()
    loaded = pfedgate.load("moved")
    x = torch.randn(5, 6)
    assert torch.equal(loaded.clients["c2"].model()(x), before.clients["c2"].model()(x))
    again = pfedgate.run("moved/config.toml", out="again")
    assert again.summary["misses"] == before.summary["misses"]
    runfolder.extend(runfolder.load("moved"), 3)
    assert len(pfedgate.resume("moved").history) == 3
    code._module.cache_clear()
    changed = pfedgate.load("again").clients["c2"]
    Path("again/code/mine.py").write_text(FILE + "\n")
    with pytest.raises(RecipeError, match=rf"mine\.py has changed since the run began: .* not {digest}"):
        changed.model()


@pytest.mark.filterwarnings("ignore:this recipe runs code")
def test_looking_never_runs_it_and_a_switch_forbids_it(place: Path) -> None:
    pfedgate.run(place / "recipe.toml", out="run")
    Path("ran.txt").unlink()
    code._module.cache_clear()
    resolve(place / "recipe.toml").toml()
    report.write([Path("run")], Path("r.html"))
    told = CliRunner().invoke(app, ["--no-code", "run", str(place / "recipe.toml"), "--out", "other"])
    assert told.exit_code == 1
    assert "code is forbidden here (--no-code or PFEDGATE_NO_CODE)" in told.stderr
    assert not Path("other").exists()
    assert not Path("ran.txt").exists()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"model": "mine.py"}, "say which function of mine.py it is: mine.py:build"),
        ({"model": "mine.py:biuld"}, "unknown function 'biuld': did you mean 'build'"),
        ({"model": "none.py:build"}, r"no code in .*none\.py"),
        ({"model": {"name": "mine.py:build", "widht": 3}}, "unknown key 'widht': did you mean 'width'"),
        ({"data": "mine.py:load"}, "needs rows: set data.rows"),
        ({"run": {"callbacks": ["mine"]}}, "code is named FILE.py:FUNCTION"),
        ({"task": {"loss": "mine.py:gentel"}}, "unknown function 'gentel': did you mean 'gentle'"),
    ],
)
@pytest.mark.filterwarnings("ignore:this recipe runs code")
def test_mistakes_are_named(layer: dict[str, Any], message: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(RecipeError, match=message):
        pfedgate.run(layer, algorithm="fedavg")


@pytest.mark.filterwarnings("ignore:this recipe runs code")
def test_workers_load_it_themselves(place: Path) -> None:
    alone = pfedgate.run(place / "recipe.toml", run={"workers": 1, "callbacks": []})
    two = pfedgate.run(place / "recipe.toml", run={"workers": 2, "callbacks": []})
    assert two.summary["misses"] == alone.summary["misses"]


@pytest.mark.filterwarnings("ignore:this recipe runs code")
def test_an_app_for_flower_brings_the_code_and_the_tuned_settings(place: Path) -> None:
    (place / "recipe.tuned.toml").write_text("[tuned.fedavg.train]\nlr = 0.25\n")
    comment = "# names mine.py:build below\n"
    (place / "recipe.toml").write_text(comment + RECIPE)
    app = write_app("app", place / "recipe.toml")
    shutil.rmtree(place)
    text = (app / "pfedgate_app/recipe.toml").read_text()
    assert text.startswith(comment)
    digest = code.digest(app / "pfedgate_app/code/mine.py")
    assert f'"code/mine.py:build#{digest}"' in text
    recipe = flower.read(app / "pfedgate_app/recipe.toml")
    assert recipe.train.lr == 0.25
    node = Node(recipe, {"partition-id": 0, "num-partitions": 2, "state-dir": "state"})
    assert node.holding.clients == ["c0", "c2"]
    assert module(node.algorithm.task, node.algorithm.init_server(0))[1].out_features == 12
    (app / "pfedgate_app/code/mine.py").write_text(FILE + "\n")
    code._module.cache_clear()
    with pytest.raises(RecipeError, match="has changed since"):
        Node(recipe, node.config).holding  # noqa: B018


def test_who_starts_a_deployed_run_cannot_choose_code() -> None:
    with pytest.raises(RecipeError, match="code is named in the recipe that a node holds"):
        flower.read({"train": {"rounds": 1}}, {"set": "model.name=/tmp/x.py:build"})
