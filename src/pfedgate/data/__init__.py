"""Federated data: named data sets, your own data, and how both are shared out among clients.

datasets     data sets by name;  sources: where they come from;  cache: their decoded arrays on disk
adopt        data as you have it;  own, table: your own arrays, folders, torch data sets and tables
synthetic, exercises   made-up data, the latter of every kind;  mixture: three sets in one;  shakespeare: by role
partition    who holds which sample;  sharing: its options, and each client's three parts
federation   clients and their data;  pool: the samples of all of them;  show: a partition as a table and a picture
"""

from pfedgate.data import exercises
from pfedgate.data.adopt import adopt
from pfedgate.data.datasets import DATASETS, EMBEDDED, load, prepare
from pfedgate.data.federation import Federation, Part
from pfedgate.data.mixture import mixture
from pfedgate.data.own import from_arrays, from_dataset, from_folder
from pfedgate.data.shakespeare import shakespeare
from pfedgate.data.sharing import Options, Sharing
from pfedgate.data.synthetic import conflicting, synthetic
from pfedgate.data.table import from_table

__all__ = [
    "DATASETS",
    "EMBEDDED",
    "Federation",
    "Options",
    "Part",
    "Sharing",
    "adopt",
    "conflicting",
    "exercises",
    "from_arrays",
    "from_dataset",
    "from_folder",
    "from_table",
    "load",
    "mixture",
    "prepare",
    "shakespeare",
    "synthetic",
]
