"""pfedgate: personalised federated learning with sparse gates.

pfedgate.gate(model, example, budget=0.3)     any module inside a budget
pfedgate.compact(gated, x)                    the part of it that one batch needs, as a small plain module
pfedgate.savings(gated, x)                    before and after, as a table: widths, FLOPs, ms, size of the file
pfedgate.run("recipes/digits.toml")           a federated run from a recipe; the command line does the same

Names are imported when they are first used, so that gating alone loads no engine, and `pfedgate --help` no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from pfedgate import algorithms, data, experiment, export, models, report, theory
    from pfedgate.experiment import load, resume, run
    from pfedgate.export import savings
    from pfedgate.gating.gate.config import GateConfig
    from pfedgate.gating.model import GatedModel
    from pfedgate.gating.optimizer import LiveOptimizer
    from pfedgate.gating.selection.budget import Budget, InfeasibleBudget
    from pfedgate.gating.slicing.compact import CannotCompact, compact
    from pfedgate.gating.slicing.live import Selection
    from pfedgate.gating.splitters import Block, Piece
    from pfedgate.gating.wrap import gate

__all__ = [
    "Block", "Budget", "CannotCompact", "GateConfig", "GatedModel", "InfeasibleBudget", "LiveOptimizer", "Piece",
    "Selection", "algorithms", "compact", "data", "experiment", "export", "gate", "load", "models", "report", "resume",
    "run", "savings", "theory",
]  # fmt: skip

# Where the names above come from; the others are rooms or modules of their own.
_HOMES = {
    "experiment": ("load", "resume", "run"),
    "export": ("savings",),
    "gating.gate.config": ("GateConfig",),
    "gating.model": ("GatedModel",),
    "gating.optimizer": ("LiveOptimizer",),
    "gating.selection.budget": ("Budget", "InfeasibleBudget"),
    "gating.slicing.compact": ("CannotCompact", "compact"),
    "gating.splitters": ("Block", "Piece"),
    "gating.slicing.live": ("Selection",),
    "gating.wrap": ("gate",),
}


def __getattr__(name: str) -> Any:
    """Import a public name or a room when it is first asked for (PEP 562)."""
    home = next((home for home, names in _HOMES.items() if name in names), name)
    try:
        module = importlib.import_module(f"pfedgate.{home}") if not name.startswith("_") else None
    except ModuleNotFoundError as error:
        if error.name != f"pfedgate.{name}":
            raise
        module = None
    if module is None:
        raise AttributeError(f"module 'pfedgate' has no attribute {name!r}")
    globals()[name] = module if home == name else getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
