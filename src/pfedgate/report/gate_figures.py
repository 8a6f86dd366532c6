"""Figures of gates and data as files: blocks kept, weights over rounds, gates that are alike, classes of clients."""

from __future__ import annotations

from typing import Any

import numpy as np

from pfedgate.report.style import COLOURS, PAGE, Content, colour, name_ticks, shades, whole


def paint_blocks(content: Content, figure: Any) -> bool:
    """Blocks that each client keeps, one part per gated run."""
    gated = _gated(content)
    if not gated:
        return False
    tallest = max(len(run["gates"]["clients"]) for _, run in gated)
    tall = min(5.0, max(1.2, 0.11 * tallest))
    figure.set_size_inches(PAGE, (0.8 + tall) * len(gated))
    for row, (at, run) in enumerate(gated):
        gates = run["gates"]
        axes = figure.add_subplot(len(gated), 1, row + 1, ylabel="client")
        kept = np.array([[bit == "1" for bit in bits] for bits in gates["kept"]], float)
        axes.imshow(kept, aspect="auto", cmap=shades(colour(at)), vmin=0, vmax=1, interpolation="nearest")
        axes.grid(False)
        for layer in gates["layers"]:
            axes.axvline(layer["blocks"][0] - 0.5, color="#1b1d21", linewidth=0.8)
        starts = [layer["blocks"][0] for layer in gates["layers"]]
        axes.set_xticks(starts, [layer["name"] for layer in gates["layers"]], ha="left", fontsize=7)
        name_ticks(axes.yaxis, gates["clients"], tall, 5)
        axes.set_title(f"{run['label']}: blocks kept", fontsize=8)
    return True


def paint_weights(content: Content, figure: Any) -> bool:
    """Quantiles of weights and importances over rounds, one row per gated run."""
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
                axes.fill_between(gates["rounds"], bands[low], bands[high], color=colour(at), alpha=alpha, linewidth=0)
            axes.plot(gates["rounds"], bands[2], color=colour(at))
            whole(axes.xaxis)
    return True


def paint_tree(content: Content, figure: Any) -> bool:
    """Ward's tree of the first gated run's gates, under its name; beside it the classes of clients."""
    gated = [(at, run) for at, run in _gated(content) if run["gates"]["tree"]]
    if not gated:
        return False
    at, run = gated[0]
    gates, tree = run["gates"], run["gates"]["tree"]
    count = len(gates["clients"])
    tall = min(8.0, max(1.5, 0.13 * count))
    figure.set_size_inches(PAGE, 1.0 + tall)
    start = ", which started from class frequencies" if gates.get("from_labels") else ""
    figure.suptitle(f"{run['label']}: gates{start}", fontsize=8)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for across, height in zip(tree["across"], tree["height"], strict=True):
        left.plot(height, across, color=colour(at), linewidth=1)
    top = max((max(height) for height in tree["height"]), default=0) or 1
    left.set(xlabel="distance between gates (Ward)", xlim=(1.02 * top, 0), ylim=(count - 0.5, -0.5))
    name_ticks(left.yaxis, [gates["clients"][leaf] for leaf in tree["leaves"]], tall, 5)
    left.yaxis.tick_right()
    left.tick_params(axis="y", length=0)
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
    right.imshow(shares, aspect="auto", cmap=shades(COLOURS[2]), interpolation="nearest")
    right.grid(False)
    right.set(xlabel="class", yticks=[])
    name_ticks(right.xaxis, partition["classes"], PAGE / 3 - 0.2, 6 if len(partition["classes"]) <= 20 else 5)
    return True


def paint_partition(content: Content, figure: Any) -> bool:
    """Share of each class in the samples of each client."""
    if not content["partitions"]:
        return False
    partition = content["partitions"][0]
    counts = np.array(partition["counts"], float)
    axes = figure.add_subplot(xlabel="client", ylabel="class")
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    drawn = axes.imshow(shares.T, aspect="auto", origin="lower", cmap=shades(COLOURS[0]), interpolation="nearest")
    axes.grid(False)
    classes, clients = partition["classes"], partition["clients"]
    tall = min(6.0, max(1.7, 0.1 * len(classes)))
    figure.set_size_inches(PAGE, 0.9 + tall)
    name_ticks(axes.xaxis, clients, PAGE - 1.5)
    name_ticks(axes.yaxis, classes, tall, 6 if len(classes) <= 20 else 5)
    figure.colorbar(drawn, ax=axes, label="share of the client's samples")
    alpha = f", α = {partition['alpha']}" if partition["alpha"] else ""
    axes.set_title(f"{partition['name']}: {partition['how']}{alpha}", fontsize=8)
    return True


def _gated(content: Content) -> list[tuple[int, Content]]:
    return [(at, run) for at, run in enumerate(content["runs"]) if run["gates"]]
