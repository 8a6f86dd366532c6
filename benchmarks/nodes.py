"""Where a cluster ends: what a round costs a worker and the server, and on paper what 100 nodes would do.

    python benchmarks/nodes.py [--sample 1000] [--repeats 5]

Measured on one thread, minima of repeats: a client's training with its message (worker), opening, checking and adding
that message (server), packing the model once. Computed from it: a round of so many clients on nodes of 8 cores, each
with a link of 1 Gbit/s, as the slowest of workers, server and the server's own link; and from how many nodes on the
server is the limit. A tree of mergers would move its work to the nodes, but sums in another order have other bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from pfedgate import experiment
from pfedgate.core.types import Card, Round
from pfedgate.engine import wire
from pfedgate.engine.endpoint import Endpoint, Reply, checked
from pfedgate.engine.store import MemoryStore

CORES, LINK = 8, 125e6  # of a node; bytes a second
NODES = (1, 10, 100, 1000)
CASES = (
    ("digits, mlp, FedAvg", {"data": {"name": "digits"}, "model": {"name": "mlp"}, "algorithm": "fedavg"}),
    ("Fashion-MNIST, FedAvg", {"data": {"name": "fashion"}, "model": {"name": "cnn_femnist"}, "algorithm": "fedavg"}),
    (
        "Fashion-MNIST, pFedGate, s = .3 of all",
        {
            "data": {"name": "fashion"}, "model": {"name": "cnn_femnist"},
            "algorithm": {"name": "pfedgate", "resources": "all"}, "clients": {"budget": 0.3},
        },
    ),
)  # fmt: skip


def least(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some repeats."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def measure(tables: dict[str, object], repeats: int) -> tuple[float, float, float, int, int]:
    """Seconds of a worker and of the server for one client, of packing; bytes up and down."""
    plan = experiment.plan(experiment.resolve(tables))
    algorithm, federation = plan.algorithm, plan.federation
    reach, round = Endpoint(algorithm, federation, MemoryStore()), Round(0, 10, 0)
    server = algorithm.init_server(0)
    client = federation.clients[0]
    budget = plan.recipe.clients.budget
    card = Card(client, federation.part(client, "train").n, float(budget))
    got = algorithm.send(server, card, round)
    message = b""

    def train() -> None:
        nonlocal message
        (reply,) = reach.train(server, round, [[card]])
        assert reply.update is not None, reply.reason
        message = wire.encode(reply.update, client=card.id, round=0)

    worker = least(train, repeats)
    merger = algorithm.merger(server, round)

    def take() -> None:
        reply = checked(algorithm, got, Reply(card, wire.decode(message).update, 0, len(message)))
        assert reply.update is not None
        merger.add(card, reply.update)

    return worker, least(take, 4 * repeats), least(lambda: wire.pack(got), repeats), len(message), len(wire.pack(got))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sample", type=int, default=1000, help="clients of a round")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for title, tables in CASES:
        worker, server, pack, up, down = measure(tables, given.repeats)
        print(f"{title}: a client {1e3 * worker:.1f} ms, the server {1e3 * server:.2f} ms for it, {up / 1e6:.2f} MB up")
        for nodes in NODES:
            # The model goes to each node once; every update comes to the server.
            parts = {
                "workers": given.sample * worker / (nodes * CORES),
                "server": given.sample * server + pack,
                "server's link": (nodes * down + given.sample * up) / LINK,
            }
            limit = max(parts, key=lambda name: parts[name])
            print(f"  {nodes:5} nodes: a round of {given.sample} clients {parts[limit]:8.2f} s, limited by the {limit}")
        print(f"  the server or its link is the limit from {worker / CORES / max(server, up / LINK):.0f} nodes on")


if __name__ == "__main__":
    main()
