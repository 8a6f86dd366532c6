"""Learning-rate schedules indexed by the global round, the same for every algorithm and every client.

The references step a scheduler per client, so that under partial participation the rate never decays
(`baselines` 2.1). Here a schedule is a pure function of the round and of the validation scores seen so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pfedgate.core.errors import unknown

NAMES = ("constant", "multi_step", "cosine", "plateau")


@dataclass(frozen=True)
class Schedule:
    """What the learning rate is multiplied with in a round.

    >>> [Schedule("multi_step").factor(r, 8) for r in (0, 4, 6)]
    [1.0, 0.1, 0.01]
    """

    name: str = "constant"
    milestones: tuple[float, ...] = (0.5, 0.75)  # multi_step: shares of all rounds (FedEM's choice)
    gamma: float = 0.1  # multi_step: factor at a milestone
    floor: float = 0.0  # cosine: where it ends
    factor_plateau: float = 0.75  # plateau: factor when validation stops rising
    patience: int = 10  # plateau: evaluations without a new best before the factor is applied
    warmup: int = 0  # any: rounds of linear rise at the start

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(unknown("schedule", self.name, NAMES))

    def factor(self, round: int, rounds: int, validation: Sequence[float] = ()) -> float:
        """The factor in `round` (from 0) of `rounds`; `validation` = the accuracies before it."""
        rise = min(1.0, (round + 1) / (self.warmup + 1))
        if self.name == "multi_step":
            passed = sum(round >= int(share * rounds) for share in self.milestones)
            value = round_off(self.gamma**passed)
        elif self.name == "cosine":
            value = self.floor + (1 - self.floor) * (1 + math.cos(math.pi * round / max(rounds, 1))) / 2
        elif self.name == "plateau":
            value = self.factor_plateau ** self._drops(validation)
        else:
            value = 1.0
        return rise * value

    def _drops(self, validation: Sequence[float]) -> int:
        # Replayed from the scores, so there is no scheduler state to checkpoint or to lose.
        best, waited, drops = -math.inf, 0, 0
        for score in validation:
            if score > best:
                best, waited = score, 0
            else:
                waited += 1
            if waited > self.patience:
                drops, waited = drops + 1, 0
        return drops


def round_off(value: float) -> float:
    """0.1 ** 2 prints as 0.010000000000000002; a schedule should print as it was meant."""
    return float(f"{value:.12g}")
