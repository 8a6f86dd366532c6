"""Gates and partitions of a run, rebuilt from its folder, its recipe and, if it is on this machine, its data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from pfedgate import algorithms, experiment
from pfedgate.config import code
from pfedgate.config import options as catalogue
from pfedgate.config.recipe import GIVEN, PLACES
from pfedgate.engine import files
from pfedgate.runs import gates
from pfedgate.runs.folder import Run
from pfedgate.runs.gates import Seen

Content = dict[str, Any]


def gates_of(run: Run) -> tuple[Content | None, str]:
    """The gates of a run: what they decide now, how that came about, and which are alike; or None, and why.

    Without a checkpoint or the data, the notes of training (gates.jsonl) remain, and "reason" names what is missing.
    The reason is empty for methods without gates.
    """
    seen, count, reason = _now(run)
    with files.naming(run.path / gates.FILE):
        return _gates_of(run, seen, count, reason)


def _gates_of(run: Run, seen: list[Seen], count: int, reason: str) -> tuple[Content | None, str]:
    lines = _lines(run)
    if seen:
        content = _final(seen)
        content["tree"] = tree([s.gate for s in seen]) if len(seen) > 2 else None
    elif lines:
        last = lines[-1]
        content = {"blocks": last["blocks"], "clients": list(last["kept"]), "kept": list(last["kept"].values())}
        content |= {"weights": None, "importance": None, "tree": None}
        # Older code noted no number; `clients` then counts the clients with test data.
        count = last.get("of") or max(len(last["kept"]), run.summary.get("clients") or 0)
    else:
        return None, reason
    content["masks"] = masks_of(content["clients"], content["kept"])
    batches = [s.batches for s in seen]  # older notes have no such number
    content["masks"]["batches"] = float(np.mean(batches)) if seen else lines[-1].get("between_batches")
    content["of"] = count
    content["looked"] = min(count, gates.MOST_CLIENTS) if seen else lines[-1].get("looked", count)
    content["layers"] = [{"name": name, "blocks": at} for name, at in gates.layers_of(content["blocks"]).items()]
    content["rounds"] = [line["round"] for line in lines]
    content["over_rounds"] = _over_rounds(lines)
    content["changes"] = _changes(lines)
    content["reason"] = reason
    return content, ""


def masks_of(clients: Sequence[str], kept: Sequence[str]) -> Content:
    """How many masks there are, the mean Jaccard distance between two clients', and who shares one.

    >>> masks_of(["a", "b", "c"], ["110", "110", "011"])
    {'number': 2, 'distance': 0.444, 'groups': [['a', 'b'], ['c']]}
    """
    groups: dict[str, list[str]] = {}
    for client, bits in zip(clients, kept, strict=True):
        groups.setdefault(bits, []).append(client)
    masks = np.array([[bit == "1" for bit in bits] for bits in kept], np.float64)
    both = masks @ masks.T
    either = masks.sum(1)[:, None] + masks.sum(1)[None] - both
    pairs = len(kept) * (len(kept) - 1)
    distance = float((1 - both / np.maximum(either, 1)).sum() / pairs) if pairs else 0.0
    return {
        "number": len(groups),
        "distance": round(distance, 3),
        "groups": sorted(groups.values(), key=len, reverse=True),
    }


def _lines(run: Run) -> list[Content]:
    path = run.path / gates.FILE
    if not path.exists():
        return []
    # The last line may be half written: the run may still be going.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line]


def _now(run: Run) -> tuple[list[Seen], int, str]:
    """Decisions of the last checkpoint's gates, and how many clients train; or none, and why."""
    recipe = run.recipe
    if not hasattr(algorithms.get(recipe.algorithm.name), "inspect"):
        return [], 0, ""
    if GIVEN in (recipe.data.name, recipe.model.name):
        return [], 0, "data or model of this run were Python objects, which its folder does not hold"
    if code.named(recipe.tables()):
        return [], 0, "this run names code, which a report does not run"
    try:
        server, store = run.server(), run.store()
    except FileNotFoundError:
        return [], 0, "the run's folder holds no checkpoint"
    except gates.UNREADABLE as error:
        return [], 0, f"the run's checkpoint cannot be read ({_why(error)})"
    try:
        plan = experiment.plan(recipe)
    except (ImportError, *gates.UNREADABLE) as error:
        return [], 0, f"gates decide by looking at data, and the data cannot be read here ({_why(error)})"
    try:
        seen = list(gates.look(plan.algorithm, plan.federation, server, store, plan.options, len(run.metrics)))
    except gates.UNREADABLE as error:
        return [], 0, f"the states of its clients cannot be read ({_why(error)})"
    return seen, len(plan.federation.clients), "" if seen else "the run's folder holds no private state of a client"


