"""Sampling parameters of a sequence as the numbers that every backend samples with."""

from typing import NamedTuple

from shoal.speech import SamplingParams

UNLIMITED_TOP_K = 2**31


class SamplingSettings(NamedTuple):
    """Sampling parameters of one sequence as plain numbers, in the order of `TENSOR_FIELDS`."""

    temperature: float
    top_p: float
    top_k: int
    penalty: float
    whole_window: bool  # whether the penalty applies to all semantic tokens of the window
    seed: int

    @classmethod
    def of(cls, sampling: SamplingParams) -> "SamplingSettings":
        return cls(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or UNLIMITED_TOP_K,
            penalty=sampling.repetition_penalty,
            whole_window=sampling.repetition == "window",
            seed=fold_seed(sampling.seed),
        )


def fold_seed(seed: int) -> int:
    """Hash a 64-bit seed to 32 bits."""
    return (seed ^ (seed >> 32) * 0x9E3779B1) & 0xFFFFFFFF
