"""The server: rounds of draw → send → train → check → add → result → step → evaluate → checkpoint → callbacks.

    result = run(algorithm, federation, Options(rounds=50, sample=0.2))
    result.summary["accuracy"]

`run` never sees a client's data or private state: it talks to an exchange, which reaches clients in this process (the
default), in worker processes (`engine.processes`) or over a network (`deploy`). The exchange sends, lets clients train
and checks each update once; the loop gives it to the round's merger (`core.mergers`). The result does not depend on
the exchange, the number of workers, the order of clients, interruptions or evaluation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import ClientError
from pfedgate.core.robust import FOR_ALL, robust
from pfedgate.core.seeds import seeded
from pfedgate.core.state import under
from pfedgate.core.types import Card, Federation, Round, State
from pfedgate.engine import metrics
from pfedgate.engine.checkpoint import Checkpoint, RunFolder, alone, fingerprint
from pfedgate.engine.endpoint import NOVEL, Endpoint, Reply, Scored, serve
from pfedgate.engine.metrics import Record
from pfedgate.engine.policies import policy
from pfedgate.engine.private import Guard, fresh_key, possible, spent_on_samples
from pfedgate.engine.roster import DEFAULTS, Cards, Options, Roster, clock_of
from pfedgate.engine.server_step import SLOTS, ServerStep
from pfedgate.engine.store import DiskStore, MemoryStore, Store, TemporaryStore
from pfedgate.engine.workers import steady
from pfedgate.training.stacked import group_size

__all__ = ["Cards", "ClientError", "Exchange", "Options", "Result", "run", "serve"]

Callback = Callable[[Record], None]


class Exchange(Protocol):
    """How a round reaches clients. Replies come in the order of the cards, whatever happens in between."""

    def train(self, server: State, round: Round, chunks: Iterable[Sequence[Card]]) -> Iterator[Reply]:
        """One training round: replies that `endpoint.checked` has seen. Clients keep their private states."""

    def evaluate(self, server: State, round: Round, cards: Iterable[Card], points: Sequence[str]) -> Iterator[Scored]:
        """Scores of personal models; changes nothing."""

    def close(self) -> None:
        """Stop the processes it has started."""


@dataclass(frozen=True)
class Result:
    """What a run leaves: the server's State, a record per round, the summary, the last scores."""

    server: State
    history: list[Record]
    summary: Record
    scores: list[Scored] = field(default_factory=list)
    novel: list[Scored] = field(default_factory=list)
    store: Store | None = None


