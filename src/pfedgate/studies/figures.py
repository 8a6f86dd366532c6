"""The figures of studies, as SVG and PNG; a chart that reports have too is the report's own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pfedgate.core.drawing import COLUMN, PAGE, THEMES, Spec, save
from pfedgate.engine.metrics import Record
from pfedgate.report import gather
from pfedgate.report.cards import stack, still
from pfedgate.report.charts import curves, difference
from pfedgate.report.gate_charts import histograms, tree
from pfedgate.runs import gates
from pfedgate.runs.folder import Run
from pfedgate.studies.cells import look
from pfedgate.studies.declare import ACC, Row, Study
from pfedgate.studies.outcome import Outcomes, spread

GREY = THEMES["light"]["soft"]


def draw(study: Study, outcomes: Outcomes, measures: Mapping[str, Record], folder: Path) -> list[Path]:
    """The study's figure as files. With nothing to draw there are none, and an older figure stays."""
    spec = PAINTERS[study.figure](outcomes, measures)
    return [save(still(spec), folder / f"{study.name}.{kind}") for kind in ("svg", "png")] if spec else []


def _first_seeds(outcomes: Outcomes, column: str) -> dict[str, Run]:
    return {row: outcomes.seeds(row, column)[0] for row in outcomes.rows(column)}


def _content(runs: Mapping[str, Run]) -> Record:
    """The content of a report of some runs, under the names of the study's rows."""
    content = gather(list(runs.values()))
    for entry, name in zip(content["runs"], runs, strict=True):
        entry["label"] = name
    return content


def _clients(outcomes: Outcomes, measures: Mapping[str, Record]) -> Spec | None:
    """pFedGate minus the baseline that is best on validation data, client by client."""
    ours, charts = outcomes.study.rows[-1].name, {}
    for column in outcomes.columns:
        others = [row for row in outcomes.rows(column) if row != ours]
        best = max(others, key=lambda row: outcomes.validation(row, column))
        runs = _first_seeds(outcomes, column)
        base, own = _content({best: runs[best], ours: runs[ours]})["runs"]
        charts[f"{column}: {ours} − {best}; triangles: the worst tenth of {best}"] = difference(own, base)
    return stack(charts)


def _clusters(outcomes: Outcomes, measures: Mapping[str, Record]) -> Spec | None:
    """A tree of gates for every row, from what was written down of them when their cells ended."""
    runs = _first_seeds(outcomes, outcomes.columns[0])
    trees = {row: look(run, "tree")["tree"] for row, run in runs.items()}
    if not all(trees.values()):
        return None
    charts = {}
    for row, links in trees.items():
        run = {"label": row, "gates": {"clients": links["clients"], "tree": links}, "partition": 0}
        content = {"runs": [{"label": name} for name in trees], "partitions": [links]}
        charts[row] = tree(content, run, width=PAGE - 60)
    return stack(charts)


def _convergence(outcomes: Outcomes, measures: Mapping[str, Record]) -> Spec | None:
    """Accuracy over rounds, a panel for every column."""
    width = round(1.5 * COLUMN) if len(outcomes.columns) == 1 else COLUMN
    panels = []
    for column in outcomes.columns:
        spec = curves(_content(_first_seeds(outcomes, column)), width=width, height=260)
        panels += [{**spec, "title": column}] if spec else []
    return {"hconcat": panels} if panels else None


def _gates(outcomes: Outcomes, measures: Mapping[str, Record]) -> Spec | None:
    """M of all blocks and clients as a histogram for every evaluated round, a panel for every row."""
    runs = _first_seeds(outcomes, outcomes.columns[0])
    content = {"runs": [{"label": name} for name in runs]}
    panels = []
    for name, run in runs.items():
        rounds, spreads = weights_of(run)
        if rounds:
            table = {"histogram": [entry["histogram"] for entry in spreads], "top": spreads[0]["top"]}
            entry = {"label": name, "gates": {"rounds": rounds, "over_rounds": {"all blocks": {"M": table}}}}
            width = (PAGE - 140) // len(runs)
            panels.append({**histograms(content, entry, "M", width=width, height=200), "title": name})
    shared = {"scale": {"opacity": "shared"}, "legend": {"opacity": "shared"}}
    return {"hconcat": panels, "resolve": shared} if panels else None


