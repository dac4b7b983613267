"""Shards of codes that a language model sampled, beside the encoder's: what `training.resample` writes."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.data import write_whole


@dataclass(frozen=True)
class SampledShard:
    """Codes of a shard's utterances, the encoder's and sampled ones, both [frames, codebooks]."""

    true: NDArray[np.int16]
    sampled: NDArray[np.int16]
    offsets: NDArray[np.int64]  # [utterances] first sample of each in the shard of speech
    frames: NDArray[np.int32]  # [utterances]

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        content = io.BytesIO()
        np.savez(content, **vars(self))
        write_whole(path, content.getvalue())

    @classmethod
    def read(cls, path: Path) -> SampledShard:
        with np.load(path, allow_pickle=False) as stored:
            return cls(**stored)
