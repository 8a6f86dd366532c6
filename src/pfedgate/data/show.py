"""A partition as rows of a table, and as a chart of clients and classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pfedgate.core.drawing import Spec, ordinal, quantity, renderer, save, tips
from pfedgate.data.federation import PARTS, Federation


def header(federation: Federation) -> list[str]:
    """Column titles that go with `table`."""
    return ["client", "kind", *PARTS, "classes", *federation.columns]


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
    entries = {
        "clients": f"{about['clients']} train, {about['novel']} novel",
        "samples": f"{about['samples']} ("
        + ", ".join(f"{part} {count}" for part, count in about["parts"].items())
        + ")",
        "per client": f"{about['smallest']} to {about['largest']}, median {about['median']:g}",
        "classes": f"{about['classes']}, {about['classes_per_client']:.1f} per client on average",
        "task": f"{federation.task} of {federation.classes}",
        "input": " × ".join(map(str, about["input_shape"])),
    }
    del entries["task" if federation.task == "classification" else "classes"]
    names = ("alpha", "beta", "clusters", "shards", "min_samples", "domains", "domains_each", "seed")
    ways = [f"{key}={about[key]}" for key in names if key in about]
    entries["partition"] = f"{about.get('partition', 'given')} ({', '.join(ways)})"
    if about.get("repaired"):
        entries["repaired"] = (
            f"{len(about['repaired'])} clients were below min_samples after {about['draws']} draws: "
            f"{about['moved']} samples moved from the largest clients"
        )
    if about.get("dropped"):
        entries["left out"] = f"{about['dropped']} owners with fewer than {about['min_samples']} samples"
    if about.get("note"):
        entries["note"] = str(about["note"])
    return entries


def partition_chart(
    clients: Sequence[str], classes: Sequence[str], counts: Sequence[Sequence[int]], *,
    novel: Sequence[bool] = (), kind: str = "auto", width: int | None = None,
) -> Spec:  # fmt: skip
    """Clients × classes as a Vega-Lite specification: counts as areas, or each client's shares as shades.

    `bubbles` suits few clients and classes, `heatmap` many; `auto` decides.
    """
    if kind not in ("auto", "bubbles", "heatmap"):
        raise ValueError(f"kind must be auto, bubbles or heatmap, got {kind!r}")
    bubbles = kind == "bubbles" or (kind == "auto" and len(clients) <= 40 and len(classes) <= 20)
    kinds = ["novel" if flag else "training" for flag in novel] or ["training"] * len(clients)
    rows = [
        {
            "client": client, "kind": group, "class": list(classes), "samples": list(samples),
            "share": [round(100 * count / max(1, sum(samples)), 1) for count in samples],
        }
        for client, group, samples in zip(clients, kinds, counts, strict=True)
    ]  # fmt: skip
    step = max(9.0, min(24.0, 620 / len(classes)))
    quiet = {"domain": False, "ticks": False, "labelLimit": 70}
    upright = 6 * max(map(len, clients), default=1) > (width or 22 * len(clients)) / max(1, len(clients))
    padding = {"padding": 0.6 if bubbles else 0}
    axes: Spec = {
        "x": ordinal("client", "client", sort=None, axis={**quiet, "labelAngle": -90 if upright else 0}, scale=padding),
        "y": ordinal("class", "class", sort=list(reversed(classes)), axis={**quiet, "grid": bubbles}, scale=padding),
        "tooltip": tips(client="client", **{"class": "class"}, samples="samples", share="share, %"),
    }
    spec: Spec = {
        "data": {"values": rows},
        "width": width or max(240, min(1200, 22 * len(clients))),
        "height": round(step * len(classes)),
        "transform": [{"flatten": ["class", "samples", "share"]}],
    }
    if not bubbles:
        shade = quantity("share", "share, %", scale={"domain": [0, 100], "range": "ramp"})
        marks = renderer(len(clients) * len(classes))
        return {**spec, "mark": "rect", "encoding": {**axes, "color": shade}, "usermeta": marks}
    spec["transform"].append({"filter": "datum.samples > 0"})
    legend = {"orient": "bottom"} if any(novel) else None
    groups: Spec = {"field": "kind", "type": "nominal", "title": None, "scale": {"domain": ["training", "novel"]}}
    area = quantity("samples", legend=None, scale={"range": [6, 450]})
    encoding = {**axes, "size": area, "color": {**groups, "legend": legend}}
    return {**spec, "mark": {"type": "circle", "opacity": 0.78}, "encoding": encoding}


def plot(federation: Federation, path: str | Path, *, kind: str = "auto", limit: int = 100) -> Path:
    """Draw clients × classes, `limit` clients at most, to a file; its suffix names the format (png, svg, pdf)."""
    counts = federation.histogram()[:limit]
    clients = list(federation.ids[:limit])
    names = federation.columns
    novel = [client in federation.novel for client in clients]
    chart = partition_chart(clients, [str(name) for name in names], counts.tolist(), novel=novel, kind=kind)
    alpha = f", α = {federation.about['alpha']}" if "alpha" in federation.about else ""
    title = f"{federation.name}: {federation.about.get('partition', 'given')}{alpha}"
    more = f", the first {len(clients)} of {len(federation.ids)} clients" if len(clients) < len(federation.ids) else ""
    return save({"title": title + more, **chart}, path)
