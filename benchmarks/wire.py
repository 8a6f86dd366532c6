"""Bytes of a round on the wire against the packed size, and pFedGate's upload at s = .3 against FedAvg's.

A real fleet on loopback without TLS (which would add about half a percent); a TCP proxy between nodes and server counts
everything that passes from the start of the run to its end: the app itself, HTTP, protobuf, polling, heartbeats. (Not
from one line of the log to the next: a line may arrive when the next round is already on its way.) No evaluation.
Run `python benchmarks/wire.py --quick`. Writes benchmarks/results/wire.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pfedgate.deploy import template as init
from pfedgate.deploy.local import LocalFleet
from pfedgate.deploy.proxy import Proxy
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


def measure(
    folder: Path, algorithm: str, budget: float, rounds: int, nodes: int, tap: Callable[[int], Proxy] = Proxy
) -> dict[str, Any]:
    """Bytes up and down per round: on the wire, and as packed; `tap` counts, and may keep what passes."""
    recipe = folder / "recipe.toml"
    folder.mkdir(parents=True)
    recipe.write_text(RECIPE.format(algorithm=algorithm, rounds=rounds, budget=budget, nodes=nodes))
    app = init.write(folder / "app", recipe)
    with LocalFleet(folder / "fleet", nodes=nodes, secure=False, tap=tap, patience=300) as fleet:
        assert fleet.proxy is not None
        before = fleet.proxy.up, fleet.proxy.down
        for _ in fleet.run(app, {"folder": str(folder / "run")}):
            pass
        after = fleet.proxy.up, fleet.proxy.down
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
