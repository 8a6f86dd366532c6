"""A study of phones that differ in speed, where a budget keeps slow devices in time: `reproduce fleet`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pfedgate.runs.progress import clock, scaled, size
from pfedgate.studies.declare import ACC, VALIDATION, WORST, Claim, Column, Number, Row, Study

# A deadline is the virtual time in which a round with the whole model leaves out the old phones: about .4 of theirs.
PHONES = {"fleet.devices": "phones"}
COLUMNS = (
    Column("CIFAR-10", "cifar10", {**PHONES, "fleet.deadline": 2.0}),
    Column("FEMNIST", "femnist", {**PHONES, "fleet.deadline": 9.0}),
    Column("Fashion-MNIST", "fashion", {**PHONES, "fleet.deadline": 9.0}),
)
OWN = {"clients.budget": "device"}  # of memory, the deadline and the data plan
CORRECTED = {"train.correction": "prediction"}


def sparse(name: str, method: str, **options: Any) -> Row:
    """A row whose clients train what their devices afford by the deadline: less than half of what a whole round takes.

    Twice as many rounds then fit into FedAvg's virtual time.
    """
    return Row(f"{name}, by device", method, {**OWN, **CORRECTED, **options}, longer=2)


FEDAVG = Row("FedAvg, waits for all", "fedavg", CORRECTED)
DENSE = (
    Row("FedAvg, drops who is late", "fedavg", {**CORRECTED, "fleet.policy": "deadline", "fleet.oversample": 1.0}),
    # Its round trains one class of three, and an asynchronous merge takes in a quarter of the clients: without more
    # rounds these policies would end early, after a third and a quarter of the work.
    Row("FedAvg, tiered", "fedavg", {**CORRECTED, "fleet.policy": "tiered"}, longer=3),
    Row("FedAvg, asynchronous", "fedavg", {**CORRECTED, "fleet.policy": "asynchronous"}, longer=4),
    # With the first the oldest phone just keeps the deadlines above, with the second it needs a quarter of them.
    *(
        Row(f"FedAvg, as narrow as s = {s:g}", "fedavg", CORRECTED, narrow=("even", s), longer=longer)
        for s, longer in ((0.5, 2), (0.2, 4))
    ),
    Row("FedRep, waits for all", "fedrep", CORRECTED),
    Row("FedDBE, waits for all", "feddbe", CORRECTED),
)
SPARSE = (
    sparse("HeteroFL", "heterofl", **{"algorithm.level": "none"}),
    sparse("FedRolex", "fedrolex"),
    sparse("FjORD", "fjord"),
)
GATE = sparse("pFedGate", "pfedgate", **{"algorithm.resources": "all"})
ASYNC = replace(
    GATE, name=f"{GATE.name}, asynchronous", settings={**GATE.settings, "fleet.policy": "asynchronous"}, longer=8
)

TIME = Number("virtual_seconds", "virtual time to FedAvg's best", clock, min, reach=True)
UPLOAD = Number("bytes_up", "upload to it", size, min, reach=True)
ENERGY = Number("joules", "energy to it", lambda value: scaled(value, "J"), min, reach=True)
WEAKEST = Number("weakest_third", "weakest third of devices, last round, %")
LATE = Number("late", "updates too late, %", best=min)

FLEET = Study(
    "fleet",
    "Phones of three generations: accuracy over time, traffic and energy",
    (FEDAVG, *DENSE, *SPARSE, GATE, ASYNC),
    COLUMNS,
    (
        ACC, WORST, WEAKEST, VALIDATION, TIME, replace(TIME, title="×", show="{:.2f}".format, over_first=True),
        UPLOAD, replace(UPLOAD, title="× ", show="{:.2f}".format, over_first=True), ENERGY, LATE,
    ),
    worlds=("cifar10", "femnist", "fashion"),
    more_seeds=True,
    look="weakest",
    claims=(
        Claim("pFedGate minus FedAvg that waits for all", (GATE.name, ASYNC.name), (FEDAVG.name,)),
        Claim("pFedGate minus dense methods", (GATE.name, ASYNC.name), (FEDAVG.name, *(row.name for row in DENSE))),
        Claim("pFedGate minus other sparse methods", (GATE.name, ASYNC.name), tuple(row.name for row in SPARSE)),
    ),
    note="Time and energy are virtual: counted FLOPs and bytes over what a phone of each generation does. A third of "
    "the clients owns each. To FedAvg's best: until the accuracy on validation data is what FedAvg, waiting for all, "
    "reaches at its best with the same seed; × is the share of what FedAvg needs for it. All methods add the clients' "
    "label frequencies at prediction.",
)  # fmt: skip
