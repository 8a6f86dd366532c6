"""Where and with what a run happened: figures mean nothing without it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "safetensors", "scikit-learn", "scipy")


def environment() -> dict[str, Any]:
    """The machine, the versions, the commit, the command and the time.

    >>> sorted(environment())
    ['command', 'commit', 'machine', 'packages', 'pfedgate', 'python', 'started']
    """
    import torch

    from pfedgate import __version__

    memory, cpu = None, platform.processor() or platform.machine()
    with suppress(AttributeError, ValueError, OSError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):
        model = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        cpu = model[1].strip() if model else cpu
    # Processors of one name may differ in vector instructions, and bits with them. Torch tells its own choice, but
    # not that of its convolutions.
    most = os.environ.get("ONEDNN_MAX_CPU_ISA")
    packages = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "pfedgate": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": packages,
        "machine": {
            "system": platform.platform(),
            "cpu": cpu,
            "vectors": torch.backends.cpu.get_cpu_capability() + (f", oneDNN at most {most}" if most else ""),
            "cores": os.cpu_count(),
            "memory_bytes": memory,
            "accelerators": [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())],
        },
    }


def other_bits(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences to the environment before that let the same run give other bits, in words.

    >>> now = environment()
    >>> other_bits(now | {"machine": now["machine"] | {"vectors": "MMX"}}, now)[0].startswith("vectors MMX then, ")
    True
    """
    # The name of a processor says little: the same one may be sold with and without a set of instructions.
    named = [("vectors", before["machine"].get("vectors"), now["machine"]["vectors"])]
    named += [("accelerators", before["machine"]["accelerators"], now["machine"]["accelerators"])]
    named += [("torch", before["packages"].get("torch"), now["packages"].get("torch"))]
    return [f"{name} {_text(then)} then, {_text(here)} here" for name, then, here in named if then not in (None, here)]


def _text(value: str | list[str] | None) -> str:
    return value if isinstance(value, str) else ", ".join(value or []) or "none"


def _commit() -> str | None:
    """The commit of the source this runs from, with a + if files differ; None if it is an installed package."""
    here = Path(__file__).parent
    try:
        ask = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
        inside = subprocess.run(
            ["git", "-C", str(here), "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10
        )
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # A virtual environment inside somebody else's repository must not pass for that repository's commit.
    return answer.stdout.strip() or None if inside.returncode == 0 and answer.returncode == 0 else None
