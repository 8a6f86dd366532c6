"""The figures of studies, as SVG and PNG; those that a report has too are painted by the report's own painters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pfedgate.metrics import Record
from pfedgate.report import gather
from pfedgate.report.figures import COLOURS, COLUMN, FIGURES, PAGE, STYLE
from pfedgate.runfolder import Run
from pfedgate.studies.declare import ACC, Study
from pfedgate.studies.outcome import Outcomes, spread

Painter = Callable[[Outcomes, Mapping[str, Record], Any], None]


def draw(study: Study, outcomes: Outcomes, measures: Mapping[str, Record], folder: Path) -> list[Path]:
    """The study's figure, as files."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        # A Figure of its own, without pyplot: no global state, no window, no figure left open.
        figure = Figure(figsize=(PAGE, 2.6), layout="constrained")
        PAINTERS[study.figure](outcomes, measures, figure)
        paths = [folder / f"{study.name}.{kind}" for kind in ("svg", "png")]
        for path in paths:
            figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _content(runs: Mapping[str, Run], baseline: str | None = None) -> Record:
    """What a report would show of some runs, under the names of the study's rows."""
    found = gather(list(runs.values()))
    for told, name in zip(found["runs"], runs, strict=True):
        told["label"] = name
    names = list(runs)
    for at, told in enumerate(found["runs"]):
        told["baseline"] = None if baseline in (None, names[at]) else names.index(str(baseline))
    return found


def _first_seeds(outcomes: Outcomes, column: str) -> dict[str, Run]:
    return {row: outcomes.seeds(row, column)[0] for row in outcomes.rows(column)}


def _clients(outcomes: Outcomes, measures: Mapping[str, Record], figure: Any) -> None:
    """pFedGate minus the baseline that is best on validation data, client by client."""
    parts = figure.subfigures(len(outcomes.columns), 1, squeeze=False)[:, 0]
    figure.set_size_inches(PAGE, 2.4 * len(parts))
    ours = outcomes.study.rows[-1].name
    for part, column in zip(parts, outcomes.columns, strict=True):
        others = [row for row in outcomes.rows(column) if row != ours]
        best = max(others, key=lambda row: outcomes.validation(row, column))
        runs = _first_seeds(outcomes, column)
        _paint("clients-difference", _content({best: runs[best], ours: runs[ours]}, best), part)
        part.suptitle(column, fontsize=8)


