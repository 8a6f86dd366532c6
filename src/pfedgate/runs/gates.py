"""What the gates of a run decide, for reports: the blocks each client keeps, M and G, over rounds.

gates.jsonl    one line per evaluated round, beside metrics.jsonl in a simulated run's folder; never sent anywhere

An algorithm with gates has a method `inspect(got, private, local)`; others have nothing to show. Looking draws from
generators of its own and stores nothing, so a run gives the same bits with and without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.seeds import seeded
from pfedgate.core.state import flat, inside
from pfedgate.core.types import Federation, Round, State
from pfedgate.engine import files
from pfedgate.engine.checkpoint import header
from pfedgate.engine.endpoint import Endpoint
from pfedgate.engine.files import write_atomically
from pfedgate.engine.roster import Options, Roster
from pfedgate.engine.store import DiskStore, Store

FILE = "gates.jsonl"
MOST_CLIENTS = 200  # a picture of more shows nothing, and looking would take longer than the round
# A state that cannot be looked at raises one of these: a file cut short, tensors missing, other names or shapes.
UNREADABLE = (KeyError, RuntimeError, ValueError, OSError, SafetensorError)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BINS = 24
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Seen:
    """What one client's gate decides about its training data."""

    client: str
    blocks: tuple[str, ...]  # names, "layer/number"
    kept: npt.NDArray[np.bool_]
    weights: Floats  # M
    importance: Floats  # G
    density: float
    gate: Floats  # phi as one vector
    batches: float = 0.0  # mean Jaccard distance between the masks of its batches


def has_gates(algorithm: Algorithm) -> bool:
    """Whether there is anything to look at."""
    return callable(getattr(algorithm, "inspect", None))


def look(
    algorithm: Algorithm, federation: Federation, server: State, store: Store, options: Options, done: int
) -> Iterator[Seen]:
    """The decisions of the first clients after so many rounds; clients that never trained have none."""
    if not has_gates(algorithm):
        return
    endpoint = Endpoint(algorithm, federation, store)
    round = Round(max(0, done - 1), options.rounds, options.seed)
    for card in islice(Roster.of(federation, "clients", options, algorithm), MOST_CLIENTS):
        private = store.get(card.id)
        if not private:
            continue
        with seeded(options.seed, "inspect", round.index, card.id):
            got = algorithm.send(server, card, round)
            view: Mapping[str, Any] = getattr(algorithm, "inspect")(got, private, endpoint.local(card, round))  # noqa: B009
        # A file does not keep the order of names; distances between gates need one.
        gate = sorted(inside("gate/", private).items())
        learnt = {name: value for name, value in gate if value.is_floating_point() and ".running" not in name}
        yield Seen(
            card.id,
            tuple(view["blocks"]),
            np.asarray(view["kept"], np.bool_),
            np.asarray(view["weights"], np.float64),
            np.asarray(view["importance"], np.float64),
            float(view["density"]),
            flat(learnt).double().numpy(),
            jaccard(view["batches"]),
        )


def jaccard(masks: Sequence[npt.NDArray[np.bool_]]) -> float:
    """The mean Jaccard distance between pairs of masks: 0 where all are alike, 1 where no two share a block.

    >>> jaccard([np.array([True, True, False]), np.array([True, False, True])])
    0.6666666666666667
    """
    distances = [1 - (a & b).sum() / max(1, (a | b).sum()) for a, b in combinations(masks, 2)]
    return float(np.mean(distances)) if distances else 0.0


def layers_of(blocks: Sequence[str]) -> dict[str, list[int]]:
    """Blocks of each layer, by their names.

    >>> layers_of(["conv/0", "conv/1", "fc"])
    {'conv': [0, 1], 'fc': [2]}
    """
    layers: dict[str, list[int]] = {}
    for number, name in enumerate(blocks):
        layers.setdefault(name.rpartition("/")[0] or name, []).append(number)
    return layers


def summary(seen: Sequence[Seen]) -> dict[str, Any]:
    """Per layer the quantiles and a histogram of M and G over clients and blocks; per client the kept blocks.

    `masks` counts the distinct ones, `between_clients` and `between_batches` are mean Jaccard distances.
    """
    weights, importance = (np.stack([getattr(s, name) for s in seen]) for name in ("weights", "importance"))
    places = {"all blocks": list(range(weights.shape[1])), **layers_of(seen[0].blocks)}
    layers: dict[str, dict[str, Any]] = {}
    for name, at in places.items():
        layers[name] = {}
        for symbol, values, top in (("M", weights[:, at], 2.0), ("G", importance[:, at], 1.0)):
            quantiles = [round(float(q), 4) for q in np.quantile(values, QUANTILES)]
            counts, _ = np.histogram(np.clip(values, 0, top), BINS, (0.0, top))
            layers[name][symbol] = {"quantiles": quantiles, "histogram": counts.tolist(), "top": top}
    bits = {s.client: "".join("01"[int(bit)] for bit in s.kept) for s in seen}
    return {
        "layers": layers,
        "kept": bits,
        "blocks": list(seen[0].blocks),
        "masks": len(set(bits.values())),
        "between_clients": round(jaccard([s.kept for s in seen]), 4),
        "between_batches": round(float(np.mean([s.batches for s in seen])), 4),
    }


@dataclass(frozen=True)
class GateLog:
    """A callback that adds a line to gates.jsonl whenever models were evaluated and the round is on disk."""

    algorithm: Algorithm
    federation: Federation
    options: Options
    folder: Path

    @classmethod
    def wanted(cls, algorithm: Algorithm, federation: Federation, options: Options, folder: Any) -> list[GateLog]:
        """One of these if the run has a folder and gates; else none. Of many clients it looks at the first ones."""
        if folder is None or not has_gates(algorithm):
            return []
        return [cls(algorithm, federation, options, Path(folder))]

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Hear of a start or a round."""
        path, checkpoint = self.folder / FILE, self.folder / "checkpoint.safetensors"
        done, scored = int(event.get("round", 0)), "after_broadcast" in event
        if event["event"] == "start":
            # Rounds after the checkpoint that a run goes on from will come again. A crash may have cut the last line
            # short, or have come before it.
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            with files.naming(path):
                rounds = [int(json.loads(line)["round"]) for line in lines]
            if lines and rounds[-1] > done:
                valid = [line + "\n" for line, round in zip(lines, rounds, strict=True) if round <= done]
                write_atomically(path, "".join(valid).encode(), sync=True)
            elif path.exists() and not path.read_bytes().endswith(b"\n"):
                write_atomically(path, "".join(line + "\n" for line in lines).encode(), sync=True)
            if done and done not in rounds:
                metrics = (self.folder / "metrics.jsonl").read_text().splitlines()
                scored = "after_broadcast" in json.loads(metrics[done - 1])
        if event["event"] == "end" or not scored or not checkpoint.exists():
            return
        # With checkpoint_every > 1 the one on disk may be older than the private states in the store.
        about = header(checkpoint)
        if about["lengths"]["metrics.jsonl"] != (self.folder / "metrics.jsonl").stat().st_size:
            return
        store = DiskStore(self.folder / "private", about["commit"])
        server, _ = files.tensors(checkpoint)
        seen = list(look(self.algorithm, self.federation, server, store, self.options, done))
        if seen:
            clients = len(self.federation.clients)
            line = {"round": done, "looked": min(MOST_CLIENTS, clients), "of": clients, **summary(seen)}
            files.append(path, json.dumps(line) + "\n", sync=True)
