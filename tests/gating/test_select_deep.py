"""The choice of blocks in deep networks: within half a percent of a MILP solver's optimum, never over the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gating.selection import (
    KINDS,
    by_milp,
    concatenated,
    importances,
    independent,
    plain,
    residual,
    value,
)

from pfedgate.gating.selection.budget import Budget, CostModel, Selector, Term


def deep_networks() -> dict[str, CostModel]:
    random = np.random.default_rng(11)
    return {
        "plain 20": plain(20, random),
        "plain 50": plain(50, random),
        "residual 39": residual(12),
        "residual with shortcuts 21": residual(6, shortcut=True),
        "concatenated 14": concatenated(14),
        "independent 20, two resources": independent(20, 2, random),
        "independent 50, three resources": independent(50, 3, random),
    }


# MILP solvers take a second on small ones and long on nearly equal importances in 50 plain layers.
QUICK = (
    [("plain 20", kind) for kind in KINDS]
    + [(name, kind) for name in deep_networks() if "plain" not in name for kind in ("sigmoid", "nearly equal")]
    + [("plain 50", "skewed"), ("plain 50", "equal")]
)


class TestDeep:
    @pytest.mark.parametrize(("name", "kind"), QUICK)
    def test_within_half_a_percent_of_milp(self, name: str, kind: str) -> None:
        """All resources at once, and at their exact cost with products, not at a separable bound of it."""
        self.check(name, 0.4, kind)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("share", [0.25, 0.35, 0.5])
    @pytest.mark.parametrize("name", list(deep_networks()))
    def test_within_half_a_percent_of_milp_everywhere(self, name: str, share: float, kind: str) -> None:
        self.check(name, share, kind)

    def check(self, name: str, share: float, kind: str) -> None:
        costs = deep_networks()[name]
        selector = Selector(costs, Budget.of(dict.fromkeys(costs.dense(), share)))
        assert selector.solver == "Deep"
        importance = importances(kind, costs, np.random.default_rng(2))
        best = by_milp(costs, selector.limits, importance, gap=1e-3, seconds=20.0)
        assert value(selector, importance) >= 0.995 * best

    @pytest.mark.parametrize("resource", ["params", "flops"])
    @pytest.mark.parametrize("kind", ["sigmoid", "nearly equal"])
    def test_one_resource_with_products(self, resource: str, kind: str) -> None:
        """Far from convex: the optimum alternates wide and narrow layers."""
        costs = deep_networks()["plain 20"]
        selector = Selector(costs, Budget.of({resource: 0.3}))
        importance = importances(kind, costs, np.random.default_rng(4))
        best = by_milp(costs, selector.limits, importance, gap=1e-3, seconds=20.0)
        assert value(selector, importance) >= 0.995 * best

    @given(st.integers(0, 10**6), st.sampled_from(KINDS), st.floats(0.0, 1.0), st.sampled_from([6, 9, 16, 30]))
    def test_never_over(self, seed: int, kind: str, share: float, depth: int) -> None:
        random = np.random.default_rng(seed)
        costs = plain(depth, random)
        smallest, dense = costs.smallest(), costs.dense()
        selector = Selector(costs, Budget.of({r: smallest[r] + share * (dense[r] - smallest[r]) for r in dense}))
        importance = importances(kind, costs, random) - random.choice([0.0, 0.4])
        assert value(selector, importance) >= 0

    def test_fractional_latency_beside_other_resources(self) -> None:
        random = np.random.default_rng(6)
        costs = plain(12, random)
        latency = [Term("latency_ms", t.coef / 7e7, t.groups) for t in costs.terms if t.resource == "flops"]
        costs = CostModel(costs.groups, (*costs.terms, Term("latency_ms", 0.3), *latency))
        selector = Selector(
            costs, Budget(params=0.5, activation_bytes=0.5, latency_ms=0.5 * costs.dense()["latency_ms"])
        )
        importance = importances("sigmoid", costs, random)
        best = by_milp(costs, selector.limits, importance, gap=1e-3, seconds=20.0)
        assert value(selector, importance) >= 0.995 * best

    def test_everything_negative_or_zero(self) -> None:
        selector = Selector(deep_networks()["plain 20"], Budget.of(0.3))
        assert not selector.select(np.full(200, -1.0)).any()
        assert value(selector, np.zeros(200)) == 0.0
        assert selector.select(np.zeros(200)).any()
