"""Latency terms from measurements: the fit, the promise at measured points, the cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.support.selection import cifar10, importances

from pfedgate.gating.latency import profile
from pfedgate.gating.selection.budget import Budget, CostModel, Selector


def shares(costs: CostModel, kept: Sequence[int]) -> tuple[float, float]:
    cost, dense = costs.cost(kept), costs.dense()
    return cost["flops"] / dense["flops"], cost["activation_bytes"] / dense["activation_bytes"]


class Device:
    """Computes, moves memory and has an overhead; remembers what it was asked and may be noisy."""

    def __init__(self, costs: CostModel, noise: float = 0.0) -> None:
        self.costs, self.noise, self.asked = costs, noise, dict[tuple[int, ...], float]()
        self.random = np.random.default_rng(0)

    def __call__(self, kept: Sequence[int] | None) -> float:
        if kept is None:  # the dense model, without a gate
            return 9.5
        flops, activations = shares(self.costs, kept)
        exact = 1.5 + 6.0 * flops + 2.5 * activations
        self.asked[tuple(kept)] = exact * (1 + self.noise * self.random.random())
        return self.asked[tuple(kept)]


def with_latency(costs: CostModel, measure: Device, folder: Path, key: str = "device") -> CostModel:
    return CostModel(costs.groups, (*costs.terms, *profile(measure, costs, key, folder)[0]))


def test_recovers_an_exact_law(tmp_path: Path) -> None:
    costs = cifar10()
    device = Device(costs)
    model = with_latency(costs, device, tmp_path)
    for kept in ([0, 9, 0, 9], [5, 2, 1, 0], [9, 9, 9, 9]):
        assert model.cost(kept)["latency_ms"] == pytest.approx(device(kept), rel=1e-6)


def test_never_below_a_measured_point(tmp_path: Path) -> None:
    costs = cifar10()
    device = Device(costs, noise=0.3)
    model = with_latency(costs, device, tmp_path)
    assert len(device.asked) >= 4
    for kept, milliseconds in device.asked.items():
        assert model.cost(kept)["latency_ms"] >= milliseconds * (1 - 1e-12)
    dense = [group.count for group in costs.groups]
    assert tuple(dense) in device.asked
    assert tuple(0 for _ in dense) in device.asked


def test_coefficients_are_not_negative(tmp_path: Path) -> None:
    """A device that is slower when it does less gets a constant, not a negative price."""
    costs = cifar10()
    terms, _ = profile(lambda kept: 5.0 - shares(costs, kept)[0] if kept else 4.5, costs, "odd", tmp_path)
    assert [term.groups for term in terms] == [()]
    assert terms[0].coef == pytest.approx(5.0, rel=0.05)


def test_budget_in_milliseconds_holds(tmp_path: Path) -> None:
    costs = cifar10()
    device = Device(costs)
    model = with_latency(costs, device, tmp_path)
    selector = Selector(model, Budget(latency_ms=5.0))
    mask = selector.select(importances("random", costs, np.random.default_rng(0)))
    assert 4.0 < device(costs.kept(mask)) <= 5.0 * (1 + 1e-9)


def test_cached_per_key(tmp_path: Path) -> None:
    costs = cifar10()
    first = profile(Device(costs), costs, "a", tmp_path)

    def fails(kept: Sequence[int] | None) -> float:
        raise AssertionError("measured again")

    assert profile(fails, costs, "a", tmp_path) == first
    with pytest.raises(AssertionError, match="measured again"):
        profile(fails, costs, "b", tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"key": "a"}', '{"key": "a", "milliseconds": [1, -1, 0, 1]}'])
def test_broken_cache_is_measured_anew(tmp_path: Path, broken: str) -> None:
    costs = cifar10()
    profile(Device(costs), costs, "a", tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(broken)
    device = Device(costs)
    profile(device, costs, "a", tmp_path)
    assert device.asked
    assert json.loads(path.read_text())["key"] == "a"


def test_folder_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDGATE_CACHE", str(tmp_path / "deep" / "folder"))
    profile(Device(cifar10()), cifar10(), "a")
    assert len(list((tmp_path / "deep" / "folder").iterdir())) == 1
    monkeypatch.delenv("PFEDGATE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    profile(Device(cifar10()), cifar10(), "a")
    assert len(list((tmp_path / ".cache" / "pfedgate" / "latency").iterdir())) == 1


@pytest.mark.parametrize("milliseconds", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_impossible_times(tmp_path: Path, milliseconds: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        profile(lambda kept: milliseconds, cifar10(), "a", tmp_path)
    assert not list(tmp_path.iterdir())
