"""Tables of what was measured, for the pages of studies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pfedgate.engine.metrics import Record
from pfedgate.runs.progress import scaled, size
from pfedgate.studies import complexity


def line(cells: Sequence[str]) -> str:
    """A line of a table.

    >>> line(["a", "b"])
    '| a | b |'
    """
    return "| " + " | ".join(cells) + " |"


def steps(content: Record) -> list[str]:
    """Table 2: a table for every size of batch."""
    head = ["method", "time, ms", "× FedAvg", "peak memory", "× FedAvg", "FLOPs, × FedAvg"]
    lines = []
    for batch, costs_of in content["measured"].items():
        base = next(iter(costs_of.values()))
        lines += [f"## Batch {batch}", "", line(head), "|---|" + "---:|" * (len(head) - 1)]
        for name, cost in costs_of.items():
            cells = [name, f"{cost['ms']:.2f}", f"{cost['ms'] / base['ms']:.2f}", size(cost["peak"])]
            lines.append(line([*cells, *(f"{cost[key] / base[key]:.2f}" for key in ("peak", "flops"))]))
        lines.append("")
    told = "One client's round divided by its batches, with all that a client does in it; one thread, methods in turn."
    return [*lines, told, ""]


def complexities(content: Record) -> list[str]:
    """Table 5: a table for every quantity."""
    shown = {"counted": "FLOP", "inference": "FLOP", "merge_ms": "ms"}
    keys = {known.title: known.key for known in complexity.LINES}
    lines: list[str] = []
    last = ""
    for told in content["complexity"]:
        if told["quantity"] != last:
            last = told["quantity"]
            lines += ["", f"## {last[0].upper()}{last[1:]}", "", *([told["why"], ""] if told["why"] else [])]
            head = ["method", "published", "correct", "predicted, × FedAvg", "measured, × FedAvg", "measured"]
            lines += [line(head), "|---|---|---|---:|---:|---:|"]
        unit = shown.get(keys[last], "B")
        value = f"{told['measured']:.2f} ms" if unit == "ms" else scaled(told["measured"], unit)
        correct = f"**{told['correct']}**" if told["wrong"] else told["correct"]
        ratios = ["–" if told[key] is None else f"{told[key]:.2f}" for key in ("predicted", "ratio")]
        lines.append(line([told["row"], told["published"], correct, *ratios, value]))
    bold = (
        "Bold: where the published table is wrong or leaves something out. Predicted: what the correct formula comes "
    )
    return [*lines[1:], "", bold + "to, where it can be worked out without measuring.", ""]


def times(content: Record) -> list[str]:
    """Step times of the Pareto figure."""
    lines = []
    for column, costs_of in content["measured"].items():
        base = next(cost for name, cost in costs_of.items() if name == "FedAvg")
        lines += [f"## {column}: measured step", "", line(["method", "ms per batch", "× FedAvg"]), "|---|---:|---:|"]
        lines += [line([n, f"{c['ms']:.2f}", f"{c['ms'] / base['ms']:.2f}"]) for n, c in costs_of.items()]
        lines.append("")
    return lines


SHOWN: dict[str, Callable[[Record], list[str]]] = {"steps": steps, "complexity": complexities, "times": times}
