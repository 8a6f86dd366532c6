"""Reports: everything a few runs have to say, as one HTML file and as figures for papers.

from pfedgate import report
report.write(["runs/pfedgate", "runs/fedavg"], "report.html", baseline="fedavg", figures="svg")
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pfedgate.core.drawing import FORMATS
from pfedgate.core.errors import unknown
from pfedgate.report import html
from pfedgate.report.content import gather, open_runs

__all__ = ["FORMATS", "gather", "open_runs", "write"]


def write(
    paths: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    baseline: str | None = None,
    figures: str | None = None,
    title: str | None = None,
) -> list[Path]:
    """Write the report of some run folders (or comparisons of runs); the files written, the HTML first.

    out        the HTML file; by default report.html in the folder (of several: in the one they lie in)
    baseline   the run, or algorithm, that clients are compared with; by default fedavg if it is there
    figures    also "pdf", "svg" or "png" files, in a folder figures beside the HTML
    """
    if figures is not None and figures not in FORMATS:
        raise ValueError(unknown("format", figures, FORMATS))
    runs = open_runs(paths)
    target = Path(out) if out is not None else _place(paths)
    if target.is_dir():
        target = target / "report.html"
    content = gather(runs, baseline=baseline, title=title)
    written = [html.write(content, target)]
    if figures is not None:
        from pfedgate.report.cards import draw_all

        written += draw_all(content, target.parent / "figures", figures)
    return written


def _place(paths: Sequence[str | Path]) -> Path:
    first = Path(paths[0])
    return (first if len(paths) == 1 else first.parent) / "report.html"
