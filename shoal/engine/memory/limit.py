"""What `gpu_memory` asks for: a share of a device, or bytes of it. Servers check it without torch."""

import re

from shoal.errors import InvalidRequest

UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_memory_limit(text: str, total: int) -> int:
    """`0.9` of `total` bytes, or a size such as 4GB. Raises InvalidRequest."""
    number, is_share = read_memory_limit(text)
    cap = number * total if is_share else number
    if cap > total:
        raise InvalidRequest(f"gpu_memory = {text!r}: this device has {total / 1e9:.1f} GB")
    return int(cap)


def read_memory_limit(text: str) -> tuple[float, bool]:
    """The number, and whether it is a share; else it is bytes. Raises InvalidRequest for what no device could give."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in UNITS:
        raise InvalidRequest(f"gpu_memory = {text!r} is neither a share such as 0.9 nor a size such as 4GB")
    number, unit = float(found[1]), found[2]
    if not number:
        raise InvalidRequest(f"gpu_memory = {text!r} leaves the engine nothing")
    if not unit and 1 < number < UNITS["mb"]:
        raise InvalidRequest(f"gpu_memory = {text!r} lacks a unit, as in 4GB; a share of the device is at most 1")
    return number * UNITS[unit], not unit and number <= 1
