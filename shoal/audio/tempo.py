"""Speech faster or slower at the same pitch, as a stream: ffmpeg's `atempo` over samples."""

from itertools import pairwise

from shoal.errors import MissingExtra
from shoal.speech import Samples

SLOWEST_STAGE = 0.5  # of one filter; slower speech passes several


class Tempo:
    """Samples in, samples out, `speed` times as fast. Output trails input by some 50 to 120 ms until `finish`."""

    def __init__(self, sample_rate: int, speed: float) -> None:
        try:
            import av
        except ImportError:
            raise MissingExtra("Another speed than 1 needs: pip install 'shoal[formats]'") from None
        self._rate, self._position = sample_rate, 0
        self._frame_class = av.AudioFrame
        self._not_yet = (av.BlockingIOError, av.EOFError)
        self._graph = av.filter.Graph()
        nodes = [self._graph.add_abuffer(sample_rate=sample_rate, format="flt", layout="mono")]
        nodes += [self._graph.add("atempo", f"{stage:.6f}") for stage in stages(speed)]
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
        return self._ready()

    def finish(self) -> Samples:
        """What the filter still holds. The stream is over."""
        if self._position:
            self._graph.push(None)
        return self._ready()

    def _ready(self) -> Samples:
        import numpy as np

        pieces: list[Samples] = []
        try:
            while True:
                pieces.append(self._graph.pull().to_ndarray()[0])
        except self._not_yet:
            return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


def stages(speed: float) -> list[float]:
    """The speeds of the filters whose product is `speed`."""
    slower = []
    while speed < SLOWEST_STAGE:
        slower.append(SLOWEST_STAGE)
        speed /= SLOWEST_STAGE
    return [*slower, speed]
