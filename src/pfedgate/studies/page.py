"""The files of a study: NAME.json with every number, NAME.md to read, figures beside them."""

from __future__ import annotations

import json
import shlex
import textwrap
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pfedgate.config import toml
from pfedgate.core.version import RESULTS
from pfedgate.engine.files import write_atomically
from pfedgate.engine.metrics import Record, clean
from pfedgate.report.tables import markdown, percent
from pfedgate.runs.environment import environment
from pfedgate.runs.folder import Run
from pfedgate.runs.progress import clock
from pfedgate.studies import complexity, figures
from pfedgate.studies.bench import COMPLEXITY_ROWS, MEASURES
from pfedgate.studies.cells import seconds_of, version_of
from pfedgate.studies.complexity import line
from pfedgate.studies.declare import DENSITY, Number, Q, Study, columns_of
from pfedgate.studies.outcome import Outcomes, claims, spread
from pfedgate.studies.sweep import Campaign

POINT = (
    "after the broadcast: each client's personal model; FedAvg-FT and Per-FedAvg take gradient steps of their own first"
)
CAUTION = (
    "Methods had unequal information and care here: read [what a review found](index.md#what-a-review-found) before "
    "comparing rows."
)


def write(study: Study, campaign: Campaign, folder: Path) -> list[Path]:
    """The files of a study, from its finished cells; measures what is still to be measured."""
    outcomes = campaign.outcomes(study, campaign.all_places(study))
    if _worse(outcomes, folder / f"{study.name}.json"):
        text = f"{folder / study.name}.md is kept: {len(outcomes.missing)} cells are missing now, more than for it"
        warnings.warn(f"{text} (cells of other versions of the results count with --any-version)", stacklevel=2)
        return []
    measures = MEASURES[study.measure][0](study, campaign) if study.measure and not outcomes.missing else {}
    content = gather(study, campaign, outcomes, measures)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.draw(study, outcomes, measures, folder) if study.figure and not outcomes.missing else []
    write_atomically(folder / f"{study.name}.json", (json.dumps(clean(content), indent=1) + "\n").encode())
    text = page(study, content, outcomes, measures, [path for path in drawn if path.suffix == ".svg"])
    write_atomically(folder / f"{study.name}.md", text.encode())
    return [folder / f"{study.name}.md", folder / f"{study.name}.json", *drawn]


def _worse(outcomes: Outcomes, before: Path) -> bool:
    """Whether fewer cells are finished than for the page that would be replaced."""
    try:
        return len(outcomes.missing) > len(json.loads(before.read_text(encoding="utf-8"))["missing"])
    except (OSError, ValueError, KeyError):
        return False


def gather(study: Study, campaign: Campaign, outcomes: Outcomes, measures: Mapping[str, Record]) -> Record:
    """All numbers of a study and their origin, as plain data."""
    runs = list(dict.fromkeys(outcomes.runs.values()))
    places = [run.environments[-1] for run in runs] + [measure["environment"] for measure in measures.values()]
    versions = {version_of(run.path) for run in runs} | {measure.get("version", 0) for measure in measures.values()}
    content: Record = {
        "study": study.name,
        "title": study.title,
        "scale": campaign.scale.name,
        "command": command(study, campaign, other=bool(versions - {RESULTS})),
        "evaluation": POINT,
        "chosen_round": any(number.key.startswith("best_") for number in study.numbers),
        "data": _distinct([data(run) for run in runs]),
        "left_out": _left_out(study, campaign),
        "measured_on": _distinct([measure["data"] for measure in measures.values()]),
        "seconds": sum(map(seconds_of, runs)) + sum(measure["seconds"] for measure in measures.values()),
        "machine": _distinct([place["machine"] for place in places]) or [environment()["machine"]],
        "commits": sorted({place["commit"] or "" for place in places}),
        "versions": sorted(versions) or [RESULTS],
        "missing": [place.label for place in outcomes.missing],
        "rows": outcomes.table(),
        "claims": [claim for column in outcomes.columns for claim in claims(outcomes, column)],
    }
    if study.measure:
        content["measured"] = {name: measure["costs"] for name, measure in measures.items()}
    if study.measure == "complexity" and measures:
        methods = {row.name: row.method for row in COMPLEXITY_ROWS}
        content["complexity"] = complexity.lines(measures["all"]["costs"], methods)
    return content


def _left_out(study: Study, campaign: Campaign) -> list[str]:
    """Data that the study has at this scale and that was not asked for this time."""
    usual, asked = (columns_of(study, campaign.scale, worlds) for worlds in ((), campaign.worlds))
    return _distinct([column.title for column, _ in usual if column not in [other for other, _ in asked]])


def data(run: Run) -> str:
    """The data of a run, in words."""
    recipe, options = run.recipe, run.recipe.data.options
    shared = [f"{run.summary.get('clients')} clients", options.get("partition") or ""]
    if options.get("partition") == "dirichlet":
        shared[-1] += f" α = {options.get('alpha'):g}"
    if options.get("samples") is not None:
        shared.insert(1, f"{options['samples']:,} samples")
    return f"{recipe.data.name} ({', '.join(filter(None, shared))}), {recipe.model.name}, {recipe.train.rounds} rounds"


