"""What a run looks like while it goes: a bar on a terminal, plain lines elsewhere. A callback of the engine.

    with Progress("digits · pfedgate") as progress:
        run(..., callbacks=[progress])

All of it goes to standard error, so that results can be piped.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import rich.progress
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from pfedgate.core.kinds import METRICS
from pfedgate.engine.metrics import Record

QUIET = 10.0  # seconds after which a plain line is due even if nothing was scored


class Steps:
    """Progress of anything done one by one: rounds of a run, trials of a search, cells of a study."""

    def __init__(self, title: str, what: str, console: Console | None = None) -> None:
        self.title, self.what = title, what
        self.console = Console(stderr=True) if console is None else console
        self._pace: tuple[float, float, float, float, float] | None = None  # (start, done, whole, began, last)
        self._task = rich.progress.TaskID(0)
        self._bar: rich.progress.Progress | None = None
        if self.console.is_terminal:
            columns = [BarColumn(), MofNCompleteColumn(), TextColumn("[bold]{task.fields[score]}"), TimeElapsedColumn()]
            description = TextColumn("{task.description}")
            self._bar = rich.progress.Progress(description, *columns, _Left(self), console=self.console)

    def __enter__(self: Some) -> Some:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(escape(self.title), total=None, score="")
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def left(self) -> float | None:
        """Seconds until the end at the pace of this session, None before its first step."""
        if self._pace is None:
            return None
        start, done, whole, began, last = self._pace
        if done == start:
            return None
        return max(0.0, (last - began) / (done - start) * (whole - done) - (time.monotonic() - last))

    def at(self, done: int, of: int, remark: str | None = "", *, share: float | None = None) -> None:
        """Show how many are done and a remark (None: nothing to say); the first call says where it starts.

        share  the share of the work that is done, where steps take unequal time
        """
        work, whole, now = (done, of, time.monotonic()) if share is None else (share, 1.0, time.monotonic())
        start, began = (work, now) if self._pace is None else (self._pace[0], self._pace[3])
        self._pace = start, work, whole, began, now
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=of)
            if remark is not None:
                self._bar.update(self._task, score=escape(remark))
        elif remark is not None:
            parts = [f"{self.what} {done}/{of}", *([remark] if remark else [])]
            if done < of and self.left() is not None:
                parts.append(f"{clock(self.left())} left")
            self._say(", ".join(parts))

    def _say(self, text: str) -> None:
        self.console.print(f"{self.title}: {text}", highlight=False, markup=False, soft_wrap=True)


Some = TypeVar("Some", bound=Steps)


class _Left(ProgressColumn):
    # rich's own column forgets speeds after half a minute, which is less than one round of a large model.
    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._steps = steps

    def render(self, task: Any) -> Text:
        return Text(f"{clock(self._steps.left())} left", style="cyan")


class Progress(Steps):
    """A callback that shows rounds done, the latest accuracy and the time left."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        super().__init__(title, "round", console)
        self._said, self._score, self._metric = time.monotonic(), "", METRICS["accuracy"]

    def __call__(self, event: Record) -> None:
        """Hear of a start, a round or the end."""
        if event["event"] == "end":
            return
        done, rounds = int(event["round"]), int(event["rounds"])
        if event["event"] == "start":
            self._pace, self._metric = None, event.get("metric", self._metric)
            self.at(done, rounds, None)
            if self._bar is None and done < rounds:
                self._say(f"{rounds} rounds" if not done else f"going on after round {done} of {rounds}")
            return
        scores = event.get("after_broadcast", {})
        show = self._metric.show
        if scores.get(self._metric.name) is not None:
            self._score = f"{self._metric.name} {show(scores[self._metric.name])}"
        remark: str | None = self._score
        if self._bar is None:
            parts = [] if event.get("loss") is None else [f"loss {event['loss']:.3f}"]
            if scores:
                parts += [self._score, f"bottom decile {show(scores.get('bottom_decile'))}"]
            due = scores or time.monotonic() - self._said > QUIET
            remark = ", ".join(parts) if due else None
            self._said = time.monotonic() if due else self._said
        self.at(done, rounds, remark)


def clock(seconds: float | None) -> str:
    """Seconds to be read.

    >>> clock(75), clock(4000), clock(None)
    ('1:15', '1:06:40', '?')
    """
    if seconds is None:
        return "?"
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def percent(share: float | None) -> str:
    """A share to be read.

    >>> percent(0.8349), percent(None)
    ('83.5 %', '-')
    """
    return "-" if share is None else f"{100 * share:.1f} %"


def size(count: float | None) -> str:
    """A number of bytes to be read.

    >>> size(950), size(3_400_000), size(None)
    ('950 B', '3.4 MB', '-')
    """
    return "-" if count is None else scaled(count, "B")


def scaled(count: float, unit: str) -> str:
    """A large number with a prefix.

    >>> scaled(2.18e10, "FLOP")
    '21.8 GFLOP'
    """
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 1000 or prefix == "P":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if not prefix else f"{count:.3g} {prefix}{unit}"
