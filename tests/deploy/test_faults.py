"""Nodes that die, come late, repeat themselves or send nonsense: a round goes on with who is left, or says why not."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pfedgate import experiment
from pfedgate.core.state import equal
from pfedgate.deploy import fleet as fleets
from pfedgate.deploy.messages import Parcel, ParcelError

pytest.importorskip("flwr", reason="needs the extra `flower`")

from tests.support.fakes import TABLES, FakeGrid, Spoil, deployed
from tests.support.lies import DENSE, GATED_LIES, altered
from tests.support.states import private_of_nodes

from pfedgate.core.types import State
from pfedgate.deploy.fleet import QuorumError
from pfedgate.deploy.messages import from_records
from pfedgate.engine.endpoint import POINTS

SPOILT = 12  # the node whose answers are spoilt


def _silent(node: int, order: Parcel, answer: Parcel) -> list[Parcel]:
    """A node that never answers when it is to train."""
    return [] if node == SPOILT and order.about["stage"] == "train" else [answer]


GATED = {**TABLES, "algorithm": {"name": "pfedgate"}, "train": {"rounds": 1}, "clients": {"budget": 0.5}}


def _lying(change: Any) -> Spoil:
    def spoil(node: int, order: Parcel, answer: Parcel) -> list[Parcel]:
        return [altered(answer, change) if node == SPOILT and order.about["stage"] == "train" else answer]

    return spoil


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> State:
    """The server's State when the node in question never answers."""
    result, _, _ = deployed(tmp_path_factory.mktemp("quiet"), GATED, spoil=_silent)
    return dict(result.server)


@pytest.mark.parametrize("what", GATED_LIES)
def test_an_update_that_cannot_be_one_is_left_out(what: str, tmp_path: Path, without: State) -> None:
    change, reason = GATED_LIES[what]
    result, _, clock = deployed(tmp_path, GATED, spoil=_lying(change))
    record = result.history[0]
    assert (record["sampled"], record["refused"]) == (6, 2)
    assert all(reason in refusal for refusal in record["refusals"])
    assert clock.now == 0  # nobody was waited for
    assert equal(result.server, without)  # what is left counts as if the others had been asked alone


@pytest.mark.parametrize("what", DENSE)
def test_dense_updates_are_checked_too(what: str, tmp_path: Path) -> None:
    change, reason = DENSE[what]
    tables = {**GATED, "algorithm": {"name": "fedavg"}, "evaluate": {"every": 0}}
    result, _, _ = deployed(tmp_path, tables, spoil=_lying(change))
    assert result.history[0]["refused"] == 2
    assert all(reason in refusal for refusal in result.history[0]["refusals"])


def test_an_answer_that_comes_after_its_deadline_is_not_taken_for_the_next(tmp_path: Path) -> None:
    """Late by a round: both answers are there when the second is asked for, the old one first."""
    tables = {**GATED, "train": {"rounds": 2}, "evaluate": {"every": 0}}
    late: list[Any] = []

    def scene(grid: FakeGrid) -> Spoil:
        honest = grid.pull_messages

        def pull_messages(ids: Any) -> list[Any]:
            asked, found = list(ids), []
            for reply in honest(asked):
                trained = "data" not in from_records(reply.content).about  # no answer to the roll call
                first = reply.metadata.src_node_id == SPOILT and trained and not late
                (late if first else found).append(reply)
            return [*(reply for reply in late if reply.metadata.reply_to_message_id not in asked), *found]

        grid.pull_messages = pull_messages  # type: ignore[method-assign]
        return lambda node, order, answer: [answer]

    result, _, clock = deployed(tmp_path, tables, scene=scene)
    assert late
    assert [record["refused"] for record in result.history] == [2, 0]
    assert clock.now == 30


def _scored(score: list[float], stats: Any) -> Parcel:
    """Nonsense for scores, for whomever and whatever the server asks."""
    told = {"scores": {point: {"test": score, "val": score, "stats": stats} for point in POINTS}}
    return Parcel({"clients": {str(client): told for client in range(6)}})


@pytest.mark.parametrize(
    "parcel",
    [
        Parcel({"clients": "nobody"}),
        Parcel({}),
        Parcel({"clients": {}}, [b"x"]),
        Parcel({"error": "no space left"}),
        Parcel({"clients": {"0": {"body": 99}, "1": {"body": -1}, "2": {"body": "0"}, "3": 5, "4": {}, "5": None}}),
        _scored([1, 0.5, 0.5], []),
        _scored([math.inf, 0.5, 0.5], {}),
    ],
)
def test_an_answer_that_is_none_is_left_out(parcel: Parcel, tmp_path: Path) -> None:
    result, _, _ = deployed(
        tmp_path, GATED, spoil=lambda n, order, a: [parcel if n == SPOILT and order.about["stage"] != "roll" else a]
    )
    assert result.history[0]["refused"] == 2
    assert len(result.scores) == 4