def run(
    algorithm: Algorithm,
    federation: Federation | Cards,
    options: Options = DEFAULTS,
    *,
    exchange: Callable[..., Exchange] = Endpoint,
    folder: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train an algorithm on a federation.

    federation  clients with their data; or only their cards, if the exchange knows where the data is
    exchange    called with (algorithm, federation, store, device): how to reach clients. Default: here; or
                functools.partial(Processes, workers=4); or anything that satisfies `Exchange`
    folder      keep metrics, checkpoints and private states here; then a killed run can be resumed
    resume      go on from the folder's last checkpoint (from the start if there is none yet)
    callbacks   called with {"event": "start" | "round" | "end", …}
    """
    shared = bool(getattr(getattr(exchange, "func", exchange), "shared_store", False))
    steady()
    with nullcontext() if folder is None else alone(folder), one_thread():
        engine = Engine(algorithm, federation, options, folder, resume, callbacks, shared)
        reach = exchange(algorithm, federation, engine.store, choose_device(options.device))
        try:
            return engine.run(reach)
        finally:
            reach.close()


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, as in every worker: bits depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_device(name: str) -> torch.device:
    """`auto` takes cuda, then mps, then cpu; one that is not here is refused."""
    here = [kind for kind, there in (("cuda", torch.cuda), ("mps", torch.backends.mps)) if there.is_available()]
    if name == "auto":
        return torch.device(here[0] if here else "cpu")
    device = torch.device(name)
    if device.type in ("cuda", "mps") and device.type not in here:
        raise ValueError(f"run.device = {name!r}, but torch finds none on this machine: set run.device to auto or cpu")
    return device


class Engine:
    """One run and its state on disk; `run` makes it. `shared` private states lie where other processes reach them."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation | Cards,
        options: Options,
        folder: str | Path | None,
        resume: bool,
        callbacks: Sequence[Callback],
        shared: bool,
    ) -> None:
        self.algorithm, self.options, self.callbacks = algorithm, options, callbacks
        rule = options.server.robust
        if rule not in FOR_ALL and (algorithm.apart or options.agg_norm == "all"):
            reason = algorithm.apart or "clients.agg_norm = 'all' counts absent clients as unchanged"
            raise ValueError(
                f"server.robust = {rule!r} is not for {algorithm.name or type(algorithm).__name__}: {reason}. "
                f"Take one of {', '.join(FOR_ALL)}"
            )
        self.roster = Roster.of(federation, "clients", options, algorithm)
        self.novel = Roster.of(federation, "novel", options, algorithm)
        clock = clock_of(federation, options) if options.fleet.devices else None
        self.policy = policy(options.fleet, algorithm, self.roster, options.sample, clock)
        self.step = ServerStep(options.server, algorithm)
        possible(algorithm, options)
        self.guard: Guard | None = None
        if options.privacy.level == "client":
            self.guard = Guard(algorithm, options, self.roster, fresh_key(options.privacy, options.seed))
            self.policy.lottery = self.guard.draw
        self.folder = None if folder is None else RunFolder(folder, resume=resume)
        self.start: Checkpoint | None = None
        self.store: Store = TemporaryStore() if shared else MemoryStore()
        if self.folder is not None:
            self.start = start = self.folder.load(fingerprint(algorithm, options), options.checkpoint_every)
            if start is None:
                self.store = DiskStore.recover(self.folder.private, None)
            else:
                self.store = DiskStore.recover(self.folder.private, start.commit, start.private, undo=start.undo)
            if self.guard is not None:
                self.guard.key = self.folder.key(self.guard.key)
        if options.privacy.level == "sample" and options.privacy.secret:
            self.store.secret()  # before several workers ask for it at once

    def run(self, reach: Exchange) -> Result:
        """All rounds, from the start or from the last checkpoint."""
        options = self.options
        if self.start is None:
            with seeded(options.seed, "init_server"):
                server = self.algorithm.init_server(options.seed)
            history: list[Record] = []
        else:
            server, history = self.start.server, list(self.start.history)
            self.policy.now = history[-1].get("virtual_seconds", 0.0) if history else 0.0
            self.policy.load(self.start.flights, self.start.flying)
            self.step.load(self.start.flights)
            self._keep_best(server, history)
        metric = self.algorithm.task.metric
        self._tell({"event": "start", "round": len(history), "rounds": options.rounds, "metric": metric})
        scores: list[Scored] = []
        for index in range(len(history), options.rounds):
            if self._stalled(history):
                break
            began = time.perf_counter()
            round = self._round(index, history)
            server, record, lines = self._train(reach, server, round)
            trained = time.perf_counter()
            every = options.evaluate_every
            if every and ((index + 1) % every == 0 or index + 1 == options.rounds):
                scores = self._evaluate(reach, server, round, record)
            if said := getattr(reach, "refusals", None):  # of scores, and of nodes that came meanwhile
                record["refusals"] = [*record.get("refusals", ()), *said]
                said.clear()
            history.append(record)
            timing = {"seconds": trained - began, "seconds_evaluation": time.perf_counter() - trained}
            self._checkpoint(server, history, lines, timing)
            self._tell({"event": "round", "rounds": options.rounds, **record, **timing})
        task = self.algorithm.task
        summary = metrics.overall(history, task.metric)
        if len(history) < options.rounds:
            summary["stopped_after"] = options.stop_after
        if self.guard is not None or options.privacy.level == "sample":
            spent = self._worst(len(history)) if self.guard is None else self.guard.spent(len(history))
            summary |= {"epsilon": metrics.clean(spent), "delta": options.privacy.delta}
        novel: list[Scored] = []
        if history:
            round = self._round(len(history) - 1, history[:-1])
            if not scores and options.evaluate_every:
                # Resumed after the last round: scores are not in the checkpoint. Taking them again changes nothing.
                scores = self._evaluate(reach, server, round, {})
            if options.novel and len(self.novel):
                novel = list(reach.evaluate(server, round, self.novel, (NOVEL,)))
                summary["novel"] = metrics.summarise(novel, task.metrics)
        summary["resident_bytes"] = max(metrics.resident_bytes(), getattr(reach, "resident_bytes", 0))
        if self.folder is not None:
            self.folder.finish(summary, [*scores, *novel], [metric.name for metric in task.metrics], self._spent())
        self._tell({"event": "end", **summary})
        return Result(server, history, summary, scores, novel, self.store)

    def _stalled(self, history: Sequence[Record]) -> bool:
        """Whether the last evaluations brought nothing better; read from the records, so that a resumed run agrees."""
        wanted, metric = self.options.stop_after, self.algorithm.task.metric
        best = metrics.best_round(history, metric)
        if wanted is None or best is None:
            return False
        return sum("after_broadcast" in record for record in history[best:]) >= wanted

    def _round(self, index: int, history: Sequence[Record]) -> Round:
        metric = self.algorithm.task.metric
        scores = (record.get("after_broadcast", {}).get(f"val_{metric.name}") for record in history)
        validation = [score if metric.higher else -score for score in scores if score is not None]
        factor = self.algorithm.task.schedule.factor(index, self.options.rounds, validation)
        total = float(self.roster.sizes.sum()) if self.options.agg_norm == "all" else None
        return Round(index, self.options.rounds, self.options.seed, factor, total)

    def _chunks(self, cards: Sequence[Card]) -> Iterator[list[Card]]:
        """Groups trained together. They depend on the cards alone, not on workers or on any order."""
        size = 1
        if self.options.stack and self.algorithm.stacks and self.algorithm.task.private is None:
            size = group_size(self.algorithm.task) if self.options.stack == "auto" else int(self.options.stack)
            # Alike sizes together: stacked clients are padded to the largest of their group.
            cards = sorted(cards, key=lambda card: (card.n_train, card.id))
        for at in range(0, len(cards), size):
            yield list(cards[at : at + size])

    def _train(self, reach: Exchange, server: State, round: Round) -> tuple[State, Record, list[Record]]:
        """Draw, send, train, check, add, result: the next State, the round's record, a line for every client."""

        def train(server: State, round: Round, cards: Sequence[Card]) -> Iterator[Reply]:
            record["sampled"] += len(cards)
            return reach.train(server, round, self._chunks(cards))

        lines: list[Record] = []
        numbers: list[Mapping[str, float]] = []
        refusals: list[str] = []
        joules, dropped = 0.0, 0
        record: Record = {"round": round.index + 1, "sampled": 0, "lr_factor": round.factor}
        record |= {"bytes_up": 0, "bytes_down": 0}
        with seeded(self.options.seed, "merge", round.index):
            noisy = None if self.guard is None else self.guard.merger(server, round)  # it clips by itself
            merger = noisy or robust(self.options.server, self.algorithm.merger(server, round))
            for arrival in self.policy.arrivals(train, server, round):  # draws, sends, trains, checks and times
                reply, cost = arrival.reply, arrival.cost
                client, update, reason = reply.card.id, reply.update, reply.reason or "no reply"
                if update is not None and not arrival.dropped:
                    reason = merger.add(reply.card, update) or ""
                line = {"round": round.index + 1, "client": client, "bytes_up": reply.up, "bytes_down": reply.down}
                record["bytes_up"] += reply.up
                record["bytes_down"] += reply.down
                if cost is not None and self.policy.clock is not None:
                    line |= {"device": self.policy.clock.fleet.device(client).kind, "began": arrival.began}
                    line |= {"seconds": cost.seconds, "joules": cost.joules}
                    line |= {"download": cost.download, "upload": cost.upload}
                    joules += cost.joules
                if arrival.dropped:
                    dropped += 1
                    line[arrival.dropped] = 1
                elif update is None or reason:
                    refusals.append(f"client {client!r}, round {round.index + 1}: {reason}")
                else:
                    numbers.append(update.metrics)
                    line = {**update.metrics, **line}
                lines.append(line)
            if not numbers and not dropped and (self.guard is None or refusals):
                raise RuntimeError(f"no usable update in round {round.index + 1}; the first: {refusals[0]}")
            if numbers or self.guard is not None:  # that nobody was drawn is hidden, too
                server = self.step(server, merger.result())
            for client, reason in getattr(merger, "refusals", ()):  # of updates that waited for others
                refusals.append(f"client {client!r}, round {round.index + 1}: {reason}")
            if clipped := getattr(merger, "clipped", 0):
                record["clipped"] = clipped
        if self.policy.clock is not None:
            record |= {"virtual_seconds": self.policy.now, "joules": joules, "dropped": dropped}
        record = {**metrics.means(numbers), **record, "refused": len(refusals)}  # no client overwrites the server
        if self.options.privacy.level == "sample":
            record["epsilon"] = metrics.clean(self._worst(round.index + 1))
        if self.guard is not None and noisy is not None:
            record |= metrics.clean(self.guard.record(round.index + 1, noisy.norms))
        return server, record | ({"refusals": refusals} if refusals else {}), lines

    def _spent(self) -> Callable[[str, int], float] | None:
        """Epsilon of a client's samples by the rounds in which it trained, where each client adds noise itself."""
        if self.options.privacy.level != "sample":
            return None
        sizes = dict(zip(self.roster.ids, self.roster.sizes.tolist(), strict=True))
        return lambda client, rounds: spent_on_samples(self.algorithm, self.options, sizes[client], rounds)

    def _worst(self, rounds: int) -> float:
        """Epsilon of the samples of the client for which it is largest, if it trained in all rounds."""
        return max(
            spent_on_samples(self.algorithm, self.options, n, rounds) for n in set(self.roster.sizes.tolist()) if n
        )

    def _evaluate(self, reach: Exchange, server: State, round: Round, record: Record) -> list[Scored]:
        scores = list(reach.evaluate(server, round, self.roster, self.options.points))
        for point in self.options.points:
            own = [score for score in scores if score.point == point]
            record[point] = metrics.summarise(own, self.algorithm.task.metrics)
        return scores

    def _checkpoint(self, server: State, history: list[Record], lines: list[Record], timing: Record) -> None:
        if self.folder is None:
            return
        self.folder.note(history[-1], lines, timing)
        done = len(history)
        best = self.options.keep_best and metrics.best_round(history, self.algorithm.task.metric) == done
        if done % self.options.checkpoint_every and done != self.options.rounds and not best:
            return
        about = fingerprint(self.algorithm, self.options)
        flights, flying = self.policy.save()
        flights = {**flights, **under(SLOTS, self.step.slots)}
        checkpoint = Checkpoint(server, history, self.store.tag, self.store.seal(), flights=flights, flying=flying)
        self.folder.save(checkpoint, about)
        self.store.commit()
        self._keep_best(server, history)

    def _keep_best(self, server: State, history: list[Record]) -> None:
        """Keep this State if it is the best on validation so far; repeated after a crash, it changes nothing."""
        if self.folder is None or not isinstance(self.store, DiskStore) or not self.options.keep_best:
            return
        if metrics.best_round(history, self.algorithm.task.metric) == len(history) != self.folder.best_round():
            self.folder.keep_best(server, self.store, len(history))

    def _tell(self, event: Record) -> None:
        for callback in self.callbacks:
            callback(event)
