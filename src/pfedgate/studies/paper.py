"""Every table and figure of the paper, a Pareto figure and domains of ours, as data.

Settings of every row come from a search of its own where a scale has one (`sweep.Tuning`). Budgets bind parameters
(the paper's s) unless a row says "all": parameters, FLOPs and activation bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pfedgate import algorithms
from pfedgate.core.errors import unknown, warn
from pfedgate.studies import declare
from pfedgate.studies.attacks import ATTACKS
from pfedgate.studies.declare import ACC, WORST, Claim, Column, Number, Q, Row, Scale, Study, numbers_of
from pfedgate.studies.domains import DOMAINS
from pfedgate.studies.fleets import FLEET

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


def gate(budget: Any, *, shift: bool = False, resources: str = "params", name: str = "", **options: Any) -> Row:
    """A row of pFedGate at a budget, named by it; with a shift, each client learns a value per class."""
    title = f"s = {budget:g}" if isinstance(budget, float) else "s = .5 and .1 mixed"
    title += {"params": "", "all": ", all resources"}[resources] if budget != 1.0 else ""
    settings = {
        "clients.budget": budget,
        "algorithm.resources": resources if budget != 1.0 else "params",  # the whole model binds nothing
        "train.shift": shift,
        **{f"algorithm.{key}": value for key, value in options.items()},
    }
    return Row(name or f"pFedGate{' + shift' if shift else ''}, {title}", "pfedgate", settings)


def ablated(name: str, switch: str, value: Any) -> Row:
    """A row of pFedGate at one half with another value of a switch of its gate."""
    row = gate(0.5, name=name)
    return replace(row, settings={**row.settings, f"algorithm.gate.{switch}": value})


# Names of methods as papers print them; a method without one goes by its own.
TITLES = {
    "local_only": "Local", "fedavg": "FedAvg", "fedavg_ft": "FedAvg-FT", "fedprox": "FedProx",
    "pfedme": "pFedMe", "lg_fedavg": "LG-FedAvg", "ditto": "Ditto",
    "fedem": "FedEM", "fedrep": "FedRep", "fedper": "FedPer", "fedbn": "FedBN", "per_fedavg": "Per-FedAvg",
    "knn_per": "kNN-Per", "apfl": "APFL", "fedmask": "FedMask", "heterofl": "HeteroFL", "pfedhn": "pFedHN",
    "mean_reg_mtl": "mean-regularised MTL", "feddbe": "FedDBE", "fedrod": "FedRoD", "fedala": "FedALA",
    "fedbabu": "FedBABU", "fedcp": "FedCP", "gpfl": "GPFL", "fedpac": "FedPAC", "pfedfda": "pFedFDA",
    "dispfl": "DisPFL", "fiarse": "FIARSE", "fedrolex": "FedRolex", "fjord": "FjORD", "ifca": "IFCA",
}  # fmt: skip


def row(method: str) -> Row:
    """A method with its search's settings, by its name in papers.

    >>> row("fedavg_ft").name
    'FedAvg-FT'
    """
    return Row(TITLES.get(method, method), method)


LOCAL, FEDAVG, FEDEM, FEDREP = map(row, ("local_only", "fedavg", "fedem", "fedrep"))
PFEDME, PER_FEDAVG, FEDAVG_FT, DITTO, FEDPER = map(row, ("pfedme", "per_fedavg", "fedavg_ft", "ditto", "fedper"))
KNN_PER, DBE = row("knn_per"), tuple(row(name) for name in ("feddbe",) if name in algorithms.names())


def heterofl(budget: Any, name: str = "") -> Row:
    """A row of HeteroFL: widths by share of parameters, whatever level was tuned."""
    return Row(name or f"HeteroFL, s = {budget:g}", "heterofl", {"clients.budget": budget, "algorithm.level": "none"})


HETEROFL = heterofl({"1.0": 0.1, "0.5": 0.9}, "HeteroFL, s = .55 (10 % whole, 90 % half)")


def fedmask(density: float) -> Row:
    """A row of FedMask at a density, named by it."""
    return Row(f"FedMask, s = {density:g}", "fedmask", {"algorithm.density": density})


# What the task offers to every method, taken from FedAvg or given to it alone: the controls come first.
PUBLISHED = {"train.correction": "none", "train.initial_scale": 1.0, "train.shift": False, "train.schedule": "constant"}
CONTROLS = (
    Row("FedAvg, as published", "fedavg", PUBLISHED, tuned="fedavg_published"),
    Row(
        "FedAvg, corrected at prediction", "fedavg", PUBLISHED | {"train.correction": "prediction"}, tuned="fedavg_late"
    ),
    Row("FedAvg, corrected", "fedavg", PUBLISHED | {"train.correction": "training"}, tuned="fedavg_corrected"),
    Row("FedAvg, larger start", "fedavg", {"train.correction": "none"}, tuned="fedavg_large"),
    Row("FedAvg + shift", "fedavg", {"train.shift": True}, tuned="fedavg_shift"),
)
WITHIN = tuple(name for name in ("fedrolex", "fjord", "fiarse", "dispfl") if name in algorithms.names())
ROWS_BY_HAND = (*WITHIN, "fedavg", "heterofl", "fedmask", "fedmd", "pfedgate")  # and public data, for one table alone
BASELINES = (
    FEDAVG,
    *(
        Row(name, "fedavg", {"server.optimiser": optimiser}, tuned=name.lower())
        for name, optimiser in (("FedAvgM", "momentum"), ("FedAdam", "adam"), ("FedYogi", "yogi"))
    ),
    *(row(name) for name in algorithms.names() if name not in ROWS_BY_HAND),
    Row(
        "FedRep, 10 + 5 epochs", "fedrep", {"algorithm.head_epochs": 10, "algorithm.body_epochs": 5},
        tuned="fedrep_10_5",
    ),
    *(Row(f"{TITLES[m]}, s = {s:g}", m, {"clients.budget": s}) for m in WITHIN for s in (0.5, 0.3)),
    fedmask(0.5), HETEROFL, heterofl(0.5), heterofl(0.3), heterofl(0.15),
)  # fmt: skip
# The strongest dense methods on networks as cheap as the gates': evenly narrow, and in the shape of the common mask.
NARROW_METHODS = tuple(
    name for name in ("fedavg", "fedper", "fedrep", "feddbe", "fedrod") if name in algorithms.names()
)
NARROW = tuple(
    Row(f"{TITLES[name]}, {words} as s = {budget:g} of all", name, narrow=(kind, budget))
    for budget in (0.5, 0.3)
    for kind, words in (("even", "as narrow"), ("mask", "in the shape"))
    for name in NARROW_METHODS
)
GATES = tuple(
    gate(budget, shift=shift, resources=resources)
    for budget, resources in (
        (1.0, "params"), (0.5, "params"), (0.5, "all"), (0.3, "params"), (0.3, "all"), (0.1, "all"),
    )
    for shift in ((False, True) if (budget, resources) in ((1.0, "params"), (0.5, "all"), (0.3, "all")) else (False,))
)  # fmt: skip
# The same start and the same information, but gates stay as they begin.
STILL = tuple(
    replace(gate(s, resources="all", gate_lr=0.0, name=f"pFedGate, s = {s:g} of all, gate never learns"), control=True)
    for s in (1.0, 0.3)
)
AS_PUBLISHED = tuple(
    Row(
        f"pFedGate as published, s = {s:g}", "pfedgate",
        {"clients.budget": s, "algorithm.variant": "paper", "algorithm.resources": "params", **PUBLISHED},
        tuned=f"pfedgate_paper_{s:g}", control=True,
    )
    for s in (1.0, 0.5)
)  # fmt: skip
BUDGETS = (1.0, 0.5, 0.3, 0.1)
LEARNT = tuple(gate(s, resources="all").name for s in (1.0, 0.3))

CLAIMS = (
    Claim("pFedGate at most .40 of the FLOPs − any method at most .45", ours_flops=0.40, others_flops=0.45, aim=2),
    Claim("pFedGate at s = 1 − any method of any cost", (gate(1.0).name, gate(1.0, shift=True).name), must=-0.3, aim=2),
    *(
        Claim(
            f"a gate that learns − one that never does, {still.name.split(',')[1].strip()}",
            (name,),
            (still.name,),
            aim=3,
        )
        for name, still in zip(LEARNT, STILL, strict=True)
    ),
)
EVERYTHING = (*CONTROLS, *BASELINES, *NARROW, *GATES, *STILL, *AS_PUBLISHED)
# Methods that tune before they predict have no model as received.
RECEIVED = tuple(r for r in EVERYTHING if not algorithms.get(r.method).tunes)
NOTE = (
    "Every method has a search of its own for rates, its own settings, the schedule, the correction by label "
    "frequencies and the initial scale. `reproduce` runs it first, on another seed; a best trial at an edge extends "
    "the grid. Rows within three points of the best on validation data, FedAvg's and both sides of a claim have five "
    "seeds."
)

STUDIES = (
    Study(
        "table-a",
        "Accuracy of models as received",
        RECEIVED,
        (CIFAR10, CIFAR100, FEMNIST, EMNIST),
        numbers_of("a"),
        more_seeds=True,
        claims=CLAIMS,
        look="points",
        point="a",
        note=NOTE,
    ),
    Study(
        "table-b",
        "Accuracy after a client's own epochs",
        EVERYTHING,
        (CIFAR10, CIFAR100, FEMNIST, EMNIST),
        numbers_of("b"),
        more_seeds=True,
        claims=CLAIMS,
        look="points",
        point="b",
        note=NOTE + " The epochs' rate is scaled alike for every part of a method.",
    ),
    Study(
        "table1",
        "The paper's accuracies, at the paper's points",
        (
            CONTROLS[0], CONTROLS[2], FEDAVG, FEDAVG_FT, FEDREP, PER_FEDAVG,
            *DBE, LOCAL, DITTO, FEDEM, PFEDME,
            row("lg_fedavg"), HETEROFL, heterofl(0.5), fedmask(0.5), gate(1.0), gate(0.5), gate(0.3), *AS_PUBLISHED,
        ),
        (CIFAR10, FEMNIST, EMNIST, CIFAR100),
        (*numbers_of("a")[:3], *(Number(n.key, f"{n.title[:-3]} after own epochs, %") for n in numbers_of("b")[:2])),
        look="points",
        point="a",
        note="FedAvg-FT and Per-FedAvg take steps of their own before they are scored at either point.",
    ),
    Study("table2", "Time and memory of a training step", measure="steps"),
    Study(
        "table3",
        "A fifth of the clients takes part in a round",
        (FEDAVG, FEDEM, FEDREP, FEDPER, FEDAVG_FT, *DBE, gate(1.0), gate(0.5), gate(0.3)),
        tuple(
            Column(column.title, column.data, {"clients.fraction": share}, share_name)
            for column in (FEMNIST, CIFAR10)
            for share_name, share in (("all clients", 1.0), ("20 %", 0.2))
        ),
        (ACC, WORST),
        matrix=True,
        drops=(("all clients", "20 %"),),
    ),
    Study(
        "table4",
        "What the parts of the gate do",
        (
            gate(0.5),
            ablated("without pre-norm", "pre_norm", False),
            ablated("without post-norm", "post_norm", "none"),
            ablated("without sigmoid", "activation", "linear"),
            ablated("client-wise prediction", "scope", "client"),
        ),
        (EMNIST, CIFAR10, CIFAR100),
        (
            ACC,
            WORST,
            Number("rounds_to_80", "T₀.₈ / first row", "{:.2f}".format, None, over_first=True),
            Number("rounds_to_80", "T₀.₈, rounds", "{:.0f}".format, min),
        ),
        note="T₀.₈ is the first round that reaches 80 % of a run's own best accuracy. All gates start alike. "
        "Without sigmoid M is 1 + z, without bounds.",
    ),
    Study("table5", "Complexity: published, corrected and measured", measure="complexity"),
    Study(
        "table6",
        "Meta-learning and distillation",
        (
            FEDAVG,
            PER_FEDAVG,
            PFEDME,
            Row("FedMD, far", "fedmd", {"algorithm.public": "@far"}, tuned="fedmd_far"),
            Row("FedMD, near", "fedmd", {"algorithm.public": "@near"}, tuned="fedmd_near"),
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
            for row in (FEDAVG, FEDAVG_FT, PER_FEDAVG, KNN_PER, FEDEM, FEDREP, gate(1.0), gate(0.5), gate(0.3))
        ),
        (FEMNIST, CIFAR10),
        (
            Number("accuracy", "trained clients, %"),
            Number("novel", "novel clients, %"),
            Number("novel_bottom_decile", "novel, bottom decile, %"),
            Number("accuracy", "gap, points", best=min, minus="novel"),
        ),
        note="All after the last round. A fifth of the clients is held out. They get an epoch: FedAvg is used as it "
        "is, FedAvg-FT and Per-FedAvg tune the model, kNN-Per remembers their samples, FedRep trains a head, FedEM its "
        "mixture, pFedGate its gate, with the model frozen.",
    ),
    Study(
        "table9",
        "Rounds to 90 % of the best accuracy",
        (FEDAVG, FEDEM, FEDREP, gate(1.0), gate(0.5), gate(0.3)),
        (EMNIST, FEMNIST, CIFAR10, CIFAR100),
        (Number("rounds_to_90", "T₀.₉, rounds", "{:.0f}".format, min), ACC),
        matrix=True,
        note="The first evaluated round that reaches 90 % of the best accuracy of all rows on the same data.",
    ),
    Study(
        "table10",
        "The shared model without gates, and the personal ones",
        tuple(map(gate, BUDGETS)),
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
                gate(budget, blocks=blocks, name=f"pFedGate, B = {blocks}, s = {budget:g}")
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
        (FEDEM, FEDREP, FEDPER, PER_FEDAVG, DITTO, gate(0.5)),
        (FEMNIST, CIFAR10),
        (Number("accuracy", "Acc, %"), Number("bottom_decile", "bottom decile, %")),
        figure="clients",
        note="Everything after the last round (table 1 has the round best on validation data). The baseline is the "
        "one best on validation data of those in the table.",
    ),
    Study(
        "figure-clusters",
        "Which gates are alike",
        (gate(0.3), gate(0.3, resources="all")),
        (FEW_CLASSES,),
        (ACC, WORST, declare.DENSITY),
        look="tree",
        figure="clusters",
        note="Ward's clustering of the gates' parameters, beside the classes each client has. All gates begin alike, "
        "so the tree shows what training made of them.",
    ),
    Study(
        "figure-sparsity",
        "Accuracy over s",
        (*map(gate, (*BUDGETS, MIXED)), *(gate(s, shift=True) for s in (*BUDGETS, MIXED))),
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
        (gate(1.0), gate(0.5), gate(0.3)),
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
    DOMAINS,
    FLEET,
    Study("multitask", "Several tasks on one shared model, a gate for each", measure="multitask"),
    Study(
        "leakage",
        "What updates tell of the clients' data",
        figure="leakage",
        measure="leakage",
        note="The server is curious and knows the model, the loss, the rates and the labels; gates stay unknown to it. "
        "Pictures: gradients inverted by cosine similarity and total variation (Geiping et al. 2020), at the first "
        "step. No momentum, weight decay, clipping or label frequencies, which would blur updates of all methods.",
    ),
)  # fmt: skip

APART = (ATTACKS,)  # hundreds of runs of its own: no part of "all"


def names() -> tuple[str, ...]:
    """The names of all studies."""
    return tuple(study.name for study in STUDIES)


def get(name: str) -> Study:
    """The study of a name.

    >>> get("table3").title
    'A fifth of the clients takes part in a round'
    """
    for study in (*STUDIES, *APART):
        if study.name == name:
            return study
    raise ValueError(unknown("study", name, [*names(), *(study.name for study in APART), "all"]))


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
        warn(
            f"all at scale {scale.name} is without {' and '.join(long)}, which take longer than the rest: "
            f"pfedgate reproduce {' '.join(long)} --scale {scale.name} runs them",
        )
    return [study for study in studies if study.name not in long]
