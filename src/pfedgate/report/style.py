"""What all figures as files have in common: colours, sizes, ticks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Told apart with every kind of colour blindness, as far as eight can be.
COLOURS = ("#3466e4", "#bb5b1b", "#0a5633", "#893b7b", "#c5810d", "#0e99d2", "#382846", "#84787e")
# Lines have a pattern, too: nobody should need to see colours. As many as colours have no divisor in common, so that
# forty runs look different.
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1, 1.3)), (0, (5, 1.4, 1, 1.4)), (0, (6, 1.3, 1, 1.3, 1, 1.3)))
FORMATS = ("pdf", "svg", "png")
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
    "legend.handlelength": 3.6,  # a pattern needs some length
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,
    "svg.hashsalt": "pfedgate",  # the same figure is the same file
}
Content = Mapping[str, Any]
Painter = Callable[[Content, Any], bool]


def colour(at: int) -> str:
    """The colour of a run by its number."""
    return COLOURS[at % len(COLOURS)]


def look(at: int) -> dict[str, Any]:
    """What the line of a run looks like, by its number."""
    return {"color": colour(at), "linestyle": DASHES[at % len(DASHES)]}


def printable(content: Content) -> Content:
    """Text that matplotlib prints as it is: a dollar starts no formula, an underscore hides no name from a legend."""
    found: Content = _escaped(content)
    runs = [{**run, "label": " " * run["label"].startswith("_") + run["label"]} for run in found["runs"]]
    return {**found, "runs": runs}


def _escaped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return value.replace("$", r"\$") if isinstance(value, str) else value


def shades(colour: str) -> Any:
    """From nearly nothing to a colour."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shades", ["#f1f2f4", colour])


def whole(axis: Any) -> None:
    """Ticks at whole numbers only: there is no round 2.5."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins="auto", steps=[1, 2, 5, 10]))


def name_ticks(axis: Any, names: Sequence[str], inches: float, size: float = 6) -> None:
    """Names as ticks at 0, 1, …: all, or every so many as there is room for; lying only where the widest fits.

    `inches` is the length of the axis. Names along the x axis are turned where they would run together.
    """
    if not names:
        return
    step = 72 * inches / len(names)  # points from one to the next
    wide = 0.62 * size * max(map(len, names)) + 2
    turned = axis.axis_name == "x" and wide > step
    skip = max(1, math.ceil(1.1 * size / step)) if turned or axis.axis_name == "y" else 1
    places = range(0, len(names), skip)
    axis.set_ticks(list(places), [names[at] for at in places], fontsize=size, rotation=90 if turned else 0)
