"""Sample rates, as a stream: pieces of any sizes give the samples of the whole."""

import numpy as np

from shoal.audio.pcm import Samples
from shoal.errors import MissingExtra


class Resampler:
    """Feeds samples of one rate, returns them at another; equal rates pass through and need no library.

    The filter looks ahead, so output trails input by some 15 ms until `finish`.
    """

    def __init__(self, rate: int, output_rate: int, *, quality: str = "HQ") -> None:
        self._stream = None
        if rate == output_rate:
            return
        try:
            import soxr
        except ImportError:
            message = f"Resampling from {rate} to {output_rate} Hz needs: pip install 'shoal[formats]'"
            raise MissingExtra(message) from None
        self._stream = soxr.ResampleStream(rate, output_rate, 1, dtype="float32", quality=quality)

    def feed(self, samples: Samples) -> Samples:
        return self._push(samples, last=False)

    def finish(self) -> Samples:
        """What the filter still holds. The stream is over."""
        return self._push(np.zeros(0, dtype=np.float32), last=True)

    def _push(self, samples: Samples, *, last: bool) -> Samples:
        if self._stream is None:
            return samples
        resampled: Samples = self._stream.resample_chunk(samples, last)
        return resampled
