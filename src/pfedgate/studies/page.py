"""The files of a study: NAME.json with every number, NAME.md to read, figures beside them."""

from __future__ import annotations

import json
import math
import shlex
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedgate.config import toml
from pfedgate.core.errors import warn
from pfedgate.core.version import RESULTS
from pfedgate.engine.files import write_atomically
from pfedgate.engine.metrics import Record, clean
from pfedgate.report.tables import markdown, percent
from pfedgate.runs.environment import environment
from pfedgate.runs.folder import Run
from pfedgate.runs.progress import clock
from pfedgate.studies import complexity, figures, leakage, multitask
from pfedgate.studies.bench import COMPLEXITY_ROWS
from pfedgate.studies.cells import seconds_of
from pfedgate.studies.complexity import line
from pfedgate.studies.declare import DENSITY, Number, Q, Study, columns_of
from pfedgate.studies.outcome import Outcomes, claims, spread
from pfedgate.studies.sweep import Campaign

MEASURES = {**leakage.MEASURES, "multitask": (multitask.measure, multitask.tables)}
# What a score is of, by the study's point.
POINTS = {
    "": "after the broadcast; FedAvg-FT and Per-FedAvg take gradient steps of their own first",
    "a": "as received: no gradient step after the broadcast",
    "b": "after epochs of each client's own, at the rate and number that are best on validation for the method",
}


def write(study: Study, campaign: Campaign, folder: Path) -> list[Path]:
    """The files of a study, from its finished cells; measures what is still to be measured."""
    outcomes = campaign.outcomes(study, campaign.all_places(study))
    if _worse(outcomes, folder / f"{study.name}.json"):
        missing = len(outcomes.missing) + len(outcomes.untuned)
        warn(f"{folder / study.name}.md is kept: {missing} cells are missing now, more than for it")
        return []
    complete = not outcomes.missing and not outcomes.untuned
    measures = MEASURES[study.measure][0](study, campaign) if study.measure and complete else {}
    content = gather(study, campaign, outcomes, measures)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.draw(study, outcomes, measures, folder) if study.figure and complete else []
    write_atomically(folder / f"{study.name}.json", (json.dumps(clean(content), indent=1) + "\n").encode())
    text = page(study, content, outcomes, measures, [path for path in drawn if path.suffix == ".svg"])
    write_atomically(folder / f"{study.name}.md", text.encode())
    return [folder / f"{study.name}.md", folder / f"{study.name}.json", *drawn]


def _worse(outcomes: Outcomes, before: Path) -> bool:
    """Whether fewer cells are finished than for the page of these results that would be replaced."""
    try:
        content = json.loads(before.read_text(encoding="utf-8"))
        return content["version"] == RESULTS and len(outcomes.missing) > len(content["missing"])
    except (OSError, ValueError, KeyError):
        return False


def gather(study: Study, campaign: Campaign, outcomes: Outcomes, measures: Mapping[str, Record]) -> Record:
    """All numbers of a study and their origin, as plain data."""
    runs = list(dict.fromkeys(outcomes.runs.values()))
    places = [run.environments[-1] for run in runs] + [measure["environment"] for measure in measures.values()]
    usual, asked = (columns_of(study, campaign.scale, worlds) for worlds in ((), campaign.worlds))
    content: Record = {
        "study": study.name,
        "title": study.title,
        "scale": campaign.scale.name,
        "command": command(study, campaign),
        "evaluation": POINTS[study.point],
        "chosen_round": bool(study.point) or any(number.key.startswith("best_") for number in study.numbers),
        "data": _distinct([data(run) for run in runs]),
        "left_out": _distinct([column.title for column, _ in usual if column not in [other for other, _ in asked]]),
        "measured_on": _distinct([measure["data"] for measure in measures.values()]),
        "seconds": sum(map(seconds_of, runs)) + sum(measure["seconds"] for measure in measures.values()),
        "machine": _distinct([place["machine"] for place in places]) or [environment()["machine"]],
        "commits": sorted({place["commit"] or "" for place in places}),
        "version": RESULTS,
        "trials": campaign.scale.trials,
        "missing": [*outcomes.untuned, *(place.label for place in outcomes.missing)],
        "rows": outcomes.table(),
        "claims": [claim for column in outcomes.columns for claim in claims(outcomes, column)],
    }
    if study.measure:
        content["measured"] = {name: measure["costs"] for name, measure in measures.items()}
    if study.measure == "complexity" and measures:
        methods = {row.name: row.method for row in COMPLEXITY_ROWS}
        content["complexity"] = complexity.lines(measures["all"]["costs"], methods)
    return content


