"""What all figures as files have in common: colours, sizes, ticks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

COLOURS = ("#2f5fd0", "#d9542b", "#1f8f5f", "#8a4fd3", "#b98200", "#c8358a", "#1791a8", "#7a5a44", "#6d7480", "#4f7d13")
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
