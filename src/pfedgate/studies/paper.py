"""Every table and figure of the paper, and a Pareto figure of ours.

pFedGate has two faces here: *plain*, with nothing private but the gate, and *with shift*, which adds one private value
per class. Budgets bind parameters (the paper's s) unless a row says "all": parameters, FLOPs and activation bytes.
"""

from __future__ import annotations

from typing import Any

from pfedgate.names import unknown
from pfedgate.studies.declare import ACC, DENSITY, FLOPS, LAST, SECONDS, UP, WORST, Column, Number, Q, Row, Study

MIXED = {"0.5": 0.5, "0.1": 0.5}  # half the clients at .5, half at .1

CIFAR10, FEMNIST = Column("CIFAR-10", "cifar10"), Column("FEMNIST", "femnist")
FEW_CLASSES = Column(
    "CIFAR-10", "cifar10", {"data.partition": "pathological", "data.clients": 10}, "10 clients of few classes"
)
EMNIST, CIFAR100 = Column("EMNIST", "emnist"), Column("CIFAR-100", "cifar100")


def gate(budget: Any, *, shift: bool = True, resources: str = "params", name: str = "", **options: Any) -> Row:
    """A row of pFedGate."""
    told = f"s = {budget:g}" if isinstance(budget, float) else "s = .5 and .1 mixed"
    told += {"params": "", "all": ", all resources"}[resources] if budget != 1.0 else ""
    if budget == 0.1 and resources == "all":
        options = {"smallest": 0.05, **options}  # twice that always kept would exceed the budget
    settings = {
        "clients.budget": budget,
        "algorithm.resources": resources if budget != 1.0 else "params",  # the whole model binds nothing
        "algorithm.shift": shift,
        **{f"algorithm.{key}": value for key, value in options.items()},
    }
    return Row(name or f"pFedGate{' + shift' if shift else ''}, {told}", "pfedgate", settings)


def plain(budget: Any, **options: Any) -> Row:
    """pFedGate with nothing private but the gate."""
    return gate(budget, shift=False, **options)


LOCAL, FEDAVG, FEDEM = Row("Local", "local_only"), Row("FedAvg", "fedavg"), Row("FedEM", "fedem")
FEDREP, PFEDME = Row("FedRep", "fedrep"), Row("pFedMe", "pfedme")
HETEROFL = Row("HeteroFL, s = .55 (10 % whole, 90 % half)", "heterofl", {"clients.budget": {"1.0": 0.1, "0.5": 0.9}})


def fedmask(density: float) -> Row:
    """A row of FedMask."""
    return Row(f"FedMask, s = {density:g}", "fedmask", {"algorithm.density": density})


BASELINES = (
    LOCAL,
    FEDAVG,
    Row("FedAvg-FT", "fedavg_ft"),
    PFEDME,
    Row("LG-FedAvg", "lg_fedavg"),
    Row("Ditto", "ditto"),
    FEDEM,
    FEDREP,
    Row("FedPer", "fedper"),
    fedmask(0.5),
    HETEROFL,
    *(Row(f"HeteroFL, s = {s:g}", "heterofl", {"clients.budget": s}) for s in (0.5, 0.3)),
)
GATES = tuple(
    gate(budget, shift=shift, resources=resources)
    for shift in (False, True)
    for budget, resources in (
        (1.0, "params"), (0.5, "params"), (0.5, "all"), (0.3, "params"), (0.3, "all"), (0.1, "params"), (0.1, "all"),
    )
)  # fmt: skip
BUDGETS = (1.0, 0.5, 0.3, 0.1)

