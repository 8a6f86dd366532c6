"""The paper's tables and figures, each one command: `pfedgate reproduce table1 --scale small`.

    names()                                              table1, table2, …, figure-gates, pareto
    reproduce(["table3"], scale="tiny", out="runs/x")    runs what is missing, writes pages and figures

`paper` declares them, `scales` says how large they are run, `schedule` runs cells, `page` and `figures` write results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedgate.studies import scales, schedule
from pfedgate.studies.declare import Study
from pfedgate.studies.paper import STUDIES, get, meant, names
from pfedgate.studies.schedule import Cells, Order

__all__ = ["STUDIES", "Cells", "Order", "Study", "get", "meant", "names", "reproduce"]


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
    any_code: bool = False,
    only_pages: bool = False,
    watch: Callable[[Cells, str | None], None] = lambda host, told: None,
) -> list[Path]:
    """Run what is missing of some studies and write their pages; returns the files written.

    studies   names, or "all": those that are meant for the scale
    out       cells are kept here and shared by all studies; results go to `results`, by default out/results
    worlds    data sets of the scale, instead of its usual ones
    part      only these cells: "1/4" (of four machines, the first), or a pattern such as "cifar10*fedavg"
    over      settings that go over every cell
    any_code  take cells that other code has finished
    only_pages  run nothing: pages of what is there, which say how much is missing
    """
    size = scales.get(scale)
    chosen = meant([get(name) for name in (names() if "all" in studies else dict.fromkeys(studies))], studies, size)
    order = Order(
        size, Path(out) / scale, tuple(worlds), tuple(over),
        None if recipes is None else Path(recipes), any_code, part, workers,
    )  # fmt: skip
    from pfedgate.studies import page  # measuring loads torch's profiler: not in every worker

    host = Cells(order) if only_pages else schedule.run(chosen, order, watch)
    folder = Path(results) if results is not None else order.out / "results"
    written = [path for study in chosen for path in page.write(study, order, folder)] if not part else []
    if host.failed:
        label, failed = next(iter(host.failed.items()))
        raise RuntimeError(f"{len(host.failed)} of {host.total} cells failed; {label}: {failed.error}\n{failed.trace}")
    return written
