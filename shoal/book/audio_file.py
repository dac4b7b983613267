"""Write one audio file with metadata, chapter marks and a cover: m4b, m4a, mp3 or opus."""

import base64
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal.api.subtitles import timestamp
from shoal.audio.formats import AudioFormat, audio_format
from shoal.audio.resample import Resampler
from shoal.book.document import Cover
from shoal.errors import MissingExtra
from shoal.paths import output_errors, sync_directory
from shoal.speech import Samples

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import OutputContainer
    from av.container.core import Chapter
    from av.stream import Stream

COVER_CODECS = {"image/jpeg": "mjpeg", "image/png": "png"}
FRONT_COVER = 3  # picture type of FLAC and Vorbis


@dataclass(frozen=True, slots=True)
class BookFormat:
    """Container and codec of a book. `audio` names the format whose rates and bitrates apply."""

    container: str
    codec: str
    sample_format: str
    audio: str
    bitrate: int  # default in bits per second, mono speech
    media_type: str
    options: dict[str, str] = field(default_factory=dict)
    max_chapters: int | None = None  # chapter marks that one file can hold

    @property
    def limits(self) -> AudioFormat:
        return audio_format(self.audio)


# Put the index at the front, so that players on a network can start before the whole file has arrived.
MP4 = {"movflags": "+faststart"}
FORMATS = {
    "m4b": BookFormat("mp4", "aac", "fltp", "aac", 64_000, "audio/mp4", MP4 | {"brand": "M4B "}),
    "m4a": BookFormat("mp4", "aac", "fltp", "aac", 64_000, "audio/mp4", MP4 | {"brand": "M4A "}),
    "mp3": BookFormat("mp3", "libmp3lame", "fltp", "mp3", 96_000, "audio/mpeg", max_chapters=255),
    "opus": BookFormat("ogg", "libopus", "flt", "opus", 32_000, "audio/ogg", max_chapters=1000),
}


@dataclass(frozen=True, slots=True)
class ChapterMark:
    """A chapter within a file, in seconds."""

    start: float
    end: float
    title: str


@dataclass(frozen=True, slots=True)
class FileTags:
    """Metadata by the names of ffmpeg (title, artist, album, track, ...), chapter marks and cover."""

    metadata: dict[str, str]
    marks: tuple[ChapterMark, ...] = ()
    cover: Cover | None = None


def write_audio_file(
    path: Path, part: Path, format: str, bitrate: int, rate: int, tags: FileTags, samples: Iterable[Samples]
) -> None:
    """Encode samples of `rate` into `part`, on the same file system, and rename it to `path` when it is complete.

    Raises OutputError, MissingExtra.
    """
    try:
        with output_errors(path):
            _encode(part, FORMATS[format], bitrate, rate, tags, samples)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(path)
            sync_directory(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _encode(
    part: Path, format: BookFormat, bitrate: int, rate: int, tags: FileTags, samples: Iterable[Samples]
) -> None:
    try:
        import av
    except ImportError:
        raise MissingExtra("writing a book needs: pip install 'shoal-tts[formats]'") from None
    output_rate = format.limits.rate_for(rate)
    resampler, position = Resampler(rate, output_rate), 0
    with av.open(str(part), "w", format=format.container, container_options=format.options) as container:
        stream = _audio_stream(container, format, output_rate, bitrate)
        _add_tags(container, stream, tags)
        for block in samples:
            position += _write(container, stream, resampler.feed(block), output_rate, position)
        _write(container, stream, resampler.finish(), output_rate, position)
        container.mux(stream.encode(None))


def _audio_stream(container: "OutputContainer", format: BookFormat, rate: int, bitrate: int) -> "AudioStream":
    import av

    stream = container.add_stream(format.codec, rate)
    assert isinstance(stream, av.AudioStream)
    stream.codec_context.layout = "mono"
    stream.codec_context.format = format.sample_format
    stream.codec_context.bit_rate = bitrate
    return stream


def _write(container: "OutputContainer", stream: "AudioStream", samples: Samples, rate: int, position: int) -> int:
    """Encode samples at a position and return how many there were."""
    import av

    if samples.size:
        pcm = np.ascontiguousarray(np.clip(samples, -1.0, 1.0))[np.newaxis]
        frame = av.AudioFrame.from_ndarray(pcm, stream.codec_context.format.name, "mono")
        frame.sample_rate, frame.pts = rate, position
        container.mux(stream.encode(frame))
    return samples.size


def _add_tags(container: "OutputContainer", stream: "AudioStream", tags: FileTags) -> None:
    """Add metadata, marks and cover, and write the header, which holds them."""
    import av

    metadata = {name: value for name, value in tags.metadata.items() if value}
    ogg = container.format.name == "ogg"
    if ogg:
        stream.metadata.update(metadata | _chapter_comments(tags.marks))
        if tags.cover is not None:
            stream.metadata["METADATA_BLOCK_PICTURE"] = base64.b64encode(_picture_block(tags.cover)).decode()
    else:
        container.metadata.update(metadata)
        container.set_chapters([_chapter(number, mark) for number, mark in enumerate(tags.marks, 1)])
    cover = None if ogg or tags.cover is None else _cover_stream(container, tags.cover)
    container.start_encoding()
    if cover is not None and tags.cover is not None:
        packet = av.Packet(tags.cover.content)
        packet.stream, packet.pts, packet.dts, packet.is_keyframe = cover, 0, 0, True
        container.mux_one(packet)


def _chapter(number: int, mark: ChapterMark) -> "Chapter":
    start, end = round(mark.start * 1000), round(mark.end * 1000)
    return {
        "id": number,
        "start": start,
        "end": end,
        "time_base": Fraction(1, 1000),
        "metadata": {"title": mark.title},
    }


def _chapter_comments(marks: Iterable[ChapterMark]) -> dict[str, str]:
    """Return the marks as comments of ogg. ffmpeg writes them a second late from half a second on."""
    comments = {}
    for number, mark in enumerate(marks):
        comments[f"CHAPTER{number:03d}"] = timestamp(mark.start)
        comments[f"CHAPTER{number:03d}NAME"] = mark.title
    return comments


def _cover_stream(container: "OutputContainer", cover: Cover) -> "Stream":
    from av.stream import Disposition

    # Placeholder size: readers take it from the image.
    stream = container.add_mux_stream(COVER_CODECS[cover.media_type], width=1, height=1)
    stream.disposition = Disposition.attached_pic
    stream.metadata["comment"] = "Cover (front)"  # ffmpeg's name for the type of the picture in ID3
    return stream


def _picture_block(cover: Cover) -> bytes:
    """Return the cover as a FLAC picture block, which ogg files hold in a comment."""
    media_type = cover.media_type.encode()
    head = struct.pack(">II", FRONT_COVER, len(media_type)) + media_type + struct.pack(">I", 0)
    return head + struct.pack(">IIIII", 0, 0, 0, 0, len(cover.content)) + cover.content
