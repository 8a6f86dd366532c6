"""Federated data: named data sets, your own data, and how both are shared out among clients."""

from pfedgate.data.federation import Federation, Part
from pfedgate.data.options import Options, Sharing
from pfedgate.data.own import from_arrays, from_dataset, from_folder, from_table
from pfedgate.data.registry import DATASETS, load, prepare
from pfedgate.data.synthetic import conflicting, synthetic

__all__ = [
    "DATASETS",
    "Federation",
    "Options",
    "Part",
    "Sharing",
    "conflicting",
    "from_arrays",
    "from_dataset",
    "from_folder",
    "from_table",
    "load",
    "prepare",
    "synthetic",
]
