"""Speech out: samples to bytes, whole or as a stream.

A writer puts one format into a sink. A sink that can seek gets true lengths in its header; a sink that cannot is a
stream, and every piece leaves as soon as the codec lets it.
"""

import io
from typing import BinaryIO, Protocol

from shoal.audio.ffmpeg import ContainerWriter
from shoal.audio.formats import AudioFormat, audio_format
from shoal.audio.pcm import Samples, speech_samples, to_int16
from shoal.audio.resample import Resampler
from shoal.audio.wav import wav_header


class SampleWriter(Protocol):
    def write(self, samples: Samples) -> None: ...

    def close(self) -> None:
        """Write what is still held back. The sink stays open."""


class PcmWriter:
    """Bare little-endian 16-bit samples."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink

    def write(self, samples: Samples) -> None:
        self._sink.write(to_int16(samples).tobytes())

    def close(self) -> None:
        pass


class WavWriter(PcmWriter):
    """16-bit PCM behind a header that says 'unknown length' until the sink can be rewound."""

    def __init__(self, rate: int, sink: BinaryIO) -> None:
        super().__init__(sink)
        self._rate = rate
        self._data_bytes = 0
        sink.write(wav_header(rate))

    def write(self, samples: Samples) -> None:
        super().write(samples)
        self._data_bytes += 2 * samples.size

    def close(self) -> None:
        if self._sink.seekable():
            self._sink.seek(0)
            self._sink.write(wav_header(self._rate, self._data_bytes))
            self._sink.seek(0, io.SEEK_END)


class AudioWriter:
    """One format into one sink, from samples at `sample_rate`; `output_rate` is what the bytes carry.

    An output rate that was asked for and cannot be had is refused; without one, the samples' own rate is kept where
    the format carries it. `bitrate` is in bits per second.
    """

    def __init__(
        self,
        format: str,
        sample_rate: int,
        sink: BinaryIO,
        *,
        output_rate: int | None = None,
        bitrate: int | None = None,
    ) -> None:
        known = audio_format(format)
        self.media_type = known.media_type
        self.output_rate = known.rate_for(sample_rate) if output_rate is None else known.check_rate(output_rate)
        self._resampler = Resampler(sample_rate, self.output_rate)
        self._writer = _writer(known, self.output_rate, known.check_bitrate(bitrate), sink)

    def write(self, samples: Samples) -> None:
        self._writer.write(self._resampler.feed(speech_samples(samples)))

    def close(self) -> None:
        self._writer.write(self._resampler.finish())
        self._writer.close()


def _writer(known: AudioFormat, rate: int, bitrate: int | None, sink: BinaryIO) -> SampleWriter:
    if known.name == "pcm":
        return PcmWriter(sink)
    if known.name == "wav":
        return WavWriter(rate, sink)
    return ContainerWriter(known, rate, bitrate, sink)


class StreamBuffer(io.BytesIO):
    """Bytes on their way out. It cannot be rewound, so writers treat it as a stream."""

    def seekable(self) -> bool:
        return False

    def take(self) -> bytes:
        waiting = self.getvalue()
        self.seek(0)
        self.truncate()
        return waiting


class StreamEncoder:
    """Samples in, bytes out. Holds no file and no thread: one that is dropped midway is simply gone."""

    def __init__(self, writing: AudioWriter, outbox: StreamBuffer) -> None:
        self.media_type = writing.media_type
        self.output_rate = writing.output_rate
        self._writing: AudioWriter | None = writing
        self._outbox = outbox

    def feed(self, samples: Samples) -> bytes:
        """The bytes that are ready, header included; may be empty while the codec fills its first frame."""
        self._unfinished().write(samples)
        return self._outbox.take()

    def finish(self) -> bytes:
        """The last bytes. The encoder takes no more samples."""
        writing = self._unfinished()
        self._writing = None
        writing.close()
        return self._outbox.take()

    def _unfinished(self) -> AudioWriter:
        if self._writing is None:
            raise RuntimeError("this encoder has finished; make a new one for the next utterance")
        return self._writing


def encoder(
    format: str, sample_rate: int, *, output_rate: int | None = None, bitrate: int | None = None
) -> StreamEncoder:
    """An encoder for one utterance of samples at `sample_rate`. Raises InvalidRequest, MissingExtra."""
    outbox = StreamBuffer()
    return StreamEncoder(AudioWriter(format, sample_rate, outbox, output_rate=output_rate, bitrate=bitrate), outbox)


def encode_file(
    samples: Samples, format: str, sample_rate: int, *, output_rate: int | None = None, bitrate: int | None = None
) -> bytes:
    """A complete file, with its true length in the header where the format has a place for it."""
    sink = io.BytesIO()
    writing = AudioWriter(format, sample_rate, sink, output_rate=output_rate, bitrate=bitrate)
    writing.write(samples)
    writing.close()
    return sink.getvalue()