STUDIES = (
    Study(
        "table1",
        "Accuracy of every method",
        (*BASELINES, *GATES),
        (EMNIST, FEMNIST, CIFAR10, CIFAR100),
        more_seeds=True,
        note="Acc and bottom decile are on test data, in the round that was best on validation data.",
    ),
    Study("table2", "Time and memory of a training step", measure="steps"),
    Study(
        "table3",
        "A fifth of the clients takes part in a round",
        (FEDAVG, FEDEM, gate(1.0), gate(0.5), gate(0.3)),
        tuple(
            Column(column.title, column.data, {"clients.fraction": share}, told)
            for column in (FEMNIST, CIFAR10)
            for told, share in (("all clients", 1.0), ("20 %", 0.2))
        ),
        (ACC, WORST),
        matrix=True,
    ),
    Study(
        "table4",
        "What the parts of the gate do",
        (
            plain(0.5),
            plain(0.5, pre_norm=False, name="without pre-norm"),
            plain(0.5, post_norm="none", name="without post-norm"),
            plain(0.5, activation="none", name="without sigmoid"),
            plain(0.5, predict="client", name="client-wise prediction"),
        ),
        (EMNIST, CIFAR10, CIFAR100),
        (
            ACC,
            WORST,
            Number("rounds_to_80", "T₀.₈ / first row", "{:.2f}".format, None, over_first=True),
            Number("rounds_to_80", "T₀.₈, rounds", "{:.0f}".format, min),
        ),
        note="T₀.₈ is the first round that reaches 80 % of a run's own best accuracy.",
    ),
    Study("table5", "Complexity: published, corrected and measured", measure="complexity"),
    Study(
        "table6",
        "Meta-learning and distillation",
        (
            FEDAVG,
            Row("Per-FedAvg", "per_fedavg"),
            PFEDME,
            Row("FedMD, far", "fedmd", {"algorithm.public": "@far"}),
            Row("FedMD, near", "fedmd", {"algorithm.public": "@near"}),
            FEDEM,
            gate(1.0),
            gate(0.5),
            gate(0.3),
        ),
        (FEMNIST, CIFAR10),
        (ACC, WORST, LAST, SECONDS),
    ),
    Study(
        "table8",
        "Clients that never took part",
        tuple(
            Row(row.name, row.method, {**row.settings, "clients.novel": 0.2})
            for row in (FEDAVG, Row("FedAvg-FT", "fedavg_ft"), FEDEM, FEDREP, gate(1.0), gate(0.5), gate(0.3))
        ),
        (FEMNIST, CIFAR10),
        (
            Number("accuracy", "trained clients, %"),
            Number("novel", "novel clients, %"),
            Number("novel_bottom_decile", "novel, bottom decile, %"),
            Number("accuracy", "gap, points", best=min, minus="novel"),
        ),
        note="All after the last round. FedAvg is used as it is, FedAvg-FT tunes the model for an epoch, pFedGate "
        "trains its gate for an epoch with the model frozen. A fifth of the clients is held out.",
    ),
    Study(
        "table9",
        "Rounds to 90 % of the best accuracy",
        (FEDAVG, FEDEM, FEDREP, gate(1.0), gate(0.5), gate(0.3)),
        (EMNIST, FEMNIST, CIFAR10, CIFAR100),
        (Number("rounds_to_90", "T₀.₉, rounds", "{:.0f}".format, min), ACC),
        matrix=True,
        note="The first evaluated round that reaches 90 % of a run's own best accuracy.",
    ),
    Study(
        "table10",
        "The shared model without gates, and the personal ones",
        tuple(map(plain, BUDGETS)),
        (EMNIST, CIFAR10),
        (
            Number("accuracy", "personal, %"),
            Number("bottom_decile", "personal, bottom decile, %"),
            Number("global", "shared as it is, %"),
            Number("global_trained", "shared after a round of FedAvg, %"),
            Number("accuracy", "gap, points", minus="global_trained"),
            Number("bottom_decile", "gap of bottom deciles", minus="global_trained_bottom_decile"),
        ),
        look="global",
        note="After the last round. The gap is to the shared model after a further local epoch and average, as in the "
        "paper: without gates the model as it is was never trained to be used.",
    ),
    Study(
        "table11",
        "Local epochs between two averages",
        tuple(map(gate, BUDGETS)),
        tuple(
            Column(column.title, column.data, {"train.epochs": epochs}, f"{epochs} epoch{'s' * (epochs > 1)}")
            for column in (FEMNIST, CIFAR10)
            for epochs in (1, 2, 4, 8)
        ),
        (ACC, WORST),
        matrix=True,
        note="The number of rounds is the same, so more epochs are more work. (The paper's caption says FEMNIST, its "
        "text EMNIST.)",
    ),
    Study(
        "table12",
        "How different the clients are",
        tuple(map(gate, BUDGETS)),
        tuple(
            Column("CIFAR-10", "cifar10", {"data.alpha": alpha}, f"α = {alpha:g}") for alpha in (0.4, 0.2, 0.1, 0.01)
        ),
        (ACC, WORST),
        matrix=True,
        note="A smaller α makes clients' labels more different; with few classes each, a client's own task is easier.",
    ),
    Study(
        "table13",
        "Ways to compress: blocks per layer, and FedMask",
        (
            FEDAVG,
            FEDEM,
            fedmask(0.5),
            fedmask(0.3),
            *(
                gate(budget, blocks=blocks, name=f"pFedGate + shift, B = {blocks}, s = {budget:g}")
                for blocks in (2, 5, 10)
                for budget in (0.5, 0.3)
            ),
        ),
        (FEMNIST, CIFAR10),
        (ACC, WORST, DENSITY, Q, UP),
    ),
    Study(
        "figure-clients",
        "Every client against the best baseline",
        (FEDEM, FEDREP, Row("FedPer", "fedper"), Row("Ditto", "ditto"), gate(0.5)),
        (FEMNIST, CIFAR10),
        (ACC, WORST),
        figure="clients",
        note="The baseline is the one best on validation data of those in the table.",
    ),
    Study(
        "figure-clusters",
        "Which gates are alike",
        (plain(0.3),),
        (FEW_CLASSES,),
        (ACC, WORST, DENSITY),
        figure="clusters",
        note="Ward's clustering of the gates' parameters, beside the classes each client has.",
    ),
    Study(
        "figure-sparsity",
        "Accuracy over s",
        (*map(plain, (*BUDGETS, MIXED)), *map(gate, (*BUDGETS, MIXED))),
        (EMNIST, CIFAR10),
        (ACC, WORST, DENSITY, Q),
        figure="sparsity",
    ),
    Study(
        "figure-convergence",
        "Accuracy over rounds",
        (FEDAVG, HETEROFL, FEDEM, FEDREP, gate(1.0), gate(0.5), gate(0.3)),
        (EMNIST, CIFAR10),
        (ACC, Number("rounds_to_90", "T₀.₉, rounds", "{:.0f}".format, min)),
        figure="convergence",
    ),
    Study(
        "figure-gates",
        "Gate weights over rounds",
        (plain(1.0), plain(0.5), plain(0.3)),
        (CIFAR10,),
        (ACC, DENSITY),
        figure="gates",
        note="M of all blocks and clients, in training data's eyes. Darker: more blocks.",
    ),
    Study(
        "pareto",
        "Accuracy over what it costs",
        (*BASELINES, *GATES),
        (CIFAR10, FEMNIST),
        (ACC, FLOPS, UP),
        figure="pareto",
        measure="times",
        note="Step time is measured one client at a time, methods in turn, on one thread.",
    ),
)  # fmt: skip


def names() -> tuple[str, ...]:
    """All studies."""
    return tuple(study.name for study in STUDIES)


def get(name: str) -> Study:
    """A study by name.

    >>> get("table3").title
    'A fifth of the clients takes part in a round'
    """
    for study in STUDIES:
        if study.name == name:
            return study
    raise ValueError(unknown("study", name, [*names(), "all"]))
