"""Recipes: layers, names, types, and that what is written reads back."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfedgate import algorithms
from pfedgate.config import options as schema
from pfedgate.config import toml
from pfedgate.config.options import FIXED, SECTIONS, options_of
from pfedgate.config.recipe import GONE, RENAMED, RecipeError, resolve, settings
from pfedgate.core.types import Optim, Schedule
from pfedgate.engine.roster import Options

RECIPES = [
    path for path in sorted((Path(__file__).parent.parent / "recipes").glob("*.toml")) if ".tuned" not in path.name
]


@pytest.mark.parametrize("name", algorithms.names())
def test_a_resolved_recipe_reads_back_the_same(name: str) -> None:
    recipe = resolve({"algorithm": name, "train": {"clip": "none", "steps": 3}, "clients.budget": {"0.5": 1.0}})
    assert recipe.train.clip is None
    for text in (recipe.toml(), recipe.toml(comments=False)):
        assert resolve(toml.parse(text)) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_of_the_repository_resolve(path: Path) -> None:
    assert resolve(path).data.name in path.stem


def test_there_are_recipes() -> None:
    assert {"digits", "cifar10-quick", "femnist-quick"} <= {path.stem for path in RECIPES}


def test_no_recipe_means_the_digits_recipe() -> None:
    assert resolve(RECIPES[[path.stem for path in RECIPES].index("digits")]) == resolve()
    assert (resolve().data.name, resolve().algorithm.name) == ("digits", "pfedgate")


def test_defaults_are_those_of_the_library() -> None:
    recipe = resolve({"data": "cifar10"})
    assert (recipe.optim(), recipe.schedule(), recipe.options()) == (Optim(), Schedule(), Options())


@pytest.mark.parametrize("section", FIXED)
def test_every_default_has_a_reason(section: str) -> None:
    said = {
        "deploy.nodes": 2,
        "task.metrics": ["loss"],
        "fleet.devices": "phones",
        "server.optimiser": "adam",
        "privacy.level": "client",
        "attack.kind": "noise",
    }
    text = resolve(said).toml()
    for option in options_of(section).values():
        assert len(option.why) > 8, f"{section}.{option.name}"
        assert option.why in text


def test_later_layers_go_over_earlier_ones() -> None:
    recipe = resolve({"train": {"rounds": 7, "lr": 0.3}}, {"train.rounds": 8}, settings(["train.rounds=9"]))
    assert (recipe.train.rounds, recipe.train.lr) == (9, 0.3)


def test_tuned_settings_hold_for_their_algorithm_only_and_below_settings() -> None:
    base: dict[str, Any] = {
        "algorithm": {"name": "pfedgate", "gate_lr": 0.7},
        "train": {"lr": 0.2},
        "tuned": {"ditto": {"train": {"lr": 0.4, "batch": 9}, "algorithm": {"lam": 0.3}}},
    }
    assert resolve(base).train.lr == 0.2
    assert resolve(base).algorithm.options["gate_lr"] == 0.7
    ditto = resolve(base, {"algorithm": "ditto"}, {"train.batch": 8})
    assert (ditto.train.lr, ditto.train.batch, ditto.algorithm.options["lam"]) == (0.4, 8, 0.3)


def test_another_algorithm_forgets_the_options_of_the_first_and_other_data_keeps_them() -> None:
    recipe = resolve(
        {"algorithm": {"name": "fedprox", "mu": 9.0}, "data": {"name": "cifar10", "clients": 7}},
        {"algorithm": "mean_reg_mtl", "data": "cifar100"},
    )
    assert recipe.algorithm.options["mu"] != 9.0
    assert recipe.data.options["clients"] == 7
    assert recipe.model.name == "cnn_cifar100"


WRONG = [
    ({"trian": {}}, r"unknown section 'trian': did you mean 'train'"),
    ({"train": {"learning_rate": 1}}, r"\[train\] unknown key 'learning_rate'.*Known: batch, betas"),
    ({"train": {"roundz": 1}}, r"did you mean 'rounds'"),
    ({"rounds": 3}, r"'rounds' is set as train\.rounds"),
    ({"train": {"novel": 0.2}}, r"\[train\] has no key 'novel': it belongs in \[clients\]"),
    ({"train": 3}, r"\[train\] is a section"),
    ({"train": {"rounds": 2.5}}, r"train\.rounds must be a whole number, got 2\.5"),
    ({"train": {"rounds": True}}, r"train\.rounds must be a whole number, got True"),
    ({"train": {"lr": "fast"}}, r"train\.lr must be a number, got 'fast'"),
    ({"train": {"clip": "x"}}, r'train\.clip must be a number or "none"'),
    ({"train": {"betas": [0.9]}}, r"train\.betas must be a list of 2 values"),
    ({"train": {"momentum": float("nan")}}, r"train\.momentum must be a number, got nan"),
    ({"train": {"eps": float("-inf")}}, r"train\.eps must be a number, got -inf"),
    ({"train": {"momentum": 1.5}}, "momentum and betas are from 0 to below 1"),
    ({"train": {"eps": 0.0}}, "eps is more than 0"),
    ({"train": {"lr": float("inf")}}, "lr must not be negative, and be finite"),
    ({"train": {"warmup": -5}}, "warmup counts rounds, from 0; got -5"),
    ({"train": {"milestones": [2.0]}}, "milestones are shares"),
    ({"run": {"workers": 100_000}}, r'run\.workers must be "auto" or a whole number from 1 to 1024, got 100000'),
    ({"train": {"optimiser": "sdg"}}, r"unknown optimiser 'sdg': did you mean 'sgd'"),
    ({"train": {"schedule": "cosin"}}, r"did you mean 'cosine'"),
    ({"algorithm": "fedavgg"}, r"\[algorithm\] unknown algorithm 'fedavgg': did you mean 'fedavg'"),
    ({"algorithm": {"gate_lrr": 1.0}}, r"\[algorithm\] unknown key 'gate_lrr': did you mean 'gate_lr'"),
    ({"algorithm": {"gate": {"shfit": True}}}, r"\[algorithm\] unknown key 'gate\.shfit': did you mean 'gate\.shift'"),
    ({"algorithm": {"gate": True}}, r"algorithm\.gate is a table of settings, got True"),
    ({"algorithm": {"gate_lr": "x"}}, r"algorithm\.gate_lr must be a number"),
    ({"model": "resnett"}, r"\[model\] unknown model 'resnett': did you mean 'resnet'"),
    ({"model": {"name": "mlp", "hiden": [3]}}, r"did you mean 'hidden'"),
    ({"model": {"name": "mlp", "hidden": ["a"]}}, r"model\.hidden must be a whole number"),
    ({"data": "cifra10"}, r"\[data\] unknown data set 'cifra10': did you mean 'cifar10'"),
    ({"data": {"alhpa": 1.0}}, r"did you mean 'alpha'"),
    ({"data": "folder"}, r"folder needs path: set data\.path"),
    ({"run": {"device": "gpu"}}, r"unknown device 'gpu'"),
    ({"run": {"workers": 0}}, r'run\.workers must be "auto" or a whole number from 1'),
    ({"clients": {"fraction": 1.5}}, r"clients\.fraction must be a share"),
    ({"evaluate": {"points": ["before"]}}, r"points are after_broadcast"),
    ({"tuned": {"fedavgg": {}}}, r"\[tuned\.fedavgg\].*did you mean 'fedavg'"),
    ({"tuned": {"pfedgate": {"data": {"name": "cifar10"}}}}, r"\[tuned\.pfedgate\] may not change data\.name"),
]


@pytest.mark.parametrize(("layer", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_mistakes_are_named(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        resolve(layer)


def test_settings_are_toml_and_plain_words_need_no_quotes() -> None:
    given = ["algorithm.name=fedavg", "train.milestones=[0.3, 0.6]", "train.lr=.5", 'clients.budget={"0.5" = 1.0}']
    assert settings(given) == {
        "algorithm": {"name": "fedavg"},
        "train": {"milestones": [0.3, 0.6], "lr": 0.5},
        "clients": {"budget": {"0.5": 1.0}},
    }
    for wrong in ("train.rounds", "rounds=3", "x=3", "train.betas=[1", 'data.name="x'):
        with pytest.raises(RecipeError):
            settings([wrong])


def test_a_distribution_of_budgets_may_have_bare_keys() -> None:
    recipe = resolve(settings(["clients.budget={0.5 = 0.5, 0.1 = 0.5}"]))
    assert recipe.clients.budget == {"0.5": 0.5, "0.1": 0.5}


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = resolve({"data": {"data_dir": "copies"}, "clients": {"budget": "devices.csv"}})
    assert recipe.data.options["data_dir"] == str(tmp_path / "copies")
    assert recipe.clients.budget == str(tmp_path / "devices.csv")


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train\nrounds = 3")
    with pytest.raises(RecipeError, match=r"a\.toml is not valid TOML"):
        resolve(tmp_path / "a.toml")
    with pytest.raises(RecipeError, match="no recipe"):
        resolve(tmp_path / "b.toml")


def test_sections_are_known_to_every_table() -> None:
    said = {
        "deploy.nodes": 3,
        "task.kind": "language",
        "fleet.devices": "phones",
        "server.optimiser": "adam",
        "privacy.level": "client",
        "attack.kind": "noise",
    }
    assert list(resolve(said).tables()) == list(SECTIONS)
    assert not {"deploy", "fleet", "privacy", "server", "task"} & set(
        resolve().tables()
    )  # what a run in one place need not know


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_what_is_written_as_toml_reads_back(value: Any) -> None:
    if "\r" not in str(value):
        assert toml.parse(f"a = {toml.dump(value)}") == {"a": value}


OLD = {"shift": True, "bias": 0.3, "spread": 0.2, "predict": "client", "half": False, "own": [], "deviations": []}


def test_keys_of_earlier_versions_are_read_and_said() -> None:
    layer = {"algorithm": {"name": "pfedgate", **OLD}, "train": {"persist_momentum": False}}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        recipe = resolve(layer)
    words = " ".join(str(warning.message) for warning in said)
    for part in ("shift is gate.shift now", "half is gone", "persist_momentum is gone"):
        assert part in words
    gate = {"shift": True, "initial_bias": 0.3, "initial_scale": 0.2, "scope": "client"}
    assert recipe == resolve({"algorithm": {"name": "pfedgate", "gate": gate}})


@pytest.mark.parametrize(("place", "keys"), GONE.items())
def test_a_dropped_key_with_another_value_is_refused_with_the_reason(place: str, keys: dict[str, Any]) -> None:
    section, _, method = place.partition(".")
    name = {"name": method} if method else {}
    for key, (default, reason) in keys.items():
        with pytest.raises(RecipeError, match=rf"{section}\.{key} = .* no longer possible: {re.escape(reason)}"):
            resolve({section: {**name, key: not default if isinstance(default, bool) else "other"}})


def test_new_names_of_old_keys_exist() -> None:
    for place, keys in RENAMED.items():
        options = options_of(*place.split("."))
        assert set(keys.values()) <= set(options)
        assert not (set(keys) | set(GONE.get(place, {}))) & set(options)


def test_settings_of_the_gate_go_over_each_other_one_by_one() -> None:
    base = {"algorithm": {"gate": {"shift": True, "pool": 2}}}
    options = resolve(base, settings(["algorithm.gate.pool=none", "algorithm.gate.paths=1"])).algorithm.options
    assert (options["gate.shift"], options["gate.pool"], options["gate.paths"]) == (True, None, 1)


def test_comments_beside_and_above_fields_are_read() -> None:
    from pfedgate.gating.gate.config import GateConfig

    assert schema.comments(GateConfig)["weight_range"].startswith("The r above: M stays in")
    assert schema.comments(Optim)["clip"] == "L2 norm of the gradient, for every method alike"
