"""Real fleets for tests: apps, processes of one fleet, and patience that a busy machine may need."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from pfedgate.config import toml
from pfedgate.deploy import local, starter
from pfedgate.deploy.local import LocalFleet

ROOT = Path(__file__).parents[2]

# Every message is a new process on its node: data that needs no other library saves a second in each of them.
SMALL: dict[str, Any] = {
    "data": {"name": "synthetic", "clients": 3, "samples_per_client": 60},
    "model": {"name": "mlp", "hidden": [96]},
    "algorithm": {"name": "pfedgate"},
    "train": {"rounds": 2, "batch": 8},
    "clients": {"budget": 0.5},
    "run": {"stack": 0, "workers": 1},
}


@functools.lru_cache(maxsize=1)
def patience() -> float:
    """How much longer than usual to wait: a fleet is ten processes that import torch, as slow as the machine is."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, numpy"], check=True, timeout=300)
    return max(1.0, (time.monotonic() - began) / 3)


def write_app(folder: Path, tables: Mapping[str, Any], **deploy: Any) -> Path:
    """An app of this recipe."""
    settings = {"nodes": 3, "start": 180 * patience(), "deadline": 120 * patience(), **deploy}
    recipe = folder / "recipe.toml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    whole = {**tables, "deploy": settings}
    recipe.write_text("".join(f"{name} = {toml.dump(table)}\n" for name, table in whole.items()), encoding="utf-8")
    return starter.write_app(folder / "app", recipe)


LIAR = """
from pathlib import Path

from tests.support import lies

from pfedgate.deploy.flower import client_app

lies.{kind}()
app = client_app(Path(__file__).with_name("recipe.toml"))
"""


def lying(app: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app with a node that lies in this way, a function of `lies`."""
    _tests_importable(monkeypatch)
    (app / "pfedgate_app" / "client.py").write_text(LIAR.format(kind=kind), encoding="utf-8")


def crooked(folder: Path, tricks: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on fleets start SuperNodes of `crooked`, with these tricks."""
    _tests_importable(monkeypatch)
    script, honest = folder / "supernode", local.program
    script.write_text(
        f"#!{sys.executable}\nfrom tests.support.crooked import run_crooked\n\nrun_crooked({list(tricks)})\n"
    )
    script.chmod(0o700)
    monkeypatch.setattr(local, "program", lambda name: str(script) if name == "flower-supernode" else honest(name))


def _tests_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "src"))))


def run_on_fleet(fleet: LocalFleet, app: Path, config: Mapping[str, Any], timeout: float = 300) -> list[str]:
    """The log of a run."""
    said = []
    for line in fleet.run(app, config, timeout=timeout * patience()):
        print(line)  # pytest shows it if the run fails
        said.append(line)
    return said


def processes(folder: Path) -> list[int]:
    """Processes whose Flower home is in this folder: all that a fleet there has started, however deep."""
    running = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            home = process.environ().get("FLWR_HOME", "")
            if home.startswith(str(folder)) and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process.pid)
    return running


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    """An error if it does not come true in time."""
    until = time.monotonic() + seconds * patience()
    while not true():
        assert time.monotonic() < until, f"{what}: not within {seconds * patience():.0f} s"
        time.sleep(0.2)
