"""Memory limit of this container."""

import os
from pathlib import Path

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def usable_bytes(limits: tuple[Path, ...] = CGROUP_LIMITS) -> int:
    """Return the physical memory of the machine, or the cgroup limit of the container if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cgroup_limits = [int(path.read_text()) for path in limits if path.is_file() and path.read_text().strip().isdigit()]
    return min(total, *cgroup_limits) if cgroup_limits else total
