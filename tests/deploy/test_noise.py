"""Differential privacy over a grid: the bits of one process, keys of nodes alone, and rounds told only once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.fakes import TABLES, Spoil, deployed

from pfedgate import experiment
from pfedgate.core.state import equal
from pfedgate.deploy.local import LocalFleet
from pfedgate.deploy.messages import Parcel
from pfedgate.runs import folder as runfolder

pytest.importorskip("flwr", reason="needs the extra `flower`")
pytest.importorskip("opacus", reason="epsilon is counted with the extra privacy")

CLIENTS = {
    **TABLES, "algorithm": {"name": "pfedgate"},
    "privacy": {"level": "client", "noise": 0.5, "clip": 0.3, "delta": 0.01, "secret": False},
}  # fmt: skip
SAMPLES = {
    **TABLES, "algorithm": {"name": "fedper"}, "train": {"rounds": 2, "correction": "prediction"}, "clients": {},
    "privacy": {"level": "sample", "noise": 1.0, "clip": 0.5, "delta": 0.01, "secret": False},
}  # fmt: skip


@pytest.mark.parametrize("tables", [CLIENTS, SAMPLES], ids=["client", "sample"])
def test_noise_over_a_grid_is_that_of_one_process(tables: dict[str, Any], tmp_path: Path) -> None:
    there, grid, _ = deployed(tmp_path, tables)
    here = experiment.run(tables)
    assert equal(there.server, here.server)
    assert there.history == here.history
    assert [record["epsilon"] for record in there.history] == sorted(record["epsilon"] for record in there.history)
    assert there.summary["epsilon"] == here.summary["epsilon"] > 0
    if tables is SAMPLES:
        updates = [parcel for _, way, parcel in grid.traffic if way == "up" and parcel.bodies]
        assert updates
        assert not any(b'"loss"' in body for parcel in updates for body in parcel.bodies), "it would tell of samples"


class Stop(Exception):
    pass


def _ears(sent: list[tuple[int, str, int, bytes]], stop: bool) -> Spoil:
    """Notes round, client and update; stops the server once all of round 2 have answered."""

    def spoil(node: int, order: Parcel, answer: Parcel) -> list[Parcel]:
        if order.about["stage"] == "train":
            at = order.about["round"]["index"]
            for client, about in answer.about["clients"].items():
                sent.append((at, client, node, answer.bodies[about["body"]]))
            if stop and sum(index == 1 for index, *_ in sent) == 6:
                raise Stop
        return [answer]

    return spoil


def test_a_node_tells_a_round_that_a_killed_server_repeats_only_once(tmp_path: Path) -> None:
    """Noise drawn anew would give the server two versions of one update, whose mean has less of it."""
    tables = {**SAMPLES, "privacy": {**SAMPLES["privacy"], "secret": True}}
    sent: list[tuple[int, str, int, bytes]] = []
    with pytest.raises(Stop):
        deployed(tmp_path, tables, spoil=_ears(sent, True))
    deployed(tmp_path, tables, spoil=_ears(sent, False))
    assert [at for at, *_ in sent].count(1) == 12
    first, second = ({client: body for at, client, _, body in half if at == 1} for half in (sent[:12], sent[12:]))
    assert first == second
    keys = {path: path.read_bytes() for path in tmp_path.rglob("noise.key")}
    assert len(keys) == len(set(keys.values())) == 3, "each node has its own, and the server none"
    assert all(path.is_relative_to(tmp_path / "state") and path.stat().st_mode & 0o077 == 0 for path in keys)
    assert not any(key in body for key in keys.values() for *_, body in sent)
    other: list[tuple[int, str, int, bytes]] = []
    deployed(tmp_path / "other", tables, spoil=_ears(other, False))
    assert not {body for *_, body in other} & {body for *_, body in sent}


@pytest.mark.deploy
@pytest.mark.parametrize("level", ["client", "sample"])
def test_noise_over_real_flower_is_that_of_one_process(level: str, tmp_path: Path) -> None:
    from tests.support.fleets import SMALL, patience, processes, run_on_fleet, write_app

    other = {"client": CLIENTS, "sample": SAMPLES}[level]
    tables = {
        **SMALL, "algorithm": other["algorithm"], "privacy": other["privacy"], "evaluate": {"every": 0}, "clients": {},
        "train": {"rounds": 2, "batch": 8, "correction": "prediction"},
    }  # fmt: skip
    app = write_app(tmp_path, tables, nodes=2)
    with LocalFleet(tmp_path / "fleet", nodes=2, secure=False, patience=60 * patience()) as fleet:
        run_on_fleet(fleet, app, {"folder": str(tmp_path / "run")})
    assert not processes(tmp_path)
    there, here = runfolder.load(tmp_path / "run"), experiment.run(tables)
    assert equal(there.server(), here.server)
    assert there.metrics == here.history
    assert there.summary["epsilon"] == here.summary["epsilon"] > 0
