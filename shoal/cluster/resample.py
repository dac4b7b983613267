"""One rate for a whole stream, whichever model speaks it."""

from dataclasses import replace

import numpy as np

from shoal.audio.resample import Resampler
from shoal.speech import AudioChunk


class ChunkResampler:
    """For one utterance. While an upgrade goes on, a front may know one model and the replica run another, of another
    rate: what was promised to the listener holds.
    """

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._resampler: Resampler | None = None

    def __call__(self, chunk: AudioChunk) -> AudioChunk:
        if chunk.sample_rate == self._rate:
            return chunk
        if self._resampler is None:
            self._resampler = Resampler(chunk.sample_rate, self._rate)
        samples = self._resampler.feed(chunk.samples)
        if chunk.finish is not None:
            samples = np.concatenate((samples, self._resampler.finish()))
        return replace(chunk, samples=samples, sample_rate=self._rate)
