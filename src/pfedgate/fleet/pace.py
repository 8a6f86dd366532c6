"""The options of [fleet] in a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from pfedgate.core.errors import unknown

POLICIES = ("synchronous", "deadline", "tiered", "asynchronous")


@dataclass(frozen=True)
class Pace:
    """[fleet]: the clients' devices, and whom a round waits for."""

    devices: str = ""  # phones, sensors, hospitals, or a file (TOML, CSV, FedScale's trace); "" keeps no virtual time
    policy: str = "synchronous"  # synchronous, deadline, tiered, asynchronous
    deadline: float | None = None  # deadline: virtual seconds a round may take
    oversample: float = 1.3  # deadline: clients drawn for each one wanted (Bonawitz et al. 2019)
    tiers: int = 3  # tiered: classes of alike fast clients
    buffer: float = 0.25  # asynchronous: updates a merge waits for, as a share of the clients in flight, or a number
    staleness: float = 0.5  # asynchronous: an entry s merges old counts 1 / (1 + s) to this power (FedBuff's)
    stalest: int = 20  # asynchronous: an update older than so many merges is dropped

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"fleet.policy: {unknown('policy', self.policy, POLICIES)}")
        if self.policy != "synchronous" and not self.devices:
            raise ValueError(f"fleet.policy={self.policy!r} needs to know how fast clients are: set fleet.devices")
        if (self.deadline is not None and not self.deadline > 0) or not self.oversample >= 1 or self.tiers < 1:
            raise ValueError("fleet: deadline is more than 0, oversample at least 1, tiers at least 1")
        if not self.buffer > 0 or not self.staleness >= 0 or self.stalest < 0:
            raise ValueError("fleet: buffer is more than 0; staleness and stalest are not negative")
