"""Every table and figure of the paper, and a Pareto figure of ours, as data.

pFedGate has two faces here: *plain*, with nothing private but the gate, and *with shift*, which adds one private value
per class. Budgets bind parameters (the paper's s) unless a row says "all": parameters, FLOPs and activation bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pfedgate.core.errors import unknown
from pfedgate.studies import declare
from pfedgate.studies.declare import ACC, WORST, Claim, Column, Number, Q, Row, Scale, Study

MIXED = {"0.5": 0.5, "0.1": 0.5}  # half the clients at .5, half at .1

CIFAR10, FEMNIST = Column("CIFAR-10", "cifar10"), Column("FEMNIST", "femnist")
FEW_CLASSES = Column(
    "CIFAR-10",
    "cifar10",
    # The recipe's rate was found on clients of many classes; here gates stay at chance for dozens of rounds with it.
    {"data.partition": "pathological", "data.clients": 10, "train.lr": 0.01},
    "10 clients of few classes",
)
EMNIST, CIFAR100 = Column("EMNIST", "emnist"), Column("CIFAR-100", "cifar100")


def gate(budget: Any, *, shift: bool = True, resources: str = "params", name: str = "", **options: Any) -> Row:
    """A row of pFedGate at a budget, named by it."""
    title = f"s = {budget:g}" if isinstance(budget, float) else "s = .5 and .1 mixed"
    title += {"params": "", "all": ", all resources"}[resources] if budget != 1.0 else ""
    if budget == 0.1 and resources == "all":
        options = {"smallest": 0.05, **options}  # twice that always kept would exceed the budget
    settings = {
        "clients.budget": budget,
        "algorithm.resources": resources if budget != 1.0 else "params",  # the whole model binds nothing
        "algorithm.gate.shift": shift,
        **{f"algorithm.{key}": value for key, value in options.items()},
    }
    return Row(name or f"pFedGate{' + shift' if shift else ''}, {title}", "pfedgate", settings)


def plain(budget: Any, **options: Any) -> Row:
    """pFedGate with nothing private but the gate."""
    return gate(budget, shift=False, **options)


LOCAL, FEDAVG, FEDEM = Row("Local", "local_only"), Row("FedAvg", "fedavg"), Row("FedEM", "fedem")
FEDREP, PFEDME, PER_FEDAVG = Row("FedRep", "fedrep"), Row("pFedMe", "pfedme"), Row("Per-FedAvg", "per_fedavg")


def heterofl(budget: Any, name: str = "") -> Row:
    """A row of HeteroFL: widths by share of parameters, whatever level was tuned."""
    return Row(name or f"HeteroFL, s = {budget:g}", "heterofl", {"clients.budget": budget, "algorithm.level": "none"})


HETEROFL = heterofl({"1.0": 0.1, "0.5": 0.9}, "HeteroFL, s = .55 (10 % whole, 90 % half)")


def fedmask(density: float) -> Row:
    """A row of FedMask at a density, named by it."""
    return Row(f"FedMask, s = {density:g}", "fedmask", {"algorithm.density": density})


BASELINES = (
    LOCAL, FEDAVG, Row("FedAvg-FT", "fedavg_ft"), PFEDME, Row("LG-FedAvg", "lg_fedavg"), Row("Ditto", "ditto"), FEDEM,
    FEDREP, Row("FedPer", "fedper"), PER_FEDAVG, Row("kNN-Per", "knn_per"), Row("APFL", "apfl"), fedmask(0.5), HETEROFL,
    heterofl(0.5), heterofl(0.3), heterofl(0.15),
)  # fmt: skip
# A quarter of a batch at a time: then FLOPs bind, not activations.
PARTS = gate(0.3, resources="all", microbatches=4, name="pFedGate + shift, s = 0.3, all resources, four microbatches")
# The gate stays as it starts: label counts are a shift, and weights are 1.4 times as large.
STILL = replace(gate(1.0, gate_lr=0.0, name="pFedGate + shift, s = 1, gate never learns"), once=True)
GATES = (
    *(
        gate(budget, shift=shift, resources=resources)
        for shift in (False, True)
        for budget, resources in (
            (1.0, "params"), (0.5, "params"), (0.5, "all"), (0.3, "params"), (0.3, "all"), (0.1, "params"),
            (0.1, "all"),
        )
    ),
    PARTS,
)  # fmt: skip
BUDGETS = (1.0, 0.5, 0.3, 0.1)


def both(budget: float, resources: str = "params") -> tuple[str, ...]:
    """The names of pFedGate's rows at a budget, plain and with shift."""
    return tuple(gate(budget, shift=shift, resources=resources).name for shift in (False, True))


