"""Replies of a Flower grid, each fetched by a thread of its own.

Flower hands out a reply as soon as its header is there and then waits for the rest: for minutes, if a node falls silent
half-way; and if the rest is no message, it raises. Were replies fetched together, one such node would keep those of all
others until their deadline has passed, or end the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

GRACE = 1.0  # seconds to wait for replies that are being fetched; who takes longer is not waited for again
TOGETHER = 16  # how many are fetched at a time


class Collector:
    """Fetches replies and remembers which fetches are still under way."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid
        self._under_way: dict[str, _Fetch] = {}

    def collect(self, names: Iterable[str]) -> dict[str, list[Any] | Exception]:
        """By message, what Flower has as a reply, or why it could not be read; no entry if there is nothing yet."""
        every = list(names)
        for at in range(0, len(every), TOGETHER):
            self._begin([name for name in every[at : at + TOGETHER] if name not in self._under_way])
        found: dict[str, list[Any] | Exception] = {}
        for name in every:
            if not self._under_way[name].is_alive():
                result = self._under_way.pop(name).result
                if result != []:
                    found[name] = result
        return found

    def forget(self, names: Iterable[str]) -> None:
        """Nobody waits for these any more: what still comes of them is thrown away."""
        for name in names:
            self._under_way.pop(name, None)

    def _begin(self, names: Iterable[str]) -> None:
        fetches = {name: _Fetch(self.grid, name) for name in names}
        self._under_way |= fetches
        for fetch in fetches.values():
            fetch.start()
        until = time.monotonic() + GRACE
        for fetch in fetches.values():
            fetch.join(max(0.0, until - time.monotonic()))


class _Fetch(threading.Thread):
    """One look for the reply to one message; a daemon, so that one that hangs does not outlive the server."""

    def __init__(self, grid: Any, name: str) -> None:
        super().__init__(name=f"reply to {name}", daemon=True)
        self.grid, self.message = grid, name
        self.result: list[Any] | Exception = []

    def run(self) -> None:
        """Whatever a node may have sent, and in whatever way Flower fails to read it: the others go on."""
        try:
            self.result = list(self.grid.pull_messages([self.message]))
        except Exception as error:
            self.result = error
