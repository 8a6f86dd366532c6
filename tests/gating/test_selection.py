"""Laws of the selection: within the budget always, exact where it says so, close to a MILP solver elsewhere."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.selection import (
    KINDS,
    Floats,
    by_brute_force,
    cifar10,
    concatenated,
    cost_by_terms,
    femnist,
    flat,
    importances,
    independent,
    milp_range,
    plain,
    planned,
    residual,
    value,
)

from pfedgate.gating.selection.budget import Budget, CostModel, Group, InfeasibleBudget, Selector, Term

TENSORS = [64 * w for w in range(9, 32)] + [w * w * 9 + 3 for w in (16, 23, 32, 45, 64, 77)]
CIFAR10_TENSORS = [2400, 32, 51_200, 64, 192_000, 120, 10_080, 84, 840, 10]


@cache
def costs_of_network(name: str) -> CostModel:
    random = np.random.default_rng(11)
    return {
        "cifar10": cifar10,
        "femnist": femnist,
        "flat": lambda: flat(TENSORS, 4),
        "plain 20": lambda: plain(20, random),
        "plain 50": lambda: plain(50, random),
        "residual 39": lambda: residual(12),
        "residual with shortcuts 21": lambda: residual(6, shortcut=True),
        "concatenated 14": lambda: concatenated(14),
        "independent 20": lambda: independent(20, 2, random),
        "independent 50": lambda: independent(50, 3, random),
        "ResNet-8": lambda: planned("resnet", depth=8),
        "ResNet-20": lambda: planned("resnet", depth=20),
        "ResNet-50": lambda: planned("resnet", depth=50),
        "ViT-12": lambda: planned("vit", depth=12),
    }.get(name, lambda: planned(name))()


SOLVERS = {"cifar10": "Frontier", "flat": "Programme", "plain 20": "Prices", "ResNet-20": "Prices"}


def same_share(costs: CostModel, share: float) -> Budget:
    return Budget.of(dict.fromkeys(costs.dense().keys() - {"activation_bytes"}, share))


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
    return CostModel(tuple(groups), tuple(terms)), budget, np.array([draw(number) for _ in range(sum(counts))])


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
        best = by_brute_force(costs, selector.limits, importance)
        assert value(selector, importance) == pytest.approx(best, abs=1e-9)

    @given(small_problems())
    def test_other_solvers_on_small_problems(self, problem: tuple[CostModel, Budget, Floats]) -> None:
        """Squares, free groups, no room at all: `Programme` stays exact, `Prices` within the budget."""
        costs, budget, importance = problem
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pfedgate.gating.selection.exact.LARGEST_GRID", 0)
            try:
                selector = Selector(costs, budget)
            except InfeasibleBudget:
                assume(False)
        worth = value(selector, importance)
        if selector.solver != "Prices":
            assert worth == pytest.approx(by_brute_force(costs, selector.limits, importance), abs=1e-9)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", ["cifar10", "femnist"])
    @pytest.mark.parametrize(
        "budget", [Budget.of(0.3), Budget(params=0.5), Budget(flops=0.3, activation_bytes=0.6)], ids=str
    )
    def test_few_groups_equal_milp(self, name: str, budget: Budget, kind: str) -> None:
        self.check(costs_of_network(name), budget, kind, "Frontier")

    @pytest.mark.parametrize("kind", ["sigmoid", "tied", "nearly equal"])
    @pytest.mark.parametrize("budget", [Budget.of(0.3), Budget(params=0.3)], ids=["all resources", "parameters"])
    @pytest.mark.parametrize("name", ["cnn_femnist", "cnn_cifar10", "cnn_cifar100", "ResNet-8", "ViT-12"])
    def test_planned_networks_equal_milp(self, name: str, budget: Budget, kind: str) -> None:
        """What `gate` makes of them; equal layers of the last two are joined to six and three groups."""
        self.check(costs_of_network(name), budget, kind, "Frontier", rel=1e-3 if name == "ViT-12" else 2e-5)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("share", [0.15, 0.5])
    @pytest.mark.parametrize(("tensors", "blocks"), [(10, 5), (13, 9), (22, 3), (24, 4), (49, 4), (81, 4)])
    def test_one_resource_equals_milp(self, tensors: int, blocks: int, share: float, kind: str) -> None:
        """The paper's flat blocks: 50 to 300 of many sizes."""
        costs = flat((TENSORS * 3)[-tensors:] if tensors < 81 else range(100, 100_000, 1234), blocks)
        self.check(costs, Budget(params=share), kind, "Programme")

    @pytest.mark.parametrize("kind", KINDS)
    def test_papers_blocks_of_the_papers_network_equal_milp(self, kind: str) -> None:
        self.check(flat(CIFAR10_TENSORS, blocks=4), Budget(params=0.3), kind, "Programme")

    def test_importance_in_proportion_to_cost(self) -> None:
        """The hard knapsacks: every filling is worth about the same."""
        random = np.random.default_rng(0)
        costs = flat(random.integers(50_000, 150_000, 14).tolist(), blocks=4)
        importance = np.repeat([g.step / 150_000 for g in costs.groups], 4) + 1e-3 * random.random(56)
        selector = Selector(costs, Budget(params=0.4))
        assert value(selector, importance) >= milp_range(costs, selector.limits, importance, 0.0, 60.0)[0] * (1 - 1e-9)

    @pytest.mark.parametrize(("size", "solver"), [(5, "Frontier"), (12, "Programme"), (16, "Programme")])
    def test_fractional_costs(self, size: int, solver: str) -> None:
        """Milliseconds are no whole numbers."""
        random = np.random.default_rng(1)
        groups = tuple(Group(f"g{i}", 5, 1, 1, 4) for i in range(size))
        costs = CostModel(groups, tuple(Term("latency_ms", random.uniform(0.1, 3.0), (i,)) for i in range(size)))
        self.check(costs, Budget(latency_ms=0.5 * costs.dense()["latency_ms"]), "random", solver)

    def check(self, costs: CostModel, budget: Budget, kind: str, solver: str, rel: float = 1e-6) -> None:
        importance = importances(kind, costs, np.random.default_rng(7))
        selector = Selector(costs, budget)
        assert selector.solver == solver
        best, _ = milp_range(costs, selector.limits, importance, min(rel / 2, 1e-5) if rel > 1e-6 else 0.0, 20.0)
        assert value(selector, importance) >= best * (1 - rel)


