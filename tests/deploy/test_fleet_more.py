"""More real processes, minutes each: `make test-deploy`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra `flower`")

from tests.deploy.fleets import SMALL, gates, patience, processes, run, same, wait_until, write_app

from pfedgate import experiment, runfolder, toml
from pfedgate.deploy.local import LocalFleet, once
from pfedgate.deploy.processes import FleetError, kill
from pfedgate.deploy.proxy import Proxy

pytestmark = pytest.mark.deploy


@pytest.mark.parametrize("name", ["fedavg", "fedem", "heterofl", "pfedgate"])
def test_the_deployed_result_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    """Five clients on two nodes, one of them held out, and half of the clients sampled."""
    tables = {
        **SMALL,
        "data": {"name": "digits", "clients": 5, "samples": 400},
        "algorithm": {"name": name},
        "clients": {"budget": {"0.5": 0.5, "1.0": 0.5}, "fraction": 0.5, "novel": 0.2},
    }
    app = write_app(tmp_path, tables, nodes=2)
    with LocalFleet(tmp_path / "fleet", nodes=2, secure=False, patience=60 * patience()) as fleet:
        run(fleet, app, {"folder": str(tmp_path / "run")})
    there, here = runfolder.load(tmp_path / "run"), experiment.run(tables)
    assert same(there.server(), here.server)
    assert there.metrics == here.history
    assert there.summary["novel"] == here.summary["novel"]


def test_a_killed_server_goes_on_in_a_new_run_to_the_same_result(tmp_path: Path) -> None:
    tables = {**SMALL, "train": {"rounds": 3}}
    app, config = write_app(tmp_path, tables), {"folder": str(tmp_path / "run")}
    with LocalFleet(tmp_path / "fleet", nodes=3, secure=False, patience=60 * patience()) as fleet:
        for line in fleet.run(app, config, timeout=300 * patience()):
            if "round 1/3" in line:
                break
        wait_until(lambda: fleet.log("node-2").count("Receiving: train message") == 2, 60, "the order of round 2")
        assert fleet.link is not None
        kill(fleet.link)  # the SuperLink and the ServerApp below it
        assert len(runfolder.load(tmp_path / "run").metrics) == 1
        fleet.start_link()
        said = run(fleet, app, config)
    assert any("going on after round 1 of 3" in line for line in said)
    assert not processes(tmp_path)
    there, here = runfolder.load(tmp_path / "run"), experiment.run(tables)
    assert same(there.server(), here.server)
    assert there.metrics == here.history
    assert here.store is not None
    assert all(same(state, here.store.get(client) or {}) for client, state in gates(tmp_path / "fleet"))


def test_no_private_byte_is_on_the_wire(tmp_path: Path) -> None:
    """Without TLS, so that all can be read; what was shared is found, so that the search itself is known to work."""
    app = write_app(tmp_path, SMALL)
    with LocalFleet(
        tmp_path / "fleet", nodes=3, secure=False, patience=60 * patience(), tap=lambda port: Proxy(port, keep=True)
    ) as fleet:
        run(fleet, app, {"folder": str(tmp_path / "run")})
        assert fleet.proxy is not None
        captured = [bytes(kept) for kept in fleet.proxy.kept]
    # Before the last round the server's weights went to every node in full.
    first = experiment.run({**SMALL, "train": {"rounds": 1}, "evaluate": {"every": 0}}).server
    largest = max(first.values(), key=torch.numel).numpy().tobytes()
    assert sum(stream.count(largest) for stream in captured) >= 3
    needles = 0
    for _, state in gates(tmp_path / "fleet"):
        for name, value in state.items():
            raw = value.numpy().tobytes()
            if value.numel() >= 4 and value.any():
                needles += 1
                assert not any(raw in stream for stream in captured), name
    assert needles >= 6


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
        run(fleet, app, {"folder": str(tmp_path / "run")})
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
    assert same(there.server(), here.server)
    assert there.metrics == here.history


def test_what_is_on_the_wire_is_little_more_than_what_was_packed(tmp_path: Path) -> None:
    from benchmarks.wire import measure

    dense, gated = (
        measure(tmp_path / name, name, budget, rounds=2, nodes=3)
        for name, budget in (("fedavg", 1.0), ("pfedgate", 0.3))
    )
    for told in (dense, gated):
        assert told["up"] <= 1.1 * told["packed_up"]
        assert told["down"] <= 1.1 * told["packed_down"]
    assert gated["up"] <= 0.45 * dense["up"]