def weights_of(run: Run) -> tuple[list[int], list[Record]]:
    """The rounds in which gates were noted, and the histograms of M over all blocks and clients in them."""
    path = run.path / gates.FILE
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [line["round"] for line in lines], [line["layers"]["all blocks"]["M"] for line in lines]


def _sparsity(outcomes: Outcomes, measures: Mapping[str, Record]) -> Spec | None:
    """Accuracy over s, for pFedGate with and without shift; the mixed setting stands at its mean."""
    panels = []
    for column in outcomes.columns:
        points = []
        for row in outcomes.study.rows:
            score = spread(outcomes.values(row.name, column, ACC))
            if score is None:
                continue
            name = "with shift" if row.settings["train.shift"] else "plain"
            budget = row.settings["clients.budget"]
            mixed = not isinstance(budget, float)
            s = sum(float(part) * share for part, share in budget.items()) if mixed else budget
            kind = "s = .5 and .1 mixed" if mixed else "one s for all"
            points.append({"s": s, "accuracy": 100 * score["mean"], "method": name, "clients": kind})
        x = {"field": "s", "type": "quantitative", "scale": {"domain": [0, 1]}}
        y = {
            "field": "accuracy",
            "type": "quantitative",
            "title": "accuracy, %",
            "scale": {"zero": False, "padding": 6},
        }
        hue = {"field": "method", "type": "nominal", "title": None, "sort": None}
        kinds = {"domain": ["one s for all", "s = .5 and .1 mixed"], "range": ["circle", "diamond"]}
        panels.append(
            {
                "title": column,
                "data": {"values": points},
                "width": (PAGE - 240) // len(outcomes.columns),
                "height": 220,
                "encoding": {"x": x, "y": y, "color": hue},
                "layer": [
                    {
                        "transform": [{"filter": "datum.clients == 'one s for all'"}],
                        "mark": "line",
                        "encoding": {"strokeDash": {**hue, "legend": None}},
                    },
                    {
                        "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
                        "encoding": {
                            "shape": {"field": "clients", "type": "nominal", "title": None, "scale": kinds},
                        },
                    },
                ],
            }
        )
    return {"hconcat": panels, "resolve": {"scale": {"color": "shared", "shape": "shared"}}} if panels else None


# The Pareto figure: accuracy over step time, FLOPs and upload, relative to FedAvg. Budgets of pFedGate are curves; of
# the other methods those have their name that nothing cheaper beats.

COSTS = {"ms": "step time", "flops": "compute", "up": "upload"}
TICKS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
FINE = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)  # where axes are short


def pareto(outcomes: Outcomes, measures: Mapping[str, Record]) -> Spec | None:
    """A row of panels for every data set that has FedAvg to relate to."""
    methods = {row.name: row.method for row in outcomes.study.rows}
    columns = [c for c in outcomes.columns if any(methods[name] == "fedavg" for name in outcomes.rows(c))]
    lines = []
    for column in columns:
        points = points_of(outcomes, column, measures[column]["costs"])
        lines.append({"hconcat": [_panel(points, cost, "" if at else column) for at, cost in enumerate(COSTS)]})
    return {"vconcat": lines, "resolve": {"scale": {"color": "shared"}}} if lines else None


def points_of(outcomes: Outcomes, column: str, costs: Mapping[str, Record]) -> list[Record]:
    """Accuracy and costs of every row, relative to FedAvg's, and the curve that it is on."""
    points = []
    methods = {row.name: row for row in outcomes.study.rows}
    for name in outcomes.rows(column):
        row, score = methods[name], spread(outcomes.values(name, column, ACC))
        if score is None:
            continue
        numbers = outcomes.numbers(outcomes.seeds(name, column)[0])
        point = {
            "name": name,
            "method": row.method,
            "y": 100 * score["mean"],
            "s": row.settings.get("clients.budget", 1.0),
        }
        points.append(
            {**point, "curves": curves_of(row), "ms": costs[name]["ms"], **{c: numbers[c] for c in ("flops", "up")}}
        )
    base = next(point for point in points if point["method"] == "fedavg")
    return [{**point, **{cost: point[cost] / base[cost] for cost in COSTS}} for point in points]


