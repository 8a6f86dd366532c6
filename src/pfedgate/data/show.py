"""What a partition looks like: rows for a table, and a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pfedgate.data.federation import PARTS, Federation


def header(federation: Federation) -> list[str]:
    """Column titles that go with `table`."""
    names = federation.class_names or tuple(str(label) for label in range(federation.classes))
    return ["client", "kind", *PARTS, "classes", *names]


def table(federation: Federation, limit: int | None = None) -> list[list[str | int]]:
    """One line per client: id, training or novel, samples of each part, classes it has, samples per class.

    >>> from pfedgate.data.datasets import load
    >>> rows = table(load("digits", clients=5), limit=2)
    >>> len(rows), rows[0][:2]
    (2, ['0', 'train'])
    """
    counts = federation.histogram()
    sizes = [federation.sizes(part) for part in PARTS]
    novel = set(federation.novel)
    lines: list[list[str | int]] = []
    for at, client in enumerate(federation.ids[:limit]):
        kind = "novel" if client in novel else "train"
        parts = [int(size[at]) for size in sizes]
        lines.append([client, kind, *parts, int((counts[at] > 0).sum()), *counts[at].tolist()])
    return lines


def facts(federation: Federation) -> dict[str, str]:
    """A few lines about the whole, ready to print."""
    about = federation.describe()
    lines = {
        "clients": f"{about['clients']} train, {about['novel']} novel",
        "samples": f"{about['samples']} ("
        + ", ".join(f"{part} {count}" for part, count in about["parts"].items())
        + ")",
        "per client": f"{about['smallest']} to {about['largest']}, median {about['median']:g}",
        "classes": f"{about['classes']}, {about['classes_per_client']:.1f} per client on average",
        "input": " × ".join(map(str, about["input_shape"])),
    }
    ways = [
        f"{key}={about[key]}" for key in ("alpha", "beta", "clusters", "shards", "min_samples", "seed") if key in about
    ]
    lines["partition"] = f"{about.get('partition', 'given')} ({', '.join(ways)})"
    if about.get("repaired"):
        lines["repaired"] = (
            f"{len(about['repaired'])} clients were below min_samples after {about['draws']} draws: "
            f"{about['moved']} samples moved from the largest clients"
        )
    if about.get("dropped"):
        lines["left out"] = f"{about['dropped']} owners with fewer than {about['min_samples']} samples"
    if about.get("note"):
        lines["note"] = str(about["note"])
    return lines


def plot(federation: Federation, path: str | Path, *, kind: str = "auto", limit: int = 100) -> Path:
    """Draw clients × classes to a file; its suffix says the format (png, svg, pdf).

    `bubbles` shows counts as areas and suits few clients and classes, `heatmap` shows each client's label
    shares; `auto` chooses. At most `limit` clients are drawn.
    """
    from matplotlib.figure import Figure

    if kind not in ("auto", "bubbles", "heatmap"):
        raise ValueError(f"kind must be auto, bubbles or heatmap, got {kind!r}")
    counts = federation.histogram()[:limit]
    clients, classes = counts.shape
    if kind == "auto":
        kind = "bubbles" if clients <= 40 and classes <= 20 else "heatmap"
    # A Figure of its own, without pyplot: no global state, no window, no figure left open.
    figure = Figure(figsize=(min(14, 3 + 0.22 * clients), min(10, 2 + 0.22 * classes)), layout="constrained")
    axes = figure.add_subplot()
    if kind == "bubbles":
        at, label = np.nonzero(counts)
        area = counts[at, label] / counts.max() * 160
        shade = ["tab:orange" if federation.ids[int(i)] in federation.novel else "tab:blue" for i in at]
        axes.scatter(at, label, s=area, c=shade, alpha=0.75, linewidths=0)
        axes.set_xlim(-0.7, clients - 0.3)
        axes.set_ylim(-0.7, classes - 0.3)
    else:
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        drawn = axes.imshow(shares.T, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest")
        figure.colorbar(drawn, ax=axes, label="share of the client's samples")
    if clients <= 40:
        axes.set_xticks(range(clients), list(federation.ids[:clients]), rotation=90, fontsize=8)
    if federation.class_names and classes <= 62:
        axes.set_yticks(range(classes), federation.class_names, fontsize=8 if classes <= 20 else 5)
    more = f" (the first {clients} of {len(federation.ids)})" if clients < len(federation.ids) else ""
    axes.set_xlabel(f"client{more}" + (", orange: novel" if kind == "bubbles" and federation.novel else ""))
    axes.set_ylabel("class")
    alpha = f", α = {federation.about['alpha']}" if "alpha" in federation.about else ""
    axes.set_title(f"{federation.name}: {federation.about.get('partition', 'given')}{alpha}")
    target = Path(path)
    figure.savefig(target, dpi=130)
    return target
