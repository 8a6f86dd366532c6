"""FIARSE and DisPFL: FedAvg when everything fits; entries are packed, averaged and chosen as published."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.toys import clusters, dropout_mlp, local, normed_mlp, plain_mlp, run, scores, small_cnn, task
from torch import Tensor

from pfedgate import models
from pfedgate.algorithms import build, elements
from pfedgate.algorithms.dispfl import MASK, DisPFL, erk
from pfedgate.algorithms.elements import BITS, VALUES, EntryMean
from pfedgate.algorithms.fedmask.structures import unpack_bits
from pfedgate.algorithms.fiarse import FIARSE
from pfedgate.core.mergers import WeightedMean
from pfedgate.core.state import equal, flat, pick
from pfedgate.core.types import Card, Round, State, Update
from pfedgate.fleet.pace import Pace
from pfedgate.training.fit import loop

SPARSE = ("fiarse", "dispfl")


# -- laws
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("agg_norm", ["sampled", "all"])
@pytest.mark.parametrize("model", [dropout_mlp, normed_mlp])
def test_whole_budgets_are_fedavg_bit_for_bit(name: str, model: Any, agg_norm: str) -> None:
    federation, of = clusters((24, 18, 30, 10, 20)), task(model)
    options = {"sample": 0.6, "agg_norm": agg_norm}
    expected, found = (run(build(n, of), federation, **options) for n in ("fedavg", name))
    assert equal(found.server, expected.server)
    assert scores(found) == scores(expected)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("budget", [0.2, 0.5])
def test_a_client_stores_and_sends_no_more_than_its_budget(name: str, budget: float) -> None:
    of, federation = task(partial(models.build, "mlp", (6,), 3, hidden=[60, 60])), clusters(novel=0)
    dense, found = (run(build(n, of), federation, 2, budget=b) for n, b in (("fedavg", 1.0), (name, budget)))
    record, whole = found.history[1], dense.history[1]
    assert budget - 0.01 <= record["density"] <= budget
    bits = 1 / 32
    assert record["bytes_up"] <= 1.03 * (budget + bits) * whole["bytes_up"]
    if name == "fiarse":
        assert record["bytes_down"] <= 1.03 * (budget + bits) * whole["bytes_down"]
    assert record["flops"] >= whole["flops"]  # single entries: nothing is skipped, and nothing else is claimed


@pytest.mark.parametrize("name", SPARSE)
def test_what_masks_of_entries_cannot_save_is_refused(name: str) -> None:
    algorithm = build(name, task(plain_mlp))
    algorithm.ready(Card("a", 10, {"params": 0.3}))
    with pytest.raises(ValueError, match="save parameters, not flops"):
        algorithm.ready(Card("a", 10, {"params": 0.3, "flops": 0.3}))


def test_norms_beyond_the_budget_are_refused() -> None:
    with pytest.raises(ValueError, match="norms, which are always kept"):
        build("fiarse", task(normed_mlp)).ready(Card("a", 10, 0.1))


@pytest.mark.parametrize("name", SPARSE)
def test_a_client_that_trains_nothing_moves_nothing_however_late_it_comes(name: str) -> None:
    of, pace = task(lr=0.0, weight_decay=0.0), Pace(devices="phones", policy="asynchronous", buffer=1.0)
    done = run(build(name, of), clusters((24, 17, 30, 9), novel=0), 6, budget=0.4, fleet=pace)
    assert equal(done.server, build("fedavg", of).init_server(0))


# -- packing and averaging
def test_entries_are_averaged_over_those_who_sent_them() -> None:
    draw = torch.Generator().manual_seed(0)
    server: State = {"a": torch.randn(3, 5, generator=draw), "b": torch.randn(4, generator=draw)}
    vector, sent = flat(server), []
    mean, whole = EntryMean(server, ("a", "b")), WeightedMean(server)
    for weight in (1.0, 3.0, 2.0):
        values, kept = torch.randn(19, generator=draw), torch.rand(19, generator=draw) < 0.5
        sent.append((values, kept, weight))
        mean.add(Card("c", 1), Update(elements.pack(values, kept), weight))
        whole.add(Card("c", 1), Update({"a": values[:15].view(3, 5), "b": values[15:]}, weight))
    merged = flat(mean.result())
    for at in range(19):
        pairs = [(float(v[at]), w) for v, kept, w in sent if kept[at]]
        expected = sum(v * w for v, w in pairs) / sum(w for _, w in pairs) if pairs else float(vector[at])
        assert float(merged[at]) == pytest.approx(expected, abs=1e-6)
    everything = EntryMean(server, ("a", "b"))
    for values, _, weight in sent:
        everything.add(Card("c", 1), Update(elements.pack(values, torch.ones(19, dtype=torch.bool)), weight))
    assert equal(everything.result(), whole.result())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: {VALUES: s[VALUES]}, "needs 'bits'"),
        (lambda s: {**s, BITS: s[BITS][:-1]}, "must be 15 bytes"),
        (lambda s: {**s, VALUES: s[VALUES][:-1]}, "numbers, got"),
        (lambda s: {**s, VALUES: s[VALUES].long()}, "numbers, got"),
    ],
)
@pytest.mark.parametrize("name", SPARSE)
def test_a_broken_update_is_refused(name: str, change: Any, words: str) -> None:
    algorithm, here = build(name, task(partial(models.build, "mlp", (6,), 3, hidden=[11]))), local(clusters())
    here = replace(here, card=replace(here.card, budget=0.5))
    got = algorithm.send(algorithm.init_server(0), here.card, here.round)
    update, _ = algorithm.train(got, algorithm.init_client(got, here), here)
    assert algorithm.check(got, update) is None
    assert words in str(algorithm.check(got, replace(update, shared=change(update.shared))))


# -- FIARSE
class Mask(torch.autograd.Function):
    """1[|w| >= t] and its smoothed derivative in |w|: equation 6 of the paper."""

    @staticmethod
    def forward(ctx: Any, sizes: Tensor, threshold: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(sizes, threshold)
        return (sizes >= threshold).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        sizes, threshold = ctx.saved_tensors
        return gradient * (sizes >= threshold) * 2 * threshold / (sizes + threshold).square(), None


def test_training_is_that_of_the_published_layers() -> None:
    """Autograd through w · Mask(|w|) with plain SGD, on a model that keeps its dropped entries."""
    of = task(partial(models.build, "mlp", (6,), 3, hidden=[8]), momentum=0.0, weight_decay=0.0, clip=None)
    algorithm, here = build("fiarse", of), local(clusters())
    assert isinstance(algorithm, FIARSE)
    here = replace(here, card=replace(here.card, budget=0.4))
    server = algorithm.init_server(0)
    got = algorithm.send(server, here.card, Round())
    update, _ = algorithm.train(got, {}, here)

    start = flat(pick(server, algorithm.names))
    count = int(0.4 * len(start))
    threshold = start.abs().topk(count).values[-1]
    values = {name: value.clone().requires_grad_() for name, value in server.items()}
    optimiser = torch.optim.SGD(values.values(), lr=0.1)

    def step(batch: Any) -> Tensor:
        fc1, b1, out, b2 = (v * Mask.apply(v.abs(), threshold) for v in values.values())
        loss = F.cross_entropy(F.linear(F.relu(F.linear(batch.x, fc1, b1)), out, b2), batch.y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return loss.detach()

    loop(of, here, step)
    trained = flat({name: value.detach() for name, value in values.items()})
    kept = start.abs() >= threshold
    assert int(kept.sum()) == count == len(update.shared[VALUES])
    assert torch.equal(unpack_bits(update.shared[BITS], len(start)), kept)
    torch.testing.assert_close(update.shared[VALUES], trained[kept], rtol=1e-5, atol=1e-6)
    assert torch.equal(trained[~kept], start[~kept])
    assert (trained[kept].abs() < threshold).any(), "nothing fell below the threshold: no test of that"


def test_norms_are_always_kept() -> None:
    algorithm = build("fiarse", task(normed_mlp))
    assert isinstance(algorithm, FIARSE)
    server = algorithm.init_server(0)
    got = algorithm.send(server, Card("a", 10, 0.5), Round())
    kept = unpack_bits(got[BITS], sum(server[name].numel() for name in algorithm.names))
    assert kept[algorithm._always].all()
    assert int(kept.sum()) == int(0.5 * len(kept))


# -- DisPFL
def dispfl(of: Any, **options: Any) -> DisPFL:
    algorithm = build("dispfl", of, **options)
    assert isinstance(algorithm, DisPFL)
    return algorithm


@pytest.mark.parametrize("density", [0.05, 0.3, 0.9])
def test_erk_keeps_the_density_and_its_proportions(density: float) -> None:
    shapes = [(32, 1, 5, 5), (32,), (64, 32, 5, 5), (64,), (512, 1024), (512,), (10, 512), (10,)]
    shares, sizes = erk(shapes, density), [math.prod(shape) for shape in shapes]
    kept = sum(share * size for share, size in zip(shares, sizes, strict=True))
    assert kept == pytest.approx(density * sum(sizes), rel=1e-6)
    raw = [sum(shape) / size for shape, size in zip(shapes, sizes, strict=True)]
    scales = {round(share / r, 6) for share, r in zip(shares, raw, strict=True) if share < 1}
    assert len(scales) == 1
    assert all(0 < share <= 1 for share in shares)


@pytest.mark.parametrize("model", [plain_mlp, small_cnn])
def test_the_mask_moves_as_published(model: Any) -> None:
    """In every layer: the smallest leave, the largest gradients of one batch come in, the number stays."""
    shape = (1, 6, 6) if model is small_cnn else (6,)
    federation, of = clusters(novel=0, shape=shape), replace(task(model), batch=64)
    algorithm, here = dispfl(of), replace(local(federation), round=Round(1, 5))
    here = replace(here, card=replace(here.card, budget=0.4))
    got = algorithm.init_server(0)
    private = algorithm.init_client(got, here)
    update, after = algorithm.train(got, private, here)
    size = algorithm._size
    before, now = (unpack_bits(state[MASK], size) for state in (private, after))
    trained = elements.unpack(update.shared, torch.zeros(size))
    assert torch.equal(unpack_bits(update.shared[BITS], size), before)

    module = of.model()
    module.load_state_dict(
        {**got, **algorithm._masked(algorithm.landed(got, update), private), **elements.beside(update.shared)}
    )
    loss = F.cross_entropy(module.eval()(here.train.x), here.train.y)
    slopes = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]).abs()
    ratio, start = 0.25 * (1 + math.cos(math.pi / 5)), 0
    for parameter in module.parameters():
        piece = slice(start, start + parameter.numel())
        start = piece.stop
        old, new, sizes = before[piece], now[piece], trained[piece].abs()
        assert int(old.sum()) == int(new.sum())
        count = math.ceil(ratio * int(old.sum()))
        leaving = torch.where(old, sizes, torch.inf).topk(count, largest=False).indices
        out = ~old
        out[leaving] = True
        coming = torch.where(out, slopes[piece], -1.0).topk(count).indices
        expected = old.clone()
        expected[leaving] = False
        expected[coming] = True
        assert torch.equal(new, expected)


def test_entries_outside_the_mask_stay_zero_in_the_clients_model() -> None:
    of, federation = task(), clusters(novel=0)
    done = run(dispfl(of, alike=False), federation, 3, budget=0.3)
    assert done.store is not None
    masks = {str(done.store.get(client)[MASK].tolist()) for client in done.store.clients()}  # type: ignore[index]
    assert len(masks) == len(federation.clients), "masks become the clients' own"
    private = done.store.get("c0")
    assert private is not None
    algorithm = dispfl(of)
    model = algorithm.predictor(done.server, private, Card("c0", 24, 0.3))
    share = sum(float((p != 0).sum()) for p in model.parameters()) / algorithm._size
    assert share <= 0.3


def test_a_static_mask_costs_no_gradient_and_never_moves() -> None:
    of, federation = task(), clusters(novel=0)
    still, moving = (run(dispfl(of, anneal=anneal), federation, 2, budget=0.5) for anneal in (0.0, 0.5))
    assert still.history[0]["flops"] < moving.history[0]["flops"]
    assert still.store is not None
    masks = {str(still.store.get(client)[MASK].tolist()) for client in still.store.clients()}  # type: ignore[index]
    assert len(masks) == 1


def test_a_novel_client_keeps_the_largest_entries() -> None:
    algorithm, here = dispfl(task()), local(clusters())
    here = replace(here, card=replace(here.card, budget=0.3))
    got = algorithm.init_server(0)
    mask = unpack_bits(algorithm.adapt(got, algorithm.init_client(got, here), here)[MASK], algorithm._size)
    start = 0
    for name in algorithm.names:
        piece = mask[start : start + got[name].numel()]
        start += got[name].numel()
        sizes = got[name].flatten().abs()
        assert not piece.any() or piece.all() or sizes[piece].min() >= sizes[~piece].max()
