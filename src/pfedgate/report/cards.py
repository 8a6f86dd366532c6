"""The charts of a report with their captions, section by section, and the same as files."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pfedgate.core.drawing import FORMATS, PAGE, Spec, save
from pfedgate.core.errors import unknown
from pfedgate.data.show import partition_chart
from pfedgate.report import charts, gate_charts
from pfedgate.report.charts import HIDDEN, Content
from pfedgate.runs.progress import size

WIDE = 1100  # pixels on a page; the script fits widths to the screen
CELLS = {"kept": "kept", "weights": "weight", "importance": "importance"}
TITLES = {"kept": "Which blocks each client keeps", "weights": "The weight of each block, client by client"}
# The words for a gate's two numbers of a block, and what decides their range.
WEIGHTS = {"M": ("Weights", ", where 1 changes nothing"), "G": ("Importances", "")}
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
    """A chart of the page: a view for every choice, and what one can choose. One without views is a line of text."""

    name: str
    title: str
    views: Sequence[View] = ()
    choices: tuple[str, ...] = ()  # a choice of one name is made for all cards at once
    half: bool = False
    text: str = ""


ALONG = {
    "round": "Over rounds",
    "flops": "Over compute",
    "bytes": "Over bytes sent and received",
    "seconds": "Over time of this computer",
    "virtual": "Over time on the clients' devices",
    "joules": "Over energy of the clients' devices",
}


def learning(content: Content, wide: int = WIDE) -> list[Card]:
    """Metrics over rounds and all that is spent; nothing before the first evaluation."""
    cards = []
    for along, title in ALONG.items():
        name = "accuracy-rounds" if along == "round" else f"accuracy-{along}"
        specs = {
            (charts.measured(content)[0] if metric == "accuracy" else metric.replace("_", " ")): charts.curves(
                content, along, metric, width=wide, height=240
            )
            for metric in charts.METRICS
        }
        views = [View(spec, choice=(metric,)) for metric, spec in specs.items() if spec]
        cards += [Card(name, title, views, ("metric",), half=True)] if views else []
    return cards


def clients(content: Content, wide: int = WIDE) -> list[Card]:
    """Every client of every run, and against the baseline."""
    caption = "In the last round. Each run sorted on its own. Rings: the bottom decile, the client at the worst tenth; "
    cards = _single(
        "clients-sorted", f"{_large(charts.measured(content)[0])} of every client, worst first",
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


def _large(text: str) -> str:
    return text[:1].upper() + text[1:]


def _single(name: str, title: str, spec: Spec | None, caption: str, half: bool = False) -> list[Card]:
    return [Card(name, title, [View(spec, caption)], half=half)] if spec else []


def _compared(runs: Sequence[Content]) -> list[tuple[Content, Content]]:
    """The runs that have a baseline, with it; both have clients with test data."""
    based = [(run, runs[run["baseline"]]) for run in runs if run["baseline"] is not None]
    return [(run, base) for run, base in based if charts.pairs(run, base)]


def _differences(run: Content, base: Content) -> str:
    rows = charts.pairs(run, base)
    worse = sum(row["verdict"] == "worse" for row in rows)
    better = sum(row["verdict"] == "better" and row["difference"] != 0 for row in rows)
    metric, _, times = charts.measured(run)
    mean = sum(row["difference"] for row in rows) / len(rows)
    marked = f"Triangle: the worst client of {base['label']}."
    if sum(row["low"] for row in rows) > 1:
        marked = f"Triangles: the client at the worst tenth of {base['label']}, and those below it."
    most = charts.MOST_CLIENTS
    some = f" {most} of {len(rows)} are shown, evenly spaced." if len(rows) > most else ""
    gap = f"{mean:+.1f} points" if times == 100 else f"{metric} {mean:+.4g}"
    return (
        f"In the last round, {run['label']} against {base['label']}: {better} clients better, {worse} worse, "
        f"{len(rows) - better - worse} equal; {gap} on average over clients. {marked}{some}"
    )


def cost(content: Content, wide: int = WIDE) -> list[Card]:
    """The shares of the model in use and sent back, and uploaded bytes, over rounds; in a line what stays constant."""
    mean = "In training, mean over the clients of a round."
    sent = "Mean over the clients of a round. A block is sent if it was in use in at least one step of the round."
    plans = (
        ("density", "Share of the model in use", "share in use (density)", mean),
        ("q", "Share of the model sent back", "share sent (q)", sent),
        ("bytes_up", "Uploaded in each round", "uploaded", ""),
    )
    cards = []
    for key, title, axis, caption in plans:
        series = {run["label"]: [v for v in run["training"].get(key, []) if v is not None] for run in content["runs"]}
        series = {label: values for label, values in series.items() if values}
        show = size if key == "bytes_up" else share
        if all(constant(values, max(values)) for values in series.values()):
            said = "; ".join(f"{label} {show(values[-1])}" for label, values in series.items())
            cards += [Card(key, title, text=f"{title}, the same in every round: {said}.")] if series else []
        else:
            spec = charts.cost(content, key, axis, width=wide, height=220)
            cards += _single("uploaded" if key == "bytes_up" else key, title, spec, caption, half=True)
    return cards


def share(value: float) -> str:
    """A share in words of a sentence.

    >>> share(0.4386)
    '43.9 %'
    """
    return f"{100 * value:.1f} %"


def constant(values: Sequence[float], scale: float) -> bool:
    """Whether values move by less than a hundredth of a scale: a line would be flat.

    >>> constant([0.5, 0.503], 1), constant([0.5, 0.6], 1)
    (True, False)
    """
    return max(values) - min(values) < 0.01 * abs(scale)


def fleet(content: Content, wide: int = WIDE) -> list[Card]:
    """The last round of every run on its clients' devices, and in a line whose updates came too late."""
    runs = [run for run in content["runs"] if run["fleet"]]
    views, lines = [], []
    for run in runs:
        facts, owner = run["fleet"], f"{run['label']}: " if len(runs) > 1 else ""
        kinds = Counter(row["device"] for row in facts["rows"])
        devices = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        some = f" {charts.MOST_BARS} are shown, evenly spaced." if len(facts["rows"]) > charts.MOST_BARS else ""
        pale = " Pale bars do not count." if any(row["dropped"] for row in facts["rows"]) else ""
        caption = f"Round {facts['round']}, policy {facts['policy']}: {devices}.{some}{pale}"
        views.append(View(charts.gantt(run, width=wide), caption, (run["label"],)))
        lines.append(owner + lateness(facts))
    if not runs:
        return []
    return [Card("late", "", text="\n".join(lines)), Card("gantt", "A round on the devices", views, ("run",))]


