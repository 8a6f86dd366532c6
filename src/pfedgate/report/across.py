"""Tables across runs: every client, the settings that differ, several seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pfedgate.config.recipe import essence
from pfedgate.report import tables
from pfedgate.report.gates import data_kind
from pfedgate.report.labels import common, settings_of
from pfedgate.runs.folder import Run

Content = dict[str, Any]


def client_table(told: Sequence[Content]) -> Content:
    """Accuracy of every client under every run, ready to copy; the best is marked among runs of one league.

    Clients that were held out of training stand at the end, and say so.
    """
    by_run = [
        {row["client"]: row.get("accuracy") for row in entry["clients"]}
        | {f"{row['client']} (novel)": row.get("accuracy") for row in entry["novel"]}
        for entry in told
    ]
    leagues = [entry["league"] for entry in told]
    names = sorted({name for accuracies in by_run for name in accuracies}, key=lambda n: (n.endswith(" (novel)"), n))
    rows = []
    for name in names:
        values = [accuracies.get(name) for accuracies in by_run]
        best = tables.winners(tables.percent, max, values, leagues)
        cells = [
            {"text": "–" if value is None else tables.percent(value), "value": value, "best": won}
            for value, won in zip(values, best, strict=True)
        ]
        rows.append({"name": name, "cells": cells})
    head = [{"title": entry["label"], "why": "test accuracy after the last round, %", "times": 100} for entry in told]
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
    """Runs that differ in nothing but their seed, as mean and deviation; nothing if there are no such runs.

    A run that has not ended is not counted ("unfinished" names it): it would stand for a seed of fewer rounds.
    """
    groups: dict[str, list[int]] = {}
    for at, run in enumerate(runs):
        if run.finished:
            groups.setdefault(_without_seed(run), []).append(at)
    if all(len(members) < 2 for members in groups.values()):
        return {}
    rows, leagues = {}, {}
    for members in groups.values():
        name = labels[members[0]] if len(members) == 1 else common([labels[at] for at in members])
        while name in rows:
            name += "′"
        rows[name] = [tables.numbers(runs[at].summary) for at in members]
        first = runs[members[0]]
        leagues[name] = (data_kind(first), first.recipe.train.rounds, *sorted(_seeds(runs[at]) for at in members))
    unfinished = [label for run, label in zip(runs, labels, strict=True) if not run.finished]
    return {**tables.over_seeds(rows, leagues), "unfinished": unfinished}


def _without_seed(run: Run) -> str:
    told = essence(run.recipe.tables())
    told["data"].pop("seed", None)
    return json.dumps(told | {"run": {}}, sort_keys=True)


def _seeds(run: Run) -> tuple[int, int]:
    own = run.recipe.data.options.get("seed")
    return run.recipe.run.seed, run.recipe.run.seed if own is None else int(own)
