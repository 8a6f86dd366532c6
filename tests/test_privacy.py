"""Privacy of clients: nothing when switched off, one client's reach bounded always, epsilon as others count it."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm
from tests.support.toys import clusters
from tests.support.world import (
    ALGORITHMS,
    OPTIONS,
    check_same,
    example,
    federation,
    go,
    private_digests,
    small_task,
)

from pfedgate import algorithms, experiment
from pfedgate.algorithms.fedavg import FedAvg
from pfedgate.algorithms.pfedgate import PFedGate
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.modules import module
from pfedgate.core.privacy import NoisyMean, normal, shorten
from pfedgate.core.state import digest, flat
from pfedgate.core.types import Card, Local, Privacy, Round, ServerOptim, State, Update
from pfedgate.engine.endpoint import Endpoint
from pfedgate.engine.private import Guard, epsilon, possible
from pfedgate.engine.processes import Processes
from pfedgate.engine.roster import Roster
from pfedgate.engine.server import Options, run
from pfedgate.engine.store import DiskStore, MemoryStore
from pfedgate.fleet.pace import Pace
from pfedgate.models import build as build_model
from pfedgate.report import tables
from pfedgate.runs.folder import Run
from pfedgate.training.dpsgd import Noisy
from pfedgate.training.fit import fit
from pfedgate.training.workspace import Batch, workspace

pytest.importorskip("opacus", reason="epsilon is counted with the extra privacy")
pytestmark = pytest.mark.filterwarnings("ignore:the gate has")  # the models are toys
OPEN = Privacy("client", noise=0.0, clip=math.inf, secret=False)
REPEATABLE = Privacy("client", noise=0.5, clip=0.3, secret=False)
REFUSED = {
    "fedmask": "sends each client something else",
    "heterofl": "sends each client something else",
    "pfedhn": "sends each client something else",
    "feddbe": "clients share 'dbe/ready', a whole number or a switch",
    "fedmd": "not a plain sum",
    "pfedme": "not a plain sum",
}


def refused(name: str) -> bool:
    algorithm = example(name)
    try:
        possible(algorithm, replace(OPTIONS, privacy=REPEATABLE))
        NoisyMean(algorithm, algorithm.init_server(0), REPEATABLE, 1.0, b"key", 0)
    except ValueError:
        return True
    return False


POSSIBLE = [name for name in ALGORITHMS if not refused(name)]


def test_what_it_is_for_is_possible() -> None:
    assert {"fedavg", "fedprox", "fedper", "fedrep", "ditto", "ifca", "apfl", "pfedgate"} <= set(POSSIBLE)


def vector(state: State) -> torch.Tensor:
    return flat({name: value.double() for name, value in state.items() if value.is_floating_point()})


# -- switched off


@pytest.mark.parametrize(
    ("name", "model"), [*((name, "plain") for name in POSSIBLE), ("fedavg", "norms"), ("pfedgate", "norms")]
)
def test_without_noise_and_bound_it_is_the_mean_over_all_clients(name: str, model: str) -> None:
    """With clients of one size, of whom all take part, that is what every plain mean is, too."""
    algorithm, fed = example(name, model), clusters((24,) * 4, novel=0, shape=(8,))
    options = Options(rounds=2, evaluate_every=0, seed=3, agg_norm="all")
    plain = run(algorithm, fed, options).server
    noisy = run(algorithm, fed, replace(options, agg_norm="sampled", privacy=OPEN)).server
    for entry, value in plain.items():
        if value.is_floating_point():
            torch.testing.assert_close(noisy[entry], value, rtol=1e-4, atol=1e-5)


# -- one client's reach


def merged(algorithm: Algorithm, server: State, updates: list[Update], privacy: Privacy) -> torch.Tensor:
    merger = NoisyMean(algorithm, server, privacy, 4.0, b"key", 0)
    for at, update in enumerate(updates):
        assert merger.add(Card(str(at), 1), update) is None
    return vector(merger.result())


def moved(server: State, scale: float, seed: int) -> State:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: value + scale * torch.randn(value.shape, generator=draw) if value.is_floating_point() else value
        for name, value in server.items()
    }


@settings(max_examples=30, deadline=None)
@given(
    scales=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=4),
    clip=st.floats(1e-3, 1e3),
    noise=st.sampled_from([0.0, 1.0]),
    left=st.integers(0, 2**16),
)
@pytest.mark.parametrize("model", ["plain", "norms"])
def test_no_client_changes_the_sum_by_more_than_the_clip(
    model: str, scales: list[float], clip: float, noise: float, left: int
) -> None:
    algorithm = example("fedavg", model)
    server = {name: value.double() for name, value in algorithm.init_server(0).items()}
    updates = [Update(moved(server, scale, left + at), 10.0**at) for at, scale in enumerate(scales)]
    privacy = Privacy("client", noise=noise, clip=clip)
    # Without the last client: neighbours in the sense of adding or removing one.
    apart = merged(algorithm, server, updates, privacy) - merged(algorithm, server, updates[:-1], privacy)
    assert float(apart.norm()) * 4.0 <= clip * (1 + 1e-9) + 1e-6


def test_the_worst_pair_of_block_sets_reaches_the_bound_and_a_mean_over_senders_exceeds_it() -> None:
    """One client alone sends a block that all others leave out, as far as it can."""
    algorithm = example("pfedgate")
    assert isinstance(algorithm, PFedGate)
    server, tiles = algorithm.init_server(0), algorithm.tiles
    first, rest = torch.tensor([0]), torch.arange(1, tiles.count)
    size = int(tiles.sizes[0])
    start = flat({name: server[name] for name in algorithm.names})
    others = [Update(algorithm.pack(server, start, rest, {}, Card("c", 1))[0], 1.0) for _ in range(3)]
    far = start.clone()
    far[tiles.positions(first)] += 7.0
    alone = Update(algorithm.pack(server, far, first, {}, Card("a", 1))[0], 1.0)

    privacy = Privacy("client", noise=0.0, clip=0.5)
    apart = merged(algorithm, server, [*others, alone], privacy) - merged(algorithm, server, others, privacy)
    assert float(apart.norm()) == pytest.approx(privacy.clip / 4, rel=1e-5), "the bound is reached, and not passed"

    def usual(updates: list[Update]) -> torch.Tensor:
        merger = algorithm.merger(server, Round())
        for update in updates:
            merger.add(Card("a", 1), update)
        return vector(merger.result())

    short = start.clone()
    short[tiles.positions(first)] += privacy.clip / math.sqrt(size)  # shortened before it is sent: that is not enough
    alone = Update(algorithm.pack(server, short, first, {}, Card("a", 1))[0], 1.0)
    apart = usual([*others, alone]) - usual(others)
    assert float(apart.norm()) == pytest.approx(privacy.clip, rel=1e-4), "four times the bound: it was alone there"


def test_noise_is_on_every_entry_also_on_those_that_nobody_sent() -> None:
    algorithm = example("pfedgate")
    server = algorithm.init_server(0)
    first, second = (merged(algorithm, server, [], Privacy("client", noise=2.0, clip=3.0)) for _ in range(2))
    assert torch.equal(first, second), "the same key and round give the same noise"
    noise = (first - vector(server)) * 4.0
    assert bool((noise != 0).all())
    assert 0.8 * 6 < float(noise.std()) < 1.2 * 6


def test_the_noise_is_normal_and_its_streams_differ() -> None:
    numbers = normal(b"k", "noise/1", 200_001)
    assert len(numbers) == 200_001
    assert abs(float(numbers.mean())) < 0.01
    assert float(numbers.std()) == pytest.approx(1.0, abs=0.01)
    assert float((numbers.abs() > 1.959964).double().mean()) == pytest.approx(0.05, abs=0.003)
    assert abs(float((numbers[:-1] * numbers[1:]).mean())) < 0.01
    for other in (normal(b"l", "noise/1", 5), normal(b"k", "noise/2", 5)):
        assert not torch.equal(numbers[:5], other)


@given(st.lists(st.floats(-1e20, 1e20), min_size=1, max_size=6), st.floats(1e-6, 1e6))
def test_shortening_keeps_the_direction_and_what_is_short(values: list[float], clip: float) -> None:
    move = torch.tensor(values, dtype=torch.float64)
    short, length = shorten(move, clip)
    assert float(short.norm()) <= clip * (1 + 1e-12)
    assert torch.allclose(short * length, move * float(short.norm()), rtol=1e-9)
    if length <= clip:
        assert short is move


# -- epsilon


def exact(noise: float, steps: int, delta: float) -> float:
    """Epsilon of the Gaussian mechanism, exactly (Balle & Wang 2018, theorem 8); t steps are one of noise / √t."""
    mu = math.sqrt(steps) / noise

    def excess(eps: float) -> float:
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu) - delta

    return float(brentq(excess, 0, 500))


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (1.0, 10), (5.0, 100), (20.0, 400), (2.0, 1)])
def test_epsilon_with_all_clients_is_a_bound_near_the_exact_one(noise: float, steps: int) -> None:
    bound, truth = epsilon(noise, 1.0, steps, 1e-5), exact(noise, steps, 1e-5)
    assert truth <= bound <= 1.2 * truth


@pytest.mark.parametrize(
    ("noise", "share", "steps", "delta", "rdp", "loss"),
    [  # what Google's dp-accounting 0.6.0 gives: by Rényi divergences, and by privacy-loss distributions
        (1.3, 250 / 60000, 3600, 1e-5, 0.94220, 0.85303),
        (1.1, 256 / 60000, 14040, 1e-5, 2.59436, 2.37964),
        (1.0, 0.1, 100, 1e-5, 7.90385, 7.04660),
        (2.0, 0.3, 20, 1e-3, 2.62922, 2.24510),
    ],
)
def test_epsilon_with_some_clients_is_that_of_another_accountant(
    noise: float, share: float, steps: int, delta: float, rdp: float, loss: float
) -> None:
    mine = epsilon(noise, share, steps, delta)
    assert mine == pytest.approx(rdp, rel=2e-3)
    assert mine > loss, "a bound"


def test_epsilon_grows_with_rounds_and_shares_and_is_in_every_record(tmp_path: Path) -> None:
    privacy = replace(REPEATABLE, noise=2.0, delta=1e-3)
    seen = go(example("fedavg"), options=replace(OPTIONS, privacy=privacy), folder=tmp_path / "run").result
    spent = [record["epsilon"] for record in seen.history]
    assert spent == sorted(spent) == [epsilon(2.0, 0.5, at, 1e-3) for at in (1, 2, 3)]
    assert (seen.summary["epsilon"], seen.summary["delta"]) == (spent[-1], 1e-3)
    assert epsilon(2.0, 0.9, 3, 1e-3) > spent[-1] > epsilon(2.0, 0.1, 3, 1e-3)
    assert all(0 <= record["shortened"] <= 1 and record["update_norm"] > 0 for record in seen.history)
    open_ = go(example("fedavg"), options=replace(OPTIONS, privacy=OPEN)).result
    assert open_.summary["epsilon"] is None, "without noise nothing is private"


def test_a_report_shows_epsilon() -> None:
    rows = {name: tables.numbers({"accuracy": 0.5, "epsilon": spent}) for name, spent in (("a", 2.5), ("b", None))}
    table = tables.summarise(rows)
    at = [column["key"] for column in table["head"]].index("epsilon")
    assert [row["cells"][at]["text"] for row in table["rows"]] == ["2.5", "–"]
    assert "epsilon" not in [column["key"] for column in tables.summarise({"b": rows["b"]})["head"]]


# -- repeatable where it should be


@pytest.mark.parametrize("name", ["fedavg", "ditto", "pfedgate"])
def test_processes_and_an_interruption_change_nothing(name: str, tmp_path: Path) -> None:
    options = replace(OPTIONS, rounds=4, privacy=REPEATABLE)
    whole = go(example(name), options=options, folder=tmp_path / "whole")
    check_same(whole, go(example(name), options=options, exchange=partial(Processes, workers=2)))

    class Crash(Exception):
        pass

    class Stops(Endpoint):
        def train(self, server: State, round: Any, chunks: Any) -> Any:
            if round.index == 2:
                raise Crash
            return super().train(server, round, chunks)

    with pytest.raises(Crash):
        run(example(name), federation(), options, folder=tmp_path / "cut", exchange=Stops)
    check_same(whole, go(example(name), options=options, folder=tmp_path / "cut", resume=True))
    assert private_digests(tmp_path / "cut") == private_digests(tmp_path / "whole")


def test_a_secret_key_survives_an_interruption_and_is_gone_at_the_end(tmp_path: Path) -> None:
    options = replace(OPTIONS, privacy=replace(REPEATABLE, secret=True))
    keys = []

    class Looks(Endpoint):
        def train(self, server: State, round: Any, chunks: Any) -> Any:
            key = tmp_path / "run/noise.key"
            keys.append(key.read_bytes())
            assert key.stat().st_mode & 0o077 == 0, "nobody else reads it"
            if len(keys) == 2:
                raise KeyboardInterrupt
            return super().train(server, round, chunks)

    with pytest.raises(KeyboardInterrupt):
        run(example("fedavg"), federation(), replace(options, sample=1.0), folder=tmp_path / "run", exchange=Looks)
    run(
        example("fedavg"),
        federation(),
        replace(options, sample=1.0),
        folder=tmp_path / "run",
        exchange=Looks,
        resume=True,
    )
    assert len(set(keys)) == 1
    assert not (tmp_path / "run/noise.key").exists()
    two = [go(example("fedavg"), options=options).server for _ in range(2)]
    assert two[0] != two[1], "two runs of one seed have noise of their own"


def test_clients_are_drawn_each_for_itself_and_nobody_may_be() -> None:
    fed, options = federation(), replace(OPTIONS, sample=0.3, rounds=12, privacy=REPEATABLE)
    guard = Guard(example("fedavg"), options, Roster.of(fed, "clients", options), b"key")
    sizes = [len(guard.draw(Round(at, 400, 0))) for at in range(400)]
    assert sum(sizes) / 400 == pytest.approx(0.3 * 6, abs=0.2)
    assert {0, 1, 2, 3} < set(sizes)
    seen = go(example("fedavg"), options=options).result
    empty = [record for record in seen.history if not record["sampled"]]
    assert empty, "a round without clients is a round"
    assert all(record["epsilon"] for record in empty)
    assert Guard(example("fedavg"), replace(options, sample=3), Roster.of(fed, "clients", options), b"k").share == 0.5


def test_the_servers_own_optimiser_and_norms_go_with_it() -> None:
    options = replace(OPTIONS, sample=1.0, privacy=replace(REPEATABLE, noise=5.0), server=ServerOptim("adam"))
    server = go(example("fedavg", "norms"), options=options).result.server
    assert all(bool(value.isfinite().all()) for value in server.values())
    assert float(server["2.running_var"].min()) >= 0
    assert int(server["2.num_batches_tracked"]) == 0, "a counter is the most of all clients: it would tell of one"


# -- refused


@pytest.mark.parametrize("name", REFUSED)
def test_methods_whose_merging_is_no_plain_sum_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"not possible with {name}: .*{REFUSED[name]}"):
        go(example(name), options=replace(OPTIONS, privacy=REPEATABLE))


def test_other_combinations_are_refused_with_the_reason() -> None:
    options, algorithm = replace(OPTIONS, privacy=REPEATABLE), example("fedavg")
    assert isinstance(algorithm, FedAvg)
    pace = Pace(devices="phones", policy="asynchronous")
    plateau = replace(algorithm.task, schedule=replace(algorithm.task.schedule, name="plateau"))
    for other, method, message in (
        (replace(options, fleet=pace), algorithm, "asynchronous.*take synchronous"),
        (replace(options, agg_norm="all"), algorithm, "leave out clients.agg_norm"),
        (options, replace(algorithm, task=plateau), "validation scores"),
        (
            replace(options, stop_after=3),
            algorithm,
            "stop_after: training would follow validation scores",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            possible(method, other)
    for settings_, message in (
        ({"level": "clients"}, "did you mean 'client'"),
        ({"noise": -1.0}, "noise is at least 0"),
        ({"clip": math.inf}, "must be finite"),
        ({"delta": 0.0}, "delta between"),
    ):
        with pytest.raises(ValueError, match=message):
            Privacy(**{"level": "client", **settings_})


# -- samples


def private_task(model: str = "plain", **options: Any) -> Any:
    settings_ = {"level": "sample", "secret": False, "noise": 0.5, "clip": 0.3, **options}
    return replace(small_task(model), private=Privacy(**settings_))


def one_client(task: Any) -> Local:
    reach = Endpoint(FedAvg(task), federation(), MemoryStore())
    return reach.local(Card(federation().clients[0], 12), Round())


def test_without_noise_and_bound_a_step_on_all_samples_is_that_of_every_fit() -> None:
    full = replace(private_task(noise=0.0, clip=math.inf), batch=1000, epochs=3)
    local = one_client(full)
    state = FedAvg(full).init_server(0)
    noisy, plain = fit(full, state, local), fit(replace(full, private=None), state, local)
    for name, value in plain.state.items():
        torch.testing.assert_close(noisy.state[name], value, rtol=1e-4, atol=1e-6)
    assert noisy.samples == plain.samples
    assert "loss" not in noisy.metrics, "it would tell of samples exactly"


def noised(task: Any, local: Local, rows: list[int], scale: float) -> torch.Tensor:
    """The gradient of these samples, the last one enlarged, times what it was divided by."""
    work = workspace(task.model, None, torch.device("cpu"))
    work.load(FedAvg(task).init_server(0))
    noisy = Noisy(task, local, None, None, "batches", ())
    at = torch.tensor(rows, dtype=torch.int64)
    x = local.prepare(local.train.x.index_select(0, at))
    if len(x):
        x[-1] *= scale
    noisy.gradient(work, Batch(x, local.train.y.index_select(0, at), at), task.loss)
    return work.grad.double() * noisy.batch


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(0, 11), min_size=1, max_size=9, unique=True),
    scale=st.floats(1e-3, 1e4),
    clip=st.floats(1e-3, 10.0),
    noise=st.sampled_from([0.0, 1.0]),
)
def test_no_sample_changes_the_gradients_sum_by_more_than_the_clip(
    rows: list[int], scale: float, clip: float, noise: float
) -> None:
    task = private_task(noise=noise, clip=clip)
    local = one_client(task)
    apart = noised(task, local, rows, scale) - noised(task, local, rows[:-1], 1.0)
    # Of the same client, as draws and noise follow from its seed; the others' samples must not have changed either.
    if len(rows) == 1 or scale == 1.0:
        assert float(apart.norm()) <= clip * (1 + 1e-4) + 1e-5
    apart = noised(task, local, rows, scale) - noised(task, local, rows, 1.0)
    assert float(apart.norm()) <= 2 * clip * (1 + 1e-4) + 1e-5, "replaced by another: at most twice the bound"


def test_gradients_of_samples_are_shortened_one_by_one() -> None:
    task = private_task(noise=0.0, clip=0.2)
    local, total = one_client(task), torch.zeros(())
    model = module(task, FedAvg(task).init_server(0))
    for at in range(12):
        loss = task.loss(model(local.prepare(local.train.x[at : at + 1])), local.train.y[at : at + 1]).sum()
        slope = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).double()
        total = total + shorten(slope, 0.2)[0]
    torch.testing.assert_close(noised(task, local, list(range(12)), 1.0), total, rtol=1e-4, atol=1e-5)


def test_steps_draw_every_sample_for_itself() -> None:
    task = replace(private_task(), batch=3, epochs=200)
    noisy = Noisy(task, one_client(task), None, None, "batches", ())
    sizes = [len(rows) for rows in noisy.draws()]
    assert len(sizes) == noisy.steps == 1000
    assert sum(sizes) / 1000 == pytest.approx(3, abs=0.2)
    assert {0, 1, 5} < set(sizes)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedper"])
def test_a_run_counts_epsilon_of_every_client_and_repeats(name: str, tmp_path: Path) -> None:
    task = private_task(noise=2.0, delta=1e-3)
    algorithm = algorithms.build(name, task)
    options = replace(OPTIONS, privacy=task.private, evaluate_every=3)
    seen = go(algorithm, options=options, folder=tmp_path / "run")
    assert equal_runs(seen, go(algorithm, options=options, exchange=partial(Processes, workers=2)))
    rows = Run(tmp_path / "run").clients
    roster = Roster.of(federation(), "clients", options)
    sizes = dict(zip(roster.ids, roster.sizes.tolist(), strict=True))
    for row in rows:
        rounds = int(row["training_rounds"] or 0)
        n = sizes[row["client"]]
        assert row["epsilon"] == pytest.approx(epsilon(2.0, min(1.0, 6 / n), -(-n // 6) * rounds, 1e-3)) or not rounds
    assert seen.result.summary["epsilon"] >= max(row["epsilon"] or 0 for row in rows)
    assert not any("loss" in record for record in seen.result.history)


def equal_runs(a: Any, b: Any) -> bool:
    check_same(a, b)
    return True


def test_noise_of_clients_is_their_own() -> None:
    task = private_task(secret=True)
    two = [fit(task, FedAvg(task).init_server(0), one_client(task)).state for _ in range(2)]
    assert not torch.equal(vector(two[0]), vector(two[1]))


class Heard(Endpoint):
    """Notes what clients sent, and crashes once when all of round 2 have trained."""

    sent: ClassVar[list[tuple[int, str, str]]] = []

    def train(self, server: State, round: Round, chunks: Any) -> Any:
        for reply in super().train(server, round, chunks):
            assert reply.update is not None
            self.sent.append((round.index, reply.card.id, digest(reply.update.shared)))
            yield reply
        if round.index == 1 and sum(index == 1 for index, *_ in self.sent) == 3:
            raise KeyboardInterrupt


def test_a_round_that_is_repeated_after_a_crash_tells_the_same_again(tmp_path: Path) -> None:
    """Noise drawn anew could be averaged away: two noisy versions of one update."""
    task = private_task(secret=True)
    how: dict[str, Any] = {"folder": tmp_path / "run", "exchange": Heard}
    Heard.sent.clear()
    options = replace(OPTIONS, privacy=task.private)
    with pytest.raises(KeyboardInterrupt):
        run(FedAvg(task), federation(), options, **how)
    key = tmp_path / "run/noise.key"
    assert key.stat().st_mode & 0o077 == 0, "nobody else reads it"
    run(FedAvg(task), federation(), options, resume=True, **how)
    assert not key.exists()
    second = [entry for entry in Heard.sent if entry[0] == 1]
    assert len(second) == 6
    assert second[:3] == second[3:]
    Heard.sent.append((1, "", ""))  # a whole run does not crash again
    run(FedAvg(task), federation(), options, folder=tmp_path / "other", exchange=Heard)
    assert not {entry[2] for entry in Heard.sent[-9:]} & {entry[2] for entry in Heard.sent[:-9]}, "a key of its own"


def test_who_asks_in_another_way_gets_other_noise() -> None:
    """The same noise on two answers could be subtracted."""
    task = private_task(secret=True)
    server, local = FedAvg(task).init_server(0), replace(one_client(task), secret=b"s" * 32)

    def key(**changes: Any) -> bytes:
        of, state, at = (changes.get(name, usual) for name, usual in (("task", task), ("state", server), ("at", local)))
        return Noisy(of, at, None, None, "batches", (digest(state),)).key

    moved = {name: value + 1e-6 for name, value in server.items()}
    part = copy.copy(local.train)
    others = [
        key(state=moved), key(at=replace(local, secret=b"t" * 32)),
        key(at=replace(local, round=replace(local.round, factor=0.5))), key(task=replace(task, batch=5)),
        key(at=replace(local, round=replace(local.round, index=1))),
        key(at=replace(local, train=federation().part(federation().clients[1], "train"))),
        key(at=replace(local, card=Card("another", 12))), key(at=replace(local, secret=b"")),
    ]  # fmt: skip
    assert len({key(), *others}) == 1 + len(others)
    assert key() == key(at=replace(local, train=part))
    assert "secret" not in repr(local)


def test_workers_have_one_key_between_them(tmp_path: Path) -> None:
    task = private_task(secret=True)
    options = replace(OPTIONS, privacy=task.private)
    store = DiskStore(tmp_path / "private")
    keys = {DiskStore(tmp_path / "private").secret() for _ in range(2)} | {store.secret()}
    assert len(keys) == 1
    assert (tmp_path / "noise.key").stat().st_mode & 0o077 == 0
    go(FedAvg(task), options=options, exchange=partial(Processes, workers=2))


def test_what_has_no_gradients_of_single_samples_is_refused_by_name() -> None:
    task = private_task()
    options = replace(OPTIONS, privacy=task.private)
    gru = replace(task, model=partial(build_model, "token_gru", (8,), 5))
    for algorithm, message in (
        (algorithms.get("pfedgate").example(task), "not possible with pfedgate: its updates hold more"),
        (algorithms.get("fedrep").example(task), "not possible with fedrep: .*a second training"),
        (FedAvg(private_task("norms")), r"this model: 2 \(BatchNorm1d\) mixes the samples"),
        (FedAvg(gru), r"\(GRU\) gives no gradients of single samples"),
        (FedAvg(replace(task, correction="training")), "train.correction='prediction'"),
        (FedAvg(replace(task, private=None)), "needs the task to say so"),
    ):
        with pytest.raises(ValueError, match=message):
            possible(algorithm, options)
    with pytest.raises(ValueError, match="knows the task's own loss only"):
        fit(task, FedAvg(task).init_server(0), one_client(task), objective=lambda model, batch: model(batch.x).sum())


def test_a_recipe_says_it_all(tmp_path: Path) -> None:
    sections = {
        "data": {"name": "digits", "clients": 4, "samples": 300}, "algorithm": "fedavg",
        "train": {"rounds": 2, "correction": "prediction"}, "privacy": {"level": "sample", "noise": 1.0, "clip": 1.0},
    }  # fmt: skip
    result = experiment.run(sections, out=tmp_path / "run")
    assert result.summary["epsilon"] > 0
    with pytest.raises(ValueError, match=r"train\.correction"):
        experiment.run({**sections, "train": {"rounds": 1}})
