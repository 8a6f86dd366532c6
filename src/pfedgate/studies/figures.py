"""The figures of studies, as SVG and PNG; those that a report has too are painted by the report's own painters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pfedgate.engine.metrics import Record
from pfedgate.report import gather
from pfedgate.report.figures import COLOURS, COLUMN, FIGURES, PAGE, STYLE
from pfedgate.runs import gates
from pfedgate.runs.folder import Run
from pfedgate.studies import pareto
from pfedgate.studies.cells import look
from pfedgate.studies.declare import ACC, Study
from pfedgate.studies.outcome import Outcomes, spread

Painter = Callable[[Outcomes, Mapping[str, Record], Any], bool]  # whether there was anything to draw


def draw(study: Study, outcomes: Outcomes, measures: Mapping[str, Record], folder: Path) -> list[Path]:
    """The study's figure, as files; none if there is nothing to draw: an older figure is not replaced by nothing."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        # A Figure of its own, without pyplot: no global state, no window, no figure left open.
        figure = Figure(figsize=(PAGE, 2.6), layout="constrained")
        if not PAINTERS[study.figure](outcomes, measures, figure):
            return []
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


def _clients(outcomes: Outcomes, measures: Mapping[str, Record], figure: Any) -> bool:
    """pFedGate minus the baseline that is best on validation data, client by client."""
    parts = figure.subfigures(len(outcomes.columns), 1, squeeze=False)[:, 0]
    figure.set_size_inches(PAGE, 2.4 * len(parts))
    ours, drawn = outcomes.study.rows[-1].name, False
    for part, column in zip(parts, outcomes.columns, strict=True):
        others = [row for row in outcomes.rows(column) if row != ours]
        best = max(others, key=lambda row: outcomes.validation(row, column))
        runs = _first_seeds(outcomes, column)
        drawn |= _paint("clients-difference", _content({best: runs[best], ours: runs[ours]}, best), part)
        part.suptitle(column, fontsize=8)
    return drawn


class _Fixed:
    """A part of a figure whose size is not the painter's to set."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def set_size_inches(self, *size: float) -> None:
        """Nothing: the whole figure has a size."""


def _paint(name: str, content: Record, part: Any) -> bool:
    return FIGURES[name][2](content, _Fixed(part))


def _clusters(outcomes: Outcomes, measures: Mapping[str, Record], figure: Any) -> bool:
    """A tree of gates for every row, from what was kept of them when their cells ended."""
    runs = _first_seeds(outcomes, outcomes.columns[0])
    trees = {row: look(run, "tree")["tree"] for row, run in runs.items()}
    if not all(trees.values()):
        return False
    most = max(len(tree["clients"]) for tree in trees.values())
    figure.set_size_inches(PAGE, len(trees) * (1.0 + min(8.0, max(1.5, 0.13 * most))))
    parts = figure.subfigures(len(trees), 1, squeeze=False)[:, 0]
    for part, (row, tree) in zip(parts, trees.items(), strict=True):
        content = {"runs": [{"label": row, "gates": {"clients": tree["clients"], "tree": tree}, "partition": 0}]}
        _paint("gate-tree", {**content, "partitions": [tree]}, part)
        labels = runs[row].recipe.algorithm.options.get("start") == "labels"
        part.suptitle(f"{row}: gates started {'from class frequencies' if labels else 'alike'}", fontsize=8)
    return True


def _convergence(outcomes: Outcomes, measures: Mapping[str, Record], figure: Any) -> bool:
    parts = figure.subfigures(1, len(outcomes.columns), squeeze=False)[0]
    figure.set_size_inches(max(1.5 * COLUMN, COLUMN * len(parts)), 3.2)
    drawn = False
    for part, column in zip(parts, outcomes.columns, strict=True):
        drawn |= _paint("accuracy-rounds", _content(_first_seeds(outcomes, column)), part)
        part.suptitle(column, fontsize=8)
        for axes in part.axes:
            axes.legend(fontsize=6)
    return drawn


def _gates(outcomes: Outcomes, measures: Mapping[str, Record], figure: Any) -> bool:
    """M of all blocks and clients as a histogram for every evaluated round."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import PercentFormatter

    runs = _first_seeds(outcomes, outcomes.columns[0])
    all_axes = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    image = None
    # Most blocks stay where they start: shares of blocks differ by orders of magnitude.
    norm = LogNorm(1e-3, 1.0)
    for axes, (name, run) in zip(all_axes, runs.items(), strict=True):
        axes.set_title(name, fontsize=8)
        axes.set(xlabel="round")
        axes.grid(False)
        rounds, over = weights_of(run)
        if not rounds:
            continue
        counts = np.array([told["histogram"] for told in over], float)
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        half = (rounds[1] - rounds[0]) / 2 if len(rounds) > 1 else 0.5
        image = axes.imshow(
            np.maximum(shares.T, 1e-6), aspect="auto", origin="lower", cmap="Blues", norm=norm, interpolation="nearest",
            extent=(rounds[0] - half, rounds[-1] + half, 0.0, over[0]["top"]),
        )  # fmt: skip
        axes.xaxis.get_major_locator().set_params(integer=True)
    all_axes[0].set_ylabel("M")
    if image is not None:
        figure.colorbar(
            image,
            ax=list(all_axes),
            label="share of blocks",
            extend="min",
            pad=0.01,
            format=PercentFormatter(1.0, decimals=1),
        )
    return image is not None


def weights_of(run: Run) -> tuple[list[int], list[Record]]:
    """The rounds in which gates were noted, and the histograms of M over all blocks and clients in them."""
    path = run.path / gates.FILE
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [line["round"] for line in lines], [line["layers"]["all blocks"]["M"] for line in lines]


def _sparsity(outcomes: Outcomes, measures: Mapping[str, Record], figure: Any) -> bool:
    """Accuracy over s, for pFedGate with and without shift; the mixed setting at its mean."""
    for at, column in enumerate(outcomes.columns):
        axes = figure.add_subplot(1, len(outcomes.columns), at + 1, xlabel="s", title=column)
        axes.title.set_fontsize(8)
        axes.set_ylabel("accuracy, %" if not at else "")
        for place, (name, shift) in enumerate((("plain", False), ("with shift", True))):
            points, mixed = [], []
            for row in outcomes.study.rows:
                found = spread(outcomes.values(row.name, column, ACC))
                if found is None or row.settings["algorithm.gate.shift"] != shift:
                    continue
                budget = row.settings["clients.budget"]
                if isinstance(budget, float):
                    points.append((budget, 100 * found["mean"]))
                else:
                    mean = sum(float(s) * share for s, share in budget.items())
                    mixed.append((mean, 100 * found["mean"]))
            axes.plot(*np.array(sorted(points)).reshape(-1, 2).T, "o-", color=COLOURS[place], markersize=3, label=name)
            for x, y in mixed:
                axes.plot(x, y, "D", color=COLOURS[place], markersize=5, label=f"{name}, s = .5 and .1 mixed")
        axes.legend(fontsize=6)
    return bool(outcomes.columns)


PAINTERS: dict[str, Painter] = {
    "clients": _clients,
    "clusters": _clusters,
    "convergence": _convergence,
    "gates": _gates,
    "sparsity": _sparsity,
    "pareto": pareto.paint,
}
