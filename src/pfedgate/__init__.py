"""pfedgate: personalised federated learning with sparse gates.

pfedgate.gate(model, example, budget=0.3)     any module inside a budget
pfedgate.compact(gated, x)                    the part of it that one batch needs, as a small plain module
pfedgate.run("recipes/digits.toml")           a federated run from a recipe; the command line does the same
"""

from pfedgate.experiment import resume, run
from pfedgate.gating.gate.config import GateConfig
from pfedgate.gating.model import GatedModel
from pfedgate.gating.optimizer import LiveOptimizer
from pfedgate.gating.selection.budget import Budget, InfeasibleBudget
from pfedgate.gating.slicing.compact import CannotCompact, compact
from pfedgate.gating.slicing.live import Selection
from pfedgate.gating.splitters import Block, Piece
from pfedgate.gating.wrap import gate

__version__ = "0.1.0"

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
    "compact",
    "gate",
    "resume",
    "run",
]
