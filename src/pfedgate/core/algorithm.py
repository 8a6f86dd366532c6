"""The shape of an algorithm. Read this page before writing one; nothing else is needed.

    State = dict[str, Tensor]                    everything stored, sent or checkpointed is one
    Card(id, n_train, budget)                    all a server may know of a client
    Round(index, rounds, seed, factor, total)    where the run is; server and clients know it
        round.generator("purpose")               randomness that all clients of the round share
    Local(card, train, val, round, device, prepare)    a client's side of one call; no test data in it
        local.n                                  training samples
        local.generator("purpose")               randomness of this client in this round
    Update(shared, weight, metrics)              what a client sends: new values, weight > 0, numbers

A subclass is a frozen dataclass; its fields ARE its hyper-parameters (recipes, command line and reports read
them). It overrides `train`, and whatever else differs from FedAvg. Rules:

- State in, State out. No `self.x = …`, no tensor survives a call except by being returned; never change a
  State you were given (nor its tensors).
- Private state is what `train` returns second. It never travels; only `serve` reads or writes it.
- Training goes through `fit` (or `loop`, if you bring your own modules): one batch loop, the same
  batches for every algorithm, clipping, schedule and counting included.
- Updates carry *values* of what is shared; the default merger averages them, weighted. Entries of whole
  numbers are maxed. If you send something else, override `merger` (and `landed`).
- An algorithm in `pfedgate/algorithms/` with `@register("name")` exists everywhere: recipes, CLI, laws, docs.

FedAvg, whole:

    @register("fedavg")
    @dataclass(frozen=True)
    class FedAvg(Algorithm):
        def train(self, got, private, local):
            done = fit(self.task, got, local)
            return Update(done.state, local.n, done.metrics), {}

A round, as `engine.server` runs it: draw cards → `send` → `train` → `check` → `merger.add` → `merger.result` →
evaluate → checkpoint.

Useful: `training.fit.fit/loop/evaluate`, `core.modules.initial/module`, `core.state.split/under/inside/pick/clone`,
`core.mergers.WeightedMean`; `algorithms.pfedgate.tiles.pack_tiles/TileMean` for sparse updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from pfedgate.core.kinds import KINDS
from pfedgate.core.mergers import Merger, WeightedMean
from pfedgate.core.modules import initial, module
from pfedgate.core.state import rebased
from pfedgate.core.types import Card, Local, Round, State, Task, Update


@dataclass(frozen=True)
class Algorithm:
    """A federated method as pure functions over explicit state."""

    task: Task

    name: ClassVar[str] = ""  # set by @register
    paper: ClassVar[str] = ""  # authors, title, year
    shares: ClassVar[str] = "the whole model"  # one line for the table of algorithms
    keeps: ClassVar[str] = "nothing"  # the private State, in a line for the same table
    budgeted: ClassVar[bool] = False  # whether a client's budget changes anything
    sends_whole: ClassVar[bool] = True  # whether `send` gives a client all of the model, whatever its budget
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {}  # values the paper searched over, by field
    kinds: ClassVar[Sequence[str]] = tuple(KINDS)  # kinds of task that it can learn
    tunes: ClassVar[bool] = False  # `personalise` takes gradient steps: its models are not those just received
    adds: ClassVar[bool] = False  # `predictor` adds `task.added` itself, where the end would be the wrong place
    apart: ClassVar[str] = ""  # why entries of its updates cannot be compared client by client: see `core.robust`
    sums: ClassVar[bool] = False  # it has a merger of its own that is a sum of what `landed` copies moved by
    by_samples: ClassVar[bool] = False  # an update tells of data only what one `fit` of the task's loss has made of it
    reads_batches: ClassVar[bool] = False  # a prediction depends on the other samples of its batch

    def init_server(self, seed: int) -> State:
        """The server's first State. Default: the model's initial parameters and buffers."""
        return initial(self.task, seed)

    def init_client(self, got: State, local: Local) -> State:
        """The private State of a client that has none yet. Default: nothing.

        It is called when a client is first needed, so let it depend on the seed and the client
        (`initial(self.task, local.round.seed)`), not on `got`, unless the method says otherwise.
        `local.round.index` is 0 here and generators do not depend on the round.
        """
        return {}

    def send(self, server: State, card: Card, round: Round) -> State:
        """What the server sends to this client. Default: everything it has."""
        return server

    def ready(self, card: Card) -> None:
        """Raise if a client with this card could never train: asked before a run begins. Default: all could."""

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """A client's round: what it sends back, and its new private State."""
        raise NotImplementedError(f"{type(self).__name__} must define train")

    def merger(self, server: State, round: Round) -> Merger:
        """An accumulator that turns the round's updates into the server's next State. Default: weighted mean."""
        return WeightedMean(server, round.total)

    def personalise(self, got: State, private: State, local: Local) -> State:
        """Private State to predict with, made before every evaluation and thrown away after it.

        Default: `private` as it is. FedAvg-FT fine-tunes here, kNN-Per builds its memory.
        """
        return private

    def adapt(self, got: State, private: State, local: Local) -> State:
        """Private State of a client never seen in training, once training is over; `got` stays as it is.

        Default: `private`, fresh from `init_client`. `personalise` follows, as for any client.
        """
        return private

    def own_epochs(self, got: State, private: State, local: Local) -> tuple[State, State, float]:
        """The client's own epochs after the broadcast, for scores "after_local"; what is thrown away after them.

        Default: a round of `train`, of which the client keeps its own copy. Returns both States and the FLOPs.
        """
        update, private = self.train(got, private, local)
        return self.landed(got, update), private, update.metrics.get("flops", 0.0)

    def per_client(self) -> Algorithm:
        """The same method with one decision per client instead of one per batch. Default: itself."""
        return self

    def landed(self, got: State, update: Update) -> State:
        """The client's own copy of the shared part after its training, for scores "after_local"."""
        return {**got, **update.shared}

    def rebase(self, update: Update, sent: Sequence[State], power: float) -> Update:
        """An update that comes late, as if its client had started from today's server.

        `sent` is what the client would have been sent at each merge since it started, from the State it got to
        today's. Default: every entry moves by what the server has learnt, discounted by its own staleness.
        """
        shared = {
            name: rebased(value, [state[name] for state in sent], power)
            if value.is_floating_point() and all(name in state and state[name].shape == value.shape for state in sent)
            else value
            for name, value in update.shared.items()
        }
        return replace(update, shared=shared)

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The client's model: what is scored and exported. Default: the model with the values got.

        A method `stats() -> dict[str, float]` of the module (density, q, …) is recorded with its scores.
        """
        return module(self.task, got)

    def check(self, got: State, update: Update) -> str | None:
        """Why this update must be refused, or None. Default: names, shapes and types are those sent."""
        for name, value in update.shared.items():
            if name in got and (got[name].shape != value.shape or got[name].dtype != value.dtype):
                return (
                    f"{name!r} is {value.dtype} {tuple(value.shape)}, "
                    f"expected {got[name].dtype} {tuple(got[name].shape)}"
                )
            if name not in got:
                return f"{name!r} was never sent to the client"
        return None

    def clients_named(self) -> Iterable[str]:
        """Clients that options name: a run without one of them is refused."""
        return ()

    def train_many(
        self, gots: Sequence[State], privates: Sequence[State], locals: Sequence[Local]
    ) -> list[tuple[Update, State]]:
        """Several clients at once. Default: one after the other; see `stacked` for many small ones."""
        return [self.train(*client) for client in zip(gots, privates, locals, strict=True)]

    @property
    def stacks(self) -> bool:
        """Whether `train_many` is more than a loop for this task."""
        return False

    @classmethod
    def example(cls, task: Task) -> Algorithm:
        """An instance that can run on any small task: what the laws and the table of algorithms use.

        Override it if the defaults do not suffice (public data, a smaller network on the server, …).
        """
        return cls(task)

    def options(self) -> dict[str, Any]:
        """The hyper-parameters of this algorithm (not those of its task)."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "task"}
