"""All facts of a report, gathered from run folders into one dictionary of plain values."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedgate import __version__
from pfedgate.config.recipe import essence
from pfedgate.core.errors import unknown, warn
from pfedgate.core.kinds import METRICS, Metric
from pfedgate.engine import metrics
from pfedgate.report import tables, verdict
from pfedgate.report.gate_facts import data_key, data_kind, gates_of, partition_of
from pfedgate.report.labels import common, folder_labels, labels_of, settings_of
from pfedgate.report.verdict import Contender
from pfedgate.runs import folder as runfolder
from pfedgate.runs.folder import Run

# Charts show these and no more: with many rounds and clients a number without a reader is a megabyte.
CURVES = ("accuracy", "bottom_decile", "loss")
TRAINING = ("density", "q", "bytes_up")
Content = dict[str, Any]


def open_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in some folders; a comparison counts as the runs it holds, the same run twice as one."""
    if not paths:
        raise ValueError("name at least one run folder")
    runs = {run.path.resolve(): run for path in paths for run in runfolder.load_all(path)}
    begun = [run for run in runs.values() if run.metrics]
    empty = ", ".join(str(run.path) for run in runs.values() if not run.metrics)
    if not begun:
        raise ValueError(f"no round is finished in {empty}; wait for the first one")
    if empty:
        warn(f"left out, because no round is finished there yet: {empty}")
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
    """All of a report's content. What a folder does not hold (data, gates) is left out, with the reason."""
    labels, folders = labels_of(runs), folder_labels(runs)
    algorithms = [run.recipe.algorithm.name for run in runs]
    named = labels[folders.index(baseline)] if baseline in folders else baseline
    compared = choose_baseline(named, labels, algorithms)
    entries = [_run(run, label) for run, label in zip(runs, labels, strict=True)]
    keys = [data_key(run) for run in runs]
    leagues = leagues_of(entries, keys)
    common_target(entries, leagues, runs[0].metric)
    shared = {key: _partition([run for run, own in zip(runs, keys, strict=True) if own == key]) for key in set(keys)}
    partitions: list[Content] = []
    for at, (entry, key) in enumerate(zip(entries, keys, strict=True)):
        partition, reason = shared[key]
        if partition is not None and partition not in partitions:
            partitions.append(partition)
        entry["partition"] = None if partition is None else partitions.index(partition)
        entry["no_partition"] = reason
        entry["baseline"] = _matching(at, compared, keys, algorithms)
        entry["league"] = leagues[at]
    names = sorted({entry["data"] for entry in entries})
    facts = (("model", ""), ("clients_total", " clients"), ("rounds", " rounds"))
    content = {
        "title": title or f"{' and '.join(names)}: {_listed(algorithms)}",
        "subtitle": ", ".join(
            _listed([str(entry[key]) for entry in entries if entry[key]]) + what
            for key, what in facts
            if any(entry[key] for entry in entries)  # clients are counted at the first evaluation
        ),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "version": __version__,
        "baseline": compared,
        "runs": entries,
        "metric": entries[0]["metric"],
        "partitions": partitions,
        "table": tables.summarise(
            {entry["label"]: tables.numbers(entry["summary"]) for entry in entries},
            dict(zip(labels, leagues, strict=True)),
            runs[0].metric,
        ),
        "clients": client_table(entries),
        "differences": differences(runs, labels),
        "seeds": seeds(runs, entries),
        "verdict": verdict.sentences(contenders(runs, entries)),
    }
    return {name: rounded(value) for name, value in content.items()}


def leagues_of(entries: Sequence[Content], keys: Sequence[str]) -> list[int | None]:
    """A number for each set of runs that can win against each other: those on the same data and of the same length.

    A run that has not ended is in no league, unless none has.

    >>> runs = [{"finished": True, "rounds": 9}, {"finished": False, "rounds": 9}, {"finished": True, "rounds": 5}]
    >>> leagues_of(runs, ["a", "a", "a"]), leagues_of(runs[1:2] * 2, ["a", "a"])
    ([0, None, 1], [0, 0])
    """
    ended = any(entry["finished"] for entry in entries)
    numbers: dict[tuple[str, Any], int] = {}
    return [
        numbers.setdefault((key, _length(entry)), len(numbers)) if entry["finished"] or not ended else None
        for entry, key in zip(entries, keys, strict=True)
    ]


def _length(entry: Content) -> int:
    """Rounds to compare by: those planned, which a run that stopped early has ended with, too."""
    rounds: int = entry["planned"] if entry["finished"] and "planned" in entry else entry["rounds"]
    return rounds


