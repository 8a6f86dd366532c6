"""Budgets, and the choice of the most important blocks that fit one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from pfedgate.core.errors import unknown
from pfedgate.gating.selection.costs import Bools, CostModel, Floats, Group, Problem, Term
from pfedgate.gating.selection.exact import Frontier, Programme
from pfedgate.gating.selection.prices import Prices

__all__ = ["Budget", "CostModel", "Group", "InfeasibleBudget", "Selector", "Term"]

# Of activations a number binds what blocks can reduce: of all bytes of a transformer that would be a few percent of it.
PLAIN_NUMBER_BINDS = ("params", "flops", "reducible_bytes")


class InfeasibleBudget(ValueError):
    """The blocks that are always kept alone cost more than the budget.

    `smallest` holds, for each violated resource, the smallest feasible value in absolute terms.
    """

    def __init__(self, message: str, smallest: dict[str, float]) -> None:
        super().__init__(message)
        self.smallest = smallest


@dataclass(frozen=True, repr=False)
class Budget:
    """How much of each resource one batch may use; None leaves a resource free.

    A number in (0, 1] is a share of the dense model's cost, a larger one is absolute. `activation_bytes`
    counts all that a pass keeps, `reducible_bytes` what dropping blocks of single layers saves: not what
    is always there, and not the residual stream of a transformer, which all its layers read through layer
    norms. `latency_ms` is always absolute, and `speedup=2` is half the dense model's latency: both are
    measured on this device.

    >>> Budget(params=0.3)
    Budget(params=0.3)
    """

    params: float | None = None
    flops: float | None = None
    activation_bytes: float | None = None
    reducible_bytes: float | None = None
    latency_ms: float | None = None
    speedup: float | None = None

    def __post_init__(self) -> None:
        for resource, value in self.bound().items():
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise TypeError(f"budget for {resource} must be a number, got {value!r}")
            if not math.isfinite(value) or value <= 0:
                kinds = {"latency_ms": "milliseconds > 0", "speedup": "a factor > 0"}
                kind = kinds.get(resource, "a share in (0, 1] or a larger absolute cost")
                raise ValueError(f"budget for {resource} must be {kind}, got {value!r}; leave it out to not bind it")

    def __repr__(self) -> str:
        return f"Budget({', '.join(f'{name}={value}' for name, value in self.bound().items())})"

    def bound(self) -> dict[str, float]:
        """What is bound, with the values as given."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {resource: value for resource, value in values.items() if value is not None}

    @classmethod
    def of(
        cls, value: float | Mapping[str, float | None] | Budget, resources: Sequence[str] = PLAIN_NUMBER_BINDS
    ) -> Budget:
        """A budget from one share for all of `resources`, a mapping by resource, or a budget.

        >>> Budget.of(0.5, resources=("params",)) == Budget.of({"params": 0.5}) == Budget(params=0.5)
        True
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, Mapping):
            return cls._of_resources(value)
        if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool) and value > 1:
            raise ValueError(
                f"a budget given as one number is a share in (0, 1], got {value!r}; "
                f"for an absolute one name the resource: Budget(params={value!r})"
            )
        resources = (resources,) if isinstance(resources, str) else resources
        if not resources:
            raise ValueError(f"a budget must bind at least one resource of {', '.join(f.name for f in fields(cls))}")
        if {"latency_ms", "speedup"} & set(resources):
            raise ValueError("latency has no share of the dense model: Budget(latency_ms=...) or Budget(speedup=...)")
        return cls._of_resources(dict.fromkeys(resources, value))

    @classmethod
    def _of_resources(cls, values: Mapping[str, float | None]) -> Budget:
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise ValueError(unknown("resource", str(name), names))
        return cls(**values)

    def limits(self, costs: CostModel) -> dict[str, float]:
        """The largest allowed cost of each bound resource, as an absolute value."""
        dense, limits = costs.dense(), dict[str, float]()
        for name, value in self.bound().items():
            resource, limit = name, float(value)
            if name in ("latency_ms", "speedup"):
                if "latency_ms" not in dense:
                    raise ValueError(
                        f"{name} is bound but the cost model has no latency terms; measure a profile first"
                    )
                resource, limit = "latency_ms", limit if name == "latency_ms" else costs.dense_ms / limit
            elif value <= 1:
                limit = _share_of(dense.get(name, 0.0), limit)
            limits[resource] = min(limit, limits.get(resource, math.inf))
        return limits


def _share_of(dense: float, share: float) -> float:
    """The largest cost whose share of `dense` is at most `share` *as computed by a division*.

    0.29 * 100 is a hair below 29 in floating point, but 29 of 100 blocks is a density of 0.29.
    """
    limit = float(share * dense)
    while dense and math.nextafter(limit, math.inf) / dense <= share:
        limit = math.nextafter(limit, math.inf)
    return limit


class Selector:
    """Chooses the optional blocks to keep, for one cost model and budget.

    >>> groups = (Group("hidden", units=10, first=1, step=3, count=3),)
    >>> selector = Selector(CostModel(groups, (Term("params", 200.0, (0,)),)), Budget(params=0.5))
    >>> selector.select(np.array([0.2, 0.9, 0.4]))
    array([False,  True, False])
    """

    def __init__(self, costs: CostModel, budget: Budget) -> None:
        self.costs = costs
        self.budget = budget
        self.limits = budget.limits(costs)
        _check_feasible(costs, self.limits)
        self._problem = Problem.of(costs, self.limits)
        self._solver = _solver(self._problem)

    @property
    def solver(self) -> str:
        """Name of the method in use."""
        return type(self._solver).__name__ if self._solver else "everything fits"

    def select(self, importance: Floats) -> Bools:
        """The best mask over all optional blocks, given their importances, group by group.

        A block of negative importance is never kept. Of equally good masks a `Frontier` takes the
        one with more blocks in the first groups; every solver is deterministic and has no memory.
        """
        values = self._checked(importance)
        places, prefix = self._problem.rank(values)
        counts = self._problem.counts if self._solver is None else self._solver.solve(prefix)
        mask = np.zeros(values.size + 1, dtype=bool)  # the last place stands for no block
        mask[places[np.arange(places.shape[1]) < counts[:, None]]] = True
        result: Bools = mask[:-1] & (values >= 0.0)
        return result

    def reachable_masks(self, limit: int = 10**6) -> int:
        """How many masks are optimal for some positive importances, counted up to `limit`.

        Exact for few groups. For the other solvers a lower bound, but 1 exactly if there is only
        one such mask: then the gate cannot choose anything, and the budget or the blocks should be
        changed.
        """
        if self._solver is None:
            return min(limit, 1)
        total = 0
        for counts in self._solver.maximal if isinstance(self._solver, Frontier) else self._problem.maximal():
            pairs = zip(self._problem.counts.tolist(), counts.tolist(), strict=True)
            total += math.prod(math.comb(n, k) for n, k in pairs)
            if total >= limit:
                return limit
        return total

    def _checked(self, importance: Floats) -> Floats:
        values = np.asarray(importance, dtype=np.float64)
        size = self._problem.size
        if values.shape != (size,):
            raise ValueError(f"importances of shape {values.shape}, expected one per optional block: ({size},)")
        # One product is cheaper than a test of every number; it overflows for some finite ones.
        if not math.isfinite(values.dot(values)) and not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(f"importance of block {bad} is {values[bad]}: the gate diverged; lower its learning rate")
        return values


def _solver(problem: Problem) -> Frontier | Programme | Prices | None:
    if not problem.costs:
        return None
    if Frontier.suits(problem) and (frontier := Frontier(problem)).quick:
        return frontier
    return Programme(problem) if problem.separable else Prices(problem)


def _check_feasible(costs: CostModel, limits: Mapping[str, float]) -> None:
    smallest, dense, over, parts = costs.smallest(), costs.dense(), dict[str, float](), []
    for resource, limit in limits.items():
        least, whole = smallest.get(resource, 0.0), dense.get(resource, 0.0)
        if least <= limit:
            continue
        over[resource] = least
        if resource == "latency_ms":
            parts.append(f"{resource}: asked {limit:,.6g} ms, smallest feasible {_up(least):,.6g} ms")
        else:
            parts.append(
                f"{resource}: asked {limit / whole:.4g} of the dense model ({limit:,.6g}), "
                f"smallest feasible {_up(least / whole):.4f} ({math.ceil(least):,})"
            )
    if over:
        raise InfeasibleBudget(
            "the blocks that are always kept alone exceed the budget: " + "; ".join(parts) + ". "
            "Raise the budget to at least that, or keep less always (a smaller first block: smallest=..., in a recipe "
            "algorithm.smallest; finer blocks; fewer layers that are kept whole).",
            over,
        )


def _up(value: float) -> float:
    """Rounded up to four digits, so that the printed value is itself feasible."""
    return math.ceil(value * 1e4) / 1e4
