"""Read what runs left in their folders, print it and draw it.

python examples/read_results.py runs/compare-digits        # a run or a comparison; without one, a small one is made
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pfedgate
from pfedgate import report
from pfedgate.core.drawing import save
from pfedgate.report import cards, charts
from pfedgate.runs import folder as runfolder
from pfedgate.runs.folder import Run


def small_runs(folder: Path) -> list[Run]:
    """Two short runs to look at."""
    runs = []
    for algorithm in ("pfedgate", "fedavg"):
        pfedgate.run(algorithm=algorithm, train={"rounds": 6}, evaluate={"every": 2}, out=folder / algorithm)
        runs.append(runfolder.load(folder / algorithm))
    return runs


def tell(run: Run) -> None:
    summary = run.summary
    print(f"\n{run.name}: {run.recipe.algorithm.name} on {run.recipe.data.name}, {summary['rounds']} rounds")
    print(f"  accuracy {summary['accuracy']:.3f}, bottom decile {summary['bottom_decile']:.3f}")
    print(f"  uploaded {summary['bytes_up'] / 1e6:.2f} MB, training took {run.seconds:.1f} s")
    worst = min((row for row in run.clients if row["point"] == "after_broadcast"), key=lambda row: row["accuracy"])
    print(f"  worst client: {worst['client']} with {worst['accuracy']:.3f}")
    rounds = [record for record in run.participation if record["client"] == worst["client"]]
    print(f"  it took part in {len(rounds)} rounds and sent {sum(r['bytes_up'] for r in rounds) / 1e6:.2f} MB")


def draw(runs: Sequence[Run], path: Path) -> None:
    """Two of a report's charts side by side; a chart is a Vega-Lite specification, a plain dictionary."""
    content = report.gather(runs)
    panels = [charts.curves(content), charts.sorted_clients(content)]
    save(cards.still({"hconcat": [panel for panel in panels if panel]}), path)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="a run or a comparison")
    parser.add_argument("--plot", type=Path, default=Path("results.png"))
    chosen = parser.parse_args(given)
    runs = runfolder.load_all(chosen.folder) if chosen.folder else small_runs(Path("runs/example"))
    for run in runs:
        tell(run)
    draw(runs, chosen.plot)
    print(f"\ndrawn in {chosen.plot}")


if __name__ == "__main__":
    main()