class TestPrices:
    @pytest.mark.parametrize("kind", ["sigmoid", "skewed", "nearly equal"])
    @pytest.mark.parametrize(
        "name",
        ["ResNet-20", "ResNet-50", "plain 20", "plain 50", "residual 39", "residual with shortcuts 21",
         "concatenated 14", "independent 20", "independent 50"],
    )  # fmt: skip
    def test_within_half_a_percent_of_milp(self, name: str, kind: str) -> None:
        """All resources at once, and at their exact cost with products, not at a separable bound of it."""
        self.check(name, same_share(costs_of_network(name), 0.4), kind)

    @pytest.mark.parametrize("resource", ["params", "flops"])
    @pytest.mark.parametrize("kind", ["sigmoid", "nearly equal"])
    @pytest.mark.parametrize("name", ["ResNet-20", "plain 20"])
    def test_one_resource_with_products(self, name: str, resource: str, kind: str) -> None:
        """Far from convex: the optimum alternates wide and narrow layers."""
        self.check(name, Budget.of({resource: 0.3}), kind)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("share", [0.25, 0.35, 0.5])
    @pytest.mark.parametrize("name", ["ResNet-20", "ResNet-50", "residual with shortcuts 21", "independent 20"])
    def test_within_half_a_percent_of_milp_everywhere(self, name: str, share: float, kind: str) -> None:
        self.check(name, same_share(costs_of_network(name), share), kind)

    def test_fractional_latency_beside_other_resources(self) -> None:
        random = np.random.default_rng(6)
        costs = plain(12, random)
        latency = [Term("latency_ms", t.coef / 7e7, t.groups) for t in costs.terms if t.resource == "flops"]
        costs = CostModel(costs.groups, (*costs.terms, Term("latency_ms", 0.3), *latency))
        budget = Budget(params=0.5, activation_bytes=0.5, latency_ms=0.5 * costs.dense()["latency_ms"])
        selector, importance = Selector(costs, budget), importances("sigmoid", costs, random)
        best, _ = milp_range(costs, selector.limits, importance, 1e-3, 20.0)
        assert value(selector, importance) >= 0.995 * best

    def check(self, name: str, budget: Budget, kind: str) -> None:
        costs = costs_of_network(name)
        selector, importance = Selector(costs, budget), importances(kind, costs, np.random.default_rng(2))
        assert selector.solver == "Prices"
        best, _ = milp_range(costs, selector.limits, importance, 1e-3, 10.0)
        assert value(selector, importance) >= 0.995 * best


