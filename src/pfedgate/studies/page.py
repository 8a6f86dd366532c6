"""What a study leaves: NAME.json with every number, NAME.md to read, figures beside them."""

from __future__ import annotations

import json
import shlex
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pfedgate.config import toml
from pfedgate.engine.metrics import Record, clean
from pfedgate.engine.store import write_atomically
from pfedgate.report.tables import markdown, percent
from pfedgate.runs.environment import environment
from pfedgate.runs.folder import Run
from pfedgate.runs.progress import clock
from pfedgate.studies import complexity, costs, figures, measured, scales
from pfedgate.studies.cells import code_of, code_version, seconds_of
from pfedgate.studies.claims import claims
from pfedgate.studies.declare import DENSITY, Number, Q, Study
from pfedgate.studies.measured import line
from pfedgate.studies.outcome import Outcomes, spread
from pfedgate.studies.schedule import Order

POINT = "after the broadcast: each client's personal model, before any further local training"


def write(study: Study, order: Order, folder: Path) -> list[Path]:
    """The files of a study, from the cells that are there; measures what is still to be measured."""
    outcomes = Outcomes.of(study, order.all_places(study), order.root, any_code=order.any_code)
    if _worse(outcomes, folder / f"{study.name}.json"):
        told = f"{folder / study.name}.md is kept: {len(outcomes.missing)} cells are missing now, more than for it"
        warnings.warn(f"{told} (cells that other code has finished count with --any-code)", stacklevel=2)
        return []
    measures = costs.MEASURES[study.measure](study, order) if study.measure and not outcomes.missing else {}
    content = gather(study, order, outcomes, measures)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.draw(study, outcomes, measures, folder) if study.figure and not outcomes.missing else []
    write_atomically(folder / f"{study.name}.json", (json.dumps(clean(content), indent=1) + "\n").encode())
    text = page(study, content, outcomes, measures, [path for path in drawn if path.suffix == ".svg"])
    write_atomically(folder / f"{study.name}.md", text.encode())
    return [folder / f"{study.name}.md", folder / f"{study.name}.json", *drawn]


def _worse(outcomes: Outcomes, before: Path) -> bool:
    """Whether less is there than for the page that would be replaced."""
    try:
        return len(outcomes.missing) > len(json.loads(before.read_text(encoding="utf-8"))["missing"])
    except (OSError, ValueError, KeyError):
        return False


def gather(study: Study, order: Order, outcomes: Outcomes, measures: Mapping[str, Record]) -> Record:
    """Everything as plain data."""
    runs = list(dict.fromkeys(outcomes.runs.values()))
    places = [run.environments[-1] for run in runs] + [told["environment"] for told in measures.values()]
    seconds = sum(seconds_of(run) for run in runs) + sum(told["seconds"] for told in measures.values())
    code = sorted({code_of(run) for run in runs} | {told["code"] for told in measures.values()})
    found: Record = {
        "study": study.name,
        "title": study.title,
        "scale": order.scale.name,
        "command": command(study, order, other=bool({*code} - {code_version()})),
        "evaluation": POINT,
        "chosen_round": any(number.key.startswith("best_") for number in study.numbers),
        "data": _same([data(run) for run in runs]),
        "left_out": _left_out(study, order),
        "measured_on": _same([told["data"] for told in measures.values()]),
        "seconds": seconds,
        "machine": _same([place["machine"] for place in places]) or [environment()["machine"]],
        "commits": sorted({place["commit"] or "" for place in places}),
        "code": code or [code_version()],
        "missing": [place.label for place in outcomes.missing],
        "rows": outcomes.table(),
        "claims": [claim for column in outcomes.columns for claim in claims(outcomes, column)],
    }
    if study.measure:
        found["measured"] = {name: told["costs"] for name, told in measures.items()}
    if study.measure == "complexity" and measures:
        methods = {row.name: row.method for row in costs.COMPLEXITY_ROWS}
        found["complexity"] = complexity.lines(measures["all"]["costs"], methods)
    return found


def _left_out(study: Study, order: Order) -> list[str]:
    """Data that the study has at this scale and that was not asked for this time."""
    usual, chosen = (scales.columns_of(study, order.scale, worlds) for worlds in ((), order.worlds))
    return _same([column.title for column, _ in usual if column not in [taken for taken, _ in chosen]])


