"""Charts of gates as Vega-Lite specifications: blocks, weights over rounds, masks that differ, gates that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pfedgate.core.drawing import COLUMN, PAGE, Spec, ordinal, quantity, renderer, tips
from pfedgate.report.charts import Content, by_run, hover, lines, short, thin, whole_ticks

NAMES = {"M": "weight of a block (M)", "G": "importance of a block (G)"}
QUANTILES = {"q95": "95 %", "q75": "75 %", "q50": "median", "q25": "25 %", "q5": "5 %"}


def block_rows(run: Content) -> tuple[list[Spec], list[Spec]]:
    """The clients of a gated run with their blocks; and the blocks, with the share of clients that keep each."""
    gates = run["gates"]
    numbers = list(range(len(gates["blocks"])))
    ranks = {leaf: rank for rank, leaf in enumerate(gates["tree"]["leaves"])} if gates["tree"] else {}
    clients = []
    for at, client in enumerate(gates["clients"]):
        row = {"run": run["label"], "client": client, "at": at, "rank": ranks.get(at, at), "block": numbers}
        row["kept"] = [int(bit) for bit in gates["kept"][at]]
        clients.append(row | {name: gates[name][at] for name in ("weights", "importance") if gates[name]})
    widths = {layer["blocks"][0]: (layer["name"], len(layer["blocks"]) / len(numbers)) for layer in gates["layers"]}
    blocks: list[Spec] = []
    for number, name in enumerate(gates["blocks"]):
        share = 100 * sum(row["kept"][number] for row in clients) / len(clients)
        start = dict(zip(("layer", "wide"), widths.get(number, ()), strict=False))
        blocks.append({"block": number, "name": name, "share": round(share, 1), **start})
    return clients, blocks


def block_map(
    content: Content, run: Content, cells: str = "kept", order: str = "at", *, width: int = PAGE - 90
) -> Spec:
    """Blocks that each client keeps, or their weights M or importances G; bars: the share of clients that keep one.

    `cells` names what is shown ("kept", "weights", "importance"), `order` the field that sorts clients ("at", "rank").
    """
    clients, blocks = block_rows(run)
    step = max(3.0, min(18.0, 500 / len(clients)))
    tall = round(step * len(clients))
    x = ordinal("block", axis=None, scale={"paddingInner": 0.06 if len(blocks) < 90 else 0})
    if cells == "weights":
        scale = {"domain": [0, 2], "domainMid": 1, "clamp": True, "interpolate": "rgb", "range": "diverging"}
        color = quantity("weights", legend=None, scale=scale)
        opacity = quantity("kept", legend=None, scale={"domain": [0, 1], "range": [0.3, 1]})
    else:
        color = by_run(content)
        opacity = quantity(cells, legend=None, scale={"domain": [0, 1], "range": [0.07, 0.9], "clamp": True})
    numbers = {"weights": "weight M", "importance": "importance G"} if run["gates"]["weights"] else {}
    names = {"data": {"values": blocks}, "key": "block", "fields": ["name"]}
    cell = {
        "transform": [
            {"flatten": ["block", "kept", *numbers]},
            {"lookup": "block", "from": names},
            {"calculate": "datum.kept ? 'keeps it' : 'drops it'", "as": "verdict"},
        ],
        "mark": "rect",
        "encoding": {
            "x": x,
            "y": _clients(order, step),
            "color": color,
            "opacity": opacity,
            "tooltip": tips(client="client", name="block", verdict="the client", **numbers),
        },
    }
    heat = {"data": {"values": clients}, "width": width, "height": tall, "layer": [cell, _edges(blocks, x, 0, tall)]}
    drawn = renderer(len(clients) * len(blocks))
    return {"spacing": 4, "vconcat": [_shares(blocks, x, width), heat], "usermeta": drawn}


def _shares(blocks: Sequence[Spec], x: Spec, width: int) -> Spec:
    """A bar per block, as high as the share of clients that keep it, under the names of layers."""
    wide = "datum.wide * width"
    label = {"type": "text", "align": "left", "baseline": "bottom", "dx": 4, "dy": -5, "style": "name"}
    named = {"condition": {"test": f"{wide} > 26", "field": "layer"}, "value": ""}
    share = quantity("share", axis=None, scale={"domain": [0, 100]})
    bar = {
        "mark": {"type": "bar", "style": "other", "opacity": 0.55},
        "encoding": {"x": x, "y": share, "tooltip": tips(name="block", share="kept by, % of clients")},
    }
    layers = {
        "transform": [{"filter": "isValid(datum.layer)"}],
        "mark": {**label, "limit": {"expr": f"max(1, {wide} - 6)"}},
        "encoding": {"x": {**x, "bandPosition": 0}, "y": {"value": 0}, "text": named},
    }
    return {
        "data": {"values": blocks},
        "width": width,
        "height": 40,
        "layer": [bar, _edges(blocks, x, -16, 40), layers],
    }


def _edges(blocks: Sequence[Spec], x: Spec, top: int, bottom: int) -> Spec:
    """A line where each layer begins."""
    return {
        "data": {"values": blocks},
        "transform": [{"filter": "isValid(datum.layer)"}],
        "mark": {"type": "rule", "style": "edge"},
        "encoding": {"x": {**x, "bandPosition": 0}, "y": {"value": top}, "y2": {"value": bottom}},
    }


def _clients(sort: str, step: float, gap: float = 0.06) -> Spec:
    """Clients as rows, in the order of a field of theirs."""
    axis = {"labelLimit": 64, "labelFontSize": min(11, max(7, step)), "domain": False, "ticks": False}
    padding = {"paddingInner": gap if step > 6 else 0, "paddingOuter": 0}
    return ordinal("client", sort={"field": sort, "op": "min"}, axis=axis, scale=padding)


def quantiles(
    content: Content, run: Content, path: str, layer: str = "all blocks", *, width: int = COLUMN - 50, height: int = 180
) -> Spec:
    """Quantiles of weights M or importances G over rounds: the median, and bands of 50 and 90 %."""
    rounds = run["gates"]["rounds"]
    table = run["gates"]["over_rounds"][layer][path]["quantiles"]
    columns = {
        name: [short(value) for value in values]
        for name, values in zip(reversed(QUANTILES), zip(*table, strict=True), strict=True)
    }
    once = len(rounds) == 1
    axis = whole_ticks(rounds, width)
    x = (
        ordinal("round", "round", axis=axis)
        if once
        else quantity("round", "round", axis=axis, scale={"zero": False, "nice": False})
    )

    def band(low: str, high: str, opacity: float) -> Spec:
        # A band over a single round has no width: a bar instead.
        mark = {"type": "bar", "width": 40} if once else {"type": "area"}
        y = quantity(low, NAMES[path], scale={"zero": False})
        return {"mark": {**mark, "opacity": opacity}, "encoding": {"y": y, "y2": {"field": high}}}

    layers = [
        band("q5", "q95", 0.18),
        band("q25", "q75", 0.32),
        {"mark": "tick" if once else "line", "encoding": {"y": quantity("q50", NAMES[path], scale={"zero": False})}},
    ]
    if path == "M" and min(row[0] for row in table) <= 1 <= max(row[-1] for row in table):
        one = {"type": "rule", "style": "edge", "strokeDash": [4, 4]}
        layers.append({"mark": one, "encoding": {"x": None, "color": None, "y": {"datum": 1}}})
    return {
        "data": {"values": [{"run": run["label"], "round": rounds, **columns}]},
        "width": width,
        "height": height,
        "transform": [{"flatten": ["round", *columns]}],
        "encoding": {"x": x, "color": by_run(content)},
        "layer": [*layers, hover("round", tooltip=tips(round="round", **QUANTILES))],
    }


def histograms(
    content: Content, run: Content, path: str, layer: str = "all blocks", *, width: int = COLUMN - 50, height: int = 180
) -> Spec:
    """A column per evaluated round: the share of blocks in each interval of M or G, on a logarithmic scale.

    Most blocks stay where they start, so shares differ by orders of magnitude.
    """
    spread = run["gates"]["over_rounds"][layer][path]
    rounds, table = thin(run["gates"]["rounds"], 60), thin(spread["histogram"], 60)
    borders = [short(at * spread["top"] / len(table[0])) for at in range(len(table[0]) + 1)]
    bins = {"run": run["label"], "low": borders[:-1], "high": borders[1:]}
    rows = [
        {**bins, "round": number, "share": [short(100 * count / max(1, sum(counts))) for count in counts]}
        for number, counts in zip(rounds, table, strict=True)
    ]
    log = {"type": "log", "domain": [0.1, 100], "range": [0.08, 1], "clamp": True}
    return {
        "data": {"values": rows},
        "width": width,
        "height": height,
        "transform": [{"flatten": ["low", "high", "share"]}, {"filter": "datum.share > 0"}],
        "mark": "rect",
        "encoding": {
            "x": ordinal("round", "round", axis={"labelAngle": 0}, scale={"padding": 0.04}),
            "y": quantity("low", NAMES[path], axis={"format": "~g"}),
            "y2": {"field": "high"},
            "color": by_run(content),
            "opacity": quantity(
                "share", "blocks, %", scale=log, legend={"values": [0.1, 1, 10, 100], "symbolType": "square"}
            ),
            "tooltip": tips(round="round", low="from", high="to", share="blocks, %"),
        },
    }


def changes(content: Content, **size: Any) -> Spec | None:
    """How much masks differ between clients (thick), and from the evaluation before (thin)."""
    rows = []
    for run in content["runs"]:
        steps = thin(run["gates"]["changes"], 300) if run["gates"] else []
        for key, part in (("between", "between clients"), ("moved", "since before")):
            if steps:
                values = [short(step[key], 100) for step in steps]
                rows.append({"run": run["label"], "part": part, "x": [step["round"] for step in steps], "y": values})
    largest = max((value or 0 for row in rows for value in row["y"]), default=0)
    scale = {"domainMin": 0, "domainMax": max(2, 1.05 * largest)}  # a flat line at 0 has an axis, too
    return lines(content, rows, "round", "blocks, %", scale=scale, **size) if rows else None


def tree(content: Content, run: Content, *, width: int = PAGE - 60) -> Spec:
    """Ward's tree of a run's gates; beside each client its classes, where the data is here."""
    links = run["gates"]["tree"]
    clients = [run["gates"]["clients"][leaf] for leaf in links["leaves"]]
    step = max(6.0, min(18.0, 700 / len(clients)))
    tall = round(step * len(clients))
    rows = [
        {"run": run["label"], "link": at, "across": [short(x) for x in xs], "height": [short(y) for y in ys]}
        for at, (xs, ys) in enumerate(zip(links["across"], links["height"], strict=True))
    ]
    distance = {"scale": {"reverse": True, "nice": False}, "axis": {"tickCount": 5}}
    places = {"domain": [-0.5, len(clients) - 0.5], "reverse": True, "nice": False, "zero": False}
    left = {
        "data": {"values": rows},
        "width": round(width * 0.55),
        "height": tall,
        "transform": [
            {"flatten": ["across", "height"]},
            {"window": [{"op": "row_number", "as": "order"}], "groupby": ["link"]},
        ],
        "mark": {"type": "line", "strokeWidth": 1.5},
        "encoding": {
            "x": quantity("height", "distance of gates", **distance),
            "y": quantity("across", axis=None, scale=places),
            "detail": {"field": "link"},
            "order": {"field": "order"},
            "color": by_run(content),
        },
    }
    partition = None if run["partition"] is None else content["partitions"][run["partition"]]
    classes = partition["classes"] if partition else [""]
    counts = dict(zip(partition["clients"], partition["counts"], strict=True)) if partition else {}
    cells = []
    for rank, client in enumerate(clients):
        samples = counts.get(client, [0] * len(classes))
        shares = [short(count / max(*samples, 1)) for count in samples]
        cells.append({"client": client, "rank": rank, "class": classes, "samples": samples, "share": shares})
    turned = -90 if max(map(len, classes)) > 2 else 0
    axis = {"labelAngle": turned, "labelLimit": 60, "domain": False, "ticks": False, "labels": bool(partition)}
    right = {
        "data": {"values": cells},
        "width": round(min(0.33 * width, 32 * len(classes))) if partition else 8,
        "height": tall,
        "transform": [{"flatten": ["class", "samples", "share"]}],
        "mark": {"type": "rect", "opacity": 1 if partition else 0},
        "encoding": {
            "x": ordinal("class", "class" if partition else "", sort=None, axis=axis, scale={"paddingInner": 0.06}),
            "y": _clients("rank", step, gap=0),
            "color": quantity("share", legend=None, scale={"domain": [0, 1], "range": "heatmap"}),
            "tooltip": tips(client="client", **{"class": "class"}, samples="samples"),
        },
    }
    return {"spacing": 10, "hconcat": [left, right], "usermeta": renderer(len(clients) * len(classes))}
