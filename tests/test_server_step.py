"""Laws of the server's optimiser: it can be nothing at all, moves only what was trained, and survives interruptions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.toys import clusters, plain_mlp, run, task
from tests.support.world import ALGORITHMS, OPTIONS, check_same, example, federation, go, private_digests

from pfedgate.algorithms import build
from pfedgate.core.state import equal
from pfedgate.core.types import Card, ServerOptim, State
from pfedgate.engine.endpoint import Endpoint
from pfedgate.engine.server import Options, Result
from pfedgate.engine.server import run as engine
from pfedgate.engine.server_step import ServerStep
from pfedgate.fleet.pace import Pace

pytestmark = pytest.mark.filterwarnings("ignore:the gate has")  # the models are toys
PLAIN = ServerOptim("momentum", lr=1.0, momentum=0.0)
# These average no parameters of the model: they send none, or the server makes them by a hypernetwork.
NOTHING_TO_MOVE = {"local_only", "fedmd", "pfedhn"}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in NOTHING_TO_MOVE])
@pytest.mark.parametrize("model", ["plain", "norms"])
def test_rate_1_without_momentum_is_no_optimiser_bit_for_bit(name: str, model: str) -> None:
    check_same(go(example(name, model)), go(example(name, model), options=replace(OPTIONS, server=PLAIN)))


@pytest.mark.parametrize("name", sorted(NOTHING_TO_MOVE))
def test_a_method_without_a_mean_of_parameters_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} does not average parameters.*leave it out"):
        go(example(name), options=replace(OPTIONS, server=PLAIN))


def reference(kind: str, old: torch.Tensor, means: list[torch.Tensor]) -> torch.Tensor:
    """Algorithm 2 of Reddi et al. and FedAvgM as printed, in double precision, for a server that gets these means."""
    x, m, v = old.double(), torch.zeros_like(old).double(), torch.full_like(old, 1e-6).double()
    for mean in means:
        change = mean.double() - x.float().double()
        if kind == "momentum":
            m = 0.9 * m + change
            x = x + 0.5 * m
            continue
        m = 0.9 * m + 0.1 * change
        v = 0.99 * v + 0.01 * change**2 if kind == "adam" else v - 0.01 * change**2 * (v - change**2).sign()
        x = x + 0.5 * m / (v.sqrt() + 1e-3)
    return x


@pytest.mark.parametrize("kind", ["momentum", "adam", "yogi"])
def test_steps_are_those_of_the_papers(kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    name, like = next(iter(plain_mlp().named_parameters()))
    values = [torch.randn(like.shape, generator=draw) for _ in range(5)]
    step = ServerStep(ServerOptim(kind, lr=0.5), build("fedavg", task(plain_mlp)))
    server: State = {name: values[0], "count": torch.tensor(0), "other/buffer": torch.zeros(2)}
    for at, mean in enumerate(values[1:]):
        merged = {name: mean, "count": torch.tensor(at), "other/buffer": torch.full((2,), float(at))}
        server = step(server, merged)
        assert int(server["count"]) == at, "a counter moves as it was merged"
        assert server["other/buffer"].tolist() == [at, at], "what is no parameter of the model moves as it was merged"
    assert torch.allclose(server[name].double(), reference(kind, values[0], values[1:]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["momentum", "adam", "yogi"])
def test_what_nobody_trained_takes_no_step(kind: str) -> None:
    """A client that keeps a third of the blocks moves those alone, although momentum points further everywhere."""
    optim = ServerOptim(kind, lr=0.1)
    seen: list[State] = []

    class Watched(Endpoint):
        def train(self, server: State, round: Any, chunks: Any) -> Any:
            seen.append(server)
            return super().train(server, round, chunks)

    toy = replace(task(plain_mlp), example=torch.zeros(8, 6))
    algorithm = build("heterofl", toy)
    done = engine(
        algorithm, clusters((24, 17), novel=0), Options(rounds=3, seed=3, budget=0.3, server=optim), exchange=Watched
    )
    width = algorithm.width(Card("0", 24, 0.3))  # type: ignore[attr-defined]
    for before, after in zip(seen, [*seen[1:], done.server], strict=True):
        moved = 0
        for name, value in after.items():
            inside = torch.zeros_like(value, dtype=torch.bool)
            inside[width.region(name)] = True
            assert torch.equal(value[~inside], before[name][~inside])
            moved += int((value != before[name]).sum())
        assert moved


def test_a_model_that_no_client_chose_stands_still_although_it_has_momentum() -> None:
    step = ServerStep(ServerOptim("momentum"), build("ifca", task(plain_mlp)))
    name, like = next(iter(plain_mlp().named_parameters()))
    ones = torch.ones(like.shape)
    server = {f"{m}/{name}": 0 * ones for m in range(2)}
    server = step(server, {f"{m}/{name}": ones for m in range(2)})
    after = step(server, {**server, f"1/{name}": 2 * ones})
    assert torch.equal(after[f"0/{name}"], server[f"0/{name}"])
    assert torch.allclose(after[f"1/{name}"], (1 + 1.9) * ones)


@pytest.mark.parametrize("name", ["fedavg", "fedper", "pfedgate"])
@pytest.mark.parametrize("kind", ["momentum", "adam", "yogi"])
def test_resuming_changes_nothing(name: str, kind: str, tmp_path: Path) -> None:
    options = replace(OPTIONS, rounds=4, server=ServerOptim(kind))
    whole = go(example(name), options=options, folder=tmp_path / "whole")

    class Crash(Exception):
        pass

    class Stops(Endpoint):
        def train(self, server: State, round: Any, chunks: Any) -> Any:
            if round.index == 2:
                raise Crash
            return super().train(server, round, chunks)

    with pytest.raises(Crash):
        engine(example(name), federation(), options, folder=tmp_path / "cut", exchange=Stops)
    again = go(example(name), options=options, folder=tmp_path / "cut", resume=True)
    check_same(whole, again)
    assert private_digests(tmp_path / "cut") == private_digests(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"cannot be resumed with other settings: server was"):
        go(example(name), options=replace(options, server=PLAIN), folder=tmp_path / "cut", resume=True)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "ditto"])
def test_private_parts_are_nobody_elses_business(name: str) -> None:
    """After one round, for which all start alike, private States are the same, whatever the server does then."""
    options = replace(OPTIONS, rounds=1, sample=1.0)
    plain, stepped = (go(example(name), options=replace(options, server=s)) for s in (PLAIN, ServerOptim("adam")))
    assert plain.private == stepped.private
    assert plain.server != stepped.server


def trained(server: ServerOptim, **pace: Any) -> Result:
    federation = clusters((24, 17, 30, 9, 20, 12, 15), novel=0)
    fleet = Pace(devices="phones", **pace)
    toy = replace(task(plain_mlp), example=torch.zeros(8, 6))
    return run(build("fedavg", toy), federation, 4, seed=3, sample=4, fleet=fleet, server=server)


@pytest.mark.parametrize("policy", ["synchronous", "deadline", "tiered", "asynchronous"])
def test_every_policy_has_one(policy: str) -> None:
    none, plain, adam = (trained(s, policy=policy) for s in (ServerOptim(), PLAIN, ServerOptim("adam")))
    assert equal(none.server, plain.server)
    assert not equal(none.server, adam.server)
    assert all(value.isfinite().all() for value in adam.server.values())


def test_a_wrong_word_or_number_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'yogi'"):
        ServerOptim("yogy")
    with pytest.raises(ValueError, match="lr and tau are more than 0"):
        ServerOptim("adam", lr=0.0)
    with pytest.raises(ValueError, match="betas"):
        ServerOptim("adam", betas=(1.0, 0.9))
