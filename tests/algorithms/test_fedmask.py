"""FedMask: weights stand still, dropped structures stay dropped, bits are averaged where they overlap."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.toys import clusters, first, local, plain_mlp, run, scores, small_cnn, task

from pfedgate import data, models
from pfedgate.algorithms import build
from pfedgate.algorithms.fedmask import KNOWN, MEAN, SERVED, FedMask, _mark
from pfedgate.algorithms.fedmask.structures import (
    BITS,
    KEPT,
    BitMean,
    covered,
    learn,
    pack_bits,
    pack_mask,
    unpack_bits,
)
from pfedgate.core.mergers import merge
from pfedgate.core.modules import initial, module
from pfedgate.core.state import equal, flat, inside, pick, split
from pfedgate.core.types import Card, Optim, Round, State, Task, Update
from pfedgate.engine.wire import packed_size
from pfedgate.training.fit import loop

LAYERS = ("3", "5")  # two of the three of the small perceptron


def fedmask(of: Task | None = None, **options: Any) -> FedMask:
    algorithm = build("fedmask", of or task(plain_mlp), **{"layers": LAYERS, "warmup": 0, **options})
    assert isinstance(algorithm, FedMask)
    return algorithm


def mask(algorithm: FedMask, private: State) -> torch.Tensor:
    return algorithm._mask(private)


def model_of(server: State) -> State:
    return split(server, lambda name: name.startswith("mask/"))[1]


# -- bits
@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_bits_come_back(count: int) -> None:
    values = torch.rand(count) > 0.5
    packed = pack_bits(values)
    assert packed.dtype is torch.uint8
    assert len(packed) == -(-count // 8)
    assert torch.equal(unpack_bits(packed, count), values)


def test_masked_layers_are_the_fully_connected_ones_but_the_first() -> None:
    expected = {"cnn_femnist": {"out.weight"}, "cnn_cifar10": {"fc2.weight", "fc2.bias", "out.weight"}}
    for name, names in expected.items():
        assert set(covered(Task(partial(models.build, name)), None).names) == names


def test_structures_are_what_a_layer_writes_and_for_the_output_layer_what_it_reads() -> None:
    of = covered(task(small_cnn), ["3", "6", "8"])  # conv 4→4, fc 64→8, out 8→3
    assert of.names == ("3.weight", "3.bias", "6.weight", "6.bias", "8.weight")
    assert of.layers == ((0, 4), (4, 12), (12, 20))
    assert of.of[: 4 * 36].view(4, 36).unique(dim=1)[:, 0].tolist() == [0, 1, 2, 3]
    assert of.of[-24:].view(3, 8).unique(dim=0)[0].tolist() == list(range(12, 20))


def test_the_best_structures_of_each_layer_are_kept() -> None:
    of = covered(task(small_cnn), ["3", "8"])
    wanted = torch.tensor([0.0, 3, 1, 2, *range(8)])
    kept = of.best(wanted[of.of], 0.5)
    assert kept.nonzero()[:, 0].tolist() == [1, 3, 8, 9, 10, 11]
    assert of.best(torch.zeros(of.size), 0.01).sum() == 2, "at least one of each layer; of equals the first"


# -- scores
def test_the_gradient_of_a_score_is_that_of_its_bit() -> None:
    given = replace(task(plain_mlp, momentum=0.0, clip=None), steps=1)
    of, base, one = covered(given, LAYERS), initial(given, 0), local(clusters())
    start = torch.where(torch.rand(of.size) > 0.3, 0.51, 0.49)
    kept = torch.rand(of.count) > 0.3
    after, _ = learn(given, base, of, start, kept, one, (1.0, 0.5), None)
    bits = ((start >= 0.5) & kept[of.of]).float().requires_grad_()
    weights = flat(pick(base, of.names))
    values = dict(zip(of.names, (weights * bits).split([base[n].numel() for n in of.names]), strict=True))
    state = {name: values[name].view(base[name].shape) if name in values else base[name] for name in base}
    net = module(given, base)
    seen: list[Any] = []

    def see(batch: Any) -> torch.Tensor:
        seen.append(batch)
        return torch.zeros(())

    loop(given, one, see)
    loss = given.loss(torch.func.functional_call(net, state, (seen[0].x,)), seen[0].y).mean()
    (gradient,) = torch.autograd.grad(loss, bits)
    torch.testing.assert_close(after, start - gradient * kept[of.of])


# -- a client
@pytest.mark.parametrize("density", [0.3, 0.5, 1.0])
def test_masks_are_bits_within_the_kept_structures(density: float) -> None:
    algorithm, one = fedmask(density=density, score_lr=50.0), local(clusters())
    got, private = first(algorithm, one)
    kept = None
    for index in range(3):
        update, private = algorithm.train(got, private, replace(one, round=Round(index)))
        kept = private["kept"] if kept is None else kept
        assert torch.equal(private["kept"], kept), "what was pruned once stays pruned"
        bits = mask(algorithm, private)
        of = algorithm._structures
        assert not (bits & ~kept[of.of]).any()
        assert update.metrics["mask_density"] == float(bits.double().mean()) <= density
        assert {v.dtype for v in update.shared.values()} == {torch.uint8}
        assert len(update.shared[BITS]) == -(-int(kept[of.of].sum()) // 8)
        assert algorithm.check(got, update) is None


def test_weights_stand_still_on_both_sides() -> None:
    algorithm, federation = fedmask(score_lr=50.0), clusters()
    start = algorithm.init_server(0)
    result = run(algorithm, federation, rounds=3, sample=0.6)
    assert equal(model_of(result.server), model_of(start))
    assert result.store is not None
    states = [result.store.get(name) for name in federation.clients]
    bases = [inside("base/", state) for state in states if state]
    assert bases
    assert all(equal(base, model_of(start)) for base in bases)
    assert result.server[MEAN].count_nonzero()


def test_the_scored_model_is_the_weights_under_the_mask() -> None:
    algorithm, one = fedmask(), local(clusters())
    got, private = first(algorithm, one)
    _, private = algorithm.train(got, private, one)
    model = algorithm.predictor(got, private, one.card)
    found = inside("model.", dict(model.state_dict()))
    base, bits, of = inside("base/", private), mask(algorithm, private), algorithm._structures
    assert torch.equal(flat(pick(found, of.names)), flat(pick(base, of.names)) * bits)
    assert torch.equal(found["0.weight"], base["0.weight"])
    stats = model.stats()  # type: ignore[operator]
    nonzero = sum(int(v.count_nonzero()) for v in found.values()) / sum(v.numel() for v in found.values())
    assert stats["density"] == pytest.approx(nonzero)


# -- the server
def packed_mask(of: Any, kept: list[int], value: bool) -> State:
    chosen = torch.zeros(of.count, dtype=torch.bool)
    chosen[kept] = True
    return pack_mask(torch.full((of.size,), value), chosen, of)


def test_disjoint_structures_change_nothing_and_overlaps_are_averaged() -> None:
    algorithm = fedmask()
    of, server = algorithm._structures, algorithm.init_server(0)
    old = torch.rand(of.size)
    disjoint = [(1.0, packed_mask(of, [0, 1], True)), (1.0, packed_mask(of, [2, 3], False))]

    def mean_of_bits(sent: list[tuple[float, State]]) -> tuple[torch.Tensor, torch.Tensor]:
        mean = BitMean(of, old)
        for weight, update in sent:
            mean.add(update, weight)
        return mean.result()

    mean, known = mean_of_bits(disjoint)
    assert torch.equal(mean, old)
    assert not known.any()
    overlap = [
        (1.0, packed_mask(of, [0, 1], True)),
        (3.0, packed_mask(of, [1, 2], False)),
        (1.0, packed_mask(of, [2], True)),
    ]
    mean, known = mean_of_bits(overlap)
    assert known.nonzero()[:, 0].tolist() == [1, 2]
    assert mean[of.of == 1].unique().tolist() == [0.25]
    assert torch.equal(mean[of.of == 0], old[of.of == 0])
    merged = merge(algorithm.merger(server, Round()), [(Card("a", 1), Update(overlap[0][1], 1.0))])
    assert merged[KNOWN].nonzero()[:, 0].tolist() == [0, 1], "with one client the aggregate is its mask"
    assert merged[MEAN][of.of <= 1].unique().tolist() == [1.0]


def test_clients_take_over_the_aggregate_where_they_overlap() -> None:
    algorithm, one = fedmask(score_lr=0.0, density=0.5), local(clusters())
    got, private = first(algorithm, one)
    _, private = algorithm.train(got, private, one)
    of = algorithm._structures
    assert private["scores"].unique().tolist() == pytest.approx([0.51])
    half = torch.arange(of.count) % 2 == 0
    got = {**got, BITS: pack_bits(torch.zeros(of.size, dtype=torch.bool)), KEPT: pack_bits(half)}
    _, after = algorithm.train(got, private, one)
    expected = private["kept"][of.of] & ~half[of.of]
    assert torch.equal(mask(algorithm, after), expected)


# -- the base
def test_warm_up_is_fedavg_and_then_the_model_is_sent_once() -> None:
    federation, given = clusters(), task(plain_mlp)
    algorithm = fedmask(given, warmup=2)
    expected = run(build("fedavg", given), federation, rounds=2)
    found = run(algorithm, federation, rounds=5)
    assert equal(model_of(found.server), expected.server)
    down = [record["bytes_down"] for record in found.history]
    assert down[0] == down[1]
    assert down[2] > down[1]  # model and mask
    assert down[3] == down[4] < down[1] / 2
    assert scores(run(algorithm, federation, rounds=2)) == scores(expected)
    assert build("fedmask", given).options()["warmup"] == 0.5


def test_traffic_is_a_thirty_second_of_the_masked_layers() -> None:
    given = Task(partial(models.build, "mlp", (16,), 62, hidden=[2048]))
    algorithm = fedmask(given, layers=None)
    of = algorithm._structures
    assert of.size == 126976
    up = packed_size(packed_mask(of, list(range(1024)), True))
    assert up == pytest.approx(0.5 * 4 * of.size / 32 + of.count / 8, rel=0.05)
    card = Card("a", 1)
    served = {**algorithm.init_server(0), SERVED: torch.tensor([_mark(card)])}
    assert packed_size(algorithm.send(served, card, Round())) == pytest.approx(4 * of.size / 32, rel=0.05)


# -- whole runs
def conflicting_task() -> tuple[Task, data.Federation]:
    federation = data.conflicting(clients=6, samples_per_client=60, novel=0.3)
    model = partial(models.build, "mlp", federation.input_shape, federation.classes, hidden=[32])
    return Task(model, optim=Optim(lr=0.1), batch=16), federation


def test_conflicting_labels_are_told_apart_by_masks_alone() -> None:
    given, federation = conflicting_task()
    algorithm = build("fedmask", given)
    result = run(algorithm, federation, rounds=10, evaluate_every=10)
    assert result.summary["accuracy"] > 0.9
    assert result.summary["novel"]["accuracy"] > 0.9
    assert result.summary["mask_density"] <= 0.5 < result.summary["density"]


def test_a_novel_client_gets_a_mask_and_changes_nothing_else() -> None:
    algorithm, federation = fedmask(), clusters()
    result = run(algorithm, federation, rounds=2)
    one = local(federation, "c4", Round(1, 2))
    got = algorithm.send(result.server, one.card, one.round)
    before = {name: value.clone() for name, value in got.items()}
    adapted = algorithm.adapt(got, algorithm.init_client(got, one), one)
    assert equal(got, before)
    assert mask(algorithm, adapted).any()


def test_a_client_without_a_mask_uses_the_frozen_weights() -> None:
    algorithm, one = fedmask(), local(clusters())
    got, private = first(algorithm, one)
    assert private == {}
    assert equal(dict(algorithm.predictor(got, private, one.card).state_dict()), initial(algorithm.task, 0))


def test_damaged_masks_are_named() -> None:
    algorithm, one = fedmask(), local(clusters())
    got, private = first(algorithm, one)
    update, _ = algorithm.train(got, private, one)
    short = {**update.shared, BITS: update.shared[BITS][:-1]}
    assert "bits" in str(algorithm.check(got, replace(update, shared=short)))
    assert "structures" in str(
        algorithm.check(got, replace(update, shared={**update.shared, KEPT: torch.zeros(9).byte()}))
    )
    assert "bytes" in str(algorithm.check(got, replace(update, shared={BITS: update.shared[BITS]})))


def test_wrong_options_fail_at_once() -> None:
    for wrong in ({"density": 0.0}, {"warmup": -1}):
        with pytest.raises(ValueError, match="FedMask wants"):
            fedmask(**wrong)
    with pytest.raises(ValueError, match="layers"):
        fedmask(layers="17")
