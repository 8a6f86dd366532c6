"""The paper's tables and figures, each one command: `pfedgate reproduce table1 --scale small`.

    names()                                              table1, table2, …, figure-gates, pareto
    reproduce(["table3"], scale="tiny", out="runs/x")    runs missing cells, writes pages and figures

`declare` says what a study is, and how large it is run; `paper` declares all of them. `sweep` runs `cells`, `outcome`
and `bench` have the numbers of them, `page` and `figures` write results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedgate.studies import sweep
from pfedgate.studies.declare import SCALES, Study, scale_of
from pfedgate.studies.paper import APART, STUDIES, get, names, select
from pfedgate.studies.sweep import Campaign, Sweep

__all__ = [
    "APART",
    "SCALES",
    "STUDIES",
    "Campaign",
    "Study",
    "Sweep",
    "get",
    "names",
    "reproduce",
    "scale_of",
    "select",
]


def reproduce(
    studies: Sequence[str],
    *,
    scale: str = "tiny",
    out: str | Path = "runs/reproduce",
    results: str | Path | None = None,
    worlds: Sequence[str] = (),
    part: str = "",
    workers: int = 1,
    over: Sequence[Mapping[str, Any]] = (),
    recipes: str | Path | None = None,
    only_pages: bool = False,
    on: str = "",
    watch: Callable[[Sweep, str | None], None] = lambda sweep, label: None,
) -> list[Path]:
    """Run missing cells of some studies and write their pages; returns the files written.

    studies   names, or "all": those that are meant for the scale
    out       cells go here and are shared by all studies; results go to `results`, by default out/results
    worlds    data sets of the scale, instead of its usual ones
    part      only these cells: "1/4" (of four machines, the first), or a pattern such as "cifar10*fedavg"
    over      settings that go over every cell
    only_pages  run nothing: pages of the finished cells, which say how many are missing
    on        "ray": on the nodes of a Ray cluster instead of `workers` processes here
    """
    folder, size = None if recipes is None else Path(recipes), scale_of(scale)
    declared = select(studies, size)
    campaign = Campaign(size, Path(out) / scale, tuple(worlds), tuple(over), folder, part, workers, on)
    from pfedgate.studies import page  # measuring loads torch's profiler: not in every worker

    cells = Sweep(campaign) if only_pages else sweep.run(declared, campaign, watch)
    target = Path(results) if results is not None else campaign.out / "results"
    written = [] if part else [path for study in declared for path in page.write(study, campaign, target)]
    cells.check()
    return written
