"""FedEM: one component is FedAvg, responsibilities are a softmax, clusters are found, nothing but pi is personal."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from tests.support.toys import clusters, dropout_mlp, first, local, plain_mlp, run, task

from pfedgate import data, models
from pfedgate.algorithms import build
from pfedgate.algorithms.fedem import FedEM, Mixture, responsibilities
from pfedgate.core.modules import module
from pfedgate.core.state import equal, inside, under
from pfedgate.core.types import Optim, Round, State, Task
from pfedgate.data.federation import Part
from pfedgate.training.fit import fit


def test_one_component_is_fedavg_bit_for_bit() -> None:
    federation, given = clusters(), task(dropout_mlp)
    expected = run(build("fedavg", given), federation, sample=0.6)
    found = run(build("fedem", given, components=1), federation, sample=0.6)
    assert equal(inside("0/", found.server), expected.server)
    assert [s.test.accuracy for s in found.scores] == [s.test.accuracy for s in expected.scores]


def test_responsibilities_are_shares_and_ignore_a_constant_per_sample() -> None:
    losses, pi = torch.rand(7, 3) * 9, torch.tensor([0.2, 0.5, 0.3])
    q = responsibilities(pi, losses)
    torch.testing.assert_close(q.sum(1), torch.ones(7))
    torch.testing.assert_close(q, responsibilities(pi, losses + torch.randn(7, 1)))
    torch.testing.assert_close(q, pi * torch.exp(-losses) / (pi * torch.exp(-losses)).sum(1, keepdim=True))


def test_a_share_of_zero_can_grow_again() -> None:
    pi = torch.tensor([0.0, 1.0])
    for _ in range(3):
        pi = responsibilities(pi, torch.tensor([[0.0, 60.0]])).mean(0)
    assert pi[0] > 0.99


def test_equal_components_stay_equal() -> None:
    algorithm, federation = build("fedem", task(dropout_mlp)), clusters()
    one = local(federation)
    got, private = first(algorithm, one)
    got = {name: got["0/" + name.partition("/")[2]] for name in got}
    update, private = algorithm.train(got, private, one)
    for m in (1, 2):
        assert equal(inside(f"{m}/", update.shared), inside("0/", update.shared))
    torch.testing.assert_close(private["pi"], torch.full((3,), 1 / 3))


def test_components_start_differently_and_the_first_where_fedavg_does() -> None:
    given = task()
    server = build("fedem", given).init_server(4)
    assert equal(inside("0/", server), build("fedavg", given).init_server(4))
    assert len({str(inside(f"{m}/", server)["0.weight"]) for m in range(3)}) == 3


def test_losses_are_divided_by_the_batch_not_by_the_responsibilities() -> None:
    given, federation = task(plain_mlp), clusters()
    algorithm, one = build("fedem", given, components=2), local(federation)
    assert isinstance(algorithm, FedEM)
    got, private = first(algorithm, one)
    update, _ = algorithm.train(got, private, one)
    q = responsibilities(private["pi"], algorithm._losses(got, one))

    def by_hand(net: torch.nn.Module, batch: object) -> torch.Tensor:
        losses = given.loss(net(batch.x), batch.y)  # type: ignore[attr-defined]
        return (losses * q[batch.rows, 1]).sum() / batch.n  # type: ignore[attr-defined]

    expected = fit(given, inside("1/", got), one, objective=by_hand).state
    for name, value in inside("1/", update.shared).items():
        torch.testing.assert_close(value, expected[name])


def test_the_e_step_sees_every_sample_in_evaluation_mode() -> None:
    given = replace(task(dropout_mlp), drop_last=True)
    algorithm, one = build("fedem", given), local(clusters(), "c1")  # 17 samples, batches of 8
    assert isinstance(algorithm, FedEM)
    got, private = first(algorithm, one)
    losses = algorithm._losses(got, one)
    assert losses.shape == (17, 3)
    model = module(given, inside("2/", got))
    torch.testing.assert_close(losses[:, 2], given.loss(model(one.train.x), one.train.y).detach())
    _, after = algorithm.train(got, private, one)
    torch.testing.assert_close(after["pi"], responsibilities(private["pi"], losses).mean(0))


def test_permuting_components_permutes_pi_and_nothing_else() -> None:
    algorithm, one = build("fedem", task()), local(clusters())
    got, private = first(algorithm, one)
    private = {"pi": torch.tensor([0.2, 0.5, 0.3])}
    order = [2, 0, 1]
    mixed: State = {}
    for to, of in enumerate(order):
        mixed |= under(f"{to}/", inside(f"{of}/", got))
    update, after = algorithm.train(got, private, one)
    changed, permuted = algorithm.train(mixed, {"pi": private["pi"][order]}, one)
    torch.testing.assert_close(permuted["pi"], after["pi"][order])
    for to, of in enumerate(order):
        torch.testing.assert_close(inside(f"{to}/", changed.shared), inside(f"{of}/", update.shared))
    x = torch.randn(5, 6)
    torch.testing.assert_close(
        algorithm.predictor(got, private, one.card)(x),
        algorithm.predictor(mixed, {"pi": private["pi"][order]}, one.card)(x),
    )


def test_probabilities_are_mixed_not_logits() -> None:
    nets = [plain_mlp(), plain_mlp()]
    x, pi = torch.randn(4, 6), torch.tensor([0.25, 0.75])
    expected = 0.25 * nets[0](x).softmax(-1) + 0.75 * nets[1](x).softmax(-1)
    mixture = Mixture(nets, pi)
    torch.testing.assert_close(mixture(x).exp(), expected)
    torch.testing.assert_close(
        torch.nn.functional.cross_entropy(mixture(x), torch.zeros(4, dtype=torch.long)), -expected[:, 0].log().mean()
    )


def fedem_on_conflict(**options: object) -> tuple[FedEM, data.Federation]:
    federation = data.conflicting(clients=6, samples_per_client=60, novel=0.3)
    model = partial(models.build, "mlp", federation.input_shape, federation.classes, hidden=[8])
    given = Task(model, optim=Optim(lr=0.1), batch=16)
    algorithm = build("fedem", given, **options)
    assert isinstance(algorithm, FedEM)
    return algorithm, federation


def test_two_clusters_are_told_apart_and_novel_clients_find_theirs() -> None:
    algorithm, federation = fedem_on_conflict(components=2)
    result = run(algorithm, federation, rounds=12, evaluate_every=12)
    assert result.summary["accuracy"] > 0.9
    assert result.summary["novel"]["accuracy"] > 0.9
    assert result.store is not None
    shares = {c: (result.store.get(c) or {})["pi"] for c in federation.clients}
    assert all(pi.max() > 0.95 for pi in shares.values())
    kinds = [{int(shares[c].argmax()) for c in federation.clients if int(c) % 2 == odd} for odd in (0, 1)]
    assert len(kinds[0]) == len(kinds[1]) == 1
    assert kinds[0] != kinds[1]
    fedavg = run(build("fedavg", algorithm.task), federation, rounds=12, evaluate_every=12)
    assert fedavg.summary["accuracy"] < 0.75


def test_adapting_moves_pi_only_and_two_labelled_samples_suffice() -> None:
    algorithm, federation = fedem_on_conflict(components=2)
    result = run(algorithm, federation, rounds=12, evaluate_every=0)
    name = federation.novel[0]
    one = local(federation, name, Round(index=11, rounds=12))
    few = replace(one, train=Part.of(one.train, one.train.rows[:2]))
    before = {n: v.clone() for n, v in result.server.items()}
    adapted = algorithm.adapt(result.server, algorithm.init_client(result.server, few), few)
    assert set(adapted) == {"pi"}
    assert adapted["pi"].max() > 0.9
    assert equal(before, result.server)


def test_refresh_makes_pi_for_the_components_at_hand() -> None:
    algorithm, one = build("fedem", task(), refresh=True), local(clusters())
    got, private = first(algorithm, one)
    assert isinstance(algorithm, FedEM)
    expected = responsibilities(private["pi"], algorithm._losses(got, one)).mean(0)
    torch.testing.assert_close(algorithm.personalise(got, private, one)["pi"], expected)
    plain = replace(algorithm, refresh=False)
    assert plain.personalise(got, private, one) is private
