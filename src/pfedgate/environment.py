"""Where and with what a run happened: figures mean nothing without it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "ortools", "safetensors", "scikit-learn", "scipy")


def environment() -> dict[str, Any]:
    """The machine, the versions, the commit, the command and the time.

    >>> sorted(environment())
    ['command', 'commit', 'machine', 'packages', 'pfedgate', 'python', 'started']
    """
    from pfedgate import __version__

    machine = {
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory(),
        "accelerators": _accelerators(),
    }
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "pfedgate": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": packages,
        "machine": machine,
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _accelerators() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]


def _commit() -> str | None:
    """The commit of the source this runs from, with a + if files differ; None if it is an installed package."""
    here = Path(__file__).parent
    try:
        ask = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
        inside = subprocess.run(
            ["git", "-C", str(here), "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10
        )
        found = subprocess.run(ask, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # A virtual environment inside somebody else's repository must not pass for that repository's commit.
    return found.stdout.strip() or None if inside.returncode == 0 and found.returncode == 0 else None
