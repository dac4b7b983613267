"""Everything that touches PyAV: compressed audio in and out.

ffmpeg reads far more than recordings: playlists, scripts, image sequences, network addresses. What a stranger uploads
meets only the containers and codecs listed here, and no container can open a second file.
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
# Containers whose header states the length; elsewhere ffmpeg's figure is a guess from the bitrate.
STATES_ITS_LENGTH = {"aiff", "flac", "mov,mp4,m4a,3gp,3g2,mj2"}
# Players skip a damaged packet, and so do we; a recording with many of them is not worth a voice.
DAMAGED_SHARE = 0.1
# ffmpeg looks at 5 MB before it gives up on a stream, which takes it seconds when they are made of fragments.
BYTES_TO_PROBE = 1 << 20
# Every packet costs a trip through Python. Real ones last 2.5 ms and more; a file of crumbs would keep us for hours.
MAX_PACKETS, MAX_PACKETS_PER_SECOND = 1000, 1000


class ContainerInput(io.BytesIO):
    """Bytes for ffmpeg. A damaged file may ask for an impossible place: that is an answer, not an exception."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return -1


@dataclass(slots=True)
class ContainerReader:
    """The first audio stream of a container, decoded packet by packet."""

    container: InputContainer
    rate: int
    channels: int
    declared_seconds: float | None

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        """(rate, samples [n, channels]) until the end. Both can change midway: ogg files may be chained."""
        from av import FFmpegError

        packets = damaged = 0
        seconds = 0.0
        for packet in self._packets():
            packets += 1
            if packets > MAX_PACKETS + MAX_PACKETS_PER_SECOND * seconds:
                raise AudioError("The recording is cut into too many tiny packets, or most of them are damaged.")
            try:
                frames = packet.decode()
            except FFmpegError:
                damaged += 1
                continue
            for frame in frames:
                seconds += frame.samples / max(frame.sample_rate, 1)
                yield frame.sample_rate, _frame_samples(frame)
        if damaged > DAMAGED_SHARE * packets:
            raise AudioError(f"The recording is damaged: {damaged} of {packets} packets cannot be decoded.")

    def _packets(self) -> Iterator[av.Packet[av.AudioStream]]:
        from av import FFmpegError

        try:
            yield from self.container.demux(self.container.streams.audio[0])
        except FFmpegError:
            # The container breaks off. What came before counts; the caller compares it with the promised length.
            return


@contextmanager
def open_container(data: bytes) -> Iterator[ContainerReader]:
    """A reader for any container of the list above; AudioError when there is none, or no audio in it."""
    try:
        import av
    except ImportError:
        raise MissingExtra("Reading anything but plain wav needs: pip install 'shoal[formats]'") from None
    options = {
        "format_whitelist": CONTAINERS,
        "codec_whitelist": CODECS,
        "protocol_whitelist": "",
        "probesize": str(BYTES_TO_PROBE),
    }
    try:
        # Whatever else a container asks to open is an empty file; raising here would be printed by PyAV.
        container = av.open(
            ContainerInput(data),
            "r",
            container_options=options,
            metadata_errors="replace",
            io_open=lambda *_: io.BytesIO(),
        )
    except av.FFmpegError:
        raise AudioError("This is not a recording in a known audio format, or its beginning is damaged.") from None
    with container:
        yield _first_audio_stream(container)


def _first_audio_stream(container: InputContainer) -> ContainerReader:
    if not container.streams.audio:
        raise AudioError("The file holds no audio stream.")
    stream = container.streams.audio[0]
    if stream.codec_context is None or stream.codec_context.name not in CODECS.split(","):
        raise AudioError("The audio in this file is in an unknown encoding.")
    if not stream.codec_context.sample_rate or not stream.codec_context.channels:
        raise AudioError("Nothing in the recording can be decoded.")
    promised = None
    if container.format.name in STATES_ITS_LENGTH and stream.duration and stream.time_base:
        promised = float(stream.duration * stream.time_base)
    return ContainerReader(container, stream.codec_context.sample_rate, stream.codec_context.channels, promised)


def _frame_samples(frame: av.AudioFrame) -> Samples:
    channels = frame.layout.nb_channels
    pcm = to_float(frame.to_ndarray())
    return pcm.T if frame.format.is_planar else pcm.reshape(-1, channels)


@dataclass(frozen=True, slots=True)
class MuxerSettings:
    """How ffmpeg writes a format: whole, with lengths in its header, or live, each piece leaving at once."""

    container: str
    codec: str
    sample_format: Literal["s16", "flt", "fltp"]
    live_codec: dict[str, str] = field(default_factory=dict)
    live_container: dict[str, str] = field(default_factory=dict)


MUXERS = {
    # Level 2 is the highest that cuts blocks of 27 ms instead of 105 ms.
    "flac": MuxerSettings("flac", "flac", "s16", {"compression_level": "2"}, {"metadata_header_padding": "0"}),
    # The reservoir lets a frame wait for bits of later ones; the Xing header states a length nobody knows yet.
    "mp3": MuxerSettings("mp3", "libmp3lame", "fltp", {"reservoir": "0"}, {"write_xing": "0", "id3v2_version": "0"}),
    # A page per packet costs 28 bytes every 20 ms; the usual page would hold the first second back.
    "opus": MuxerSettings("ogg", "libopus", "flt", {}, {"page_duration": "20000"}),
    "aac": MuxerSettings("adts", "aac", "fltp"),
    # Clusters leave when they are full, here after two packets.
    "webm": MuxerSettings("webm", "libopus", "flt", {}, {"live": "1", "cluster_time_limit": "40"}),
}


class ContainerWriter:
    """Encodes samples into a sink. A sink that can seek gets lengths in its header when closed; the sink stays open.

    PyAV calls the sink from C, where an exception has nowhere to go: give it io.BytesIO or a buffered file, whose
    methods run no Python code. Dropping the writer before `close` is fine; close a file sink first.
    """

    def __init__(self, audio_format: AudioFormat, rate: int, bitrate: int | None, sink: BinaryIO) -> None:
        try:
            import av
        except ImportError:
            raise MissingExtra(f"Writing {audio_format.name} needs: pip install 'shoal[formats]'") from None
        muxing = MUXERS[audio_format.name]
        live = not sink.seekable()
        self._frame_class = av.AudioFrame
        self._sample_format = muxing.sample_format
        self._rate = rate
        self._position = 0
        options = {"flush_packets": "1", **muxing.live_container} if live else {}
        self._container = av.open(sink, "w", format=muxing.container, container_options=options)
        stream = self._container.add_stream(muxing.codec, rate, options=muxing.live_codec if live else {})
        assert isinstance(stream, av.AudioStream)
        self._stream = stream
        self._stream.codec_context.layout = "mono"
        self._stream.codec_context.format = muxing.sample_format
        if bitrate is not None:
            self._stream.codec_context.bit_rate = bitrate
        self._container.start_encoding()
        # Container and stream refer to each other: closing is what parts them, also when the writer is dropped.
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
