"""Cells: named by what is run, shared between studies, split over machines without loss, repeated by validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.studies import RECIPES, made_up

from pfedgate.core.version import RESULTS
from pfedgate.runs import folder as runfolder
from pfedgate.studies import paper
from pfedgate.studies.cells import Cell, version_of
from pfedgate.studies.declare import SMALL, TINY, columns_of, scale_of
from pfedgate.studies.outcome import Place
from pfedgate.studies.sweep import Campaign, _repeats, repeated, share


def campaign(scale: str = "tiny") -> Campaign:
    return Campaign(scale_of(scale), Path("nowhere"), recipes=RECIPES)


def keys(names: Sequence[str], scale: str = "tiny") -> list[str]:
    return [place.cell.key for name in names for place in campaign(scale).places(paper.get(name))]


def test_every_row_of_the_paper_is_declared() -> None:
    assert paper.names() == (
        "table1", "table2", "table3", "table4", "table5", "table6", "table8", "table9", "table10", "table11", "table12",
        "table13", "figure-clients", "figure-clusters", "figure-sparsity", "figure-convergence", "figure-gates",
        "pareto",
    )  # fmt: skip  # table 7 of the paper lists learning rates, which are the recipes' business
    methods = {row.method for row in paper.get("table1").rows}
    assert methods == {
        "local_only", "fedavg", "fedavg_ft", "pfedme", "lg_fedavg", "ditto", "fedem", "fedrep", "fedper", "fedmask",
        "heterofl", "pfedgate", "per_fedavg", "knn_per", "apfl",
    }  # fmt: skip  # the last three are not in the paper's
    with pytest.raises(ValueError, match="did you mean 'table1'"):
        paper.get("tabel1")


@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_every_cell_has_a_recipe(scale: str) -> None:
    for study in paper.STUDIES:
        for place in campaign(scale).places(study):
            assert place.cell.recipe.algorithm.name == place.row.method
            assert place.cell.recipe.train.rounds == scale_of(scale).settings["train.rounds"]
    budgets = [p.cell.recipe.clients.budget for p in campaign(scale).places(paper.get("table12"))]
    assert set(budgets) == {1.0, 0.5, 0.3, 0.1}


def test_studies_share_cells() -> None:
    first = set(keys(["table1"]))
    assert set(keys(["table9", "figure-convergence", "figure-clients", "figure-gates", "pareto", "table10"])) <= first
    assert set(keys(["table12"])) & first  # the column of the usual alpha
    assert len(first) == len(paper.get("table1").rows)  # no two rows are the same run


def test_the_key_is_what_is_run_and_nothing_else() -> None:
    recipe = campaign().places(paper.get("table1"))[1].cell.recipe
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


def test_a_cell_of_another_version_counts_only_when_asked(tmp_path: Path) -> None:
    cell = campaign().places(paper.get("table1"))[5].cell
    assert cell.recipe.algorithm.name == "ditto"
    old = tmp_path / "digits-ditto-0123-00000000"
    runfolder.create(old, cell.recipe)
    assert version_of(old) == 0
    assert cell.folder(tmp_path, any_version=True) == cell.own(tmp_path)  # not finished: no use
    (old / "summary.json").write_text("{}")
    assert cell.folder(tmp_path) == cell.own(tmp_path)
    assert cell.folder(tmp_path, any_version=True) == old
    other = replace(cell.recipe, train=replace(cell.recipe.train, lr=0.123))
    assert Cell(other).folder(tmp_path, any_version=True) != old
    same = old.rename(tmp_path / f"digits-ditto-0123-v{RESULTS}")  # a name from before an option was added
    assert cell.folder(tmp_path) == same


def test_a_new_option_at_its_default_is_the_same_run(tmp_path: Path) -> None:
    cell = campaign().places(paper.get("table1"))[5].cell
    lines = cell.recipe.toml(comments=False).splitlines()
    (tmp_path / "config.toml").write_text("\n".join(line for line in lines if not line.startswith("warmup")))
    assert cell.like(tmp_path)
    changed = replace(cell.recipe, train=replace(cell.recipe.train, warmup=3))
    assert not Cell(changed).like(tmp_path)


def test_machines_share_out_all_cells_once() -> None:
    places = [p for name in ("table1", "table3", "table9") for p in campaign().places(paper.get(name))]
    parts = [{p.cell.key for p in share(places, f"{at}/3")} for at in (1, 2, 3)]
    assert set().union(*parts) == {p.cell.key for p in places}
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert {p.row.method for p in share(places, "table3*fedem")} == {"fedem"}
    assert share(places, "") == places
    with pytest.raises(ValueError, match="4/3"):
        share(places, "4/3")
    with pytest.raises(ValueError, match=r"no cell is called so; there are .table1"):
        share(places, "nothing")


def test_the_best_on_validation_are_repeated() -> None:
    study = paper.get("table1")
    scores = {row.name: (0.9 if row.method == "pfedgate" else 0.5) - at / 1000 for at, row in enumerate(study.rows)}

    def best(scores: dict[str, float], count: int | None = 5) -> list[str]:
        return repeated(study, made_up(study, {row: {0: (s, s)} for row, s in scores.items()}), "data", count)

    gates = sorted((name for name in scores if name.startswith("pFedGate")), key=lambda name: -scores[name])
    assert best(scores)[:3] == gates[:3]  # and not five: the best baselines need a deviation as well
    assert set(best(scores)[3:]) == {"Local", "FedAvg"}
    assert paper.STILL.name not in best(scores | {paper.STILL.name: 1.0})
    assert best(scores | {"FedAvg": 0.0})[-1] == "FedAvg"  # always
    assert best(scores, None) == [row.name for row in study.rows]
    assert best({"Local": 1.0}) == []  # not before all are there


def test_a_seed_that_is_there_stays_when_its_row_is_no_longer_repeated(tmp_path: Path) -> None:
    """New rows may push others from the best: what was run of them is not thrown away."""
    mine, study = Campaign(TINY, tmp_path), paper.get("table1")
    assert {place.seed for place in mine.all_places(study)} == {0}
    kept = next(place for place in mine.places(study, 1) if place.row.name == "Ditto")
    folder = kept.cell.folder(mine.root)
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    assert [place.row.name for place in mine.all_places(study) if place.seed == 1] == ["Ditto"]


def test_a_column_without_data_is_left_out_or_replaced() -> None:
    table = paper.get("table1")
    assert [c.name for c, _ in columns_of(table, SMALL, ["cifar10"])] == ["CIFAR-10"]
    assert [c.name for c, _ in columns_of(paper.get("table3"), TINY)] == [
        "digits, all clients", "digits, 20 %",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="unknown data 'cifar'"):
        columns_of(table, SMALL, ["cifar"])


def test_names_of_public_data_are_the_worlds() -> None:
    places: list[Place] = campaign("small").places(paper.get("table6"))
    public = {(p.column.data, p.row.name): p.cell.recipe.algorithm.options.get("public") for p in places}
    assert public["cifar10", "FedMD, far"] == "femnist"
    assert public["femnist", "FedMD, far"] == "cifar10"


def test_tuned_settings_hold_but_rows_keep_what_they_are(tmp_path: Path) -> None:
    tuned = '[tuned.heterofl]\nalgorithm.level = "b"\ntrain.lr = 0.08\n[tuned.fedmask]\nalgorithm.density = 0.3\n'
    for name in ("cifar10-quick.toml", "femnist-quick.toml"):
        untuned = (RECIPES / name).read_text().partition("[tuned.")[0]
        (tmp_path / name).write_text(f"{untuned}\n{tuned}")
    mine = Campaign(SMALL, tmp_path, ("cifar10",), recipes=tmp_path)
    recipes = {place.row.name: place.cell.recipe for place in mine.places(paper.get("table1"))}
    assert recipes["HeteroFL, s = 0.3"].train.lr == 0.08
    assert recipes["HeteroFL, s = 0.3"].algorithm.options["level"] is None
    assert recipes["HeteroFL, s = 0.3"].clients.budget == 0.3
    assert recipes["FedMask, s = 0.5"].algorithm.options["density"] == 0.5


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


def test_estimates_count_the_seeds_to_come() -> None:
    places = _repeats(paper.get("table1"), campaign("small"))
    assert {place.seed for place in places} == {0, 1, 2}
    assert len({place.row.name for place in places if place.seed}) == 6
