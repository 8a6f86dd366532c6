"""A run with differential privacy: what is possible, who is drawn, how updates are merged, and what has been spent.

    guard = Guard(options.privacy, algorithm, options, roster, key)
    guard.draw(round); guard.merger(server, round); guard.spent(rounds)

Each client is drawn for itself with the same chance (Poisson sampling), because the accountant's bound is for that.
The promise: whoever sees the server's States of all rounds, and knows all other clients' data, learns little whether a
client took part. It does not cover scores, logs and reports, nor what the server itself sees: single updates.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from functools import cache

import numpy as np

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.privacy import NoisyMean, uniform
from pfedgate.core.robust import FOR_ALL
from pfedgate.core.types import Card, Privacy, Round, State
from pfedgate.engine.roster import Options, Roster
from pfedgate.training.dpsgd import share_and_steps, unfit

INSTALL = "pip install 'pfedgate[privacy]'"


def possible(algorithm: Algorithm, options: Options) -> None:
    """Refuse what the promise would not hold for, with the reason."""
    if options.privacy.level == "none":
        return
    name, task = algorithm.name or type(algorithm).__name__, algorithm.task
    what = f"privacy.level={options.privacy.level!r}"
    followed = {"train.schedule='plateau'": task.schedule.name == "plateau", "train.stop_after": options.stop_after}
    for setting in (name for name, used in followed.items() if used):
        raise ValueError(
            f"{what} is not possible with {setting}: training would follow validation scores, which get no noise"
        )
    if options.privacy.level == "sample":
        if not vars(type(algorithm)).get("by_samples"):
            raise ValueError(
                f"{what} is not possible with {name}: its updates hold more of the data than gradients of single "
                "samples (a choice, statistics, a second training); fedavg, fedprox and fedper do not"
            )
        if task.private != options.privacy:
            raise ValueError(f"{what} needs the task to say so: Task(private=…), as a recipe's [privacy] does")
        if task.correction == "training" or task.shift:
            raise ValueError(
                f"{what} is not possible with train.correction='training' or train.shift: a sample's gradient would "
                "depend on the labels of the others; take train.correction='prediction'"
            )
        if reason := unfit(task.model):
            raise ValueError(f"{what} is not possible with this model: {reason}")
        epsilon(options.privacy.noise, 1.0, 1, options.privacy.delta)  # whether the accountant is installed
        return
    if type(algorithm).send is not Algorithm.send:
        raise ValueError(
            f"{what} is not possible with {name}: it sends each client something else, so that there is no common "
            "State from which clients move"
        )
    if type(algorithm).merger is not Algorithm.merger and not algorithm.sums:
        raise ValueError(
            f"{what} is not possible with {name}: its merging is not a plain sum of what clients moved by, so that "
            "shortening updates does not bound what one client changes"
        )
    if options.server.robust not in FOR_ALL:
        raise ValueError(
            f"{what} is not possible with server.robust={options.server.robust!r}: noise is for a sum of updates that "
            "are shortened one by one, not for one that compares them; leave it out, as updates are shortened anyway"
        )
    if options.fleet.policy != "synchronous":
        raise ValueError(
            f"{what} is not possible with fleet.policy={options.fleet.policy!r}: whether an update counts, and how "
            "much, would depend on other clients; take synchronous"
        )
    if options.agg_norm == "all":
        raise ValueError(f"{what} divides by a fixed number of clients already: leave out clients.agg_norm='all'")


class Guard:
    """Client-level privacy of one run."""

    def __init__(self, algorithm: Algorithm, options: Options, roster: Roster, key: bytes) -> None:
        self.algorithm, self.privacy, self.roster, self.key = algorithm, options.privacy, roster, key
        able = len(roster.able)
        self.share = roster.wanted(options.sample) / able if isinstance(options.sample, int) else options.sample
        self.expected = self.share * able
        self.spent(1)  # whether the accountant is installed, before anybody trains

    def draw(self, round: Round) -> list[Card]:
        """The clients of a round, each drawn for itself; it may be none."""
        cards = [self.roster.card(int(at)) for at in self.roster.able]
        if self.share >= 1:
            return cards
        return [card for card in cards if uniform(self.key, f"draw/{round.index}/{card.id}") < self.share]

    def merger(self, server: State, round: Round) -> NoisyMean:
        """The round's merger, in place of the method's own."""
        return NoisyMean(self.algorithm, server, self.privacy, self.expected, self.key, round.index)

    def spent(self, rounds: int) -> float:
        """Epsilon after so many rounds, at the run's delta; infinite without noise."""
        return epsilon(self.privacy.noise, self.share, rounds, self.privacy.delta)

    def record(self, rounds: int, norms: list[float]) -> dict[str, float]:
        """What a round's record says of privacy: epsilon so far, and of the updates before they were shortened."""
        about = {"epsilon": self.spent(rounds)}
        if norms:
            about["update_norm"] = float(np.median(norms))
            about["shortened"] = sum(norm > self.privacy.clip for norm in norms) / len(norms)
        return about


def spent_on_samples(algorithm: Algorithm, options: Options, n: int, rounds: int) -> float:
    """Epsilon of each of a client's n samples after so many rounds in which it trained."""
    share, steps = share_and_steps(algorithm.task, n)
    return epsilon(options.privacy.noise, share, steps * rounds, options.privacy.delta)


def fresh_key(privacy: Privacy, seed: int) -> bytes:
    """The key of a run's noise and draws: of nobody else, or with `secret = false` of its seed."""
    return os.urandom(32) if privacy.secret else hashlib.blake2b(f"privacy/{seed}".encode(), digest_size=32).digest()


@cache
def epsilon(noise: float, share: float, steps: int, delta: float) -> float:
    """Epsilon of so many sums with Gaussian noise, each over a Poisson sample: the bound by Rényi divergences.

    >>> round(epsilon(1.1, 256 / 60_000, 60 * 234, 1e-5), 3)
    2.594
    """
    if not steps:
        return 0.0
    if not noise:
        return math.inf
    try:
        from opacus.accountants.analysis import rdp
    except ImportError as error:
        raise ImportError(f"counting epsilon needs the package 'opacus': {INSTALL}") from error
    orders = [1 + at / 10 for at in range(1, 100)] + list(range(12, 256))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of orders at the ends of the range
        divergences = rdp.compute_rdp(q=share, noise_multiplier=noise, steps=steps, orders=orders)
        return float(rdp.get_privacy_spent(orders=orders, rdp=divergences, delta=delta)[0])