def data(run: Run) -> str:
    """The data of a run, in words."""
    recipe, options = run.recipe, run.recipe.data.options
    shared = [f"{run.summary.get('clients')} clients", options.get("partition") or ""]
    if options.get("partition") == "dirichlet":
        shared[-1] += f" α = {options.get('alpha'):g}"
    if options.get("samples") is not None:
        shared.insert(1, f"{options['samples']:,} samples")
    return f"{recipe.data.name} ({', '.join(filter(None, shared))}), {recipe.model.name}, {recipe.train.rounds} rounds"


def command(study: Study, campaign: Campaign) -> str:
    """What to type for the same again."""
    parts = ["pfedgate reproduce", study.name, "--scale", campaign.scale.name]
    parts += [f"--data {name}" for name in campaign.worlds]
    for layer in campaign.over:
        for section, table in layer.items():
            values = table if isinstance(table, Mapping) else {"": table}
            names = {key: f"{section}.{key}" if key else section for key in values if key != "data_dir"}
            parts += [f"--set {shlex.quote(f'{name}={toml.dump(values[key])}')}" for key, name in names.items()]
    parts += [f"--recipes {shlex.quote(str(campaign.recipes))}"] if campaign.recipes is not None else []
    return " ".join(parts)


def _distinct(values: Sequence[Any]) -> list[Any]:
    return [value for at, value in enumerate(values) if value not in values[:at]]


def page(
    study: Study, content: Record, outcomes: Outcomes, measures: Mapping[str, Record], drawn: Sequence[Path]
) -> str:
    """The text of the page, as Markdown: what was found, the figure, the table; the details are folded."""
    lines = [f"# {study.name}: {study.title}", ""]
    if content["missing"]:
        lines += [f"**Not finished: {len(content['missing'])} cells are still missing.**", ""]
    for path in drawn:
        lines += [f"![{study.title}]({path.name})", ""]
    if study.figure and not drawn and not content["missing"]:
        lines += ["**No figure: there is nothing in these runs to draw it from.**", ""]
    lines += _claims(content)
    if study.rows:
        lines += _matrix(outcomes) if study.matrix else _sections(outcomes)
    lines += MEASURES[study.measure][1](content) if measures else []
    about = [text for note in (study.note, _words(study, outcomes)) if note for text in (note, "")]
    folded = ["<details markdown><summary>How to read it, and how it was made</summary>", "", *about, *_about(content)]
    return "\n".join(map(wrapped, [*lines, *folded, "", "</details>"])) + "\n"


def _claims(content: Record) -> list[str]:
    """The differences that matter as a table."""
    if not content["claims"]:
        return []
    lines = [line(["data", "difference", "of", "to", "seeds", "points, 95 % interval", "must", "aim"])]
    lines.append("|---|---|---|---|---:|---:|---|---|")
    for claim in content["claims"]:
        must = "" if claim["must"] is None else f"{claim['must']:+g}: {'yes' if claim['kept'] else '**no**'}"
        aim = "" if claim["aim"] is None else f"{claim['aim']:+g}: {'yes' if claim['reached'] else 'no'}"
        points = f"{claim['points']:+.2f} [{claim['low']:+.2f}, {claim['high']:+.2f}]"
        start = [claim["column"], claim["claim"], claim["ours"], claim["other"], str(claim["seeds"])]
        lines.append(line([*start, points, must, aim]))
    return [*lines, ""]


def wrapped(text: str) -> str:
    """A line of a page as lines of at most 100 characters; tables, headings and commands stay whole.

    >>> wrapped("- " + "word " * 24).splitlines()[1]
    '  word word word word word'
    """
    if text.startswith(("|", "#", "![", "- Command:", "<")):
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
        "FedMask's s is of the layers it masks.": any(name.startswith("FedMask") for name in rows),
        "s̄' is the share of the parameters in use.": DENSITY.title in shown,
        "q̄ is the share uploaded.": Q.title in shown,
        "± is the standard deviation over seeds (of a sample).": several,
        "Differences are means over the seeds and clients that both rows have, weighted by test samples, with "
        "Student's 95 % interval over seeds, never narrower than clients alone make it. Ours is the row best on "
        "validation data, the opponent the one best on test data.": bool(study.point),
        "One seed: an interval is over clients alone.": bool(rows) and not several,
    }
    return " ".join(text for text, wanted in words.items() if wanted)


