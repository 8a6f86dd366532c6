"""The choice of blocks: exact where it claims to be, close elsewhere, never over the budget."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gating.selection import (
    KINDS,
    Floats,
    by_brute_force,
    by_milp,
    cifar10,
    cost_by_terms,
    femnist,
    flat,
    importances,
    plain,
    residual,
    value,
)

import pfedgate
from pfedgate import models
from pfedgate.gating.selection.budget import Budget, CostModel, Group, InfeasibleBudget, Selector, Term

RESNET_SIZES = [64 * w for w in range(9, 32)] + [w * w * 9 + 3 for w in (16, 23, 32, 45, 64, 77)]


@st.composite
def small_problems(draw: st.DrawFn) -> tuple[CostModel, Budget, Floats]:
    """At most 10 blocks in at most 4 groups, one to three resources, products, squares, ties, negative importances."""
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(lambda c: 1 <= sum(c) <= 10))
    groups = []
    for i, count in enumerate(counts):
        first, step = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        groups.append(Group(f"g{i}", max(1, first + step * count), max(first, 1 - step * count), step, count))
    terms = []
    for resource in draw(st.sampled_from([("params",), ("params", "flops"), ("params", "flops", "activation_bytes")])):
        for _ in range(draw(st.integers(1, 5))):
            touched = tuple(draw(st.lists(st.integers(0, len(groups) - 1), max_size=2)))
            scale = math.prod(groups[g].units for g in touched)
            terms.append(Term(resource, float(draw(st.integers(0, 9)) * scale), touched))
    share = st.integers(5, 100).map(lambda percent: percent / 100)
    budget = Budget.of({resource: draw(share) for resource in dict.fromkeys(term.resource for term in terms)})
    number = st.sampled_from([-1.0, 0.0, 0.5, 0.5 + 1e-7, 1.0]) | st.floats(-0.3, 1.0)
    importance = np.array([draw(number) for _ in range(sum(counts))])
    return CostModel(tuple(groups), tuple(terms)), budget, importance


class TestExact:
    @given(small_problems())
    def test_equals_brute_force(self, problem: tuple[CostModel, Budget, Floats]) -> None:
        costs, budget, importance = problem
        try:
            selector = Selector(costs, budget)
        except InfeasibleBudget:
            smallest, limits = cost_by_terms(costs, [0] * len(costs.groups)), budget.limits(costs)
            assert any(smallest[r] > limits[r] * (1 - 1e-12) for r in limits)
            return
        assert value(selector, importance) == pytest.approx(
            by_brute_force(costs, selector.limits, importance), abs=1e-9
        )

    @pytest.mark.parametrize("budget", [Budget(params=0.4), Budget.of(0.4)])
    def test_equals_brute_force_at_sixteen_blocks(self, budget: Budget) -> None:
        random = np.random.default_rng(3)
        costs = plain(4, random, blocks=4)
        importance = random.random(16)
        selector = Selector(costs, budget)
        assert value(selector, importance) == pytest.approx(by_brute_force(costs, selector.limits, importance))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("costs", [cifar10(), femnist()], ids=["cifar10", "femnist"])
    @pytest.mark.parametrize(
        "budget", [Budget.of(0.3), Budget(params=0.5), Budget(flops=0.3, activation_bytes=0.6)], ids=str
    )
    def test_equals_milp_on_the_papers_networks(self, costs: CostModel, budget: Budget, kind: str) -> None:
        importance = importances(kind, costs, np.random.default_rng(5))
        selector = Selector(costs, budget)
        assert selector.solver == "Frontier"
        assert value(selector, importance) == pytest.approx(by_milp(costs, selector.limits, importance), rel=1e-6)

    @pytest.mark.parametrize("kind", ["sigmoid", "tied", "nearly equal"])
    @pytest.mark.parametrize("budget", [0.3, Budget(params=0.3)], ids=["all resources", "parameters"])
    @pytest.mark.parametrize("name", ["cnn_femnist", "cnn_cifar10", "cnn_cifar100"])
    def test_equals_milp_on_the_papers_networks_as_planned(self, name: str, budget: float | Budget, kind: str) -> None:
        """The same for what `gate` really makes of them."""
        plan = pfedgate.gate(models.build(name), models.example(name), 1.0).plan
        selector = plan.selector(budget)
        importance = importances(kind, plan.costs, np.random.default_rng(7))
        best = by_milp(plan.costs, selector.limits, importance, gap=1e-5)
        assert value(selector, importance) == pytest.approx(best, rel=2e-5)

    @pytest.mark.parametrize("kind", ["sigmoid", "tied", "nearly equal"])
    def test_equals_milp_on_a_residual_network(self, kind: str) -> None:
        """ResNet-8 as it is planned: tied streams, shortcuts, batch norms; six groups once equal ones are joined."""
        model = models.build("resnet", (3, 32, 32), 10, depth=8)
        costs = pfedgate.gate(model, models.example("resnet"), 1.0).plan.costs
        importance = importances(kind, costs, np.random.default_rng(5))
        selector = Selector(costs, Budget.of(0.4))
        assert selector.solver == "Frontier"
        best = by_milp(costs, selector.limits, importance, gap=1e-4, seconds=20.0)
        assert value(selector, importance) >= best * (1 - 1e-6)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("share", [0.15, 0.5])
    @pytest.mark.parametrize(
        ("tensors", "blocks", "solver"),
        [(10, 5, "Halves"), (13, 9, "Knapsack"), (22, 3, "Knapsack"), (len(RESNET_SIZES), 7, "Knapsack")],
    )
    def test_equals_milp_with_one_resource(
        self, tensors: int, blocks: int, solver: str, share: float, kind: str
    ) -> None:
        """50 to 200 blocks of many sizes."""
        costs = flat(RESNET_SIZES[-tensors:], blocks)
        importance = importances(kind, costs, np.random.default_rng(tensors))
        selector = Selector(costs, Budget(params=share))
        assert selector.solver == solver
        assert value(selector, importance) == pytest.approx(by_milp(costs, selector.limits, importance), rel=1e-6)

    def test_papers_blocks_of_the_papers_network(self) -> None:
        """Weights and biases of the CIFAR-10 network, B = 5."""
        costs = flat([2400, 32, 51_200, 64, 192_000, 120, 10_080, 84, 840, 10], blocks=4)
        selector = Selector(costs, Budget(params=0.3))
        assert selector.solver == "Halves"
        for seed, kind in enumerate(KINDS):
            importance = importances(kind, costs, np.random.default_rng(seed))
            assert value(selector, importance) == pytest.approx(by_milp(costs, selector.limits, importance), rel=1e-6)

    def test_importance_in_proportion_to_cost(self) -> None:
        """The hard knapsacks: every filling is worth about the same."""
        random = np.random.default_rng(0)
        costs = flat(random.integers(50_000, 150_000, 14).tolist(), blocks=4)
        importance = np.repeat([g.step / 150_000 for g in costs.groups], 4) + 1e-3 * random.random(56)
        selector = Selector(costs, Budget(params=0.4))
        assert value(selector, importance) == pytest.approx(by_milp(costs, selector.limits, importance), rel=2e-5)

    @pytest.mark.parametrize(("size", "solver"), [(5, "Frontier"), (12, "Halves"), (16, "Knapsack")])
    def test_fractional_costs_of_one_resource(self, size: int, solver: str) -> None:
        """Milliseconds are no whole numbers."""
        random = np.random.default_rng(1)
        groups = tuple(Group(f"g{i}", 5, 1, 1, 4) for i in range(size))
        costs = CostModel(groups, tuple(Term("latency_ms", random.uniform(0.1, 3.0), (i,)) for i in range(size)))
        selector = Selector(costs, Budget(latency_ms=0.5 * costs.dense()["latency_ms"]))
        assert selector.solver == solver
        importance = random.random(4 * size)
        assert value(selector, importance) == pytest.approx(by_milp(costs, selector.limits, importance), rel=1e-6)


class TestLaws:
    models = (cifar10(), flat(RESNET_SIZES, 4), plain(16, np.random.default_rng(0)), residual(10))

    @pytest.mark.parametrize("costs", models, ids=["Frontier", "Knapsack", "Deep", "joined"])
    def test_deterministic_and_without_memory(self, costs: CostModel) -> None:
        random = np.random.default_rng(0)
        inputs = [importances(kind, costs, random) for kind in KINDS]
        budget = Budget.of(dict.fromkeys(costs.dense(), 0.4))
        forward, backward = Selector(costs, budget), Selector(costs, budget)
        one = [forward.select(x) for x in inputs]
        two = [backward.select(x) for x in reversed(inputs)][::-1]
        assert all((a == b).all() for a, b in zip(one, two, strict=True))
        assert len({mask.tobytes() for mask in one}) > 1

    @pytest.mark.parametrize("costs", models, ids=["Frontier", "Knapsack", "Deep", "joined"])
    def test_share_one_keeps_all_but_negative(self, costs: CostModel) -> None:
        selector = Selector(costs, Budget.of(1.0))
        importance = importances("random", costs, np.random.default_rng(0)) - 0.5
        assert (selector.select(importance) == (importance >= 0)).all()
        assert selector.reachable_masks() == 1

    @pytest.mark.parametrize("costs", models, ids=["Frontier", "Knapsack", "Deep", "joined"])
    def test_scale_of_importances_does_not_matter(self, costs: CostModel) -> None:
        selector = Selector(costs, Budget.of(dict.fromkeys(costs.dense(), 0.4)))
        importance = importances("random", costs, np.random.default_rng(0))
        for factor in (2.0**-60, 2.0**60):
            assert (selector.select(factor * importance) == selector.select(importance)).all()
        assert selector.select(importance.astype(np.float32)).sum() == selector.select(importance).sum()

    def test_ties_go_to_the_lowest_index(self) -> None:
        costs = CostModel(
            tuple(Group(f"g{i}", 4, 1, 1, 3) for i in range(2)), tuple(Term("params", 4.0, (i,)) for i in range(2))
        )
        selector = Selector(costs, Budget(params=6.0))
        assert selector.select(np.full(6, 0.5)).tolist() == [True, True, True, True, False, False]
        assert selector.select(np.array([0.1, 0.5, 0.5, 0.5, 0.5, 0.5])).tolist() == [
            False,
            True,
            True,
            True,
            True,
            False,
        ]

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_refuses_what_is_not_finite(self, bad: float) -> None:
        importance = np.full(36, 0.5)
        importance[7] = bad
        with pytest.raises(ValueError, match="importance of block 7"):
            Selector(cifar10(), Budget.of(0.3)).select(importance)

    def test_refuses_a_wrong_number(self) -> None:
        with pytest.raises(ValueError, match=r"shape \(35,\), expected one per optional block: \(36,\)"):
            Selector(cifar10(), Budget.of(0.3)).select(np.full(35, 0.5))

    def test_nothing_to_choose(self) -> None:
        costs = CostModel((Group("kept whole", 4, 4, 0, 0),), (Term("params", 8.0, (0,)),))
        selector = Selector(costs, Budget(params=1.0))
        assert selector.select(np.zeros(0)).shape == (0,)
        assert selector.reachable_masks() == 1


class TestReachable:
    @given(small_problems())
    def test_counts_optimal_masks(self, problem: tuple[CostModel, Budget, Floats]) -> None:
        """Exactly the masks that no block can be added to."""
        costs, budget, importance = problem
        try:
            selector = Selector(costs, budget)
        except InfeasibleBudget:
            return
        limits = selector.limits
        fits = {
            bits: all(cost_by_terms(costs, costs.kept(bits))[r] <= limits[r] * (1 + 1e-9) for r in limits)
            for bits in itertools.product((False, True), repeat=importance.size)
        }
        grown = [[(*b[:i], True, *b[i + 1 :]) for i in range(len(b)) if not b[i]] for b in fits]
        maximal = sum(ok and not any(fits[g] for g in more) for ok, more in zip(fits.values(), grown, strict=True))
        assert selector.reachable_masks() == maximal
        assert selector.reachable_masks(limit=2) == min(2, maximal)

    def test_one_mask_is_recognised_by_every_solver(self) -> None:
        """The first 30 groups are too large for the room, the others fit whole."""
        groups = tuple(Group(f"g{i}", 3, 1, 1, 2) for i in range(40))
        for couple in (False, True):
            terms = [Term("params", 3.0 * (1000 + i if i < 30 else 1), (i,)) for i in range(40)]
            if couple:
                terms += [Term("params", 9e5, (i, i + 1)) for i in range(29)]
            costs = CostModel(groups, tuple(terms))
            room = costs.smallest()["params"] + 30
            selector = Selector(costs, Budget(params=room))
            assert selector.solver == ("Deep" if couple else "Knapsack")
            assert selector.reachable_masks() == 1
            assert selector.select(np.ones(80)).sum() == 20
            more = 150_000 if couple else 1_500
            assert Selector(costs, Budget(params=room + more)).reachable_masks() > 1

    def test_bounded(self) -> None:
        assert Selector(cifar10(), Budget.of(0.5)).reachable_masks(1000) == 1000
        assert Selector(plain(20, np.random.default_rng(0)), Budget.of(0.5)).reachable_masks(1000) == 1000