def command(study: Study, campaign: Campaign, *, other: bool = False) -> str:
    """What to type for the same again; `other`: with cells of other versions of the results."""
    parts = ["pfedgate reproduce", study.name, "--scale", campaign.scale.name]
    parts += [f"--data {name}" for name in campaign.worlds]
    for layer in campaign.over:
        for section, table in layer.items():
            values = table if isinstance(table, Mapping) else {"": table}
            names = {key: f"{section}.{key}" if key else section for key in values if key != "data_dir"}
            parts += [f"--set {shlex.quote(f'{name}={toml.dump(values[key])}')}" for key, name in names.items()]
    parts += [f"--recipes {shlex.quote(str(campaign.recipes))}"] if campaign.recipes is not None else []
    return " ".join([*parts, *(["--any-version"] if other else [])])


def _claims(content: Record) -> list[str]:
    """The differences that matter as a table."""
    if not content["claims"]:
        return []
    lines = ["## What was to be shown", "", line(["data", "difference", "of", "to", "seeds", "points", "must", "aim"])]
    lines.append("|---|---|---|---|---:|---:|---|---|")
    for claim in content["claims"]:
        must = "" if claim["must"] is None else f"{claim['must']:+g}: {'yes' if claim['kept'] else '**no**'}"
        aim = "" if claim["aim"] is None else f"{claim['aim']:+g}: {'yes' if claim['reached'] else 'no'}"
        start = [claim["column"], claim["claim"], claim["ours"], claim["other"]]
        lines.append(line([*start, str(claim["seeds"]), f"{claim['points']:+.2f}", must, aim]))
    rule = "Ours is the variant best on validation data, the opponent the one best on test data, on the seeds of both."
    return [*lines, "", rule, ""]


def _distinct(values: Sequence[Any]) -> list[Any]:
    return [value for at, value in enumerate(values) if value not in values[:at]]


def page(
    study: Study, content: Record, outcomes: Outcomes, measures: Mapping[str, Record], drawn: Sequence[Path]
) -> str:
    """The text of the page, as Markdown."""
    lines = [f"# {study.name}: {study.title}", ""]
    if len({row.method for row in study.rows}) > 1:
        lines += [CAUTION, ""]
    if content["missing"]:
        lines += [f"**Not finished: {len(content['missing'])} cells are still missing.**", ""]
    for path in drawn:
        lines += [f"![{study.title}]({path.name})", ""]
    if study.figure and not drawn and not content["missing"]:
        lines += ["**No figure: there is nothing in these runs to draw it from.**", ""]
    if study.rows:
        lines += _matrix(outcomes) if study.matrix else _sections(outcomes)
    lines += _claims(content)
    lines += MEASURES[study.measure][1](content) if measures else []
    lines += [text for note in (study.note, _words(study, outcomes)) if note for text in (note, "")]
    return "\n".join(map(wrapped, [*lines, *_about(content)])) + "\n"


def wrapped(text: str) -> str:
    """A line of a page as lines of at most 100 characters; tables, headings and commands stay whole.

    >>> wrapped("- " + "word " * 24).splitlines()[1]
    '  word word word word word'
    """
    if text.startswith(("|", "#", "![", "- Command:")):
        return text
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _words(study: Study, outcomes: Outcomes) -> str:
    """The meaning of a table's names and symbols, so that the page can be read alone."""
    rows = [row.name for row in study.rows if any(row.name in outcomes.rows(column) for column in outcomes.columns)]
    shown = {number.title for number in study.numbers if rows}
    several = any(len(outcomes.seeds(row, column)) > 1 for column in outcomes.columns for row in rows)
    words = {
        's is the share of the parameters that a client may use; with "all resources" of parameters, FLOPs and '
        "activation bytes alike.": any(name.startswith("pFedGate") for name in rows),
        "Shift: one private value per class, added to the logits (`algorithm.gate.shift`).": any(
            "shift" in n for n in rows
        ),
        "FedMask's s is of the layers it masks.": any(name.startswith("FedMask") for name in rows),
        "s̄' is the share of the parameters in use.": DENSITY.title in shown,
        "q̄ is the share uploaded.": Q.title in shown,
        "± is the standard deviation over seeds (of a sample). Bold is the best of the rows with most seeds, and of "
        "all rows where a column is of the first seed.": several,
        "One seed.": bool(rows) and not several,
    }
    return " ".join(text for text, wanted in words.items() if wanted)


EMPTY: Record = {"text": "–", "value": None, "best": False}


def _cell(outcomes: Outcomes, row: str, column: str, number: Number, best: bool) -> Record:
    values = spread(outcomes.values(row, column, number))
    if values is None:
        return EMPTY
    text = number.show(values["mean"])
    if values["std"] is not None and number.show is percent:  # Costs of a round hardly vary; JSON has their deviation.
        text += f" ± {number.show(values['std'])}"
    return {"text": text, "value": values["mean"], "best": best}