def common_target(entries: Sequence[Content], leagues: Sequence[int | None], metric: Metric) -> None:
    """Count rounds to 90 % of the best score in a league: a run that never gets far would reach its own best soon.

    A run in no league, such as one that has not ended, has no such number.
    """
    for league in set(leagues):
        rivals = [entry for entry, own in zip(entries, leagues, strict=True) if own == league]
        curves = [list(zip(e["curves"]["round"], e["curves"]["accuracy"], strict=True)) for e in rivals]
        scores = [score for curve in curves for _, score in curve if score is not None]
        for entry, curve in zip(rivals, curves, strict=True):
            reached = (
                metrics.rounds_to(0.9, curve, metric, metric.best(scores)) if scores and league is not None else None
            )
            entry["summary"]["rounds_to_90"] = reached


def _partition(runs: Sequence[Run]) -> tuple[Content | None, str]:
    """The data that some runs share, from the first that finds it: each may look for it at another place."""
    places = {repr(run.recipe.data): run for run in reversed(runs)}
    answers = [partition_of(run) for run in reversed(places.values())]
    return next((answer for answer in answers if answer[0] is not None), answers[0])


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
    summary = run.summary or {**metrics.overall(records, run.metric), "seconds": run.seconds}  # so far
    name = run.metric.name
    for key in ("accuracy", "best_accuracy", "accuracy_after_local"):  # the main metric under one name
        summary[key] = summary.get(key.replace("accuracy", name))
    rows = run.clients
    gates, no_gates = gates_of(run)
    return {
        "label": label,
        "metric": about(run.metric),
        "path": str(run.path),
        "algorithm": recipe.algorithm.name,
        "data": recipe.data.label,
        "model": recipe.model.label,
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
        "clients": [_client(row, name) for row in rows if row["point"] == "after_broadcast"],
        "novel": [_client(row, name) for row in rows if row["point"] == "novel"],
        "fleet": fleet(run) if recipe.fleet.devices else None,
        "gates": gates,
        "no_gates": no_gates,
        "config": recipe.toml(comments=False),
        "environment": run.environments if (run.path / runfolder.ENVIRONMENT).exists() else [],
    }


def about(metric: Metric) -> Content:
    """The main metric as charts and words need it."""
    return {"name": metric.name, "times": 100 if metric.share else 1, "higher": metric.higher}


def _client(row: Mapping[str, Any], metric: str) -> Content:
    # A client without test data has no accuracy. Whatever the main metric is, a report holds it under that name.
    accuracy = row.get(metric)
    tested = accuracy is not None and math.isfinite(accuracy)
    return {"client": row["client"], "n": row.get("n_test") or 0, **({"accuracy": accuracy} if tested else {})}


def curves(run: Run) -> Content:
    """Scores at evaluated rounds, with all FLOPs, bytes and seconds until then; on a fleet virtual time and energy."""
    seconds = {line["round"]: line["seconds"] for line in run.timing}
    spent = {"flops": 0.0, "bytes": 0.0, "seconds": 0.0}
    spent |= {"virtual": 0.0, "joules": 0.0} if run.recipe.fleet.devices else {}
    columns: dict[str, list[Any]] = {name: [] for name in ("round", *spent, *CURVES)}
    for record in run.metrics:
        spent["bytes"] += (record.get("bytes_up") or 0) + (record.get("bytes_down") or 0)
        spent["flops"] += record.get("flops") or 0
        spent["seconds"] += seconds.get(record["round"], 0.0)
        if "virtual_seconds" in record:
            spent |= {"virtual": record["virtual_seconds"], "joules": spent["joules"] + record["joules"]}
        if "after_broadcast" in record:
            own = {"accuracy": run.metric.name}
            scores = {name: record["after_broadcast"].get(own.get(name, name)) for name in CURVES}
            for name, value in {"round": record["round"], **spent, **scores}.items():
                columns[name].append(value)
    return columns


def fleet(run: Run) -> Content | None:
    """Who took how long in the last round, on which device, and how often each client came too late."""
    lines = [line for line in run.participation if "began" in line]
    if not lines:
        return None
    last = [line for line in lines if line["round"] == lines[-1]["round"]]
    rows = []
    for line in sorted(last, key=lambda line: (line["began"] + line["seconds"], line["client"])):
        down, up = line["began"] + line["download"], line["began"] + line["seconds"] - line["upload"]
        times = [line["began"], down, up, line["began"] + line["seconds"]]
        rows.append({"client": line["client"], "device": line["device"], "times": times, "dropped": dropped(line)})
    late = Counter(line["client"] for line in lines if dropped(line))
    return {
        "round": last[0]["round"], "rows": rows, "policy": run.recipe.fleet.policy, "asked": len(lines),
        "late": [list(pair) for pair in late.most_common()], "clients": len({line["client"] for line in lines}),
    }  # fmt: skip


