"""The report's figures as files for papers: pdf, svg or png, sized for a column or a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedgate.names import unknown

FORMATS = ("pdf", "svg", "png")
COLOURS = ("#2f5fd0", "#d9542b", "#1f8f5f", "#8a4fd3", "#b98200", "#c8358a", "#1791a8", "#7a5a44", "#6d7480", "#4f7d13")
COLUMN, PAGE = 3.4, 6.9  # inches: the widths of a two-column paper
STYLE: Any = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e8eb",
    "axes.axisbelow": True,
    "axes.edgecolor": "#6d7480",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,
    "svg.hashsalt": "pfedgate",  # the same figure is the same file
}
Content = Mapping[str, Any]
Painter = Callable[[Content, Any], bool]


def draw_all(content: Content, folder: str | Path, kind: str = "svg") -> list[Path]:
    """Every figure that the runs have something to show for."""
    import matplotlib
    from matplotlib.figure import Figure

    if kind not in FORMATS:
        raise ValueError(unknown("format", kind, FORMATS))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(STYLE):
        for name, (width, height, paint) in FIGURES.items():
            # A Figure of its own, without pyplot: no global state, no window, no figure left open.
            figure = Figure(figsize=(width, height), layout="constrained")
            if paint(content, figure):
                path = target / f"{name}.{kind}"
                still = {"Date": None} if kind == "svg" else {"CreationDate": None} if kind == "pdf" else None
                figure.savefig(path, dpi=220, metadata=still)
                written.append(path)
    return written


def _curves(key: str, title: str, scale: float) -> Painter:
    def paint(content: Content, figure: Any) -> bool:
        axes = figure.add_subplot(xlabel=title, ylabel="accuracy, %")
        for at, run in enumerate(content["runs"]):
            points = [(x / scale, 100 * y) for x, y in _pairs(run["curves"][key], run["curves"]["accuracy"])]
            if points:
                axes.plot(*zip(*points, strict=True), color=_colour(at), label=run["label"], marker=_dots(points))
        return _legend(axes)

    return paint


def _clients(content: Content, figure: Any) -> bool:
    axes = figure.add_subplot(xlabel="clients, by accuracy", ylabel="accuracy, %")
    for at, run in enumerate(content["runs"]):
        values = sorted(100 * row["accuracy"] for row in run["clients"] if row.get("accuracy") is not None)
        if values:
            ranks = np.arange(1, len(values) + 1)
            axes.plot(ranks, values, color=_colour(at), label=run["label"])
            decile = len(values) // 10
            axes.plot(ranks[decile], values[decile], "o", color=_colour(at), markerfacecolor="white", markersize=5)
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
        low = sorted(theirs.values())[len(theirs) // 10]
        found = sorted(
            (100 * (c["accuracy"] - theirs[c["client"]]), c["client"])
            for c in run["clients"]
            if c["client"] in theirs and "accuracy" in c
        )
        axes = figure.add_subplot(len(others), 1, row + 1, ylabel=f"{run['label']} −\n{base['label']}, points")
        shades = [COLOURS[1] if value < 0 else COLOURS[0] for value, _ in found]
        axes.bar(range(len(found)), [value for value, _ in found], color=shades, width=0.75)
        axes.axhline(0, color="#5c6470", linewidth=0.8)
        marked = [i for i, (_, client) in enumerate(found) if theirs[client] <= low]
        axes.plot(
            marked, [0.03] * len(marked), "^", color="#b7791f", markersize=4, transform=axes.get_xaxis_transform()
        )
        few = len(found) <= 40
        axes.set_xticks(range(len(found)) if few else [], [client for _, client in found] if few else [], fontsize=6)
    axes.set_xlabel("clients, by difference; triangles: bottom decile of the other run")
    return True


def _over_rounds(*names: tuple[str, str]) -> Painter:
    def paint(content: Content, figure: Any) -> bool:
        drawn = False
        for column, (key, title) in enumerate(names):
            axes = figure.add_subplot(1, len(names), column + 1, xlabel="round", ylabel=title)
            for at, run in enumerate(content["runs"]):
                points = _pairs(run["training"]["round"], run["training"].get(key, []))
                if points:
                    axes.plot(*zip(*points, strict=True), color=_colour(at), label=run["label"])
            drawn = _legend(axes) or drawn
        return drawn

    return paint


def _blocks(content: Content, figure: Any) -> bool:
    gated = _gated(content)
    if not gated:
        return False
    tallest = max(len(run["gates"]["clients"]) for _, run in gated)
    figure.set_size_inches(PAGE, (0.8 + min(5.0, max(1.2, 0.11 * tallest))) * len(gated))
    for row, (at, run) in enumerate(gated):
        gates = run["gates"]
        axes = figure.add_subplot(len(gated), 1, row + 1, ylabel="client")
        kept = np.array([[bit == "1" for bit in bits] for bits in gates["kept"]], float)
        axes.imshow(kept, aspect="auto", cmap=_shades(_colour(at)), vmin=0, vmax=1, interpolation="nearest")
        axes.grid(False)
        for layer in gates["layers"]:
            axes.axvline(layer["blocks"][0] - 0.5, color="#1b1d21", linewidth=0.8)
        starts = [layer["blocks"][0] for layer in gates["layers"]]
        axes.set_xticks(starts, [layer["name"] for layer in gates["layers"]], ha="left", fontsize=7)
        if len(gates["clients"]) <= 60:
            axes.set_yticks(range(len(gates["clients"])), gates["clients"], fontsize=5)
        axes.set_title(f"{run['label']}: blocks kept", fontsize=8)
    return True


def _weights(content: Content, figure: Any) -> bool:
    gated = [(at, run) for at, run in _gated(content) if run["gates"]["over_rounds"]]
    if not gated:
        return False
    figure.set_size_inches(PAGE, 2.0 * len(gated))
    for row, (at, run) in enumerate(gated):
        gates = run["gates"]
        for column, path in enumerate(("M", "G")):
            title = f"{run['label']}: {path}"
            axes = figure.add_subplot(len(gated), 2, 2 * row + column + 1, xlabel="round", ylabel=title)
            bands = np.array(gates["over_rounds"]["all blocks"][path]["quantiles"], float).T
            for low, high, alpha in ((0, 4, 0.16), (1, 3, 0.3)):
                axes.fill_between(gates["rounds"], bands[low], bands[high], color=_colour(at), alpha=alpha, linewidth=0)
            axes.plot(gates["rounds"], bands[2], color=_colour(at))
    return True


def _tree(content: Content, figure: Any) -> bool:
    gated = [(at, run) for at, run in _gated(content) if run["gates"]["tree"]]
    if not gated:
        return False
    at, run = gated[0]
    gates, tree = run["gates"], run["gates"]["tree"]
    count = len(gates["clients"])
    figure.set_size_inches(PAGE, 0.8 + min(8.0, max(1.5, 0.13 * count)))
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for across, height in zip(tree["across"], tree["height"], strict=True):
        left.plot(height, across, color=_colour(at), linewidth=1)
    left.invert_xaxis()
    left.set(xlabel="distance between gates (Ward)", ylim=(count - 0.5, -0.5))
    left.set_yticks(range(count), [gates["clients"][leaf] for leaf in tree["leaves"]], fontsize=5)
    left.yaxis.tick_right()
    left.grid(False)
    left.spines["left"].set_visible(False)
    if run["partition"] is None:
        right.set_visible(False)
        return True
    partition = content["partitions"][run["partition"]]
    counts = dict(zip(partition["clients"], partition["counts"], strict=True))
    nothing = [0] * len(partition["classes"])
    rows = np.array([counts.get(gates["clients"][leaf], nothing) for leaf in tree["leaves"]], float)
    shares = rows / np.maximum(rows.max(1, keepdims=True), 1)
    right.imshow(shares, aspect="auto", cmap=_shades(COLOURS[2]), interpolation="nearest")
    right.grid(False)
    right.set(xlabel="class", yticks=[])
    if len(partition["classes"]) <= 20:
        right.set_xticks(range(len(partition["classes"])), partition["classes"], fontsize=6)
    return True


def _partition(content: Content, figure: Any) -> bool:
    if not content["partitions"]:
        return False
    partition = content["partitions"][0]
    counts = np.array(partition["counts"], float)
    axes = figure.add_subplot(xlabel="client", ylabel="class")
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    drawn = axes.imshow(shares.T, aspect="auto", origin="lower", cmap=_shades(COLOURS[0]), interpolation="nearest")
    axes.grid(False)
    figure.colorbar(drawn, ax=axes, label="share of the client's samples")
    alpha = f", α = {partition['alpha']}" if partition["alpha"] else ""
    axes.set_title(f"{partition['name']}: {partition['how']}{alpha}", fontsize=8)
    return True


def _gated(content: Content) -> list[tuple[int, Content]]:
    return [(at, run) for at, run in enumerate(content["runs"]) if run["gates"]]


def _pairs(xs: Sequence[float], ys: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(xs, ys, strict=False) if y is not None]


def _colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]


def _dots(points: Sequence[Any]) -> str:
    return "." if len(points) <= 30 else ""


def _shades(colour: str) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shades", ["#f1f2f4", colour])


def _legend(axes: Any) -> bool:
    if not axes.lines:
        return False
    if axes.get_xlabel() == "round":
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    return True


FIGURES: dict[str, tuple[float, float, Painter]] = {
    "accuracy-rounds": (COLUMN, 2.4, _curves("round", "round", 1)),
    "accuracy-bytes": (COLUMN, 2.4, _curves("bytes", "megabytes sent and received", 1e6)),
    "accuracy-seconds": (COLUMN, 2.4, _curves("seconds", "seconds of training", 1)),
    "clients-sorted": (COLUMN, 2.4, _clients),
    "clients-difference": (PAGE, 2.4, _difference),
    "density-q": (PAGE, 2.2, _over_rounds(("density", "density"), ("q", "q"))),
    "blocks": (PAGE, 3.0, _blocks),
    "gate-weights": (PAGE, 2.2, _weights),
    "gate-tree": (PAGE, 3.5, _tree),
    "partition": (PAGE, 2.6, _partition),
}
