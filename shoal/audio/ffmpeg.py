"""Decode and encode compressed audio with PyAV.

ffmpeg also reads playlists, scripts, image sequences and network addresses. Untrusted uploads only reach the
containers and codecs listed here, and no container can open a second file.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np

from shoal.audio.formats import AudioFormat
from shoal.audio.pcm import Samples, to_float, to_int16
from shoal.errors import AudioError, MissingExtra

if TYPE_CHECKING:
    import av
    from av.container import InputContainer

CONTAINERS = (
    "aac,ac3,aiff,amr,ape,asf,au,avi,caf,eac3,flac,flv,loas,matroska,mov,mp3,mpc,mpc8,mpeg,mpegts,nistsphere,ogg,"
    "tta,voc,w64,wav,wv"
)
CODECS = (
    "aac,aac_latm,ac3,adpcm_ima_qt,adpcm_ima_wav,adpcm_ms,alac,amrnb,amrwb,ape,eac3,flac,gsm,gsm_ms,"
    "libopencore_amrnb,libopencore_amrwb,libopus,mp1,mp1float,mp2,mp2float,mp3,mp3float,mpc7,mpc8,opus,pcm_alaw,"
    "pcm_dvd,pcm_f32be,pcm_f32le,pcm_f64be,pcm_f64le,pcm_mulaw,pcm_s16be,pcm_s16be_planar,pcm_s16le,"
    "pcm_s16le_planar,pcm_s24be,pcm_s24le,pcm_s24le_planar,pcm_s32be,pcm_s32le,pcm_s32le_planar,pcm_s8,"
    "pcm_s8_planar,pcm_u8,speex,tta,vorbis,wavpack,wmalossless,wmapro,wmav1,wmav2,wmavoice"
)
# Containers whose header states the duration; for others ffmpeg estimates it from the bitrate.
DECLARES_DURATION = {"aiff", "flac", "mov,mp4,m4a,3gp,3g2,mj2"}
NEEDS_FFMPEG = "formats other than plain wav need: pip install 'shoal-tts[formats]'"
# Damaged packets are skipped, as players do, up to this fraction of all packets.
MAX_DAMAGED_FRACTION = 0.1
MAX_STREAMS = 64
# ffmpeg's default of 5 MB takes seconds to probe on fragmented files.
PROBE_BYTES = 1 << 20
# Every packet costs a call into Python. Real packets last at least 2.5 ms; tiny ones would take hours to decode.
MAX_PACKETS, MAX_PACKETS_PER_SECOND = 1000, 1000


class ContainerInput(io.BytesIO):
    """In-memory input for ffmpeg. A seek out of range, as damaged files cause, returns -1 instead of raising."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return -1


@dataclass(slots=True)
class ContainerReader:
    """First audio stream of a container, decoded packet by packet."""

    container: InputContainer
    rate: int
    channels: int
    declared_seconds: float | None

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        """Yield (rate, samples [n, channels]). Both can change between blocks: ogg files may be chained."""
        from av import FFmpegError

        packets = damaged = 0
        seconds = 0.0
        for packet in self._packets():
            packets += 1
            if packets > MAX_PACKETS + MAX_PACKETS_PER_SECOND * seconds:
                raise AudioError("the recording has too many tiny or damaged packets")
            try:
                frames = packet.decode()
            except FFmpegError:
                damaged += 1
                continue
            for frame in frames:
                seconds += frame.samples / max(frame.sample_rate, 1)
                yield frame.sample_rate, _frame_samples(frame)
        if damaged > MAX_DAMAGED_FRACTION * packets:
            raise AudioError(f"the recording is damaged: {damaged} of {packets} packets cannot be decoded")

    def _packets(self) -> Iterator[av.Packet[av.AudioStream]]:
        from av import FFmpegError

        try:
            yield from self.container.demux(self.container.streams.audio[0])
        except FFmpegError:
            # The container is truncated. Keep what was decoded; the caller compares it with the declared duration.
            return


@contextmanager
def open_container(data: bytes) -> Iterator[ContainerReader]:
    """Open one of CONTAINERS. Raises AudioError for other data and for files without audio, MissingExtra."""
    try:
        import av
    except ImportError:
        raise MissingExtra(NEEDS_FFMPEG) from None
    options = {
        "format_whitelist": CONTAINERS,
        "codec_whitelist": CODECS,
        "protocol_whitelist": "",
        "probesize": str(PROBE_BYTES),
        "max_streams": str(MAX_STREAMS),
    }
    try:
        # Other files that a container refers to are opened as empty files; PyAV would print an exception raised here.
        container = av.open(
            ContainerInput(data),
            "r",
            container_options=options,
            metadata_errors="replace",
            io_open=lambda *_: io.BytesIO(),
        )
    except av.FFmpegError:
        raise AudioError("this is not a known audio format, or its beginning is damaged") from None
    with container:
        yield _first_audio_stream(container)


