"""What a run gives: the same object from `pfedgate.run` and from `pfedgate.load(folder)`.

result = pfedgate.run(...)                 result.clients["anna"].metrics, .budget
result = pfedgate.load("runs/x")           result.clients["anna"].model(), .predict(x)
result.to_frame(), print(result)           one line per client; one screen
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import unknown
from pfedgate.core.kinds import METRICS, Metric
from pfedgate.core.types import Budget, Card, Federation, Round
from pfedgate.engine.endpoint import NOVEL, POINTS, Endpoint, Scored
from pfedgate.engine.roster import Options, Roster
from pfedgate.engine.server import Result
from pfedgate.engine.store import MemoryStore
from pfedgate.runs.progress import clock, scaled, size
from pfedgate.training.fit import Score

SHOWN = 5  # clients of each end of the list in a printed result


class Plan(Protocol):
    """What a client's model needs beside the result; `pfedgate.experiment.Experiment` is one."""

    @property
    def algorithm(self) -> Algorithm: ...
    @property
    def federation(self) -> Federation: ...
    @property
    def options(self) -> Options: ...


@dataclass(frozen=True, repr=False)
class Client:
    """One client of a result: its numbers, its budget and its model."""

    id: str
    result: Trained
    scores: Mapping[str, Scored]  # by point

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of its own model on its own data: test metrics, `n_test`, the same on validation, statistics."""
        return self.at(NOVEL if NOVEL in self.scores else POINTS[0])

    def at(self, point: str) -> dict[str, float]:
        """The same at another point of the protocol, such as "after_local"."""
        if point not in self.scores:
            raise KeyError(unknown("point", point, self.scores))
        scored, row = self.scores[point], dict[str, float]()
        for prefix, part in (("", scored.test), ("val_", scored.val)):
            names = [metric.name for metric in self.result.metrics]
            row |= {f"{prefix}{name}": value for name, value in zip(names, (part.score, *part.more), strict=False)}
            row |= {f"{prefix}loss": part.loss, f"n_{'val' if prefix else 'test'}": part.n}
        return {**row, **scored.stats}

    @property
    def budget(self) -> Budget:
        """What the client can afford."""
        return self.card.budget

    @property
    def card(self) -> Card:
        """All that the server knows of it."""
        return self.result._cards[self.id]

    def model(self) -> nn.Module:
        """The client's own model, as it was scored: a module of its own, in evaluation mode."""
        plan, result = self.result.plan(), self.result
        endpoint = Endpoint(plan.algorithm, plan.federation, result.store or MemoryStore())
        round = Round(max(0, len(result.history) - 1), plan.options.rounds, plan.options.seed)
        point = NOVEL if self.id in plan.federation.novel else POINTS[0]
        return endpoint.model(result.server, self.card, round, point).eval()

    @torch.no_grad()
    def predict(self, x: Any) -> Tensor:
        """Predictions for raw inputs, as the client's data holds them (`federation.part(id, "test").x`).

        They are classes, one per sample or position; for multilabel truth values, for regression numbers.
        """
        plan = self.result.plan()
        raw = x if isinstance(x, Tensor) else torch.from_numpy(np.asarray(x))
        own = plan.federation.part(self.id, "train").x
        if raw.shape[1:] != own.shape[1:] or raw.is_floating_point() != own.is_floating_point():
            raise ValueError(
                f"inputs of shape {tuple(raw.shape)} and type {str(raw.dtype)[6:]}: the client's are "
                f"{('n', *own.shape[1:])} and {str(own.dtype)[6:]}, one row per sample".replace("'n'", "n")
            )
        output: Tensor = self.model()(plan.federation.prepare(raw))
        kind = plan.algorithm.task.kind
        if kind == "regression":
            return output
        return output > 0 if kind == "multilabel" else output.argmax(1 if kind == "segmentation" else -1)

    def __repr__(self) -> str:
        metric, numbers = self.result.metric, self.metrics
        return (
            f"Client({self.id!r}, {metric.name} {metric.show(numbers[metric.name])}, {numbers['n_test']} test samples)"
        )


