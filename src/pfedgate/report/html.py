"""The report as one HTML file, which needs no network: it may be mailed or put on a page as it is."""

from __future__ import annotations

import html as entities
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from pfedgate.core.drawing import DASHES, THEMES, config
from pfedgate.core.errors import warn
from pfedgate.engine.files import write_atomically
from pfedgate.report import cards, charts, tables
from pfedgate.report.cards import Card
from pfedgate.report.tables import percent
from pfedgate.runs.progress import scaled, size

Content = Mapping[str, Any]
LIBRARIES = ("vega", "vega-lite", "vega-embed")  # from npm, by scripts/vendor-vega.py
LARGEST = 3_000_000  # bytes
escape = entities.escape


def write(content: Content, path: str | Path) -> Path:
    """Write the page; one that would be too large leaves out what is missed least, step by step, and says so."""
    target, page = Path(path), render(content)
    for part, smaller in STEPS.items():
        if len(page.encode()) <= LARGEST:
            break
        reduced = smaller(content)
        if reduced != content:
            content = {**reduced, "left_out": [*content.get("left_out", ()), part]}
            page = render(content)
    if len(page.encode()) > LARGEST:
        warn(f"{target} has {len(page.encode()) / 1e6:.1f} MB: make a report of fewer runs")
    write_atomically(target, page.encode())
    return target


def _gates(content: Content, change: Callable[[Content], Content]) -> dict[str, Any]:
    """The content with other gates."""
    return {**content, "runs": [run | change(run["gates"]) if run["gates"] else run for run in content["runs"]]}


WHY = "they were left out to keep this file small"
# The name of each part that can be left out, and the content without it; the least missed first.
STEPS: dict[str, Callable[[Content], dict[str, Any]]] = {
    "weights M and importances G of single blocks": lambda content: _gates(
        content, lambda g: {"gates": {**g, "weights": None, "importance": None, "reason": g["reason"] or WHY}}
    ),
    "the table of all clients": lambda content: {**content, "clients": {}},
    "gates": lambda content: _gates(content, lambda g: {"gates": None, "no_gates": WHY}),
    "accuracy of single clients": lambda content: {
        **content,
        "runs": [{**run, "clients": [], "novel": []} for run in content["runs"]],
    },
}


def render(content: Content) -> str:
    """The page. Text of runs reaches it escaped, or as data that scripts show as text."""
    drawn = {name: make(content) for name, make in cards.SECTIONS.items()}
    runs = content["runs"]
    treeless = [run for run in runs if run["gates"] and not run["gates"]["tree"]]
    unseen = {run["label"]: run["no_partition"] for run in runs if run["partition"] is None}
    table = content["clients"] and f'<div class="card">{_table(content["clients"], "clients")}</div>'
    sections = {
        "summary": ("Summary", "", _summary(content)),
        "learning": (
            "Learning",
            "Accuracy of each client's own model on its test data, after the broadcast, weighted by test samples.",
            _grid(drawn["learning"]) or _note("rounds", "No round is evaluated yet."),
        ),
        "clients": (
            "Clients",
            "A good mean can hide clients that are served badly: every client counts once here.",
            _grid(drawn["clients"]) + (_folded("All clients as a table", table) if table else ""),
        ),
        "cost": ("Cost", "How much of the model clients compute with, and what they send.", _grid(drawn["cost"])),
        "fleet": (
            "Devices",
            "A virtual clock counts what FLOPs and bytes would take on each client's device.",
            _grid(drawn["fleet"]),
        ),
        "gates": (
            "Gates",
            "A private gate looks at a client's data, gives every block of the shared model a weight (M) and an "
            "importance (G), and keeps the most important blocks that fit the budget.",
            _missing("gates", "Gates", content, {run["label"]: run["no_gates"] for run in runs})
            + _missing("tree", "The tree of gates", content, {run["label"]: cards.no_tree(run) for run in treeless})
            + _grid(drawn["gates"]),
        ),
        "data": (
            "Data",
            "",
            _missing("data", "Samples by client and class", content, unseen) + _grid(drawn["data"]),
        ),
        "settings": ("Settings", "Enough to run it again.", _settings(content)),
    }
    sections = {name: part for name, part in sections.items() if part[2]}
    main = [
        f'<section id="{name}"><h2>{title}</h2>{f"<p class=lead>{lead}</p>" if lead else ""}{body}</section>'
        for name, (title, lead, body) in sections.items()
    ]
    page = {
        **pooled([card for shown in drawn.values() for card in shown]),
        "configs": {theme: config(theme, 12) for theme in THEMES},
        "runs": [run["label"] for run in runs],
        "copies": {
            name: {form: content[name][form] for form in tables.FORMS}
            for name in ("table", "seeds", "clients", "differences")
            if content[name]
        },
    }
    return Template(_asset("template.html")).substitute(
        title=escape(content["title"]),
        subtitle=escape(content["subtitle"]),
        verdict="".join(f"<p>{escape(sentence)}</p>" for sentence in content["verdict"]),
        version=escape(content["version"]),
        made=escape(content["made"]),
        css=_colours() + _asset("report.css"),
        libraries="".join(f"<script>{_library(name)}</script>\n" for name in LIBRARIES),
        js=_asset("page.js"),
        nav="".join(f'<a href="#{name}">{title}</a>' for name, (title, _, _) in sections.items()),
        main="\n".join(main),
        data=embedded(page),
    )


