"""The paper's theory: bounds hold where they are proven, and fail where the printed one is wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pfedgate import theory
from pfedgate.theory import Generalisation

SIZES = {"params": 10_000, "gate_params": 500, "clients": 20, "sparsity": 0.5}


@st.composite
def problems(draw: st.DrawFn) -> tuple[float, float, np.ndarray, np.ndarray]:
    """A strongly convex quadratic, global and local optimum, and σ as Assumption 1 has it."""
    size = draw(st.integers(1, 6))
    away = st.floats(0.1, 3.0).flatmap(lambda v: st.sampled_from([v, -v]))
    theta = draw(arrays(np.float64, size, elements=away))
    weights = draw(arrays(np.float64, size, elements=st.floats(0, 3)))
    curvature = draw(arrays(np.float64, size, elements=st.floats(0.2, 5)))
    own = theta * weights
    sigma = float(np.linalg.norm(curvature * (own - theta)))  # ∇f = H(θ − c): c cancels
    return sigma, float(curvature.min()), theta, weights


@given(problems())
def test_proposition_1_holds_for_every_quadratic(problem: tuple[float, float, np.ndarray, np.ndarray]) -> None:
    sigma, mu, theta, weights = problem
    measured = float(((weights - 1) ** 4).sum())
    assert measured <= theory.weight_bound(sigma, mu, theta) * (1 + 1e-6) + 1e-12


def test_bounds_are_sharp() -> None:
    """One parameter and f = μ/2·θ²: nothing is given away."""
    assert theory.weight_bound(0.6, 2.0, [0.5]) == pytest.approx((0.3 / 0.5) ** 4)


def test_the_printed_bound_is_broken_by_an_example_and_turns_the_wrong_way() -> None:
    theta, own = [1.0], [11.0]
    assert theory.weight_bound_published(10.0, 1.0, theta, own) < 10.0**4 <= theory.weight_bound(10.0, 1.0, theta)
    alike, unlike = (theory.weight_bound_published(sigma, 1.0, theta, own) for sigma in (0.1, 10.0))
    assert alike > unlike
    assert theory.weight_bound(0.1, 1.0, theta) < theory.weight_bound(10.0, 1.0, theta)


@given(st.floats(0.01, 1.0), st.floats(1.5, 10.0))
def test_samples_grow_as_the_gap_shrinks_as_the_theorem_says(gap: float, factor: float) -> None:
    few, many = Generalisation(**SIZES).samples(gap * factor), Generalisation(**SIZES).samples(gap)
    assert many >= few * factor**2  # at least 1/ε², the logarithm adds to it


def test_theorem_1_by_hand() -> None:
    d, phi, clients, s, gap = 1000, 100, 10, 0.3, 0.2
    log = math.log(2 * 3 * 5 * (2 * 7 + s) / gap)
    expected = d / (clients * gap**2) * log + phi / gap**2 * log - math.log(0.1) / (clients * gap**2)
    bound = Generalisation(d, phi, clients, s, failure=0.1, radius=2.0, lipschitz=(3.0, 5.0, 7.0))
    assert bound.samples(gap) == pytest.approx(expected)


@given(st.floats(10, 1e6), st.floats(0.05, 1.0), st.floats(0.1, 10))
def test_gap_undoes_samples(samples: float, sparsity: float, constant: float) -> None:
    bound = Generalisation(**{**SIZES, "sparsity": sparsity}, constant=constant)
    gap = bound.gap(samples)
    assert bound.samples(gap) == pytest.approx(samples, rel=1e-6) or bound.samples(gap * 0.999) > samples
    assert bound.samples(gap) <= samples * (1 + 1e-9)


@given(st.floats(0.05, 0.9), st.floats(0.01, 0.1))
def test_sparser_clients_need_fewer_samples_and_more_clients_help(sparsity: float, more: float) -> None:
    base = Generalisation(**{**SIZES, "sparsity": sparsity})
    denser = Generalisation(**{**SIZES, "sparsity": sparsity + more})
    joined = Generalisation(**{**SIZES, "sparsity": sparsity, "clients": 40})
    assert base.samples(0.1) < denser.samples(0.1)
    assert joined.samples(0.1) < base.samples(0.1)


@given(st.floats(-1.5, -0.1), st.floats(0.1, 100))
def test_a_power_law_is_found_again(slope: float, constant: float) -> None:
    rounds = [4, 9, 25, 100]
    found = theory.fit_rate(rounds, [constant * t**slope for t in rounds])
    assert found == pytest.approx((slope, constant), rel=1e-6)


def test_the_rate_holds_for_sgd_on_a_quadratic() -> None:
    """Theorem 2 on the smallest problem there is: noisy gradients of θ²/2, η = η₀/√T′."""
    stream = np.random.default_rng(0)
    rounds = [64, 256, 1024, 4096]
    means = []
    for total in rounds:
        theta, eta, squares = np.full(200, 2.0), theory.learning_rate(1.0, total), 0.0
        for _ in range(total):
            squares += float((theta**2).mean())
            theta = theta - eta * (theta + stream.normal(size=theta.shape))
        means.append(squares / total)
    assert -0.6 < theory.fit_rate(rounds, means).slope < -0.4


def masks(seed: int, batches: int, blocks: int, share: float) -> np.ndarray:
    return np.random.default_rng(seed).random((batches, blocks)) < share


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 20), st.floats(0, 1))
def test_q_of_measured_arrivals_is_the_measured_q(seed: int, batches: int, blocks: int, share: float) -> None:
    live = masks(seed, batches, blocks, share)
    sizes = np.random.default_rng(seed + 1).integers(1, 100, blocks)
    measured = sizes[live.any(0)].sum() / sizes.sum()
    assert theory.touched(theory.newly_touched(live, sizes)) == pytest.approx(measured)


@pytest.mark.parametrize(("share", "batches"), [(0.5, 1), (0.5, 4), (0.1, 8), (0.3, 3)])
def test_independent_batches_touch_what_the_formula_says(share: float, batches: int) -> None:
    measured = masks(0, batches, 200_000, share).any(0).mean()
    assert measured == pytest.approx(theory.touched_if_independent(share, batches), abs=0.005)


def test_equal_batches_touch_nothing_new() -> None:
    p = theory.newly_touched([[True, False]] * 5)
    assert p == [0.5, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: theory.weight_bound(1.0, 0.0, [1.0]),
        lambda: theory.weight_bound(-1.0, 1.0, [1.0]),
        lambda: theory.weight_bound(1.0, 1.0, [1.0, 0.0]),
        lambda: theory.weight_bound_published(0.0, 1.0, [1.0], [1.0]),
        lambda: Generalisation(**{**SIZES, "failure": 1.0}),
        lambda: Generalisation(**{**SIZES, "sparsity": 0.0}),
        lambda: Generalisation(**SIZES).samples(0.0),
        lambda: theory.touched([1.5]),
        lambda: theory.touched_if_independent(0.5, 0),
        lambda: theory.fit_rate([4], [1.0]),
        lambda: theory.fit_rate([4, 8], [1.0, 0.0]),
        lambda: theory.newly_touched([True, False]),
        lambda: theory.newly_touched([[True, False]], [1.0]),
    ],
)
def test_nonsense_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        wrong()  # type: ignore[operator]