def lateness(facts: Content) -> str:
    """How many updates came too late to count, and whose.

    >>> lateness({"late": [["anna", 3], ["ben", 1]], "asked": 40, "clients": 10})
    '4 of 40 updates came too late to count, from 2 of 10 clients: anna 3, ben 1.'
    >>> lateness({"late": [], "asked": 40, "clients": 10})
    'All 40 updates counted.'
    """
    late = sum(number for _, number in facts["late"])
    if not late:
        return f"All {facts['asked']} updates counted."
    names = [f"{client} {number}" for client, number in facts["late"]]
    return (
        f"{late} of {facts['asked']} updates came too late to count, from {len(names)} of {facts['clients']} clients: "
        f"{_named(names)}."
    )


def gates(content: Content, wide: int = WIDE) -> list[Card]:
    """Blocks, weights over rounds, how masks differ, and the tree; in a line what says nothing as a picture."""
    runs = [run for run in content["runs"] if run["gates"]]
    lines: list[str] = []
    blocks: list[View] = []
    over_rounds: dict[str, list[View]] = {"M": [], "G": []}
    trees: list[View] = []
    for run in runs:
        label, facts = run["label"], run["gates"]
        owner = f"{label}. " if len(runs) > 1 else ""
        orders = {"at": "by client", **({"rank": "by likeness"} if facts["tree"] else {})}
        lines.append(owner + masks(facts))
        cells = [cell for cell in CELLS if cell == "kept" or facts[cell]]
        if facts["masks"]["number"] == 1:  # then only the weights differ from client to client
            cells = [cell for cell in cells if cell == "weights" and not _alike(facts["weights"])]
        for cell, order in itertools.product(cells, orders):
            spec = gate_charts.block_map(content, run, cell, order, width=wide)
            title = "" if len(cells) > 1 else TITLES[cell]
            blocks.append(View(spec, _blocks(run, cell), (label, CELLS[cell], orders[order]), title))
        for path, (word, wanted) in WEIGHTS.items():
            tables = {layer: spread[path]["quantiles"] for layer, spread in facts["over_rounds"].items()}
            whole: Sequence[Sequence[float]] = next(iter(tables.values()), ())
            moving = [layer for layer, table in tables.items() if not _still(table)]
            if whole and _still(whole):
                low, *_, high = whole[-1]
                lines.append(
                    f"{owner}{word} of blocks ({path}) do not move over the rounds: nine in ten lie between {low:.2f} "
                    f"and {high:.2f}{wanted}."
                )
            for layer, form in itertools.product(moving, FORMS):
                draw, meaning = FORMS[form]
                spec = draw(content, run, path, layer, width=wide // 2, height=240)
                caption = f"{owner}Over {_first(facts)}clients and blocks: {meaning}."
                over_rounds[path].append(View(spec, caption, (label, layer, form)))
        if facts["tree"]:
            trees.append(View(gate_charts.tree(content, run, width=wide), owner + _tree(run), (label,)))
    changing = [run for run in runs if any(step["between"] or step["moved"] for step in run["gates"]["changes"])]
    choices, half = ("run", "layer", "form"), all(over_rounds.values())
    cards = [
        Card("masks", "", text="\n".join(lines)),
        Card("blocks", TITLES["kept"], blocks, ("run", "cells", "order")),
        Card("gate-M", "Weights of blocks over rounds (M)", over_rounds["M"], choices, half),
        Card("gate-G", "Importance of blocks over rounds (G)", over_rounds["G"], choices, half),
        *_single(
            "changes", "How different masks are",
            gate_charts.changes({**content, "runs": changing}, width=wide, height=220),
            "Thick: share of blocks on which two clients disagree. Thin: share that changed for a client since the "
            "evaluation before.",
        ),
        Card("tree", "Which gates are alike, and the classes their clients hold", trees, ("run",)),
    ]  # fmt: skip
    return [card for card in cards if card.views or card.text]


def _still(table: Sequence[Sequence[float]]) -> bool:
    """Whether no quantile of a layer moves over the rounds."""
    return all(constant(moved, 4) for moved in zip(*table, strict=True))


def _alike(rows: Sequence[Sequence[float]]) -> bool:
    return all(constant(column, 1) for column in zip(*rows, strict=True))


def masks(gates: Content) -> str:
    """How many masks there are, how far apart, and who gathers with whom.

    >>> one = {"kept": ["110", "110"], "layers": [{"name": "fc", "blocks": [0, 1, 2]}], "looked": 2, "of": 2}
    >>> print(masks({**one, "masks": {"number": 1, "distance": 0.0, "groups": [["a", "b"]]}}))
    All 2 clients keep the same 2 of 3 blocks (fc 2 of 3): one mask, so what is personal is the weight of each block.
    >>> told = {"number": 2, "distance": 0.5, "groups": [["a", "b"], ["c"]]}
    >>> print(masks({**one, "kept": ["110", "110", "011"], "masks": told}))
    3 clients keep 2 different masks; of the blocks that either of two clients keeps, they do not share 50 % on average
    (Jaccard distance). Together: a, b; alone: c.
    """
    kept, facts, within = gates["kept"], gates["masks"], ""
    if (share := facts.get("batches")) is not None:
        within = f" Masks of one client's batches differ by {100 * share:.0f} %." if share else ""
    if facts["number"] == 1:
        bits = kept[0]
        layers = ", ".join(
            f"{layer['name']} {sum(bits[at] == '1' for at in layer['blocks'])} of {len(layer['blocks'])}"
            for layer in gates["layers"]
        )
        return (
            f"All {len(kept)} clients keep the same {bits.count('1')} of {len(bits)} blocks ({layers}): one mask, "
            f"so what is personal is the weight of each block.{within}"
        )
    together = [_named(names) for names in facts["groups"] if len(names) > 1]
    single = [names[0] for names in facts["groups"] if len(names) == 1]
    who = [f"Together: {' | '.join(together)}"] * bool(together)
    who += [f"alone: {_named(single)}" if together else "Every client has a mask of its own"] * bool(single)
    return (
        f"{len(kept)} clients keep {facts['number']} different masks; of the blocks that either of two clients keeps, "
        f"they do not share {100 * facts['distance']:.0f} % on average (Jaccard distance). {'; '.join(who)}.{within}"
    )


def _named(clients: Sequence[str]) -> str:
    return ", ".join(clients) if len(clients) <= 12 else f"{', '.join(clients[:8])} and {len(clients) - 8} more"


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
        "weights": " The weight of a block (M): blue above 1, red below; dropped blocks are pale.",
        "importance": " The importance of a block (G), which decides what is kept.",
    }[cells]
    if not gates["weights"]:
        likeness = "" if gates["tree"] else " and the likeness of gates"
        end += f" Weights of single blocks{likeness} are not available: {gates['reason']}."
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
    return f"Ward's clustering of the gates' parameters{beside}. Only the parameters are compared, not the classes."


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
    "learning": learning, "clients": clients, "cost": cost, "fleet": fleet, "gates": gates, "data": data,
}  # fmt: skip


def figures(content: Content) -> dict[str, Spec]:
    """The charts of the page by file name, as wide as a page of paper: of several runs one below the other."""
    files = {}
    for card in (card for make in SECTIONS.values() for card in make(content, PAGE) if card.views):
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
