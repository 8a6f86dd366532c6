"""Shared by all tests: one thread, fixed random numbers, reproducible property tests."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# Two cores are shared by parallel test processes; more threads only make them wait for each other.
torch.set_num_threads(1)

# "default" draws the same examples every time, so that a failure in CI is a failure here;
# HYPOTHESIS_PROFILE=thorough searches anew and longer.
settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", deadline=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Every test starts from the same global generators, whatever ran before it."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decoded or measured once is kept for this test alone, and no local copy of data is found."""
    monkeypatch.setenv("PFEDGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PFEDGATE_DATA", raising=False)