class TestLaws:
    @given(
        st.integers(0, 10**6),
        st.sampled_from(KINDS),
        st.floats(0.0, 1.0),
        st.sampled_from(["plain", "residual", "concatenated", "independent", "flat", "latency"]),
    )
    def test_never_over_and_full(self, seed: int, kind: str, share: float, shape: str) -> None:
        """No limit is exceeded, no block of negative importance stays, and no further block would fit."""
        random = np.random.default_rng(seed)
        costs = {
            "plain": lambda: plain(int(random.integers(5, 30)), random),
            "residual": lambda: residual(3),
            "concatenated": lambda: concatenated(7),
            "independent": lambda: independent(8, 3, random),
            "flat": lambda: flat(random.integers(10, 10**6, 20).tolist()),
            "latency": lambda: plain(8, random),
        }[shape]()
        if shape == "latency":
            costs = CostModel(costs.groups, tuple(Term("latency_ms", t.coef / 7e5, t.groups) for t in costs.terms))
        smallest, dense = costs.smallest(), costs.dense()
        limits = {r: smallest[r] + share * (dense[r] - smallest[r]) for r in dense}
        selector = Selector(costs, Budget.of({r: max(limit, 1.5) for r, limit in limits.items()}))
        importance = importances(kind, costs, random)
        assert value(selector, importance - random.choice([0.0, 0.4])) >= 0
        counts = np.array(costs.kept(selector.select(importance)))
        for g, group in enumerate(costs.groups):
            more = costs.cost((counts + (np.arange(len(counts)) == g)).tolist()) if counts[g] < group.count else {}
            assert not more or any(more[r] > limit * (1 - 1e-9) for r, limit in selector.limits.items())

    @given(small_problems(), st.floats(1.0, 2.0))
    def test_more_budget_is_never_worth_less(self, problem: tuple[CostModel, Budget, Floats], factor: float) -> None:
        costs, budget, importance = problem
        more = Budget.of({r: min(1.0, share * factor) for r, share in budget.bound().items()})
        try:
            selector = Selector(costs, budget)
        except InfeasibleBudget:
            assume(False)
        assert value(Selector(costs, more), importance) >= value(selector, importance) - 1e-9

    @pytest.mark.parametrize("name", ["cifar10", "flat", "plain 20", "ResNet-20", "independent 50"])
    def test_more_budget_is_worth_more_on_networks(self, name: str) -> None:
        costs = costs_of_network(name)
        importance = importances("sigmoid", costs, np.random.default_rng(3))
        worth = [value(Selector(costs, same_share(costs, s)), importance) for s in (0.2, 0.3, 0.4, 0.6, 0.8, 1.0)]
        assert all(less < more for less, more in itertools.pairwise(worth))

    @pytest.mark.parametrize("shape", ["flat", "chain"])
    def test_equal_groups_may_be_swapped(self, shape: str) -> None:
        """Groups of equal cost are interchangeable, joined or not (the ends of a chain of four layers)."""
        terms = [Term("params", 80.0 * (g + 1 if shape == "chain" and g in (1, 2) else 1), (g,)) for g in range(4)]
        terms += [Term("params", 640.0, (g, g + 1)) for g in range(3)] if shape == "chain" else []
        terms[2] = Term("params", terms[1].coef, (2,))
        costs = CostModel(tuple(Group(f"g{g}", 8, 2, 2, 3) for g in range(4)), tuple(terms))
        selector, rows = Selector(costs, Budget(params=0.5)), np.random.default_rng(0).random((4, 3))
        for order in itertools.permutations(range(4)) if shape == "flat" else [(3, 2, 1, 0)]:
            swapped = value(selector, rows[list(order)].ravel())
            assert swapped == pytest.approx(value(selector, rows.ravel()))

    @pytest.mark.parametrize("name", SOLVERS)
    def test_deterministic_and_without_memory(self, name: str) -> None:
        costs, random = costs_of_network(name), np.random.default_rng(0)
        inputs = [importances(kind, costs, random) for kind in KINDS]
        forward, backward = (Selector(costs, same_share(costs, 0.4)) for _ in range(2))
        assert forward.solver == SOLVERS[name]
        one = [forward.select(x) for x in inputs]
        two = [backward.select(x) for x in reversed(inputs)][::-1]
        assert all((a == b).all() for a, b in zip(one, two, strict=True))
        assert len({mask.tobytes() for mask in one}) > 1

    @pytest.mark.parametrize("name", SOLVERS)
    def test_share_one_keeps_all_but_negative(self, name: str) -> None:
        costs = costs_of_network(name)
        selector = Selector(costs, Budget.of(1.0))
        importance = importances("random", costs, np.random.default_rng(0)) - 0.5
        assert (selector.select(importance) == (importance >= 0)).all()
        assert selector.reachable_masks() == 1

    @pytest.mark.parametrize("name", SOLVERS)
    def test_scale_of_importances_does_not_matter(self, name: str) -> None:
        costs = costs_of_network(name)
        selector = Selector(costs, same_share(costs, 0.4))
        importance = importances("random", costs, np.random.default_rng(0))
        for factor in (2.0**-60, 2.0**60):
            assert (selector.select(factor * importance) == selector.select(importance)).all()
        assert selector.select(importance.astype(np.float32)).sum() == selector.select(importance).sum()

    @pytest.mark.parametrize("name", SOLVERS)
    def test_everything_negative_or_zero(self, name: str) -> None:
        costs = costs_of_network(name)
        selector, none = Selector(costs, same_share(costs, 0.3)), np.zeros(sum(g.count for g in costs.groups))
        assert not selector.select(none - 1.0).any()
        assert selector.select(none).any()

    def test_ties_go_to_the_lowest_index(self) -> None:
        groups = tuple(Group(f"g{i}", 4, 1, 1, 3) for i in range(2))
        selector = Selector(CostModel(groups, tuple(Term("params", 4.0, (i,)) for i in range(2))), Budget(params=6.0))
        assert np.flatnonzero(selector.select(np.full(6, 0.5))).tolist() == [0, 1, 2, 3]
        assert np.flatnonzero(selector.select(np.array([0.1, 0.5, 0.5, 0.5, 0.5, 0.5]))).tolist() == [1, 2, 3, 4]

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
    def test_counts_masks_that_no_block_can_be_added_to(self, problem: tuple[CostModel, Budget, Floats]) -> None:
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

    @pytest.mark.parametrize("solver", ["Programme", "Prices"])
    def test_one_mask_is_recognised_by_every_solver(self, solver: str) -> None:
        """The first 30 groups are too large for the room, the others fit whole."""
        groups = tuple(Group(f"g{i}", 3, 1, 1, 2) for i in range(40))
        terms = [Term("params", 3.0 * (1000 + i if i < 30 else 1), (i,)) for i in range(40)]
        if solver == "Prices":
            terms += [Term("params", 9e5, (i, i + 1)) for i in range(29)]
        costs = CostModel(groups, tuple(terms))
        room = costs.smallest()["params"] + 30
        selector = Selector(costs, Budget(params=room))
        assert selector.solver == solver
        assert selector.reachable_masks() == 1
        assert selector.select(np.ones(80)).sum() == 20
        more = 150_000 if solver == "Prices" else 1_500
        assert Selector(costs, Budget(params=room + more)).reachable_masks() > 1

    @pytest.mark.parametrize("name", ["cifar10", "plain 20"])
    def test_bounded(self, name: str) -> None:
        assert Selector(costs_of_network(name), Budget.of(0.5)).reachable_masks(1000) == 1000


def one(units: int = 10, first: int = 1, count: int = 3) -> CostModel:
    group = Group("hidden", units, first, (units - first) // count, count)
    return CostModel((group,), (Term("params", 20.0 * units, (0,)), Term("params", 10.0)))


class TestBudget:
    def test_number_binds_params_flops_and_activations(self) -> None:
        assert Budget.of(0.3) == Budget(params=0.3, flops=0.3, reducible_bytes=0.3)
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
