"""Real processes: a server and three nodes with TLS and keys; and a node that is killed in the middle of a round."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra `flower`")

from tests.deploy.fleets import PATIENCE, SMALL, gates, processes, run, wait_until, write_app

from pfedgate import experiment, runfolder
from pfedgate.deploy import certs
from pfedgate.deploy.local import LocalFleet
from pfedgate.deploy.processes import kill


def test_three_nodes_with_tls_and_keys_give_the_bits_of_one_process(tmp_path: Path) -> None:
    app = write_app(tmp_path, SMALL)
    with LocalFleet(tmp_path / "fleet", nodes=3, patience=60 * PATIENCE) as fleet:
        # Somebody with the right certificate authority and a key that was never registered.
        certs.make(tmp_path / "fleet" / "keys", nodes=4)
        fleet.configs.append({"partition-id": 0, "num-partitions": 1, "state-dir": str(tmp_path / "stranger")})
        stranger = fleet.start_node(3, key="node-3")
        run(fleet, app, {"folder": str(tmp_path / "run")})
        assert stranger.wait(60 * PATIENCE) != 0
        assert "Exit Code: 305" in fleet.log("node-3")  # the SuperLink did not let it in
        assert not (tmp_path / "stranger").exists()
    assert not processes(tmp_path)
    there, here = runfolder.load(tmp_path / "run"), experiment.run(SMALL)
    assert {name: torch.equal(value, here.server[name]) for name, value in there.server().items()} == dict.fromkeys(
        here.server, True
    )
    assert there.metrics == here.history
    assert here.store is not None
    kept = dict(gates(tmp_path / "fleet"))
    assert sorted(kept) == here.store.clients()
    for client, state in kept.items():
        other = here.store.get(client) or {}
        assert state.keys() == other.keys()
        assert all(torch.equal(state[name], other[name]) for name in state)


def test_a_node_killed_in_a_round_comes_back_with_its_gate(tmp_path: Path) -> None:
    tables = {**SMALL, "train": {"rounds": 3}, "evaluate": {"every": 0}}
    app = write_app(tmp_path, tables, quorum=0.3)
    with LocalFleet(tmp_path / "fleet", nodes=3, secure=False, patience=60 * PATIENCE) as fleet:
        lines = fleet.run(app, {"folder": str(tmp_path / "run")}, timeout=300 * PATIENCE)
        for line in lines:
            if "round 1/3" in line:
                break
        before = dict(gates(tmp_path / "fleet"))
        assert len(before) == 3
        wait_until(lambda: fleet.log("node-1").count("Receiving: train message") == 2, 60, "the order of round 2")
        victim: subprocess.Popen[bytes] = fleet.started[1]
        kill(victim)
        kept = dict(gates(tmp_path / "fleet"))
        assert all(torch.isfinite(value).all() for state in kept.values() for value in state.values())
        fleet.start_node(1)
        rest = list(lines)
    assert not processes(tmp_path)
    done = runfolder.load(tmp_path / "run")
    assert done.finished, rest
    refused = [record["refused"] for record in done.metrics]
    assert refused[0] == 0
    assert refused[1] == 1, done.metrics  # round 2 ended with the two others
    assert "'1'" in done.metrics[1]["refusals"][0]
    assert refused[2] == 0  # and in round 3 it was back
    after = dict(gates(tmp_path / "fleet"))
    # What it had kept it went on with: a fresh gate would have become what one round makes of it.
    assert after.keys() == before.keys()
    moved = [name for name in after["1"] if not torch.equal(after["1"][name], before["1"][name])]
    assert moved
