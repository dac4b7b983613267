"""Encode generated samples: speed, volume, sample rate and audio format."""

import io
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shoal.audio.encode import AudioWriter, StreamBuffer
from shoal.audio.formats import FORMATS, audio_format
from shoal.audio.loudness import LoudnessNormalizer
from shoal.audio.tempo import Tempo
from shoal.speech import Samples


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Audio format of a response. Raises InvalidRequest for a combination that the format does not support."""

    format: str = "wav"
    sample_rate: int | None = None  # Hz; None: the model's, or the nearest that the format supports
    bitrate: int | None = None  # bits per second; None: the encoder's default
    speed: float = 1.0
    decibels: float = 0.0
    normalize_loudness: bool = False

    def __post_init__(self) -> None:
        known = audio_format(self.format)
        known.check_bitrate(self.bitrate)
        if self.sample_rate is not None:
            known.check_rate(self.sample_rate)

    @property
    def media_type(self) -> str:
        return audio_format(self.format).media_type

    def rate_for(self, model_rate: int) -> int:
        """Return the sample rate of the output in Hz."""
        return self.sample_rate or FORMATS[self.format].rate_for(model_rate)


class OutputEncoder:
    """Encoder of one response. With `stream`, bytes are returned as soon as they are ready.

    Without `stream`, `finish` returns the whole file, whose header then has the true length. CPU-bound: call it through
    `ServerState.encode`, one call at a time. The first call opens the codec, so the constructor is cheap.
    """

    def __init__(self, options: OutputOptions, model_rate: int, *, stream: bool) -> None:
        self._options, self._model_rate, self._stream = options, model_rate, stream
        self._gain = np.float32(10.0 ** (options.decibels / 20.0))
        self._ready, self._file = StreamBuffer(), io.BytesIO()
        self._fed = False  # since the last drain

    @property
    def only_converts(self) -> bool:
        """Return whether calls only convert sample rate and dtype, which takes 0.3 ms for the largest chunk."""
        plain = self._options.speed == 1.0 and not self._options.normalize_loudness
        return self._stream and plain and self._options.format in ("pcm", "wav")

    def feed(self, samples: Samples) -> bytes:
        """Return the bytes that are ready, possibly none."""
        self._fed = True
        samples = samples if self._loudness is None else self._loudness.feed(samples)
        self._write(samples if self._tempo is None else self._tempo.feed(samples))
        return self._ready.take()

    def drain(self) -> bytes:
        """Flush the buffers of speed and rate conversion, for `stream` only; the next samples begin a new signal.

        Otherwise the end of a sentence would be sent with the next sentence, which may follow minutes later. The
        encoder of a compressed format still buffers its last frame, at most 60 ms.
        """
        if not self._fed:
            return b""
        self._fed = False
        if self._tempo is not None:
            self._write(self._tempo.finish())
            del self._tempo
        self._writer.drain()
        return self._ready.take()

    def finish(self) -> bytes:
        """Return the last bytes, or without `stream` the whole file."""
        if self._tempo is not None:
            self._write(self._tempo.finish())
        self._writer.close()
        return self._ready.take() if self._stream else self._file.getvalue()

    def _write(self, samples: Samples) -> None:
        self._writer.write(samples if self._gain == 1.0 else samples * self._gain)

    @cached_property
    def _loudness(self) -> LoudnessNormalizer | None:
        return LoudnessNormalizer(self._model_rate) if self._options.normalize_loudness else None

    @cached_property
    def _tempo(self) -> Tempo | None:
        return None if self._options.speed == 1.0 else Tempo(self._model_rate, self._options.speed)

    @cached_property
    def _writer(self) -> AudioWriter:
        return AudioWriter(
            self._options.format,
            self._model_rate,
            self._ready if self._stream else self._file,
            output_rate=self._options.sample_rate,
            bitrate=self._options.bitrate,
        )
