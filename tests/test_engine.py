from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.world import Norms, federation, small_task

from pfedgate import algorithms
from pfedgate.algorithms.fedavg import FedAvg
from pfedgate.core.mergers import WeightedMean
from pfedgate.core.modules import initial, module
from pfedgate.core.state import digest, equal
from pfedgate.core.types import Budget, Card, Local, Optim, Round, Schedule, State, Update
from pfedgate.engine.endpoint import Endpoint
from pfedgate.engine.roster import Roster
from pfedgate.engine.server import Cards, ClientError, Options, run
from pfedgate.engine.store import MemoryStore
from pfedgate.training.fit import fit

PLAIN = Optim(lr=0.1, momentum=0, weight_decay=0, clip=None)
QUIET = Options(rounds=1, evaluate_every=0, novel=False, stack=0)


class One:
    """A federation of chosen clients, all data in `train`."""

    def __init__(self, *clients: str) -> None:
        self.inner = federation()
        self.clients, self.novel, self.prepare = list(clients), list[str](), self.inner.prepare

    def part(self, client: str, name: str) -> Any:
        return self.inner.part(client, name)


# -- what FedAvg must be


def test_one_client_is_plain_sgd_bit_for_bit() -> None:
    anna = federation().clients[0]
    algorithm = FedAvg(small_task())
    result = run(algorithm, One(anna), replace(QUIET, rounds=3))
    state = initial(small_task(), 0)
    for index in range(3):
        local = Endpoint(algorithm, federation(), MemoryStore()).local(Card(anna, 12), Round(index, 3, 0))
        state = fit(small_task(), state, local).state
    assert equal(result.server, state)


def test_one_client_is_local_only_bit_for_bit() -> None:
    anna = federation().clients[0]
    alone = run(algorithms.build("local_only", small_task()), One(anna), replace(QUIET, rounds=3))
    assert alone.store is not None
    private = alone.store.get(anna)
    assert private is not None
    together = run(FedAvg(small_task()), One(anna), replace(QUIET, rounds=3)).server
    assert equal(together, {name.removeprefix("model/"): value for name, value in private.items()})
    assert alone.summary["bytes_up"] == alone.summary["bytes_down"] == 0


