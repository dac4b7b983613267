"""CPU cores and threads available to this process: its affinity, and the CPU quota of its container."""

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def default_threads(cgroups: Path = CGROUPS) -> int:
    """Return the number of engine threads: OMP_NUM_THREADS if it is set, else one per usable core."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdigit() and int(given) > 0 else usable_cores(cgroups)


def usable_cores(cgroups: Path = CGROUPS) -> int:
    """Return the number of cores that this process may use at once, at least 1.

    A container with a CPU quota sees all cores of its host. With one thread per host core, the quota is spent early in
    every scheduling period, and the kernel throttles all threads until the next one.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(cgroups)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def cpu_quota(cgroups: Path = CGROUPS) -> float | None:
    """Return the CPU quota of this container in cores (cgroup v2, then v1), None without one."""
    try:
        limit, period = (cgroups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (cgroups / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroups / "cpu" / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        quota = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):  # "max": no limit
        return None
    return quota if quota > 0 else None