class _Fixed:
    """A part of a figure whose size is not the painter's to set."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def set_size_inches(self, *size: float) -> None:
        """Nothing: the whole figure has a size."""


def _paint(name: str, content: Record, part: Any) -> None:
    FIGURES[name][2](content, _Fixed(part))


def _clusters(outcomes: Outcomes, measures: Mapping[str, Record], figure: Any) -> None:
    runs = _first_seeds(outcomes, outcomes.columns[0])
    FIGURES["gate-tree"][2](_content(runs), figure)


def _convergence(outcomes: Outcomes, measures: Mapping[str, Record], figure: Any) -> None:
    parts = figure.subfigures(1, len(outcomes.columns), squeeze=False)[0]
    figure.set_size_inches(max(1.5 * COLUMN, COLUMN * len(parts)), 3.2)
    for part, column in zip(parts, outcomes.columns, strict=True):
        _paint("accuracy-rounds", _content(_first_seeds(outcomes, column)), part)
        part.suptitle(column, fontsize=8)
        for axes in part.axes:
            axes.legend(fontsize=6)


def _gates(outcomes: Outcomes, measures: Mapping[str, Record], figure: Any) -> None:
    """M of all blocks and clients as a histogram for every evaluated round."""
    runs = _first_seeds(outcomes, outcomes.columns[0])
    content = _content(runs)
    all_axes = figure.subplots(1, len(runs), squeeze=False)[0]
    for at, (axes, told) in enumerate(zip(all_axes, content["runs"], strict=True)):
        gates = told["gates"]
        over = (gates or {}).get("over_rounds", {}).get("all blocks", {}).get("M")
        axes.set_title(told["label"], fontsize=8)
        axes.set(xlabel="round", ylabel="M" if not at else "")
        if not over:
            continue
        counts = np.array(over["histogram"], float)
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        rounds = [float(gates["rounds"][0]) - 0.5, float(gates["rounds"][-1]) + 0.5]
        axes.imshow(
            shares.T, aspect="auto", origin="lower", extent=(*rounds, 0.0, over["top"]), cmap="Blues",
            interpolation="nearest",
        )  # fmt: skip
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(False)


def _sparsity(outcomes: Outcomes, measures: Mapping[str, Record], figure: Any) -> None:
    """Accuracy over s, for pFedGate with and without shift; the mixed setting at its mean."""
    for at, column in enumerate(outcomes.columns):
        axes = figure.add_subplot(1, len(outcomes.columns), at + 1, xlabel="s", title=column)
        axes.title.set_fontsize(8)
        axes.set_ylabel("accuracy, %" if not at else "")
        for place, (name, shift) in enumerate((("plain", False), ("with shift", True))):
            points, mixed = [], []
            for row in outcomes.study.rows:
                found = spread(outcomes.values(row.name, column, ACC))
                if found is None or row.settings["algorithm.shift"] != shift:
                    continue
                budget = row.settings["clients.budget"]
                if isinstance(budget, float):
                    points.append((budget, 100 * found["mean"]))
                else:
                    mean = sum(float(s) * share for s, share in budget.items())
                    mixed.append((mean, 100 * found["mean"]))
            axes.plot(*zip(*sorted(points), strict=True), "o-", color=COLOURS[place], markersize=3, label=name)
            for x, y in mixed:
                axes.plot(x, y, "D", color=COLOURS[place], markersize=5, label=f"{name}, s = .5 and .1 mixed")
        axes.legend(fontsize=6)


def _pareto(outcomes: Outcomes, measures: Mapping[str, Record], figure: Any) -> None:
    """Accuracy over step time, FLOPs and upload, relative to FedAvg: points of baselines, curves of pFedGate."""
    figure.set_size_inches(PAGE, 2.9 * len(outcomes.columns))
    grid = figure.subplots(len(outcomes.columns), 3, squeeze=False, sharey="row")
    for column, all_axes in zip(outcomes.columns, grid, strict=True):
        rows = _points(outcomes, column, measures[column]["costs"])
        for axes, (key, title) in zip(
            all_axes, (("ms", "step time"), ("flops", "compute"), ("up", "upload")), strict=True
        ):
            _pareto_axes(axes, rows, key)
            axes.set_xlabel(f"{title}, × FedAvg")
        all_axes[0].set_ylabel(f"{column}\naccuracy, %")
    lines, labels = grid[-1][-1].get_legend_handles_labels()
    figure.legend(lines, labels, fontsize=6, loc="outside lower center", ncols=len(labels))


def _points(outcomes: Outcomes, column: str, costs: Mapping[str, Record]) -> list[Record]:
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
    return [{**p, **{key: p[key] / base[key] for key in ("ms", "flops", "up")}} for p in found]


def _pareto_axes(axes: Any, points: list[Record], key: str) -> None:
    curves: dict[tuple[bool, str], list[Record]] = {}
    for point in points:
        row = point["row"]
        if row.method != "pfedgate":
            axes.plot(point[key], point["accuracy"], ".", color="#6d7480", markersize=5)
            axes.annotate(
                row.name.partition(",")[0], (point[key], point["accuracy"]), fontsize=4.5, color="#5c6470",
                xytext=(2, 2), textcoords="offset points",
            )  # fmt: skip
            continue
        shift = row.settings["algorithm.shift"]
        whole = row.settings["clients.budget"] == 1.0
        for resources in ("params", "all") if whole else (row.settings["algorithm.resources"],):
            curves.setdefault((shift, resources), []).append(point)
    for at, ((shift, resources), found) in enumerate(sorted(curves.items())):
        line = sorted((point[key], point["accuracy"]) for point in found)
        label = f"pFedGate{' + shift' if shift else ''}, s on {'parameters' if resources == 'params' else 'all'}"
        axes.plot(*zip(*line, strict=True), "o-", color=COLOURS[at], markersize=3, label=label)


PAINTERS: dict[str, Painter] = {
    "clients": _clients,
    "clusters": _clusters,
    "convergence": _convergence,
    "gates": _gates,
    "sparsity": _sparsity,
    "pareto": _pareto,
}
