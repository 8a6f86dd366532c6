"""What one hostile node can say, on the real grid code: the run goes on, and its words are refused by name."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra `flower`")

from tests.support.fakes import TABLES, Spoil, deployed
from tests.support.lies import HOSTILE, altered

from pfedgate.core.state import equal
from pfedgate.core.types import State
from pfedgate.deploy.messages import Parcel
from pfedgate.engine import boundary

HOSTILE_NODE = 12
GATED: dict[str, Any] = {**TABLES, "algorithm": {"name": "pfedgate"}, "clients": {"budget": 0.5}}
DENSE: dict[str, Any] = {**TABLES, "algorithm": {"name": "fedavg"}, "clients": {}}


def _at(stage: str, change: Callable[[Parcel], Parcel]) -> Spoil:
    """A node that changes its answers at one stage."""

    def spoil(node: int, order: Parcel, answer: Parcel) -> list[Parcel]:
        hostile = node == HOSTILE_NODE and order.about["stage"] == stage
        return [change(answer) if hostile else answer]

    return spoil


@pytest.fixture(scope="module", params=["dense", "gated"])
def quiet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], State]:
    """A recipe, and the server's State when the node in question never trains."""
    tables = DENSE if request.param == "dense" else GATED
    silent = _at("train", lambda answer: Parcel({"error": "I will not"}))
    result, _, _ = deployed(tmp_path_factory.mktemp("quiet"), tables, spoil=silent)
    return tables, dict(result.server)


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_update_is_refused_and_changes_nothing(
    what: str, tmp_path: Path, quiet: tuple[dict[str, Any], State]
) -> None:
    tables, expected = quiet
    change, reason = HOSTILE[what]
    result, _, _ = deployed(tmp_path, tables, spoil=_at("train", lambda answer: altered(answer, change)))
    for at, record in enumerate(result.history):
        assert (record["round"], record["sampled"], record["refused"]) == (at + 1, 6, 2)
        assert all(reason in refusal for refusal in record["refusals"]), record["refusals"]
        assert all(len(refusal) < boundary.TEXT + 60 for refusal in record["refusals"])
        assert all(refusal.startswith("client ") and refusal.isprintable() for refusal in record["refusals"])
    assert equal(result.server, expected)


def test_a_weight_beyond_the_roll_counts_as_what_the_roll_says(tmp_path: Path) -> None:
    honest, _, _ = deployed(tmp_path / "honest", DENSE)

    def heavy(arrived: Any) -> Any:
        from pfedgate.core.types import Update

        return Update(arrived.update.shared, 1e12, arrived.update.metrics)

    greedy, _, _ = deployed(tmp_path / "greedy", DENSE, spoil=_at("train", lambda answer: altered(answer, heavy)))
    assert equal(greedy.server, honest.server)
    assert greedy.history == honest.history


def _scores(change: Callable[[dict[str, Any]], Any]) -> Callable[[Parcel], Parcel]:
    def spoil(answer: Parcel) -> Parcel:
        entries = json.loads(json.dumps(answer.about["clients"]))
        for entry in entries.values():
            for point in entry["scores"].values():
                change(point)
        return Parcel({"clients": entries})

    return spoil


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda point: point["val"].__setitem__(2, 1e9), "1000000000.0 is not within 0 … 1"),
        (lambda point: point["test"].__setitem__(2, -1.0), "-1.0 is not within"),
        (lambda point: point["test"].__setitem__(2, math.nan), "nan is not within"),
        (lambda point: point["test"].__setitem__(0, 10**400), "no whole number"),
        (lambda point: point["val"].__setitem__(0, 10**12), "no whole number from 0 to"),
        (lambda point: point["test"].__setitem__(1, 10**400), "a number is not within"),
        (lambda point: point["test"].__setitem__(3, [0.5] * 1000), "1001 scores for 1 metrics"),
        (lambda point: point["stats"].__setitem__("val_accuracy", 1e9), "a name of the server's own"),
        (lambda point: point["stats"].__setitem__("accuracy", 1.0), "a name of the server's own"),
        (lambda point: point["stats"].update({f"n{at}": 1.0 for at in range(200_000)}), "named numbers, at most"),
        (lambda point: point["stats"].__setitem__("x" * 5_000_000, 1.0), "cannot be the name of a number"),
        (lambda point: point.__setitem__("stats", [1]), "cannot be used"),
        (lambda point: point.clear(), "cannot be used: KeyError"),
    ],
)
def test_a_hostile_score_is_left_out(change: Any, reason: str, tmp_path: Path) -> None:
    tables = {**DENSE, "evaluate": {"every": 1}}
    honest, _, _ = deployed(tmp_path / "honest", tables, spoil=_at("evaluate", lambda a: Parcel({"error": "no"})))
    result, _, _ = deployed(tmp_path / "hostile", tables, spoil=_at("evaluate", _scores(change)))
    for told, expected in zip(result.history, honest.history, strict=True):
        assert told["after_broadcast"] == expected["after_broadcast"]
        assert len(told["refusals"]) == 2
        assert all(reason in refusal and len(refusal) < 500 for refusal in told["refusals"]), told["refusals"]
    assert result.summary["best_round"] == honest.summary["best_round"]


def test_long_errors_are_cut(tmp_path: Path) -> None:
    """Five million characters, among them those that clear a terminal or begin a line of their own."""
    shout = "no\x1b[2J\nround 9: all is well " * 200_000
    told = _at("train", lambda answer: Parcel({"error": shout}))
    result, _, _ = deployed(tmp_path, DENSE, spoil=told)
    assert all(len(refusal) < 500 and refusal.isprintable() for r in result.history for refusal in r["refusals"])
    assert sum(path.stat().st_size for path in (tmp_path / "run").rglob("*.jsonl")) < 50_000
    one = _at("train", lambda answer: Parcel({"clients": {c: {"error": shout} for c in answer.about["clients"]}}))
    result, _, _ = deployed(tmp_path / "each", DENSE, spoil=one)
    assert all(len(refusal) < 500 and refusal.isprintable() for r in result.history for refusal in r["refusals"])


