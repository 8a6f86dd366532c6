"""Everything a report shows, gathered from run folders into one dictionary of plain values."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedgate import __version__
from pfedgate.core.errors import unknown
from pfedgate.engine import metrics
from pfedgate.report import tables
from pfedgate.report.across import client_table, differences, seeds
from pfedgate.report.gates import data_key, gates_of, partition_of
from pfedgate.report.labels import folder_labels, labels_of
from pfedgate.runs import folder as runfolder
from pfedgate.runs.folder import Run

# What charts show, and no more: of many rounds and clients a number that nobody sees is a megabyte.
CURVES = ("accuracy", "bottom_decile", "loss")
TRAINING = ("density", "q", "bytes_up")
Content = dict[str, Any]


def open_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in some folders; a comparison counts as the runs it holds, the same run twice as one."""
    if not paths:
        raise ValueError("name at least one run folder")
    found = {run.path.resolve(): run for path in paths for run in runfolder.load_all(path)}
    begun = [run for run in found.values() if run.metrics]
    empty = ", ".join(str(run.path) for run in found.values() if not run.metrics)
    if not begun:
        raise ValueError(f"no round is finished in {empty}; wait for the first one")
    if empty:
        warnings.warn(f"left out, because no round is finished there yet: {empty}", stacklevel=2)
    return begun


def choose_baseline(baseline: str | None, labels: Sequence[str], algorithms: Sequence[str]) -> int | None:
    """The run that clients are compared with: by label, by algorithm; by default the first FedAvg, if any.

    >>> choose_baseline(None, ["a", "b"], ["pfedgate", "fedavg"]), choose_baseline("a", ["a", "b"], ["x", "y"])
    (1, 0)
    """
    names = [*labels, *algorithms]
    if baseline is not None:
        if baseline not in names:
            raise ValueError(unknown("baseline", baseline, sorted(set(names))))
        return names.index(baseline) % len(labels)
    if len(labels) < 2:
        return None
    return algorithms.index("fedavg") if "fedavg" in algorithms else len(labels) - 1


def gather(runs: Sequence[Run], *, baseline: str | None = None, title: str | None = None) -> Content:
    """All of a report's content. What cannot be had (no data here, no gates) is left out, with the reason."""
    labels = labels_of(runs)
    algorithms = [run.recipe.algorithm.name for run in runs]
    folders = folder_labels(runs)
    named = labels[folders.index(baseline)] if baseline in folders else baseline
    compared = choose_baseline(named, labels, algorithms)
    told = [_run(run, label) for run, label in zip(runs, labels, strict=True)]
    keys = [data_key(run) for run in runs]
    known = {key: _partition([run for run, own in zip(runs, keys, strict=True) if own == key]) for key in set(keys)}
    partitions: list[Content] = []
    for at, entry in enumerate(told):
        partition, why = known[keys[at]]
        entry["partition"], entry["no_partition"] = _index(partitions, partition), why
        entry["baseline"] = _matching(at, compared, keys, algorithms)
    for entry, league in zip(told, leagues_of(told, keys), strict=True):
        entry["league"] = league
    names = {entry["data"] for entry in told}
    facts = (("model", ""), ("clients_total", " clients"), ("rounds", " rounds"))
    content = {
        "title": title or f"{' and '.join(sorted(names))}: {_listed(algorithms)}",
        "subtitle": ", ".join(
            _listed([str(entry[key]) for entry in told if entry[key]]) + what
            for key, what in facts
            if any(entry[key] for entry in told)  # before the first evaluation nobody has counted clients
        ),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "version": __version__,
        "baseline": compared,
        "runs": told,
        "partitions": partitions,
        "table": tables.summarise(
            {e["label"]: tables.numbers(e["summary"]) for e in told}, {e["label"]: e["league"] for e in told}
        ),
        "clients": client_table(told),
        "differences": differences(runs, labels),
        "seeds": seeds(runs, labels),
    }
    return {name: rounded(value) for name, value in content.items()}