def _asset(name: str) -> str:
    return (resources.files("pfedgate.report") / "assets" / name).read_text(encoding="utf-8")


def _library(name: str) -> str:
    """A vendored script after its licence, without the comment that makes a browser look for a source map."""
    script = re.sub(r"\n//# sourceMappingURL=.*", "", _asset(f"{name}.min.js"))
    return f"/* {name}\n{_asset(f'{name}.LICENSE.txt')}*/\n{script}"


def _colours() -> str:
    """The themes' colours as variables of the style sheet."""
    rules = []
    for theme, paint in THEMES.items():
        names = {**paint, **{f"c{at}": hue for at, hue in enumerate(paint["runs"])}}
        del names["runs"]
        variables = "".join(f"--{name}:{value};" for name, value in names.items())
        rules.append(f':root[data-theme="{theme}"]{{color-scheme:{theme};{variables}}}\n')
    return "".join(rules)


def pooled(shown: Sequence[Card]) -> dict[str, Any]:
    """Cards as plain data: rows and specifications that several views share stand in a pool once.

    A {"$": n} stands for the pool's n-th entry.
    """
    pool: list[Any] = []
    places: dict[str, int] = {}

    def place(value: Any) -> dict[str, int]:
        text = json.dumps(value)
        if text not in places:
            places[text] = len(pool)
            pool.append(value)
        return {"$": places[text]}

    def bare(spec: Any) -> Any:
        if isinstance(spec, Mapping):
            return {key: place(part) if key == "values" else bare(part) for key, part in spec.items()}
        return [bare(part) for part in spec] if isinstance(spec, list | tuple) else spec

    plain = []
    for card in (card for card in shown if card.views):
        views = [{**view._asdict(), "spec": place(bare(view.spec))} for view in card.views]
        plain.append({"name": card.name, "title": card.title, "choices": card.choices, "views": views})
    return {"cards": plain, "pool": pool}


def embedded(content: Any) -> str:
    """JSON that cannot end the script element it stands in.

    >>> embedded({"name": "</script><b>"})
    '{"name":"\\\\u003c/script>\\\\u003cb>"}'
    """
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _grid(shown: Sequence[Card]) -> str:
    save = '<button class="small save" type="button" title="Save this picture as SVG">SVG</button>'
    figures = [
        f'<figure class="card{" half" * card.half}" data-chart="{card.name}"><header><h3>{escape(card.title)}</h3>'
        f'<div class="tools"></div>{save}</header><div class="legend"></div><div class="plot"></div>'
        "<figcaption></figcaption></figure>"
        for card in shown
        if card.views
    ]
    lines = [f"<li>{escape(line)}</li>" for card in shown for line in card.text.splitlines()]
    said = f'<ul class="card lines">{"".join(lines)}</ul>' if lines else ""
    return f'<div class="grid">{said}{"".join(figures)}</div>' if lines or figures else ""


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