def _winners(outcomes: Outcomes, column: str, number: Number) -> set[str]:
    """The rows with the best mean of those with most seeds: others are means over other data. None if all are alike."""
    scores = {row: outcomes.by_seed(row, column, number) for row in outcomes.rows(column)}
    seeds = max((sorted(values) for values in scores.values()), key=len, default=[])
    means = {row: fmean(values.values()) for row, values in scores.items() if values and sorted(values) == seeds}
    if number.best is None or len({*means.values()}) < 2:
        return set()
    best = number.best(means.values())
    return {row for row, mean in means.items() if mean == best}


def _table(columns: Sequence[str], cells: Mapping[str, Sequence[Record]]) -> str:
    rows = [{"name": name, "cells": list(row)} for name, row in cells.items()]
    return markdown({"first": "method", "head": [{"title": title} for title in columns], "rows": rows})


def _sections(outcomes: Outcomes) -> list[str]:
    """A table for every column."""
    lines = []
    for column in outcomes.columns:
        rows = outcomes.rows(column)
        several = any(len(outcomes.seeds(row, column)) > 1 for row in rows)
        wanted = [number for number in outcomes.study.numbers if several or not number.first_seed]
        winners = {n: _winners(outcomes, column, n) for n in wanted if any(outcomes.values(r, column, n) for r in rows)}
        cells = {row: [_cell(outcomes, row, column, n, row in best) for n, best in winners.items()] for row in rows}
        titles = [number.title for number in winners]
        if len(outcomes.versions()) > 1:
            titles.append("version")
            cells = {row: [*cells[row], _version(outcomes, row, column)] for row in rows}
        lines += [f"## {column}", "", _table(titles, cells), ""]
    return lines


def _matrix(outcomes: Outcomes) -> list[str]:
    """A table for every number, columns side by side."""
    lines = []
    columns, drops = outcomes.columns, _drops(outcomes)
    rows = [row.name for row in outcomes.study.rows if any(row.name in outcomes.rows(column) for column in columns)]
    for number in outcomes.study.numbers:
        winners = {column: _winners(outcomes, column, number) for column in columns}
        cells = {
            row: [_cell(outcomes, row, column, number, row in winners[column]) for column in columns]
            + [_drop(outcomes, row, pair, number) for _, pair in drops]
            for row in rows
        }
        lines += [f"## {number.title}", "", _table([*columns, *(title for title, _ in drops)], cells), ""]
    if len(outcomes.versions()) > 1:
        cells = {row: [_version(outcomes, row, column) for column in columns] for row in rows}
        lines += ["## Version of the results", "", _table(columns, cells), ""]
    return lines


def _version(outcomes: Outcomes, row: str, column: str) -> Record:
    return {**EMPTY, "text": ", ".join(map(str, outcomes.versions(row, column))) or "–"}


def _drops(outcomes: Outcomes) -> list[tuple[str, tuple[str, str]]]:
    """Pairs of columns on the same data whose difference is shown: the title, and their names."""
    if outcomes.study.drop is None:
        return []
    before, after = (f", {what}" for what in outcomes.study.drop)
    pairs = [(c, c.removesuffix(before) + after) for c in outcomes.columns if c.endswith(before)]
    return [(f"{c.removesuffix(before)}, drop", (c, other)) for c, other in pairs if other in outcomes.columns]


def _drop(outcomes: Outcomes, row: str, pair: tuple[str, str], number: Number) -> Record:
    first, second = (spread(outcomes.values(row, column, number)) for column in pair)
    if first is None or second is None:
        return EMPTY
    value = first["mean"] - second["mean"]
    return {"text": number.show(value), "value": value, "best": False}


def _machine(place: Record) -> str:
    """A processor in words; cells from before vector instructions were noted do not tell theirs."""
    return f"{place['cpu']}{' with ' + place['vectors'] if place.get('vectors') else ''}, {place['cores']} cores"


def _about(content: Record) -> list[str]:
    """How the page was made, and from what."""
    machines = _distinct([_machine(place) for place in content["machine"]])
    commits = [commit[:12] + ("+" if commit.endswith("+") else "") for commit in content["commits"] if commit]
    choice = "rates and rounds" if content["chosen_round"] else "rates"
    scored = f"- Scored {content['evaluation']}; {choice} chosen on validation data"
    return [
        f"- Command: `{content['command']}`",
        *([scored] if content["rows"] else []),
        *([f"- Data: {'; '.join(content['data'])}"] if content["data"] else []),
        *([f"- Not run: {', '.join(content['left_out'])}"] if content["left_out"] else []),
        *([f"- Costs measured on: {'; '.join(content['measured_on'])}"] if content["measured_on"] else []),
        f"- Time of all runs together: {clock(content['seconds'])} (one thread each) on {'; '.join(machines)}",
        f"- Results: version {', '.join(map(str, content['versions']))}"
        + (f", commit {', '.join(commits)}" if commits else ""),
        f"- Written: {time.strftime('%Y-%m-%d %H:%M %Z')}",
    ]
