"""The Ray exchange: the same bits as one process, also when a node vanishes in the middle of a round."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.studies import page_data
from tests.support.toys import clusters, plain_mlp, task

import pfedgate
from pfedgate.algorithms import build
from pfedgate.core.errors import ClientError, RecipeError
from pfedgate.core.state import equal
from pfedgate.core.types import Card, Round
from pfedgate.engine.server import Options, run
from pfedgate.studies import reproduce

os.environ.setdefault(
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"
)  # read at import: Ray then binds to the loopback address
ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.deploy]

from pfedgate.engine.cluster import Cluster  # noqa: E402

OPTIONS = Options(rounds=3, evaluate_every=1, stack=0, device="cpu")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of two nodes on this machine, bound to the loopback address."""
    from ray.cluster_utils import Cluster as LocalCluster

    cluster = LocalCluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_ip_address": "127.0.0.1"})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", _node_ip_address="127.0.0.1")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_a_cluster_gives_the_bits_of_one_process(nodes: Any, name: str) -> None:
    algorithm = build(name, task(plain_mlp))
    alone, spread = (run(algorithm, clusters(), OPTIONS, **way) for way in ({}, {"exchange": Cluster}))
    assert equal(alone.server, spread.server)
    assert [r["after_broadcast"] for r in alone.history] == [r["after_broadcast"] for r in spread.history]
    for client in clusters().clients:
        mine, theirs = (result.store.get(client) or {} for result in (alone, spread))  # type: ignore[union-attr]
        assert equal(mine, theirs)


def test_a_node_that_vanishes_in_a_round_changes_no_bit(nodes: Any) -> None:
    algorithm = build("ditto", task(plain_mlp))
    alone = run(algorithm, clusters((2000,) * 8), OPTIONS)
    node = nodes.add_node(num_cpus=1, node_ip_address="127.0.0.1")
    nodes.wait_for_nodes()
    assert ray.cluster_resources()["CPU"] == 2

    def vanish() -> None:
        time.sleep(1.0)
        nodes.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=vanish)
    thread.start()
    spread = run(algorithm, clusters((2000,) * 8), OPTIONS, exchange=Cluster)
    thread.join()
    assert len(nodes.list_all_nodes()) == 1
    assert equal(alone.server, spread.server)


def test_a_study_on_a_cluster_gives_the_numbers_of_one_process(nodes: Any, tmp_path: Path) -> None:
    over = [{"train": {"rounds": 1}}]
    pages = {}
    for on in ("", "ray"):
        out = tmp_path / (on or "here")
        reproduce(["table10"], scale="tiny", out=out, over=over, on=on)
        assert {path.name for path in (out / "tiny/cells").iterdir()} == {
            path.name for path in (tmp_path / "here/tiny/cells").iterdir()
        }
        rows = page_data(out / "tiny/results", "table10")["rows"]
        pages[on] = [
            (row["row"], {name: value for name, value in row["numbers"].items() if name != "seconds"}) for row in rows
        ]
    assert pages[""] == pages["ray"]


def test_a_cell_that_fails_on_a_cluster_is_named(nodes: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"4 of 4 cells failed; table10/digits/.*samples"):
        reproduce(["table10"], scale="tiny", out=tmp_path, over=[{"data": {"samples": 2}}], on="ray")


def test_an_error_names_the_client(nodes: Any) -> None:
    class Failing:
        clients, novel = ("c0",), ()
        prepare = staticmethod(lambda x: x)

        def part(self, client: str, name: str) -> Any:
            raise OSError("its disk is gone")

    exchange = Cluster(build("fedavg", task(plain_mlp)), Failing(), None)  # type: ignore[arg-type]
    exchange.store = type("Empty", (), {"get": staticmethod(lambda client: None)})()
    with pytest.raises((ClientError, OSError, ray.exceptions.RayTaskError), match="its disk is gone"):
        list(exchange.train({}, Round(), [[Card("c0", 3)]]))


def test_a_recipe_runs_on_a_cluster(nodes: Any) -> None:
    settings = {"data": {"name": "digits", "clients": 4}, "train": {"rounds": 2}}
    alone, spread = (pfedgate.run(**settings, run={"exchange": kind}) for kind in ("auto", "ray"))
    assert equal(alone.server, spread.server)
    with pytest.raises(RecipeError, match="did you mean 'ray'"):
        pfedgate.run(**settings, run={"exchange": "rya"})
