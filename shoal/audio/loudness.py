"""Loudness by EBU R 128, measured with ffmpeg's `ebur128` filter; streaming normalization and a peak limiter."""

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shoal.errors import MissingExtra
from shoal.speech import Samples

if TYPE_CHECKING:
    from av.filter import Graph

TARGET_LUFS = -16.0
MAX_GAIN = 20.0  # decibels, up or down
MAX_SLEW = 6.0  # decibels per second, once the gain is set
MAX_PEAK = 0.95  # fraction of full scale
SILENCE_LUFS = -69.9  # the filter reports -70 until it has measured something above its gate


class LoudnessMeter:
    """Integrated loudness of the samples that were fed so far. Raises MissingExtra."""

    def __init__(self, sample_rate: int) -> None:
        self._graph = _Filters(sample_rate, [("ebur128", "metadata=1:framelog=quiet")])
        self.lufs: float | None = None  # None until 0.4 s above the gate have been measured

    def feed(self, samples: Samples) -> None:
        for metadata, _ in self._graph.feed(samples):
            integrated = float(metadata["lavfi.r128.I"])
            self.lufs = integrated if integrated > SILENCE_LUFS else self.lufs


def limit_peaks(samples: Samples, sample_rate: int, ceiling: float) -> Samples:
    """Return the samples with peaks limited to `ceiling`; quieter speech is unchanged. Raises MissingExtra."""
    if not samples.size or float(np.abs(samples).max()) <= ceiling:
        return samples
    limiter = ("alimiter", f"limit={ceiling}:attack=5:release=50:level=0:latency=1")
    graph = _Filters(sample_rate, [limiter, ("aformat", "sample_fmts=flt:channel_layouts=mono")])
    pieces = [pcm for _, pcm in [*graph.feed(samples), *graph.finish()]]
    return np.clip(np.concatenate(pieces)[: samples.size], -ceiling, ceiling)


class _Filters:
    """Chain of ffmpeg filters of mono float samples."""

    def __init__(self, sample_rate: int, filters: list[tuple[str, str]]) -> None:
        try:
            import av
        except ImportError:
            raise MissingExtra("loudness normalization needs: pip install 'shoal-tts[formats]'") from None
        self._rate, self._position = sample_rate, 0
        self._frame_class = av.AudioFrame
        self._not_yet = (av.BlockingIOError, av.EOFError)
        self._graph: Graph = av.filter.Graph()
        nodes = [self._graph.add_abuffer(sample_rate=sample_rate, format="flt", layout="mono")]
        nodes += [self._graph.add(name, settings) for name, settings in [*filters, ("abuffersink", "")]]
        for before, after in pairwise(nodes):
            before.link_to(after)
        self._graph.configure()

    def feed(self, samples: Samples) -> list[tuple[dict[str, str], Samples]]:
        """Return the frames that are ready: their metadata and samples."""
        frame = self._frame_class.from_ndarray(np.ascontiguousarray(samples)[None], "flt", "mono")
        frame.sample_rate, frame.pts = self._rate, self._position
        self._position += samples.size
        self._graph.push(frame)
        return self._pull()

    def finish(self) -> list[tuple[dict[str, str], Samples]]:
        self._graph.push(None)
        return self._pull()

    def _pull(self) -> list[tuple[dict[str, str], Samples]]:
        ready: list[tuple[dict[str, str], Samples]] = []
        try:
            while True:
                frame = self._graph.pull()
                ready.append((dict(frame.metadata), frame.to_ndarray().reshape(-1).astype(np.float32, copy=False)))
        except self._not_yet:
            return ready


class LoudnessNormalizer:
    """Brings speech to `TARGET_LUFS` without delay: the gain follows the integrated loudness of what was fed so far.

    A file fed at once gets one constant gain. In a stream the gain is set as soon as 0.4 s have been measured and then
    changes by at most `MAX_SLEW`. Peaks stay below `MAX_PEAK`. Raises MissingExtra.
    """

    def __init__(self, sample_rate: int) -> None:
        self._rate, self._started = sample_rate, False
        self._meter = LoudnessMeter(sample_rate)
        self._gain: float | None = None  # decibels; None until it was measured

    def feed(self, samples: Samples) -> Samples:
        """Return the normalized samples, as many as were given."""
        if not samples.size:
            return samples
        first, self._started = not self._started, True
        self._meter.feed(samples)
        before, self._gain = self._gain, self._next_gain(samples)
        after = self._gain or 0.0
        # Audio before the first measurement had no gain, so the gain ramps from 0 dB.
        start = after if first else before or 0.0
        gains = np.linspace(start, after, samples.size, dtype=np.float32)
        louder: Samples = samples * np.power(np.float32(10), gains / np.float32(20))
        return np.clip(louder, -MAX_PEAK, MAX_PEAK)

    def _next_gain(self, samples: Samples) -> float | None:
        if self._meter.lufs is None:
            return self._gain
        gain = float(np.clip(TARGET_LUFS - self._meter.lufs, -MAX_GAIN, MAX_GAIN))
        if self._gain is not None:
            slew = MAX_SLEW * samples.size / self._rate
            gain = float(np.clip(gain, self._gain - slew, self._gain + slew))
        peak = float(np.abs(samples).max())
        return min(gain, 20 * float(np.log10(MAX_PEAK / peak))) if peak else gain