def curves_of(row: Row) -> list[str]:
    """The curves that a row is on: the whole model binds nothing, so it ends both of its kind."""
    budget = row.settings.get("clients.budget")
    if row.method != "pfedgate" or not isinstance(budget, float):
        return []
    bounds = ("params", "all") if budget == 1.0 else (row.settings["algorithm.resources"],)
    shift = " + shift" * bool(row.settings.get("train.shift"))
    return [f"pFedGate{shift}, s of {'parameters' if bound == 'params' else 'all'}" for bound in bounds]


def front(points: Sequence[Record], cost: str) -> list[str]:
    """The methods beside pFedGate that no other of them beats at its cost or less."""
    others = sorted((p for p in points if not p["curves"]), key=lambda p: (p[cost], -p["y"]))
    names, best = [], -math.inf
    for point in others:
        if point["y"] > best:
            best = point["y"]
            names.append(point["name"])
    return names


def _panel(points: Sequence[Record], cost: str, column: str) -> Spec:
    """Accuracy over one cost; what costs nothing stands at the left end."""
    paid = [point[cost] for point in points if point[cost] > 0]
    low, high, named = min(paid) / 1.2, max(paid) * 1.2, front(points, cost)
    ticks = [tick for tick in (FINE if high < 9 * low else TICKS) if low <= tick <= high]
    marks: list[Record] = []
    for p in points:
        mark = {"x": max(p[cost], low), "y": p["y"], "name": p["name"] if p["name"] in named else ""}
        marks += [{**mark, "curve": curve} for curve in p["curves"]] or [{**mark, "curve": "other methods"}]
    scores = [point["y"] for point in points]
    x = {
        "field": "x", "type": "quantitative", "title": f"{COSTS[cost]}, × FedAvg",
        "scale": {"type": "log", "domain": [low, high], "nice": False},
        "axis": {"values": ticks, "format": "~g", "grid": True},
    }  # fmt: skip
    y = {
        "field": "y", "type": "quantitative", "title": f"{column}: accuracy, %" if column else None,
        "scale": {"domain": [min(scores) - 1, max(scores) + 1], "nice": False},
        "axis": {"labels": bool(column), "tickCount": 7},
    }  # fmt: skip
    names = list(dict.fromkeys(mark["curve"] for mark in marks if mark["curve"] != "other methods"))
    hues = [GREY, *THEMES["light"]["runs"]]
    color = {
        "field": "curve", "type": "nominal", "title": None,
        "legend": {"orient": "bottom", "columns": 3, "labelLimit": 340},
        "scale": {"domain": ["other methods", *names], "range": hues[: 1 + len(names)]},
    }  # fmt: skip
    where = {"x": x, "y": y, "color": color}
    layers: list[Spec] = [
        {"transform": [{"filter": "datum.curve != 'other methods'"}], "mark": "line", "encoding": where},
        {"mark": {"type": "point", "filled": True, "size": 60, "opacity": 1}, "encoding": where},
        {
            "transform": [{"filter": "datum.name"}],
            "mark": {"type": "text", "align": "left", "dx": 5, "dy": -5, "style": "name"},
            "encoding": {"x": x, "y": y, "text": {"field": "name"}},
        },
    ]
    return {"data": {"values": marks}, "width": (PAGE - 80) // 3, "height": round(0.6 * COLUMN), "layer": layers}


def _leakage(outcomes: Outcomes, measures: Mapping[str, Record]) -> Spec | None:
    """Pictures that were inverted from updates."""
    from pfedgate.studies import leakage

    return leakage.chart(measures)


PAINTERS: dict[str, Callable[[Outcomes, Mapping[str, Record]], Spec | None]] = {
    "clients": _clients,
    "clusters": _clusters,
    "convergence": _convergence,
    "gates": _gates,
    "sparsity": _sparsity,
    "pareto": pareto,
    "leakage": _leakage,
}
