"""The report's figures as files for papers: pdf, svg or png, sized for a column or a page."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedgate.core.errors import unknown
from pfedgate.report.gate_figures import paint_blocks, paint_partition, paint_tree, paint_weights
from pfedgate.report.style import (
    COLOURS,
    COLUMN,
    FORMATS,
    PAGE,
    STYLE,
    Content,
    Painter,
    colour,
    look,
    name_ticks,
    printable,
    whole,
)

__all__ = ["COLOURS", "COLUMN", "FIGURES", "FORMATS", "PAGE", "STYLE", "draw_all"]

FEW = 4  # runs whose names fit into a plot


def draw_all(content: Content, folder: str | Path, kind: str = "svg") -> list[Path]:
    """Every figure that the runs have something to show for."""
    import matplotlib
    from matplotlib.figure import Figure

    if kind not in FORMATS:
        raise ValueError(unknown("format", kind, FORMATS))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    content = printable(content)
    with matplotlib.rc_context(STYLE):
        for figure_name, (width, height, paint) in FIGURES.items():
            for name, part in _parts(figure_name, content):
                # A Figure of its own, without pyplot: no global state, no window, no figure left open.
                figure = Figure(figsize=(width, height), layout="constrained")
                if paint(part, figure):
                    path = target / f"{name}.{kind}"
                    still = {"Date": None} if kind == "svg" else {"CreationDate": None} if kind == "pdf" else None
                    figure.savefig(path, dpi=220, metadata=still)
                    written.append(path)
    return written


def _parts(name: str, content: Content) -> Iterator[tuple[str, Content]]:
    """A figure's files: most show all runs, but there is a tree for every gated run and a picture of each partition."""
    runs = content["runs"]
    if name == "gate-tree":
        having = [at for at, run in enumerate(runs) if run["gates"] and run["gates"]["tree"]]
        for at in having:
            # The others lose their gates, not their places: a run keeps its colour.
            alone = [run if other == at else {**run, "gates": None} for other, run in enumerate(runs)]
            label = re.sub(r"[^\w.=]+", "-", runs[at]["label"]).strip("-.")
            yield name if len(having) == 1 else f"{name}-{at + 1}-{label}", {**content, "runs": alone}
    elif name == "partition":
        parts = content["partitions"]
        for at, partition in enumerate(parts):
            yield name if len(parts) == 1 else f"{name}-{at + 1}", {**content, "partitions": [partition]}
    else:
        yield name, content


def _curves(key: str, title: str, scale: float) -> Painter:
    def paint(content: Content, figure: Any) -> bool:
        axes = figure.add_subplot(xlabel=title, ylabel="accuracy, %")
        for at, run in enumerate(content["runs"]):
            points = [(x / scale, 100 * y) for x, y in _pairs(run["curves"][key], run["curves"]["accuracy"])]
            if points:
                axes.plot(*zip(*points, strict=True), **look(at), label=run["label"], marker=_dots(points))
        return _legend(axes)

    return paint


def _clients(content: Content, figure: Any) -> bool:
    axes = figure.add_subplot(xlabel="clients, by accuracy in the last round", ylabel="accuracy, %")
    for at, run in enumerate(content["runs"]):
        values = sorted(100 * row["accuracy"] for row in run["clients"] if row.get("accuracy") is not None)
        if values:
            ranks = np.arange(1, len(values) + 1)
            axes.plot(ranks, values, **look(at), label=run["label"])
            decile = len(values) // 10
            axes.plot(ranks[decile], values[decile], "o", color=colour(at), markerfacecolor="white", markersize=5)
    return _legend(axes)


def _difference(content: Content, figure: Any) -> bool:
    runs = content["runs"]
    others = [
        (run, runs[run["baseline"]])
        for run in runs
        if run["baseline"] is not None and run["clients"] and runs[run["baseline"]]["clients"]
    ]
    if not others:
        return False
    figure.set_size_inches(PAGE, 1.9 * len(others))
    for row, (run, base) in enumerate(others):
        theirs = {client["client"]: client["accuracy"] for client in base["clients"] if "accuracy" in client}
        # By rank: clients that tie with the one at the worst tenth are not all in it.
        low = set(sorted(theirs, key=lambda client: theirs[client])[: len(theirs) // 10 + 1])
        found = sorted(
            (100 * (c["accuracy"] - theirs[c["client"]]), c["client"])
            for c in run["clients"]
            if c["client"] in theirs and "accuracy" in c
        )
        axes = figure.add_subplot(len(others), 1, row + 1, ylabel=_wrapped(f"{run['label']} − {base['label']}, points"))
        shades = [COLOURS[1] if value < 0 else COLOURS[0] for value, _ in found]
        axes.bar(range(len(found)), [value for value, _ in found], color=shades, width=0.75)
        axes.axhline(0, color="#5c6470", linewidth=0.8)
        marked = [i for i, (_, client) in enumerate(found) if client in low]
        axes.plot(
            marked, [0.03] * len(marked), "^", color="#b7791f", markersize=4, transform=axes.get_xaxis_transform()
        )
        axes.set_xticks([])
        if len(found) <= 60:
            name_ticks(axes.xaxis, [client for _, client in found], PAGE - 0.8)
    axes.set_xlabel(
        "clients, by difference in the last round; triangles: the client at the other's worst tenth, and those below"
    )
    return True


def _over_rounds(*names: tuple[str, str]) -> Painter:
    def paint(content: Content, figure: Any) -> bool:
        drawn = False
        for column, (key, title) in enumerate(names):
            axes = figure.add_subplot(1, len(names), column + 1, xlabel="round", ylabel=title)
            for at, run in enumerate(content["runs"]):
                points = _pairs(run["training"]["round"], run["training"].get(key, []))
                if points:
                    axes.plot(*zip(*points, strict=True), **look(at), label=run["label"])
            drawn = _legend(axes) or drawn
        return drawn

    return paint


def _pairs(xs: Sequence[float], ys: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(xs, ys, strict=False) if y is not None]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 24, break_long_words=False)


def _dots(points: Sequence[Any]) -> str:
    return "." if len(points) <= 30 else ""


def _legend(axes: Any) -> bool:
    if not axes.lines:
        return False
    if axes.get_xlabel() == "round":
        whole(axes.xaxis)
    if len(axes.get_legend_handles_labels()[1]) <= FEW:
        axes.legend()
    else:  # more names than a plot has room for stand below it
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.27), ncols=2, fontsize=6)
    return True


FIGURES: dict[str, tuple[float, float, Painter]] = {
    "accuracy-rounds": (COLUMN, 2.4, _curves("round", "round", 1)),
    "accuracy-bytes": (COLUMN, 2.4, _curves("bytes", "megabytes sent and received", 1e6)),
    "accuracy-seconds": (COLUMN, 2.4, _curves("seconds", "seconds of training", 1)),
    "clients-sorted": (COLUMN, 2.4, _clients),
    "clients-difference": (PAGE, 2.4, _difference),
    "density-q": (PAGE, 2.2, _over_rounds(("density", "density"), ("q", "q"))),
    "blocks": (PAGE, 3.0, paint_blocks),
    "gate-weights": (PAGE, 2.2, paint_weights),
    "gate-tree": (PAGE, 3.5, paint_tree),
    "partition": (PAGE, 2.6, paint_partition),
}