def test_who_is_silent_is_waited_for_until_the_deadline_and_no_longer(tmp_path: Path) -> None:
    result, _, clock = deployed(tmp_path, {**GATED, "evaluate": {"every": 0}}, spoil=_silent)
    assert "no answer within 30 s" in result.history[0]["refusals"][0]
    assert clock.now == 30


@pytest.mark.parametrize(("half", "reason"), [(True, "no answer within 30 s"), (False, "ValueError: no message")])
def test_who_sends_half_an_answer_or_none_holds_nobody_up(
    half: bool, reason: str, tmp_path: Path, without: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's pull waits for the rest of an answer, or raises if it cannot be one."""
    monkeypatch.setattr(fleets, "GRACE", 0.1)
    over = threading.Event()

    def scene(grid: FakeGrid) -> Spoil:
        honest = grid.pull_messages

        def pull_messages(ids: Any) -> list[Any]:
            found = honest(ids)
            for reply in found:
                if reply.metadata.src_node_id == SPOILT and "data" not in from_records(reply.content).about:
                    if half:
                        over.wait(60)
                    raise ValueError("no message")
            return found

        grid.pull_messages = pull_messages  # type: ignore[method-assign]
        return lambda node, order, answer: [answer]

    result, _, clock = deployed(tmp_path, {**GATED, "evaluate": {"every": 0}}, scene=scene)
    over.set()
    assert [reason in refusal for refusal in result.history[0]["refusals"]] == [True, True]
    assert clock.now == (30 if half else 0)
    assert equal(result.server, without)


def test_who_came_back_on_another_node_is_late_once(tmp_path: Path) -> None:
    """A client claimed by a new node while its old one is waited for: the old one is to blame, the new one is next."""

    def scene(grid: FakeGrid) -> Spoil:
        def spoil(node: int, order: Parcel, answer: Parcel) -> list[Parcel]:
            if node == SPOILT and order.about["stage"] == "train":
                grid.configs[99] = grid.configs[SPOILT]  # restarted; Flower has not noticed the death yet
            if order.about.get("round", {}).get("index") == 1:
                grid.gone.add(SPOILT)  # now it has
            return _silent(node, order, answer)

        return spoil

    tables = {**GATED, "train": {"rounds": 3}, "evaluate": {"every": 0}}
    result, _, clock = deployed(tmp_path, tables, scene=scene)
    assert [record["refused"] for record in result.history] == [2, 2, 0]
    refusals = [refusal for record in result.history[:2] for refusal in record["refusals"]]
    assert sum("no answer within 30 s" in refusal for refusal in refusals) == 4
    assert [refusal for refusal in refusals if refusal.startswith("node 99: its claim to 2 clients such as")]
    assert clock.now == 60


def test_a_node_that_claims_everybody_gets_nobody(tmp_path: Path) -> None:
    """Those who hold clients keep them, whenever the other comes and whatever it says; also after a restart."""
    others: dict[str, int] = {}

    def everybody(node: int, order: Parcel, answer: Parcel) -> list[Parcel]:
        if order.about["stage"] == "roll" and node == 5:
            return [Parcel({**answer.about, "clients": dict.fromkeys(map(str, range(6)), 10**9)})]
        if order.about["stage"] == "train" and "clients" in answer.about:
            others.update(dict.fromkeys(answer.about["clients"], node))
        return [answer]

    def late(grid: FakeGrid) -> Spoil:
        def spoil(node: int, order: Parcel, answer: Parcel) -> list[Parcel]:
            if order.about["stage"] == "train":
                grid.configs[5] = {**grid.configs[11], "state-dir": str(tmp_path / "thief")}
            return everybody(node, order, answer)

        return spoil

    tables = {**GATED, "train": {"rounds": 2}}
    result, _, _ = deployed(tmp_path / "late", tables, scene=late)
    honest, _, _ = deployed(tmp_path / "honest", tables)
    assert set(others.values()) == {11, 12, 13}
    assert equal(result.server, honest.server)
    shares = {at: {"partition-id": at - 11, "num-partitions": 3} for at in (11, 12, 13)}
    configs = {5: shares[11], **shares}  # it is asked first
    with pytest.raises(Stop):
        deployed(tmp_path / "cut", tables, spoil=_stop_in(1))
    again, _, _ = deployed(tmp_path / "cut", tables, configs=configs, spoil=everybody)
    assert set(others.values()) == {11, 12, 13}
    assert equal(again.server, honest.server)


def _stop_in(round: int) -> Spoil:
    def die(node: int, order: Parcel, answer: Parcel) -> list[Parcel]:
        if order.about["stage"] == "train" and order.about["round"]["index"] == round and node == 13:
            raise Stop
        return [answer]

    return die


def test_an_answer_that_comes_twice_counts_once(tmp_path: Path) -> None:
    result, _, _ = deployed(tmp_path, GATED, spoil=lambda node, order, answer: [answer, answer])
    assert result.history[0]["refused"] == 0
    assert equal(result.server, experiment.run(GATED).server)


def test_below_the_quorum_the_run_stops_and_says_what_to_do(tmp_path: Path) -> None:
    tables = {**GATED, "deploy": {"quorum": 0.9}}
    with pytest.raises(QuorumError, match=r"4 of 6 clients .* 6 are needed .*go on from the last checkpoint"):
        deployed(tmp_path, tables, spoil=_silent)


def test_no_node_is_an_error_in_time(tmp_path: Path) -> None:
    with pytest.raises(QuorumError, match=r"0 of 3 nodes ready after 30 s .*no other node is connected"):
        deployed(tmp_path, GATED, configs={})


def test_a_node_without_data_says_so_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shares = {at: {"partition-id": at, "num-partitions": 3} for at in range(3)}
    tables = {**GATED, "deploy": {"nodes": 3}}
    result, grid, _ = deployed(tmp_path, tables, configs={**shares, 9: {"budget": 1.0}})
    assert result.history[0]["sampled"] == 6
    told = [parcel.about for node, way, parcel in grid.traffic if node == 9 and way == "up"]
    assert "was not told where its data is" in told[0]["error"]


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    tables = {
        "algorithm": {"name": "fedavg"}, "data": {"name": "folder", "path": str(tmp_path)}, "train": {"rounds": 1}
    }  # fmt: skip
    with pytest.raises(QuorumError, match=r"no images under .*empty"):
        deployed(tmp_path, tables, nodes=1, configs={5: {"data-dir": str(tmp_path / "empty")}})


def test_two_nodes_with_one_client_are_refused(tmp_path: Path) -> None:
    share = {"partition-id": 0, "num-partitions": 3}
    with pytest.raises(
        QuorumError, match=r"1 of 2 nodes ready .*node 2: its claim to 2 clients .* node 1.*partition-id"
    ):
        deployed(tmp_path, GATED, nodes=2, configs={1: share, 2: share})


class Stop(Exception):
    """The server is killed here."""


@pytest.mark.parametrize("every", [1, 2])
def test_a_server_that_died_goes_on_to_the_same_result(every: int, tmp_path: Path) -> None:
    """Killed after the nodes have trained round 3 and before it was on record: they must train it anew from round 2."""
    tables: dict[str, Any] = {**GATED, "train": {"rounds": 4}}
    tables["run"] = {**TABLES["run"], "checkpoint_every": every}
    whole, _, _ = deployed(tmp_path / "whole", tables)

    with pytest.raises(Stop):
        deployed(tmp_path / "cut", tables, spoil=_stop_in(2))
    cut, _, _ = deployed(tmp_path / "cut", tables)
    assert equal(cut.server, whole.server)
    assert cut.history == whole.history
    ours, theirs = private_of_nodes(tmp_path / "cut"), private_of_nodes(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert all(equal(ours[client], theirs[client]) for client in ours)


def test_another_recipe_does_not_go_on_in_the_same_folder(tmp_path: Path) -> None:
    deployed(tmp_path, GATED)
    with pytest.raises(ValueError, match="holds a run of another recipe"):
        deployed(tmp_path, {**GATED, "train": {"rounds": 2}})
    deployed(tmp_path, {**GATED, "deploy": {"deadline": 60, "quorum": 0.1}})  # how long to wait is no part of it


def test_a_node_that_is_away_is_not_waited_for_and_may_come_back(tmp_path: Path) -> None:
    def scene(grid: FakeGrid) -> Spoil:
        def spoil(node: int, order: Parcel, answer: Parcel) -> list[Parcel]:
            at = order.about.get("round", {}).get("index")
            if at == 0 and node == 11:
                grid.gone.add(13)  # from round 2 on
            if at == 2 and node == 11:
                grid.gone.clear()
                grid.configs[17] = grid.configs.pop(13)  # restarted without a key of its own: another id
            return [answer]

        return spoil

    tables = {**TABLES, "algorithm": {"name": "ditto"}, "train": {"rounds": 4}, "clients": {}}
    result, _, clock = deployed(tmp_path, tables, scene=scene)
    assert [record["refused"] for record in result.history] == [0, 2, 2, 0]
    assert "not connected" in result.history[1]["refusals"][0]
    assert clock.now == 0


def test_a_parcel_is_read_with_care() -> None:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    from pfedgate.deploy.messages import from_records, to_records

    parcel = Parcel({"a": 1.5}, [b"", b"xyz"])
    assert from_records(to_records(parcel)) == Parcel({"a": 1.5}, [b"", b"xyz"])
    floats = ArrayRecord({"0": Array(torch.ones(2).numpy())})
    for records in (
        RecordDict(),
        RecordDict({"about": ConfigRecord({"json": "["})}),
        RecordDict({"about": ConfigRecord({"json": "[]"})}),
        RecordDict({"about": ConfigRecord({"json": "{}"}), "bodies": floats}),
    ):
        with pytest.raises(ParcelError):
            from_records(records)