class Clients(Mapping[str, Client]):
    """The clients of a result by id."""

    def __init__(self, result: Trained) -> None:
        points: dict[str, dict[str, Scored]] = {}
        for score in (*result.scores, *result.novel):
            points.setdefault(score.client, {})[score.point] = score
        self._clients = {id: Client(id, result, scores) for id, scores in sorted(points.items())}

    def __getitem__(self, id: str) -> Client:
        if id not in self._clients:
            raise KeyError(unknown("client", str(id), list(self._clients)[:200]))
        return self._clients[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def __repr__(self) -> str:
        names = list(self._clients)
        return f"Clients({', '.join(names[:8])}{', …' if len(names) > 8 else ''}; {len(names)})"


@dataclass(frozen=True, repr=False)
class Trained(Result):
    """What a run leaves, and the way to every client's model."""

    plan: Callable[[], Plan] = field(default=lambda: _no_plan())
    metrics: tuple[Metric, ...] = (METRICS["accuracy"],)
    title: str = "run"
    path: Path | None = None

    @property
    def metric(self) -> Metric:
        """The main metric."""
        return self.metrics[0]

    @cached_property
    def clients(self) -> Clients:
        """Every client that was scored, by id; novel ones too."""
        return Clients(self)

    @cached_property
    def _cards(self) -> dict[str, Card]:
        plan = self.plan()
        groups = (Roster.of(plan.federation, group, plan.options) for group in ("clients", "novel"))
        return {card.id: card for roster in groups for card in roster}

    def to_frame(self) -> Any:
        """One row per client and point, as a pandas DataFrame."""
        try:
            pandas: Any = importlib.import_module("pandas")
        except ImportError as error:
            raise ImportError(
                "to_frame needs pandas: pip install pandas (clients.csv of a run has the same)"
            ) from error
        rows = [{"client": c.id, "point": point, **c.at(point)} for c in self.clients.values() for point in c.scores]
        return pandas.DataFrame(rows)

    def _facts(self) -> list[tuple[str, str]]:
        summary, name, show = self.summary, self.metric.name, self.metric.show
        facts = [("rounds", str(summary["rounds"])), ("clients", str(summary.get("clients", 0)))]
        if summary.get(name) is not None:
            facts += [(name, show(summary[name])), ("bottom decile", show(summary["bottom_decile"]))]
            facts.append(
                ("best on validation", f"round {summary['best_round']}, {show(summary[f'best_{name}'])} on test")
            )
        if summary.get("density") is not None:
            facts.append(("density", f"{summary['density']:.3f}"))
        cost = f"{size(summary['bytes_up'])} up, {size(summary['bytes_down'])} down, {scaled(summary['flops'], 'FLOP')}"
        facts.append(("cost", cost + (f", {clock(summary['seconds'])}" if "seconds" in summary else "")))
        return facts + ([("folder", str(self.path))] if self.path else [])

    def _rows(self) -> list[tuple[str, str]]:
        """The clients in order of their score, the worst first; of many, those at both ends."""
        name = self.metric.name
        scored = [c for c in self.clients.values() if np.isfinite(c.metrics[name])]
        ranked = sorted(scored, key=lambda c: c.metrics[name], reverse=not self.metric.higher)
        rows = [(c.id + (" (novel)" if NOVEL in c.scores else ""), self.metric.show(c.metrics[name])) for c in ranked]
        return rows if len(rows) <= 2 * SHOWN + 1 else [*rows[:SHOWN], ("…", ""), *rows[-SHOWN:]]

    def __repr__(self) -> str:
        width = max(len(title) for title, _ in self._facts())
        lines = [self.title, *(f"  {title:<{width}}  {text}" for title, text in self._facts())]
        if rows := self._rows():
            lines += ["  clients, the worst first:", *(f"    {id}  {text}" for id, text in rows)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        facts = "".join(f"<tr><td>{html.escape(a)}</td><td>{html.escape(b)}</td></tr>" for a, b in self._facts())
        rows = "".join(f"<tr><td>{html.escape(a)}</td><td>{b}</td></tr>" for a, b in self._rows())
        return (
            f"<b>{html.escape(self.title)}</b><div style='display:flex;gap:2em;flex-wrap:wrap'><table>{facts}</table>"
            f"{self._curve()}<table><tr><th>client</th><th>{html.escape(self.metric.name)}</th></tr>{rows}</table></div>"
        )

    def _curve(self) -> str:
        """The main metric over rounds as a small picture."""
        name = self.metric.name
        points = [(r["round"], r[POINTS[0]].get(name)) for r in self.history if POINTS[0] in r]
        known = [(x, y) for x, y in points if y is not None]
        if len(known) < 2:
            return ""
        (first, last), values = (known[0][0], known[-1][0]), [y for _, y in known]
        low, high = min(values), max(values)
        places = " ".join(
            f"{10 + 220 * (x - first) / (last - first):.1f},{110 - 95 * (y - low) / ((high - low) or 1):.1f}"
            for x, y in known
        )
        words = f"{name}, {self.metric.show(low)} to {self.metric.show(high)}, rounds {first} to {last}"
        return (
            f"<svg width='240' height='135' role='img'><polyline points='{places}' fill='none' stroke='#00796b' "
            f"stroke-width='2'/><text x='10' y='130' font-size='11'>{html.escape(words)}</text></svg>"
        )


def _no_plan() -> Plan:
    raise ValueError("this result has no experiment to build models with")


def read_scores(rows: list[dict[str, Any]], metrics: tuple[Metric, ...]) -> list[Scored]:
    """The scores in clients.csv."""
    main, *others = (metric.name for metric in metrics)
    plain = {"client", "point", "n_test", "n_val", main, "loss", f"val_{main}", "val_loss", *others}
    scores = []
    for row in rows:
        test = Score(int(row["n_test"]), _nan(row["loss"]), _nan(row[main]), tuple(_nan(row.get(n)) for n in others))
        val = Score(int(row["n_val"]), _nan(row["val_loss"]), _nan(row[f"val_{main}"]))
        stats = {n: v for n, v in row.items() if n not in plain and not n.startswith("training_") and v is not None}
        scores.append(Scored(row["client"], row["point"], test, val, stats))
    return scores


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value
