"""pfedgate: personalised federated learning with sparse gates.

pfedgate.gate(model, example, budget=0.3)     any module inside a budget
pfedgate.compact(gated, x)                    the part of it that one batch needs, as a small plain module
pfedgate.run("recipes/digits.toml")           a federated run from a recipe; the command line does the same

Names are imported when they are first used, so that gating alone loads no engine, and `pfedgate --help` no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pfedgate import algorithms, data, deploy, experiment, export, models, report, studies, theory, tune
    from pfedgate.experiment import resume, run
    from pfedgate.gating.gate.config import GateConfig
    from pfedgate.gating.optimizer import LiveOptimizer
    from pfedgate.gating.selection.budget import Budget, InfeasibleBudget
    from pfedgate.gating.slicing.compact import CannotCompact, compact
    from pfedgate.gating.splitters import Block, Piece
    from pfedgate.gating.wrap import GatedModel, Selection, gate

__all__ = [
    "Block",
    "Budget",
    "CannotCompact",
    "GateConfig",
    "GatedModel",
    "InfeasibleBudget",
    "LiveOptimizer",
    "Piece",
    "Selection",
    "algorithms",
    "compact",
    "data",
    "deploy",
    "experiment",
    "export",
    "gate",
    "models",
    "report",
    "resume",
    "run",
    "studies",
    "theory",
    "tune",
]

_HOMES = {
    "Block": "gating.splitters",
    "Budget": "gating.selection.budget",
    "CannotCompact": "gating.slicing.compact",
    "GateConfig": "gating.gate.config",
    "GatedModel": "gating.wrap",
    "InfeasibleBudget": "gating.selection.budget",
    "LiveOptimizer": "gating.optimizer",
    "Piece": "gating.splitters",
    "Selection": "gating.wrap",
    "compact": "gating.slicing.compact",
    "gate": "gating.wrap",
    "resume": "experiment",
    "run": "experiment",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a room that is one, when it is first asked for (PEP 562)."""
    if name in _HOMES:
        value = getattr(importlib.import_module(f"pfedgate.{_HOMES[name]}"), name)
    elif name in __all__:
        value = importlib.import_module(f"pfedgate.{name}")
    else:
        raise AttributeError(f"module 'pfedgate' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
