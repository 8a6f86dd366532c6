"""Budgets and cost models: what is accepted, what is refused, and what the messages say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gating.selection import cifar10, cost_by_terms, femnist, plain, residual

from pfedgate.gating.selection.budget import Budget, CostModel, Group, InfeasibleBudget, Selector, Term


def one(units: int = 10, first: int = 1, count: int = 3) -> CostModel:
    group = Group("hidden", units, first, (units - first) // count, count)
    return CostModel((group,), (Term("params", 20.0 * units, (0,)), Term("params", 10.0)))


class TestBudget:
    def test_number_binds_params_flops_and_activations(self) -> None:
        assert Budget.of(0.3) == Budget(params=0.3, flops=0.3, activation_bytes=0.3)
        assert Budget.of(0.3, resources=("params",)) == Budget.of(0.3, resources="params") == Budget(params=0.3)

    def test_mapping_and_budget_pass_through(self) -> None:
        budget = Budget(flops=0.5, latency_ms=12.0)
        assert Budget.of(budget) is budget
        assert Budget.of({"flops": 0.5, "latency_ms": 12.0}) == budget
        assert Budget.of({"flops": 0.5, "params": None}).bound() == {"flops": 0.5}

    @pytest.mark.parametrize("value", [0, 0.0, -0.5, math.nan, math.inf, -math.inf])
    def test_refuses_what_is_no_amount(self, value: float) -> None:
        with pytest.raises(ValueError, match="params must be a share in"):
            Budget(params=value)
        with pytest.raises(ValueError, match=r"share|params"):
            Budget.of(value)
        with pytest.raises(ValueError, match="milliseconds"):
            Budget(latency_ms=value)

    @pytest.mark.parametrize("value", [True, False, "0.3", np.bool_(True), [0.3]])
    def test_refuses_what_is_no_number(self, value: object) -> None:
        with pytest.raises(TypeError, match="must be a number"):
            Budget(params=value)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="must be a number"):
            Budget.of(value)  # type: ignore[arg-type]

    def test_plain_number_above_one_asks_for_a_name(self) -> None:
        with pytest.raises(ValueError, match=r"Budget\(params=5000\)"):
            Budget.of(5000)

    def test_unknown_resource_suggests_the_nearest(self) -> None:
        with pytest.raises(ValueError, match=r"'param'.*did you mean 'params'"):
            Budget.of({"param": 0.3})
        with pytest.raises(ValueError, match="did you mean 'latency_ms'"):
            Budget.of({"latency": 3.0})
        with pytest.raises(ValueError, match="did you mean 'flops'"):
            Budget.of(0.3, resources=("flop",))

    def test_latency_has_no_share(self) -> None:
        with pytest.raises(ValueError, match=r"Budget\(latency_ms"):
            Budget.of(0.3, resources=("latency_ms",))
        with pytest.raises(ValueError, match="at least one"):
            Budget.of(0.3, resources=())
        costs = CostModel(one().groups, (*one().terms, Term("latency_ms", 9.0, (0,))))
        assert Budget(latency_ms=0.5).limits(costs) == {"latency_ms": 0.5}
        with pytest.raises(ValueError, match="no latency terms"):
            Selector(one(), Budget(latency_ms=5.0))

    def test_above_one_is_absolute(self) -> None:
        assert Budget(params=100.0).limits(one()) == {"params": 100.0}
        assert Budget(params=1).limits(one()) == {"params": one().dense()["params"]}

    @given(st.integers(1, 400), st.integers(1, 400))
    def test_share_counts_as_the_division_does(self, part: int, whole: int) -> None:
        """0.29 * 100 < 29 in floating point, yet 29 of 100 is a density of 0.29."""
        part = min(part, whole)
        costs = CostModel((), (Term("params", float(whole)),))
        limit = Budget(params=part / whole).limits(costs)["params"]
        assert part <= limit < part + 1e-6


class TestInfeasible:
    def test_names_resource_asked_and_smallest(self) -> None:
        with pytest.raises(InfeasibleBudget) as error:
            Selector(one(), Budget(params=0.1))
        text = str(error.value)
        assert "params: asked 0.1 of the dense model (21), smallest feasible 0.1429 (30)" in text
        assert "Raise the budget" in text
        assert error.value.smallest == {"params": 30.0}

    def test_names_all_violated_resources_only(self) -> None:
        with pytest.raises(InfeasibleBudget) as error:
            Selector(cifar10(), Budget(params=0.0001, flops=0.001, activation_bytes=0.9))
        assert "params" in str(error.value)
        assert "flops" in str(error.value)
        assert "activation" not in str(error.value)

    def test_latency_in_milliseconds(self) -> None:
        costs = CostModel(one().groups, (*one().terms, Term("latency_ms", 9.0, (0,)), Term("latency_ms", 1.0)))
        with pytest.raises(InfeasibleBudget, match=r"latency_ms: asked 0.5 ms, smallest feasible 1.9 ms"):
            Selector(costs, Budget(latency_ms=0.5))

    @given(st.integers(3, 2000), st.integers(1, 9))
    def test_smallest_value_in_the_message_is_feasible(self, units: int, count: int) -> None:
        count = min(count, units - 1)
        step = (units - 1) // count
        costs = CostModel((Group("g", units, units - step * count, step, count),), (Term("params", 7.0 * units, (0,)),))
        with pytest.raises(InfeasibleBudget) as error:
            Selector(costs, Budget(params=1e-9))
        printed = float(str(error.value).split("smallest feasible ")[1].split(" ")[0])
        Selector(costs, Budget(params=printed))
        if error.value.smallest["params"] > 1:
            Selector(costs, Budget(params=error.value.smallest["params"]))


class TestCostModel:
    @given(st.data())
    def test_cost_is_the_sum_of_its_terms(self, data: st.DataObject) -> None:
        costs = data.draw(st.sampled_from([cifar10(), femnist(), plain(6, np.random.default_rng(0)), residual(2)]))
        kept = [data.draw(st.integers(0, group.count)) for group in costs.groups]
        assert costs.cost(kept) == pytest.approx(cost_by_terms(costs, kept), rel=1e-12)

    def test_dense_counts_of_the_papers_networks(self) -> None:
        assert cifar10().dense()["params"] == 256_830
        assert femnist().dense()["params"] == 2_278_334

    def test_squared_share_of_tied_layers(self) -> None:
        costs = CostModel((Group("stream", 4, 1, 1, 3),), (Term("params", 16.0, (0, 0)),))
        assert costs.cost([1]) == {"params": 4.0}

    def test_kept_counts_a_mask(self) -> None:
        costs = CostModel((Group("a", 3, 1, 1, 2), Group("b", 3, 0, 1, 3)), ())
        assert costs.kept([True, False, True, True, False]) == (1, 2)
        with pytest.raises(ValueError, match="mask of 4 for 5"):
            costs.kept([True] * 4)

    def test_refuses_nonsense(self) -> None:
        with pytest.raises(ValueError, match="put the remainder into `first`"):
            Group("g", units=10, first=1, step=2, count=4)
        with pytest.raises(ValueError, match="positive"):
            Group("g", units=0, first=0, step=1, count=0)
        with pytest.raises(ValueError, match="unknown resource 'energy'"):
            Term("energy", 1.0)
        with pytest.raises(ValueError, match="not negative"):
            Term("params", -1.0)
        with pytest.raises(ValueError, match="at most two groups"):
            Term("params", 1.0, (0, 1, 2))
        with pytest.raises(ValueError, match="names group 1, but there are 1"):
            CostModel((Group("g", 1, 1, 0, 0),), (Term("params", 1.0, (1,)),))
        with pytest.raises(ValueError, match="asked to keep 4"):
            one().cost([4])
        with pytest.raises(ValueError, match="2 counts for 1 groups"):
            one().cost([1, 1])
