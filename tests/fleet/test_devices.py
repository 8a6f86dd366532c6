"""Profiles: every shipped number reads, shares are exact, files of users are checked, budgets keep to the device."""

from __future__ import annotations

import math
import pickle
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfedgate.data import synthetic
from pfedgate.engine.roster import Options, Roster, clock_of
from pfedgate.fleet import Clock, Fleet, names
from pfedgate.fleet.devices import Need
from pfedgate.fleet.pace import Pace

IDS = [f"c{at}" for at in range(20)]


@pytest.mark.parametrize("name", names())
def test_shipped_fleets_have_unequal_devices_and_exact_shares(name: str) -> None:
    fleet = Fleet.of(name, IDS)
    kinds = Fleet.kinds(name)
    assert sum(fleet.count().values()) == len(IDS)
    assert all(abs(fleet.count()[kind] - 20 * device.share) <= 1 for kind, device in kinds.items())
    speeds = [device.gflops for device in kinds.values()]
    assert max(speeds) / min(speeds) >= 6


def test_who_owns_what_does_not_depend_on_the_order() -> None:
    fleet, other = Fleet.of("phones", IDS), Fleet.of("phones", IDS[::-1])
    assert [fleet.device(client) for client in IDS] == [other.device(client) for client in IDS]
    assert any(fleet.device(c) != Fleet.of("phones", IDS, seed=1).device(c) for c in IDS)


def test_a_csv_gives_each_client_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("id,kind,gflops,down_mbps,up_mbps\na,phones/old,,,\nb,,2,10,5\n")
    fleet = Fleet.of(path, ["a", "b"])
    assert fleet.device("a").gflops == Fleet.kinds("phones")["old"].gflops
    assert fleet.device("b").up_mbps == 5
    with pytest.raises(ValueError, match="no device for client 'c'"):
        Fleet.of(path, ["a", "b", "c"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[device]]\nkind='a'\ngflops=1\n", "needs down_mbps"),
        ("[[device]]\nkind='a'\ngflops=0\ndown_mbps=1\nup_mbps=1\n", "gflops must be more than 0"),
        ("[[device]]\nkind='a'\ngflop=1\ndown_mbps=1\nup_mbps=1\n", "did you mean 'gflops'"),
        ("[[devices]]\nkind='a'\n", "did you mean 'device'"),
        ("[[device]]\nkind='a'\ngflops='fast'\ndown_mbps=1\nup_mbps=1\n", "could not convert"),
        ("not toml", "is not TOML"),
        ("", r"has no \[\[device\]\]"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Fleet.of(path, IDS)


def test_an_unknown_fleet_suggests_one() -> None:
    with pytest.raises(ValueError, match="did you mean 'phones'"):
        Fleet.of("phone", IDS)


def test_a_trace_of_fedscale_is_read_and_code_in_it_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "client_device_capacity"
    path.write_bytes(pickle.dumps({1: {"computation": 162.0, "communication": 5648.1}}))
    device = Fleet.of(path, ["1"]).device("1")
    assert device.gflops == pytest.approx(600 / 162)
    assert device.up_mbps == pytest.approx(5.6481)
    path.write_bytes(pickle.dumps(pytest.approx))
    with pytest.raises(ValueError, match="not a device trace"):
        Fleet.of(path, ["1"])


@given(
    st.floats(1e4, 1e7), st.floats(1e8, 1e11), st.floats(1e6, 1e8), st.integers(1, 20), st.floats(1.0, 100.0),
    st.sampled_from(["old", "mid", "new"]),
)  # fmt: skip
def test_a_budget_from_a_device_keeps_memory_and_deadline(
    params: float, flops: float, activations: float, steps: int, deadline: float, kind: str
) -> None:
    device, need = Fleet.kinds("phones")[kind], Need(int(params), flops, activations, steps)
    try:
        shares = device.budget(need, deadline)
    except ValueError:
        return  # nothing fits, and it says so
    model = 4 * need.params
    memory = model + shares["params"] * 2 * model + shares["activation_bytes"] * activations
    assert memory <= device.memory_mb * 1e6 * (1 + 1e-9)
    time = 8e-6 * model / device.down_mbps + 1e-3 * device.overhead_ms * steps
    time += shares["flops"] * flops / (1e9 * device.gflops) + 8e-6 * shares["params"] * model / device.up_mbps
    assert time <= deadline * (1 + 1e-9)
    assert all(0 < share <= 1 for share in shares.values())


def test_a_device_that_can_do_nothing_says_so() -> None:
    with pytest.raises(ValueError, match="cannot train any part of this model within a deadline"):
        Fleet.kinds("sensors")["sensor"].budget(Need(10_000_000, 1e12, 1e6, 10), deadline=1.0)


@given(st.floats(0, 1e6), st.sampled_from(IDS))
def test_a_device_that_is_away_comes_back_within_its_period(at: float, client: str) -> None:
    clock = Clock(Fleet.of("sensors", IDS))
    wait = clock.wait(client, at)
    device = clock.fleet.device(client)
    assert 0 <= wait <= (1 - device.duty) * 3600 * device.period_hours + 1e-3
    assert clock.wait(client, at + wait) == 0


def test_time_is_what_was_counted() -> None:
    clock = Clock(Fleet.of("phones", IDS), seed=2)
    ratios = []
    for client in IDS:
        device = clock.fleet.device(client)
        cost = clock.cost(client, 1, flops=3e9, steps=4, down=2_000_000, up=1_000_000)
        plain = 3 / device.gflops + 4e-3 * device.overhead_ms
        ratios.append(cost.compute / plain)
        assert cost.download / cost.upload == pytest.approx(2 * device.up_mbps / device.down_mbps)
    assert math.prod(ratios) ** (1 / len(ratios)) == pytest.approx(1, abs=0.1)
    assert max(ratios) > min(ratios)


def test_a_registered_device_takes_few_bytes() -> None:
    """What a million devices keep in memory while a thousand of them train."""
    tracemalloc.start()
    federation = synthetic(clients=200_000)
    options = Options(fleet=Pace(devices="phones"))
    roster, clock = Roster.of(federation, "clients", options), clock_of(federation, options)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(roster) == len(clock.fleet.ids) == 200_000
    assert kept < 30 * 200_000
    assert peak < 100 * 200_000