def dropped(line: Mapping[str, Any]) -> str:
    """Why an update does not count: "late", "stale", or nothing.

    >>> dropped({"late": 1}), dropped({})
    ('late', '')
    """
    return next((why for why in ("late", "stale") if line.get(why)), "")


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


def client_table(entries: Sequence[Content]) -> Content:
    """Accuracy of every client under every run, ready to copy; the best is marked among runs of one league.

    Clients that were held out of training stand at the end, and say so.
    """
    by_run = [
        {row["client"]: row.get("accuracy") for row in entry["clients"]}
        | {f"{row['client']} (novel)": row.get("accuracy") for row in entry["novel"]}
        for entry in entries
    ]
    leagues = [entry["league"] for entry in entries]
    metric = entries[0].get("metric", about(METRICS["accuracy"]))
    times = metric["times"]
    show = tables.percent if times == 100 else "{:.4g}".format
    why = f"test {metric['name']} after the last round" + ", %" * (times == 100)
    names = sorted({name for accuracies in by_run for name in accuracies}, key=lambda n: (n.endswith(" (novel)"), n))
    rows = []
    for name in names:
        values = [accuracies.get(name) for accuracies in by_run]
        rows.append({"name": name, "cells": tables.cells(values, show, max if metric["higher"] else min, leagues)})
    head = [{"title": entry["label"], "why": why, "times": times} for entry in entries]
    return tables.with_copies({"head": head, "rows": rows, "first": "client"}) if rows else {}


def differences(runs: Sequence[Run], labels: Sequence[str]) -> Content:
    """Settings in which the runs differ."""
    settings = [settings_of(run) for run in runs]
    rows = []
    for name in settings[0]:
        # An option that only some methods have is no difference between runs, but one between methods.
        values = [setting[name] for setting in settings if name in setting]
        if len(values) == len(runs) and any(value != values[0] for value in values):
            texts = [json.dumps(value, ensure_ascii=False) for value in values]
            rows.append({"name": name, "cells": [{"text": text, "value": text, "best": False} for text in texts]})
    head = [{"title": label, "why": ""} for label in labels]
    return tables.with_copies({"head": head, "rows": rows, "first": "setting"}) if rows else {}


def contenders(runs: Sequence[Run], entries: Sequence[Content]) -> list[Contender]:
    """Runs that differ in nothing but their seed as one; where there are none of these, every run for itself.

    A run that has not ended is not counted among seeds: it would stand for a seed of fewer rounds.
    """
    groups: dict[str, list[int]] = {}
    for at, run in enumerate(runs):
        if run.finished:
            groups.setdefault(_without_seed(run), []).append(at)
    if all(len(members) < 2 for members in groups.values()):
        return [Contender(entry["label"], [entry], entry["league"]) for entry in entries]
    settings: dict[str, Contender] = {}
    for members in groups.values():
        members.sort(key=lambda at: _seeds(runs[at]))
        labels = [entries[at]["label"] for at in members]
        name = labels[0] if len(members) == 1 else common(labels)
        while name in settings:
            name += "′"
        first = runs[members[0]]
        league = (data_kind(first), first.recipe.train.rounds, *(_seeds(runs[at]) for at in members))
        settings[name] = Contender(name, [entries[at] for at in members], league)
    return list(settings.values())


def seeds(runs: Sequence[Run], entries: Sequence[Content]) -> Content:
    """Mean and deviation over seeds; nothing without repeated seeds. "unfinished" names the runs not counted."""
    settings = contenders(runs, entries)
    if all(len(setting.runs) < 2 for setting in settings):
        return {}
    rows = {setting.name: [tables.numbers(entry["summary"]) for entry in setting.runs] for setting in settings}
    table = tables.over_seeds(rows, {setting.name: setting.league for setting in settings}, runs[0].metric)
    return {**table, "unfinished": [entry["label"] for entry in entries if not entry["finished"]]}


def _without_seed(run: Run) -> str:
    settings = essence(run.recipe.tables())
    settings["data"].pop("seed", None)
    return json.dumps(settings | {"run": {}}, sort_keys=True)


def _seeds(run: Run) -> tuple[int, int]:
    own = run.recipe.data.options.get("seed")
    return run.recipe.run.seed, run.recipe.run.seed if own is None else int(own)
