"""FedMD: no parameter moves, no public samples is Local, consensus draws predictions together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.toys import clusters, dropout_mlp, first, local, personal_digests, plain_mlp, run, scores, task
from torch import nn

from pfedgate import data
from pfedgate import models as library
from pfedgate.algorithms import build
from pfedgate.algorithms.fedmd import SCORES, SUBSET, FedMD
from pfedgate.algorithms.fedmd.public import Public, WithHead, pretrained, public
from pfedgate.core.mergers import merge
from pfedgate.core.modules import module
from pfedgate.core.state import equal, inside
from pfedgate.core.types import Card, Optim, Round, State, Task, Update
from pfedgate.training.fit import scan

POOL = Public(torch.randn(40, 6, generator=torch.Generator().manual_seed(1)))


def fedmd(of: Task | None = None, **options: Any) -> FedMD:
    algorithm = build("fedmd", of or task(plain_mlp), **{"public": POOL, **options})
    assert isinstance(algorithm, FedMD)
    return algorithm


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))


# -- laws
@pytest.mark.parametrize("options", [{"align": 0}, {"public": Public(torch.zeros(0, 6))}])
def test_without_public_samples_it_is_local(options: dict[str, Any]) -> None:
    federation, given = clusters(), task(dropout_mlp)
    alone, method = build("local_only", given), fedmd(given, **options)
    expected, found = run(alone, federation, sample=0.6), run(method, federation, sample=0.6)
    assert personal_digests(method, found, federation) == personal_digests(alone, expected, federation)
    assert scores(found) == scores(expected)
    assert found.server == {}
    assert found.history[0]["bytes_up"] == found.history[0]["bytes_down"] == 0


@pytest.mark.parametrize("loss", ["mae", "mse"])
def test_the_consensus_of_one_client_moves_nothing(loss: str) -> None:
    # One sample: in a shuffled batch it may be rounded otherwise, and an absolute error knows no small difference.
    given = task(plain_mlp, weight_decay=0.0)
    algorithm, one = fedmd(given, digest_loss=loss, digest_lr=0.5, align=1), local(clusters())
    got, private = first(algorithm, one)
    update, private = algorithm.train(got, private, one)
    server = merge(algorithm.merger({}, one.round), [(one.card, update)])
    later = replace(one, round=Round(1))
    subset = algorithm._subset(later, 1)
    mine = scan(given, module(given, inside("model/", private)), subset, later)
    assert torch.equal(server[SCORES], mine)
    digested = algorithm._digest(server, inside("model/", private), later)
    assert digested is not None
    assert equal(digested.state, inside("model/", private))
    other = algorithm._digest({**server, SCORES: mine + 1}, inside("model/", private), later)
    assert other is not None
    assert not equal(other.state, digested.state)


def test_scores_are_averaged_as_they_are_and_clients_count_the_same() -> None:
    algorithm = fedmd()
    sent = [(Card("a", 1), Update({SCORES: torch.full((4, 3), 1.0)}, 1.0))] * 2
    sent += [(Card("b", 900), Update({SCORES: torch.full((4, 3), 7.0)}, 1.0))]
    merged = merge(algorithm.merger({}, Round(4, total=999.0)), sent)
    assert merged[SCORES].unique().tolist() == [3.0]
    assert int(merged[SUBSET]) == 5
    one = local(clusters())
    assert algorithm.train({}, algorithm.init_client({}, one), one)[0].weight == 1.0


def test_digesting_brings_predictions_together() -> None:
    given, federation = task(plain_mlp, lr=0.2), clusters((60, 60, 60), novel=0)
    algorithm = fedmd(given, align=40, digest_lr=0.02)
    ones = [local(federation, name) for name in federation.clients]
    done = [algorithm.train({}, algorithm.init_client({}, one), one) for one in ones]
    server = merge(
        algorithm.merger({}, Round()), ((one.card, update) for one, (update, _) in zip(ones, done, strict=True))
    )
    subset = algorithm._subset(ones[0], 1)

    def spread(states: list[State]) -> float:
        said = [scan(given, module(given, state), subset, ones[0]) for state in states]
        return float(sum((a - b).abs().mean() for a in said for b in said))

    before = [inside("model/", private) for _, private in done]
    after = []
    for one, state in zip(ones, before, strict=True):
        digested = algorithm._digest(server, state, replace(one, round=Round(1)))
        assert digested is not None
        after.append(digested.state)
    assert spread(after) < 0.8 * spread(before)


def test_clients_of_different_architectures_learn_together() -> None:
    federation = clusters((30,) * 5, novel=1)
    algorithm = fedmd(architectures=(plain_mlp, _wide))
    result = run(algorithm, federation, rounds=3)
    assert result.store is not None
    states = [result.store.get(name) or {} for name in federation.clients]
    assert len({tuple(sorted(state)) for state in states}) == 2
    assert result.history[-1]["digest_loss"] > 0
    assert len(result.novel) == 1


def test_only_scores_travel_and_their_size_does_not_depend_on_the_model() -> None:
    federation, clients = clusters(), 4
    pool = Public(torch.randn(2000, 6))
    for model in (plain_mlp, _wide):
        record = run(fedmd(task(model), public=pool, align=1000), federation, rounds=2).history
        assert record[0]["bytes_down"] == 0
        for sent in (record[0]["bytes_up"], record[1]["bytes_up"], record[1]["bytes_down"]):
            assert sent == pytest.approx(4 * 1000 * 3 * clients, rel=0.05)


def test_costs_one_unit_and_the_digest() -> None:
    federation, given = clusters((80, 80), novel=0), task(plain_mlp)
    pool = Public(torch.randn(160, 6))
    plain = run(build("local_only", given), federation, rounds=1).history[0]["flops"]
    record = run(fedmd(given, public=pool), federation, rounds=2).history
    # Twice as many public samples: two more units to digest them, and their forward pass.
    assert record[1]["flops"] == pytest.approx(3 * plain + (record[0]["flops"] - plain), rel=0.05)
    assert record[0]["flops"] < 2 * plain


# -- subsets and the public set
def test_everybody_looks_at_the_same_fresh_subset() -> None:
    algorithm, federation = fedmd(align=10), clusters()
    a, b = local(federation, "c0"), local(federation, "c1", Round(7))
    assert torch.equal(algorithm._subset(a, 3).x, algorithm._subset(b, 3).x)
    assert not torch.equal(algorithm._subset(a, 3).x, algorithm._subset(a, 4).x)
    assert algorithm._subset(a, 3).n == 10


def test_what_is_digested_is_what_was_asked_about() -> None:
    """Scores sent in round t belong to the subset of round t + 1, also for novel clients after the last round."""
    algorithm, one = fedmd(align=12), local(clusters(), round=Round(2))
    update, private = algorithm.train({}, algorithm.init_client({}, one), one)
    server = merge(algorithm.merger({}, one.round), [(one.card, update)])
    subset = algorithm._subset(one, int(server[SUBSET]))
    said = scan(algorithm.task, module(algorithm.task, inside("model/", private)), subset, one)
    torch.testing.assert_close(server[SCORES], said)


def test_pretraining_uses_a_head_that_is_thrown_away() -> None:
    given = task(plain_mlp)
    labelled = Public(POOL.x, torch.arange(40) % 5)
    algorithm, one = fedmd(given, public=labelled), local(clusters())
    assert labelled.classes == 5
    state = inside("model/", algorithm.init_client({}, one))
    start = build("fedavg", given).init_server(0)
    assert torch.equal(state["5.weight"], start["5.weight"])
    assert not torch.equal(state["0.weight"], start["0.weight"])
    assert equal(state, inside("model/", algorithm.init_client({}, local(clusters(), "c2")))), "the same for all"
    assert WithHead(plain_mlp, "5", 5)()(POOL.x).shape == (40, 5)
    assert equal(inside("model/", fedmd(given, public=labelled, pretrain_epochs=0).init_client({}, one)), start)


def test_pretraining_learns_the_public_classes() -> None:
    x = torch.cat([torch.randn(40, 6) + 2, torch.randn(40, 6) - 2])
    known = Public(x, torch.arange(80) // 40)
    given = task(plain_mlp)
    one = local(clusters())
    state = pretrained(given, known, 0, 20, one.device, one.prepare)
    hidden = nn.Sequential(*list(module(given, state).children())[:-1])
    features = hidden(x).detach()
    apart = (features[:40].mean(0) - features[40:].mean(0)).norm() / features.std(0).norm()
    start = nn.Sequential(*list(module(given, build("fedavg", given).init_server(0)).children())[:-1])(x).detach()
    assert apart > (start[:40].mean(0) - start[40:].mean(0)).norm() / start.std(0).norm()


@pytest.mark.parametrize("name", ["glyphs", "photos", "noise"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32)])
def test_embedded_sets_take_the_shape_of_private_images(name: str, shape: tuple[int, ...]) -> None:
    like = torch.zeros(2, *shape, dtype=torch.uint8)
    found = public(name, like)
    assert found.x.shape == (600, *shape)
    assert found.x.dtype is torch.uint8
    assert found.x.float().std() > 20
    assert found.classes == {"glyphs": 10, "photos": 2, "noise": 0}[name]
    assert torch.equal(found.x, public(name, like).x)


def test_printed_digits_are_told_apart_and_can_be_turned() -> None:
    like = torch.zeros(2, 1, 16, 16, dtype=torch.uint8)
    found = public("glyphs", like)
    assert found.y is not None
    x = found.x.flatten(1).float()
    centres = torch.stack([x[found.y == digit][:40].mean(0) for digit in range(10)])
    held = torch.cat([x[found.y == digit][40:] for digit in range(10)])
    labels = torch.arange(10).repeat_interleave(20)
    assert (torch.cdist(held, centres).argmin(1) == labels).float().mean() > 0.6
    turned = public("glyphs+transpose+invert", like)
    assert torch.equal(turned.x, 255 - found.x.transpose(2, 3))


def test_data_that_are_not_images_get_noise_of_their_kind() -> None:
    assert public("auto", torch.zeros(3, 6)).x.shape == (600, 6)
    words = public("auto", torch.zeros(3, 5, dtype=torch.int64), tokens=9).x
    assert (words.min(), words.max()) == (0, 8)
    with pytest.raises(ValueError, match="embedding"):
        public("auto", torch.zeros(3, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="use 'noise'"):
        public("glyphs", torch.zeros(3, 6))
    with pytest.raises(ValueError, match="did you mean 'glyphs'"):
        public("glyph", torch.zeros(3, 6))
    with pytest.raises(ValueError, match="did you mean 'invert'"):
        public("glyphs+inverted", torch.zeros(3, 6))


# -- whole runs
def test_conflicting_labels_do_not_matter_when_models_are_personal() -> None:
    federation = data.conflicting(clients=6, samples_per_client=60, novel=0.3)
    model = partial(library.build, "mlp", federation.input_shape, federation.classes, hidden=[16])
    result = run(build("fedmd", Task(model, optim=Optim(lr=0.1), batch=16)), federation, rounds=5, evaluate_every=5)
    assert result.summary["accuracy"] > 0.9
    assert result.summary["novel"]["accuracy"] > 0.9


def test_a_novel_client_digests_and_trains_without_touching_the_consensus() -> None:
    algorithm, federation = fedmd(), clusters()
    result = run(algorithm, federation, rounds=2)
    one = local(federation, "c4", Round(1, 2))
    before = {name: value.clone() for name, value in result.server.items()}
    start = algorithm.init_client(result.server, one)
    adapted = algorithm.adapt(result.server, start, one)
    assert equal(result.server, before)
    assert not equal(adapted, start)
    assert not equal(adapted, algorithm.adapt({}, start, one)), "the consensus was not digested"


def test_foreign_updates_are_refused() -> None:
    algorithm = fedmd()
    assert algorithm.check({}, Update({SCORES: torch.zeros(2, 3)}, 1.0)) is None
    assert "only" in str(algorithm.check({}, Update({"model": torch.zeros(2, 3)}, 1.0)))
    wrong = Update({SCORES: torch.zeros(2, 4)}, 1.0)
    assert "expected" in str(algorithm.check({SCORES: torch.zeros(2, 3)}, wrong))
    with pytest.raises(ValueError, match="digest_loss"):
        fedmd(digest_loss="huber")
