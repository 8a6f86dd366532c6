"""Bytes of a round on the wire against the packed size, and pFedGate's upload at s = .3 against FedAvg's.

A real fleet on loopback without TLS (which would add about half a percent); a TCP proxy between nodes and server counts
everything that passes from the start of the run to its end: the app itself, HTTP, protobuf, polling, heartbeats. (Not
from one line of the log to the next: a line may arrive when the next round is already on its way.) No evaluation.
Run `python benchmarks/wire.py --quick`. Writes benchmarks/results/wire.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import selectors
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pfedgate.deploy.local import LocalFleet
from pfedgate.deploy.starter import write_app
from pfedgate.runs import folder as runfolder

RECIPE = """
[data]
name = "digits"
clients = 20

[algorithm]
name = "{algorithm}"

[train]
rounds = {rounds}

[clients]
budget = {budget}

[evaluate]
every = 0

[deploy]
nodes = {nodes}
start = 600
deadline = 600
"""


class Proxy:
    """Listens on `port` of loopback and hands on to `target`; `up` counts bytes from clients, `down` bytes to them."""

    def __init__(self, target: int, *, keep: bool = False) -> None:
        self.target, self.keep = target, keep
        self.up = self.down = 0
        self.streams: list[bytearray] = []  # one for each direction of each connection
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._lock = threading.Lock()
        self._open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while self._open:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.target), timeout=10)
        except OSError:
            client.close()
            return
        sides = {client: (server, bytearray()), server: (client, bytearray())}
        with self._lock:
            self.streams += [stream for _, stream in sides.values()]
        with client, server, selectors.DefaultSelector() as ready:
            for side in sides:
                ready.register(side, selectors.EVENT_READ)
            while self._open:
                for key, _ in ready.select(timeout=1):
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    other, stream = sides[source]
                    try:
                        data = source.recv(1 << 16)
                        other.sendall(data)
                    except OSError:
                        return
                    if not data:
                        return
                    with self._lock:
                        self.up += len(data) if source is client else 0
                        self.down += len(data) if source is server else 0
                        if self.keep:
                            stream += data

    def close(self) -> None:
        """Stop listening and let connections go."""
        self._open = False
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


class TappedFleet(LocalFleet):
    """A fleet without TLS whose nodes reach the SuperLink through a proxy."""

    def __init__(self, folder: str | Path, *, keep: bool = False, **options: Any) -> None:
        super().__init__(folder, secure=False, **options)
        self.keep = keep
        self.proxy: Proxy | None = None

    def gateway(self) -> int:
        self.proxy = self.proxy or Proxy(self.port, keep=self.keep)
        return self.proxy.port

    def close(self) -> None:
        super().close()
        if self.proxy is not None:
            self.proxy.close()


def measure(
    folder: Path, algorithm: str, budget: float, rounds: int, nodes: int, streams: list[bytes] | None = None
) -> dict[str, Any]:
    """Bytes up and down per round: on the wire, and as packed; the bytes themselves go to `streams`."""
    recipe = folder / "recipe.toml"
    folder.mkdir(parents=True)
    recipe.write_text(RECIPE.format(algorithm=algorithm, rounds=rounds, budget=budget, nodes=nodes))
    app = write_app(folder / "app", recipe)
    with TappedFleet(folder / "fleet", nodes=nodes, keep=streams is not None, patience=300) as fleet:
        assert fleet.proxy is not None
        before = fleet.proxy.up, fleet.proxy.down
        for _ in fleet.run(app, {"folder": str(folder / "run")}):
            pass
        after = fleet.proxy.up, fleet.proxy.down
        if streams is not None:
            streams += map(bytes, fleet.proxy.streams)
    packed = runfolder.load(folder / "run").metrics
    each = {
        "up": (after[0] - before[0]) / rounds,
        "down": (after[1] - before[1]) / rounds,
        "packed_up": sum(record["bytes_up"] for record in packed) / rounds,
        # All clients of a node share one State: it is sent to the node once.
        "packed_down": sum(record["bytes_down"] for record in packed) / rounds / 20 * nodes,
    }
    return {"algorithm": algorithm, "budget": budget, **each}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="two rounds instead of four")
    options.add_argument("--nodes", type=int, default=3)
    given = options.parse_args()
    rounds = 2 if given.quick else 4
    with tempfile.TemporaryDirectory() as work:
        found = [
            measure(Path(work) / name, name, budget, rounds, given.nodes)
            for name, budget in (("fedavg", 1.0), ("pfedgate", 0.3))
        ]
    table = Table(title="bytes per round")
    for title in ("algorithm", "budget", "wire up", "/ packed", "wire down", "/ packed", "up / FedAvg's"):
        table.add_column(title, justify="right")
    for row in found:
        row["up_ratio"], row["down_ratio"] = row["up"] / row["packed_up"], row["down"] / row["packed_down"]
        row["of_fedavg"] = row["up"] / found[0]["up"]
        table.add_row(
            row["algorithm"], f"{row['budget']:g}", f"{row['up']:,.0f}", f"{row['up_ratio']:.3f}",
            f"{row['down']:,.0f}", f"{row['down_ratio']:.3f}", f"{row['of_fedavg']:.3f}",
        )  # fmt: skip
    Console().print(table)
    out = Path(__file__).parent / "results" / "wire.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"rounds": rounds, "nodes": given.nodes, "runs": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
