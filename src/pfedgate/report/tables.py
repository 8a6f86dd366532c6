"""Tables of a report, and the same for a paper: LaTeX, Markdown, CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pfedgate.core.kinds import METRICS, Metric
from pfedgate.engine.checkpoint import plain
from pfedgate.runs.progress import clock, scaled, size


def percent(value: float) -> str:
    """A share as a number of per cent.

    >>> percent(0.8349)
    '83.49'
    """
    return f"{100 * value:.2f}"


Cell = dict[str, Any]
Show = Callable[[float], str]
Best = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Column:
    """One number of every run."""

    key: str
    title: str
    show: Show
    best: Best | None  # max, min, or None: nothing to win
    why: str  # its meaning in a few words
    always: bool = True  # shown even where all runs have the same
    unit: str = ""  # of the bare number, where the text says it with every value

    @property
    def head(self) -> dict[str, Any]:
        """The column as a table knows it; `plain` and `times` are for bare numbers, as in a CSV file."""
        plain = f"{self.title}, {self.unit}" if self.unit else self.title
        times = 100 if self.show is percent else 1
        return {"key": self.key, "title": self.title, "why": self.why, "plain": plain, "times": times}


COLUMNS = (
    Column("accuracy", "accuracy, %", percent, max, "mean over clients, weighted by test samples, last round"),
    Column("bottom_decile", "bottom decile, %", percent, max, "accuracy of the client at the worst tenth"),
    Column("spread", "spread, %", percent, min, "standard deviation over clients"),
    Column("best_accuracy", "best on validation, %", percent, max, "test accuracy in the round best on validation"),
    Column("best_bottom_decile", "its bottom decile, %", percent, max, "in the round best on validation"),
    Column("accuracy_after_local", "after local, %", percent, max, "after a further local epoch"),
    Column("novel", "novel clients, %", percent, max, "clients never seen in training"),
    Column("rounds_to_90", "rounds to 90 %", "{:.0f}".format, min, "of the best accuracy among the runs compared"),
    Column("density", "share used", "{:.3f}".format, min, "of the model's parameters, at prediction (density)", False),
    Column("q_training", "share sent", "{:.3f}".format, min, "of the model, back to the server, mean over rounds (q)"),
    Column("epsilon", "privacy ε", "{:.3g}".format, min, "of a client; less is more private (its δ: Settings)", False),
    Column("bytes_up", "uploaded", size, min, "all clients and rounds, as serialised", unit="B"),
    Column("bytes_down", "downloaded", size, min, "all clients and rounds, as serialised", False, unit="B"),
    Column("flops", "compute", lambda n: scaled(n, "FLOP"), min, "local training, all clients and rounds", unit="FLOP"),
    Column("seconds", "time", clock, min, "wall clock of training, evaluation not counted", unit="s"),
)
USUAL = {"density": 1.0}  # a method that says nothing uses the whole model


def numbers(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """A run's numbers by column."""
    name = summary.get("metric", "accuracy")
    names = {key: key.replace("accuracy", name) for key in ("accuracy", "best_accuracy", "accuracy_after_local")}
    values = {**summary, **{key: summary.get(own) for key, own in names.items()}}
    values["novel"] = (summary.get("novel") or {}).get(name)
    return {column.key: values.get(column.key) for column in COLUMNS}


def columns_for(metric: Metric) -> tuple[Column, ...]:
    """The columns with the words, the form and the direction of a main metric that is not accuracy.

    >>> columns_for(METRICS["mae"])[0].title, columns_for(METRICS["mae"])[0].show(0.123456)
    ('mae', '0.1235')
    """
    if metric.name == "accuracy":
        return COLUMNS

    def fitted(column: Column) -> Column:
        title, show = column.title.replace("accuracy", metric.name), column.show
        if show is percent and not metric.share:
            title, show = title.removesuffix(", %"), "{:.4g}".format
        better = column.best if column.key == "spread" else metric.best
        return replace(column, title=title, show=show, best=better, why=column.why.replace("accuracy", metric.name))

    return tuple(fitted(column) if column.show is percent else column for column in COLUMNS)


def winners(show: Show, better: Best | None, values: Sequence[float | None], leagues: Sequence[Any]) -> list[bool]:
    """Which values are the best of their league. Values that print alike are not marked best if all do.

    A value that is None, or in the league None, wins nothing.

    >>> winners(percent, max, [0.5, 0.7, 0.70001, 0.9, 0.8], ["a", "a", "a", "b", None])
    [False, True, True, False, False]
    """
    best: dict[Any, str] = {}
    for league in {league for league in leagues if league is not None} if better else ():
        rivals = [value for value, own in zip(values, leagues, strict=True) if own == league and value is not None]
        if better and len({show(value) for value in rivals}) > 1:
            best[league] = show(better(rivals))
    return [
        value is not None and show(value) == best.get(league) for value, league in zip(values, leagues, strict=True)
    ]


def cells(values: Sequence[float | None], show: Show, better: Best | None, leagues: Sequence[Any]) -> list[Cell]:
    """A column of a table: texts, values, and which is best."""
    best = winners(show, better, values, leagues)
    texts = ["–" if value is None else show(value) for value in values]
    return [{"text": t, "value": v, "best": won} for t, v, won in zip(texts, values, best, strict=True)]


