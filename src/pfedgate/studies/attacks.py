"""A study of crooked clients, and of rules that bound what they can do: `reproduce attacks`."""

from __future__ import annotations

from typing import Any

from pfedgate.studies.declare import Column, Number, Row, Study

RULES = ("off", "guard", "clip", "median", "trimmed", "geometric", "krum")
METHODS = {"FedAvg": ("fedavg", {}), "pFedGate": ("pfedgate", {"clients.budget": 0.5, "algorithm.resources": "all"})}

# As many clients on little data as two cores can train several hundred times.
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"data.clients": 20, "data.samples": "none", "data.alpha": 0.1, "train.rounds": 20, "evaluate.every": 20},
    "cifar10": {"data.clients": 20, "data.samples": 4000, "train.rounds": 30, "evaluate.every": 30},
}
TITLES = {"digits": "digits", "cifar10": "CIFAR-10"}

# By what a table calls it: kind, share, strength; a whole number is one of clients.
ABSENT, ONE_ABSENT = "20 % absent", "one absent"
FLIP, ONE = "20 % sign flip × 10", "one × 100"
KINDS: dict[str, tuple[str, float | int, float]] = {
    "all honest": ("none", 0.0, 0.0),
    ABSENT: ("absent", 0.2, 0.0),
    ONE_ABSENT: ("absent", 1, 0.0),
    FLIP: ("sign_flip", 0.2, 10.0),
    "10 % sign flip × 10": ("sign_flip", 0.1, 10.0),
    "30 % sign flip × 10": ("sign_flip", 0.3, 10.0),
    "20 % sign flip × 2.5": ("sign_flip", 0.2, 2.5),
    ONE: ("scaling", 1, 100.0),
    "20 % noise × 10": ("noise", 0.2, 10.0),
    "20 % collusion × 10": ("collusion", 0.2, 10.0),
    "20 % flipped labels": ("label_flip", 0.2, 1.0),
    "20 % backdoor × 10": ("backdoor", 0.2, 10.0),
    "20 % free riders": ("free_rider", 0.2, 0.0),
    "20 % all blocks × 3": ("all_blocks", 0.2, 3.0),
    "20 % one block × 3": ("one_block", 0.2, 3.0),
}


# On CIFAR-10, where a run takes ten times as long, what crooked clients cost with the recommended rule.
WANTED = {"digits": tuple(KINDS), "cifar10": ("all honest", ABSENT, ONE_ABSENT, FLIP, ONE)}


def column(data: str, what: str) -> Column:
    """A data set with crooked clients."""
    kind, share, strength = KINDS[what]
    attack = {"attack.kind": kind, "attack.strength": strength} if kind != "none" else {}
    if attack:
        attack |= {"attack.number": share} if isinstance(share, int) else {"attack.share": share}
    return Column(TITLES[data], data, {**SETTINGS[data], **attack}, what)


ATTACKS = Study(
    "attacks",
    "Crooked clients, and rules that bound what they can do",
    tuple(
        Row(f"{name}, {rule}", method, {**settings, "server.robust": rule}, control=True)
        for name, (method, settings) in METHODS.items()
        for rule in RULES
    ),
    tuple(column(data, what) for data, kinds in WANTED.items() for what in kinds),
    (
        Number("accuracy", "Accuracy of honest clients after the last round, %"),
        Number("success", "Test samples of honest clients called what the attacker wants, %", best=min),
    ),
    matrix=True,
    seeds=3,
    drops=((ABSENT, FLIP), (ONE_ABSENT, ONE)),
    note="Rows: method and server.robust. Columns: what the crooked clients do, and how many they are. Crooked clients "
    "are drawn by seed; scores are those of the honest ones, so what an attack costs is the difference to a run in "
    "which the same clients are absent (drop). × is the length of the crooked update, as a multiple of the honest one; "
    "an attacker who knows what clip lets pass stays within it (× 2.5). The limits of "
    "clip, 3 and 6 times the usual distance, were chosen among eight pairs with FedAvg on digits and these seeds.",
)  # fmt: skip