def _note(missing: str, text: str) -> str:
    return f'<p class="note" data-missing="{missing}">{escape(text)}</p>'


def key(at: int) -> str:
    """The colour and pattern of a run as a short line."""
    dash = " ".join(map(str, DASHES[at % len(DASHES)]))
    hue = at % len(THEMES["light"]["runs"])
    return (
        f'<svg class="key" viewBox="0 0 28 6" aria-hidden="true"><line x1="0" x2="28" y1="3" y2="3" stroke-width="3" '
        f'style="stroke:var(--c{hue})" stroke-dasharray="{dash}"/></svg>'
    )


def _table(table: Content, name: str, *, keys: bool = False, words: bool = False) -> str:
    """A table with buttons that copy it; `keys` puts a run's colour before its name."""
    head = "".join(
        f'<th scope="col" title="{escape(column["why"] or column["title"])}">'
        f"{escape(column['title']).replace(' %', '&nbsp;%')}</th>"
        for column in table["head"]
    )
    rows = []
    for at, row in enumerate(table["rows"]):
        label = escape(row["name"])
        cells = [f'<td title="{label}"><div class="name">{key(at) if keys else ""}<span>{label}</span></div></td>']
        for cell in row["cells"]:
            text = escape(cell["text"])
            cells.append(
                f'<td class="best" title="best"><span>{text}</span></td>' if cell["best"] else f"<td>{text}</td>"
            )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    kind = "words" if words else "dense" if len(table["head"]) > 10 else ""
    buttons = "".join(
        f'<button class="small" type="button" data-table="{name}" data-copy="{form}">{title}</button>'
        for form, title in tables.FORMS.items()
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr><th scope="col">{table["first"]}</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f'<div class="copies">Copy as{buttons}<span role="status"></span></div>'
    )


def _summary(content: Content) -> str:
    runs = content["runs"]
    notes = ""
    going = [f"{run['label']} ({run['rounds']} of {run['planned']} rounds)" for run in runs if not run["finished"]]
    if going:
        notes += _note("rounds", f"Not finished, numbers so far: {'; '.join(going)}.")
    if len({run["league"] for run in runs} - {None}) > 1:
        notes += _note("best", "The best is marked among runs on the same data and of the same number of rounds.")
    body = f'{_tiles(content)}<div class="card">{_table(content["table"], "table", keys=True)}{notes}</div>'
    if content["seeds"]:
        unfinished = content["seeds"]["unfinished"]
        counted = f" Not finished, so not counted: {'; '.join(unfinished)}." if unfinished else ""
        note = _note("seeds", f"The best is marked among settings with the same seeds.{counted}")
        title = "<h3>Over seeds: mean ± standard deviation</h3>"
        body += f'<div class="card">{title}{_table(content["seeds"], "seeds")}{note}</div>'
    if content.get("left_out"):
        parts = "; ".join(content["left_out"])
        body += _note("size", f"Left out to keep this file small: {parts}. The folders of the runs have it all.")
    return body


TILES = (
    ("accuracy", "Highest accuracy, last round", "Accuracy, last round", lambda value: f"{percent(value)} %"),
    ("bottom_decile", "Highest bottom decile, last round", "Bottom decile, last round", lambda v: f"{percent(v)} %"),
    ("bytes_up", "Smallest upload", "Uploaded", size),
    ("flops", "Least compute", "Compute", lambda value: scaled(value, "FLOP")),
)


