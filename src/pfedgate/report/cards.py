"""The charts of a report with their captions, section by section, and the same as files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pfedgate.core.drawing import FORMATS, PAGE, Spec, save
from pfedgate.core.errors import unknown
from pfedgate.data.show import partition_chart
from pfedgate.report import charts, gate_charts
from pfedgate.report.charts import HIDDEN, Content

WIDE = 1100  # pixels on a page; the script fits widths to the screen
CELLS = {"kept": "kept", "weights": "M", "importance": "G"}
FORMS = {
    "quantiles": (gate_charts.quantiles, "median, 25 to 75 %, 5 to 95 %"),
    "histograms": (gate_charts.histograms, "the stronger the colour, the more blocks"),
}


class View(NamedTuple):
    """A chart for one choice."""

    spec: Spec
    caption: str = ""
    choice: tuple[str, ...] = ()
    title: str = ""  # instead of the card's


@dataclass(frozen=True)
class Card:
    """A chart of the page: a view for every choice, and what one can choose."""

    name: str
    title: str
    views: Sequence[View]
    choices: tuple[str, ...] = ()  # a choice of one name is made for all cards at once
    half: bool = False


def learning(content: Content, wide: int = WIDE) -> list[Card]:
    """Metrics over rounds, bytes and seconds; nothing before the first evaluation."""
    cards = []
    for along, title in (("round", "Over rounds"), ("bytes", "Over bytes sent and received"), ("seconds", "Over time")):
        half = along != "round"
        name = f"accuracy-{along}" if half else "accuracy-rounds"
        specs = {
            metric.replace("_", " "): charts.curves(content, along, metric, width=wide, height=220 if half else 300)
            for metric in charts.METRICS
        }
        views = [View(spec, choice=(metric,)) for metric, spec in specs.items() if spec]
        cards += [Card(name, title, views, ("metric",), half)] if views else []
    return cards


def clients(content: Content, wide: int = WIDE) -> list[Card]:
    """Every client of every run, and against the baseline."""
    caption = "In the last round. Each run sorted on its own. Rings: the bottom decile, the client at the worst tenth; "
    cards = _single(
        "clients-sorted", "Accuracy of every client, worst first",
        charts.sorted_clients(content, width=wide, height=300), caption + "shaded: those below it.",
    )  # fmt: skip
    views = [
        View(
            charts.difference(run, base, width=wide, height=260), _differences(run, base), (run["label"],),
            f"Difference to {base['label']}, client by client",
        )
        for run, base in _compared(content["runs"])
    ]  # fmt: skip
    return cards + ([Card("clients-difference", views[0].title, views, ("compared run",))] if views else [])


def _single(name: str, title: str, spec: Spec | None, caption: str, half: bool = False) -> list[Card]:
    return [Card(name, title, [View(spec, caption)], half=half)] if spec else []


def _compared(runs: Sequence[Content]) -> list[tuple[Content, Content]]:
    """The runs that have a baseline, with it; both have clients with test data."""
    based = [(run, runs[run["baseline"]]) for run in runs if run["baseline"] is not None]
    return [(run, base) for run, base in based if charts.pairs(run, base)]


def _differences(run: Content, base: Content) -> str:
    rows = charts.pairs(run, base)
    better, worse = (sum(sign * row["difference"] > 0 for row in rows) for sign in (1, -1))
    mean = sum(row["difference"] for row in rows) / len(rows)
    marked = f"Triangle: the worst client of {base['label']}."
    if sum(row["low"] for row in rows) > 1:
        marked = f"Triangles: the client at the worst tenth of {base['label']}, and those below it."
    most = charts.MOST_CLIENTS
    some = f" {most} of {len(rows)} are shown, evenly spaced." if len(rows) > most else ""
    return (
        f"In the last round, {run['label']} against {base['label']}: {better} clients better, {worse} worse, "
        f"{len(rows) - better - worse} equal; {mean:+.1f} points on average over clients. {marked}{some}"
    )


def cost(content: Content, wide: int = WIDE) -> list[Card]:
    """Density, q and uploaded bytes over rounds."""
    density, q, uploaded = (
        charts.cost(content, key, name, width=wide, height=220)
        for key, name in (("density", "density"), ("q", "q"), ("bytes_up", "uploaded"))
    )
    mean = "In training, mean over the clients of a round."
    sent = "A block is sent if it was live in at least one step of the round."
    return [
        *_single("density", "Density: share of the model in use", density, mean, half=True),
        *_single("q", "q: share of the model sent back", q, sent, half=True),
        *_single("uploaded", "Uploaded in each round", uploaded, ""),
    ]


def gates(content: Content, wide: int = WIDE) -> list[Card]:
    """Blocks, weights over rounds, how masks differ, and the tree."""
    runs = [run for run in content["runs"] if run["gates"]]
    blocks: list[View] = []
    over_rounds: dict[str, list[View]] = {"M": [], "G": []}
    trees: list[View] = []
    for run in runs:
        label, facts = run["label"], run["gates"]
        owner = f"{label}. " if len(runs) > 1 else ""
        orders = {"at": "by client", **({"rank": "by likeness"} if facts["tree"] else {})}
        for cells, order in itertools.product(CELLS, orders):
            if cells == "kept" or facts[cells]:
                spec = gate_charts.block_map(content, run, cells, order, width=wide)
                blocks.append(View(spec, _blocks(run, cells), (label, CELLS[cells], orders[order])))
        for path, layer, form in itertools.product(over_rounds, facts["over_rounds"], FORMS):
            draw, meaning = FORMS[form]
            spec = draw(content, run, path, layer, width=wide // 2, height=240)
            caption = f"{owner}Over {_first(facts)}clients and blocks: {meaning}."
            over_rounds[path].append(View(spec, caption, (label, layer, form)))
        if facts["tree"]:
            trees.append(View(gate_charts.tree(content, run, width=wide), owner + _tree(run), (label,)))
    caption = "Thick: share of blocks on which two clients disagree. Thin: share that changed for a client since the "
    changes = gate_charts.changes(content, width=wide, height=220)
    half = ("run", "layer", "form")
    cards = [
        Card("blocks", "Which blocks each client keeps", blocks, ("run", "cells", "order")),
        Card("gate-M", "Gate weights M over rounds", over_rounds["M"], half, half=True),
        Card("gate-G", "Importances G over rounds", over_rounds["G"], half, half=True),
        *_single("changes", "How different masks are", changes, caption + "evaluation before."),
        Card("tree", "Which gates are alike, and the classes their clients hold", trees, ("run",)),
    ]
    return [card for card in cards if card.views]


def _first(gates: Content) -> str:
    return f"the first {gates['looked']} of {gates['of']} " if gates["looked"] < gates["of"] else ""


def _blocks(run: Content, cells: str) -> str:
    gates = run["gates"]
    rows, looked = len(gates["kept"]), gates["looked"]
    counts = [sum(bits[at] == "1" for bits in gates["kept"]) for at in range(len(gates["blocks"]))]
    always, never = counts.count(rows), counts.count(0)
    first = f"of {_first(gates)}" if _first(gates) else ""
    absent = f" ({looked - rows} more took part in no round and have no gate)" if looked > rows else ""
    end = {
        "kept": "",
        "weights": " M, the weight of a block: blue above 1, red below; dropped blocks are pale.",
        "importance": " G, the importance that decides.",
    }[cells]
    if not gates["weights"]:
        likeness = "" if gates["tree"] else " and the likeness of gates"
        end += f" M and G of single blocks{likeness} are not available: {gates['reason']}."
    elif not gates["tree"]:
        end += f" No order by likeness: {no_tree(run)}."
    return (
        f"{len(counts)} blocks in {len(gates['layers'])} layers, {rows} {first}clients{absent}: {always} blocks are "
        f"kept by all, {never} by none, {len(counts) - always - never} by some. Bars: share of clients that keep a "
        f"block.{end}"
    )


def no_tree(run: Content) -> str:
    """Why a gated run has no tree."""
    return run["gates"]["reason"] or "fewer than three clients have a gate"


def _tree(run: Content) -> str:
    beside = (
        "; beside each client its classes, darker where it has more samples" if run["partition"] is not None else ""
    )
    started = "Only the parameters are compared, not the classes."
    if run["gates"]["from_labels"]:
        started = (
            'In this run every gate started from its client\'s class frequencies (algorithm.start = "labels"), so that '
            "clients with similar classes are close from the start: the tree shows mixes of labels largely by "
            'construction. A run with start = "random" leaves that out.'
        )
    return f"Ward's clustering of the gates' parameters{beside}. {started}"


def data(content: Content, wide: int = WIDE) -> list[Card]:
    """Samples of each client by class, for every partition."""
    cards = []
    for at, partition in enumerate(content["partitions"]):
        runs = [run["label"] for run in content["runs"] if run["partition"] == at]
        owners = f"Runs {'; '.join(runs)}. " if len(content["partitions"]) > 1 else ""
        shown, everyone = len(partition["clients"]), partition["all_clients"]
        more = f" The first {shown} of {everyone} clients." if everyone > shown else ""
        novel = " The second colour: novel clients, held out of training." if any(partition["novel"]) else ""
        caption = f"{owners}{_how(partition)}. Areas or shades: samples of a class.{novel}{more}"
        title = f"{partition['name']}: samples of each client by class"
        cards += _single(f"partition-{at}", title, _partition(partition, wide), caption)
    return cards


def _how(partition: Content) -> str:
    return f"{partition['how']}, α = {partition['alpha']}" if partition["alpha"] else str(partition["how"])


def _partition(partition: Content, width: int) -> Spec:
    return partition_chart(
        partition["clients"], partition["classes"], partition["counts"], novel=partition["novel"], width=width
    )


SECTIONS: dict[str, Callable[..., list[Card]]] = {
    "learning": learning, "clients": clients, "cost": cost, "gates": gates, "data": data,
}  # fmt: skip


def figures(content: Content) -> dict[str, Spec]:
    """The charts of the page by file name, as wide as a page of paper: of several runs one below the other."""
    files = {}
    for card in (card for make in SECTIONS.values() for card in make(content, PAGE)):
        shown: dict[str, Spec] = {}
        for view in card.views:
            choice, first = (dict(zip(card.choices, one.choice, strict=True)) for one in (view, card.views[0]))
            # A file shows every run, and the first of all other choices.
            if all("run" in name or value == first[name] for name, value in choice.items()):
                owner = choice.get("run") or choice.get("compared run") or ""
                shown[": ".join(filter(None, (owner, view.title or card.title)))] = view.spec
        files[card.name] = still(stack(shown) if len(shown) > 1 else card.views[0].spec)
    return files


def stack(specs: Mapping[str, Spec]) -> Spec | None:
    """Charts one below the other, each under its name; none of none."""
    return {"vconcat": [{**spec, "title": name} for name, spec in specs.items()]} if specs else None


def still(spec: Any) -> Any:
    """A chart without what answers a pointer or the page: parameters, layers named hover-…, tooltips.

    >>> still({"params": [], "layer": [{"name": "hover-rule"}, {"mark": "line"}], "transform": [HIDDEN]})
    {'layer': [{'mark': 'line'}], 'transform': []}
    """
    if isinstance(spec, Mapping):
        moving = ("params", "tooltip", "usermeta", "values")
        parts = {key: still(part) for key, part in spec.items() if key not in moving}
        return {**parts, "values": spec["values"]} if "values" in spec else parts
    if isinstance(spec, list):
        names = [str(part.get("name", "")) if isinstance(part, Mapping) else "" for part in spec]
        layers = [part for part, name in zip(spec, names, strict=True) if not name.startswith("hover-")]
        return [still(part) for part in layers if part != HIDDEN]
    return spec


def draw_all(content: Content, folder: str | Path, kind: str = "svg") -> list[Path]:
    """Write every figure that the runs have something to show for."""
    if kind not in FORMATS:
        raise ValueError(unknown("format", kind, FORMATS))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    return [save(spec, target / f"{name}.{kind}") for name, spec in figures(content).items()]
