"""What a piece of code really costs: FLOPs, peak tensor bytes, seconds. Measured, not estimated."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
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
    """Most bytes of CPU tensors, among those that a call allocates, at once.

    Tensors from before the call count neither while they are held nor when the call frees them: gradients that wait
    for `zero_grad`, say, would otherwise make the next step look smaller than it is.

    >>> peak_bytes(lambda: torch.ones(256, 256).add(1)) >= 2 * 4 * 256 * 256
    True
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        function()
    assert prof.profiler is not None
    held: dict[int, int] = {}  # by address
    now = peak = 0
    for pointer, size in _allocations(prof.profiler.kineto_results.experimental_event_tree()):
        if size > 0:
            held[pointer] = size
            now += size
        else:
            now -= held.pop(pointer, 0)
        peak = max(peak, now)
    return peak


def _allocations(tree: Iterable[Any]) -> list[tuple[int, int]]:
    """Addresses and bytes (more than 0: allocated, less: freed) in the order of time."""
    allocations, events = [], list(tree)
    while events:
        event = events.pop()
        events += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            allocations.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(pointer, size) for _, pointer, size in sorted(allocations, key=lambda one: one[0])]


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
