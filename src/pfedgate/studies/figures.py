"""The figures of studies, as SVG and PNG; a chart that reports have too is the report's own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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

BLUE, BROWN = THEMES["light"]["runs"][:2]
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
        by_labels = runs[row].recipe.algorithm.options.get("start") == "labels"
        title = f"{row}: gates started {'from class frequencies' if by_labels else 'alike'}"
        content = {"runs": [{"label": name} for name in trees], "partitions": [links]}
        charts[title] = tree(content, run, width=PAGE - 60)
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
            name = "with shift" if row.settings["algorithm.gate.shift"] else "plain"
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


# The Pareto figure: accuracy over step time, FLOPs and upload, relative to FedAvg. Methods that come at one cost are
# marks of their own; those with a budget (pFedGate, HeteroFL) are curves over s.

COSTS = {"ms": "step time", "flops": "compute", "up": "upload"}
HETEROFL = "HeteroFL, over s"
TICKS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
FINE = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)  # where axes are short


def _polygon(corners: int, inner: float = 1.0, turn: float = 0.0) -> str:
    """A regular polygon or, with an inner radius, a star: as an SVG path."""
    steps = range(2 * corners if inner != 1 else corners)
    angle = 2 * math.pi / len(steps)
    radii = [1.0 if at % 2 == 0 else inner for at in steps]
    points = [
        f"{radius * math.sin(at * angle + turn):.2f},{-radius * math.cos(at * angle + turn):.2f}"
        for at, radius in zip(steps, radii, strict=True)
    ]
    return f"M{'L'.join(points)}Z"


STAR = _polygon(5, 0.4)
MARKS = (
    "square", "triangle-up", "triangle-down", "diamond", "cross", _polygon(4, 0.35, math.pi / 4),
    "triangle-left", "triangle-right", _polygon(6), _polygon(6, 0.5), _polygon(5), _polygon(4, 0.3), _polygon(3, 0.3),
    _polygon(8, 0.6),
)  # fmt: skip


def pareto(outcomes: Outcomes, measures: Mapping[str, Record]) -> Spec | None:
    """A row of panels for every data set that has FedAvg to relate to."""
    methods = {row.name: row.method for row in outcomes.study.rows}
    columns = [c for c in outcomes.columns if any(methods[name] == "fedavg" for name in outcomes.rows(c))]
    if not columns:
        return None
    looks = _looks(outcomes.study.rows)
    lines = []
    for column in columns:
        points = points_of(outcomes, column, measures[column]["costs"])
        panels = [_panel(points, cost, looks, column if not at else "") for at, cost in enumerate(COSTS)]
        lines.append({"hconcat": panels, "spacing": 14})
    shared = {"color": "shared", "shape": "shared", "fill": "shared", "strokeDash": "shared"}
    return {"vconcat": lines, "resolve": {"scale": shared}}


def _looks(rows: Sequence[Row]) -> dict[str, Spec]:
    """The colour, shape, filling and pattern of every curve and mark, by its name in the legend."""
    looks: dict[str, Spec] = {}
    for shift in (False, True):
        for resources, hue in (("params", BLUE), ("all", BROWN)):
            fill, dash = (hue, [1, 0]) if shift else ("#ffffff", [4, 3])
            looks[_name(shift, resources)] = {"color": hue, "fill": fill, "shape": "circle", "dash": dash}
    looks[HETEROFL] = {"color": GREY, "fill": GREY, "shape": "circle", "dash": [8, 3, 2, 3]}
    single = [row for row in rows if not _budgeted(row)]
    for row, mark in zip(single, MARKS * 3, strict=False):
        gate = row.method == "pfedgate"
        hue = BROWN if gate else GREY
        looks[_short(row.name)] = {"color": hue, "fill": hue, "shape": STAR if gate else mark, "dash": [1, 0]}
    return looks


def points_of(outcomes: Outcomes, column: str, costs: Mapping[str, Record]) -> list[Record]:
    """Accuracy and costs of every row, relative to FedAvg's."""
    points = []
    methods = {row.name: row for row in outcomes.study.rows}
    for name in outcomes.rows(column):
        score = spread(outcomes.values(name, column, ACC))
        if score is None:
            continue
        numbers = outcomes.numbers(outcomes.seeds(name, column)[0])
        point = {"row": methods[name], "accuracy": 100 * score["mean"], "ms": costs[name]["ms"]}
        points.append({**point, "flops": numbers["flops"], "up": numbers["up"]})
    base = next(point for point in points if point["row"].method == "fedavg")
    return [{**point, **{cost: point[cost] / base[cost] for cost in COSTS}} for point in points]


def curves_of(points: Sequence[Record]) -> dict[str, list[Record]]:
    """Points of methods with a budget, by the curve's name, from the smallest s to the largest.

    What is trained in microbatches is no point of the curve of whole batches, and neither are mixed budgets.
    """
    groups: dict[str, list[Record]] = {}
    for point in points:
        if _budgeted(point["row"]):
            for name in _curves(point["row"]):
                groups.setdefault(name, []).append(point)
    return {name: sorted(group, key=lambda point: _budget(point["row"])) for name, group in groups.items()}


def _budget(row: Row) -> float:
    return float(row.settings["clients.budget"])


