"""A study of clients who differ in what things look like, where masks can be personal: `reproduce domains`."""

from __future__ import annotations

from dataclasses import replace

from pfedgate.studies.declare import ACC, FLOPS, UP, VALIDATION, WORST, Claim, Column, Row, Study

DIGITS = Column("digits", "digits", {"data.domains": "rotate", "data.alpha": 0.3}, "rotated")
ROTATED = Column("Fashion-MNIST", "fashion", {"data.domains": "rotate"}, "rotated")
INVERTED = Column("CIFAR-10", "cifar10", {"data.domains": "rotate+negate"}, "rotated and inverted")
TURNED = Column("CIFAR-10", "cifar10", {"data.domains": "rotate"}, "rotated")
SEVERAL = Column(
    "Fashion-MNIST", "fashion", {"data.domains": "rotate", "data.domains_each": 2}, "two rotations in a client"
)
MIXTURE = Column("digits, letters and clothes", "mixture")
PATHOLOGICAL = Column("Fashion-MNIST", "fashion", {"data.partition": "pathological"}, "two classes a client")
PLAIN, WRITERS = Column("Fashion-MNIST", "fashion"), Column("FEMNIST", "femnist")


def masks(budget: float, candidates: int, core: float = 1.0) -> Row:
    """A row of pFedGate within a budget on all resources; several candidates are chosen among."""
    what = "one common mask" if candidates == 1 else f"chosen of {candidates}" + ("" if core else ", no core")
    settings = {"clients.budget": budget, "algorithm.gate.candidates": candidates, "algorithm.gate.core": core}
    return Row(f"pFedGate, s = {budget:g}, {what}", "pfedgate", settings)


DENSE = (
    Row("pFedGate, s = 1", "pfedgate", {"clients.budget": 1.0}),
    *(Row(name, name.lower()) for name in ("FedAvg", "FedPer", "FedRep", "FedEM", "FedDBE", "IFCA")),
)
BUDGETS = (0.3, 0.1)
# The sceptic's control: separate networks in the shape that a common mask leaves, with what gates know of labels.
NARROW = {
    s: Row(f"IFCA, 4 networks of that shape, s = {s:g}", "ifca", {"train.correction": "prediction"}, narrow=("mask", s))
    for s in BUDGETS
}
# Where looks differ, a private head is worth most: the strongest dense methods, as cheap as the gates.
CHEAP = {
    s: tuple(
        Row(f"{name}, in that shape, s = {s:g}", name.lower(), narrow=("mask", s)) for name in ("FedPer", "FedRep")
    )
    for s in BUDGETS
}
COMMON = {budget: masks(budget, 1) for budget in BUDGETS}
CHOSEN = {budget: masks(budget, 8) for budget in BUDGETS}
# What choosing could reach at best: every client is told its domain, as many candidates as domains.
TOLD = tuple(
    replace(row, name=f"pFedGate, s = {s:g}, told by domain", settings={**row.settings, "algorithm.told": "@domains"})
    for s in BUDGETS
    for row in (masks(s, 4),)
)

DOMAINS = Study(
    "domains",
    "Clients who differ in what things look like",
    (
        *COMMON.values(),
        *CHOSEN.values(),
        *(masks(budget, 8, 0.0) for budget in BUDGETS),
        *TOLD,
        *NARROW.values(),
        *(row for rows in CHEAP.values() for row in rows),
        *DENSE,
    ),
    (DIGITS, ROTATED, INVERTED, TURNED, MIXTURE, SEVERAL, PATHOLOGICAL, PLAIN, WRITERS),
    (ACC, WORST, VALIDATION, FLOPS, UP),
    worlds=("digits", "fashion", "cifar10", "mixture", "femnist"),
    more_seeds=True,
    claims=(
        *(
            Claim(f"chosen masks minus one common mask, s = {s:g} of all", (CHOSEN[s].name,), (COMMON[s].name,), aim=6)
            for s in BUDGETS
        ),
        Claim("chosen masks, s = .3 of all, minus dense methods", (CHOSEN[0.3].name,), tuple(r.name for r in DENSE)),
        *(
            Claim(f"chosen masks minus separate narrow networks, s = {s:g}", (CHOSEN[s].name,), (NARROW[s].name,))
            for s in BUDGETS
        ),
        *(
            Claim(
                f"chosen masks minus narrow networks with private heads, s = {s:g}",
                (CHOSEN[s].name,),
                tuple(row.name for row in CHEAP[s]),
            )
            for s in BUDGETS
        ),
    ),
    note="Every quarter of the clients is turned by another 90°, inverted: every second of them. A client chooses by "
    "the loss on 32 of its samples, whose forward passes are counted.",
)