def data(run: Run) -> str:
    """What a run was trained on, in words."""
    recipe, options = run.recipe, run.recipe.data.options
    shared = [f"{run.summary.get('clients')} clients", options.get("partition") or ""]
    if options.get("partition") == "dirichlet":
        shared[-1] += f" α = {options.get('alpha'):g}"
    if options.get("samples") is not None:
        shared.insert(1, f"{options['samples']:,} samples")
    return f"{recipe.data.name} ({', '.join(filter(None, shared))}), {recipe.model.name}, {recipe.train.rounds} rounds"


def command(study: Study, order: Order, *, other: bool = False) -> str:
    """What to type for the same again; `other`: with cells that other code has finished."""
    parts = ["pfedgate reproduce", study.name, "--scale", order.scale.name]
    parts += [f"--data {name}" for name in order.worlds]
    for layer in order.over:
        for section, table in layer.items():
            given = table if isinstance(table, Mapping) else {"": table}
            told = {f"{section}.{key}" if key else section: value for key, value in given.items() if key != "data_dir"}
            parts += [f"--set {shlex.quote(f'{name}={toml.dump(value)}')}" for name, value in told.items()]
    parts += [f"--recipes {shlex.quote(str(order.recipes))}"] if order.recipes is not None else []
    return " ".join([*parts, *(["--any-code"] if other else [])])


def _claims(content: Record) -> list[str]:
    """The same as a table."""
    if not content["claims"]:
        return []
    lines = ["## What was to be shown", "", line(["data", "difference", "of", "to", "seeds", "points", "must", "aim"])]
    lines.append("|---|---|---|---|---:|---:|---|---|")
    for told in content["claims"]:
        must = "" if told["must"] is None else f"{told['must']:+g}: {'yes' if told['kept'] else '**no**'}"
        aim = "" if told["aim"] is None else f"{told['aim']:+g}: {'yes' if told['reached'] else 'no'}"
        start = [told["column"], told["claim"], told["ours"], told["other"]]
        lines.append(line([*start, str(told["seeds"]), f"{told['points']:+.2f}", must, aim]))
    rule = "Ours is the variant best on validation data, the opponent the one best on test data, on the seeds of both."
    return [*lines, "", rule, ""]