def test_one_full_batch_step_is_a_gradient_step_of_the_weighted_loss() -> None:
    full = replace(small_task(), optim=PLAIN, batch=1000)
    fed = federation()
    result = run(FedAvg(full), fed, QUIET)
    model = module(full, initial(full, 0))
    parts = [fed.part(client, "train") for client in fed.clients]
    total = sum(part.n for part in parts)
    loss = sum(F.cross_entropy(model(part.x), part.y) * (part.n / total) for part in parts)
    assert isinstance(loss, torch.Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    for name, value in model.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(result.server[name], (value - 0.1 * value.grad).detach())


def test_averaging_over_all_is_damped() -> None:
    fed, options = federation(), replace(QUIET, sample=2, seed=4)
    sampled = run(FedAvg(small_task()), fed, options).server
    damped = run(FedAvg(small_task()), fed, replace(options, agg_norm="all")).server
    roster = Roster.of(fed, "clients", options)
    share = sum(card.n_train for card in roster.draw(2, 4, 0)) / int(roster.sizes.sum())
    start = initial(small_task(), 4)
    for name, value in start.items():
        torch.testing.assert_close(damped[name] - value, share * (sampled[name] - value), atol=1e-6, rtol=1e-4)


def test_batchnorm_buffers_are_averaged_and_counters_maxed() -> None:
    server = run(FedAvg(small_task("norms")), federation(), QUIET).server
    assert int(server["2.num_batches_tracked"]) >= 3
    assert server["2.running_mean"].abs().sum() > 0
    assert set(server) == set(Norms().state_dict())


def test_fine_tuning_with_rate_zero_is_fedavg() -> None:
    options = replace(QUIET, rounds=2, evaluate_every=1)
    plain = run(FedAvg(small_task()), federation(), options)
    tuned = run(algorithms.build("fedavg_ft", small_task(), tune_lr=0.0), federation(), options)
    assert plain.history == tuned.history
    assert [s.test for s in plain.scores] == [s.test for s in tuned.scores]


def test_local_training_does_not_notice_other_clients() -> None:
    fed = federation()
    options = replace(QUIET, rounds=2)
    together = run(algorithms.build("local_only", small_task()), fed, options).store
    alone = run(algorithms.build("local_only", small_task()), One(fed.clients[0]), options).store
    assert together is not None
    assert alone is not None
    assert digest(together.get(fed.clients[0]) or {}) == digest(alone.get(fed.clients[0]) or {})


# -- rounds


@pytest.mark.parametrize(("sample", "count"), [(0.5, 3), (1.0, 6), (2, 2), (0.01, 1), (99, 6)])
def test_sampling_is_without_replacement(sample: float, count: int) -> None:
    roster = Roster.of(federation(), "clients", Options())
    drawn = [[card.id for card in roster.draw(sample, 0, at)] for at in range(60)]
    assert all(len(ids) == len(set(ids)) == count for ids in drawn)
    assert set().union(*drawn) == set(federation().clients)
    assert drawn == [[card.id for card in roster.draw(sample, 0, at)] for at in range(60)]
    if 1 < count < 6:
        assert len({tuple(ids) for ids in drawn}) > 5


def test_clients_without_training_data_are_never_drawn() -> None:
    roster = Roster(["a", "b", "c"], [5, 0, 3], [1.0, 1.0, 1.0])
    assert {card.id for at in range(20) for card in roster.draw(1.0, 0, at)} == {"a", "c"}
    with pytest.raises(ValueError, match="no client has training data"):
        Roster(["a"], [0], [1.0]).draw(1.0, 0, 0)
    with pytest.raises(ValueError, match="different from each other"):
        Roster(["a", "a"], [1, 1], [1.0, 1.0])


@dataclass(frozen=True)
class Watcher(FedAvg):
    """FedAvg that tells what it saw, and misbehaves on request."""

    nan: str = ""
    boom: str = ""
    wrong: str = ""
    weightless: bool = False

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        if local.card.id == self.boom:
            raise ZeroDivisionError("of this client")
        shared = dict(got)
        if local.card.id == self.nan:
            shared["out.bias"] = torch.full((3,), math.nan)
        if local.card.id == self.wrong:
            shared["out.bias"] = torch.zeros(4)
        told = {"factor": local.round.factor, "budget": float(local.card.budget)}  # type: ignore[arg-type]
        return Update(shared, 0.0 if self.weightless else local.n, told), {}

    @property
    def stacks(self) -> bool:
        return False


@pytest.mark.parametrize("sample", [1, 0.5, 1.0])
def test_rates_depend_on_the_global_round_alone(sample: float) -> None:
    schedule = Schedule("multi_step")
    algorithm = Watcher(replace(small_task(), schedule=schedule))
    history = run(algorithm, federation(), replace(QUIET, rounds=8, sample=sample)).history
    assert [record["lr_factor"] for record in history] == [schedule.factor(at, 8) for at in range(8)]
    assert [record["factor"] for record in history] == pytest.approx([schedule.factor(at, 8) for at in range(8)])


def test_every_client_keeps_its_own_budget_whatever_the_order_of_clients() -> None:
    given: list[Budget] = [0.5, {"params": 0.5}, 0.3, 0.5, {"params": 0.3}]
    roster = Roster(["e", "b", "d", "a", "c"], [1, 2, 3, 4, 5], given)
    assert {card.id: card.budget for card in roster} == dict(zip("ebdac", given, strict=True))
    many = Roster([f"{at:03}" for at in range(400)], [1] * 400, [(at + 1) / 400 for at in range(400)])
    assert [card.budget for card in many] == [(at + 1) / 400 for at in range(400)]


def test_budgets_reach_the_clients() -> None:
    spec = {client: 0.1 * (at + 1) for at, client in enumerate(federation().clients)}
    record = run(Watcher(small_task()), federation(), replace(QUIET, budget={**spec, "default": 1.0})).history[0]
    assert record["budget"] == pytest.approx(np.mean(list(spec.values())))


@pytest.mark.parametrize(("fault", "says"), [("nan", "NaN"), ("wrong", "expected torch.float32")])
def test_a_bad_update_is_refused_and_the_round_goes_on(fault: str, says: str) -> None:
    bad = federation().clients[2]
    result = run(Watcher(small_task(), **{fault: bad}), federation(), replace(QUIET, rounds=2))
    assert [record["refused"] for record in result.history] == [1, 1]
    (refusal,) = result.history[1]["refusals"]
    assert bad in refusal
    assert "round 2" in refusal
    assert says in refusal
    assert result.summary["refused"] == 2
    assert equal(result.server, initial(small_task(), 0))


def test_a_round_without_any_update_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"no usable update in round 1.*weight"):
        run(Watcher(small_task(), weightless=True), federation(), QUIET)


