"""Cost models, importances and oracles that the tests and the benchmark of the selection share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

import pfedgate
from pfedgate import models
from pfedgate.gating.selection.budget import CostModel, Group, Selector, Term
from pfedgate.gating.selection.costs import RESOURCES

Floats = NDArray[np.float64]
KINDS = ("random", "sigmoid", "skewed", "tied", "nearly equal", "equal")


def group(name: str, units: int, blocks: int = 10, first: float = 0.05) -> Group:
    """`blocks` optional blocks after a first one of at least the share `first`."""
    step = max(1, int(units * (1 - first)) // blocks)
    return Group(name, units, units - step * blocks, step, blocks)


def layer(out: int | None, into: int | None, units: int, inputs: int, kernel: int, places: int) -> list[Term]:
    """Cost of a convolution (or linear: one place) from group `into` to group `out`; None is always whole."""
    both = tuple(g for g in (into, out) if g is not None)
    one = both[-1:] if out is not None else ()
    return [
        Term("params", float(kernel * inputs * units), both),
        Term("params", float(units), one),
        Term("flops", float(2 * kernel * inputs * units * places), both),
        *(Term(resource, float(4 * units * places), one) for resource in ("activation_bytes", "reducible_bytes")),
    ]


def cifar10(blocks: int = 9) -> CostModel:
    groups = tuple(group(f"layer {i}", n, blocks) for i, n in enumerate((32, 64, 120, 84)))
    terms = layer(0, None, 32, 3, 25, 784) + layer(1, 0, 64, 32, 25, 100)
    terms += layer(2, 1, 120, 1600, 1, 1) + layer(3, 2, 84, 120, 1, 1) + layer(None, 3, 10, 84, 1, 1)
    return CostModel(groups, tuple(terms))


def femnist(blocks: int = 9) -> CostModel:
    groups = tuple(group(f"layer {i}", n, blocks) for i, n in enumerate((32, 64, 2048)))
    terms = layer(0, None, 32, 1, 25, 576) + layer(1, 0, 64, 32, 25, 64)
    terms += layer(2, 1, 2048, 1024, 1, 1) + layer(None, 2, 62, 2048, 1, 1)
    return CostModel(groups, tuple(terms))


def flat(sizes: Iterable[int], blocks: int = 4) -> CostModel:
    """The paper's blocks: every tensor by itself, only parameters are saved."""
    groups = tuple(group(f"tensor {i}", n, blocks, first=0.1) for i, n in enumerate(sizes))
    return CostModel(groups, tuple(Term("params", float(g.units), (i,)) for i, g in enumerate(groups)))


