"""How much of the time some kernel is on the GPU while an engine works; those that wait for another count too."""

import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def gpu_busy_fraction(work: Callable[[], object], times: int) -> float:
    """Of the time that so many rounds of work take."""
    _watched(work, 3)  # the first look costs time of its own
    return _watched(work, times)


def _watched(work: Callable[[], object], times: int) -> float:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        began = time.perf_counter()
        for _ in range(times):
            work()
        torch.cuda.synchronize()
        microseconds = (time.perf_counter() - began) * 1e6
    spans = [
        (event.time_range.start, event.time_range.end) for event in seen.events() if event.device_type.name == "CUDA"
    ]
    return union_length(spans) / microseconds


def union_length(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
