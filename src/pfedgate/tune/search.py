"""One search: trials of one method, each a whole run that is scored on validation data only.

Optuna keeps the trials in the journal of the search's folder; it suggests points and says which trials to end early.
Every draw is seeded by (seed, label, slot), where slots number the trials that count. So with one worker a search that
was killed ends with the same trials as one that was not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pfedgate import experiment
from pfedgate.config.recipe import Recipe, Tables, essence, resolve
from pfedgate.core import seeds
from pfedgate.core.errors import unknown
from pfedgate.engine.files import write_atomically
from pfedgate.engine.metrics import Record
from pfedgate.engine.workers import completed
from pfedgate.runs.environment import environment
from pfedgate.tune import space as spaces
from pfedgate.tune.space import Choices, Point, Space

SEARCHES = ("tpe", "random", "grid")
COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"
JOURNAL, ABOUT = "journal.log", "search.json"  # files of a search's folder
STARTUP = 4  # trials before their results guide the next ones, or end one early
OTHER_SEED = 1000  # added to a recipe's: settings are not chosen on the partition that is reported
EXTRA, FARTHER = 6, 3  # trials beyond those asked for, and steps beyond an end, while the best trial is at an edge
WARMUP = 0.25  # share of the rounds in which no trial is ended: some start slowly


@dataclass(frozen=True)
class Trial:
    """One point tried. `value`: the best accuracy on validation data over the rounds that were scored."""

    slot: int  # its number among those that count
    params: dict[str, Any]
    state: str
    value: float | None = None
    best_round: int | None = None
    seconds: float = 0.0
    curve: tuple[tuple[int, float], ...] = ()  # (round, validation accuracy)
    error: str = ""


@dataclass(frozen=True)
class Attempt:
    """What a worker process needs to run a trial; it reports through the journal."""

    journal: Path
    id: int  # optuna's
    recipe: Tables
    prune: bool
    data: Any = None
    model: Any = None


@dataclass(frozen=True)
class SearchSpec:
    """What is searched and how."""

    label: str  # the method, and settings given beside its name
    recipe: Recipe  # that every trial starts from
    space: Space
    search: str = "tpe"
    prune: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.search not in SEARCHES:
            raise ValueError(unknown("search", self.search, SEARCHES))

    def plain(self) -> dict[str, Any]:
        """The specification as plain data."""
        space = {name: str(axis) for name, axis in self.space.items()}
        return {**self.__dict__, "space": space, "recipe": json.loads(json.dumps(self.recipe.tables()))}


def base(recipe: Recipe, rounds: int | None = None) -> Recipe:
    """A recipe as trials run it: scored often enough to be judged on the way, one process each, nothing stored."""
    rounds = recipe.train.rounds if rounds is None else rounds
    every = min(recipe.evaluate.every or rounds, max(1, rounds // 5))
    return replace(
        recipe,
        train=replace(recipe.train, rounds=rounds),
        evaluate=replace(recipe.evaluate, every=every, points=("after_broadcast",), novel=False),
        run=replace(recipe.run, workers=1, keep_best=False, seed=recipe.run.seed + OTHER_SEED),
    )


class _Hopeless(Exception):
    """Raised in a trial that is ended early."""


def attempt(job: Attempt, tick: Callable[[], None] | None = None) -> tuple[str, str]:
    """Run a trial; returns its state and, if training broke, the error."""
    optuna = _optuna()
    trial = optuna.trial.Trial(_study(job.journal, job.recipe["train"]["rounds"]), job.id)
    training = False

    def judge(event: Record) -> None:
        nonlocal training
        training = True
        value = event.get("after_broadcast", {}).get(f"val_{metric.name}")
        if event["event"] == "round" and value is not None:
            trial.report(value if metric.higher else -value, event["round"])
            if job.prune and event["round"] < job.recipe["train"]["rounds"] and trial.should_prune():
                raise _Hopeless

    began, state, broken = time.perf_counter(), COMPLETE, ""
    plan = experiment.plan(resolve(job.recipe), data=job.data, model=job.model)
    metric = plan.algorithm.task.metric
    try:
        plan.run(callbacks=[judge])
    except _Hopeless:
        state = PRUNED
    except Exception as error:
        # Settings that break training are an outcome. Errors before it, or with files, say nothing about them.
        if not training or isinstance(error, OSError) or isinstance(error.__cause__, OSError):
            raise
        state, broken = FAILED, f"{type(error).__name__}: {error}"
    trial.set_user_attr("seconds", time.perf_counter() - began)
    return state, broken


class Search:
    """The trials of a specification, in a folder. `trials` may be raised later: then the search goes on."""

    def __init__(
        self,
        spec: SearchSpec,
        folder: Path,
        trials: int,
        watch: Callable[[Search], None] = lambda _: None,
        extend: bool = False,
    ) -> None:
        self.spec, self.folder, self.wanted, self._watch, self.extend = spec, folder, trials, watch, extend
        self._points = points = spaces.listed(spec.space)
        if points is not None:
            self.wanted = min(trials, len(points))
            if spec.search == "grid" and len(points) > trials:
                raise ValueError(
                    f"{spec.label}: the grid has {len(points)} points, more than --trials {trials}: allow more, give "
                    "fewer values with --param, or search with tpe or random"
                )
        elif spec.search == "grid":
            raise ValueError(f"{spec.label}: a grid needs lists of values, not ranges, and not too many")
        optuna = _optuna()
        self._prepare()
        self._study = _study(folder / JOURNAL, spec.recipe.train.rounds)
        self._running: dict[int, Any] = {}  # optuna's trials by their ids
        for trial in self._study.get_trials(deepcopy=False):
            if not trial.state.is_finished():  # A killed process left it.
                self._lose(optuna.trial.Trial(self._study, trial._trial_id), "interrupted")
        # Trials that an earlier search lost say nothing. Those that this one loses are shown until it ends.
        self._past = {t.number for t in self._study.get_trials(deepcopy=False) if "lost" in t.user_attrs}

    @property
    def trials(self) -> list[Trial]:
        """The trials that have ended, in the order of their start."""
        return [self._view(trial) for trial in self._frozen() if trial.state.is_finished()]

    @property
    def best(self) -> Trial | None:
        """The complete trial with the best validation accuracy, the earliest of equals."""
        complete = [trial for trial in self.trials if trial.state == COMPLETE and trial.value is not None]
        return max(complete, key=lambda trial: (trial.value or 0.0, -trial.slot), default=None)

    def run(self, workers: int = 1, *, data: Any = None, model: Any = None) -> None:
        """All trials that are not in the journal yet; an error that all would meet is raised before the first."""
        self._watch(self)
        if len(self.trials) < self.wanted:
            federation = experiment.plan(self.spec.recipe, data=data, model=model).federation
            if not any(federation.part(client, "val").n for client in federation.clients):
                raise ValueError("tuning needs data with a validation part: nothing could be scored here")

        def draw() -> Attempt | None:
            asked = self.ask()
            if asked is None:
                return None
            recipe = resolve(self.spec.recipe.tables(), spaces.settings_of(self.params(asked)))
            return Attempt(self.folder / JOURNAL, asked._trial_id, recipe.tables(), self.spec.prune, data, model)

        for job, future in completed(attempt, draw, workers=workers):
            self.tell(self._running[job.id], future)

    def ask(self) -> Any | None:
        """The next trial, as optuna's; None if all have been drawn or every point has been tried."""
        taken = {trial.user_attrs["slot"] for trial in self._frozen()}
        slot = next((number for number in range(self.wanted) if number not in taken), None)
        asked = self._beyond(taken) if slot is None else self._choose(slot)
        if asked is not None:
            self._running[asked._trial_id] = asked
        return asked

    def params(self, trial: Any) -> dict[str, Any]:
        """The settings of one of optuna's trials, by name."""
        return spaces.values(self.spec.space, trial.params)

    def tell(self, asked: Any, ended: Future[tuple[str, str]]) -> None:
        """Write down how a trial ended. One that could not begin is lost: the next search tries its slot again."""
        states = _optuna().trial.TrialState
        del self._running[asked._trial_id]
        error = ended.exception()
        if error is not None:
            self._lose(asked, f"{type(error).__name__}: {error}")
        else:
            state, broken = ended.result()
            asked.set_user_attr("error", broken)
            scores = self._study.get_trials(deepcopy=False)[asked.number].intermediate_values.values()
            if state == COMPLETE and scores:
                self._study.tell(asked, max(scores))
            else:
                self._study.tell(asked, state=states.PRUNED if state == PRUNED else states.FAIL)
        self._watch(self)

    def _frozen(self) -> list[Any]:
        """Optuna's records of the trials that take a slot."""
        records = self._study.get_trials(deepcopy=False)
        return [t for t in records if "slot" in t.user_attrs and t.number not in self._past]

    def _view(self, trial: Any) -> Trial:
        curve, notes = tuple(sorted(trial.intermediate_values.items())), trial.user_attrs
        best_round, value = max(curve, key=lambda score: (score[1], -score[0]), default=(None, None))
        state = {"COMPLETE": COMPLETE, "PRUNED": PRUNED}.get(trial.state.name, FAILED)
        error = notes.get("lost") or notes.get("error", "")
        return Trial(
            notes["slot"], self.params(trial), state, value, best_round, notes.get("seconds", 0.0), curve, error
        )

    def _lose(self, trial: Any, why: str) -> None:
        trial.set_user_attr("lost", why)
        self._study.tell(trial, state=_optuna().trial.TrialState.FAIL)

    def _choose(self, slot: int) -> Any | None:
        seen = [trial.params for trial in self._frozen()]
        if self.spec.search == "grid":
            return self._fix(slot, (self._points or [])[slot])
        if slot == 0:
            return self._fix(slot, spaces.default(self.spec.space, self.spec.recipe))
        samplers = _optuna().samplers
        for again in range(10):  # The same run twice would tell nothing.
            seed = seeds.key(self.spec.seed, "tune", self.spec.label, slot, again) % 2**32
            if self.spec.search == "random":
                self._study.sampler = samplers.RandomSampler(seed)
            else:  # constant_liar: a running trial counts as a bad one, so that workers try different places.
                self._study.sampler = samplers.TPESampler(seed=seed, n_startup_trials=STARTUP, constant_liar=True)
            asked = self._study.ask(_distributions(self.spec.space))
            if asked.params not in seen:
                asked.set_user_attr("slot", slot)
                return asked
            self._lose(asked, "tried before")
        return self._fix(slot, next((point for point in self._points or [] if point not in seen), None))

    def _beyond(self, taken: set[int]) -> Any | None:
        """A trial one step beyond the edge that the best one is at; None if it is at none, or others still run."""
        best = self.best
        slot = max(self.wanted, *(number + 1 for number in taken)) if taken else 0
        if not self.extend or self._running or best is None or slot >= self.wanted + EXTRA:
            return None
        records = self._frozen()
        seen = [trial.params for trial in records]
        point: Point = next(trial.params for trial in records if trial.user_attrs["slot"] == best.slot)
        for name, axis in self.spec.space.items():
            place = point[name]
            if not isinstance(axis, Choices) or not axis.ordered:
                continue
            for other in (place - 1, place + 1):
                outside = other < 0 or other >= len(axis.values)
                near = -FARTHER <= other < len(axis.values) + FARTHER
                if outside and near and axis.reaches(other) and {**point, name: other} not in seen:
                    return self._fix(slot, {**point, name: other})
        return None

    def _fix(self, slot: int, point: Point | None) -> Any | None:
        """A trial of a certain point, written at once: a kill leaves no point without its slot."""
        if point is None:
            return None
        trials = _optuna().trial
        self._study.add_trial(
            trials.create_trial(
                state=trials.TrialState.RUNNING, params=point, distributions=_distributions(self.spec.space, point),
                user_attrs={"slot": slot},
            )
        )  # fmt: skip
        return trials.Trial(self._study, self._study.get_trials(deepcopy=False)[-1]._trial_id)

    def _prepare(self) -> None:
        """The folder; an error if it holds another search."""
        self.folder.mkdir(parents=True, exist_ok=True)
        about, plain = self.folder / ABOUT, self.spec.plain()
        if about.exists():
            before = json.loads(about.read_text(encoding="utf-8"))["plan"]
            same, now = ({**spec, "recipe": essence(spec["recipe"])} for spec in (before, plain))
            changes = _differences(same, now)
            if (self.folder / "trials.jsonl").exists():
                changes.append("its trials.jsonl is of an older form")
            if changes:
                raise ValueError(
                    f"{self.folder} holds a search with other settings ({'; '.join(changes[:3])}): use the same "
                    "again to go on, or another --out"
                )
        else:
            write_atomically(about, json.dumps({"plan": plain, "environment": environment()}, indent=2).encode())
        journal = self.folder / JOURNAL
        content = journal.read_bytes() if journal.exists() else b""
        if content and not content.endswith(b"\n"):
            # A kill has cut the last line short. Optuna would refuse all lines that follow it.
            write_atomically(journal, content[: content.rfind(b"\n") + 1])


