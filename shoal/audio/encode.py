"""Encode samples as a file or as a stream.

A writer writes one format into a sink. A seekable sink gets the actual length in its header; any other sink is a
stream, which receives encoded bytes as soon as the codec produces them.
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
        """Flush the codec. The sink stays open."""


class PcmWriter:
    """Headerless little-endian 16-bit samples."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink

    def write(self, samples: Samples) -> None:
        self._sink.write(to_int16(samples).tobytes())

    def close(self) -> None:
        pass


class WavWriter(PcmWriter):
    """16-bit PCM with a header of unknown length, which `close` corrects in a seekable sink."""

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
    """Resamples from `sample_rate` to `output_rate` and encodes one format into a sink.

    The default output rate is `sample_rate`, or the nearest rate that the format supports. `bitrate` is in bits per
    second. Raises InvalidRequest for rates that the format does not support, MissingExtra.
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
        self._sample_rate = sample_rate
        self._resampler = Resampler(sample_rate, self.output_rate)
        self._writer = _writer(known, self.output_rate, known.check_bitrate(bitrate), sink)

    def write(self, samples: Samples) -> None:
        self._writer.write(self._resampler.feed(speech_samples(samples)))

    def drain(self) -> None:
        """Flush the resampler; later samples begin a new signal."""
        self._writer.write(self._resampler.finish())
        self._resampler = Resampler(self._sample_rate, self.output_rate)

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
    """Encoded bytes that have not been taken yet. Not seekable, so writers treat it as a stream."""

    def seekable(self) -> bool:
        return False

    def take(self) -> bytes:
        content = self.getvalue()
        self.seek(0)
        self.truncate()
        return content


class StreamEncoder:
    """Incremental encoder of one utterance. Holds no file or thread, so it may be dropped at any time."""

    def __init__(self, writing: AudioWriter, buffer: StreamBuffer) -> None:
        self.media_type = writing.media_type
        self.output_rate = writing.output_rate
        self._writing: AudioWriter | None = writing
        self._buffer = buffer

    def feed(self, samples: Samples) -> bytes:
        """Encode samples and return the bytes that are ready; empty while the codec fills its first frame."""
        self._unfinished().write(samples)
        return self._buffer.take()

    def finish(self) -> bytes:
        """Flush the codec and return the last bytes. The encoder accepts no more samples."""
        writing = self._unfinished()
        self._writing = None
        writing.close()
        return self._buffer.take()

    def _unfinished(self) -> AudioWriter:
        if self._writing is None:
            raise RuntimeError("the encoder is finished; create a new one for the next utterance")
        return self._writing


def encoder(
    format: str, sample_rate: int, *, output_rate: int | None = None, bitrate: int | None = None
) -> StreamEncoder:
    """Create an encoder for one utterance of samples at `sample_rate`. Raises InvalidRequest, MissingExtra."""
    buffer = StreamBuffer()
    return StreamEncoder(AudioWriter(format, sample_rate, buffer, output_rate=output_rate, bitrate=bitrate), buffer)


def encode_file(
    samples: Samples, format: str, sample_rate: int, *, output_rate: int | None = None, bitrate: int | None = None
) -> bytes:
    """Encode a complete file, with its length in the header where the format has one."""
    sink = io.BytesIO()
    writing = AudioWriter(format, sample_rate, sink, output_rate=output_rate, bitrate=bitrate)
    writing.write(samples)
    writing.close()
    return sink.getvalue()
