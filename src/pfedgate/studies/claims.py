"""Differences that matter: which rows are compared, on which seeds, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from pfedgate.engine.metrics import Record
from pfedgate.studies.declare import VALIDATION
from pfedgate.studies.outcome import Outcomes


def claims(outcomes: Outcomes, column: str) -> list[Record]:
    """What came of the differences that matter, in points; without those whose rows are not there yet."""
    found = []
    for claim in outcomes.study.claims:
        there = outcomes.rows(column)
        ours = [name for name in claim.ours if name in there]
        baselines = [row.name for row in outcomes.study.rows if row.method != "pfedgate"]
        others = [name for name in claim.others or baselines if name in there]
        if len(ours) < len(claim.ours) or len(others) < len(claim.others or baselines):
            continue
        best = _ahead(ours, {name: outcomes.by_seed(name, column, VALIDATION) for name in ours})
        scores = {name: outcomes.by_seed(name, column, claim.number) for name in [best, *others]}
        gaps = {name: [scores[best][s] - scores[name][s] for s in scores[best] if s in scores[name]] for name in others}
        if not any(gaps.values()):
            continue
        hardest = min((name for name in others if gaps[name]), key=lambda name: fmean(gaps[name]))
        points, seeds = 100 * fmean(gaps[hardest]), len(gaps[hardest])
        kept = None if claim.must is None else points > 0 if claim.must == 0 else points >= claim.must
        aimed = None if claim.aim is None else points >= claim.aim
        told = {"column": column, "claim": claim.title, "ours": best, "other": hardest, "seeds": seeds}
        wanted = {"must": claim.must, "aim": claim.aim, "kept": kept, "reached": aimed}
        rivals: list[str] = []
        if claim.must is not None and abs(points - claim.must) < claim.chance:  # other seeds may say otherwise
            decisive = min(claim.must, points) + claim.chance  # who is farther behind will not be the hardest
            rivals = [name for name in others if gaps[name] and 100 * fmean(gaps[name]) < decisive]
        found.append({**told, "points": points, **wanted, "rivals": rivals})
    return found


def _ahead(names: Sequence[str], scores: Mapping[str, Mapping[int, float]]) -> str:
    """The best of some rows on the seeds that all of them have."""
    shared = set.intersection(*({*scores[name]} for name in names))
    return max(names, key=lambda name: fmean(scores[name][seed] for seed in shared))


def close(outcomes: Outcomes, column: str) -> list[str]:
    """Rows of what must be shown and is so close, either way, that one seed cannot tell."""
    found = [[told["ours"], *told["rivals"]] for told in claims(outcomes, column) if told["rivals"]]
    return list(dict.fromkeys(name for names in found for name in names))
