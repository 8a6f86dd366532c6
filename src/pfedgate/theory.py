"""The paper's theory as functions, to be put beside what a run measures.

Chen, Yao, Gao, Ding, Li: Efficient Personalized Federated Learning via Sparse Model-Adaptation, ICML 2023.

    Proposition 1    how far the weights M of a client may be from 1     weight_bound, …_published
    Theorem 1        how many samples a client needs to generalise       Generalisation
    Theorem 2        how fast gradients vanish                           learning_rate, rate, fit_rate
    Appendix, q      which share of the model a client uploads           touched, touched_if_independent, newly_touched

O(·) hides constants that nobody knows: functions take them as arguments, 1 by default. So compare shapes, not heights.
`examples/theory.py` draws predicted beside measured; docs/explanation/theory.md says where the two agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "Generalisation",
    "Rate",
    "fit_rate",
    "learning_rate",
    "newly_touched",
    "rate",
    "touched",
    "touched_if_independent",
    "weight_bound",
    "weight_bound_published",
]

Vector = npt.ArrayLike


# -- Proposition 1: θ_i* = θ_g* ∘ M*. Strong convexity gives ‖θ_i* − θ_g*‖ ≤ σ/μ, hence ‖(M*−1)∘θ_g*‖ ≤ σ/μ.
def weight_bound(sigma: float, mu: float, theta_g: Vector) -> float:
    """Upper bound on the sum of (M* − 1)⁴ over the parameters of a client.

    sigma    bound on the difference of local and global gradient (Assumption 1)
    mu       strong convexity of the loss
    theta_g  the optimal global parameters, none of them 0

    It follows from the first half of the proof: Σ (M−1)⁴θ⁴ ≤ (Σ (M−1)²θ²)² ≤ (σ/μ)⁴, and θ⁴ ≥ min|θ|⁴. Clients that
    are alike (σ = 0) need no adaptation:

    >>> weight_bound(0.0, 1.0, [0.5, 2.0])
    0.0
    >>> weight_bound(0.1, 1.0, [0.5, 2.0])  # one weight at most 0.2 away from 1
    0.0016
    """
    _positive(mu=mu)
    _not_negative(sigma=sigma)
    return _tidy((sigma / mu) ** 4 / float(_sizes(theta_g).min()) ** 4)


def weight_bound_published(sigma: float, mu: float, theta_g: Vector, theta_i: Vector) -> float:
    """Proposition 1 as printed: R_i⁴R_g⁴r_i⁴r_g⁴ / (16·σ⁴·μ⁴·‖θ_g⁴‖), R and r largest and smallest |θ|.

    It does not follow from its proof: σ, r_i and r_g belong on the other side of the fraction. So it grows as clients
    become alike, and real weights can exceed it. Kept to be compared; use `weight_bound`.

    >>> weight_bound_published(10.0, 1.0, [1.0], [11.0]) < (11.0 / 1.0 - 1) ** 4  # θ_i = 11·θ_g, σ = μ·|θ_i − θ_g|
    True
    """
    _positive(sigma=sigma, mu=mu)
    theta, own = _sizes(theta_g), _sizes(theta_i)
    ends = float(own.max() * theta.max() * own.min() * theta.min())
    return ends**4 / (16 * sigma**4 * mu**4 * float((theta**4).sum()))


# -- Theorem 1
@dataclass(frozen=True)
class Generalisation:
    """Theorem 1: with enough samples of a client, its expected and empirical loss differ by at most a gap.

    The shared model is paid for by all clients together, the gate by each alone:

    >>> few, many = (Generalisation(params=10_000, gate_params=500, clients=c, sparsity=0.5) for c in (10, 100))
    >>> round(few.samples(0.1) / many.samples(0.1), 1)
    2.5
    """

    params: int  # d, of the shared model
    gate_params: int  # d_φ, of a client's gate
    clients: int  # |C|
    sparsity: float  # s_i, the client's share of the model
    failure: float = 0.05  # δ: it holds with probability 1 − δ
    radius: float = 1.0  # R: all parameters lie in a ball of this size
    lipschitz: tuple[float, float, float] = (1.0, 1.0, 1.0)  # L_f, L_h, L_g: of loss, model and gate
    constant: float = 1.0  # the one that O(·) hides

    def __post_init__(self) -> None:
        f, h, g = self.lipschitz
        _positive(params=self.params, clients=self.clients, sparsity=self.sparsity, radius=self.radius)
        _positive(constant=self.constant, L_f=f, L_h=h)
        _not_negative(gate_params=self.gate_params, L_g=g)
        if not 0 < self.failure < 1:
            raise ValueError(f"failure is a probability in (0, 1), got {self.failure}")

    def samples(self, gap: float) -> float:
        """Ñ: so many samples of the client make the gap at most this."""
        _positive(gap=gap)
        f, h, g = self.lipschitz
        # Below 1 a single ball covers everything: its logarithm is 0, not negative.
        balls = max(0.0, math.log(self.radius * f * h * (self.radius * g + self.sparsity) / gap))
        size = self.params / self.clients + self.gate_params
        return self.constant * (size * balls - math.log(self.failure) / self.clients) / gap**2

    def gap(self, samples: float) -> float:
        """The same the other way round: the gap that so many samples guarantee.

        >>> sizes = {"params": 10_000, "gate_params": 500, "clients": 20}
        >>> gaps = [Generalisation(sparsity=s, **sizes).gap(60) for s in (0.1, 0.5, 1.0)]
        >>> gaps == sorted(gaps)  # a sparser model generalises better, says the theorem
        True
        """
        _positive(samples=samples)
        low = high = 1.0
        while self.samples(high) > samples:
            high *= 2
        while self.samples(low) <= samples:
            low /= 2
        for _ in range(100):  # Ñ falls with the gap, so halving finds it
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.samples(middle) > samples else (low, middle)
        return high


# -- Theorem 2
class Rate(NamedTuple):
    """A power law through measured values: constant · T^slope."""

    slope: float
    constant: float


def learning_rate(eta_0: float, rounds: int) -> float:
    """The rate for which Theorem 2 holds, η₀/√T′: constant within a run, smaller the longer the run is.

    >>> learning_rate(0.4, 16)
    0.1
    """
    _positive(eta_0=eta_0, rounds=rounds)
    return eta_0 / math.sqrt(rounds)


def rate(rounds: float, constant: float = 1.0) -> float:
    """Theorem 2: the squared norm of the gradient, averaged over a run of so many rounds, is at most constant/√T′.

    >>> rate(100) / rate(400)
    2.0
    """
    _positive(rounds=rounds)
    _not_negative(constant=constant)
    return constant / math.sqrt(rounds)


def fit_rate(rounds: Sequence[float], means: Sequence[float]) -> Rate:
    """The power law nearest to measured averages (least squares of logarithms). Theorem 2 says slope ≤ −1/2.

    >>> fit_rate([4, 16, 64], [rate(t, 3.0) for t in (4, 16, 64)])
    Rate(slope=-0.5, constant=3.0)
    """
    if len(rounds) != len(means) or len(set(rounds)) < 2:
        raise ValueError(f"need a mean for each of at least two run lengths, got {len(rounds)} and {len(means)}")
    if min(rounds) <= 0 or min(means) <= 0:
        raise ValueError("run lengths and means must be positive: their logarithms are fitted")
    slope, start = np.polyfit(np.log(rounds), np.log(means), 1)
    return Rate(_tidy(float(slope)), _tidy(math.exp(start)))


# -- q, the share of the model that a client touches in a round, and uploads (Appendix, communication)
def touched(p: Sequence[float]) -> float:
    """q = 1 − Π(1 − p_j), p_j the probability that batch j touches a parameter that no batch touched before.

    >>> touched([0.5, 0.25, 0.0])
    0.625
    """
    if any(not 0 <= value <= 1 for value in p):
        raise ValueError(f"probabilities lie in [0, 1], got {list(p)}")
    return 1.0 - math.prod(1.0 - value for value in p)


def touched_if_independent(sparsity: float, batches: int) -> float:
    """q if every batch drew its blocks anew, 1 − (1 − s)^batches; batches of one client agree more, so q is less.

    >>> touched_if_independent(0.5, 3)
    0.875
    """
    if batches < 1:
        raise ValueError(f"a round has at least one batch, got {batches}")
    return touched([sparsity] * batches)


def newly_touched(masks: npt.ArrayLike, sizes: npt.ArrayLike | None = None) -> list[float]:
    """The p_j of real selections: of what no earlier batch touched, the share that batch j touches.

    masks   one row per batch, one column per block (or tile), true where it was live
    sizes   parameters of each block; all alike by default

    >>> p = newly_touched([[1, 1, 0, 0], [1, 0, 1, 0]])
    >>> p, touched(p)  # three of four blocks
    ([0.5, 0.5], 0.75)
    """
    live = np.asarray(masks, dtype=bool)
    if live.ndim != 2:
        raise ValueError(f"masks are a table of batches × blocks, got {live.ndim} dimensions")
    weight = np.ones(live.shape[1]) if sizes is None else np.asarray(sizes, dtype=np.float64)
    if weight.shape != live.shape[1:] or (weight < 0).any() or not weight.sum():
        raise ValueError(f"sizes: one number ≥ 0 for each of {live.shape[1]} blocks, not all 0")
    shares: list[float] = []
    left = np.ones(live.shape[1], dtype=bool)
    for row in live:
        rest = float(weight[left].sum())
        shares.append(float(weight[left & row].sum()) / rest if rest else 0.0)
        left &= ~row
    return shares


def _sizes(values: Vector) -> npt.NDArray[np.float64]:
    sizes = np.abs(np.asarray(values, dtype=np.float64)).reshape(-1)
    if not sizes.size or not (sizes > 0).all():
        raise ValueError("parameters must be given and none may be 0: M* is θ_i*/θ_g*")
    return sizes


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")


def _tidy(value: float) -> float:
    """Without the last digits, which are rounding."""
    return float(f"{value:.12g}")