def _first_audio_stream(container: InputContainer) -> ContainerReader:
    if not container.streams.audio:
        raise AudioError("the file contains no audio stream")
    stream = container.streams.audio[0]
    if stream.codec_context is None or stream.codec_context.name not in CODECS.split(","):
        raise AudioError("the audio encoding of this file is not supported")
    if not stream.codec_context.sample_rate or not stream.codec_context.channels:
        raise AudioError("the recording has no decodable audio")
    declared = None
    if container.format.name in DECLARES_DURATION and stream.duration and stream.time_base:
        declared = float(stream.duration * stream.time_base)
    return ContainerReader(container, stream.codec_context.sample_rate, stream.codec_context.channels, declared)


def _frame_samples(frame: av.AudioFrame) -> Samples:
    channels = frame.layout.nb_channels
    pcm = to_float(frame.to_ndarray())
    return pcm.T if frame.format.is_planar else pcm.reshape(-1, channels)


@dataclass(frozen=True, slots=True)
class MuxerSettings:
    """ffmpeg settings of a format; the `live` options apply to streams, to send data without delay.

    `encoder` options trade CPU time for quality: see docs/optimization-log.md for the measurements.
    """

    container: str
    codec: str
    sample_format: Literal["s16", "flt", "fltp"]
    encoder: dict[str, str] = field(default_factory=dict)
    live_codec: dict[str, str] = field(default_factory=dict)
    live_container: dict[str, str] = field(default_factory=dict)


# From level 7 on, libopus detects speech and codes it with SILK, which takes three times as long and is less accurate
# at every bitrate from 24 kbit/s on.
OPUS_ENCODER = {"compression_level": "6"}

MUXERS = {
    # Level 2 is the highest with blocks of 27 ms instead of 105 ms.
    "flac": MuxerSettings("flac", "flac", "s16", {}, {"compression_level": "2"}, {"metadata_header_padding": "0"}),
    # The bit reservoir delays frames; the Xing header would state a duration that is not known yet.
    "mp3": MuxerSettings(
        "mp3",
        "libmp3lame",
        "fltp",
        {"compression_level": "7"},
        {"reservoir": "0"},
        {"write_xing": "0", "id3v2_version": "0"},
    ),
    # One page per packet costs 28 bytes every 20 ms; the default page size delays the first second.
    "opus": MuxerSettings("ogg", "libopus", "flt", OPUS_ENCODER, {}, {"page_duration": "20000"}),
    "aac": MuxerSettings("adts", "aac", "fltp", {"aac_coder": "fast"}),
    # A cluster is sent when it is full, here after two packets.
    "webm": MuxerSettings("webm", "libopus", "flt", OPUS_ENCODER, {}, {"live": "1", "cluster_time_limit": "40"}),
    "ulaw": MuxerSettings("mulaw", "pcm_mulaw", "s16"),
    "alaw": MuxerSettings("alaw", "pcm_alaw", "s16"),
}


class ContainerWriter:
    """Encodes samples into a sink, which stays open; `close` writes the duration into a seekable sink.

    PyAV calls the sink from C, which cannot propagate exceptions: use io.BytesIO or a buffered file, whose methods run
    no Python code. The writer may be dropped before `close`; close a file sink first.
    """

    def __init__(self, audio_format: AudioFormat, rate: int, bitrate: int | None, sink: BinaryIO) -> None:
        try:
            import av
        except ImportError:
            raise MissingExtra(f"writing {audio_format.name} needs: pip install 'shoal-tts[formats]'") from None
        muxing = MUXERS[audio_format.name]
        live = not sink.seekable()
        self._frame_class = av.AudioFrame
        self._sample_format = muxing.sample_format
        self._rate = rate
        self._position = 0
        options = {"flush_packets": "1", **muxing.live_container} if live else {}
        self._container = av.open(sink, "w", format=muxing.container, container_options=options)
        encoder = {**muxing.encoder, **(muxing.live_codec if live else {})}
        stream = self._container.add_stream(muxing.codec, rate, options=encoder)
        assert isinstance(stream, av.AudioStream)
        self._stream = stream
        self._stream.codec_context.layout = "mono"
        self._stream.codec_context.format = muxing.sample_format
        if bitrate is not None:
            self._stream.codec_context.bit_rate = bitrate
        self._container.start_encoding()
        # Container and stream form a reference cycle that only closing breaks, also for a dropped writer.
        self._release = weakref.finalize(self, self._container.close)
        self._release.atexit = False

    def write(self, samples: Samples) -> None:
        if samples.size == 0:
            return
        pcm = to_int16(samples) if self._sample_format == "s16" else np.clip(samples, -1.0, 1.0)
        frame = self._frame_class.from_ndarray(pcm[np.newaxis], self._sample_format, "mono")
        frame.sample_rate = self._rate
        frame.pts = self._position
        self._position += samples.size
        self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        self._container.mux(self._stream.encode(None))
        self._release()
