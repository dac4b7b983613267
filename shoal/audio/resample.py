"""Streaming resampler: the output does not depend on how the input is divided."""

import numpy as np

from shoal.audio.pcm import Samples
from shoal.errors import MissingExtra


class Resampler:
    """Resamples from `rate` to `output_rate`; equal rates pass through and need no library.

    The filter looks ahead, so the output lags the input by about 15 ms until `finish`. Raises MissingExtra.
    """

    def __init__(self, rate: int, output_rate: int, *, quality: str = "HQ") -> None:
        self._stream = None
        if rate == output_rate:
            return
        try:
            import soxr
        except ImportError:
            message = f"resampling from {rate} to {output_rate} Hz needs: pip install 'shoal-tts[formats]'"
            raise MissingExtra(message) from None
        self._stream = soxr.ResampleStream(rate, output_rate, 1, dtype="float32", quality=quality)

    def feed(self, samples: Samples) -> Samples:
        return self._push(samples, last=False)

    def finish(self) -> Samples:
        """Flush the filter and return the last samples."""
        return self._push(np.zeros(0, dtype=np.float32), last=True)

    def _push(self, samples: Samples, *, last: bool) -> Samples:
        if self._stream is None:
            return samples
        resampled: Samples = self._stream.resample_chunk(samples, last)
        return resampled
