"""How every chart looks, in light and in dark, and how one becomes a file.

A chart is a Vega-Lite specification: a dictionary that a page draws in the browser and `save` draws into a file. Data
stands in a specification as values only, never inside an expression.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pfedgate.core.errors import unknown

Spec = dict[str, Any]
FORMATS = ("pdf", "svg", "png")
VEGA_LITE = "6.4"  # the version that a report's page holds, too
COLUMN, PAGE = 326, 662  # pixels, 96 to the inch: the widths of a two-column paper

# Eight colours that stay apart under every kind of colour blindness, checked by tests/report/test_colours.py.
THEMES: dict[str, dict[str, Any]] = {
    "light": {
        "runs": ["#3466e4", "#bb5b1b", "#0a5633", "#893b7b", "#c5810d", "#0e99d2", "#382846", "#84787e"],
        "page": "#fbfbfa", "card": "#ffffff", "ink": "#1b1d21", "soft": "#5c6470", "faint": "#69707a",
        "line": "#e3e5e8", "grid": "#eceef0", "accent": "#2f5fd0", "good": "#157a4a", "good-back": "#e4f4eb",
        "mark": "#b7791f", "shade": "#f3f4f6", "edge": "rgb(20 30 50 / 0.22)",
    },
    "dark": {
        "runs": ["#4776f7", "#e5491c", "#a4e7bc", "#dd7fb2", "#facb3a", "#6fd1eb", "#9c9ef1", "#e3f0ff"],
        "page": "#121417", "card": "#1a1d21", "ink": "#e9ebee", "soft": "#a6adb7", "faint": "#8f97a2",
        "line": "#2d3238", "grid": "#262a30", "accent": "#7fa5ff", "good": "#6fd3a0", "good-back": "#173527",
        "mark": "#e2b04a", "shade": "#22262b", "edge": "rgb(0 0 0 / 0.75)",
    },
}  # fmt: skip
# A line has a pattern as well as a colour. Five and eight have no common divisor, so forty runs look different.
DASHES: list[list[float]] = [[1, 0], [8, 4], [2.5, 3], [11, 3.5, 2.5, 3.5], [15, 3, 2.5, 3, 2.5, 3]]


def config(theme: str = "light", size: float = 11) -> Spec:
    """The Vega-Lite configuration of a theme; `size` is that of the text in pixels.

    Marks of one meaning have a style here, so that no chart names a colour: `low` for the clients served worst,
    `zero` for a line that others are read against, `name` for text inside a plot.
    """
    paint = THEMES[theme]
    text = {"labelFontSize": size, "titleFontSize": size, "titleFontWeight": "normal"}
    return {
        "background": "transparent",
        "font": "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', 'DejaVu Sans', Helvetica, Arial, sans-serif",
        "view": {"stroke": None},
        "axis": {
            **text, "labelColor": paint["soft"], "titleColor": paint["soft"], "domainColor": paint["faint"],
            "tickColor": paint["faint"], "gridColor": paint["line"], "labelOverlap": True, "titlePadding": 8,
        },
        "axisX": {"grid": False},
        "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
        "legend": {
            **text, "labelColor": paint["ink"], "titleColor": paint["soft"], "symbolStrokeWidth": 2, "symbolSize": 80,
            "labelLimit": 300, "titleLimit": 420, "symbolBaseFillColor": paint["soft"], "gradientLength": 120,
        },
        "title": {"color": paint["ink"], "fontSize": size, "fontWeight": 600, "anchor": "start", "offset": 8},
        "line": {"strokeWidth": 2, "strokeJoin": "round"},
        "range": {
            "category": paint["runs"],
            "diverging": [paint["runs"][1], paint["grid"], paint["runs"][0]],
            "heatmap": [paint["shade"], paint["runs"][2]],
            "ramp": [paint["shade"], paint["runs"][0]],
        },
        "style": {
            "low": {"color": paint["mark"]},
            "zero": {"color": paint["soft"], "strokeWidth": 1},
            "ring": {"color": paint["card"]},
            "name": {"color": paint["soft"], "fontSize": size},
            "edge": {"color": paint["faint"], "strokeWidth": 1},
            "other": {"color": paint["faint"]},
        },
    }  # fmt: skip


def quantity(field: str, title: str | None = None, **more: Any) -> Spec:
    """A channel for numbers. Without a title it takes that of other layers; "" is none."""
    return {"field": field, "type": "quantitative", **({} if title is None else {"title": title}), **more}


def ordinal(field: str, title: str = "", **more: Any) -> Spec:
    """A channel for names in an order."""
    return {"field": field, "type": "ordinal", "title": title, **more}


def tips(**titles: str) -> list[Spec]:
    """The fields that a tooltip shows, with their titles."""
    return [{"field": field, "title": title} for field, title in titles.items()]


def renderer(marks: int) -> Spec:
    """How a browser draws so many marks: thousands as one picture, fewer as elements of their own."""
    return {"embedOptions": {"renderer": "canvas"}} if marks > 4000 else {}


def save(spec: Spec, path: str | Path) -> Path:
    """Draw a chart into a file; its suffix names the format. The same chart is the same svg or png, byte for byte."""
    target = Path(path)
    kind = target.suffix.lstrip(".")
    if kind not in FORMATS:
        raise ValueError(unknown("format", kind, FORMATS))
    try:
        import vl_convert
    except ImportError as error:
        raise ImportError("drawing into a file needs vl-convert-python: pip install 'pfedgate[figures]'") from error
    whole = {"config": config() | {"background": "white"}, "padding": 6, **spec}
    if kind == "svg":
        content: str | bytes = vl_convert.vegalite_to_svg(whole, vl_version=VEGA_LITE)
    elif kind == "png":
        content = vl_convert.vegalite_to_png(whole, vl_version=VEGA_LITE, scale=2.3)
    else:
        content = vl_convert.vegalite_to_pdf(whole, vl_version=VEGA_LITE)
    target.write_bytes(content.encode() if isinstance(content, str) else content)
    return target