def plain(depth: int, random: np.random.Generator, blocks: int = 10) -> CostModel:
    """A plain convolutional network that narrows in space and widens in channels."""
    groups: list[Group] = []
    terms: list[Term] = []
    size, width = 32, 32
    for i in range(depth):
        if i and i % max(1, depth // 4) == 0 and size > 4:
            size, width = size // 2, width * 2
        groups.append(group(f"layer {i}", int(width * random.uniform(0.6, 1.5)), blocks))
        before = groups[i - 1].units if i else 3
        terms += layer(i, i - 1 if i else None, groups[i].units, before, 9, size * size)
    terms += layer(None, depth - 1, 10, groups[-1].units, 1, 1)
    return CostModel(tuple(groups), tuple(terms))


def residual(each: int, blocks: int = 10, shortcut: bool = False) -> CostModel:
    """Three stages of `each` residual blocks; tied streams; with `shortcut` each stage starts with a projection."""
    groups: list[Group] = []
    terms: list[Term] = []

    def add(units: int) -> int:
        groups.append(group(f"group {len(groups)}", units, blocks))
        return len(groups) - 1

    before: int | None = None
    size, inputs = 32, 3
    for stage, width in enumerate((16, 32, 64)):
        size //= 2 if stage else 1
        stream = add(width)
        terms += layer(stream, before, width, inputs, 1 if stage else 9, size * size)
        for i in range(each):
            inner = add(width)
            start = before if shortcut and stage and i == 0 else stream
            terms += layer(inner, start, width, groups[start].units if start is not None else 3, 9, size * size)
            terms += layer(stream, inner, width, width, 9, size * size)
        before, inputs = stream, width
    terms += layer(None, before, 10, inputs, 1, 1)
    return CostModel(tuple(groups), tuple(terms))


def concatenated(depth: int, blocks: int = 6) -> CostModel:
    """Every layer reads all earlier ones (DenseNet): every two groups share a cost."""
    groups = tuple(group(f"layer {i}", 12 + i, blocks) for i in range(depth))
    terms = layer(0, None, groups[0].units, 3, 9, 64)
    for i in range(1, depth):
        for j in range(i):
            terms += layer(i, j, groups[i].units, groups[j].units, 9, 64)
    return CostModel(groups, tuple(terms))


def independent(size: int, resources: int, random: np.random.Generator, blocks: int = 10) -> CostModel:
    """Groups without common costs, each resource drawn by itself."""
    groups = tuple(group(f"group {i}", int(random.integers(20, 200)), blocks) for i in range(size))
    terms = [
        Term(resource, float(int(10 ** random.uniform(2, 4)) * g.units), (i,))
        for resource in RESOURCES[:resources]
        for i, g in enumerate(groups)
    ]
    return CostModel(groups, tuple(terms))


def planned(name: str, **options: Any) -> CostModel:
    """What `gate` makes of a network of ours."""
    return pfedgate.gate(models.build(name, **options), models.example(name), 1.0).plan.costs


def importances(kind: str, costs: CostModel, random: np.random.Generator) -> Floats:
    size = sum(g.count for g in costs.groups)
    if kind == "sigmoid":
        parts = [random.normal() + 0.7 * random.normal(size=g.count) for g in costs.groups]
        return np.asarray(1 / (1 + np.exp(-np.concatenate(parts))))
    return {
        "random": random.random(size),
        "skewed": random.random(size) ** 4,
        "tied": np.ceil(3 * random.random(size)) / 3,
        "nearly equal": 0.5 + 1e-3 * random.random(size),
        "equal": np.full(size, 0.5),
    }[kind]


def cost_by_terms(costs: CostModel, kept: Iterable[int]) -> dict[str, float]:
    """The cost as the terms define it, one by one."""
    share = [g.live(k) / g.units for g, k in zip(costs.groups, kept, strict=True)]
    total = dict.fromkeys((term.resource for term in costs.terms), 0.0)
    for term in costs.terms:
        total[term.resource] += term.coef * math.prod(share[g] for g in term.groups)
    return total


def by_brute_force(costs: CostModel, limits: Mapping[str, float], importance: Floats) -> float:
    """The best value over all masks of at most 16 blocks."""
    counts = [g.count for g in costs.groups]
    fits = np.zeros([n + 1 for n in counts], dtype=bool)
    for kept in np.ndindex(fits.shape):
        cost = cost_by_terms(costs, kept)
        fits[kept] = all(cost.get(r, 0.0) <= limit * (1 + 1e-9) for r, limit in limits.items())
    masks = (np.arange(2 ** sum(counts))[:, None] >> np.arange(sum(counts))) & 1
    ends = np.cumsum(counts)
    kept_of = tuple(masks[:, end - n : end].sum(1) for end, n in zip(ends, counts, strict=True))
    return float((masks @ importance)[fits[kept_of]].max())


def milp_range(
    costs: CostModel, limits: Mapping[str, float], importance: Floats, gap: float, seconds: float
) -> tuple[float, float]:
    """The best value by HiGHS, and what no choice is worth more than: far apart if time is too short.

    One binary per block, sorted within its group; a product of two groups is linear in y = (block j of g kept) *
    (live share of h), which the objective pushes down to its lower bounds.
    """
    groups = costs.groups
    start = np.cumsum([0, *(g.count for g in groups)])
    value = np.concatenate([-np.sort(-importance[a:b]) for a, b in itertools.pairwise(start.tolist())])
    pairs = sorted({(g, h) for r in limits for g, h in np.argwhere(costs.polynomials[r].pairs).tolist()})
    first_y = {}
    size = int(start[-1])
    for g, h in pairs:
        first_y[g, h] = size
        size += groups[g].count
    rows: list[dict[int, float]] = []
    low: list[float] = []
    high: list[float] = []

    def add(row: dict[int, float], least: float, most: float) -> None:
        rows.append(row)
        low.append(least)
        high.append(most)

    for i, g_ in enumerate(groups):
        for j in range(g_.count - 1):
            add({start[i] + j: 1.0, start[i] + j + 1: -1.0}, 0.0, math.inf)
    for g, h in pairs:
        live = {int(start[h]) + j: -groups[h].step / groups[h].units for j in range(groups[h].count)}
        least = groups[h].first / groups[h].units
        for j in range(groups[g].count):
            row = dict(live)
            row[first_y[g, h] + j] = 1.0
            row[start[g] + j] = row.get(int(start[g]) + j, 0.0) - 1.0
            add(row, least - 1.0, math.inf)  # y >= share(h) - (1 - x)
            add({first_y[g, h] + j: 1.0, int(start[g]) + j: -least}, 0.0, math.inf)  # y >= smallest share * x
    for resource, limit in limits.items():
        cost = costs.polynomials[resource]
        row, constant = {}, cost.const

        def put(index: int, amount: float, row: dict[int, float] = row) -> None:
            row[index] = row.get(index, 0.0) + amount

        def linear(g: int, weight: float) -> float:
            for j in range(groups[g].count):
                put(int(start[g]) + j, weight * groups[g].step)
            return weight * groups[g].first

        for g in np.flatnonzero(cost.linear).tolist():
            constant += linear(g, cost.linear[g])
        for g, h in np.argwhere(cost.pairs).tolist():
            constant += linear(h, cost.pairs[g, h] * groups[g].first)
            for j in range(groups[g].count):
                put(first_y[g, h] + j, cost.pairs[g, h] * groups[g].step * groups[h].units)
        scale = max(limit - constant, 1e-9)
        add({k: v / scale for k, v in row.items()}, -math.inf, (limit - constant) / scale)
    matrix = scipy.sparse.lil_matrix((len(rows), size))
    for i, row in enumerate(rows):
        for k, v in row.items():
            matrix[i, k] = v
    objective = np.zeros(size)
    objective[: len(value)] = -value
    result = milp(
        objective,
        constraints=LinearConstraint(matrix.tocsr(), low, high),
        integrality=(np.arange(size) < len(value)).astype(int),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": gap, "time_limit": seconds},
    )
    assert result.x is not None, result.message
    return float(-result.fun), float(-result.mip_dual_bound)


def value(selector: Selector, importance: Floats) -> float:
    """Value of the selection, after a check that it keeps its promises."""
    mask = selector.select(importance)
    cost = cost_by_terms(selector.costs, selector.costs.kept(mask))
    for resource, limit in selector.limits.items():
        assert cost.get(resource, 0.0) <= limit * (1 + 1e-12), resource
    assert not mask[importance < 0].any()
    return float(importance[mask].sum())