CLAIMS = (
    Claim("best variant, s = 1, minus best baseline", both(1.0), aim=3),
    Claim("best variant, s = .5 of the parameters, minus best baseline", both(0.5), aim=3),
    Claim(
        "best variant, s = .5 of all resources, minus the best of FedAvg-FT, Ditto, FedEM, FedMask and HeteroFL at .5",
        both(0.5, "all"),
        ("FedAvg-FT", "Ditto", "FedEM", "FedMask, s = 0.5", "HeteroFL, s = 0.5"),
    ),
    Claim("best variant, s = .5 of all resources, minus best baseline", both(0.5, "all"), must=None, aim=0),
    Claim(
        "plain gate, s = .5 of the parameters, minus the best of Local, FedAvg-FT, Ditto, FedEM, pFedMe, LG-FedAvg, "
        "HeteroFL and FedMask",
        (plain(0.5).name,),
        ("Local", "FedAvg-FT", "Ditto", "FedEM", "pFedMe", "LG-FedAvg", "FedMask, s = 0.5", HETEROFL.name),
    ),
    Claim("best variant, s = .3 of the parameters, minus best baseline", both(0.3), must=-1, aim=0),
    Claim(
        # With whole batches activations bind first, and .15 of the FLOPs are used; with microbatches all of .3.
        "best variant, s = .3 of all resources, minus the best of HeteroFL at .3 and .15 (as many FLOPs), FedMask and "
        "FedAvg",
        (*both(0.3, "all"), PARTS.name),
        ("HeteroFL, s = 0.3", "HeteroFL, s = 0.15", "FedMask, s = 0.5", "FedAvg"),
    ),
    Claim(
        "best variant, s = .3 of all resources, minus FedAvg-FT", (*both(0.3, "all"), PARTS.name), ("FedAvg-FT",),
        must=None, aim=0,
    ),
    Claim(
        "bottom decile: best variant, s = .5 of the parameters, minus best baseline", both(0.5), number=WORST, aim=5,
        chance=4,  # its deviation over seeds on FEMNIST
    ),
    Claim("best variant, s = .1 of the parameters, minus FedAvg", both(0.1), ("FedAvg",), must=None, aim=0),
)  # fmt: skip

STUDIES = (
    Study(
        "table1",
        "Accuracy of methods",
        (*BASELINES, *GATES, STILL),
        (EMNIST, FEMNIST, CIFAR10, CIFAR100),
        numbers=(ACC, WORST, declare.FIRST_SEED, declare.FIRST_WORST, *declare.USUAL[2:]),
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
            Column(column.title, column.data, {"clients.fraction": share}, share_name)
            for column in (FEMNIST, CIFAR10)
            for share_name, share in (("all clients", 1.0), ("20 %", 0.2))
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
        (ACC, WORST, declare.LAST, declare.SECONDS),
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
        (ACC, WORST, declare.DENSITY, Q, declare.UP),
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
        (ACC, WORST, declare.DENSITY),
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
        (ACC, WORST, declare.DENSITY, Q),
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
        (ACC, declare.DENSITY),
        figure="gates",
        note="M of all blocks and clients, in training data's eyes. Darker: more blocks.",
    ),
    Study(
        "pareto",
        "Accuracy over what it costs",
        (*BASELINES, *GATES),
        (CIFAR10, FEMNIST),
        (ACC, declare.FLOPS, declare.UP),
        figure="pareto",
        measure="times",
        note="Step time is measured one client at a time, methods in turn, on one thread.",
    ),
)  # fmt: skip


def names() -> tuple[str, ...]:
    """The names of all studies."""
    return tuple(study.name for study in STUDIES)


def get(name: str) -> Study:
    """The study of a name.

    >>> get("table3").title
    'A fifth of the clients takes part in a round'
    """
    for study in STUDIES:
        if study.name == name:
            return study
    raise ValueError(unknown("study", name, [*names(), "all"]))


def select(asked: Sequence[str], scale: Scale) -> list[Study]:
    """Studies by name; "all" leaves out those that are too long for a scale.

    A study that is named beside "all" is run; naming every single study is the same as "all".
    """
    everything = "all" in asked
    studies = [get(name) for name in (names() if everything else dict.fromkeys(asked))]
    if not everything and not {*asked} >= {*names()}:
        return studies
    long = [name for name in scale.not_in_all if not (everything and name in asked)]
    if long:
        warnings.warn(
            f"all at scale {scale.name} is without {' and '.join(long)}, which take longer than the rest: "
            f"pfedgate reproduce {' '.join(long)} --scale {scale.name} runs them",
            stacklevel=2,
        )
    return [study for study in studies if study.name not in long]
