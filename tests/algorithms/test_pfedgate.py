"""pFedGate's own laws: it is FedAvg when gates are one, and sends and moves only what was live."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.gates import milliseconds
from torch import nn

from pfedgate import algorithms, data, models
from pfedgate.algorithms.pfedgate import PFedGate
from pfedgate.algorithms.pfedgate.personal import Setting, fresh_gate, workspace
from pfedgate.algorithms.pfedgate.tiles import BLOCKS, VALUES
from pfedgate.core import measure
from pfedgate.core.mergers import merge
from pfedgate.core.state import flat, pick
from pfedgate.core.types import CPU, Card, Local, Optim, Round, Task, Update
from pfedgate.engine import server as engine
from pfedgate.gating import latency
from pfedgate.gating.gate.config import GateConfig


@pytest.fixture(scope="module")
def federation() -> data.Federation:
    return data.load("digits", clients=6)


@pytest.fixture(scope="module")
def task(federation: data.Federation) -> Task:
    model = partial(models.build, "cnn_digits", federation.input_shape, federation.classes)
    example = federation.prepare(federation.part(federation.clients[0], "train").x[:8])
    return Task(model=model, example=example, optim=Optim(lr=0.05, momentum=0.9, weight_decay=5e-4), batch=32)


def pfedgate(task: Task, gate: dict[str, Any] | None = None, **options: Any) -> PFedGate:
    """pFedGate with these options, and these of its gate."""
    inner = {f"gate.{name}": value for name, value in (gate or {}).items()}
    algorithm = algorithms.build("pfedgate", task, **options, **inner)
    assert isinstance(algorithm, PFedGate)
    return algorithm


def budgeted_local(federation: data.Federation, client: int = 0, budget: float = 0.5, seed: int = 0) -> Local:
    name = federation.clients[client]
    train, val = federation.part(name, "train"), federation.part(name, "val")
    return Local(Card(name, train.n, budget), train, val, Round(seed=seed), prepare=federation.prepare)


@pytest.mark.parametrize("changes", [{"clip": None}, {"clip": 10.0}, {"clip": 0.05}], ids=str)
def test_gates_of_one_at_full_budget_are_fedavg_bit_for_bit(
    task: Task, federation: data.Federation, changes: dict[str, Any]
) -> None:
    task = replace(task, optim=replace(task.optim, **changes))
    options = engine.Options(rounds=3, sample=0.5, budget=1.0)
    plain = engine.run(algorithms.build("fedavg", task), federation, options)
    gated = engine.run(pfedgate(task, {"init": "ones"}, gate_lr=0.0), federation, options)
    assert set(plain.server) == set(gated.server)
    for name, value in plain.server.items():
        assert torch.equal(value, gated.server[name]), name


@pytest.mark.parametrize("budget", [0.7, 0.5, 0.3])
def test_what_was_never_live_does_not_move_and_is_not_sent(
    task: Task, federation: data.Federation, budget: float
) -> None:
    algorithm, one = pfedgate(task), budgeted_local(federation, budget=budget)
    got = algorithm.init_server(0)
    private = algorithm.init_client(got, one)
    update, after = algorithm.train(got, private, one)
    personal = algorithm._workspace()
    before = flat(pick(got, personal.names))
    moved = (personal.vector() != before).nonzero()[:, 0]
    owner = torch.from_numpy(personal.parts.owner)
    sent = set(update.shared[BLOCKS].tolist())
    assert set(owner[moved].tolist()) <= sent, "momentum or decay moved something that was never live"
    assert 0 < len(sent) < personal.parts.count
    assert update.metrics["density"] <= budget
    assert update.metrics["q"] < 1
    assert any(not torch.equal(after[name], private[name]) for name in private), "the gate has not learnt"


def test_server_averages_per_tile_and_leaves_unsent_ones_alone(task: Task) -> None:
    algorithm = pfedgate(task)
    server = algorithm.init_server(0)
    tiles, names = algorithm.tiles, algorithm._workspace().names
    vector = flat(pick(server, names))

    def update(ids: list[int], value: float, weight: float) -> Update:
        chosen = torch.tensor(ids, dtype=torch.int32)
        return Update({BLOCKS: chosen, VALUES: torch.full((int(tiles.sizes[chosen.long()].sum()),), value)}, weight)

    sent = [(Card("a", 1), update([0, 1], 1.0, 1.0)), (Card("b", 3), update([1, 2], 5.0, 3.0))]
    merged = flat(pick(merge(algorithm.merger(server, Round()), iter(sent)), names))
    for tile, expected in ((0, 1.0), (1, 4.0), (2, 5.0)):
        assert merged[tiles.positions(torch.tensor([tile]))].unique().tolist() == [expected]
    rest = tiles.positions(torch.arange(3, tiles.count))
    assert torch.equal(merged[rest], vector[rest])


def test_nothing_of_the_gate_travels(task: Task, federation: data.Federation) -> None:
    from pfedgate.engine import wire

    algorithm, one = pfedgate(task, {"shift": True}), budgeted_local(federation)
    got = algorithm.init_server(0)
    private = algorithm.init_client(got, one)
    update, private = algorithm.train(got, private, one)
    message = wire.encode(update, client=one.card.id, round=0)
    for name, value in private.items():
        if value.numel() > 3:
            assert value.contiguous().numpy().tobytes() not in message, name


def first_gate(algorithm: PFedGate, one: Local) -> tuple[torch.nn.Module, torch.Tensor]:
    got = algorithm.init_server(0)
    model = algorithm.predictor(got, algorithm.init_client(got, one), one.card)
    return model, model(one.prepare(one.train.x[:16])).detach()


@pytest.mark.parametrize(
    "switch",
    [
        {"post_norm": "none"}, {"post_norm": "batch"}, {"activation": "linear"}, {"pre_norm": False},
        {"activation": "linear", "weight_range": 0.8, "initial_bias": 0.3},
        {"activation": "linear", "post_norm": "none"},
    ],
    ids=str,
)  # fmt: skip
def test_a_gate_without_one_of_its_parts_starts_where_the_whole_one_does(
    task: Task, federation: data.Federation, switch: dict[str, Any]
) -> None:
    """Or an ablation would show what the start is worth, not the part."""
    one = budgeted_local(federation, budget=1.0)
    start = {"initial_scale": 0.01, "initial_bias": switch.get("initial_bias", 0.85)}
    whole, _ = first_gate(pfedgate(task, start), one)
    part, _ = first_gate(pfedgate(task, start | switch), one)
    torch.testing.assert_close(part.gated.last.weights, whole.gated.last.weights, rtol=0, atol=0.05)


def test_upload_cap_is_hard_and_the_rest_is_sent_later(task: Task, federation: data.Federation) -> None:
    algorithm, one = pfedgate(task, upload=0.2), budgeted_local(federation, budget=1.0)
    got = algorithm.init_server(0)
    update, private = algorithm.train(got, algorithm.init_client(got, one), one)
    size = algorithm.tiles.length
    spent = 4 * len(update.shared[BLOCKS]) + 4 * update.shared[VALUES].numel()
    assert spent <= 0.2 * 4 * size
    residual = private["residual"]
    sent = algorithm.tiles.positions(update.shared[BLOCKS])
    assert torch.count_nonzero(residual[sent]) == 0
    assert torch.count_nonzero(residual) > 0
    difference = algorithm._workspace().vector() - flat(pick(got, algorithm._workspace().names))
    back = residual.clone()
    back[sent] = update.shared[VALUES]
    torch.testing.assert_close(back, difference, rtol=1e-3, atol=1e-6)


def test_novel_client_trains_its_gate_only(task: Task, federation: data.Federation) -> None:
    algorithm, one = pfedgate(task), budgeted_local(federation)
    got = algorithm.init_server(0)
    before = {name: value.clone() for name, value in got.items()}
    private = algorithm.init_client(got, one)
    adapted = algorithm.adapt(got, private, one)
    assert all(torch.equal(got[name], before[name]) for name in got)
    assert torch.equal(algorithm._workspace().vector(), flat(pick(got, algorithm._workspace().names)))
    assert any(not torch.equal(adapted[name], private[name]) for name in private)


def test_every_client_stays_within_its_own_budget(task: Task, federation: data.Federation) -> None:
    result = engine.run(pfedgate(task), federation, engine.Options(rounds=1, budget={0.5: 0.5, 0.3: 0.5}))
    densities = {score.stats["density"] for score in result.scores}
    assert max(densities) <= 0.5
    assert min(densities) <= 0.3


def test_microbatches_allow_as_many_times_the_activations_and_train_alike(
    task: Task, federation: data.Federation
) -> None:
    """.3 of the activations in two parts is .6 of them at once: the same model, the same steps."""
    resources = {"params": 0.3, "flops": 0.3, "reducible_bytes": 0.6}
    once = engine.run(pfedgate(task), federation, engine.Options(rounds=2, budget=resources))
    parts = engine.run(pfedgate(task, microbatches=2), federation, engine.Options(rounds=2, budget=0.3))
    fewer = engine.run(pfedgate(task), federation, engine.Options(rounds=2, budget=0.3))
    for name, value in once.server.items():
        assert torch.allclose(value, parts.server[name], rtol=1e-3, atol=1e-5), name
    assert not all(torch.allclose(value, fewer.server[name], rtol=1e-3) for name, value in once.server.items())
    assert max(score.stats["density"] for score in parts.scores) <= 0.3


def test_microbatches_of_a_model_with_batch_norm_are_never_single_samples(federation: data.Federation) -> None:
    """As many parts as samples: still two or three at a time, and the budget counts them."""
    example = federation.prepare(federation.part(federation.clients[0], "train").x[:8])
    layers = nn.Flatten(), nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 10)
    for batch in range(3, 9):
        task = Task(model=partial(copy.deepcopy, nn.Sequential(*layers)), example=example, batch=batch)
        algorithm = pfedgate(task, microbatches=batch)
        assert algorithm._budget(Card("a", 1, 0.2)).reducible_bytes == pytest.approx(min(0.2 * batch / 3, 1))
        result = engine.run(algorithm, federation, engine.Options(rounds=1, budget=0.8))
        assert result.history[-1]["after_broadcast"]["accuracy"] > 0


def test_tokens_are_split_too() -> None:
    random = np.random.default_rng(0)
    tokens, labels = random.integers(0, 20, (60, 9)), random.integers(0, 3, 60)
    fed = data.from_arrays(tokens, labels, owners=["anna", "bert"] * 30)
    layers = nn.Embedding(20, 16), nn.Flatten(), nn.Linear(144, 256), nn.ReLU(), nn.Linear(256, 3)
    example = torch.from_numpy(tokens[:4])
    results = []
    for parts in (1, 3):
        task = Task(model=partial(copy.deepcopy, nn.Sequential(*layers)), example=example, batch=12)
        algorithm = pfedgate(task, microbatches=parts, resources="params")
        results.append(engine.run(algorithm, fed, engine.Options(rounds=1, budget=0.5)).server)
    for name, value in results[0].items():
        assert torch.allclose(value, results[1][name], rtol=1e-3, atol=1e-5), name


def test_microbatches_are_parts_of_a_batch(task: Task) -> None:
    assert pfedgate(task, microbatches=2)._budget(Card("a", 1, 0.8)).reducible_bytes == 1.0
    assert (
        pfedgate(task, microbatches=5)._budget(Card("a", 1, {"activation_bytes": 1e4})).activation_bytes == 1e4 * 32 / 6
    )
    assert pfedgate(task, microbatches=2, resources="params")._budget(Card("a", 1, 0.8)).reducible_bytes is None
    for wrong in (0, 33):
        with pytest.raises(ValueError, match="parts of a batch of 32"):
            pfedgate(task, microbatches=wrong)
    with pytest.raises(ValueError, match="microbatches are ours"):
        pfedgate(task, microbatches=2, variant="paper")


def test_budgets_of_clients_are_those_of_the_gated_model(task: Task) -> None:
    """The gate's FLOPs beyond 2 % come out of a client's budget too; selectors are made once per budget."""
    personal = workspace(task.model, task.inputs, Setting(GateConfig(pool=8, max_share=9.0), (("blocks", 20),)), CPU)
    plan, model = personal.gated.plan, pfedgate(task).init_server(0)
    dense = plan.costs.dense()["flops"]
    assert plan.gate_flops > 0.02 * dense
    selectors = []
    for share in (0.5, 0.3, 0.5):
        personal.load(model, fresh_gate(personal, plan.budget(share), 0), plan.budget(share))
        assert personal.gated.selector.limits["flops"] + plan.gate_flops == pytest.approx((share + 0.02) * dense)
        selectors.append(personal.gated.selector)
    assert selectors[0] is selectors[2] is not selectors[1]


def first_choice(task: Task, federation: data.Federation, client: int, budget: float, **options: Any) -> dict[str, Any]:
    algorithm, one = pfedgate(task, **options), budgeted_local(federation, client, budget)
    got = algorithm.init_server(0)
    return algorithm.inspect(got, algorithm.init_client(got, one), one)


@pytest.mark.parametrize("resources", ["params", "all"])
def test_clients_begin_with_nested_parts_of_the_model(task: Task, federation: data.Federation, resources: str) -> None:
    kept = {
        (client, budget): first_choice(task, federation, client, budget, resources=resources)["kept"]
        for client in (0, 1)
        for budget in (0.6, 0.3)
    }
    names = [name.rpartition("/")[0] for name in first_choice(task, federation, 0, 0.6)["blocks"]]
    for chosen in kept.values():
        for i in range(1, len(names)):
            assert names[i] != names[i - 1] or chosen[i] <= chosen[i - 1], "no block before those that stand before it"
    assert (kept[0, 0.6] == kept[1, 0.6]).all(), "a batch hardly matters at first"
    random = first_choice(task, federation, 0, 0.3, resources=resources, gate={"ranking": "random"})["kept"]
    assert not (random == kept[0, 0.3]).all()


def test_convolutions_begin_ahead_when_only_parameters_are_bound(task: Task, federation: data.Federation) -> None:
    def share(resources: str) -> float:
        chosen = first_choice(task, federation, 0, 0.3, resources=resources)
        return float(chosen["kept"][["conv" in name for name in chosen["blocks"]]].mean())

    assert share("params") > share("all")


def test_the_whole_model_is_not_ranked(task: Task, federation: data.Federation) -> None:
    one = budgeted_local(federation, budget=1.0)
    gates = [pfedgate(task, {"ranking": how}).init_client({}, one) for how in ("nested", "random")]
    assert all(torch.equal(gates[0][name], gates[1][name]) for name in gates[0])


def test_a_client_may_have_a_latency_budget(
    task: Task, federation: data.Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PFEDGATE_CACHE", str(tmp_path))
    monkeypatch.setattr(latency, "_milliseconds", milliseconds)
    algorithm = pfedgate(task, blocks=9)  # a workspace of its own: a plan keeps what was measured
    one = replace(budgeted_local(federation), card=Card("a", 10, {"latency_ms": 1.6}))
    got = algorithm.init_server(0)
    update, _ = algorithm.train(got, algorithm.init_client(got, one), one)
    last = algorithm._workspace().gated.last
    assert last is not None
    assert 1.0 < last.cost["latency_ms"] <= 1.6
    assert update.metrics["q"] < 1


def test_predicting_per_client_does_not_depend_on_the_batch(task: Task, federation: data.Federation) -> None:
    algorithm, one = pfedgate(task, {"scope": "client"}), budgeted_local(federation)
    got = algorithm.init_server(0)
    private = algorithm.init_client(got, one)
    ready = algorithm.personalise(got, private, one)
    model = algorithm.predictor(got, ready, one.card)
    x = federation.prepare(one.train.x[:6])
    torch.testing.assert_close(model(x)[:2], model(x[:2]), rtol=1e-5, atol=1e-6)


def test_a_client_needs_less_memory_for_less_of_the_model(federation: data.Federation) -> None:
    """Packing what is sent takes no more than training did."""
    model = partial(models.build, "mlp", federation.input_shape, federation.classes, hidden=[2048, 1024])
    example = federation.prepare(federation.part(federation.clients[0], "train").x[:8])
    algorithm = pfedgate(Task(model=model, example=example, optim=Optim(lr=0.05, momentum=0.9), batch=32))
    got, peaks = algorithm.init_server(0), []
    for budget in (0.1, 0.3, 1.0):
        one = budgeted_local(federation, budget=budget)
        private = algorithm.init_client(got, one)
        algorithm.train(got, private, one)
        peaks.append(measure.peak_bytes(partial(algorithm.train, got, private, one)))
    size = 4 * sum(value.numel() for value in got.values())
    assert peaks[0] < 1.5 * size  # momentum of the model's size, and little else
    assert peaks[0] < peaks[1] < 0.6 * peaks[2]


def test_damaged_updates_are_named(task: Task, federation: data.Federation) -> None:
    algorithm, one = pfedgate(task), budgeted_local(federation)
    got = algorithm.init_server(0)
    update, _ = algorithm.train(got, algorithm.init_client(got, one), one)
    assert algorithm.check(got, update) is None
    twice = {**update.shared, BLOCKS: update.shared[BLOCKS].clone().fill_(0)}
    assert "twice" in str(algorithm.check(got, replace(update, shared=twice)))
    short = {**update.shared, VALUES: update.shared[VALUES][:-1]}
    assert "values" in str(algorithm.check(got, replace(update, shared=short)))


def test_without_an_example_the_error_says_what_to_do(task: Task, federation: data.Federation) -> None:
    bare = pfedgate(replace(task, example=None))
    with pytest.raises(ValueError, match="example"):
        bare.init_client({}, budgeted_local(federation))
