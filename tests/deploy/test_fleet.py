"""Real processes: a server and three nodes with TLS and keys; and a node that is killed in the middle of a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from tests.support.fakes import FakeGrid, Spoil, deployed
from tests.support.fleets import SMALL, patience, processes, run_on_fleet, wait_until, write_app
from tests.support.states import private_of_nodes

from pfedgate import experiment
from pfedgate.core.state import equal
from pfedgate.core.types import State
from pfedgate.deploy.children import kill
from pfedgate.deploy.local import LocalFleet
from pfedgate.deploy.messages import Parcel
from pfedgate.deploy.starter import make_keys
from pfedgate.runs import folder as runfolder

pytestmark = pytest.mark.timeout(900)  # minutes on a busy machine, where other tests take seconds


def test_three_nodes_with_tls_and_keys_give_the_bits_of_one_process(tmp_path: Path) -> None:
    tables = {**SMALL, "evaluate": {"every": 0}}
    app = write_app(tmp_path, tables)
    with LocalFleet(tmp_path / "fleet", nodes=3, patience=60 * patience()) as fleet:
        # Somebody with the right certificate authority and a key that was never registered.
        make_keys(tmp_path / "fleet" / "keys", nodes=4)
        fleet.configs.append({"partition-id": 0, "num-partitions": 1, "state-dir": str(tmp_path / "stranger")})
        stranger = fleet.start_node(3, key="node-3")
        run_on_fleet(fleet, app, {"folder": str(tmp_path / "run")})
        assert stranger.wait(60 * patience()) != 0
        assert "Exit Code: 305" in fleet.log("node-3")  # the SuperLink did not let it in
        assert not (tmp_path / "stranger").exists()
    assert not processes(tmp_path)
    there, here = runfolder.load(tmp_path / "run"), experiment.run(tables)
    assert equal(there.server(), here.server)
    assert there.metrics == here.history
    assert here.store is not None
    kept = private_of_nodes(tmp_path / "fleet")
    assert sorted(kept) == here.store.clients()
    assert all(equal(state, here.store.get(client) or {}) for client, state in kept.items())


def test_a_node_killed_in_a_round_comes_back_with_its_gate(tmp_path: Path) -> None:
    tables = {**SMALL, "train": {"rounds": 4, "batch": 8}, "evaluate": {"every": 0}}
    deadline = 40 * patience()  # a round takes a third of that
    app = write_app(tmp_path, tables, nodes=2, quorum=0.6, deadline=deadline)
    with LocalFleet(tmp_path / "fleet", nodes=2, secure=False, patience=60 * patience()) as fleet:
        lines = fleet.run(app, {"folder": str(tmp_path / "run")}, timeout=300 * patience())
        for line in lines:
            if "round 1/4" in line:
                break
        before = private_of_nodes(tmp_path / "fleet", 2)
        assert sorted(before) == ["0", "1", "2"]
        wait_until(lambda: fleet.log("node-1").count("Receiving: train message") == 2, 60, "the order of round 2")
        kill(fleet.started[1])
        kept = private_of_nodes(tmp_path / "fleet", 2)
        assert equal(kept["1"], before["1"])  # it had no time to train, and lost nothing
        fleet.start_node(1)
        rest = list(lines)
    assert not processes(tmp_path)
    done = runfolder.load(tmp_path / "run")
    assert done.finished, rest
    refused = [record["refused"] for record in done.metrics]
    assert refused in ([0, 1, 0, 0], [0, 1, 1, 0]), done.metrics  # a slow machine takes another round to start a node
    # Our deadline; or, on a machine so slow that it is longer, Flower's own notice after about a minute.
    reasons = (f"no answer within {deadline:.0f} s", "Flower reports error")
    assert done.metrics[1]["refusals"][0].startswith(tuple(f"client '1', round 2: {reason}" for reason in reasons))
    # The same as if it had only been away for a while: afterwards it went on with the gate of round 1.
    server, states = _away(tmp_path / "away", tables, refused)
    assert equal(done.server(), server)
    after = private_of_nodes(tmp_path / "fleet", 2)
    assert after.keys() == states.keys()
    assert all(equal(after[client], states[client]) for client in after)


def _away(folder: Path, tables: dict[str, Any], refused: list[int]) -> tuple[State, dict[str, State]]:
    """A run over a fake grid whose second node is not there in some rounds: the server's State, and all gates."""

    def scene(grid: FakeGrid) -> Spoil:
        def spoil(node: int, order: Parcel, answer: Parcel) -> list[Parcel]:
            if "round" in order.about:
                following = order.about["round"]["index"] + 1
                grid.gone = {12} if following < len(refused) and refused[following] else set()
            return [answer]

        return spoil

    result, _, _ = deployed(folder, tables, nodes=2, scene=scene)
    assert [record["refused"] for record in result.history] == refused
    return result.server, private_of_nodes(folder, 2)
