"""From the engine's samples to the bytes a client asked for: speed, volume, rate, format."""

import io
from dataclasses import dataclass

import numpy as np

from shoal.audio.encode import AudioWriter, StreamBuffer
from shoal.audio.formats import FORMATS, audio_format
from shoal.audio.tempo import Tempo
from shoal.speech import Samples


@dataclass(frozen=True, slots=True)
class Rendering:
    """`sample_rate` None keeps the model's where the format carries it; `bitrate` is in bits per second."""

    format: str = "wav"
    sample_rate: int | None = None
    bitrate: int | None = None
    speed: float = 1.0
    decibels: float = 0.0

    def __post_init__(self) -> None:
        known = audio_format(self.format)
        known.check_bitrate(self.bitrate)
        if self.sample_rate is not None:
            known.check_rate(self.sample_rate)

    @property
    def media_type(self) -> str:
        return audio_format(self.format).media_type

    def rate_for(self, model_rate: int) -> int:
        return self.sample_rate or FORMATS[self.format].rate_for(model_rate)


class Renderer:
    """One utterance. Without `stream`, all bytes come at the end, with true lengths in their header.

    Not cheap: call it in a thread.
    """

    def __init__(self, rendering: Rendering, model_rate: int, *, stream: bool) -> None:
        self._tempo = None if rendering.speed == 1.0 else Tempo(model_rate, rendering.speed)
        self._gain = np.float32(10.0 ** (rendering.decibels / 20.0))
        self._outbox, self._whole = StreamBuffer(), io.BytesIO()
        self._stream = stream
        self._writing = AudioWriter(
            rendering.format,
            model_rate,
            self._outbox if stream else self._whole,
            output_rate=rendering.sample_rate,
            bitrate=rendering.bitrate,
        )

    def feed(self, samples: Samples) -> bytes:
        """The bytes that are ready, perhaps none."""
        self._write(samples if self._tempo is None else self._tempo.feed(samples))
        return self._outbox.take()

    def finish(self) -> bytes:
        """The last bytes, or without `stream` all of them."""
        if self._tempo is not None:
            self._write(self._tempo.finish())
        self._writing.close()
        return self._outbox.take() if self._stream else self._whole.getvalue()

    def _write(self, samples: Samples) -> None:
        self._writing.write(samples * self._gain)