def _tiles(content: Content) -> str:
    """The best numbers in four tiles; nothing for runs that cannot be compared."""
    runs = content["runs"]
    able = [at for at, run in enumerate(runs) if run["league"] is not None]
    if len({runs[at]["league"] for at in able}) > 1:
        return ""
    columns = [column["key"] for column in content["table"]["head"]]
    tiles = []
    metric = content.get("metric", charts.ACCURACY)
    for number, title, alone, show in TILES:
        if number in ("accuracy", "bottom_decile") and metric != charts.ACCURACY:
            title, alone = (text.replace("Accuracy", metric["name"]) for text in (title, alone))
            title = title.replace("accuracy", metric["name"])
            title = title if metric["higher"] else title.replace("Highest", "Lowest")
            show = show if metric["times"] == 100 else "{:.4g}".format
        scores = {at: runs[at]["summary"][number] for at in able if runs[at]["summary"].get(number) is not None}
        if not scores:
            continue
        # The winners are those of the table, so that both say the same of a tie.
        column = columns.index(number)
        winners = [at for at in scores if content["table"]["rows"][at]["cells"][column]["best"]]
        first = (winners or list(scores))[0]
        if len(winners) == 1 or len(scores) == 1:
            owner = runs[first]["label"]
        elif winners:
            owner = " and ".join(runs[at]["label"] for at in winners)
        else:
            owner = f"the same for all {len(scores)} runs"
        mark = key(first) if len(winners) == 1 or len(scores) == 1 else ""
        tiles.append(
            f'<div class="card tile quarter"><div class="what">{title if len(able) > 1 else alone}</div>'
            f'<div class="value">{show(scores[first])}</div>'
            f'<div class="who" title="{escape(owner)}">{mark}<span>{escape(owner)}</span></div></div>'
        )
    return f'<div class="grid">{"".join(tiles)}</div>'


def _missing(name: str, what: str, content: Content, reasons: Mapping[str, str]) -> str:
    """A note with one sentence for the runs of each reason; an empty reason needs none."""
    groups: dict[str, list[str]] = {}
    for label, reason in reasons.items():
        groups.setdefault(reason, []).append(label)
    sentences = []
    for reason, labels in groups.items():
        owners = f" of {' and '.join(labels)}" if len(labels) < len(content["runs"]) else ""
        sentences += [f"{what}{owners}: not shown, because {reason}."] if reason else []
    return _note(name, " ".join(sentences)) if sentences else ""


def _settings(content: Content) -> str:
    body = ""
    if content["differences"]:
        table = _table(content["differences"], "differences", words=True)
        body = f'<div class="card"><h3>Where the runs differ</h3>{table}</div>'
    copy = '<p><button class="small" type="button" data-copy="config">Copy</button></p>'
    boxes = []
    for run in content["runs"]:
        so_far = "" if run["finished"] else f" (so far: {run['rounds']} of {run['planned']} rounds)"
        rows = "".join(f"<tr><td>{name}</td><td>{escape(text)}</td></tr>" for name, text in _facts(run).items())
        table = f'<div class="scroll"><table class="words facts"><tbody>{rows}</tbody></table></div>'
        boxes.append(_folded(escape(run["label"] + so_far), f"{table}<pre>{escape(run['config'])}</pre>{copy}"))
    return f'{body}<div class="card">{"".join(boxes)}</div>'


def _facts(run: Content) -> dict[str, str]:
    """The machine and the software of a run, as rows of a table."""
    if not run["environment"]:
        return {"folder": run["path"]}
    first, last = run["environment"][0], run["environment"][-1]
    machine, packages = last["machine"], [" ".join(pair) for pair in last["packages"].items()]
    memory = size(machine.get("memory_bytes") or 0)
    return {
        "folder": run["path"],
        "started": str(first["started"]),
        "command": " ".join(last["command"]),
        "pfedgate": last["pfedgate"] + (f", {last['commit'][:12]}" if last["commit"] else ""),
        "Python": ", ".join([last["python"], *packages]),
        "machine": ", ".join([machine["cpu"], f"{machine['cores']} cores", memory, *machine["accelerators"]]),
    }
