"""Everything a report shows, gathered from run folders into one dictionary of plain values."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedgate import __version__, runfolder
from pfedgate.names import unknown
from pfedgate.report import tables
from pfedgate.report.gates import data_key, gates_of, partition_of
from pfedgate.report.labels import common, folder_labels, labels_of, settings_of
from pfedgate.runfolder import Run

CURVES = ("accuracy", "bottom_decile", "loss", "spread", "val_accuracy")
TRAINING = ("density", "q", "loss", "bytes_up", "bytes_down")
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
    known = {key: partition_of(runs[keys.index(key)]) for key in dict.fromkeys(keys)}
    partitions: list[Content] = []
    for at, entry in enumerate(told):
        partition, why = known[keys[at]]
        entry["league"] = keys.index(keys[at])  # runs on the same data have the same
        entry["partition"], entry["no_partition"] = _index(partitions, partition), why
        entry["baseline"] = _matching(at, compared, keys, algorithms)
    names = {entry["data"] for entry in told}
    leagues = {
        e["label"]: str(e["league"]) if e["finished"] or not any(o["finished"] for o in told) else None for e in told
    }
    content = {
        "title": title or f"{' and '.join(sorted(names))}: {_listed(algorithms)}",
        "subtitle": ", ".join(
            _listed([f"{entry[key]}" for entry in told]) + what
            for key, what in (("model", ""), ("clients_total", " clients"), ("rounds", " rounds"))
        ),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "version": __version__,
        "baseline": compared,
        "runs": told,
        "partitions": partitions,
        "table": tables.summarise({e["label"]: tables.numbers(e["summary"]) for e in told}, leagues),
        "clients": client_table(told, marked=len(set(keys)) == 1),
        "differences": differences(runs, labels),
        "seeds": seeds(runs, labels),
    }
    return {name: rounded(value) for name, value in content.items()}


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
    summary = run.summary or _so_far(run)
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
        "clients_total": summary.get("clients") or 0,
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
    kept = ("client", "accuracy", "loss", "n_test", "density", "training_bytes_up", "training_q")
    return {name: row[name] for name in kept if row.get(name) is not None}


def curves(run: Run) -> Content:
    """Scores at evaluated rounds, with all bytes and seconds of training spent until then."""
    spent = {"bytes": 0.0, "bytes_up": 0.0, "seconds": 0.0}
    seconds = {line["round"]: line["seconds"] for line in run.timing}
    found: dict[str, list[Any]] = {name: [] for name in ("round", *spent, *CURVES)}
    for record in run.metrics:
        up, down = record.get("bytes_up") or 0, record.get("bytes_down") or 0
        spent["bytes"] += up + down
        spent["bytes_up"] += up
        spent["seconds"] += seconds.get(record["round"], 0.0)
        if "after_broadcast" in record:
            found["round"].append(record["round"])
            for name, value in spent.items():
                found[name].append(value)
            for name in CURVES:
                found[name].append(record["after_broadcast"].get(name))
    return found


def _so_far(run: Run) -> Content:
    """The summary of a run that has not ended."""
    from pfedgate import metrics

    return {**metrics.overall(run.metrics), "seconds": run.seconds}


def client_table(told: Sequence[Content], *, marked: bool = True) -> Content:
    """Accuracy of every client under every run, ready to copy; best values are marked where all had the same data.

    Clients that were held out of training stand at the end, and say so.
    """
    by_run = [
        {row["client"]: row.get("accuracy") for row in entry["clients"]}
        | {f"{row['client']} (novel)": row.get("accuracy") for row in entry["novel"]}
        for entry in told
    ]
    names = sorted({name for accuracies in by_run for name in accuracies}, key=lambda n: (n.endswith(" (novel)"), n))
    rows = []
    for name in names:
        values = [accuracies.get(name) for accuracies in by_run]
        known = [value for value in values if value is not None]
        cells = [
            {
                "text": "–" if value is None else f"{100 * value:.2f}",
                "value": value,
                "best": marked and len(set(known)) > 1 and value == max(known),
            }
            for value in values
        ]
        rows.append({"name": name, "cells": cells})
    head = [{"title": entry["label"], "why": "test accuracy, %", "times": 100} for entry in told]
    return tables.with_copies({"head": head, "rows": rows, "first": "client"}) if rows else {}


def differences(runs: Sequence[Run], labels: Sequence[str]) -> Content:
    """Settings in which the runs differ."""
    settings = [settings_of(run) for run in runs]
    # An option that only some methods have is no difference between runs, but one between methods.
    names = [name for name in settings[0] if all(name in setting for setting in settings)]
    rows = []
    for name in names:
        values = [setting[name] for setting in settings]
        if any(value != values[0] for value in values):
            shown = [json.dumps(value, ensure_ascii=False) for value in values]
            cells = [{"text": text, "value": text, "best": False} for text in shown]
            rows.append({"name": name, "cells": cells})
    head = [{"title": label, "why": ""} for label in labels]
    return tables.with_copies({"head": head, "rows": rows, "first": "setting"}) if rows else {}


def seeds(runs: Sequence[Run], labels: Sequence[str]) -> Content:
    """Runs that differ in nothing but their seed, as mean and deviation; nothing if there are no such runs."""
    groups: dict[str, list[int]] = {}
    data = set()
    for at, run in enumerate(runs):
        told = {section: dict(values) for section, values in run.recipe.tables().items()}
        told["data"].pop("seed", None)
        told["run"] = {}  # of these only the seed changes the result
        data.add(json.dumps([told["data"], told["clients"].get("novel")], sort_keys=True, default=str))
        groups.setdefault(json.dumps(told, sort_keys=True, default=str), []).append(at)
    if all(len(members) < 2 for members in groups.values()):
        return {}
    rows = {}
    for members in groups.values():
        name = labels[members[0]] if len(members) == 1 else common([labels[at] for at in members])
        while name in rows:
            name += "′"
        rows[name] = [tables.numbers(runs[at].summary or _so_far(runs[at])) for at in members]
    return tables.over_seeds(rows, marked=len(data) == 1)


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
