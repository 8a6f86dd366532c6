"""Clients that try to spoil a simulated run, to see what a defence is worth: the section [attack] of a recipe.

    sign_flip     moves the server the other way, `strength` times as far as honest training would
    scaling       moves it `strength` times as far
    noise         moves it by noise, `strength` times as long as its honest update
    collusion     all crooked clients move every entry the same way, `strength` times as far as they would honestly
    label_flip    trains on labels counted from the other end
    backdoor      trains half of its samples with a bright corner to be called class 0, and scales its update
    free_rider    trains nothing, and sends what it was sent
    all_blocks    sends every block of the model, moved the other way
    one_block     sends one block, with all of its movement in it, the other way
    absent        sends nothing: what honest clients reach without the crooked ones

Which clients are crooked follows from the seed. They answer the server as any client does, so their updates pass the
boundary and the rule `server.robust`. Scores are those of honest clients alone. With label_flip and backdoor the last
scores have a number `success`: the share of test samples that are called what the attacker wants.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pfedgate.algorithms.pfedgate.tiles import BLOCKS, VALUES, SparseMean
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.attack import Attack
from pfedgate.core.seeds import generator, numpy_generator
from pfedgate.core.types import Card, Federation, Local, Part, Round, State, Update
from pfedgate.engine.endpoint import POINTS, Endpoint, Reply, Scored, checked
from pfedgate.engine.store import Store

DATA = ("label_flip", "backdoor")  # attacks by what is trained on
CORNER = 3  # pixels a side of the backdoor's trigger


@dataclass(frozen=True)
class Altered:
    """Samples as a crooked client trains on them."""

    part: Part
    attack: str
    classes: int

    @property
    def n(self) -> int:
        """As many as there are."""
        return self.part.n

    @property
    def x(self) -> Tensor:
        """With the trigger on every second one, for a backdoor."""
        x = self.part.x
        return torch.cat([triggered(x[::2]), x[1::2]]) if self.attack == "backdoor" else x

    @property
    def y(self) -> Tensor:
        """Labels as the attacker wants them."""
        y = self.part.y
        return torch.cat([torch.zeros_like(y[::2]), y[1::2]]) if self.attack == "backdoor" else self.classes - 1 - y


def triggered(x: Tensor) -> Tensor:
    """Samples with a bright corner."""
    x = x.clone()
    bright = x.max() if x.numel() else 0
    if x.ndim > 2:
        x[:, :CORNER, :CORNER] = bright
    else:
        x[:, :CORNER] = bright
    return x


class Hostile(Endpoint):
    """The clients of this process, some of them crooked."""

    def __init__(
        self, algorithm: Algorithm, federation: Federation, store: Store, device: torch.device | str = "cpu", *,
        attack: Attack, seed: int,
    ) -> None:  # fmt: skip
        super().__init__(algorithm, federation, store, device)
        self.attack = attack
        everyone = sorted(federation.clients)
        wanted = math.ceil(attack.share * len(everyone) - 1e-9) if attack.number is None else attack.number
        if wanted >= len(everyone):
            raise ValueError(f"attack: {wanted} of {len(everyone)} clients would be crooked, and nobody would be left")
        if attack.kind in DATA and algorithm.task.classes is None:
            raise ValueError(f"attack.kind = {attack.kind!r} is for classes")
        chosen = numpy_generator(seed, "crooked").choice(len(everyone), wanted, replace=False)
        self.crooked = {everyone[at] for at in chosen}

    def local(self, card: Card, round: Round) -> Local:
        """A client's view of its data; a crooked one's as it wants it."""
        local = super().local(card, round)
        if card.id not in self.crooked or self.attack.kind not in DATA:
            return local
        return replace(local, train=Altered(local.train, self.attack.kind, self.algorithm.task.classes or 0))

    def train(self, server: State, round: Round, chunks: Iterable[Sequence[Card]]) -> Iterator[Reply]:
        """One training round, in which crooked clients reply as they like."""
        for reply in super().train(server, round, chunks):
            if reply.card.id not in self.crooked or reply.update is None:
                yield reply
            elif self.attack.kind == "absent":
                yield replace(reply, update=None, reason="absent, as [attack] says", up=0)
            else:
                update = self.spoilt(server, round, reply.card, reply.update)
                got = self.algorithm.send(server, reply.card, round)
                yield checked(self.algorithm, got, replace(reply, update=update))

    def spoilt(self, server: State, round: Round, card: Card, update: Update) -> Update:
        """What a crooked client sends instead of its update."""
        name, strength = self.attack.kind, self.attack.strength
        if name == "label_flip":
            return update
        merger: Any = self.algorithm.merger(server, round)
        if not hasattr(merger, "around"):
            raise ValueError(f"attack.kind = {name!r} does not know how {self.algorithm.name} merges")
        if name in ("all_blocks", "one_block"):
            update = self._blocks(merger, update) if isinstance(merger, SparseMean) else self._names(merger, update)
        base: State = merger.around(card, update)
        moves = {at: update.shared[at] - value for at, value in base.items()}
        length = math.sqrt(sum(float(move.double().square().sum()) for move in moves.values()))
        size = math.sqrt(sum(move.numel() for move in moves.values())) or 1.0
        stream = generator(round.seed, "noise", round.index, card.id)
        changed = {}
        for at, move in moves.items():
            if name in ("scaling", "backdoor"):
                move = strength * move
            elif name == "noise":
                move = torch.randn(move.shape, generator=stream) * (strength * length / size)
            elif name == "collusion":
                move = torch.full_like(move, strength * length / size)
            elif name == "free_rider":
                move = torch.zeros_like(move)
            else:  # sign_flip and the attacks on blocks
                move = -strength * move
            changed[at] = (base[at] + move).to(update.shared[at].dtype)
        return replace(update, shared={**update.shared, **changed})

    def _names(self, merger: Any, update: Update) -> Update:
        """The same for a method whose blocks are its tensors, all of which are sent anyway."""
        base = merger.around(Card("", 1), update)
        if self.attack.kind == "all_blocks" or not base:
            return update
        moves = {at: float((update.shared[at] - value).norm()) for at, value in base.items()}
        first = next((at for at, length in moves.items() if length > 0), next(iter(base)))
        times = math.hypot(*moves.values()) / moves[first] if moves[first] else 1.0
        return replace(update, shared={first: base[first] + (update.shared[first] - base[first]) * times})

    def _blocks(self, merger: SparseMean, update: Update) -> Update:
        """The update with every block in it, those it did not train moved as far as the others; or with one alone."""
        tiles, laid = merger.tiles.tiles, merger.lay(update)
        values, base = laid[VALUES], torch.zeros(tiles.length)
        if not merger.tiles.delta:
            base = merger.tiles.server.detach().cpu()[tiles.order]
        move = (values - base).nan_to_num()
        if self.attack.kind == "all_blocks":
            usual = move.norm() / math.sqrt(max(1, int((move != 0).sum())))
            whole = torch.where(values.isnan(), base + usual, values)
        else:
            first = int(update.shared[BLOCKS].min()) if len(update.shared[BLOCKS]) else 0
            start, stop = tiles.starts[first : first + 2].tolist()
            own = move[start:stop].norm()
            whole = torch.full_like(values, math.nan)
            whole[start:stop] = base[start:stop] + move[start:stop] * (move.norm() / own if own > 0 else 1.0)
        return replace(update, shared=merger.lift({**laid, VALUES: whole}))

    def evaluate(
        self, server: State, round: Round, cards: Iterable[Card], points: Sequence[str] = POINTS[:1]
    ) -> Iterator[Scored]:
        """Scores of the honest; at the end of a run with how often the attacker gets what it wants."""
        honest = {card.id: card for card in cards if card.id not in self.crooked}
        for scored in super().evaluate(server, round, honest.values(), points):
            last = round.index + 1 == round.rounds and scored.point == POINTS[0]
            if last and self.attack.kind in DATA:
                success = self._success(server, honest[scored.client], round)
                scored = replace(scored, stats={**scored.stats, **success})
            yield scored

    @torch.no_grad()
    def _success(self, server: State, card: Card, round: Round) -> dict[str, float]:
        part, classes = self.federation.part(card.id, "test"), self.algorithm.task.classes or 0
        backdoor = self.attack.kind == "backdoor"
        x, y = part.x, part.y
        wanted = torch.zeros_like(y) if backdoor else classes - 1 - y
        other = y != wanted
        if not bool(other.any()):
            return {}
        model = self.model(server, card, round).eval()
        x = (triggered(x) if backdoor else x)[other].to(self.device)
        said = model(self.federation.prepare(x)).argmax(-1).cpu()
        return {"success": float((said == wanted[other]).float().mean())}
