"""Description of the machine that a measurement ran on, and its background load."""

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal import __version__
from shoal.cores import usable_cores

if TYPE_CHECKING:
    import torch


def machine(device: "torch.device") -> dict[str, str | int]:
    """Return the hardware and versions that matter when comparing figures."""
    import numpy as np
    import torch

    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "shoal": __version__,
    }


def processor() -> str:
    """Return the model name of the CPU; its architecture if the system does not report one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def describe_client() -> dict[str, str | int]:
    """Return the description of the load generator's machine, without importing torch."""
    return {
        "device": processor(),
        "cores": usable_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "shoal": __version__,
    }


class BackgroundLoad:
    """CPU load of other processes, measured from construction."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def share(self) -> float | None:
        """Return the share of all cores used by other processes, 0 to 1; None if the system does not report it."""
        busy, seconds = _busy_seconds(), time.monotonic() - self._started
        if busy is None or self._busy is None or seconds <= 0:
            return None
        others = (busy - self._busy) - (_own_seconds() - self._own)
        return round(min(1.0, max(0.0, others / (seconds * (os.cpu_count() or 1)))), 3)


def _busy_seconds() -> float | None:
    """Return the busy CPU seconds of all cores since boot; None if unknown."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Return the CPU seconds of this process and its finished children."""
    return sum(os.times()[:4])