def test_errors_name_client_round_and_stage() -> None:
    bad = federation().clients[1]
    with pytest.raises(ClientError, match="round 1, train: ZeroDivisionError: of this client") as caught:
        run(Watcher(small_task(), boom=bad), federation(), QUIET)
    assert bad in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_merger_may_refuse_an_update() -> None:
    bad = federation().clients[2]

    class Strict(WeightedMean):
        def add(self, card: Card, update: Update) -> str | None:
            return "not today" if card.id == bad else super().add(card, update)

    @dataclass(frozen=True)
    class Choosy(FedAvg):
        def merger(self, server: State, round: Round) -> WeightedMean:
            return Strict(server, round.total)

    fed = federation()
    result = run(Choosy(small_task()), fed, QUIET)
    assert result.history[0]["refusals"] == [f"client {bad!r}, round 1: not today"]
    assert equal(result.server, run(FedAvg(small_task()), One(*[c for c in fed.clients if c != bad]), QUIET).server)


def test_cards_are_enough_for_a_server() -> None:
    fed = federation()
    cards = Cards([Card(c, fed.part(c, "train").n) for c in fed.clients], [Card(c, 9) for c in fed.novel])
    options = replace(QUIET, evaluate_every=1, novel=True)

    def exchange(algorithm: Any, given: Any, store: Any, device: Any) -> Endpoint:
        assert given is cards
        return Endpoint(algorithm, fed, store, device)

    a, b = run(FedAvg(small_task()), cards, options, exchange=exchange), run(FedAvg(small_task()), fed, options)
    assert equal(a.server, b.server)
    assert a.summary["novel"] == b.summary["novel"]


def test_callbacks_hear_everything_and_threads_are_put_back() -> None:
    torch.set_num_threads(2)
    seen: list[dict[str, Any]] = []
    run(FedAvg(small_task()), federation(), replace(QUIET, rounds=2, evaluate_every=2), callbacks=[seen.append])
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert [event["event"] for event in seen] == ["start", "round", "round", "end"]
    assert [event["round"] for event in seen[:3]] == [0, 1, 2]
    assert "after_broadcast" in seen[2]
    assert seen[1]["seconds"] > 0
    assert seen[3]["resident_bytes"] > 10**7


@pytest.mark.parametrize(
    "wrong",
    [{"sample": 0}, {"sample": 1.5}, {"agg_norm": "some"}, {"points": ("before",)}, {"rounds": -1}, {"sample": -2}],
)
def test_wrong_options_fail(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Options(**wrong)


# -- folders


def test_a_folder_tells_the_whole_story(tmp_path: Path) -> None:
    options = replace(QUIET, rounds=4, sample=2, evaluate_every=2, novel=True)
    result = run(algorithms.build("local_only", small_task()), federation(), options, folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == result.history
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy"] == result.summary["accuracy"]
    assert summary["seconds"] > 0
    rows = (tmp_path / "clients.csv").read_text().splitlines()
    assert len(rows) == 1 + 6 + 2
    assert "training_rounds" in rows[0]
    assert (tmp_path / "best.safetensors").exists()
    assert list((tmp_path / "private" / "best").rglob("*.safetensors"))
    with pytest.raises(FileExistsError, match="pfedgate resume"):
        run(algorithms.build("local_only", small_task()), federation(), options, folder=tmp_path)
    again = run(algorithms.build("local_only", small_task()), federation(), options, folder=tmp_path, resume=True)
    assert again.history == result.history
    assert again.scores == result.scores


def test_resuming_with_other_settings_is_refused(tmp_path: Path) -> None:
    options = replace(QUIET, rounds=2)
    run(FedAvg(small_task()), federation(), options, folder=tmp_path)
    with pytest.raises(ValueError, match="seed was 0, is 1"):
        run(FedAvg(small_task()), federation(), replace(options, seed=1), folder=tmp_path, resume=True)
    longer = run(FedAvg(small_task()), federation(), replace(options, rounds=3), folder=tmp_path, resume=True)
    assert equal(longer.server, run(FedAvg(small_task()), federation(), replace(options, rounds=3)).server)
