"""Charts of scores and costs as Vega-Lite specifications, which the page and files draw alike.

Rows hold lists, which a `flatten` transform spreads: many runs then take few bytes. Names of runs and clients are
values of rows and of scales' domains; no expression contains one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pfedgate.core.drawing import COLUMN, DASHES, PAGE, Spec, ordinal, quantity, tips

Content = Mapping[str, Any]
METRICS = ("accuracy", "bottom_decile", "loss")  # "accuracy" stands for the main metric, whatever it is
ACCURACY: Spec = {"name": "accuracy", "times": 100, "higher": True}
TIMES = ((5400, 3600, "hours"), (100, 60, "minutes"), (0, 1, "seconds"))
ENERGIES = ((1e6, 1e6, "MJ"), (1e3, 1e3, "kJ"), (0, 1, "J"))
SIZES = ((1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (0, 1e3, "kB"))
WORK = ((1e15, 1e15, "PFLOP"), (1e12, 1e12, "TFLOP"), (1e9, 1e9, "GFLOP"), (0, 1e6, "MFLOP"))
ALONG = {  # units of what a curve may be drawn over, and words for the axis
    "flops": (WORK, "{} computed by all clients"),
    "bytes": (SIZES, "{} sent and received by all clients"),
    "seconds": (TIMES, "{} of training"),
    "virtual": (TIMES, "{} on the clients' devices"),
    "joules": (ENERGIES, "{} used by all clients' devices"),
}
MOST_CLIENTS = 400  # more bars or steps than this are narrower than a pixel
MOST_BARS = 60
HIDDEN: Spec = {"filter": "indexof(hidden, datum.run) < 0"}  # the page's legend sets the parameter


def thin(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many of some values, evenly spaced, the first and the last among them.

    >>> thin(list(range(10)), 4), thin([1, 2], 4)
    ([0, 3, 6, 9], [1, 2])
    """
    if len(values) <= most:
        return list(values)
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]


