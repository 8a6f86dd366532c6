"""Running from Python: recipes become plans, folders can be read back, objects can stand in for names."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pfedgate import data, experiment
from pfedgate.algorithms.pfedgate.personal import Setting, workspace
from pfedgate.config.recipe import RecipeError, resolve
from pfedgate.core.state import equal
from pfedgate.core.types import CPU, Example
from pfedgate.experiment import plan, recipe_of, resume, run
from pfedgate.runs import folder as runfolder
from pfedgate.runs.environment import environment, other_bits

# The networks here are so small that a gate is large beside them.
pytestmark = pytest.mark.filterwarnings("ignore:the gate has")

TINY: dict[str, Any] = {
    "data": {"name": "digits", "clients": 5},
    "model": {"name": "mlp", "hidden": [8]},
    "train": {"rounds": 3, "batch": 64},
    "clients": {"novel": 0.2},
    "evaluate": {"every": 2},
}


def own_data() -> data.Federation:
    x = np.random.default_rng(0).normal(size=(120, 6)).astype(np.float32)
    return data.from_arrays(x, (x[:, 0] > 0).astype(np.int64), owners=["ann", "bob", "eve"] * 40)


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, runfolder.Run]:
    path = tmp_path_factory.mktemp("runs") / "tiny"
    return run(TINY, algorithm="local_only", out=path), runfolder.load(path)


def test_a_folder_holds_what_the_result_holds(finished: tuple[Any, runfolder.Run]) -> None:
    result, found = finished
    assert found.metrics == result.history
    assert found.finished
    assert found.summary["accuracy"] == result.summary["accuracy"]
    assert [r["round"] for r in found.metrics] == [1, 2, 3]
    assert found.curve("accuracy") == [
        (r["round"], r["after_broadcast"]["accuracy"]) for r in result.history if "after_broadcast" in r
    ]
    assert len(found.curve("loss", point="none")) == 3
    with pytest.raises(KeyError, match="did you mean 'accuracy'"):
        found.curve("acuracy")
    assert found.seconds > 0


def test_clients_have_rows_of_numbers(finished: tuple[Any, runfolder.Run]) -> None:
    result, found = finished
    rows = {(row["client"], row["point"]): row for row in found.clients}
    assert len(rows) == 5
    for score in [*result.scores, *result.novel]:
        row = rows[score.client, score.point]
        assert (row["accuracy"], row["n_test"]) == (score.test.accuracy, score.test.n)
    assert {point for _, point in rows} == {"after_broadcast", "novel"}


def test_state_can_be_read_back(finished: tuple[Any, runfolder.Run]) -> None:
    result, found = finished
    store = found.store()
    assert store.clients() == result.store.clients() != []
    for client in store.clients():
        state, kept = store.get(client), result.store.get(client)
        assert state is not None
        assert equal(state, kept)
    assert equal(found.server(), result.server)
    assert found.store("best").clients() == store.clients()
    with pytest.raises(ValueError, match="unknown state 'bets': did you mean 'best'"):
        found.server("bets")


def test_the_recipe_in_a_folder_repeats_the_run(finished: tuple[Any, runfolder.Run], tmp_path: Path) -> None:
    result, found = finished
    again = run(found.path / "config.toml", out=tmp_path / "again")
    assert again.history == result.history
    files = [path / "metrics.jsonl" for path in (found.path, tmp_path / "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert run(found.recipe).history == result.history


def test_the_environment_is_noted_at_every_start(finished: tuple[Any, runfolder.Run]) -> None:
    _, found = finished
    before = len(found.environments)
    metrics = (found.path / "metrics.jsonl").read_bytes()
    resume(found.path)
    assert len(found.environments) == before + 1
    told = found.environments[-1]
    assert told["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]  # a wheel may not tell its build
    assert told["machine"]["cores"] >= 1
    assert (found.path / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(("part", "name"), [("machine", "vectors"), ("packages", "torch")])
def test_going_on_where_rounding_differs_is_told(
    finished: tuple[Any, runfolder.Run], tmp_path: Path, part: str, name: str
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(finished[1].path, moved)
    noted = json.loads((moved / runfolder.ENVIRONMENT).read_text(encoding="utf-8"))
    told = noted[-1][part].pop(name)
    assert told

    def going_on(then: str | None) -> list[str]:
        noted[-1][part] |= {} if then is None else {name: then}
        (moved / runfolder.ENVIRONMENT).write_text(json.dumps(noted), encoding="utf-8")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resume(moved)
        return [str(warning.message) for warning in caught if "goes on elsewhere" in str(warning.message)]

    assert not going_on(None)  # a folder of an older version does not say
    assert not going_on(told)
    (warning,) = going_on("another")
    assert f"{name} another then, {told} here" in warning


def test_a_limit_on_vector_instructions_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    before = environment()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX")
    assert other_bits(before, environment()) == [
        f"vectors {before['machine']['vectors']} then, {before['machine']['vectors']}, oneDNN at most AVX here"
    ]


def test_a_folder_is_not_overwritten(finished: tuple[Any, runfolder.Run]) -> None:
    with pytest.raises(FileExistsError, match="already holds a run: `pfedgate resume"):
        run(TINY, out=finished[1].path)


def test_a_run_can_be_made_longer_and_ends_as_if_it_had_been(tmp_path: Path) -> None:
    short = runfolder.create(tmp_path / "short", resolve(TINY, {"algorithm": "fedavg", "evaluate.every": 1}))
    resume(short.path)
    with pytest.raises(ValueError, match="has 3 rounds already"):
        runfolder.extend(short, 2)
    runfolder.extend(short, 5)
    assert not short.finished
    longer = run(TINY, algorithm="fedavg", evaluate={"every": 1}, train={"rounds": 5})
    assert resume(short.path).history == longer.history
    assert short.recipe.train.rounds == 5


def test_a_line_being_written_is_not_read(tmp_path: Path) -> None:
    found = runfolder.create(tmp_path / "a", resolve(TINY))
    (found.path / "metrics.jsonl").write_text(json.dumps({"round": 1}) + '\n{"round": ')
    assert found.metrics == [{"round": 1}]
    assert (found.clients, found.summary, found.timing) == ([], {}, [])
    with pytest.raises(FileNotFoundError, match="no last state yet"):
        found.server()
    with pytest.raises(FileNotFoundError, match="holds no run"):
        runfolder.load(tmp_path)


@pytest.mark.parametrize("model", [small_model, small_model()], ids=["function", "module"])
def test_own_data_and_own_model(model: Any, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    result = run(
        data=own_data(),
        model=model,
        algorithm="fedavg",
        train={"rounds": 2, "lr": 0.5},
        out=tmp_path / "own",
        callbacks=[events.append],
    )
    assert [event["event"] for event in events] == ["start", "round", "round", "end"]
    assert {score.client for score in result.scores} == {"ann", "bob", "eve"}
    with pytest.raises(RecipeError, match=r"data was a Python object: give the same again"):
        resume(tmp_path / "own")
    again = resume(tmp_path / "own", data=own_data(), model=model)
    assert equal(again.server, result.server)


def test_a_pretrained_module_keeps_its_weights() -> None:
    module = small_model()
    made = run(data=own_data(), model=module, algorithm="fedavg", train={"rounds": 1, "lr": 0.0})
    for name, value in module.state_dict().items():
        torch.testing.assert_close(made.server[name], value)


def test_own_data_with_a_model_by_name_gets_a_fitting_one() -> None:
    assert recipe_of(data=own_data()).model.name == "mlp"
    photos = data.from_arrays(np.zeros((30, 20, 20, 3), np.uint8), [0, 1] * 15, owners=["a", "b", "c"] * 10)
    assert recipe_of(data=photos).model.name == "cnn_cifar10"
    assert recipe_of(None, {"model": "resnet"}, data=photos).model.name == "resnet"
    over = recipe_of({"data": {"name": "cifar10", "alpha": 3.0}}, data=photos)
    assert over.data.name == "given"


def test_objects_must_fit_the_recipe() -> None:
    with pytest.raises(RecipeError, match="names its own data, 'digits'"):
        plan(resolve(TINY), data=own_data())
    with pytest.raises(TypeError, match="model is a name, a torch module or a function"):
        run(data=own_data(), model=3)


def test_the_example_is_nobodys_data() -> None:
    examples = [plan(resolve(TINY, {"data.seed": seed})).algorithm.task.example for seed in (0, 1)]
    assert examples[0] == examples[1] == Example((64, 1, 8, 8), torch.float32)


def test_planning_a_recipe_again_traces_nothing_again() -> None:
    recipe = resolve({**TINY, "model": {"name": "cnn_digits"}})
    tasks = [plan(recipe).algorithm.task for _ in range(3)]
    assert len({id(workspace(task.model, task.inputs, Setting(), CPU)) for task in tasks}) == 1


def test_the_seed_of_the_run_is_that_of_the_partition_unless_told_otherwise() -> None:
    def sizes(**layer: Any) -> list[int]:
        made = plan(resolve(TINY, layer)).federation
        return [made.part(client, "train").n for client in made.clients]

    assert sizes(run={"seed": 1}) != sizes(run={"seed": 2})
    assert sizes(run={"seed": 1}, data={"seed": 5}) == sizes(run={"seed": 2}, data={"seed": 5})


def test_workers_are_started_only_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(3)), raising=False)
    assert plan(resolve(TINY)).workers == 1
    assert plan(resolve(TINY, {"train.rounds": 10**9})).workers == 3
    assert plan(resolve(TINY, {"run.workers": 2})).workers == 2


def test_budgets_reach_the_cards_and_nothing_is_written_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "devices.csv").write_text("id,budget\ndefault,0.7\n")
    seen = plan(resolve(TINY, {"clients.budget": "devices.csv"})).options.budget
    assert seen == str(tmp_path / "devices.csv")
    assert experiment.run(TINY, algorithm="fedavg", clients={"budget": seen}).summary["clients"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["devices.csv"]