def _budgeted(row: Row) -> bool:
    one = isinstance(row.settings.get("clients.budget"), float)
    return row.method in ("pfedgate", "heterofl") and one and "algorithm.microbatches" not in row.settings


def _curves(row: Row) -> list[str]:
    """The curves a row is part of: the whole model binds nothing, so it ends both."""
    if row.method == "heterofl":
        return [HETEROFL]
    bounds = ("params", "all") if _budget(row) == 1.0 else (row.settings["algorithm.resources"],)
    return [_name(row.settings["algorithm.gate.shift"], resources) for resources in bounds]


def _name(shift: bool, resources: str) -> str:
    return f"pFedGate{' + shift' * shift}, s of {'parameters' if resources == 'params' else 'all'}"


def _short(name: str) -> str:
    """A row's name as a legend has room for it.

    >>> _short("HeteroFL, s = .55 (10 % whole, 90 % half)"), _short("pFedGate, s = 0.3, all resources, in parts")
    ('HeteroFL, s = .55 mixed', 'pFedGate, s = 0.3 of all, in parts')
    """
    start, mixed, _ = name.partition(" (")
    return start.replace(", all resources", " of all") + " mixed" * bool(mixed)


def _marks(points: Sequence[Record], cost: str) -> list[Spec]:
    """The points of curves and single methods over one cost; the larger s, the larger the mark of a curve."""
    marks = [
        {"name": name, "x": p[cost], "y": p["accuracy"], "size": 25 + 130 * _budget(p["row"]), "curve": True}
        for name, group in curves_of(points).items()
        for p in group
    ]
    for point in points:
        if point[cost] > 0 and not _budgeted(point["row"]):
            size = 150 if point["row"].method == "pfedgate" else 75
            mark = {"name": _short(point["row"].name), "x": point[cost], "y": point["accuracy"]}
            marks.append({**mark, "size": size, "curve": False})
    return marks


def _panel(points: Sequence[Record], cost: str, looks: Mapping[str, Spec], column: str) -> Spec:
    """Accuracy over one cost; a method that costs nothing has no place on a logarithmic axis and is a line."""
    marks = _marks(points, cost)
    free = [{"text": f"{p['row'].name}: none", "y": p["accuracy"]} for p in points if not p[cost] > 0]
    low, high = min(mark["x"] for mark in marks), max(mark["x"] for mark in marks)
    scores = [point["accuracy"] for point in points]
    ticks = [tick for tick in (FINE if high < 6 * low else TICKS) if low / 1.2 <= tick <= 1.2 * high]
    x = {
        "field": "x", "type": "quantitative", "title": f"{COSTS[cost]}, × FedAvg",
        "scale": {"type": "log", "domain": [low / 1.2, 1.2 * high], "nice": False},
        "axis": {"values": ticks, "format": "~g", "grid": True},
    }  # fmt: skip
    y = {
        "field": "y", "type": "quantitative", "title": f"{column}: accuracy, %" if column else None,
        "scale": {"domain": [min(scores) - 1, max(scores) + 1], "nice": False},
        "axis": {"labels": bool(column), "tickCount": 7},
    }  # fmt: skip

    def by_name(look: str, **legend: Any) -> Spec:
        scale = {"domain": list(looks), "range": [paint[look] for paint in looks.values()]}
        return {"field": "name", "type": "nominal", "title": None, "scale": scale, "legend": legend or None}

    below = {
        "orient": "bottom", "columns": 3, "symbolSize": 80, "symbolStrokeWidth": 1.5, "labelLimit": 340,
        "title": "Of a curve: the larger the mark, the larger s.",
    }  # fmt: skip
    sized = {"field": "size", "type": "quantitative", "scale": None, "legend": None}
    layers: list[Spec] = [
        {
            "transform": [{"filter": "datum.curve"}],
            "mark": {"type": "line", "strokeWidth": 1.5},
            "encoding": {"x": x, "y": y, "color": by_name("color", **below), "strokeDash": by_name("dash")},
        },
        {
            "mark": {"type": "point", "opacity": 1, "strokeWidth": 1.5},
            "encoding": {
                "x": x, "y": y, "size": sized, "color": by_name("color", **below), "shape": by_name("shape", **below),
                "fill": by_name("fill", **below),
            },
        },
    ]  # fmt: skip
    if free:
        level = {"field": "y", "type": "quantitative"}
        layers += [
            {
                "data": {"values": free},
                "mark": {"type": "rule", "strokeDash": [2, 2], "style": "edge"},
                "encoding": {"y": level},
            },
            {
                "data": {"values": free},
                "mark": {"type": "text", "align": "left", "baseline": "bottom", "dx": 3, "dy": -2, "style": "name"},
                "encoding": {"x": {"value": 0}, "y": level, "text": {"field": "text"}},
            },
        ]
    width = (PAGE - 80) // 3
    return {"data": {"values": marks}, "width": width, "height": round(0.9 * COLUMN * 0.6), "layer": layers}


PAINTERS: dict[str, Callable[[Outcomes, Mapping[str, Record]], Spec | None]] = {
    "clients": _clients,
    "clusters": _clusters,
    "convergence": _convergence,
    "gates": _gates,
    "sparsity": _sparsity,
    "pareto": pareto,
}