ROLLS: dict[str, tuple[dict[str, Any], str]] = {
    "endless n": ({"clients": {"m": 10**400}}, "no whole number"),
    "n beyond 64 bits": ({"clients": {"m": 2**63}}, "no whole number"),
    "n that is text": ({"clients": {"m": "40"}}, "no whole number"),
    "n that is true": ({"clients": {"m": True}}, "no whole number"),
    "many ids": ({"clients": {f"m{at}": 1 for at in range(200_000)}}, "it holds 200000 clients, at most"),
    "an endless id": ({"clients": {"m" * 5_000_000: 1}}, "is no client's id"),
    "an id on two lines": ({"clients": {"m\nround 9": 1}}, "is no client's id"),
    "half a character": ({"clients": {"\ud800": 1}}, "is no client's id"),
    "no id": ({"clients": {"": 1}}, "is no client's id"),
    "a huge input": ({"data": {"shape": [2**33], "dtype": "float32", "classes": 10, "class_names": None}}, "no whole"),
    "a large input": ({"data": {"shape": [60_000] * 3, "dtype": "float32", "classes": 1, "class_names": None}}, "numb"),
    "many dimensions": ({"data": {"shape": [1] * 99, "dtype": "float32", "classes": 1, "class_names": None}}, "shape"),
    "many classes": ({"data": {"shape": [4], "dtype": "float32", "classes": 10**9, "class_names": None}}, "no whole"),
    "a type of its own": ({"data": {"shape": [4], "dtype": ["float8"], "classes": 9, "class_names": None}}, "of type"),
    "another shape": (
        {"data": {"shape": [9], "dtype": "float32", "classes": 10, "class_names": None}},
        "takes no part",
    ),
    "an endless budget": ({"budget": 10**400}, "a budget is"),
    "a budget of many": ({"budget": {f"b{at}": 1 for at in range(100_000)}}, "too many entries"),
    "a deep budget": ({"budget": {"params": {"params": {}}}}, "a budget is"),
}


@pytest.mark.parametrize("what", ROLLS)
def test_a_hostile_answer_to_the_roll_call_is_left_out(what: str, tmp_path: Path) -> None:
    lie, reason = ROLLS[what]
    tables = {**DENSE, "deploy": {"nodes": 3}}
    shares = {at: {"partition-id": at - 11, "num-partitions": 3} for at in (11, 13)}
    three = {**shares, 12: {"partition-id": 1, "num-partitions": 3}}
    extra = {**three, 5: {"partition-id": 0, "num-partitions": 3}}  # asked first, and lies

    def spoil(node: int, order: Parcel, answer: Parcel) -> list[Parcel]:
        if node == 5 and order.about["stage"] == "roll":
            return [Parcel({**answer.about, "clients": {"mallory": 5}, "novel": {}, **lie})]
        return [answer]

    result, _, _ = deployed(tmp_path / "hostile", tables, configs=extra, spoil=spoil)
    honest, _, _ = deployed(tmp_path / "honest", tables, configs=three)
    assert equal(result.server, honest.server)
    (line,) = result.history[0].pop("refusals")
    assert reason in line, line
    assert len(line) < 500
    assert line.isprintable()
    assert result.history == honest.history


@pytest.mark.parametrize("budget", [{"params": 1e-9}, 1e-300, -5.0, {"latency_ms": 1.0}])
@pytest.mark.parametrize("name", ["pfedgate", "heterofl"])
def test_a_budget_that_nobody_can_keep_leaves_that_client_out(budget: Any, name: str, tmp_path: Path) -> None:
    lie = _at("roll", lambda answer: Parcel({**answer.about, "budget": budget}))
    tables = {**TABLES, "algorithm": {"name": name}, "clients": {}, "train": {"rounds": 1}, "deploy": {"nodes": 2}}
    result, _, _ = deployed(tmp_path, tables, spoil=lie)
    assert 0 <= result.history[0]["refused"] <= 2


def test_all_names_of_the_server_are_reserved(tmp_path: Path) -> None:
    """A number of a client can have none of the names that the server writes, whichever options are set."""
    from pfedgate import experiment
    from pfedgate.engine.endpoint import NOVEL, POINTS

    seen = {*POINTS, NOVEL}
    for more in ({}, {"fleet": {"devices": "ai-benchmark", "policy": "deadline", "deadline": 5.0}}):
        try:
            done = experiment.run({**DENSE, **more}, folder=tmp_path / str(len(more)))
        except ValueError:  # no such devices here
            continue
        result = done
        seen |= {name for record in result.history for name in record}
        seen |= {name for record in result.history for name in record.get("after_broadcast", ())}
        seen |= set(result.summary)
        for line in (tmp_path / str(len(more)) / "participation.jsonl").read_text().splitlines():
            seen |= set(json.loads(line))
    free = {name for name in seen if name not in boundary.RESERVED and not name.startswith(boundary.PREFIXES)}
    assert free <= {"loss", "flops", "accuracy_after_local"}, free


def test_sizes_that_overflow_are_no_state() -> None:
    from pfedgate.engine import wire

    about = json.dumps({"w": {"dtype": "F32", "shape": [2**33, 2**33, 0], "data_offsets": [0, 0]}}).encode()
    with pytest.raises(wire.WireError, match="not a State"):
        wire.unpack(struct.pack("<Q", len(about)) + about)
    assert torch.equal(wire.unpack(wire.pack({"w": torch.ones(2)}))["w"], torch.ones(2))