EMPTY: Record = {"text": "–", "value": None, "best": False}


def _cell(outcomes: Outcomes, row: str, column: str, number: Number) -> Record:
    values = spread(outcomes.values(row, column, number))
    if values is None:
        return EMPTY
    if number.reach and values["mean"] == math.inf:
        return {**EMPTY, "text": "never"}
    text = number.show(values["mean"])
    if values["std"] is not None and number.show is percent:  # Costs of a round hardly vary; JSON has their deviation.
        text += f" ± {number.show(values['std'])}"
    return {"text": text, "value": values["mean"], "best": False}


def _table(columns: Sequence[str], cells: Mapping[str, Sequence[Record]]) -> str:
    rows = [{"name": name, "cells": list(row)} for name, row in cells.items()]
    return markdown({"first": "method", "head": [{"title": title} for title in columns], "rows": rows})


def _sections(outcomes: Outcomes) -> list[str]:
    """A table for every column of the study; with a point, also the difference of each row to the first."""
    lines = []
    for column in outcomes.columns:
        rows = outcomes.rows(column)
        wanted = [n for n in outcomes.study.numbers if any(outcomes.values(row, column, n) for row in rows)]
        cells = {row: [_cell(outcomes, row, column, number) for number in wanted] for row in rows}
        titles = [number.title for number in wanted]
        if outcomes.study.point:
            titles.insert(1, f"− {rows[0]}, points")
            for row in rows:
                gap = outcomes.difference(row, rows[0], column) if row != rows[0] else None
                cells[row].insert(1, EMPTY if gap is None else {**EMPTY, "text": str(gap), "value": gap.mean})
        lines += [f"## {column}", "", _table(titles, cells), ""]
    return lines


def _matrix(outcomes: Outcomes) -> list[str]:
    """A table for every number, columns side by side."""
    lines = []
    columns, drops = outcomes.columns, _drops(outcomes)
    rows = [row.name for row in outcomes.study.rows if any(row.name in outcomes.rows(column) for column in columns)]
    for number in outcomes.study.numbers:
        cells = {
            row: [_cell(outcomes, row, column, number) for column in columns]
            + [_drop(outcomes, row, pair, number) for _, pair in drops]
            for row in rows
        }
        lines += [f"## {number.title}", "", _table([*columns, *(title for title, _ in drops)], cells), ""]
    return lines


def _drops(outcomes: Outcomes) -> list[tuple[str, tuple[str, str]]]:
    """Pairs of columns on the same data whose difference is shown: the title, and their names."""
    drops = outcomes.study.drops
    shown = []
    for before, after in drops:
        data = [column.removesuffix(f", {before}") for column in outcomes.columns if column.endswith(f", {before}")]
        pairs = [(title, (f"{title}, {before}", f"{title}, {after}")) for title in data]
        pairs = [(title, pair) for title, pair in pairs if pair[1] in outcomes.columns]
        shown += [(f"{title}, {f'{after}: ' if len(drops) > 1 else ''}drop", pair) for title, pair in pairs]
    return shown


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
    choice = "settings and rounds" if content["chosen_round"] else "settings"
    searched = f", in searches of {content['trials']} trials a method on another seed" if content["trials"] else ""
    scored = f"- Scored {content['evaluation']}; {choice} chosen on validation data{searched}"
    return [
        f"- Command: `{content['command']}`",
        *([scored] if content["rows"] else []),
        *([f"- Data: {'; '.join(content['data'])}"] if content["data"] else []),
        *([f"- Not run: {', '.join(content['left_out'])}"] if content["left_out"] else []),
        *([f"- Costs measured on: {'; '.join(content['measured_on'])}"] if content["measured_on"] else []),
        f"- Time of all runs together: {clock(content['seconds'])} (one thread each) on {'; '.join(machines)}",
        f"- Results: version {content['version']}" + (f", commit {', '.join(commits)}" if commits else ""),
        f"- Written: {time.strftime('%Y-%m-%d %H:%M %Z')}",
    ]