def _why(error: Exception) -> str:
    # A KeyError shows its message in quotes.
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error) or type(error).__name__


def _final(seen: Sequence[Seen]) -> Content:
    return {
        "blocks": list(seen[0].blocks),
        "clients": [s.client for s in seen],
        "kept": ["".join("01"[int(bit)] for bit in s.kept) for s in seen],
        "weights": [_short(s.weights) for s in seen],
        "importance": [_short(s.importance) for s in seen],
        "density": [s.density for s in seen],
    }


def _short(values: Any) -> list[float]:
    return [float(f"{value:.3g}") for value in values]


def _over_rounds(lines: Sequence[Content]) -> Content:
    """{layer: {"M": {"quantiles": [per round], "histogram": [per round], "top": …}, "G": …}}."""
    if not lines:
        return {}
    return {
        layer: {
            path: {
                "quantiles": [line["layers"][layer][path]["quantiles"] for line in lines],
                "histogram": [line["layers"][layer][path]["histogram"] for line in lines],
                "top": lines[0]["layers"][layer][path]["top"],
            }
            for path in ("M", "G")
        }
        for layer in lines[0]["layers"]
    }


def _changes(lines: Sequence[Content]) -> list[Content]:
    """How much masks differ between clients, and from the evaluation before: mean shares of blocks."""
    changes: list[Content] = []
    before: dict[str, Any] = {}
    for line in lines:
        masks = {client: np.array([bit == "1" for bit in bits]) for client, bits in line["kept"].items()}
        stacked = np.stack(list(masks.values())).astype(np.float64)
        share = stacked.mean(0)
        pairs = len(stacked) / max(1, len(stacked) - 1)
        moved = [float((mask != before[client]).mean()) for client, mask in masks.items() if client in before]
        changes.append(
            {
                "round": line["round"],
                "between": float((2 * share * (1 - share)).mean() * pairs),
                "moved": float(np.mean(moved)) if moved else None,
            }
        )
        before = masks
    return changes


def tree(vectors: Sequence[Any]) -> Content:
    """Ward's clustering of the gates' parameters, as coordinates of a dendrogram."""
    from scipy.cluster import hierarchy

    links = hierarchy.linkage(np.stack(list(vectors)), method="ward")
    drawn = hierarchy.dendrogram(links, no_plot=True)
    return {
        "leaves": [int(leaf) for leaf in drawn["leaves"]],
        # scipy puts leaf i at 10 i + 5; here at i.
        "across": [[(x - 5) / 10 for x in xs] for xs in drawn["icoord"]],
        "height": [list(map(float, ys)) for ys in drawn["dcoord"]],
    }


def data_kind(run: Run) -> str:
    """A key that runs share if their data differs in the seed only, wherever it lies."""
    data = run.recipe.data
    options = {name: value for name, value in data.options.items() if name not in (*PLACES, "seed")}
    return json.dumps([data.name, options, run.recipe.clients.novel], sort_keys=True, default=str)


def data_key(run: Run) -> str:
    """A key that runs on the same partition share."""
    seed = run.recipe.data.options.get("seed")
    return f"{data_kind(run)} {run.recipe.run.seed if seed is None else seed}"


def partition_of(run: Run) -> tuple[Content | None, str]:
    """Samples per client and class; or None if the data cannot be had here, and why."""
    recipe = run.recipe
    if recipe.data.name == GIVEN:
        return None, "the data was a Python object"
    if code.is_code(recipe.data.name):
        return None, "the data comes from code, which a report does not run"
    try:
        federation = catalogue.federation(
            recipe.data.name, recipe.data.options, novel=recipe.clients.novel, seed=recipe.run.seed
        )
        counts = federation.histogram()
    except (ImportError, *gates.UNREADABLE) as error:
        return None, f"the data cannot be read here ({_why(error)})"
    names = federation.columns
    everyone, novel = list(federation.ids), set(federation.novel)
    row, ids = {client: at for at, client in enumerate(everyone)}, everyone
    if len(ids) > gates.MOST_CLIENTS:  # those whose gates are looked at: the first that train
        ids = sorted(ids, key=lambda client: (client in novel, client))[: gates.MOST_CLIENTS]
    about = federation.about
    content = {
        "name": federation.name,
        "how": str(about.get("partition", "given")),
        "alpha": about.get("alpha"),
        "clients": ids,
        "all_clients": len(everyone),
        "novel": [client in novel for client in ids],
        "classes": [str(name) for name in names],
        "counts": [counts[row[client]].tolist() for client in ids],
    }
    return content, ""
