"""What updates tell a curious server of the data behind them: `reproduce leakage`.

    invert      a picture back from the update of one step on one sample (Geiping, Bauermeister, Dröge, Moeller 2020,
                Inverting Gradients: cosine similarity and total variation, signed Adam)
    belongs     whether a sample was trained on, from its loss before and after the client's round (Yeom et al. 2018,
                and the same against the State that the client received)
    labels      which classes a client has many of, from the set of blocks it sends and from the bias of the last layer
    choices     how often the set of blocks changes when one sample of a client is another one

The server knows the model, the loss, the rates, the labels, and of pFedGate which blocks came. Gates are unknown to it:
it takes kept blocks at weight 1, or fits a weight for each block beside the picture. For comparison it is also
given the true weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from pfedgate import experiment
from pfedgate.algorithms.pfedgate import PFedGate
from pfedgate.algorithms.pfedgate.tiles import BLOCKS
from pfedgate.config.recipe import Recipe
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.drawing import Spec
from pfedgate.core.modules import skeleton
from pfedgate.core.seeds import generator, seeded
from pfedgate.core.state import flat, pick
from pfedgate.core.types import Card, Local, Round, State, Update
from pfedgate.data.federation import Part
from pfedgate.engine.endpoint import Endpoint, serve
from pfedgate.engine.metrics import Record
from pfedgate.engine.roster import Roster
from pfedgate.engine.server import one_thread
from pfedgate.engine.store import MemoryStore
from pfedgate.engine.workers import steady
from pfedgate.gating.slicing.live import compensation
from pfedgate.studies import bench
from pfedgate.studies.bench import recall, recipes_of
from pfedgate.studies.complexity import line
from pfedgate.studies.declare import Column, Study
from pfedgate.studies.paper import FEDAVG, gate
from pfedgate.studies.sweep import Campaign

Array = np.ndarray[Any, Any]
THIRD = gate(0.3)
CHOSEN = replace(THIRD, name=f"{THIRD.name}, chosen of 8", settings={**THIRD.settings, "algorithm.gate.candidates": 8})
ROWS = (FEDAVG, gate(1.0), gate(0.5), THIRD, CHOSEN)
# Nothing that would blur an update beside the gate: the attacker's best case, for all rows alike.
BARE = {
    "train.momentum": 0.0, "train.weight_decay": 0.0, "train.clip": "none", "train.correction": "none",
}  # fmt: skip
STEP = {"train.batch": 1, "train.steps": 1}
# By scale: pictures, steps of an inversion, clients whose choices are tested; settings of the single steps, and over
# them of the training that is watched.
SIZES: Mapping[str, tuple[int, int, int, dict[str, Any], dict[str, Any]]] = {
    "tiny": (1, 30, 2, {}, {}),
    "quick": (
        2, 200, 6,
        {
            "model.width": 0.25, "data.clients": 20, "data.samples": 1000, "train.rounds": 6, "train.epochs": 2,
            "evaluate.every": 6,
        },
        {"model.name": "cnn_femnist", "data.samples": 1200, "train.rounds": 8, "train.epochs": 3, "train.lr": 0.2},
    ),
    "small": (
        4, 400, 12, {"data.clients": 40, "data.samples": 4000},
        {"train.rounds": 12, "train.epochs": 3, "train.lr": 0.2},
    ),
}  # fmt: skip
NETWORK = "cnn_cifar10"  # for Fashion-MNIST: an inversion takes seconds
DATA = Column("Fashion-MNIST", "fashion")
SMOOTH = 1e-3  # weight of the total variation
CHANGED = 2  # samples of a client that are replaced, one at a time
UNKNOWN = ("weights taken as 1", "weights fitted")
TRUE = "true weights"


# -- what the server sees
@dataclass(frozen=True)
class Seen:
    """An update in the server's eyes, and how it would compute with the model behind it."""

    names: tuple[str, ...]
    got: State
    gradient: Tensor  # of the entries that came, for one step of SGD
    places: Tensor  # where they lie in the vector of all
    kept: Tensor | None  # blocks that came; None: there are no blocks
    weights: Tensor | None  # the true ones, which the server does not see
    forward: Callable[[Mapping[str, Tensor], Tensor | None, Tensor], Any]  # parameters, weights, input

    @classmethod
    def of(cls, algorithm: Algorithm, got: State, update: Update, rate: float) -> Seen:
        """From an update that was just made in this process."""
        model = skeleton(algorithm.task.model)
        gated = isinstance(algorithm, PFedGate)
        names = algorithm.names if isinstance(algorithm, PFedGate) else tuple(n for n, _ in model.named_parameters())
        after = algorithm.landed(got, update)
        difference = flat(pick(got, names)) - flat(pick(after, names))
        kept = weights = None
        places = torch.arange(len(difference))
        if gated:
            assert isinstance(algorithm, PFedGate)
            personal = algorithm._workspace()
            sent, last = update.shared[BLOCKS].long(), personal.gated.last
            places, kept = algorithm.tiles.positions(sent), sent_blocks(algorithm, sent)
            weights = None if last is None else last.adapted.detach()
            difference = difference / rates_of(algorithm, got, kept)
        return cls(names, got, difference[places] / rate, places, kept, weights, forward_of(algorithm))

    def loss(self, algorithm: Algorithm, x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        """One minus the cosine between what came and what this input would have given."""
        parameters = {name: self.got[name].clone().requires_grad_() for name in self.names}
        value = algorithm.task.loss(self.forward(parameters, weights, x), y).mean()
        slopes = torch.autograd.grad(value, list(parameters.values()), create_graph=True)
        gradient = torch.cat([slope.reshape(-1) for slope in slopes])[self.places]
        return 1 - F.cosine_similarity(gradient, self.gradient, dim=0, eps=1e-12)


def sent_blocks(algorithm: PFedGate, sent: Tensor) -> Tensor:
    """The blocks without which these tiles would not have come, as a mask."""
    personal = algorithm._workspace()
    needed = torch.from_numpy(personal.parts.blocks)[sent].flatten().tolist()
    kept = torch.from_numpy(personal.gated.plan.keep.copy())
    kept[sorted({block for block in needed if block >= 0})] = True
    return kept


def rates_of(algorithm: PFedGate, got: State, kept: Tensor) -> Tensor:
    """What the optimiser multiplies gradients with, entry by entry: it follows from the blocks that were kept."""
    live, how, factors = algorithm._workspace().gated.plan.live(kept.numpy()), algorithm.compensate, []
    for name in algorithm.names:
        read = live.share_read(name)
        scale = math.sqrt(live.share_written(name) / read) if how == "sqrt" else 1.0
        factors.append(torch.full((got[name].numel(),), compensation(how, read) ** 2 * scale))
    return torch.cat(factors)


def forward_of(algorithm: Algorithm) -> Callable[[Mapping[str, Tensor], Tensor | None, Tensor], Any]:
    """The model as a function of parameters, weights of blocks, and input."""
    model = skeleton(algorithm.task.model)

    def plain(parameters: Mapping[str, Tensor], weights: Tensor | None, x: Tensor) -> Any:
        return functional_call(model, dict(parameters), (x,))

    if not isinstance(algorithm, PFedGate):
        return plain
    plan, how = algorithm._workspace().gated.plan, algorithm.compensate

    def gated(parameters: Mapping[str, Tensor], weights: Tensor | None, x: Tensor) -> Any:
        if weights is None:
            return plain(parameters, None, x)
        live, adapted = plan.live((weights > 0).numpy()), {}
        for name, parameter in parameters.items():  # as `execute.masked` does with a module's own
            axis, divisor = plan.owners[name].axis, compensation(how, live.share_read(name))
            scale = weights.index_select(0, plan.block_index(name, weights.device)) / divisor
            shape = parameter.shape if axis is None else [-1 if at == axis else 1 for at in range(parameter.ndim)]
            adapted[name] = parameter * scale.view(shape)
        return functional_call(model, adapted, (x,))

    return gated


# -- pictures
def invert(seen: Seen, algorithm: Algorithm, y: Tensor, start: Tensor, steps: int, how: str) -> tuple[Tensor, float]:
    """The input that explains an update best, and how badly it does."""
    x = start.clone().requires_grad_()
    base = None if seen.kept is None else seen.kept.float()
    if how == TRUE and seen.weights is not None:
        base = seen.weights
    fitted = None if base is None or how != UNKNOWN[1] else torch.zeros_like(base, requires_grad=True)
    groups = [{"params": [x], "lr": 0.1}, *([] if fitted is None else [{"params": [fitted], "lr": 0.003}])]
    optimiser = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, [steps * at // 8 for at in (3, 5, 7)])
    best, least = start, math.inf
    for _ in range(steps):
        optimiser.zero_grad()
        weights = base if fitted is None or base is None else base * (1 + torch.tanh(fitted))
        match = seen.loss(algorithm, x, y, weights)
        if (apart := float(match.detach())) < least:
            best, least = x.detach().clone(), apart
        slopes = [(x[..., 1:, :] - x[..., :-1, :]).abs().mean(), (x[..., 1:] - x[..., :-1]).abs().mean()]
        (match + SMOOTH * sum(slopes, torch.zeros(()))).backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        x.grad.sign_()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(*RANGE)
    return best, least


RANGE = (-3.0, 3.0)  # of a normalised input


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio of two pictures with values from 0 to 1, in decibels.

    >>> psnr(torch.zeros(1, 4, 4), torch.full((1, 4, 4), 0.1))
    20.0
    """
    return round(-10 * math.log10(max(1e-10, float((a - b).square().mean()))), 4)


def ssim(a: Tensor, b: Tensor) -> float:
    """Structural similarity (Wang et al. 2004) of two pictures with values from 0 to 1, in windows of 7 pixels.

    >>> a = torch.rand(1, 9, 9, generator=torch.Generator().manual_seed(0))
    >>> round(ssim(a, a), 6), ssim(a, 1 - a) < 0
    (1.0, True)
    """
    side = min(7, *a.shape[-2:])

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x[None], side, 1)

    ma, mb = mean(a), mean(b)
    va, vb, both = mean(a * a) - ma**2, mean(b * b) - mb**2, mean(a * b) - ma * mb
    values = (2 * ma * mb + 1e-4) * (2 * both + 9e-4) / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4))
    return float(values.mean())


def shown(x: Tensor, prepare: Any) -> Tensor:
    """A prepared input as a picture from 0 to 1; one of vectors stays as it is, scaled by its own range."""
    mean, std = torch.tensor(prepare.mean or (0.0,)), torch.tensor(prepare.std or (1.0,))
    return (x * std.view(-1, 1, 1) + mean.view(-1, 1, 1)).clamp(0, 1)


def pixels_of(image: Tensor) -> str:
    """A picture as text, a byte for each value."""
    return (255 * image).byte().numpy().tobytes().hex()


def pictures(recipe: Recipe, number: int, steps: int) -> list[Record]:
    """Inversions of the first step of the first clients' first samples, each in every way."""
    plan, seed = experiment.plan(recipe), recipe.run.seed
    algorithm, fed = plan.algorithm, plan.federation
    roster, records = Roster.of(fed, "clients", plan.options, algorithm), list[Record]()
    with seeded(seed, "init_server"):
        server = algorithm.init_server(seed)
    for card in list(roster)[:number]:
        reach = Endpoint(algorithm, fed, MemoryStore())
        local = one_sample(reach.local(card, Round(0, 1, seed)))
        seen = Seen.of(algorithm, server, serve(algorithm, server, reach.store, local), recipe.train.lr)
        x, y = local.prepare(local.train.x), local.train.y
        start = torch.randn(x.shape, generator=generator(seed, "inversion", card.id))
        truth = shown(x[0], fed.prepare)
        for how in ("",) if seen.kept is None else (*UNKNOWN, TRUE):
            guess, match = invert(seen, algorithm, y, start, steps, how)
            image = shown(guess[0], fed.prepare)
            pixels = {"image": pixels_of(image), "truth": pixels_of(truth)}
            records.append({
                "client": card.id, "how": how, "match": match, "psnr": psnr(image, truth), "ssim": ssim(image, truth),
                "shape": list(image.shape), **pixels,
            })  # fmt: skip
    return records


def one_sample(local: Local) -> Local:
    """A client that has a single sample."""
    part = local.train
    assert isinstance(part, Part)
    single = Part.of(part, part.rows[:1])
    return replace(local, train=single, card=Card(local.card.id, 1, local.card.budget))


# -- samples, labels and choices
def auc(scores: Any, positive: Any) -> float:
    """The chance that a positive has a higher score than a negative; ½ is guessing.

    >>> auc([0.1, 0.4, 0.35, 0.8], [False, False, True, True])
    0.75
    """
    from scipy.stats import rankdata

    scores, positive = np.asarray(scores, dtype=float), np.asarray(positive, dtype=bool)
    yes, no = int(positive.sum()), int((~positive).sum())
    if not yes or not no:
        return math.nan
    return float((rankdata(scores)[positive].sum() - yes * (yes + 1) / 2) / (yes * no))


def watched(recipe: Recipe, tested: int) -> Record:
    """What a server sees in the round after the last: of samples, labels and choices."""
    plan = experiment.plan(recipe)
    result, algorithm, fed = plan.run(), plan.algorithm, plan.federation
    assert result.store is not None
    roster = Roster.of(fed, "clients", plan.options, algorithm)
    reach, server = Endpoint(algorithm, fed, result.store), result.server
    round = Round(recipe.train.rounds, recipe.train.rounds + 1, recipe.run.seed)
    forward, classes = forward_of(algorithm), algorithm.task.classes or 1
    scores: dict[str, list[float]] = {}
    pooled: tuple[list[float], list[bool]] = ([], [])
    sets, shares = list[Array](), list[Array]()
    biases, changed = list[Tensor](), list[bool]()
    last = [name for name, value in server.items() if value.ndim == 1 and value.is_floating_point()][-1]
    for number, card in enumerate(roster):
        local = reach.local(card, round)
        before = result.store.get(card.id)
        update = serve(algorithm, server, result.store, local)
        landed, kept = algorithm.landed(server, update), None
        if isinstance(algorithm, PFedGate):
            sent = update.shared[BLOCKS].long()
            kept = sent_blocks(algorithm, sent)
            tiles = torch.zeros(algorithm.tiles.count)
            tiles[sent] = 1
            sets.append(tiles.numpy())
            for at in range(CHANGED if number < tested else 0):
                if (change := changes(algorithm, fed, server, before, local, sent, at)) is not None:
                    changed.append(change)
        biases.append(landed[last] - server[last])
        parts = [local.train, fed.part(card.id, "test")]
        member = [True] * parts[0].n + [False] * parts[1].n
        shares.append(np.bincount(parts[0].y.numpy(), minlength=classes) / max(1, parts[0].n))
        views: dict[str, Tensor | None] = {"": None} | ({} if kept is None else {"blocks": kept.float()})
        for name, weights in views.items():
            old, new = (
                torch.cat([losses(algorithm, forward, state, weights, local, part) for part in parts])
                for state in (server, landed)
            )
            scores.setdefault(f"loss {name}", []).append(auc(-new, member))
            scores.setdefault(f"loss before minus after {name}", []).append(auc(old - new, member))
            if not name:
                pooled[0].extend((-old).tolist())
                pooled[1].extend(member)
    means = {name: float(np.nanmean(values)) for name, values in scores.items()}
    many = np.array(shares) > 1.0 / classes
    record: Record = {
        "accuracy": result.summary.get("accuracy"),
        "model": auc(*pooled),
        "update": max(means.values()),
        "update_by": max(means, key=lambda name: means[name]),
        "labels_bias": auc(torch.stack(biases).numpy().ravel(), many.ravel()),
    }
    if sets:
        bits = np.array(sets)
        record |= {
            "labels_sets": auc(left_out(bits, np.array(shares)).ravel(), many.ravel()),
            "sets": len({row.tobytes() for row in bits}),
            "clients": len(sets),
            "changed": float(np.mean(changed)) if changed else None,
            "tested": len(changed),
        }
    return record


@torch.no_grad()
def losses(
    algorithm: Algorithm, forward: Callable[..., Any], state: State, weights: Tensor | None, local: Local, part: Any
) -> Tensor:
    """The loss of every sample under a State and some weights of blocks."""
    values = [torch.zeros(0)]
    for x, y in zip(part.x.split(256), part.y.split(256), strict=True):
        parameters = {name: value for name, value in state.items() if value.is_floating_point()}
        names = [name for name, _ in skeleton(algorithm.task.model).named_parameters()]
        values.append(algorithm.task.loss(forward(pick(parameters, names), weights, local.prepare(x)), y))
    return torch.cat(values)


def changes(
    algorithm: PFedGate, fed: Any, server: State, before: State | None, local: Local, sent: Tensor, at: int
) -> bool | None:
    """Whether the client would have sent other blocks with a test sample in place of this sample."""
    part, other = local.train, fed.part(local.card.id, "test")
    assert isinstance(part, Part)
    if part.n <= at or other.n <= at:
        return None
    rows = part.rows.clone()
    rows[at] = other.rows[at]
    store = MemoryStore()
    if before is not None:
        store.put(local.card.id, before)
    neighbour = replace(local, train=Part.of(part, rows))
    again = serve(algorithm, server, store, neighbour).shared[BLOCKS].long()
    return not torch.equal(again, sent)


def left_out(features: Array, targets: Array) -> Array:
    """Ridge regression's prediction of each row from all others, less their mean."""
    result = np.zeros_like(targets)
    for at in range(len(features)):
        rest = np.arange(len(features)) != at
        centre, mean = features[rest].mean(0), targets[rest].mean(0)
        x = features[rest] - centre
        scale = max(1e-9, float((x**2).sum() / len(x)))
        dual = np.linalg.solve(x @ x.T + 0.1 * scale * np.eye(len(x)), targets[rest] - mean)
        result[at] = (features[at] - centre) @ x.T @ dual
    return result


# -- the study
def inverted(recipes: Mapping[str, Recipe], number: int, steps: int) -> dict[str, Record]:
    """Pictures from each row's first steps, which are of a network of full size: a narrow one tells little."""
    steady()
    with one_thread():
        result = {}
        for name, recipe in recipes.items():
            whole = {key: value for key, value in recipe.model.options.items() if key != "width"}
            train = replace(recipe.train, batch=1, steps=1)
            single = replace(recipe, model=replace(recipe.model, options=whole), train=train)
            shots = [] if name == CHOSEN.name else pictures(single, number, steps)  # a mask is a mask, however chosen
            result[name] = {"pictures": shots}
        return result


def overseen(recipes: Mapping[str, Recipe], tested: int) -> dict[str, Record]:
    """What is learnt of each row's clients when they have trained."""
    steady()
    with one_thread():
        return {name: watched(recipe, tested) for name, recipe in recipes.items()}


def measure(study: Study, campaign: Campaign) -> Record:
    """What was learnt by row, of every seed: pictures, and the rest."""
    scale = campaign.scale
    number, steps, tested, single, training = SIZES.get(scale.name, SIZES["small"])
    name = "fashion" if "fashion" in scale.worlds else scale.usual[0]
    column, usual = replace(DATA, data=name), {"model.name": NETWORK} if name == "fashion" else {}

    def wanted(what: str, more: Mapping[str, Any]) -> dict[str, dict[str, Recipe]]:
        groups = {}
        for seed in range(min(3, scale.seeds)):
            settings = {**BARE, **usual, **single, **more, "data.seed": seed}
            recipes = recipes_of(campaign, ROWS, column, scale.worlds[name], **settings)
            own = {row: replace(recipe, run=replace(recipe.run, seed=seed)) for row, recipe in recipes.items()}
            groups[f"{study.name}{what}-{seed}"] = own
        return groups

    shots = recall(campaign, wanted("", {}), "pictures", inverted, number, steps)
    return {**shots, **recall(campaign, wanted("-trained", training), "labels_bias", overseen, tested)}


def tables(content: Record) -> list[str]:
    """The lines of the page."""
    every = content["measured"].items()
    seeds = [costs for name, costs in every if "-trained-" not in name]
    trained = [costs for name, costs in every if "-trained-" in name]
    lines = ["## Pictures from one step on one sample", ""]
    lines += [
        line(["method", "what the server knows of the gate", "PSNR, dB", "SSIM", "pictures"]),
        "|---|---|---:|---:|---:|",
    ]
    for row in seeds[0]:
        shots = [picture for seed in seeds for picture in seed[row]["pictures"]]
        for how in dict.fromkeys(picture["how"] for picture in shots):
            own = [picture for picture in shots if picture["how"] == how]
            cells = [spread([p[key] for p in own], form) for key, form in (("psnr", "{:.1f}"), ("ssim", "{:.2f}"))]
            lines.append(line([row, {"": "–", TRUE: "all"}.get(how, f"kept blocks; {how}"), *cells, str(len(own))]))
    lines += ["", "## Samples, labels and choices", ""]
    heads = {
        "accuracy": "accuracy, %", "model": "sample, from the model: AUC", "update": "sample, from an update: AUC",
        "labels_bias": "labels, from the last bias: AUC", "labels_sets": "labels, from the set of blocks: AUC",
        "sets": "different sets", "changed": "set changes with one sample, %",
    }  # fmt: skip
    lines += [line(["method", *heads.values()]), "|---|" + "---:|" * len(heads)]
    for row in trained[0]:
        cells = []
        for key in heads:
            values = [seed[row][key] for seed in trained if seed[row].get(key) is not None]
            hundred = key in ("accuracy", "changed")
            form = "{:.1f}" if hundred or key == "sets" else "{:.3f}"
            cells.append(spread([100 * v for v in values] if hundred else values, form) if values else "–")
        lines.append(line([row, *cells]))
    return [*lines, "", NOTE, ""]


NOTE = (
    "± is the standard deviation, over pictures above and over seeds below. AUC ½ is guessing. From an update: the "
    "mean over clients, of the best of the scores tried (loss after the round, loss before minus after; with all "
    "blocks, and with those that came). Labels: whether a client has more of a class than one over the number of "
    "classes; from the set of blocks by ridge regression on all other clients, whose labels the server then knows. Set "
    "changes: the share of clients' samples whose replacement by a test sample changes which blocks come, all else "
    "equal: what an attacker could see at most who knows everything else, the gate included."
)


def spread(values: list[float], form: str) -> str:
    """Mean and deviation as text.

    >>> spread([1.0, 2.0], "{:.1f}"), spread([1.0], "{:.1f}")
    ('1.5 ± 0.7', '1.0')
    """
    mean = form.format(float(np.mean(values)))
    return mean if len(values) < 2 else f"{mean} ± {form.format(float(np.std(values, ddof=1)))}"


def chart(measures: Mapping[str, Record]) -> Spec | None:
    """The pictures of the first seed beside what the attacker made of them."""
    import base64
    import io

    from pfedgate.data.sources import need

    image, values = need("PIL.Image"), list[dict[str, str]]()
    first = next(iter(measures.values()))["costs"]
    for row, costs in first.items():
        for picture in costs["pictures"]:
            channels, height, width = picture["shape"]
            names = {"image": f"{row}{', ' + picture['how'] if picture['how'] else ''}"}
            if row == next(iter(first)):
                names["truth"] = "the client's picture"
            for key, name in sorted(names.items(), reverse=True):
                pixels = np.frombuffer(bytes.fromhex(picture[key]), np.uint8).reshape(channels, height, width)
                file = io.BytesIO()
                array = pixels[0] if channels == 1 else pixels.transpose(1, 2, 0)
                image.fromarray(array).resize((2 * width, 2 * height), 0).save(file, "PNG")
                url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
                values.append({"row": name, "client": f"client {picture['client']}", "url": url})
    axis = {"title": None, "type": "ordinal", "sort": None}
    labels = {"labelLimit": 300, "ticks": False, "domain": False}
    return {
        "data": {"values": values},
        "mark": {"type": "image", "width": 56, "height": 56},
        "width": {"step": 60},
        "height": {"step": 60},
        "encoding": {
            "x": {"field": "client", **axis, "axis": {**labels, "orient": "top", "labelAngle": 0}},
            "y": {"field": "row", **axis, "axis": labels},
            "url": {"field": "url", "type": "nominal"},
        },
    }


MEASURES = {**bench.MEASURES, "leakage": (measure, tables)}
