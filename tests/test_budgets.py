from __future__ import annotations

from pathlib import Path

import pytest

import pfedgate
from pfedgate import data
from pfedgate.engine.roster import Options, Roster, budgets

IDS = [f"c{at}" for at in range(10)]


def test_a_number_is_for_all() -> None:
    assert budgets(0.3, IDS) == [0.3] * 10
    assert budgets({"params": 0.5, "latency_ms": 8}, IDS)[3] == {"params": 0.5, "latency_ms": 8.0}


def test_a_list_is_in_order() -> None:
    assert budgets([0.1, {"flops": 0.2}], ["a", "b"]) == [0.1, {"flops": 0.2}]
    with pytest.raises(ValueError, match="2 budgets for 10 clients"):
        budgets([0.1, 0.2], IDS)


def test_a_mapping_is_by_id() -> None:
    assert budgets({"c1": 0.1, "default": 1}, ["c0", "c1"]) == [1.0, 0.1]
    with pytest.raises(ValueError, match="no budget for client 'c0'"):
        budgets({"c1": 0.1}, ["c0", "c1"])


@pytest.mark.parametrize("spec", [{0.5: 0.5, 0.1: 0.5}, {"0.5": 0.5, "0.1": "0.5"}])
def test_a_distribution_has_exact_counts_whatever_the_order(spec: dict[object, object]) -> None:
    given = budgets(spec, IDS, seed=1)
    assert sorted(given, key=str) == [0.1] * 5 + [0.5] * 5
    assert dict(zip(IDS[::-1], budgets(spec, IDS[::-1], seed=1), strict=True)) == dict(zip(IDS, given, strict=True))
    assert any(budgets(spec, IDS, seed=seed) != given for seed in range(2, 6))
    three = budgets({1.0: 0.1, 0.5: 0.9}, IDS)
    assert three.count(1.0) == 1


def test_a_table_of_devices(tmp_path: Path) -> None:
    table = tmp_path / "devices.csv"
    table.write_text("id,budget,params,latency_ms\na,0.5,,\nb,,0.3,12\ndefault,1,,\n")
    assert budgets(str(table), ["b", "a", "z"]) == [{"params": 0.3, "latency_ms": 12.0}, 0.5, 1.0]
    table.write_text("id,budget\na,1\na,2\n")
    with pytest.raises(ValueError, match="occurs twice"):
        budgets(table, ["a"])
    table.write_text("device,budget\na,1\n")
    with pytest.raises(ValueError, match="one of them 'id'"):
        budgets(table, ["a"])
    table.write_text("id,parms\na,1\n")
    with pytest.raises(ValueError, match="did you mean 'params'"):
        budgets(table, ["a"])


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), {}, {"params": 0}])
def test_wrong_values(wrong: object) -> None:
    with pytest.raises(ValueError, match="budget"):
        budgets(wrong, IDS)


def test_wrong_kinds() -> None:
    with pytest.raises(TypeError, match="number, list, mapping or path"):
        budgets(None, IDS)
    with pytest.raises(FileNotFoundError, match="CSV of devices"):
        budgets("nowhere.csv", IDS)


@pytest.mark.parametrize("extra", [[], [0.25]])
def test_a_list_of_budgets_reaches_held_out_clients_too(extra: list[float]) -> None:
    federation = data.load("digits", clients=5, novel=0.2)
    assert len(federation.novel) == 1
    options = Options(budget=[0.5, 0.6, 0.7, 0.8, *extra])
    trained = {card.id: card.budget for card in Roster.of(federation, "clients", options)}
    assert [trained[client] for client in federation.clients] == [0.5, 0.6, 0.7, 0.8]
    assert [card.budget for card in Roster.of(federation, "novel", options)] == (extra or [0.5])


def test_a_cap_on_the_upload_is_set_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.upload"):
        budgets({"params": 0.5, "upload": 0.4}, ["a"])


def test_a_misspelt_client_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="budget for 'ana', which is no client: did you mean 'anna'"):
        budgets({"ana": 0.3, "default": 1.0}, ["anna", "bert"])
    assert budgets({"carl": 0.3, "default": 1.0}, ["anna"], others=["carl"]) == [1.0]
    federation = data.load("digits", clients=5, novel=0.2)
    given = {federation.novel[0]: 0.3, "default": 0.5}
    assert {card.budget for card in Roster.of(federation, "clients", Options(budget=given))} == {0.5}
    assert [card.budget for card in Roster.of(federation, "novel", Options(budget=given))] == [0.3]


def test_methods_that_ignore_budgets_say_so() -> None:
    recipe = {"data": {"name": "digits", "clients": 4}, "train": {"rounds": 1}, "clients": {"budget": 0.3}}
    with pytest.warns(UserWarning, match=r"fedavg trains the whole model .* ignores clients.budget=0.3"):
        pfedgate.run(recipe, algorithm="fedavg")
