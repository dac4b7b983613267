"""Number of threads that the cores of this process allow: its affinity, and the CPU quota of its container."""

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def default_threads(cgroups: Path = CGROUPS) -> int:
    """Return the threads that an engine uses: as OMP_NUM_THREADS says, or one per core that may be used."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdigit() and int(given) > 0 else usable_cores(cgroups)


def usable_cores(cgroups: Path = CGROUPS) -> int:
    """Return the cores that this process may use at once, at least 1.

    A container with a CPU quota sees all cores of its host. With a thread on each of them the quota is spent after a
    fraction of every period, and all threads stop until the next.
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
