"""Main memory as a container sees it."""

import os
from pathlib import Path

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def usable_bytes(limits: tuple[Path, ...] = CGROUP_LIMITS) -> int:
    """What this machine has, or less if the container is given less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    given = [int(path.read_text()) for path in limits if path.is_file() and path.read_text().strip().isdigit()]
    return min(total, *given) if given else total
