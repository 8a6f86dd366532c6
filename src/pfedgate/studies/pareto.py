"""The Pareto figure: accuracy over step time, FLOPs and upload, relative to FedAvg.

Methods that come at one cost are marks of their own; those with a budget (pFedGate, HeteroFL) are curves over s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pfedgate.engine.metrics import Record
from pfedgate.report.figures import COLOURS, PAGE
from pfedgate.studies.declare import ACC, Row
from pfedgate.studies.outcome import Outcomes, spread

COSTS = (("ms", "step time"), ("flops", "compute"), ("up", "upload"))
GREY = "#5c6470"
HETEROFL = "HeteroFL, over s"
MARKS = ("o", "s", "^", "v", "D", "P", "X", "<", ">", "h", "*", "p", "d", "+", "x")
TICKS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
FINE = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)  # where axes are short
# By whether there is a shift and what is bound.
STYLES = {
    (False, "params"): {"color": COLOURS[0], "linestyle": "--", "markerfacecolor": "white"},
    (True, "params"): {"color": COLOURS[0], "linestyle": "-"},
    (False, "all"): {"color": COLOURS[1], "linestyle": "--", "markerfacecolor": "white"},
    (True, "all"): {"color": COLOURS[1], "linestyle": "-"},
}


def paint(outcomes: Outcomes, measures: Mapping[str, Record], figure: Any) -> bool:
    """A line of panels for every data set; whether there was anything to draw."""
    columns = [column for column in outcomes.columns if _base(outcomes, column)]
    if not columns:
        return False
    figure.set_size_inches(PAGE, 2.3 * len(columns) + 1.1)
    grid = figure.subplots(len(columns), len(COSTS), squeeze=False, sharey="row")
    marks = dict(zip((row.name for row in outcomes.study.rows if not _budgeted(row)), MARKS * 3, strict=False))
    known: dict[str, Any] = {}
    for column, all_axes in zip(columns, grid, strict=True):
        points = points_of(outcomes, column, measures[column]["costs"])
        for axes, (key, title) in zip(all_axes, COSTS, strict=True):
            known |= {line.get_label(): line for line in _panel(axes, points, key, marks)}
            _scale(axes)
            axes.set_xlabel(f"{title}, × FedAvg")
        all_axes[0].set_ylabel(f"{column}\naccuracy, %")
    names = sorted(known, key=lambda name: (not name.startswith("pFedGate"), name != HETEROFL))  # curves first
    figure.legend(
        [known[name] for name in names], names, fontsize=7, loc="outside lower center", ncols=3, handlelength=2.6,
        title="of a curve: the larger the mark, the larger s", title_fontsize=7,
    )  # fmt: skip
    return True


def _base(outcomes: Outcomes, column: str) -> bool:
    methods = {row.name: row.method for row in outcomes.study.rows}
    return any(methods[name] == "fedavg" for name in outcomes.rows(column))


def points_of(outcomes: Outcomes, column: str, costs: Mapping[str, Record]) -> list[Record]:
    """Accuracy and costs of every row, relative to FedAvg's."""
    found = []
    methods = {row.name: row for row in outcomes.study.rows}
    for name in outcomes.rows(column):
        score = spread(outcomes.values(name, column, ACC))
        if score is None:
            continue
        numbers = outcomes.numbers(outcomes.seeds(name, column)[0])
        found.append(
            {
                "row": methods[name], "accuracy": 100 * score["mean"], "ms": costs[name]["ms"],
                "flops": numbers["flops"], "up": numbers["up"],
            }
        )  # fmt: skip
    base = next(point for point in found if point["row"].method == "fedavg")
    return [{**p, **{key: p[key] / base[key] for key, _ in COSTS}} for p in found]


def curves_of(points: Sequence[Record]) -> dict[str, list[Record]]:
    """Points of methods with a budget, by the curve's name, from the smallest s to the largest.

    What is trained in microbatches is no point of the curve of whole batches, and neither are mixed budgets.
    """
    found: dict[str, list[Record]] = {}
    for point in points:
        if _budgeted(point["row"]):
            for name in _curves(point["row"]):
                found.setdefault(name, []).append(point)
    return {
        name: sorted(line, key=lambda p: float(p["row"].settings["clients.budget"])) for name, line in found.items()
    }


def _budgeted(row: Row) -> bool:
    one = isinstance(row.settings.get("clients.budget"), float)
    return row.method in ("pfedgate", "heterofl") and one and "algorithm.microbatches" not in row.settings


def _curves(row: Row) -> list[str]:
    """The curves a row is part of: the whole model binds nothing, so it ends both."""
    if row.method == "heterofl":
        return [HETEROFL]
    bound = row.settings["algorithm.resources"]
    of = ("params", "all") if row.settings["clients.budget"] == 1.0 else (bound,)
    return [_name(row.settings["algorithm.gate.shift"], resources) for resources in of]


def _name(shift: bool, resources: str) -> str:
    return f"pFedGate{' + shift' * shift}, s of {'parameters' if resources == 'params' else 'all'}"


def _short(name: str) -> str:
    """A row's name as a legend has room for it.

    >>> _short("HeteroFL, s = .55 (10 % whole, 90 % half)"), _short("pFedGate, s = 0.3, all resources, in parts")
    ('HeteroFL, s = .55 mixed', 'pFedGate, s = 0.3 of all, in parts')
    """
    start, mixed, _ = name.partition(" (")
    return start.replace(", all resources", " of all") + " mixed" * bool(mixed)


def _panel(axes: Any, points: Sequence[Record], key: str, marks: Mapping[str, str]) -> list[Any]:
    """One panel; returns what its legend has to name."""
    styles = {_name(*kind): style for kind, style in STYLES.items()}
    lines = []
    for point in (p for p in points if not _budgeted(p["row"])):
        gate = point["row"].method == "pfedgate"
        look = {"color": COLOURS[1] if gate else GREY, "markersize": 8 if gate else 5, "linestyle": ""}
        mark = "*" if gate else marks[point["row"].name]
        if point[key] > 0:
            lines += axes.plot(
                point[key], point["accuracy"], marker=mark, label=_short(point["row"].name), zorder=3, **look
            )
        else:  # no place on a logarithmic axis
            axes.axhline(point["accuracy"], color=GREY, linewidth=0.8, linestyle=":")
            axes.annotate(
                f"{point['row'].name}: none", (0.02, point["accuracy"]), xycoords=("axes fraction", "data"), fontsize=6,
                color=GREY, xytext=(0, 2), textcoords="offset points",
            )  # fmt: skip
    for name, line in curves_of(points).items():
        style = styles.get(name, {"color": GREY, "linestyle": "-."})
        lines += axes.plot(
            [p[key] for p in line], [p["accuracy"] for p in line], marker="o", markersize=3, linewidth=1.2, label=name,
            **style,
        )  # fmt: skip
        for p in line:
            size = 2 + 4 * float(p["row"].settings["clients.budget"])
            face = style.get("markerfacecolor", style["color"])
            axes.plot(p[key], p["accuracy"], "o", color=style["color"], markerfacecolor=face, markersize=size)
    return lines


def _scale(axes: Any) -> None:
    """A logarithmic axis with plain numbers, as far as there are points."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = FINE if high < 6 * low else TICKS
    axes.set_xticks([tick for tick in ticks if low <= tick <= high], minor=False)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(True, axis="x")
