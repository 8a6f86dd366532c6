"""Masks that clients choose: laws of the candidates, of the choice, and of what it costs and sends."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.world import Reordered

from pfedgate import algorithms, data, models
from pfedgate.algorithms.pfedgate import PFedGate
from pfedgate.algorithms.pfedgate.personal import Setting, fresh_gate, workspace
from pfedgate.algorithms.pfedgate.tiles import BLOCKS, VALUES
from pfedgate.core.state import inside
from pfedgate.core.types import CPU, Card, Local, Optim, Round, Task
from pfedgate.engine import server as engine
from pfedgate.engine.processes import Processes
from pfedgate.gating.gate.config import GateConfig
from pfedgate.runs.gates import jaccard
from pfedgate.training.fit import loop
from pfedgate.training.workspace import flops_per_sample


@pytest.fixture(scope="module")
def federation() -> data.Federation:
    return data.load("digits", clients=6, domains="rotate")


@pytest.fixture(scope="module")
def task(federation: data.Federation) -> Task:
    model = partial(models.build, "cnn_digits", federation.input_shape, federation.classes)
    example = federation.prepare(federation.part(federation.clients[0], "train").x[:8])
    return Task(model=model, example=example, optim=Optim(lr=0.05, momentum=0.9), batch=32)


def choosing(task: Task, candidates: int = 4, core: float = 1.0, **options: Any) -> PFedGate:
    inner = {"gate.candidates": candidates, "gate.core": core}
    algorithm = algorithms.build("pfedgate", task, **inner, **options)
    assert isinstance(algorithm, PFedGate)
    return algorithm


def local_of(federation: data.Federation, client: int = 0, index: int = 0, budget: float = 0.3) -> Local:
    name = federation.clients[client]
    train, val = federation.part(name, "train"), federation.part(name, "val")
    return Local(Card(name, train.n, budget), train, val, Round(index, 10), prepare=federation.prepare)


OPTIONS = engine.Options(rounds=3, budget=0.3, evaluate_every=3)


def same_runs(a: engine.Result, b: engine.Result) -> bool:
    assert a.store is not None
    assert b.store is not None
    for client in map(str, range(6)):
        one, two = a.store.get(client), b.store.get(client)
        assert one is not None
        assert two is not None
        if not all(torch.equal(one[name], two[name]) for name in one):
            return False
    return all(torch.equal(a.server[name], b.server[name]) for name in a.server) and a.scores == b.scores


def test_one_candidate_is_the_common_mask_bit_for_bit(task: Task, federation: data.Federation) -> None:
    plain = algorithms.build("pfedgate", task)
    runs = [engine.run(algorithm, federation, OPTIONS) for algorithm in (plain, choosing(task, 1, core=0.0, probe=8))]
    assert same_runs(*runs)


def test_clients_that_are_told_their_candidate_keep_it_and_score_nothing(
    task: Task, federation: data.Federation
) -> None:
    told = {"0": 2, "1": 1}
    algorithm, plain = choosing(task, told=told), choosing(task, heat=0.0)
    result = engine.run(algorithm, federation, OPTIONS)
    assert result.store is not None
    states = {client: result.store.get(client) or {} for client in map(str, range(6))}
    assert {client: int(states[client]["gate/choice"]) for client in told} == told
    assert {client for client, state in states.items() if "masks/due" in state} == {"2", "3", "4", "5"}
    local = local_of(federation)
    server = algorithm.init_server(0)
    costs = [
        method.train(server, method.init_client(server, local), local)[0].metrics["flops"]
        for method in (algorithm, plain)
    ]
    assert costs[0] < costs[1], "who is told nothing scores candidates, which costs forward passes"
    with pytest.raises(ValueError, match="client 'a' candidate 4: there are 4, counted from 0"):
        choosing(task, told={"a": 4})
    with pytest.raises(ValueError, match="unknown client '10': did you mean '1'"):
        engine.run(choosing(task, told={"10": 0}), federation, OPTIONS)


@settings(max_examples=25, deadline=None)
@given(
    candidates=st.integers(2, 9),
    core=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    budget=st.sampled_from([0.15, 0.3, 0.5, 0.8]),
    resources=st.sampled_from([None, "params"]),
)
def test_candidates_cost_alike_within_the_budget_and_share_a_core(
    task: Task, candidates: int, core: float, budget: float, resources: str | None
) -> None:
    config = GateConfig(ranking="nested", candidates=candidates, core=core)
    personal = workspace(task.model, task.inputs, Setting(config), CPU)
    plan = personal.gated.plan
    limit = plan.budget({resources: budget} if resources else budget)
    personal.load(task.model().state_dict(), fresh_gate(personal, limit, 0), limit)
    masks, costs = [], []
    for candidate in range(candidates):
        personal.gated.gate.choice.fill_(candidate)
        selection, _ = personal.gated.select(torch.zeros(2, 1, 8, 8))
        masks.append(selection.kept)
        costs.append(selection.live.counts)
        assert all(
            share <= budget + 1e-9 for name, share in selection.cost.items() if not resources or name == resources
        )
    assert all(counts == costs[0] for counts in costs), "all candidates keep as many blocks of every layer"
    common = np.logical_and.reduce(masks)
    last = plan.optional[-plan.costs.groups[-1].count :]
    assert common[last].sum() >= core * masks[0][last].sum() - 1
    if budget == 0.15 and core == 0.0 and not resources:
        assert jaccard(masks) > 0
    if candidates == 9 and core == 0.0 and budget >= 0.5 and not resources:
        assert np.logical_or.reduce(masks).all(), "every block has a candidate that keeps it"


def test_the_choice_is_the_lowest_loss_on_own_samples_and_is_paid_for(task: Task, federation: data.Federation) -> None:
    one = local_of(federation)
    algorithm = choosing(task, heat=0.0)
    got = algorithm.init_server(0)
    private = algorithm.init_client(got, one)
    update, after = algorithm.train(got, private, one)
    batches: list[Any] = []
    loop(task, one, lambda batch: (batches.append(batch), batch.x.new_zeros(()))[1], batch=32, steps=1, stream="probe")
    losses = []
    for candidate in range(4):
        model = algorithm.predictor(got, {**private, "gate/choice": torch.tensor(candidate)}, one.card)
        losses.append(float(task.loss(model(batches[0].x), batches[0].y).mean().detach()))
    assert int(after["gate/choice"]) == int(np.argmin(losses))
    later = {**private, "gate/choice": after["gate/choice"], "masks/due": torch.tensor(5)}
    unpaid, _ = algorithm.train(got, later, one)
    personal = algorithm._workspace()
    assert unpaid.metrics["flops"] < update.metrics["flops"]
    forward = flops_per_sample(task.model, None, batches[0].x.shape[1:], torch.float32, False)
    each = forward * personal.gated.last.cost["flops"] + 2 * personal.gated.gate.fc.weight.numel()
    assert update.metrics["flops"] - unpaid.metrics["flops"] == pytest.approx(4 * 32 * each)


def test_a_client_scores_when_it_is_due_and_less_and_less_often(task: Task, federation: data.Federation) -> None:
    algorithm = choosing(task)
    got = algorithm.init_server(0)
    private = algorithm.init_client(got, local_of(federation))
    gaps, due = [], 0
    for index in range(20):
        before = int(private["masks/due"])
        _, private = algorithm.train(got, private, local_of(federation, index=index))
        if int(private["masks/due"]) != before:
            assert index >= before
            gaps.append(int(private["masks/due"]) - index)
            due += 1
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1] > 3, due < 12) == (1, True, True)


def test_a_choice_depends_on_nobody_else(task: Task, federation: data.Federation) -> None:
    algorithm = choosing(task)
    here = engine.run(algorithm, federation, OPTIONS)
    assert same_runs(here, engine.run(algorithm, Reordered(federation), OPTIONS))
    assert same_runs(here, engine.run(algorithm, federation, OPTIONS, exchange=partial(Processes, workers=2)))


def test_a_resumed_run_chooses_alike(task: Task, federation: data.Federation, tmp_path: Any) -> None:
    algorithm = choosing(task)

    def stop(event: Any) -> None:
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(algorithm, federation, OPTIONS, folder=tmp_path / "run", callbacks=[stop])
    resumed = engine.run(algorithm, federation, OPTIONS, folder=tmp_path / "run", resume=True)
    assert same_runs(resumed, engine.run(algorithm, federation, OPTIONS))


def test_nothing_but_blocks_travels(task: Task, federation: data.Federation) -> None:
    algorithm, one = choosing(task), local_of(federation)
    got = algorithm.init_server(0)
    update, _ = algorithm.train(got, algorithm.init_client(got, one), one)
    assert set(update.shared) == {BLOCKS, VALUES}
    assert set(update.metrics) == {"loss", "q", "flops", "density"}


def test_a_client_that_never_trained_chooses_at_once(task: Task, federation: data.Federation) -> None:
    """Novel ones, and those that were not sampled yet; a choice takes no gradient step."""
    algorithm, one = choosing(task, adapt_epochs=0), local_of(federation, index=9)
    got = algorithm.init_server(0)
    private = algorithm.init_client(got, one)
    trained, _ = algorithm.train(got, private, one)
    got = algorithm.landed(got, trained)
    new = algorithm.personalise(got, private, one)
    novel = algorithm.adapt(got, private, one)
    assert torch.equal(new["gate/choice"], novel["gate/choice"])
    learnt = {name for name in inside("gate/", private) if name != "choice"}
    assert all(torch.equal(novel[f"gate/{name}"], private[f"gate/{name}"]) for name in learnt)
    assert int(private["masks/due"]) == 0
    assert int(novel["masks/due"]) > 9


def test_the_whole_model_has_nothing_to_choose(task: Task, federation: data.Federation) -> None:
    algorithm, one = choosing(task), local_of(federation, budget=1.0)
    got = algorithm.init_server(0)
    private = algorithm.init_client(got, one)
    _, after = algorithm.train(got, private, one)
    assert int(after["masks/due"]) == 0


def test_candidates_need_rankings(task: Task) -> None:
    for gate in ({"gate.ranking": "random"}, {"gate.paths": 1}):
        with pytest.raises(ValueError, match="candidates are rankings"):
            algorithms.build("pfedgate", task, **{"gate.candidates": 4, **gate})
    with pytest.raises(ValueError, match="candidates >= 1"):
        choosing(task, 0)
    with pytest.raises(ValueError, match="probe"):
        choosing(task, probe=0)


def test_looks_tell_how_masks_differ(task: Task, federation: data.Federation) -> None:
    algorithm, one = choosing(task), local_of(federation)
    got = algorithm.init_server(0)
    view = algorithm.inspect(got, algorithm.init_client(got, one), one)
    assert jaccard(view["batches"]) == 0, "a client keeps one mask for all its batches"
    assert jaccard([np.array([True, False]), np.array([False, True]), np.array([True, False])]) == pytest.approx(2 / 3)