def _same(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def page(
    study: Study, content: Record, outcomes: Outcomes, measures: Mapping[str, Record], drawn: Sequence[Path]
) -> str:
    """The page to read."""
    lines = [f"# {study.name}: {study.title}", ""]
    if content["missing"]:
        lines += [f"**Not finished: {len(content['missing'])} cells are still missing.**", ""]
    for path in drawn:
        lines += [f"![{study.title}]({path.name})", ""]
    if study.figure and not drawn and not content["missing"]:
        lines += ["**No figure: there is nothing in these runs to draw it from.**", ""]
    if study.rows:
        lines += _matrix(outcomes) if study.matrix else _sections(outcomes)
    lines += _claims(content)
    lines += measured.SHOWN[study.measure](content) if measures else []
    lines += [note for told in (study.note, _words(study, outcomes)) if told for note in (told, "")]
    return "\n".join([*lines, *_about(content)]) + "\n"


def _words(study: Study, outcomes: Outcomes) -> str:
    """What names and symbols of a table mean, so that the page can be read alone."""
    rows = [row.name for row in study.rows if any(row.name in outcomes.rows(column) for column in outcomes.columns)]
    shown = {number.title for number in study.numbers if rows}
    several = any(len(outcomes.seeds(row, column)) > 1 for column in outcomes.columns for row in rows)
    meant = {
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
    return " ".join(text for text, wanted in meant.items() if wanted)


def _cell(outcomes: Outcomes, row: str, column: str, number: Number, best: bool) -> Record:
    found = spread(outcomes.values(row, column, number))
    if found is None:
        return {"text": "–", "value": None, "best": False}
    text = number.show(found["mean"])
    if found["std"] is not None and number.show is percent:  # what a round costs hardly varies; JSON has it
        text += f" ± {number.show(found['std'])}"
    return {"text": text, "value": found["mean"], "best": best}


def _winners(outcomes: Outcomes, column: str, number: Number) -> set[str]:
    """The rows with the best mean of those with most seeds: others are means over other data. None if all are alike."""
    scores = {row: outcomes.by_seed(row, column, number) for row in outcomes.rows(column)}
    seeds = max((sorted(found) for found in scores.values()), key=len, default=[])
    known = {row: fmean(found.values()) for row, found in scores.items() if found and sorted(found) == seeds}
    if number.best is None or len(set(known.values())) < 2:
        return set()
    best = number.best(known.values())
    return {row for row, mean in known.items() if mean == best}


def _sections(outcomes: Outcomes) -> list[str]:
    """A table for every column."""
    lines = []
    for column in outcomes.columns:
        several = any(len(outcomes.seeds(row, column)) > 1 for row in outcomes.rows(column))
        wanted = [number for number in outcomes.study.numbers if several or not number.first_seed]
        shown = [n for n in wanted if any(outcomes.values(r, column, n) for r in outcomes.rows(column))]
        winners = [_winners(outcomes, column, number) for number in shown]
        mixed = len(outcomes.code()) > 1
        rows = []
        for row in outcomes.rows(column):
            cells = [_cell(outcomes, row, column, n, row in w) for n, w in zip(shown, winners, strict=True)]
            rows.append({"name": row, "cells": [*cells, *([_code(outcomes, row, column)] if mixed else [])]})
        head = [{"title": number.title} for number in shown] + [{"title": "code"}] * mixed
        lines += [f"## {column}", "", markdown({"first": "method", "head": head, "rows": rows}), ""]
    return lines


def _matrix(outcomes: Outcomes) -> list[str]:
    """A table for every number, columns side by side."""
    lines = []
    rows = [row.name for row in outcomes.study.rows if any(row.name in outcomes.rows(c) for c in outcomes.columns)]
    drops = _drops(outcomes)
    for number in outcomes.study.numbers:
        winners = {column: _winners(outcomes, column, number) for column in outcomes.columns}
        told = []
        for row in rows:
            cells = [_cell(outcomes, row, column, number, row in winners[column]) for column in outcomes.columns]
            cells += [_drop(outcomes, row, pair, number) for _, pair in drops]
            told.append({"name": row, "cells": cells})
        head = [{"title": column} for column in outcomes.columns] + [{"title": title} for title, _ in drops]
        lines += [f"## {number.title}", "", markdown({"first": "method", "head": head, "rows": told}), ""]
    if len(outcomes.code()) > 1:
        told = [{"name": row, "cells": [_code(outcomes, row, column) for column in outcomes.columns]} for row in rows]
        head = [{"title": column} for column in outcomes.columns]
        lines += ["## Code", "", markdown({"first": "method", "head": head, "rows": told}), ""]
    return lines


def _code(outcomes: Outcomes, row: str, column: str) -> Record:
    """Which code made a row."""
    return {"text": ", ".join(outcomes.code(row, column)) or "–", "value": None, "best": False}


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
        return {"text": "–", "value": None, "best": False}
    value = first["mean"] - second["mean"]
    return {"text": number.show(value), "value": value, "best": False}


def _machine(place: Record) -> str:
    """A processor in words; cells from before vector instructions were noted do not tell theirs."""
    return f"{place['cpu']}{' with ' + place['vectors'] if place.get('vectors') else ''}, {place['cores']} cores"


def _about(content: Record) -> list[str]:
    """Where it comes from."""
    machines = _same([_machine(place) for place in content["machine"]])
    commits = [commit[:12] + ("+" if commit.endswith("+") else "") for commit in content["commits"] if commit]
    chosen = "rates and rounds" if content["chosen_round"] else "rates"
    scored = f"- Scored {content['evaluation']}; {chosen} chosen on validation data"
    return [
        f"- Command: `{content['command']}`",
        *([scored] if content["rows"] else []),
        *([f"- Data: {'; '.join(content['data'])}"] if content["data"] else []),
        *([f"- Not run: {', '.join(content['left_out'])}"] if content["left_out"] else []),
        *([f"- Costs measured on: {'; '.join(content['measured_on'])}"] if content["measured_on"] else []),
        f"- Time of all runs together: {clock(content['seconds'])} (one thread each) on {'; '.join(machines)}",
        f"- Code: {', '.join(content['code'])}" + (f", commit {', '.join(commits)}" if commits else ""),
        f"- Written: {time.strftime('%Y-%m-%d %H:%M %Z')}",
    ]
