"""The parts of the selection in deep networks: exact where they say so."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from tests.gating.selection import Floats, concatenated, independent, layer, plain, residual

from pfedgate.gating.selection.budget import Budget, CostModel, Group, Term
from pfedgate.gating.selection.dual import Dual, Known
from pfedgate.gating.selection.lagrange import Chain, Elimination, Quadratic, in_a_row, inner
from pfedgate.gating.selection.master import Master, Pool
from pfedgate.gating.selection.polish import Polish, steps
from pfedgate.gating.selection.problem import Problem


def chains(lengths: list[int], random: np.random.Generator) -> CostModel:
    """Separate chains of layers of one to four blocks."""
    groups: list[Group] = []
    terms: list[Term] = []
    for length in lengths:
        for place in range(length):
            blocks = int(random.integers(1, 5))
            groups.append(Group(f"layer {len(groups)}", 1 + 2 * blocks, 1, 2, blocks))
            g = len(groups) - 1
            before = groups[g - 1].units if place else 3
            terms += layer(g, g - 1 if place else None, groups[g].units, before, 9, int(random.integers(1, 50)))
    return CostModel(tuple(groups), tuple(terms))


def problem(costs: CostModel, share: float = 0.4) -> Problem:
    return Problem.of(costs, Budget.of(dict.fromkeys(costs.dense(), share)).limits(costs))


def values(of: Problem, costs: Quadratic, random: np.random.Generator) -> Floats:
    prefix = of.rank(random.random(of.size)).prefix[costs.groups, : costs.levels.shape[1]]
    return np.asarray(prefix / prefix.max())


def all_counts(costs: Quadratic) -> Floats:
    return np.array(list(itertools.product(*(range(int(n) + 1) for n in costs.most))), dtype=float)


def worth(prefix: Floats, kept: Floats) -> Floats:
    return np.asarray(prefix[np.arange(len(prefix)), kept.astype(int)].sum(-1))


class TestInner:
    @given(
        st.lists(st.integers(1, 6), min_size=1, max_size=3).filter(lambda n: 2 <= sum(n) <= 6), st.integers(0, 10**6)
    )
    def test_chains_and_elimination_equal_brute_force(self, lengths: list[int], seed: int) -> None:
        """Odd and even lengths, groups of different widths, chains side by side."""
        random = np.random.default_rng(seed)
        whole = problem(chains(lengths, random))
        costs = Quadratic.of(whole)
        prefix, prices = values(whole, costs, random), random.random(len(costs.limits)) / costs.limits
        order = in_a_row(np.asarray(costs.coupling.any(0)))
        assert order is not None
        every = all_counts(costs)
        best = (worth(prefix, every) - costs.cost(every) @ prices).max()
        solvers = [inner(costs), Elimination(costs)] + ([Chain(costs, order)] if len(order) > 1 else [])
        for solver in solvers:
            kept = solver.best(prefix, prices)
            assert (kept <= costs.most).all()
            assert worth(prefix, kept.astype(float)) - costs.cost(kept.astype(float)) @ prices == pytest.approx(best)

    def test_which_networks_are_chains(self) -> None:
        random = np.random.default_rng(0)
        made = {
            name: type(inner(Quadratic.of(problem(costs)))).__name__
            for name, costs in {
                "plain": plain(9, random),
                "independent": independent(9, 2, random),
                "residual": residual(4),
                "concatenated": concatenated(9),
            }.items()
        }
        assert made == {
            "plain": "Chain",
            "independent": "Alone",
            "residual": "Elimination",
            "concatenated": "Sweeps",
        }

    def test_a_circle_is_no_row(self) -> None:
        ring = np.roll(np.eye(5, dtype=bool), 1, axis=1)
        assert in_a_row(ring | ring.T) is None
        broken = ring | ring.T
        broken[0, 1] = broken[1, 0] = False
        assert in_a_row(broken) == [0, 4, 3, 2, 1]


class TestQuadratic:
    @pytest.mark.parametrize("costs", [residual(3), concatenated(7), plain(8, np.random.default_rng(1))])
    def test_costs_as_in_the_problem(self, costs: CostModel) -> None:
        whole = problem(costs)
        ours = Quadratic.of(whole)
        kept = np.random.default_rng(0).integers(0, whole.counts + 1, (20, len(whole.counts)))
        some = kept[:, ours.groups].astype(float)
        free = np.setdiff1d(np.arange(len(whole.counts)), ours.groups)
        kept[:, free] = whole.counts[free]
        np.testing.assert_array_equal(ours.cost(some), whole.cost(kept))
        one = np.zeros(some.shape[1])
        one[0] = 1.0
        change = ours.cost(some + one) - ours.cost(some)
        np.testing.assert_allclose(ours.marginal(some)[:, :, 0] + ours.own[:, 0] / 2, change)


class TestDual:
    @given(st.integers(0, 10**6), st.integers(1, 3))
    def test_prices_are_those_of_a_linear_programme(self, seed: int, resources: int) -> None:
        """With choices added in between, and from the basis of other values."""
        random = np.random.default_rng(seed)
        slacks = random.normal(size=(30, resources))
        slacks[0] = random.random(resources)
        value = random.random(30) - slacks.sum(1)
        other = Master(random.random(20), Pool(slacks[:20]), 0)
        other.solve()
        master = Master(value[:20], Pool(slacks[:20], other.basis), 10)
        master.solve()
        master.add(value[20:], slacks[20:])
        bound, prices = master.solve()
        true = linprog(-value, A_ub=-slacks.T, b_ub=np.zeros(resources), A_eq=np.ones((1, 30)), b_eq=[1.0])
        assert bound == pytest.approx(-true.fun)
        assert (value + slacks @ prices).max() == pytest.approx(bound)
        chosen, weights = master.mix()
        assert weights @ value[chosen] == pytest.approx(bound)
        assert weights.sum() == pytest.approx(1.0)

    @given(st.integers(0, 10**6))
    def test_bounds_hold(self, seed: int) -> None:
        """No choice that fits is worth more than `upper`, and `lower` is never above it."""
        random = np.random.default_rng(seed)
        whole = problem(chains([5], random))
        costs = Quadratic.of(whole)
        prefix, every = values(whole, costs, random), all_counts(costs)
        best = worth(prefix, every[(costs.cost(every) <= costs.limits).all(1)]).max()
        dual = Dual(Known(costs), prefix, 2, 6)
        for step in range(6):
            if step < 2:
                dual.sweep()
            dual.step(0.0)
            assert dual.upper >= best * (1 - 1e-12)
            assert dual.lower <= dual.upper * (1 + 1e-9)


class TestPolish:
    @given(st.integers(0, 10**6), st.sampled_from(["plain", "residual", "concatenated", "independent"]))
    def test_fits_and_is_full(self, seed: int, kind: str) -> None:
        """What is dropped and added is counted exactly: nothing is over, and no block is left that fits."""
        random = np.random.default_rng(seed)
        made = {
            "plain": lambda: plain(8, random),
            "residual": lambda: residual(3),
            "concatenated": lambda: concatenated(7),
            "independent": lambda: independent(8, 3, random),
        }
        costs = made[kind]()
        whole = problem(costs, float(random.uniform(0.3, 0.9)))
        ours = Quadratic.of(whole)
        prefix = values(whole, ours, random)
        start = random.integers(0, ours.most + 1, (4, len(ours.most)))
        polish = Polish(ours)
        fitted = polish.fit(start, steps(prefix))
        assert (fitted <= start).all()
        assert (ours.cost(fitted.astype(float)) <= ours.limits).all()
        filled = polish.fill(fitted, steps(prefix))
        assert (filled >= fitted).all()
        assert (filled <= ours.most).all()
        assert (ours.cost(filled.astype(float)) <= ours.limits).all()
        for row, g in itertools.product(filled, range(len(ours.most))):
            more = row + (np.arange(len(row)) == g)
            assert row[g] == ours.most[g] or (ours.cost(more.astype(float)) > ours.limits).any()
