"""More real processes, minutes each: `make test-deploy`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra `flower`")

from benchmarks.wire import measure
from tests.support.fleets import SMALL, patience, processes, run_on_fleet, wait_until, write_app
from tests.support.states import private_of_nodes

from pfedgate import experiment
from pfedgate.config import toml
from pfedgate.core.state import equal
from pfedgate.deploy.children import FleetError, kill
from pfedgate.deploy.local import LocalFleet, once
from pfedgate.runs import folder as runfolder

pytestmark = pytest.mark.deploy


def test_the_deployed_result_is_that_of_one_process(tmp_path: Path) -> None:
    """Five clients on two nodes, one of them held out, and half of the clients sampled; one fleet, a run for each."""
    tables = {
        **SMALL,
        "data": {"name": "synthetic", "clients": 5, "samples_per_client": 60},
        "clients": {"budget": {"0.5": 0.5, "1.0": 0.5}, "fraction": 0.5, "novel": 0.2},
    }
    app = write_app(tmp_path, tables, nodes=2)
    with LocalFleet(tmp_path / "fleet", nodes=2, secure=False, patience=60 * patience()) as fleet:
        for name in ("fedavg", "fedem", "heterofl", "pfedgate"):
            run_on_fleet(fleet, app, {"folder": str(tmp_path / name), "set": f"algorithm.name={name}"})
            there, here = runfolder.load(tmp_path / name), experiment.run(tables, algorithm=name)
            assert equal(there.server(), here.server), name
            assert there.metrics == here.history, name
            assert there.summary["novel"] == here.summary["novel"], name


def test_a_killed_server_goes_on_in_a_new_run_to_the_same_result(tmp_path: Path) -> None:
    tables = {**SMALL, "train": {"rounds": 3, "batch": 8}}
    app, config = write_app(tmp_path, tables, nodes=2), {"folder": str(tmp_path / "run")}
    with LocalFleet(tmp_path / "fleet", nodes=2, secure=False, patience=60 * patience()) as fleet:
        for line in fleet.run(app, config, timeout=300 * patience()):
            if "round 1/3" in line:
                break
        wait_until(lambda: fleet.log("node-1").count("Receiving: train message") == 2, 60, "the order of round 2")
        assert fleet.link is not None
        kill(fleet.link)  # the SuperLink and the ServerApp below it
        assert len(runfolder.load(tmp_path / "run").metrics) == 1
        fleet.start_link()
        said = run_on_fleet(fleet, app, config)
    assert any("going on after round 1 of 3" in line for line in said)
    assert not processes(tmp_path)
    there, here = runfolder.load(tmp_path / "run"), experiment.run(tables)
    assert equal(there.server(), here.server)
    assert there.metrics == here.history
    assert here.store is not None
    states = private_of_nodes(tmp_path / "fleet", 2)
    assert all(equal(states[client], here.store.get(client) or {}) for client in states)


def test_nobody_there_is_an_error_in_time(tmp_path: Path) -> None:
    app = write_app(tmp_path, SMALL, start=5)
    with LocalFleet(tmp_path / "fleet", nodes=1, secure=False, patience=60 * patience()) as fleet:
        kill(fleet.started[0])
        said: list[str] = []
        with pytest.raises(FleetError, match="finished:failed"):
            said.extend(fleet.run(app, {"folder": str(tmp_path / "run")}, timeout=120 * patience()))
        assert any("0 of 3 nodes ready after 5 s" in line for line in said), said
    assert not processes(tmp_path)


def test_a_node_with_an_empty_folder_is_left_out(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "empty").mkdir()
    for at, client in enumerate(("ann", "bob")):
        for label in ("cat", "dog"):
            place = tmp_path / f"data-{at}" / client / label
            place.mkdir(parents=True)
            for k in range(10):
                Image.new("L", (8, 8), 20 * k + (5 if label == "cat" else 0)).save(place / f"{k}.png")
    tables = {
        "data": {"name": "folder", "path": "/nowhere", "colour": False, "cache_dir": str(tmp_path / "cache")},
        "model": {"name": "mlp", "hidden": [16]},
        "algorithm": {"name": "ditto"},
        "train": {"rounds": 1, "batch": 4},
    }
    app = write_app(tmp_path, tables, nodes=2)
    folders = [{"data-dir": str(tmp_path / name)} for name in ("data-0", "data-1", "empty")]
    with LocalFleet(tmp_path / "fleet", nodes=3, secure=False, configs=folders, patience=60 * patience()) as fleet:
        run_on_fleet(fleet, app, {"folder": str(tmp_path / "run")})
    done = runfolder.load(tmp_path / "run")
    assert sorted(row["client"] for row in done.clients) == ["ann", "bob"]


def test_simulation_on_ray_gives_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="simulation needs Ray: pip install 'pfedgate[simulation]'")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("".join(f"{name} = {toml.dump(table)}\n" for name, table in SMALL.items()), encoding="utf-8")
    given, work = ["deploy.start=300", "deploy.deadline=300"], tmp_path / "work"
    said = list(once(recipe, tmp_path / "run", nodes=2, simulate={"num-cpus": 1}, given=given, work=work))
    assert any("3 clients on 2 nodes" in line for line in said)
    assert not processes(tmp_path)
    there, here = runfolder.load(tmp_path / "run"), experiment.run(SMALL)
    assert equal(there.server(), here.server)
    assert there.metrics == here.history


@dataclass(frozen=True)
class Captured:
    """A run of pFedGate at a budget of .3 on two nodes, without TLS, and every byte that passed."""

    folder: Path
    streams: list[bytes]
    told: dict[str, Any]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    folder, streams = tmp_path_factory.mktemp("captured") / "pfedgate", list[bytes]()
    told = measure(folder, "pfedgate", 0.3, rounds=2, nodes=2, streams=streams)
    return Captured(folder, streams, told)


def test_no_private_byte_is_on_the_wire(captured: Captured) -> None:
    """What was shared is found, so that the search itself is known to work."""
    tables = runfolder.load(captured.folder / "run").recipe.tables()
    tables["train"]["rounds"] = 1
    tables["run"] |= {"stack": 0, "workers": 1}  # a node trains its clients one by one
    first = experiment.run(tables).server
    largest = max(first.values(), key=torch.numel).numpy().tobytes()
    assert sum(stream.count(largest) for stream in captured.streams) >= 2  # went to both nodes in round 2
    needles = [
        (client, name, value.numpy().tobytes())
        for client, state in private_of_nodes(captured.folder / "fleet", 2).items()
        for name, value in state.items()
        if value.numel() >= 4 and value.any()
    ]
    assert len({client for client, _, _ in needles}) == 20
    found = [(client, name) for client, name, raw in needles if any(raw in stream for stream in captured.streams)]
    assert not found


def test_what_is_on_the_wire_is_little_more_than_what_was_packed(captured: Captured, tmp_path: Path) -> None:
    dense, gated = measure(tmp_path / "fedavg", "fedavg", 1.0, rounds=2, nodes=2), captured.told
    for told in (dense, gated):
        assert told["packed_up"] <= told["up"] <= 1.1 * told["packed_up"]
        assert told["packed_down"] <= told["down"] <= 1.1 * told["packed_down"]
    assert gated["up"] <= 0.45 * dense["up"]
