"""Profiles of devices, and which client owns which.

fleet = Fleet.of("phones", ids)           a shipped fleet: phones, sensors, hospitals
fleet = Fleet.of("devices.toml", ids)     kinds with shares of your own, as in the shipped files
fleet = Fleet.of("devices.csv", ids)      a row for each client: id,kind or id,gflops,down_mbps,…
fleet = Fleet.of("client_device_capacity", ids)     a trace of FedScale, if you have one
fleet.device("anna").gflops
"""

from __future__ import annotations

import csv
import io
import math
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from pfedgate.core.errors import unknown
from pfedgate.core.ids import Ids
from pfedgate.core.seeds import key

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# FedScale gives milliseconds per sample of a phone's inference; its traces were taken with mobile networks of
# about 0.6 GFLOPs a sample (MobileNet V2 has 0.3 billion multiply-adds).
FEDSCALE_GFLOP = 0.6


@dataclass(frozen=True)
class Device:
    """One kind of device: how fast it computes and sends, what it can hold, and when it is there."""

    kind: str
    gflops: float  # sustained in training, not a data sheet's peak
    down_mbps: float
    up_mbps: float
    share: float = 1.0  # of the fleet; shares are scaled so that they add up to 1
    memory_mb: float = math.inf  # free for training
    overhead_ms: float = 0.0  # the part of a training step that does not shrink with the model
    watts: float = 0.0  # while it computes
    joules_per_mb_down: float = 0.0
    joules_per_mb_up: float = 0.0
    upload_mb: float = math.inf  # what its data plan allows each round
    duty: float = 1.0  # the share of each period in which it is there
    period_hours: float = 24.0
    jitter: float = 0.1  # deviation of the logarithm of each time

    def __post_init__(self) -> None:
        for name in ("gflops", "down_mbps", "up_mbps", "memory_mb", "upload_mb", "period_hours"):
            if not getattr(self, name) > 0:
                raise ValueError(f"device {self.kind!r}: {name} must be more than 0, got {getattr(self, name)}")
        for name in ("overhead_ms", "watts", "joules_per_mb_down", "joules_per_mb_up", "jitter", "share"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"device {self.kind!r}: {name} must be a number from 0 on, got {getattr(self, name)}")
        if not 0 < self.duty <= 1:
            raise ValueError(f"device {self.kind!r}: duty is a share of time in (0, 1], got {self.duty}")

    def budget(self, need: Need, deadline: float = math.inf) -> dict[str, float]:
        """The shares of a dense model that this device can train within its memory, its data plan and a deadline.

        Memory holds the model and, of what is live, gradient, momentum and activations. Time is download, the fixed
        part of every step, FLOPs, and the upload of what is live. Some methods send every client the whole model, and
        others only the part that it trains (`Need.whole`). The result has `params`, `flops` and `activation_bytes` as
        `clients.budget` takes them, and `upload` where the data plan allows only a part.

        >>> need = Need(params=250_000, flops=2e9, activation_bytes=20e6, steps=3)
        >>> shares = Fleet.kinds("phones")["old"].budget(need, deadline=1.0)
        >>> {name: round(share, 2) for name, share in shares.items()}
        {'params': 0.08, 'flops': 0.08, 'activation_bytes': 1.0}
        """
        model = 4.0 * need.params
        plan = min(1.0, 1e6 * self.upload_mb / model)
        got, part = (model, 0.0) if need.whole else (0.0, model)
        memory = (1e6 * self.memory_mb - got) / (part + 2 * model + need.activation_bytes)
        fixed = 8e-6 * got / self.down_mbps + 1e-3 * self.overhead_ms * need.steps
        variable = 8e-6 * part / self.down_mbps + need.flops / (1e9 * self.gflops) + 8e-6 * model * plan / self.up_mbps
        # Two deviations of jitter are kept free, and room for blocks that only some batches use.
        time = (0.95 * deadline / math.exp(2 * self.jitter) - fixed) / variable
        if min(memory, time) <= 0:
            limit = f"a deadline of {deadline:g} s" if time <= 0 else f"{self.memory_mb} MB"
            raise ValueError(f"device {self.kind!r} cannot train any part of this model within {limit}")
        shares = {"params": min(memory, time), "flops": time, "activation_bytes": memory}
        if plan < 1:
            shares["upload"] = plan
        return {name: min(1.0, share) for name, share in shares.items()}


@dataclass(frozen=True)
class Need:
    """What one client's round with the dense model takes."""

    params: int
    flops: float
    activation_bytes: float  # of one batch
    steps: int
    whole: bool = True  # the client gets and holds all of the model, whatever it trains


def names() -> list[str]:
    """The fleets that ship.

    >>> names()
    ['hospitals', 'phones', 'sensors']
    """
    files = resources.files("pfedgate.fleet").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


