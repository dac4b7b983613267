"""GPU utilisation from the profiler: the share of wall time in which at least one kernel is running."""

import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def gpu_busy_fraction(work: Callable[[], object], times: int) -> float:
    """Return the busy share of `times` calls of `work`. Kernels that wait for another count as running."""
    _profile(work, 3)  # the first use of the profiler is slow
    return _profile(work, times)


def _profile(work: Callable[[], object], times: int) -> float:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        started = time.perf_counter()
        for _ in range(times):
            work()
        torch.cuda.synchronize()
        microseconds = (time.perf_counter() - started) * 1e6
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    ]
    return union_length(spans) / microseconds


def union_length(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans (start, end)."""
    total, covered = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total
