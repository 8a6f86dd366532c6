"""One search: trials of one method, each a whole run scored on validation data only.

What is tried next comes from optuna, from the trials on file: every draw is seeded by (seed, method, trial), and a
study in memory is made anew from trials.jsonl. So there is one truth, a killed search goes on where it was, and with
one worker it ends with the same trials as without the interruption.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pfedgate import experiment
from pfedgate.config.recipe import Recipe, essence, resolve
from pfedgate.core import seeds
from pfedgate.core.errors import unknown
from pfedgate.engine import jobs
from pfedgate.engine.metrics import Record
from pfedgate.engine.store import write_atomically
from pfedgate.runs.environment import environment
from pfedgate.tune import guide
from pfedgate.tune import space as spaces
from pfedgate.tune import trials as kept
from pfedgate.tune.space import Point, Space
from pfedgate.tune.trials import COMPLETE, FAILED, PRUNED, Trial

SEARCHES = ("tpe", "random", "grid")


@dataclass(frozen=True)
class Plan:
    """What is searched and how."""

    label: str  # the method, and what it was given beside its name
    recipe: Recipe  # of every trial, before its own settings
    space: Space
    search: str = "tpe"
    prune: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.search not in SEARCHES:
            raise ValueError(unknown("search", self.search, SEARCHES))

    def trial_recipe(self, params: dict[str, Any]) -> Recipe:
        """The recipe of one trial."""
        return resolve(self.recipe.tables(), spaces.settings_of(params))

    def told(self) -> dict[str, Any]:
        """The plan as plain data."""
        described = {name: str(chosen) for name, chosen in self.space.items()}
        plain = {"label": self.label, "search": self.search, "prune": self.prune, "seed": self.seed}
        return {**plain, "space": described, "recipe": json.loads(json.dumps(self.recipe.tables()))}


def base(recipe: Recipe, rounds: int | None = None) -> Recipe:
    """A recipe as trials run it: scored often enough to be judged on the way, one process each, nothing kept."""
    rounds = recipe.train.rounds if rounds is None else rounds
    return replace(
        recipe,
        train=replace(recipe.train, rounds=rounds),
        evaluate=replace(
            recipe.evaluate,
            every=min(recipe.evaluate.every or rounds, max(1, rounds // 5)),
            points=("after_broadcast",),
            novel=False,
        ),
        run=replace(recipe.run, workers=1, keep_best=False),
    )


class _Enough(Exception):
    """Raised in a trial that is ended early."""


def work(job: jobs.Job, tell: jobs.Tell, *, data: Any = None, model: Any = None) -> Record:
    """One trial: a run whose validation accuracy is told round by round; the answer says whether to stop."""
    curve: list[tuple[int, float]] = []
    training = False

    def hear(event: Record) -> None:
        nonlocal training
        training = True
        value = event.get("after_broadcast", {}).get("val_accuracy")
        if event["event"] == "round" and value is not None:
            curve.append((event["round"], value))
            if tell([event["round"], value]):
                raise _Enough

    began, state, told = time.perf_counter(), COMPLETE, ""
    made = experiment.plan(resolve(job["recipe"]), data=data, model=model)
    try:
        made.run(callbacks=[hear])
    except _Enough:
        state = PRUNED
    except Exception as error:
        # Settings that break training are an outcome. What went wrong before it, or with files, says nothing of them.
        if not training or isinstance(error, OSError) or isinstance(error.__cause__, OSError):
            raise
        state, told = FAILED, f"{type(error).__name__}: {error}"
    return {"state": state, "curve": curve, "seconds": time.perf_counter() - began, "error": told}


class Search:
    """The trials of a plan in a folder; a host of jobs. `trials` may be raised later: then it goes on."""

    def __init__(self, plan: Plan, folder: Path, trials: int, watch: Callable[[Search], None] = lambda _: None) -> None:
        self.plan, self.folder, self.wanted, self._watch = plan, folder, trials, watch
        every = spaces.listed(plan.space)
        self._listed = every
        if every is not None:
            self.wanted = min(trials, len(every))
            if plan.search == "grid" and len(every) > trials:
                raise ValueError(
                    f"{plan.label}: the grid has {len(every)} points, more than --trials {trials}: allow more, give "
                    "fewer values with --param, or search with tpe or random"
                )
        elif plan.search == "grid":
            raise ValueError(f"{plan.label}: a grid needs lists of values, not ranges, and not too many")
        self._log = folder / "trials.jsonl"
        self.trials = self._open()
        self.running: dict[int, Any] = {}
        self._study = guide.study(plan.space, plan.recipe.train.rounds, self.trials)

    @property
    def best(self) -> Trial | None:
        """The complete trial with the best validation accuracy, the earliest of equals."""
        done = [trial for trial in self.trials if trial.state == COMPLETE and trial.value is not None]
        return max(done, key=lambda trial: (trial.value or 0.0, -trial.trial), default=None)

    def run(self, workers: int = 1, *, data: Any = None, model: Any = None) -> None:
        """All trials that are not on file yet. What is wrong with all of them is an error before the first."""
        self._watch(self)
        if len(self.trials) < self.wanted:
            federation = experiment.plan(self.plan.recipe, data=data, model=model).federation
            if not any(federation.part(client, "val").n for client in federation.clients):
                raise ValueError("tuning needs data with a validation part: nothing could be scored here")
        jobs.run(functools.partial(work, data=data, model=model), self, workers=workers)

    # -- as a host of jobs
    def next(self) -> jobs.Job | None:
        """A trial whose number is not taken."""
        taken = {trial.trial for trial in self.trials} | set(self.running)
        number = next((n for n in range(self.wanted) if n not in taken), None)
        if number is None:
            return None
        point = self._choose(number)
        if point is None:
            return None
        params = spaces.values(self.plan.space, point)
        return {"trial": number, "point": point, "params": params, "recipe": self.plan.trial_recipe(params).tables()}

    def said(self, job: jobs.Job, message: Any) -> bool:
        """A score of a running trial; True ends it."""
        round, value = message
        asked = self.running[job["trial"]]
        asked.report(value, round)
        last = round >= self.plan.recipe.train.rounds
        return bool(self.plan.prune and not last and asked.should_prune())

    def ended(self, job: jobs.Job, result: Any) -> None:
        """Keep a trial's outcome; that training broke (a rate too high, say) is one. The others are not kept on file,
        so the next search tries them again.
        """
        number, broken = job["trial"], isinstance(result, jobs.Failed)
        if broken:
            result = {"state": FAILED, "curve": [], "seconds": 0.0, "error": result.error}
        curve = [(r, v) for r, v in result["curve"]]
        value = max((v for _, v in curve), default=None)
        at = next((r for r, v in curve if v == value), None)
        trial = Trial(
            number, job["params"], result["state"], value, at, result["seconds"], tuple(curve), result["error"],
            job["point"],
        )  # fmt: skip
        self.trials.append(trial)
        if not broken:
            kept.append(self._log, trial)
        self._study.tell(self.running.pop(number), **guide.verdict(trial))
        self._watch(self)

    # -- parts
    def _choose(self, number: int) -> Point | None:
        """The point of a trial, as optuna's own trial knows it; None if every point has been tried."""
        seen = [trial.point for trial in self.trials] + [asked.params for asked in self.running.values()]
        order = self._order()
        if self.plan.search == "grid":
            fixed: Point | None = order[number] if order is not None else None
        elif number == 0:
            fixed = spaces.default(self.plan.space, self.plan.recipe)
        elif self.plan.search == "random":
            fixed = next((p for p in order if p not in seen), None) if order is not None else self._drawn(number)
        else:
            return self._suggested(number, seen, order)
        return None if fixed is None else self._ask(number, fixed)

    def _order(self) -> list[Point] | None:
        """All points in the order of a grid, or shuffled."""
        if self._listed is None or self.plan.search == "grid":
            return self._listed
        rng = np.random.default_rng(seeds.key(self.plan.seed, "tune", self.plan.label, "order"))
        return [self._listed[at] for at in rng.permutation(len(self._listed))]

    def _drawn(self, number: int) -> Point:
        rng = np.random.default_rng(seeds.key(self.plan.seed, "tune", self.plan.label, number))
        return {name: chosen.draw(rng) for name, chosen in self.plan.space.items()}

    def _suggested(self, number: int, seen: list[Point], order: list[Point] | None) -> Point | None:
        """What optuna suggests and nobody has tried: the same run twice would tell nothing."""
        import optuna

        for attempt in range(10):
            path = seeds.key(self.plan.seed, "tune", self.plan.label, number, attempt)
            self._study.sampler = guide.sampler(path)
            asked = self._study.ask(guide.distributions(self.plan.space))
            if asked.params not in seen:
                self.running[number] = asked
                return dict(asked.params)
            self._study.tell(asked, state=optuna.trial.TrialState.FAIL)
        fixed = next((p for p in order if p not in seen), None) if order is not None else self._drawn(number)
        return None if fixed is None else self._ask(number, fixed)

    def _ask(self, number: int, fixed: Point) -> Point:
        self._study.enqueue_trial(fixed)
        self.running[number] = self._study.ask(guide.distributions(self.plan.space))
        return dict(fixed)

    def _open(self) -> list[Trial]:
        """The trials on file, of the very same search."""
        self.folder.mkdir(parents=True, exist_ok=True)
        about = self.folder / "search.json"
        told = self.plan.told()
        if about.exists():
            before = json.loads(about.read_text(encoding="utf-8"))["plan"]
            same, now = ({**plan, "recipe": essence(plan["recipe"])} for plan in (before, told))
            changed = _differences(same, now)
            if changed:
                raise ValueError(
                    f"{self.folder} holds a search with other settings ({'; '.join(changed[:3])}): use the same "
                    "again to go on, or another --out"
                )
        else:
            write_atomically(about, json.dumps({"plan": told, "environment": environment()}, indent=2).encode())
        return kept.read(self._log)


def _differences(before: Any, now: Any, where: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        names = dict.fromkeys([*before, *now])
        return [d for n in names for d in _differences(before.get(n), now.get(n), f"{where}.{n}".lstrip("."))]
    return [] if before == now else [f"{where}: {before} then, {now} now"]
