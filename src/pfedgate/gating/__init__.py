"""Any `nn.Module` inside a budget: blocks, a gate that weighs them, and execution that skips what the budget drops.

`gating` knows nothing of federated learning and is useful alone; `pfedgate.gate(model, example, budget=0.3)` is its
door (`wrap.gate`). A gated step, and where each part of it lives::

    batch ─► gate/       Gate: M and G, a weight and an importance for every block
             selection/  Selector: the most important blocks that fit the Budget (I*)
             slicing/    Live: which units, entries and inputs are live then
                         Sliced: the model's own layers on live units (or `masked`, the dense reference)
                         Pass: what is live and leaves, which the optimiser takes
             optimizer   LiveOptimizer: moves what was live, and the gate

Read `model.py` first (a step from top to bottom), then `wrap.py` (how a module is wrapped) and `plan.py` (blocks and
their costs). `splitters.py` says what a block is, `slicing/trace.py` how a network is read and `slicing/rules/` why
leaving units out is exact, `slicing/compact.py` writes a selection down as a plain module, `latency.py` measures.
"""

from __future__ import annotations

import importlib
from typing import Any

# Loaded when first asked for. The function `gate` is in `wrap`: `gating.gate` is the folder.
_HOMES = {
    "Block": "splitters",
    "BlockPlan": "plan",
    "Budget": "selection.budget",
    "CannotCompact": "slicing.compact",
    "GateConfig": "gate.config",
    "GatedModel": "model",
    "InfeasibleBudget": "selection.budget",
    "LiveOptimizer": "optimizer",
    "Pass": "slicing.live",
    "Piece": "splitters",
    "Selection": "slicing.live",
    "compact": "slicing.compact",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
