"""Streaming resampler: the output does not depend on how the input is divided into calls."""

import atexit
import threading
from typing import TYPE_CHECKING

import numpy as np

from shoal.audio.pcm import Samples
from shoal.errors import MissingExtra

if TYPE_CHECKING:
    import soxr

Conversion = tuple[int, int, str]  # rate, output rate, quality


class StreamPool:
    """At most `size` idle soxr streams for reuse; the oldest is dropped first. Thread-safe.

    Creating a stream takes 0.1 ms, which would delay the first audio of a request. Clearing one in `give_back` takes as
    long, but after the last audio.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._idle: list[tuple[Conversion, soxr.ResampleStream]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, conversion: Conversion) -> "soxr.ResampleStream":
        """Return a stream in its initial state. Raises MissingExtra."""
        with self._lock:
            for place in reversed(range(len(self._idle))):
                if self._idle[place][0] == conversion:
                    return self._idle.pop(place)[1]
        return _new_stream(*conversion)

    def give_back(self, conversion: Conversion, stream: "soxr.ResampleStream") -> None:
        stream.clear()
        with self._lock:
            self._idle.append((conversion, stream))
            del self._idle[: -self._size]

    def clear(self) -> None:
        with self._lock:
            self._idle.clear()


STREAMS = StreamPool(64)
# soxr's extension prints a warning about every stream that is alive when the interpreter ends.
atexit.register(STREAMS.clear)


class Resampler:
    """Resamples from `rate` to `output_rate`; equal rates pass through and need no library.

    The filter looks ahead, so the output lags the input by about 15 ms until `finish`. Raises MissingExtra.
    """

    def __init__(self, rate: int, output_rate: int, *, quality: str = "HQ") -> None:
        self._conversion, self._finished = (rate, output_rate, quality), False
        self._stream = None if rate == output_rate else STREAMS.take(self._conversion)

    def feed(self, samples: Samples) -> Samples:
        return self._push(samples, last=False)

    def finish(self) -> Samples:
        """Flush the filter and return the last samples. The resampler accepts no more."""
        rest = self._push(np.zeros(0, dtype=np.float32), last=True)
        self._finished = True
        if self._stream is not None:
            STREAMS.give_back(self._conversion, self._stream)
        return rest

    def _push(self, samples: Samples, *, last: bool) -> Samples:
        if self._finished:
            raise RuntimeError("the resampler is finished; create a new one for the next signal")
        if self._stream is None:
            return samples
        resampled: Samples = self._stream.resample_chunk(samples, last)
        return resampled


def _new_stream(rate: int, output_rate: int, quality: str) -> "soxr.ResampleStream":
    try:
        import soxr
    except ImportError:
        message = f"resampling from {rate} to {output_rate} Hz needs: pip install 'shoal-tts[formats]'"
        raise MissingExtra(message) from None
    return soxr.ResampleStream(rate, output_rate, 1, dtype="float32", quality=quality)
