"""What clients keep on nodes."""

from __future__ import annotations

from pathlib import Path

from pfedgate.core.types import State
from pfedgate.deploy.node import current


def private_of_nodes(folder: Path, nodes: int = 3) -> dict[str, State]:
    """Private states by client: of nodes that keep them in folder/node-0, … (a fleet), or all in folder/state."""
    states: dict[str, State] = {}
    for at in range(nodes):
        own = folder / f"node-{at}"
        root = own if own.exists() else folder / "state"
        for experiment in sorted(root.glob("*")):
            store = current(root, experiment.name, f"{at}-of-{nodes}")
            for client in store.clients():
                state = store.get(client)
                assert state is not None
                states[client] = state
    return states
