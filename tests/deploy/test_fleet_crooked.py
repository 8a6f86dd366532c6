"""Real nodes that misbehave, in their app or below it: late, twice, of another round, half, nonsense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra `flower`")

from tests.support.fakes import Spoil, deployed
from tests.support.fleets import SMALL, crooked, lying, patience, processes, run_on_fleet, write_app
from tests.support.lies import GATED_LIES, HOSTILE, LATE
from tests.support.states import private_of_nodes

from pfedgate import experiment
from pfedgate.core.state import equal
from pfedgate.deploy.local import LocalFleet
from pfedgate.deploy.messages import Parcel
from pfedgate.runs import folder as runfolder

pytestmark = pytest.mark.deploy
GONE = "does not exist or has expired"  # the SuperLink's words for an answer to an order that is no longer open


def _tables(rounds: int) -> dict[str, Any]:
    return {**SMALL, "train": {"rounds": rounds, "batch": 8}, "evaluate": {"every": 0}}


def _deadline() -> float:
    return 40 * patience()  # a round takes a third of that


def _fleet(folder: Path, app: Path) -> dict[str, str]:
    """Run the app on two nodes, of which the second has client 1; what SuperLink and nodes said."""
    with LocalFleet(folder / "fleet", nodes=2, secure=False, patience=60 * patience()) as fleet:
        run_on_fleet(fleet, app, {"folder": str(folder / "run")}, timeout=600)
        said = {name: fleet.log(name) for name in ("link", "node-0", "node-1")}
    assert not processes(folder)
    return said


def _expect(folder: Path, tables: dict[str, Any], spoil: Spoil) -> runfolder.Run:
    """The run left what a run over a fake grid leaves whose answers are spoilt so: records, model and gates."""
    done, (expected, _, _) = runfolder.load(folder / "run"), deployed(folder / "fake", tables, nodes=2, spoil=spoil)
    assert _without_words(done.metrics) == _without_words(expected.history)
    assert equal(done.server(), expected.server)
    kept, states = private_of_nodes(folder / "fleet", 2), private_of_nodes(folder / "fake", 2)
    assert sorted(kept) == sorted(states) == ["0", "1", "2"]
    assert all(equal(kept[client], states[client]) for client in kept)
    return done


def _without_words(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "refusals"} for record in records]


def test_a_real_node_that_answers_late_is_left_out_of_that_round_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains for round 2 when round 2 is over: its gate has learned, its update does not count."""
    tables, deadline = _tables(3), _deadline()
    app = write_app(tmp_path, tables, nodes=2, quorum=0.6, deadline=deadline)
    lying(app, "late", monkeypatch)
    said = _fleet(tmp_path, app)
    assert "Message TTL has expired" in said["link"]  # the late answer did arrive

    def silent(node: int, order: Parcel, answer: Parcel) -> list[Parcel]:
        late = node == 12 and order.about.get("round", {}).get("index") == LATE and order.about["stage"] == "train"
        return [] if late else [answer]

    done = _expect(tmp_path, tables, silent)
    assert [record["refused"] for record in done.metrics] == [0, 1, 0]
    # Ours; or Flower's, if its clock, by which the order has expired, was asked a moment later.
    reasons = (f"no answer within {deadline:.0f} s", "Flower reports error")
    assert done.metrics[LATE]["refusals"][0].startswith(tuple(f"client '1', round 2: {one}" for one in reasons))


def test_a_real_node_that_answers_twice_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same twice; another one of ten times the weight; old ones; and the last round's as this round's."""
    tables = _tables(4)
    app = write_app(tmp_path, tables, nodes=2, quorum=0.6)
    crooked(tmp_path, ["again", "louder", "old", "last"], monkeypatch)
    said = _fleet(tmp_path, app)
    assert said["node-1"].count("crooked: answer") == 2 + 2 + 5 + 1, said["node-1"]
    # The SuperLink keeps one answer to an order, and none to an order that was answered; it says so to its log only.
    refused = sum(said["link"].count(words) for words in ("duplicate reply for", GONE))
    assert 5 <= refused <= 6, said["link"]  # the very same answer is no error as long as the first lies there
    answers: list[Parcel] = []

    def last(node: int, order: Parcel, answer: Parcel) -> list[Parcel]:
        if node != 12 or order.about["stage"] != "train":
            return [answer]
        answers.append(answer)
        return [answers[-2 if len(answers) == 4 else -1]]

    done = _expect(tmp_path, tables, last)
    assert [record["refused"] for record in done.metrics] == [0, 0, 0, 1]
    assert done.metrics[3]["refusals"] == ["client '1', round 4: the update is that of round 3"]
    assert done.metrics[:3] == experiment.run(tables).history[:3]  # the bits of honest nodes, as far as they were asked


def test_a_real_node_that_sends_half_an_answer_or_none_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's pull waits three minutes for the rest, with the other node's answer in hand; or raises an error."""
    tables, deadline = _tables(3), min(_deadline(), 170.0)  # less than Flower waits for the rest
    app = write_app(tmp_path, tables, nodes=2, quorum=0.6, deadline=deadline)
    crooked(tmp_path, ["half", "no_message"], monkeypatch)
    _fleet(tmp_path, app)

    def silent(node: int, order: Parcel, answer: Parcel) -> list[Parcel]:
        return [] if node == 12 and order.about["stage"] == "train" and order.about["round"]["index"] < 2 else [answer]

    done = _expect(tmp_path, tables, silent)
    assert [record["refused"] for record in done.metrics] == [1, 1, 0]
    reasons = [record["refusals"][0] for record in done.metrics[:2]]
    assert reasons[0] == f"client '1', round 1: no answer within {deadline:.0f} s"
    assert reasons[1].startswith("client '1', round 2: its answer could not be read: AttributeError")


def test_a_real_node_that_sends_nonsense_is_left_out_of_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another kind in each round: NaN, wrong shapes, wrong block ids, another round's, garbage, …"""
    app = write_app(tmp_path, _tables(len(GATED_LIES)), nodes=2, quorum=0.6)
    lying(app, "nonsense", monkeypatch)
    _fleet(tmp_path, app)
    done = runfolder.load(tmp_path / "run")
    assert [record["refused"] for record in done.metrics] == [1] * len(GATED_LIES)
    for record, (_, reason) in zip(done.metrics, GATED_LIES.values(), strict=True):
        assert reason in record["refusals"][0], record["refusals"]
    assert all(torch.isfinite(value).all() for value in done.server().values())


@pytest.mark.long
def test_every_attack_of_a_real_node_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attacks of `test_attacks`, over a real SuperLink: one in each round, an endless error last."""
    tables = {**_tables(len(HOSTILE) + 1), "evaluate": {"every": 9}}
    app = write_app(tmp_path, tables, nodes=2, quorum=0.6)
    lying(app, "hostile", monkeypatch)
    _fleet(tmp_path, app)
    done = runfolder.load(tmp_path / "run")
    assert [record["refused"] for record in done.metrics] == [1] * (len(HOSTILE) + 1)
    for record, (_, reason) in zip(done.metrics, HOSTILE.values(), strict=False):
        assert reason in record["refusals"][0], record["refusals"]
    said = [refusal for record in done.metrics for refusal in record["refusals"]]
    assert all(len(refusal) < 500 and refusal.isprintable() for refusal in said)
    assert sum("scores: 1000000000.0 is not within" in refusal for refusal in said) >= 3
    assert all(record["after_broadcast"]["clients"] == 2 for record in done.metrics if "after_broadcast" in record)
    assert all(torch.isfinite(value).all() for value in done.server().values())