def summarise(
    rows: Mapping[str, Mapping[str, float | None]],
    leagues: Mapping[str, Any] | None = None,
    metric: Metric = METRICS["accuracy"],
) -> dict[str, Any]:
    """The table of all runs: cells as text, whether each is the best of its column, and the same to copy.

    `leagues` says which runs can be compared (those on the same data and of the same length); a run in none, such as
    one that has not ended, wins nothing.
    """
    shown = [column for column in columns_for(metric) if any(row.get(column.key) is not None for row in rows.values())]
    columns: dict[Column, list[float | None]] = {}
    for column in shown:
        values = [row.get(column.key) for row in rows.values()]
        columns[column] = [USUAL.get(column.key) if value is None else value for value in values]
    if len(rows) > 1:
        columns = {column: values for column, values in columns.items() if column.always or len(set(values)) > 1}
    league = [(leagues or {}).get(name) if leagues else "all" for name in rows]
    filled = [cells(values, column.show, column.best, league) for column, values in columns.items()]
    lines = [{"name": name, "cells": [column[at] for column in filled]} for at, name in enumerate(rows)]
    return with_copies({"head": [column.head for column in columns], "rows": lines, "first": "run"})


def over_seeds(
    groups: Mapping[str, Sequence[Mapping[str, float | None]]],
    leagues: Mapping[str, Any] | None = None,
    metric: Metric = METRICS["accuracy"],
) -> dict[str, Any]:
    """Mean ± standard deviation (of a sample) of runs that differ in their seed only; a single run has no deviation.

    `leagues` says which groups can be compared: those of the same seeds, on the same data and of the same length.

    >>> table = over_seeds({"a": [{"accuracy": 0.8}, {"accuracy": 0.9}], "b": [{"accuracy": 0.7}, {"accuracy": 0.7}]})
    >>> [row["cells"][1]["text"] for row in table["rows"]]
    ['85.00 ± 7.07', '70.00 ± 0.00']
    """
    league = [(leagues or {}).get(name) if leagues else "all" for name in groups]
    head = [{"title": "seeds", "why": "runs"}]
    lines: list[dict[str, Any]] = [
        {"name": name, "cells": [{"text": str(len(rows)), "value": len(rows), "best": False}]}
        for name, rows in groups.items()
    ]
    for column in columns_for(metric):
        shared = column.show is percent or "accuracy" in column.key or "decile" in column.key or column.key == "spread"
        shared = shared or column.key in ("novel", "density", "q_training", "rounds_to_90")
        samples = [[v for row in rows if (v := row.get(column.key)) is not None] for rows in groups.values()]
        if not shared or not any(samples):
            continue
        usual = USUAL.get(column.key)
        means = [statistics.fmean(values) if values else usual for values in samples]
        head.append(column.head)
        for line, cell, values in zip(lines, cells(means, column.show, column.best, league), samples, strict=True):
            if len(values) > 1:
                cell["text"] += f" ± {column.show(statistics.stdev(values))}"
            line["cells"].append(cell)
    return with_copies({"head": head, "rows": lines, "first": "setting"})


FORMS = {"latex": "LaTeX", "markdown": "Markdown", "csv": "CSV"}  # what a table can be copied as


def with_copies(table: dict[str, Any]) -> dict[str, Any]:
    """The table with itself as LaTeX, Markdown and CSV."""
    return {**table, "latex": latex(table), "markdown": markdown(table), "csv": as_csv(table)}


def latex(table: Mapping[str, Any]) -> str:
    r"""A booktabs table, best values bold.

    >>> print(latex({"first": "run", "head": [{"title": "acc, %"}],
    ...              "rows": [{"name": "a_b", "cells": [{"text": "90", "value": 0.9, "best": True}]}]}))
    \begin{tabular}{lr}
    \toprule
    run & acc, \% \\
    \midrule
    a\_b & \textbf{90} \\
    \bottomrule
    \end{tabular}
    """
    head, *rows = (" & ".join(cells) + r" \\" for cells in _lines(table, r"\textbf{%s}", escape_tex))
    columns = r"\begin{tabular}{l" + "r" * len(table["head"]) + "}"
    return "\n".join([columns, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"])


def _lines(table: Mapping[str, Any], bold: str, escape: Callable[[str], str]) -> Iterator[list[str]]:
    """The head and the rows as escaped texts, best values bold."""
    yield [escape(title) for title in (table["first"], *(column["title"] for column in table["head"]))]
    for row in table["rows"]:
        texts = [bold % escape(cell["text"]) if cell["best"] else escape(cell["text"]) for cell in row["cells"]]
        yield [escape(row["name"]), *texts]


TEX = {"\\": r"\textbackslash{}", "–": "--", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def escape_tex(text: str) -> str:
    r"""Text that LaTeX prints as it is.

    >>> escape_tex("50% of a_b")
    '50\\% of a\\_b'
    """
    return "".join("\\" + c if c in "&%$#_{}" else TEX.get(c, c) for c in text)


def markdown(table: Mapping[str, Any]) -> str:
    """A pipe table, best values bold; a pipe in a text is no border."""
    lines = _lines(table, "**%s**", lambda text: text.replace("|", "\\|"))
    head, *rows = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, "|---|" + "---:|" * len(table["head"]), *rows])


def as_csv(table: Mapping[str, Any]) -> str:
    """Full values, not the rounded ones shown, in the units that the head says; names are no formulas."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([table["first"], *(plain(column.get("plain", column["title"])) for column in table["head"])])
    for row in table["rows"]:
        scales = [column.get("times", 1) for column in table["head"]]
        values = [cell["value"] for cell in row["cells"]]
        # None is an empty cell; a share times 100 gets no digits that it did not have.
        cells = [v if v is None or t == 1 else float(f"{v * t:.10g}") for v, t in zip(values, scales, strict=True)]
        writer.writerow([plain(row["name"]), *cells])
    return file.getvalue()
