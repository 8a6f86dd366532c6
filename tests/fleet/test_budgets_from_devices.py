"""`clients.budget = "device"`: what a device can afford is what its client trains and sends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pfedgate
from pfedgate import algorithms
from pfedgate.fleet import Fleet
from pfedgate.fleet.devices import Device, Need

DEVICES = """
[[device]]
kind = "strong"
gflops = 30.0
down_mbps = 50.0
up_mbps = 20.0
jitter = 0.0
[[device]]
kind = "weak"
gflops = {gflops}
down_mbps = 50.0
up_mbps = 5.0
memory_mb = 100
upload_mb = {upload}
jitter = 0.0
"""


def run(tmp_path: Path, algorithm: Any, gflops: float = 0.05, upload: float = 100.0, **fleet: Any) -> pfedgate.Result:
    path = tmp_path / "devices.toml"
    path.write_text(DEVICES.format(gflops=gflops, upload=upload))
    return pfedgate.run(
        algorithm=algorithm,
        data={"name": "digits", "clients": 6},
        train={"rounds": 2},
        clients={"budget": "device"},
        fleet={"devices": str(path), "deadline": 2.0, **fleet},
        run={"workers": 1},
        evaluate={"every": 1},
    )


@pytest.mark.parametrize("algorithm", ["pfedgate", "heterofl"])
def test_a_weak_device_keeps_the_deadline_and_a_strong_one_trains_everything(tmp_path: Path, algorithm: str) -> None:
    weak = run(tmp_path, algorithm)
    strong = run(tmp_path, algorithm, gflops=30.0)
    assert weak.history[-1]["flops"] < 0.9 * strong.history[-1]["flops"]
    assert weak.history[-1]["virtual_seconds"] <= 2 * 2.0
    late = run(tmp_path, {"name": algorithm}, policy="deadline")
    assert [record["dropped"] for record in late.history] == [0, 0]


def test_a_data_plan_caps_the_upload(tmp_path: Path) -> None:
    model = 4 * 11_970  # bytes of the dense model, or less
    result = run(tmp_path, {"name": "pfedgate", "upload": 1.0}, gflops=30.0, upload=model / 4 / 1e6)
    free = run(tmp_path, {"name": "pfedgate", "upload": 1.0}, gflops=30.0)
    assert result.history[-1]["bytes_up"] < 0.8 * free.history[-1]["bytes_up"]
    with pytest.raises(Exception, match=r"set algorithm\.upload"):
        run(tmp_path, "pfedgate", gflops=30.0, upload=model / 4 / 1e6)


def test_devices_that_nobody_described_are_asked_for() -> None:
    with pytest.raises(ValueError, match=r"set fleet\.devices"):
        pfedgate.run(data={"name": "digits", "clients": 3}, train={"rounds": 1}, clients={"budget": "device"})


def test_novel_clients_have_devices_too(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(DEVICES.format(gflops=1.0, upload=100.0))
    result = pfedgate.run(
        data={"name": "digits", "clients": 6},
        train={"rounds": 1},
        clients={"budget": "device", "novel": 0.34},
        fleet={"devices": str(path), "deadline": 5.0},
        run={"workers": 1},
    )
    assert result.summary["novel"]["clients"] == 3
    assert Fleet.of(path, ["a", "b"]).count() == {"strong": 1, "weak": 1}


def test_a_method_that_sends_a_client_its_part_alone_affords_a_larger_one() -> None:
    device = Device("phone", gflops=5.0, down_mbps=10.0, up_mbps=5.0, memory_mb=20, jitter=0.0)
    whole = Need(params=1_000_000, flops=10e9, activation_bytes=20e6, steps=1)
    part = device.budget(replace(whole, whole=False), deadline=6.0)
    assert all(part[name] > share for name, share in device.budget(whole, deadline=6.0).items())
    sent = 4e6 * part["params"]
    assert 8e-6 * sent / 10 + 10 * part["flops"] / 5 + 8e-6 * sent / 5 <= 6.0
    assert 3 * 4e6 * part["activation_bytes"] + 20e6 * part["activation_bytes"] <= 20e6 * (1 + 1e-9)


def test_parts_of_the_model_are_all_that_narrow_clients_get() -> None:
    assert {name for name in algorithms.names() if not algorithms.get(name).sends_whole} == {
        "fedrolex",
        "fjord",
        "heterofl",
    }
