"""Cells: named by what is run, shared between studies, split over machines without loss, repeated by validation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.studies import RECIPES, made_up

from pfedgate import algorithms
from pfedgate.studies import paper
from pfedgate.studies.cells import Cell
from pfedgate.studies.declare import SMALL, TINY, columns_of, scale_of
from pfedgate.studies.outcome import Place
from pfedgate.studies.sweep import TUNED_WITH, Campaign, repeated, share


def campaign(scale: str = "tiny", out: Path = Path("nowhere")) -> Campaign:
    return Campaign(scale_of(scale), out, recipes=RECIPES)


def searched(out: Path, scale: str = "small", **best: object) -> Campaign:
    """A campaign all of whose searches have ended, each with these settings."""
    mine = campaign(scale, out)
    for study in paper.STUDIES:
        for tuning in mine.tunings(study):
            tuning.file.parent.mkdir(parents=True, exist_ok=True)
            tuning.file.write_text(json.dumps({"best": best}))
    return mine


def keys(names: Sequence[str], scale: str = "tiny") -> list[str]:
    return [place.cell.key for name in names for place in campaign(scale).places(paper.get(name))]


def test_every_method_is_in_both_tables() -> None:
    """Those that tune before they predict have no model as received, and distillation needs public data."""
    everybody = {*algorithms.names()} - {"fedmd"}
    rows = {name: {row.method for row in paper.get(name).rows} for name in ("table-a", "table-b")}
    assert rows["table-b"] == everybody
    assert rows["table-a"] == {name for name in everybody if not algorithms.get(name).tunes}
    with pytest.raises(ValueError, match="did you mean 'table1'"):
        paper.get("tabel1")


@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_every_cell_has_a_recipe(scale: str, tmp_path: Path) -> None:
    mine = searched(tmp_path, scale)
    for study in paper.STUDIES:
        for place in mine.places(study):
            assert place.cell.recipe.algorithm.name == place.row.method
            assert place.cell.recipe.train.rounds == scale_of(scale).settings["train.rounds"] * place.row.longer
    budgets = [p.cell.recipe.clients.budget for p in mine.places(paper.get("table12"))]
    assert set(budgets) == {1.0, 0.5, 0.3, 0.1}


def test_studies_share_cells() -> None:
    first = set(keys(["table-b"]))
    assert set(keys(["table-a", "table1", "table9", "figure-convergence", "figure-clients", "pareto"])) <= first
    assert set(keys(["table12"])) & first  # the column of the usual alpha


def test_an_option_at_its_default_is_no_part_of_the_name() -> None:
    recipe = campaign().places(paper.get("table9"))[0].cell.recipe
    assert recipe.train.warmup == 0
    assert "warmup" not in Cell(recipe).tables["train"]
    assert Cell(replace(recipe, train=replace(recipe.train, warmup=3))).tables["train"]["warmup"] == 3


def test_rows_wait_for_their_search_and_then_take_its_settings(tmp_path: Path) -> None:
    study, mine = paper.get("table-a"), campaign("small", tmp_path)
    assert mine.places(study) == []
    assert len({tuning.folder for tuning in mine.tunings(study)}) == len(mine.tunings(study))
    places = searched(tmp_path, **{"train.lr": 0.08}).places(study)
    recipes = {p.row.name: p.cell.recipe for p in places if p.column.name == "CIFAR-10"}
    assert {row.name for row in study.rows} == set(recipes)
    assert {recipe.train.lr for recipe in recipes.values()} == {0.08}
    assert recipes["HeteroFL, s = 0.3"].algorithm.options["level"] is None
    assert recipes["HeteroFL, s = 0.3"].clients.budget == 0.3
    assert recipes[paper.STILL[0].name].algorithm.options["gate_lr"] == 0
    shape = recipes["FedAvg, in the shape as s = 0.3 of all"].model.options["widths"]
    assert len(shape) == 4
    assert shape < (32, 64, 120, 84)


def test_searches_are_on_another_seed_and_leave_alone_what_rows_hold_fast() -> None:
    tunings = {t.name: t for t in campaign("small").tunings(paper.get("table-b"))}
    assert {"fedavg", "fedavg_published", "fedrep_10_5", "pfedgate_paper_1"} <= set(tunings)
    assert {*paper.PUBLISHED} <= {*tunings["fedavg_published"].fixed}
    assert not tunings["fedper"].fixed
    for name, settings in TUNED_WITH.items():
        assert {*settings} <= {*tunings[name].fixed}
    assert {t.recipe.train.rounds for t in tunings.values()} == {SMALL.trial_rounds}
    assert {t.trials for t in tunings.values()} == {12}


def test_the_key_is_what_is_run_and_nothing_else() -> None:
    recipe = campaign().places(paper.get("table-a"))[1].cell.recipe
    same = replace(recipe, run=replace(recipe.run, workers=2, device="cpu", checkpoint_every=7))
    assert Cell(same).key == Cell(recipe).key
    elsewhere = replace(recipe, data=replace(recipe.data, options={**recipe.data.options, "data_dir": "/x"}))
    assert Cell(elsewhere).key == Cell(recipe).key
    for other in (
        replace(recipe, run=replace(recipe.run, seed=1)),
        replace(recipe, train=replace(recipe.train, lr=0.2)),
        replace(recipe, clients=replace(recipe.clients, fraction=0.5)),
    ):
        assert Cell(other).key != Cell(recipe).key


def test_a_seed_that_is_there_stays_when_its_row_is_no_longer_repeated(tmp_path: Path) -> None:
    """New rows may push others from the best: what was run of them is not thrown away."""
    mine, study = Campaign(TINY, tmp_path), paper.get("table-a")
    assert {place.seed for place in mine.all_places(study)} == {0}
    kept = next(place for place in mine.places(study, 1) if place.row.name == "Ditto")
    folder = mine.folder(kept)
    folder.mkdir(parents=True)
    for name in ("summary.json", "look-points.json"):
        (folder / name).write_text("{}")
    assert [place.row.name for place in mine.all_places(study) if place.seed == 1] == ["Ditto"]


def test_a_column_without_data_is_left_out_or_replaced() -> None:
    table = paper.get("table-a")
    assert [c.name for c, _ in columns_of(table, SMALL, ["cifar10"])] == ["CIFAR-10"]
    assert [c.name for c, _ in columns_of(paper.get("table3"), TINY)] == [
        "digits, all clients", "digits, 20 %",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="unknown data 'cifar'"):
        columns_of(table, SMALL, ["cifar"])


def test_names_of_public_data_are_the_worlds(tmp_path: Path) -> None:
    places: list[Place] = searched(tmp_path).places(paper.get("table6"))
    public = {(p.column.data, p.row.name): p.cell.recipe.algorithm.options.get("public") for p in places}
    assert public["cifar10", "FedMD, far"] == "femnist"
    assert public["femnist", "FedMD, far"] == "cifar10"


def test_all_at_small_scale_is_what_two_cores_can_do() -> None:
    def left(asked: Sequence[str], scale: str = "small") -> set[str]:
        return set(paper.names()) - {study.name for study in paper.select(asked, scale_of(scale))}

    for asked in (["all"], paper.names()):
        with pytest.warns(UserWarning, match="all at scale small is without table6 and table11"):
            assert left(asked) == {"table6", "table11"}
    with pytest.warns(UserWarning, match="is without table11, .* reproduce table11 --scale small"):
        assert left(["all", "table6"]) == {"table11"}
    assert not left(["all"], "tiny")
    assert not left(["all"], "paper")
    assert paper.select(["table6"], SMALL) == [paper.get("table6")]


def test_machines_share_out_all_cells_once() -> None:
    places = [p for name in ("table6", "table3", "table9") for p in campaign().places(paper.get(name))]
    labels = [(p.label, p.cell.key) for p in places]
    parts = [share(labels, f"{at}/3") for at in (1, 2, 3)]
    assert set().union(*parts) == {p.cell.key for p in places} == share(labels, "")
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert share(labels, "table3*fedem") == {p.cell.key for p in places if p.row.name == "FedEM"}
    with pytest.raises(ValueError, match="4/3"):
        share(labels, "4/3")
    with pytest.raises(ValueError, match=r"no cell is called so; there are .table6"):
        share(labels, "nothing")


def test_rows_near_the_best_on_validation_are_repeated() -> None:
    study = paper.get("table9")
    scores = {row.name: 0.5 + at / 100 for at, row in enumerate(study.rows)}
    outcomes = made_up(study, {row: {0: (s, s)} for row, s in scores.items()})
    last = [row.name for row in study.rows][-3:]
    assert repeated(outcomes, "data", 0.025) == ["FedAvg", *last]
    assert repeated(outcomes, "data", None) == [row.name for row in study.rows]
    assert repeated(made_up(study, {"FedEM": {0: (1.0, 1.0)}}), "data", 0.025) == []  # not before all are there