def _differences(before: Any, now: Any, where: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        names = dict.fromkeys([*before, *now])
        return [d for n in names for d in _differences(before.get(n), now.get(n), f"{where}.{n}".lstrip("."))]
    return [] if before == now else [f"{where}: {before} then, {now} now"]


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ImportError("tuning needs optuna: pip install 'pfedgate[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _study(journal: Path, rounds: int) -> Any:
    """Optuna's view of a journal."""
    optuna = _optuna()
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    pruner = optuna.pruners.MedianPruner(STARTUP, int(WARMUP * rounds))
    about = {"study_name": "search", "storage": optuna.storages.JournalStorage(backend), "pruner": pruner}
    try:
        return optuna.load_study(**about)
    except KeyError:
        return optuna.create_study(**about, direction="maximize")


def _distributions(space: Space, point: Point | None = None) -> dict[str, Any]:
    """A space in optuna's words, wide enough for a point: places in lists, numbers from ranges."""
    kinds = _optuna().distributions

    def distribution(name: str, axis: spaces.Axis) -> Any:
        if isinstance(axis, Choices):
            last = len(axis.values) - 1
            if not axis.ordered:
                return kinds.CategoricalDistribution(range(last + 1))
            place = int((point or {}).get(name, 0))
            return kinds.IntDistribution(min(0, place), max(last, place))
        if axis.whole:
            return kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
        return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)

    return {name: distribution(name, axis) for name, axis in space.items()}
