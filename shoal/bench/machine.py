"""What a figure was measured on."""

import os
import platform
from pathlib import Path

import numpy as np
import torch

from shoal import __version__


def machine(device: torch.device) -> dict[str, str | int]:
    """Names and versions that a reader needs to compare figures."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "shoal": __version__,
    }


def processor() -> str:
    """The name on the chip, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