def leagues_of(told: Sequence[Content], keys: Sequence[str]) -> list[int | None]:
    """Which runs can win against each other: those on the same data and of the same length.

    A run that has not ended is in no league, unless none has.

    >>> runs = [{"finished": True, "rounds": 9}, {"finished": False, "rounds": 9}, {"finished": True, "rounds": 5}]
    >>> leagues_of(runs, ["a", "a", "a"]), leagues_of(runs[1:2] * 2, ["a", "a"])
    ([0, None, 1], [0, 0])
    """
    ended = any(entry["finished"] for entry in told)
    numbers: dict[tuple[str, int], int] = {}
    return [
        numbers.setdefault((key, entry["rounds"]), len(numbers)) if entry["finished"] or not ended else None
        for entry, key in zip(told, keys, strict=True)
    ]


def _partition(runs: Sequence[Run]) -> tuple[Content | None, str]:
    """The data that some runs share: of the first that has it here, as they may look for it at different places."""
    places = {repr(run.recipe.data): run for run in reversed(runs)}
    found = [partition_of(run) for run in reversed(places.values())]
    return next((told for told in found if told[0] is not None), found[0])


def _matching(at: int, baseline: int | None, keys: Sequence[str], algorithms: Sequence[str]) -> int | None:
    """The run to compare clients with: the baseline, or its like on the same data (another seed shares out anew).

    >>> _matching(2, 0, ["seed 0", "seed 1", "seed 1"], ["fedavg", "fedavg", "ditto"])
    1
    """
    if baseline is None or algorithms[at] == algorithms[baseline]:
        return baseline if at != baseline and baseline is not None and keys[at] == keys[baseline] else None
    alike = [n for n, key in enumerate(keys) if key == keys[at] and algorithms[n] == algorithms[baseline]]
    return baseline if baseline in alike else alike[0] if alike else None


def _run(run: Run, label: str) -> Content:
    recipe, records = run.recipe, run.metrics
    summary = run.summary or {**metrics.overall(records), "seconds": run.seconds}  # so far
    rows = run.clients
    gates, no_gates = gates_of(run)
    return {
        "label": label,
        "path": str(run.path),
        "algorithm": recipe.algorithm.name,
        "data": recipe.data.name,
        "model": recipe.model.name,
        "finished": run.finished,
        "rounds": len(records),
        "planned": recipe.train.rounds,
        "summary": summary,
        "clients_total": summary.get("clients") or None,
        "curves": curves(run),
        "training": {
            "round": [r["round"] for r in records],
            **{name: [r.get(name) for r in records] for name in TRAINING if any(name in r for r in records)},
        },
        "clients": [_client(row) for row in rows if row["point"] == "after_broadcast"],
        "novel": [_client(row) for row in rows if row["point"] == "novel"],
        "gates": gates,
        "no_gates": no_gates,
        "config": recipe.toml(comments=False),
        "environment": run.environments if (run.path / runfolder.ENVIRONMENT).exists() else [],
    }


def _client(row: Mapping[str, Any]) -> Content:
    # A client without test data has no accuracy.
    accuracy = row.get("accuracy")
    known = accuracy is not None and math.isfinite(accuracy)
    return {"client": row["client"], **({"accuracy": accuracy} if known else {})}


def curves(run: Run) -> Content:
    """Scores at evaluated rounds, with all bytes and seconds of training spent until then."""
    spent = {"bytes": 0.0, "seconds": 0.0}
    seconds = {line["round"]: line["seconds"] for line in run.timing}
    found: dict[str, list[Any]] = {name: [] for name in ("round", *spent, *CURVES)}
    for record in run.metrics:
        spent["bytes"] += (record.get("bytes_up") or 0) + (record.get("bytes_down") or 0)
        spent["seconds"] += seconds.get(record["round"], 0.0)
        if "after_broadcast" in record:
            found["round"].append(record["round"])
            for name, value in spent.items():
                found[name].append(value)
            for name in CURVES:
                found[name].append(record["after_broadcast"].get(name))
    return found


def _index(known: list[Content], item: Content | None) -> int | None:
    if item is None:
        return None
    if item not in known:
        known.append(item)
    return known.index(item)


def _listed(names: Sequence[str]) -> str:
    """Names in a row.

    >>> _listed(["a", "b", "a", "c"])
    'a, b and c'
    """
    once = list(dict.fromkeys(names))
    return once[0] if len(once) == 1 else f"{', '.join(once[:-1])} and {once[-1]}"


def rounded(value: Any) -> Any:
    """Five digits are more than a picture shows; what JSON does not have becomes None.

    >>> rounded({"a": [0.123456789, float("nan"), 12345678.0]})
    {'a': [0.12346, None, 12346000.0]}
    """
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value
