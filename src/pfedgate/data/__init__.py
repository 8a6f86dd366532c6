"""Federated data: named data sets, your own data, and how both are shared out among clients."""

from pfedgate.data.federation import Federation, Part
from pfedgate.data.registry import DATASETS, Options, load, prepare

__all__ = ["DATASETS", "Federation", "Options", "Part", "load", "prepare"]
