"""Laws of virtual time: a clock changes no result, and every policy has a limit in which it is the synchronous one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.toys import clusters, plain_mlp, run, task

from pfedgate.algorithms import build
from pfedgate.core.state import equal, rebased, staleness
from pfedgate.engine import server as engine
from pfedgate.engine.server import Options, Result
from pfedgate.fleet.pace import Pace

TASK = replace(task(plain_mlp), example=torch.zeros(8, 6))
pytestmark = pytest.mark.filterwarnings("ignore:the gate has")  # the model is a toy
METHODS = ("fedavg", "ditto", "heterofl", "pfedgate")


def trained(name: str = "fedavg", rounds: int = 4, options: dict[str, Any] | None = None, **pace: Any) -> Result:
    federation = clusters((24, 17, 30, 9, 20, 12, 15), novel=0)
    return run(build(name, TASK), federation, rounds, seed=3, **{"sample": 4, **(options or {})}, fleet=Pace(**pace))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("fleet", ["phones", "sensors", "hospitals"])
def test_a_clock_changes_no_result(name: str, fleet: str) -> None:
    plain, timed = trained(name), trained(name, devices=fleet)
    assert equal(plain.server, timed.server)
    assert [r["after_broadcast"] for r in plain.history] == [r["after_broadcast"] for r in timed.history]
    times = [record["virtual_seconds"] for record in timed.history]
    assert times == sorted(times)
    assert times[0] > 0
    assert "virtual_seconds" not in plain.history[0]


@pytest.mark.parametrize("name", METHODS)
def test_an_infinite_deadline_is_synchronous(name: str) -> None:
    plain = trained(name, devices="phones")
    late = trained(name, devices="phones", policy="deadline", oversample=1.0)
    assert equal(plain.server, late.server)
    assert [r["virtual_seconds"] for r in plain.history] == [r["virtual_seconds"] for r in late.history]


@pytest.mark.parametrize("name", METHODS)
def test_a_buffer_of_all_is_synchronous(name: str) -> None:
    plain = trained(name, devices="phones")
    buffered = trained(name, devices="phones", policy="asynchronous", buffer=4)
    assert equal(plain.server, buffered.server)
    assert [r["virtual_seconds"] for r in plain.history] == [r["virtual_seconds"] for r in buffered.history]


def test_one_tier_is_synchronous() -> None:
    assert equal(trained(devices="phones").server, trained(devices="phones", policy="tiered", tiers=1).server)


def test_over_sampling_takes_the_first_and_ends_with_the_last_of_them() -> None:
    plain = trained(devices="phones", options={"sample": 3})
    early = trained(devices="phones", policy="deadline", oversample=2.0, options={"sample": 3})
    assert [record["dropped"] for record in early.history] == [3, 3, 3, 3]
    assert early.history[-1]["virtual_seconds"] < plain.history[-1]["virtual_seconds"]


def test_a_round_that_nobody_ends_in_time_leaves_the_server_as_it_is() -> None:
    result = trained(devices="phones", policy="deadline", deadline=1e-9)
    start = build("fedavg", TASK).init_server(3)
    assert equal(result.server, {name: result.server[name] for name in start})
    assert all(record["dropped"] == 6 for record in result.history)
    assert result.history[-1]["virtual_seconds"] == pytest.approx(4e-9)


def test_asynchronous_rounds_are_shorter_and_updates_get_old() -> None:
    plain = trained(devices="phones", rounds=8, options={"sample": 6})
    quick = trained(devices="phones", rounds=8, policy="asynchronous", buffer=2, options={"sample": 6})
    assert quick.history[-1]["virtual_seconds"] < plain.history[-1]["virtual_seconds"]
    assert quick.history[0]["sampled"] == 6
    assert [record["sampled"] for record in quick.history[1:]] == [2] * 7


def test_an_update_too_old_is_dropped() -> None:
    result = trained(devices="phones", rounds=8, policy="asynchronous", buffer=1, stalest=0, options={"sample": 6})
    assert sum(record["dropped"] for record in result.history) > 0


def test_a_tile_is_as_old_as_it_says() -> None:
    """Of two entries, one changed twice since the client started and one never: only the first is discounted."""
    history = [torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([3.0, 1.0])]
    assert staleness(history).tolist() == [2, 0]
    moved = rebased(torch.tensor([1.0, 4.0]), history, 0.5)
    assert moved.tolist() == pytest.approx([3 + 1 / 3**0.5, 4.0])


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=8), st.integers(1, 4), st.floats(0, 2))
def test_a_step_is_never_longer_than_the_clients(values: list[float], merges: int, power: float) -> None:
    value = torch.tensor(values)
    history = [torch.full_like(value, float(at)) for at in range(merges + 1)]
    step, moved = (value - history[0]).abs(), (rebased(value, history, power) - history[-1]).abs()
    assert bool((moved <= step * (1 + 1e-5) + 1e-5).all())


def test_energy_of_late_clients_counts() -> None:
    plain = trained(devices="phones", options={"sample": 3}, rounds=1)
    early = trained(devices="phones", policy="deadline", oversample=2.0, options={"sample": 3}, rounds=1)
    assert early.history[0]["joules"] > plain.history[0]["joules"] > 0


def test_a_policy_without_devices_says_so() -> None:
    with pytest.raises(ValueError, match=r"set fleet\.devices"):
        Pace(policy="deadline")
    with pytest.raises(ValueError, match="did you mean 'asynchronous'"):
        Pace(policy="asynchronos")


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_what_is_in_flight_survives_an_interruption(name: str, tmp_path: Path) -> None:
    federation, algorithm = clusters((24, 17, 30, 9, 20, 12, 15), novel=0), build(name, TASK)
    pace = Pace(devices="phones", policy="asynchronous", buffer=2)
    options = {"seed": 3, "sample": 5, "fleet": pace, "evaluate_every": 1, "stack": 0, "device": "cpu"}
    whole = engine.run(algorithm, federation, Options(rounds=6, **options), folder=tmp_path / "whole")
    engine.run(algorithm, federation, Options(rounds=3, **options), folder=tmp_path / "cut")
    went_on = engine.run(algorithm, federation, Options(rounds=6, **options), folder=tmp_path / "cut", resume=True)
    assert equal(whole.server, went_on.server)
    assert whole.history == went_on.history
    lines = [(tmp_path / folder / "participation.jsonl").read_text() for folder in ("whole", "cut")]
    assert lines[0] == lines[1]
