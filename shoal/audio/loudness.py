"""Streaming loudness normalization to a target of EBU R 128, measured with ffmpeg's `ebur128` filter."""

from itertools import pairwise

import numpy as np

from shoal.errors import MissingExtra
from shoal.speech import Samples

TARGET_LUFS = -16.0
MAX_GAIN = 20.0  # decibels, up or down
MAX_SLEW = 6.0  # decibels per second, once the gain is set
MAX_PEAK = 0.95  # of full scale
SILENCE_LUFS = -69.9  # the filter's value while nothing above its gate was heard is -70


class LoudnessNormalizer:
    """Brings speech to `TARGET_LUFS` without delay: the gain follows the integrated loudness of what was fed so far.

    A whole file that is fed at once gets one gain. A stream gets its first gain as soon as 0.4 s were measured, and
    changes it by at most `MAX_SLEW` from then on. Peaks stay below `MAX_PEAK`. Raises MissingExtra.
    """

    def __init__(self, sample_rate: int) -> None:
        try:
            import av
        except ImportError:
            raise MissingExtra("loudness normalization needs: pip install 'shoal[formats]'") from None
        self._rate, self._position = sample_rate, 0
        self._frame_class = av.AudioFrame
        self._not_yet = (av.BlockingIOError, av.EOFError)
        self._graph = av.filter.Graph()
        nodes = [self._graph.add_abuffer(sample_rate=sample_rate, format="flt", layout="mono")]
        nodes += [self._graph.add("ebur128", "metadata=1:framelog=quiet"), self._graph.add("abuffersink")]
        for before, after in pairwise(nodes):
            before.link_to(after)
        self._graph.configure()
        self._loudness: float | None = None  # LUFS
        self._gain: float | None = None  # decibels; None until it was measured

    def feed(self, samples: Samples) -> Samples:
        """Return as many samples as were given."""
        if not samples.size:
            return samples
        first = not self._position
        self._measure(samples)
        before, self._gain = self._gain, self._next_gain(samples)
        after = self._gain or 0.0
        # What was sent before the first measurement had no gain: from there on, too, the gain changes gradually.
        start = after if first else before or 0.0
        gains = np.linspace(start, after, samples.size, dtype=np.float32)
        louder: Samples = samples * np.power(np.float32(10), gains / np.float32(20))
        return np.clip(louder, -MAX_PEAK, MAX_PEAK)

    def _next_gain(self, samples: Samples) -> float | None:
        if self._loudness is None:
            return self._gain
        gain = float(np.clip(TARGET_LUFS - self._loudness, -MAX_GAIN, MAX_GAIN))
        if self._gain is not None:
            slew = MAX_SLEW * samples.size / self._rate
            gain = float(np.clip(gain, self._gain - slew, self._gain + slew))
        peak = float(np.abs(samples).max())
        return min(gain, 20 * float(np.log10(MAX_PEAK / peak))) if peak else gain

    def _measure(self, samples: Samples) -> None:
        frame = self._frame_class.from_ndarray(np.ascontiguousarray(samples)[None], "flt", "mono")
        frame.sample_rate, frame.pts = self._rate, self._position
        self._position += samples.size
        self._graph.push(frame)
        try:
            while True:
                integrated = float(self._graph.pull().metadata["lavfi.r128.I"])
                self._loudness = integrated if integrated > SILENCE_LUFS else self._loudness
        except self._not_yet:
            return
