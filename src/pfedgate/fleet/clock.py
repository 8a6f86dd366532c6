"""Virtual time: what a client's work would have taken on its device. It is counted, never measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from pfedgate.core.seeds import key
from pfedgate.fleet.devices import Fleet


@dataclass(frozen=True)
class Cost:
    """Seconds and joules of one client's round."""

    download: float
    compute: float
    upload: float
    joules: float

    @property
    def seconds(self) -> float:
        """From the broadcast to the arrival of the update."""
        return self.download + self.compute + self.upload


class Clock:
    """Turns FLOPs and bytes into time and energy, with jitter by seed, round and client.

    >>> clock = Clock(Fleet.of("phones", ["anna"]), seed=0)
    >>> cost = clock.cost("anna", 0, flops=3e9, steps=3, down=1_000_000, up=300_000)
    >>> cost == clock.cost("anna", 0, flops=3e9, steps=3, down=1_000_000, up=300_000), cost.seconds > 0
    (True, True)
    """

    def __init__(self, fleet: Fleet, seed: int = 0) -> None:
        self.fleet, self.seed = fleet, seed

    def cost(self, client: str, round: int, *, flops: float, steps: int, down: int, up: int) -> Cost:
        """What a client's round takes: bytes over its link, FLOPs and steps on its processor."""
        device = self.fleet.device(client)
        compute = flops / (1e9 * device.gflops) + 1e-3 * device.overhead_ms * steps
        compute *= self._jitter(client, round, "compute", device.jitter)
        network = self._jitter(client, round, "network", device.jitter)
        joules = compute * device.watts
        joules += 1e-6 * (down * device.joules_per_mb_down + up * device.joules_per_mb_up)
        return Cost(8e-6 * down / device.down_mbps * network, compute, 8e-6 * up / device.up_mbps * network, joules)

    def speed(self, client: str, samples: int) -> float:
        """Seconds per GFLOP of all samples: a rank of clients by their devices, without jitter."""
        return samples / self.fleet.device(client).gflops

    def wait(self, client: str, at: float) -> float:
        """Seconds from a moment until the device is there: 0 while it is.

        >>> clock = Clock(Fleet.of("sensors", [str(i) for i in range(10)]))
        >>> all(clock.wait(client, at + clock.wait(client, at)) == 0 for client in "0123456789" for at in (0.0, 2e3))
        True
        """
        device = self.fleet.device(client)
        period = 3600 * device.period_hours
        if device.duty == 1:
            return 0.0
        # The device is there in the first part of each of its periods, which begin at a moment of its own.
        phase = (at + key(self.seed, "phase", client) / 2**64 * period) % period
        return 0.0 if phase < device.duty * period else math.nextafter(period - phase, math.inf) + 1e-6

    def _jitter(self, client: str, round: int, purpose: str, deviation: float) -> float:
        share = (key(self.seed, "jitter", purpose, round, client) + 0.5) / 2**64
        return math.exp(deviation * NormalDist().inv_cdf(min(max(share, 1e-12), 1 - 1e-12)))
