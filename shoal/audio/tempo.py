"""Streaming change of speed at the same pitch, with ffmpeg's `atempo` filter."""

from importlib.util import find_spec
from itertools import pairwise

from shoal.errors import MissingExtra
from shoal.speech import Samples

NEEDS = "speeds other than 1 need: pip install 'shoal-tts[formats]'"
MIN_FACTOR = 0.5  # lowest factor of one filter; lower speeds use several in a row


def check_tempo() -> None:
    """Raise MissingExtra if the speed cannot be changed here."""
    if find_spec("av") is None:
        raise MissingExtra(NEEDS)


class Tempo:
    """Changes the tempo by the factor `speed`. The output lags by 50 to 120 ms until `finish`. Raises MissingExtra."""

    def __init__(self, sample_rate: int, speed: float) -> None:
        try:
            import av
        except ImportError:
            raise MissingExtra(NEEDS) from None
        self._rate, self._speed = sample_rate, speed
        self._position = self._returned = 0  # samples fed, and returned by `feed`
        self._frame_class = av.AudioFrame
        self._not_yet = (av.BlockingIOError, av.EOFError)
        self._graph = av.filter.Graph()
        nodes = [self._graph.add_abuffer(sample_rate=sample_rate, format="flt", layout="mono")]
        nodes += [self._graph.add("atempo", f"{factor:.6f}") for factor in tempo_factors(speed)]
        nodes += [self._graph.add("aformat", "sample_fmts=flt"), self._graph.add("abuffersink")]
        for before, after in pairwise(nodes):
            before.link_to(after)
        self._graph.configure()

    def feed(self, samples: Samples) -> Samples:
        if not samples.size:
            return samples
        frame = self._frame_class.from_ndarray(samples[None], "flt", "mono")
        frame.sample_rate, frame.pts = self._rate, self._position
        self._position += samples.size
        self._graph.push(frame)
        output = self._ready()
        self._returned += output.size
        return output

    def finish(self) -> Samples:
        """Flush the filters and return the last samples, cut or padded so that the output lasts exactly input / speed.

        The filters alone end up to 100 ms early or late, so word times would drift with every sentence of a session.
        """
        import numpy as np

        if self._position:
            self._graph.push(None)
        output = self._ready()
        size = max(0, round(self._position / self._speed) - self._returned)
        return np.concatenate((output[:size], np.zeros(max(0, size - output.size), np.float32)))

    def _ready(self) -> Samples:
        import numpy as np

        pieces: list[Samples] = []
        try:
            while True:
                pieces.append(self._graph.pull().to_ndarray()[0])
        except self._not_yet:
            return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


def tempo_factors(speed: float) -> list[float]:
    """Return the factors of the filters; their product is `speed`."""
    slower = []
    while speed < MIN_FACTOR:
        slower.append(MIN_FACTOR)
        speed /= MIN_FACTOR
    return [*slower, speed]