def room(lines: int) -> int:
    """How many points each of so many lines may have: all are drawn, and the page holds them."""
    return max(60, min(300, 6000 // lines))


def short(value: float | None, times: float = 1) -> float | None:
    """Five digits are more than a chart shows."""
    return None if value is None or not math.isfinite(value) else float(f"{value * times:.5g}")


def unit(largest: float, units: Sequence[tuple[float, float, str]]) -> tuple[float, str]:
    """The unit for values up to the largest: how much it is, and its name.

    >>> unit(7200, TIMES), unit(12, TIMES)
    ((3600, 'hours'), (1, 'seconds'))
    """
    return next((size, name) for least, size, name in units if largest >= least)


def by_run(content: Content, legend: Sequence[str] = (), **scale: Any) -> Spec:
    """A channel that runs differ in. Its domain is all runs, so that a run looks the same in every chart."""
    names = [run["label"] for run in content["runs"]]
    below = {
        "orient": "bottom",
        "columns": 2,
        "symbolType": "stroke",
        "symbolSize": 360,
        "columnPadding": 24,
        "values": list(legend),
    }
    shown = below if legend and len(names) > 1 else None
    return {"field": "run", "type": "nominal", "title": None, "scale": {"domain": names, **scale}, "legend": shown}


def whole_ticks(values: Sequence[int], width: int) -> Spec:
    """An axis with ticks at whole numbers: there is no round 2.5.

    >>> whole_ticks([2, 4], 300)
    {'format': 'd', 'labelAngle': 0, 'tickCount': 4, 'values': [2, 3, 4]}
    """
    axis: Spec = {"format": "d", "labelAngle": 0, "tickCount": max(4, width // 80)}
    low, high = min(values, default=0), max(values, default=0)
    return {**axis, "values": list(range(low, high + 1))} if high - low < 2 * axis["tickCount"] else axis


def hover(x: str, *, transform: Sequence[Spec] = (), tooltip: Any = None, **encoding: Any) -> Spec:
    """A rule at the x nearest to the pointer, which names the values there."""
    near = {"type": "point", "fields": [x], "nearest": True, "on": "pointermove", "clear": "pointerout"}
    seen = {"opacity": {"condition": {"param": "near", "empty": False, "value": 0.7}, "value": 0}}
    mark = {"type": "rule", "style": "edge", "strokeDash": [3, 3]}
    return {
        "name": "hover-rule",
        "transform": list(transform),
        "params": [{"name": "near", "select": near}],
        "mark": mark if tooltip else {**mark, "tooltip": {"content": "data"}},
        "encoding": {**seen, **encoding, **({"tooltip": tooltip} if tooltip else {})},
    }


def lines(
    content: Content,
    rows: Sequence[Spec],
    x: str,
    y: str,
    *,
    title: str = "",
    field: str = "y",
    scale: Mapping[str, Any] | None = None,
    under: Sequence[Spec] = (),
    over: Sequence[Spec] = (),
    width: int = COLUMN,
    height: int = 220,
) -> Spec:
    """A line per row {"run": name, "x": [...], field: [...]}, and per "part" of a run if rows name one.

    `scale` goes over the scale of y. `under` and `over` are further layers.
    """
    xs = [value for row in rows for value in row["x"]]
    costs = x not in ("round", "rank")  # what is spent begins at nothing
    axis = {"tickCount": max(4, width // 80)} if costs else whole_ticks(xs, width)
    along = quantity(x, title or x, axis=axis, scale={"zero": costs, "nice": False})
    across = quantity("y", y, scale={"zero": False, "nice": True, "padding": 5, **(scale or {})}, axis={"tickCount": 6})
    runs = list(dict.fromkeys(row["run"] for row in rows))
    look = {"color": by_run(content, runs), "strokeDash": by_run(content, runs, range=DASHES)}
    series, points = "datum.run", max((len(row["x"]) for row in rows), default=0) <= 20
    if any("part" in row for row in rows):
        look |= {"strokeWidth": ordinal("part", legend=None, scale={"range": [2.2, 1.1]}), "detail": {"field": "part"}}
        series, points = "datum.run + ', ' + datum.part", False
    dots = {
        "name": "hover-points",
        "transform": [{"filter": {"param": "near", "empty": False}}],
        "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
        "encoding": {"y": quantity("y"), "color": by_run(content)},
    }
    flat = {"flatten": ["x", field], "as": [x, "y"]}
    line = {"type": "line", "point": {"size": 34} if points else False}
    return {
        "data": {"values": list(rows)},
        "width": width,
        "height": height,
        "params": [{"name": "hidden", "value": []}],
        "transform": [HIDDEN, flat, {"filter": "isValid(datum.y)"}, {"calculate": series, "as": "series"}],
        "encoding": {"x": along},
        "layer": [
            *under,
            {"mark": line, "encoding": {"y": across, **look}},
            *over,
            dots,
            hover(x, transform=[{"pivot": "series", "value": "y", "groupby": [x], "op": "max"}]),
        ],
    }


def measured(content: Content) -> tuple[str, str, float]:
    """The main metric of a run or report: its name, the title of an axis, and what its values are multiplied with.

    >>> measured({}), measured({"metric": {"name": "mae", "times": 1, "higher": False}})
    (('accuracy', 'accuracy, %', 100), ('mae', 'mae', 1))
    """
    metric = content.get("metric", ACCURACY)
    return metric["name"], metric["name"] + (", %" if metric["times"] == 100 else ""), metric["times"]


def curves(content: Content, along: str = "round", metric: str = "accuracy", **size: Any) -> Spec | None:
    """A metric over rounds or a name of `ALONG`; none before the first evaluation."""
    runs = [run for run in content["runs"] if any(run["curves"].get(along, ()))]
    if not runs:
        return None
    scale, x, title = 1.0, "round", "round"
    if along != "round":
        units, words = ALONG[along]
        scale, x = unit(max(run["curves"][along][-1] for run in runs), units)
        title = words.format(x)
    _, shown, times = measured(content)
    rows = []
    for run in runs:
        points = {name: thin(values, room(len(runs))) for name, values in run["curves"].items()}
        row = {"run": run["label"], "x": [v if x == "round" else short(v / scale) for v in points[along]]}
        row |= {name: [short(v, 1 if name == "loss" else times) for v in points[name]] for name in METRICS}
        rows.append(row)
    axis = {"accuracy": shown, "bottom_decile": "bottom decile" + ", %" * (times == 100), "loss": "loss"}[metric]
    return lines(content, rows, x, axis, title=title, field=metric, **size)


def cost(content: Content, key: str, title: str, **size: Any) -> Spec | None:
    """One cost of training (density, q, uploaded bytes) over rounds; none where no run notes it."""
    runs = [run for run in content["runs"] if any(value is not None for value in run["training"].get(key, []))]
    if not runs:
        return None
    scale = 1.0
    if key == "bytes_up":
        scale, name = unit(max(value or 0 for run in runs for value in run["training"][key]), SIZES)
        title = f"{title}, {name}"
    rows = []
    for run in runs:
        rounds, values = (thin(run["training"][name], room(len(runs))) for name in ("round", key))
        rows.append({"run": run["label"], "x": rounds, "y": [short(value, 1 / scale) for value in values]})
    return lines(content, rows, "round", title, scale={"zero": True}, **size)


def scored(run: Content) -> list[Content]:
    """The clients of a run that have test data, the worst first."""
    with_data = [client for client in run["clients"] if client.get("accuracy") is not None]
    sign = 1 if run.get("metric", ACCURACY)["higher"] else -1
    return sorted(with_data, key=lambda client: (sign * client["accuracy"], client["client"]))


def sorted_clients(content: Content, **size: Any) -> Spec | None:
    """Accuracy of every client, each run sorted on its own; rings at the worst tenth."""
    runs = [(run["label"], scored(run)) for run in content["runs"] if scored(run)]
    if not runs:
        return None
    what, shown, times = measured(content)
    rows, rings = [], []
    for name, clients in runs:
        values = [short(client["accuracy"], times) for client in clients]
        ranks = thin(range(1, len(values) + 1), room(len(runs)))
        rows.append({"run": name, "x": ranks, "y": thin(values, room(len(runs)))})
        rings.append({"run": name, "rank": len(values) // 10 + 1, "y": values[len(values) // 10]})
    shade = {
        "data": {"values": [{"from": 1, "to": max(ring["rank"] for ring in rings)}]},
        "mark": {"type": "rect", "style": "low", "opacity": 0.12},
        "encoding": {"x": quantity("from"), "x2": {"field": "to"}},
    }
    ring = {
        "data": {"values": rings},
        "transform": [HIDDEN],
        "mark": {"type": "point", "style": "ring", "size": 80, "strokeWidth": 2, "filled": True, "opacity": 1},
        "encoding": {"x": quantity("rank"), "y": quantity("y"), "stroke": by_run(content)},
    }
    title = f"clients, by {what} in the last round"
    top = {"domainMax": 100} if times == 100 and max(row["y"][-1] for row in rows) > 90 else {}  # there is no 110 %
    return lines(content, rows, "rank", shown, title=title, scale=top, under=[shade], over=[ring], **size)


def pairs(run: Content, base: Content) -> list[Spec]:
    """Clients of two runs by difference in accuracy; `low` marks the baseline's worst tenth.

    The tenth counts by rank: clients that tie with the one at the worst tenth are not all in it.
    """
    order, times = scored(base), measured(run)[2]
    sign = 1 if run.get("metric", ACCURACY)["higher"] else -1
    theirs = {client["client"]: client["accuracy"] for client in order}
    low = {client["client"] for client in order[: len(order) // 10 + 1]}
    rows = []
    for client in scored(run):
        name, own = client["client"], client["accuracy"]
        if name in theirs:
            row = {"client": name, "own": short(own, times), "base": short(theirs[name], times), "low": name in low}
            by = own - theirs[name]
            rows.append({**row, "difference": short(by, times), "verdict": "worse" if sign * by < 0 else "better"})
    return sorted(rows, key=lambda row: (row["difference"], row["client"]))


PHASES = ("download", "training", "upload")


def gantt(run: Content, *, width: int = PAGE, height: int = 220) -> Spec:
    """The last round on the clients' devices, a bar per client: download, training, upload. Late ones are pale."""
    shown = thin(run["fleet"]["rows"], MOST_BARS)
    zero = min(row["times"][0] for row in shown)
    scale, name = unit(max(row["times"][-1] for row in shown) - zero, TIMES)
    rows = [
        {
            "client": row["client"], "device": row["device"], "phase": phase, "took": short((end - start) / scale),
            "from": short((start - zero) / scale), "to": short((end - zero) / scale),
            "counted": f"no: {row['dropped']}" if row["dropped"] else "yes",
        }
        for row in shown
        for phase, start, end in zip(PHASES, row["times"], row["times"][1:], strict=False)
    ]  # fmt: skip
    axis = {"labels": len(shown) <= 40, "ticks": False, "domain": False, "labelLimit": 120}
    colour = {
        "field": "phase", "type": "nominal", "title": None, "scale": {"domain": PHASES}, "legend": {"orient": "bottom"},
    }  # fmt: skip
    took = {"took": name, "counted": "counted"}
    return {
        "data": {"values": rows},
        "width": width,
        "height": max(height, 9 * len(shown)),
        "mark": {"type": "bar", "height": {"band": 0.8}, "minBandSize": 1},
        "encoding": {
            "y": ordinal("client", "clients, by arrival", sort=None, axis=axis),
            "x": quantity("from", f"{name} on the devices, since the first began"),
            "x2": {"field": "to"},
            "color": colour,
            "opacity": {"condition": {"test": "datum.counted !== 'yes'", "value": 0.35}, "value": 1},
            "tooltip": tips(client="client", device="device", phase="what", **took),
        },
    }


def difference(run: Content, base: Content, *, width: int = PAGE, height: int = 170) -> Spec:
    """Accuracy of a run minus that of its baseline, client by client."""
    rows = thin(pairs(run, base), MOST_CLIENTS)
    axis = {"labelAngle": -90 if len(rows) > 12 else 0, "labelLimit": 90, "ticks": False, "domain": False, "offset": 14}
    axis["labels"] = len(rows) <= 60
    what, shown, times = measured(run)
    percent, points = (", %", ", points") if times == 100 else ("", "")
    sign = {"field": "verdict", "type": "nominal", "scale": {"domain": ["better", "worse"]}, "legend": None}
    bars = {"type": "bar", "cornerRadiusEnd": 2, "minBandSize": 1, "width": {"band": 0.75}}
    triangle = {"type": "point", "shape": "triangle-up", "filled": True, "style": "low", "size": 70, "opacity": 1}
    return {
        "data": {"values": rows},
        "width": width,
        "height": height,
        "encoding": {
            "x": ordinal("client", "clients, by difference", sort=None, axis=axis),
            "tooltip": tips(client="client", own=shown, base=f"baseline{percent}", difference=f"difference{points}"),
        },
        "layer": [
            {
                "mark": bars,
                "encoding": {
                    "y": quantity("difference", f"points of {what}" if points else what, axis={"tickCount": 6}),
                    "color": sign,
                },
            },
            {"mark": {"type": "rule", "style": "zero"}, "encoding": {"y": {"datum": 0}, "x": None, "tooltip": None}},
            {  # a bar may be short: the pointer may be anywhere above or below it
                "name": "hover-bands",
                "mark": {"type": "bar", "opacity": 0, "width": {"band": 1.3}},
                "encoding": {"y": {"value": 0}, "y2": {"value": height}},
            },
            {
                "transform": [{"filter": "datum.low"}],
                "mark": triangle,
                "encoding": {"y": {"value": height + 8}},
            },
        ],
    }
