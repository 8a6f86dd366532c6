"""A plan as a table: what each layer's blocks hold and cost, what is always kept, and how large the gate is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pfedgate.gating.plan import BlockPlan
    from pfedgate.gating.slicing.axes import Parts

_HEAD = ("layer", "units", "blocks", "kept", "params", "FLOPs/sample", "act. bytes")


@dataclass(frozen=True)
class Row:
    """One line of the printed plan."""

    layer: str
    units: int
    blocks: int
    always: int
    params: int
    flops: float
    activation_bytes: float

    def cells(self, known: bool = True) -> tuple[str, ...]:
        """The line as text; of blocks that are masked, not skipped, no work is known that they could save."""
        return (
            self.layer,
            str(self.units or ""),
            str(self.blocks or ""),
            str(self.always or ""),
            f"{self.params:,}",
            f"{self.flops:,.0f}" if known else "–",
            f"{self.activation_bytes:,.0f}" if known else "–",
        )


def plan_rows(plan: BlockPlan) -> list[Row]:
    """One line per layer, FLOPs and activations shared out to the blocks that write them."""
    tables = np.zeros((2, len(plan.blocks)))
    rest = [0.0, 0.0]
    for i, entries in enumerate(_entries(plan)):
        for amount, place, parts in entries:
            blocks = plan.axis_blocks(parts)
            owner = plan.owners.get(f"{place}.weight")
            if (blocks < 0).all() and owner is not None and owner.axis == 0:
                blocks = owner.block
            share = amount / len(blocks)
            np.add.at(tables[i], blocks[blocks >= 0], share)
            rest[i] += share * int((blocks < 0).sum())
    layers: dict[str, list[int]] = {}
    for number, block in enumerate(plan.blocks):
        layers.setdefault(block.name.rpartition("/")[0] or block.name, []).append(number)
    rows = []
    for layer, numbers in layers.items():
        space = next((s for s, b in plan.first_block.items() if b == numbers[0]), None)
        units = plan.cuts[space].units if space is not None else 0
        always, params = int(plan.keep[numbers].sum()), int(plan.sizes[numbers].sum())
        amounts = [float(table[numbers].sum()) for table in tables]
        rows.append(Row(layer, units, len(numbers), always, params, *amounts))
    if any(rest):
        rows.append(Row("(not in a block)", 0, 0, 0, 0, *rest))
    return rows


def _entries(plan: BlockPlan) -> tuple[list[tuple[float, str, Parts]], list[tuple[float, str, Parts]]]:
    if plan.network is None or not plan.sliceable:
        return [], []
    return (
        [(o.flops, o.place, o.written) for o in plan.network.operations],
        [(a.nbytes, a.place, a.parts) for a in plan.network.activations],
    )


def plan_text(plan: BlockPlan) -> str:
    """The table, the smallest feasible budget and the gate's size."""
    found = plan.rows
    rows = [row for row in found if row.blocks != 1 or not row.always]
    whole = [row for row in found if row.blocks == 1 and row.always]
    if whole:
        name = whole[0].layer if len(whole) == 1 else f"{len(whole)} more layers"
        fields = ("blocks", "always", "params", "flops", "activation_bytes")
        rows.append(Row(name, 0, *(sum(getattr(row, field) for row in whole) for field in fields)))
    flops, nbytes = sum(row.flops for row in rows), sum(row.activation_bytes for row in rows)
    total = Row("total", 0, len(plan.blocks), int(plan.keep.sum()), plan.size, flops, nbytes)
    table = [_HEAD, *(row.cells(plan.sliceable) for row in (*rows, total))]
    widths = [max(len(line[i]) for line in table) for i in range(len(_HEAD))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in table
    ]
    rule = "-" * len(lines[0])
    smallest, dense = plan.costs.smallest(), plan.costs.dense()
    floor = ", ".join(f"{r} {smallest[r] / dense[r]:.3f}" for r in plan.resources)
    foot = [f"smallest feasible: {floor}"]
    if plan.gate_size:
        foot.append(f"gate: {plan.gate_size:,} parameters, {plan.gate_size / plan.size:.1%} of the model")
    return "\n".join([f"{plan.how} blocks", lines[0], rule, *lines[1:-1], rule, lines[-1], *foot])