class Fleet:
    """Devices of clients. Each kind has the exact share of them, drawn by seed and id, whatever their order."""

    def __init__(self, ids: Sequence[str], owned: Sequence[int] | np.ndarray[Any, Any], devices: Sequence[Device]):
        listed = Ids(ids)
        kinds = np.asarray(owned).astype(np.min_scalar_type(len(devices)))  # a byte each, of a million clients
        order = listed.order
        self.ids = listed if order is None else listed[order]
        self.owned = kinds if order is None else kinds[order]
        self.devices = tuple(devices)

    @classmethod
    def of(cls, source: str | Path, ids: Sequence[str], seed: int = 0) -> Fleet:
        """A fleet by the name of a shipped one, or from a file: `.toml`, `.csv` or a trace of FedScale.

        >>> fleet = Fleet.of("phones", [str(i) for i in range(100)])
        >>> sorted(fleet.count().items())
        [('mid', 34), ('new', 33), ('old', 33)]
        """
        path = Path(source)
        if str(source) not in names() and path.suffix != ".toml":
            rows = _rows(path) if path.suffix == ".csv" else _fedscale(path)
            if missing := [client for client in ids if client not in rows]:
                raise ValueError(f"{path} has no device for client {missing[0]!r} ({len(missing)} in all)")
            return cls(ids, np.arange(len(ids)), [rows[client] for client in ids])
        devices = list(cls.kinds(source).values())
        edges = np.cumsum([device.share for device in devices])
        if not edges[-1] > 0:
            raise ValueError(f"{source}: the shares of the devices add up to nothing")
        keys = np.fromiter((key(seed, "device", client) for client in ids), dtype=np.uint64, count=len(ids))
        counts = np.diff(np.rint(edges / edges[-1] * len(ids)).astype(np.int64), prepend=0)
        owned = np.empty(len(ids), dtype=np.int32)
        owned[np.argsort(keys)] = np.repeat(np.arange(len(devices), dtype=np.int32), counts)
        return cls(ids, owned, devices)

    @staticmethod
    def kinds(source: str | Path) -> dict[str, Device]:
        """The kinds of a shipped fleet or of a TOML file, by name."""
        path = Path(source)
        if str(source) in names():
            text = resources.files("pfedgate.fleet").joinpath(f"{source}.toml").read_text(encoding="utf-8")
        elif path.suffix == ".toml" and path.exists():
            text = path.read_text(encoding="utf-8")
        else:
            raise ValueError(f"{unknown('fleet', str(source), names())}; or the path of a .toml or .csv of devices")
        kinds = {device.kind: device for device in (_device(row, str(source)) for row in _tables(text, str(source)))}
        if not kinds:
            raise ValueError(f"{source} has no [[device]]")
        return kinds

    def device(self, client: str) -> Device:
        """The device of a client."""
        at = self.ids.find(client)
        if at is None:
            raise KeyError(f"no device for client {client!r}")
        return self.devices[int(self.owned[at])]

    def count(self) -> dict[str, int]:
        """How many clients own each kind."""
        counts: dict[str, int] = {}
        for device, number in zip(self.devices, np.bincount(self.owned, minlength=len(self.devices)), strict=True):
            counts[device.kind] = counts.get(device.kind, 0) + int(number)
        return counts


def _tables(text: str, where: str) -> list[Mapping[str, Any]]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is not TOML: {error}") from None
    for name in tables:
        if name != "device":
            raise ValueError(f"{where}: {unknown('table', name, ['device'])}")
    return list(tables.get("device", []))


def _device(row: Mapping[str, Any], where: str) -> Device:
    known = [field.name for field in fields(Device)]
    for name in row:
        if name not in known:
            raise ValueError(f"{where}: {unknown('key', name, known)}")
    for name in ("kind", "gflops", "down_mbps", "up_mbps"):
        if name not in row:
            raise ValueError(f"{where}: device {row.get('kind', '?')!r} needs {name}")
    try:
        numbers = {name: float(value) for name, value in row.items() if name != "kind"}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: device {row['kind']!r}: {error}") from None
    return Device(kind=str(row["kind"]), **numbers)


def by_id(path: Path) -> dict[str, dict[str, str]]:
    """The rows of a CSV of devices by their column `id`, without cells that are empty."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = list(csv.DictReader(file))
    if not lines or "id" not in lines[0]:
        raise ValueError(f"{path}: the first line must name the columns, one of them 'id'")
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        client = line.pop("id")
        if client in rows:
            raise ValueError(f"{path}: client {client!r} occurs twice")
        rows[client] = {name: value for name, value in line.items() if value}
    return rows


def _rows(path: Path) -> dict[str, Device]:
    """A CSV with a row for each client: numbers of its own, or the kind of a shipped fleet as `fleet/kind`."""
    if not path.exists():
        raise ValueError(f"{unknown('fleet', str(path), names())}; or the path of a .toml or .csv of devices")
    devices: dict[str, Device] = {}
    for client, row in by_id(path).items():
        family, slash, kind = row.get("kind", "").partition("/")
        if slash:
            kinds = Fleet.kinds(family)
            if kind not in kinds:
                raise ValueError(f"{path}: {unknown('kind', kind, kinds)}")
            row = {**{field.name: getattr(kinds[kind], field.name) for field in fields(Device)}, **row}
        devices[client] = _device({"kind": "device", **row}, str(path))
    return devices


class _Plain(pickle.Unpickler):
    """Numbers, texts and containers only: a pickle that names any class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it names {module}.{name}; a trace holds numbers only")


def _fedscale(path: Path) -> dict[str, Device]:
    """FedScale's `client_device_capacity`: milliseconds of computation per sample and kilobits per second."""
    if not path.exists():
        raise ValueError(f"{unknown('fleet', str(path), names())}; or the path of a .toml or .csv of devices")
    try:
        trace = _Plain(io.BytesIO(path.read_bytes())).load()
        return {
            str(client): Device(
                "fedscale",
                gflops=FEDSCALE_GFLOP * 1e3 / float(row["computation"]),
                down_mbps=float(row["communication"]) / 1e3,
                up_mbps=float(row["communication"]) / 1e3,
            )
            for client, row in trace.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not a device trace of FedScale: {error}") from None
