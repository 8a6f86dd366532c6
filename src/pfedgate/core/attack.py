"""What crooked clients of a simulated run do: the options of [attack]; `engine.hostile` has the attacks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pfedgate.core.errors import unknown

ATTACKS = (
    "none", "sign_flip", "scaling", "noise", "collusion", "label_flip", "backdoor", "free_rider", "all_blocks",
    "one_block", "absent",
)  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """[attack]: clients that try to spoil a simulated run; see `engine.hostile`."""

    kind: str = "none"  # none, sign_flip, scaling, noise, collusion, label_flip, backdoor, free_rider, …
    share: float = 0.2  # of the training clients that are crooked
    number: int | None = None  # how many are, instead of the share
    strength: float = 10.0  # times the length of an honest update

    def __post_init__(self) -> None:
        if self.kind not in ATTACKS:
            raise ValueError(f"attack.kind: {unknown('attack', self.kind, ATTACKS)}")
        if not 0 <= self.share < 1 or (self.number or 0) < 0 or not 0 <= self.strength < math.inf:
            raise ValueError("attack: share is in [0, 1), number and strength are not negative")
