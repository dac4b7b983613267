"""Values of the rotary table for the native backend, without torch."""

import numpy as np
from numpy.typing import NDArray


def rope_values(length: int, head_dim: int, base: float) -> NDArray[np.float32]:
    """Return (cos, sin) [length, head_dim // 2, 2] in fp32, rounded to values that bf16 can represent.

    Angles are rounded to fp32 as in training. Powers, cosines and sines are computed in fp64, so that the last bit,
    which can survive the rounding to bf16, does not depend on the machine.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = np.float32(1) / np.power(np.float64(base), exponent.astype(np.float64)).astype(np.float32)
    angle = np.outer(np.arange(length, dtype=np.float32), frequency).astype(np.float64)
    return round_to_bfloat16(np.stack((np.cos(angle), np.sin(angle)), axis=-1).astype(np.float32))


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return finite values rounded to the nearest that bf16 can represent; ties go to the even one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)
