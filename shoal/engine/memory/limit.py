"""Parse the setting `gpu_memory`: a fraction of the device, or a size. Does not import torch."""

import re

from shoal.errors import InvalidRequest

UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_memory_limit(text: str, total: int) -> int:
    """Return the limit in bytes of a fraction such as 0.9 of `total`, or a size such as 4GB. Raises InvalidRequest."""
    number, is_fraction = read_memory_limit(text)
    limit = number * total if is_fraction else number
    if limit > total:
        raise InvalidRequest(f"gpu_memory = {text!r}: this device has {total / 1e9:.1f} GB")
    return int(limit)


def read_memory_limit(text: str) -> tuple[float, bool]:
    """Return the number, and true if it is a fraction, false if it is in bytes. Raises InvalidRequest."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in UNITS:
        raise InvalidRequest(f"gpu_memory = {text!r} is neither a fraction such as 0.9 nor a size such as 4GB")
    number, unit = float(found[1]), found[2]
    if not number:
        raise InvalidRequest(f"gpu_memory = {text!r} is 0; use a fraction such as 0.9 or a size such as 4GB")
    if not unit and 1 < number < UNITS["mb"]:
        raise InvalidRequest(f"gpu_memory = {text!r} has no unit: use a size such as 4GB, or a fraction of at most 1")
    return number * UNITS[unit], not unit and number <= 1
