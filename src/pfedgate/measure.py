"""What a piece of code really costs: FLOPs, peak tensor bytes, seconds. Measured, not estimated."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode


def flops(function: Callable[[], Any]) -> int:
    """Floating point operations of a call, as `torch.utils.flop_counter` counts them (matrix products only).

    >>> a = torch.ones(2, 3)
    >>> flops(lambda: a @ a.T)
    24
    """
    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())


def peak_bytes(function: Callable[[], Any]) -> int:
    """Most bytes of CPU tensors allocated at once during a call, on top of what was there before.

    >>> peak_bytes(lambda: torch.ones(256, 256).add(1)) >= 2 * 4 * 256 * 256
    True
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        function()
    assert prof.profiler is not None
    events = [(e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for _, nbytes in sorted(events, key=lambda event: event[0]):
        now += nbytes
        peak = max(peak, now)
    return peak


def interleaved(functions: Mapping[str, Callable[[], Any]], repeats: int = 15, warmup: int = 2) -> dict[str, float]:
    """Median seconds of each function, called in turn so that a noisy machine disturbs all alike.

    >>> sorted(interleaved({"a": lambda: None, "b": lambda: None}, repeats=3))
    ['a', 'b']
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, Any]:
    """What a measured figure must be read with."""
    import os
    import platform

    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
