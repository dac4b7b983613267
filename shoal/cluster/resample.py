"""Keep the sample rate of a stream constant across model upgrades."""

from dataclasses import replace

import numpy as np

from shoal.audio.resample import Resampler
from shoal.speech import AudioChunk


class ChunkResampler:
    """Resamples the chunks of one utterance to a fixed rate.

    During an upgrade the replica may run a model with another rate than the one announced to the client.
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
