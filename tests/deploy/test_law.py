"""The law: a run over a grid leaves the very bits that a run in one process leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.fakes import TABLES, deployed
from tests.support.states import private_of_nodes

from pfedgate import algorithms, experiment
from pfedgate.core.state import equal
from pfedgate.core.types import DataShape
from pfedgate.deploy import flower
from pfedgate.deploy.messages import NodeInfo, Parcel
from pfedgate.deploy.node import Node

pytest.importorskip("flwr", reason="needs the extra `flower`")


@pytest.mark.filterwarnings("ignore:.* ignores clients.budget")
@pytest.mark.parametrize("name", algorithms.names())
def test_the_deployed_result_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    tables = {**TABLES, "algorithm": {"name": name}}
    there, _, _ = deployed(tmp_path, tables)
    here = experiment.run(tables)
    assert equal(there.server, here.server)
    assert there.history == here.history
    assert (there.scores, there.novel) == (here.scores, here.novel)
    assert here.store is not None
    kept = private_of_nodes(tmp_path)
    assert sorted(kept) == here.store.clients()
    assert all(equal(kept[client], here.store.get(client) or {}) for client in kept)


@pytest.mark.parametrize("policy", ["deadline", "tiered", "asynchronous"])
def test_policies_are_the_same_on_a_grid(policy: str, tmp_path: Path) -> None:
    fleet = {"devices": "phones", "policy": policy, "deadline": 0.5, "tiers": 2, "buffer": 2}
    tables = {**TABLES, "algorithm": {"name": "pfedgate"}, "fleet": fleet}
    there, _, _ = deployed(tmp_path, tables)
    here = experiment.run(tables)
    assert equal(there.server, here.server)
    assert there.history == here.history
    assert all(record["virtual_seconds"] > 0 for record in here.history)


def test_private_states_are_in_no_message(tmp_path: Path) -> None:
    _, grid, _ = deployed(tmp_path, {**TABLES, "algorithm": {"name": "pfedgate"}})
    kept = private_of_nodes(tmp_path)
    needles = [
        value.numpy().tobytes() for s in kept.values() for value in s.values() if value.numel() > 3 and value.any()
    ]
    assert len(needles) > 4
    sent = b"".join(body for _, _, parcel in grid.traffic for body in parcel.bodies)
    assert len(sent) > 10_000
    assert not [needle for needle in needles if needle in sent]


def test_a_node_brings_its_own_budget(tmp_path: Path) -> None:
    configs = {at: {"partition-id": at, "num-partitions": 3, **({"budget": 0.4} if at == 1 else {})} for at in range(3)}
    _, grid, _ = deployed(tmp_path, {**TABLES, "clients": {}, "algorithm": {"name": "fedavg"}}, configs=configs)
    cards = {
        job["card"]["id"]: (node, job["card"]["budget"])
        for node, way, parcel in grid.traffic
        if way == "down"
        for job in parcel.about.get("jobs", ())
    }
    assert len(cards) == 6
    assert {budget for node, budget in cards.values() if node == 1} == {0.4}
    assert {budget for node, budget in cards.values() if node != 1} == {1.0}


def test_nodes_with_data_of_their_own_need_not_hold_every_class(tmp_path: Path) -> None:
    """Made by a function of a node's configuration; one node holds two classes, one holds the third, one is novel."""
    from pfedgate.data import from_arrays

    def data(config: Any) -> Any:
        names = np.array(config["labels"].split("+"))
        x = np.random.default_rng(1).normal(size=(30, 5)).astype(np.float32)
        return from_arrays(x, names[np.arange(30) % len(names)], owners=[config["site"]] * 30)

    tables = {
        "data": {"name": "given"}, "model": {"name": "mlp", "hidden": [8]}, "algorithm": {"name": "ditto"},
        "train": {"rounds": 1, "batch": 8}, "deploy": {"class_names": ["cat", "dog", "eel"]},
    }  # fmt: skip
    configs = {
        1: {"site": "a", "labels": "cat+dog"},
        2: {"site": "b", "labels": "eel"},
        3: {"site": "c", "labels": "dog+eel", "novel": True},
    }
    result, _, _ = deployed(tmp_path, tables, configs=configs, data=data)
    assert [score.client for score in result.scores] == ["a", "b"]
    assert [score.client for score in result.novel] == ["c"]
    node = Node(flower.read(tables), configs[2], data=data)
    assert set(node.holding.part("b", "train").y.tolist()) == {2}
    with pytest.raises(ValueError, match="unknown class 'eel'"):
        Node(flower.read({**tables, "deploy": {"class_names": ["cat", "dog"]}}), configs[2], data=data)._introduce()


def test_a_node_serves_only_its_own_clients(tmp_path: Path) -> None:
    recipe = flower.read({**TABLES, "algorithm": {"name": "fedavg"}})
    node = Node(recipe, {"partition-id": 0, "num-partitions": 3, "state-dir": str(tmp_path)})
    card = {"id": "1", "n_train": 3, "budget": 1.0}
    told = node.answer(
        Parcel(
            {
                "stage": "train", "experiment": "0" * 16, "starts": [0], "serial": 1, "commit": 0, "points": [],
                "round": {"index": 0}, "jobs": [{"card": card, "body": 0}],
            },
            [b""],
        )
    )  # fmt: skip
    assert "does not hold client '1'" in told.about["clients"]["1"]["error"]
    assert not told.bodies


def test_a_node_plans_once_for_all_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    build = experiment.build
    monkeypatch.setattr(experiment, "build", lambda *given: plans.append(given[1]) or build(*given))
    recipe = flower.read({**TABLES, "algorithm": {"name": "fedavg"}})
    node = Node(recipe, {"partition-id": 0, "num-partitions": 3, "state-dir": str(tmp_path)})
    shape = NodeInfo.read(node.answer(Parcel({"stage": "roll"})).about).shape
    assert not plans  # the roll call needs no model
    for serial in (1, 2):
        order = {"stage": "evaluate", "experiment": "0" * 16, "starts": [0], "serial": serial, "commit": 0}
        answer = node.answer(Parcel({**order, "round": {"index": 0}, "points": [], "jobs": []}))
        assert answer.about == {"clients": {}}
    assert plans == [shape] == [DataShape(10, (1, 8, 8), torch.float32)]
