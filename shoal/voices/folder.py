"""One voice on disk: a directory of recordings, each with a transcript file of the same stem.

    sample.wav                       the uploaded file, in any of SUFFIXES; any number of them, ordered by name
    sample.lab                       its transcript, UTF-8
    voice.json                       written by Shoal: creation time and details of the recordings
    description.json                 optional: title, description, gender, accent, preview (description.py)
    codes-<fingerprint>-<hash>.npy   written by Shoal: codes of the recording with that hash, by that codec

The first two are upstream's layout and are sufficient. The directory is held open while it is read, and links are not
followed: even during a concurrent rename, only regular files of this directory are read.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np

from shoal.audio.decode import DecodedAudio
from shoal.errors import InvalidRequest
from shoal.paths import sync_directory
from shoal.text.prompt import Codes
from shoal.voices.description import NO_DESCRIPTION, VoiceDescription, read_description
from shoal.voices.voice import BrokenVoice, VoiceLimits, check_transcript

SUFFIXES = (".mp3", ".wav", ".flac", ".ogg", ".m4a", ".wma", ".aac", ".aiff", ".aif", ".aifc")
TRANSCRIPT = ".lab"
DETAILS = "voice.json"
DESCRIPTION = "description.json"
CODES = "codes-*.npy"
DETAILS_BYTES = 1 << 20
DESCRIPTION_BYTES = 1 << 14

# The .npy header of an int32 array [codebooks, frames]: magic, version 1.0, header length, header.
CODES_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00v\x00{'descr': '<i4', 'fortran_order': False, 'shape': \(([1-9]\d*), ([1-9]\d*)\), } *\n"
)
CODES_HEADER_BYTES = 128
MAX_CODES_BYTES = 16 << 20  # five hours of ten codebooks

# (offset, magic bytes, suffix)
MAGIC_BYTES = (
    (8, b"WAVE", ".wav"),
    (0, b"fLaC", ".flac"),
    (0, b"OggS", ".ogg"),
    (4, b"ftyp", ".m4a"),
    (8, b"AIFC", ".aifc"),
    (8, b"AIFF", ".aiff"),
    (0, b"ID3", ".mp3"),
    (0, b"\xff\xfb", ".mp3"),
    (0, b"\xff\xf3", ".mp3"),
    (0, b"\xff\xf1", ".aac"),
    (0, b"\xff\xf9", ".aac"),
    (0, b"\x30\x26\xb2\x75", ".wma"),
)

Stamp: TypeAlias = tuple[tuple[str, int, int, int], ...]  # per file: name, inode, size, mtime in ns


@dataclass(frozen=True, slots=True)
class RecordingDetails:
    file: str
    seconds: float
    sample_rate: int  # rate of the file, before resampling to the codec's rate
    channels: int
    sha256: str


@dataclass(frozen=True, slots=True)
class VoiceDetails:
    """Content of voice.json. The name of the voice is the name of the directory."""

    created: str  # ISO 8601, UTC
    recordings: tuple[RecordingDetails, ...]

    @property
    def seconds(self) -> float:
        return sum(recording.seconds for recording in self.recordings)


@dataclass(frozen=True, slots=True)
class Folder:
    """An open voice directory. Its methods raise BrokenVoice, which names the voice and the file."""

    name: str
    path: Path
    fd: int

    @property
    def moved(self) -> bool:
        """Return whether the directory was renamed or deleted after it was opened."""
        try:
            return not os.path.samestat(os.fstat(self.fd), self.path.lstat())
        except OSError:
            return True

    @property
    def empty(self) -> bool:
        return not self._files()

    @property
    def complete(self) -> bool:
        """Return whether at least one recording has a transcript, as upstream requires for its list of voices."""
        files = [file for file, plain in self._files().items() if plain]
        return any(transcript_name(file) in files for file in audio_names(files))

    def foreign(self) -> list[str]:
        """Return the names that are not part of a voice. Links are not reported: deleting a link keeps its target."""
        try:
            with os.scandir(self.fd) as entries:
                return sorted(entry.name for entry in entries if not (entry.is_symlink() or belongs(entry)))
        except OSError as error:
            raise self.broken(None, reason(error)) from error

    def recordings(self) -> list[str]:
        """Return the file names of the recordings. Raises BrokenVoice if there is none, or one without transcript."""
        files = self._files()
        recordings = audio_names(files)
        if not recordings:
            raise self.broken(None, "contains no recording")
        for recording in recordings:
            if transcript_name(recording) not in files:
                raise self.broken(recording, f"the transcript {transcript_name(recording)!r} is missing")
        return recordings

    def stamp(self) -> Stamp:
        """Return a value that changes with any recording or transcript, but not when codes are added."""
        files = [file for recording in self.recordings() for file in (recording, transcript_name(recording))]
        return tuple(self._stamp(file) for file in files)

    def audio(self, recording: str, limits: VoiceLimits) -> bytes:
        return self.read(recording, limits.audio.max_bytes)

    def transcript(self, recording: str, limits: VoiceLimits) -> str:
        file = transcript_name(recording)
        # A UTF-8 character has at most four bytes; the extra bytes allow for white space.
        stored = self.read(file, 4 * limits.max_transcript + 1024)
        try:
            return check_transcript(stored.decode("utf-8-sig"), limits)
        except (InvalidRequest, UnicodeDecodeError) as error:
            raise self.broken(file, error) from error

    def details(self) -> VoiceDetails | None:
        """Return the details, or None for a directory that was not created by a store."""
        if DETAILS not in self._files():
            return None
        try:
            stored = json.loads(self.read(DETAILS, DETAILS_BYTES))
            recordings = tuple(RecordingDetails(**recording) for recording in stored.pop("recordings"))
            return VoiceDetails(recordings=recordings, **stored)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self.broken(DETAILS, f"cannot be parsed: {error}") from error

    def description(self) -> VoiceDescription:
        """Return the description, empty without a file."""
        if DESCRIPTION not in self._files():
            return NO_DESCRIPTION
        try:
            return read_description(self.read(DESCRIPTION, DESCRIPTION_BYTES))
        except BrokenVoice:
            raise
        except InvalidRequest as error:
            raise self.broken(DESCRIPTION, error) from error

    def codes(self, file: str) -> Codes | None:
        """Return stored codes, or None if the file is missing or invalid."""
        try:
            with self._open(file) as opened:
                return read_codes(opened)
        except (OSError, ValueError, OverflowError):
            return None

    def read(self, file: str, max_bytes: int) -> bytes:
        try:
            with self._open(file) as opened:
                content = opened.read(max_bytes + 1)
        except OSError as error:
            raise self.broken(file, reason(error)) from error
        if len(content) > max_bytes:
            raise self.broken(file, f"larger than {max_bytes} bytes")
        return content

    def broken(self, file: str | None, error: object) -> BrokenVoice:
        place = f"voice {self.name!r}" if file is None else f"voice {self.name!r}, file {file!r}"
        return BrokenVoice(f"{place}: {error}")

    def _files(self) -> dict[str, bool]:
        """Return all names, and whether each is a regular file."""
        try:
            with os.scandir(self.fd) as entries:
                return {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
        except OSError as error:
            raise self.broken(None, reason(error)) from error

    def _stamp(self, file: str) -> tuple[str, int, int, int]:
        try:
            found = os.stat(file, dir_fd=self.fd, follow_symlinks=False)
        except OSError as error:
            raise self.broken(file, reason(error)) from error
        return file, found.st_ino, found.st_size, found.st_mtime_ns

    @contextmanager
    def _open(self, file: str) -> Iterator[BinaryIO]:
        # O_NONBLOCK: opening a FIFO that was placed here would otherwise block until it is written to.
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file")
        with os.fdopen(fd, "rb") as opened:
            yield opened


@contextmanager
def open_folder(root: Path, name: str) -> Iterator[Folder]:
    """Open the directory of a checked name. Raises FileNotFoundError, or BrokenVoice if it is not a directory."""
    path = root / name
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BrokenVoice(f"voice {name!r}: {reason(error)}") from error
    try:
        yield Folder(name, path, fd)
    finally:
        os.close(fd)


def write_folder(path: Path, clips: Sequence[tuple[bytes, str, str]], recordings: Sequence[DecodedAudio]) -> None:
    """Write a voice directory from clips of (audio, suffix, transcript) and the decoded recordings."""
    path.mkdir()
    details = []
    for stem, (audio, suffix, transcript), recording in zip(stems(len(clips)), clips, recordings, strict=True):
        write_file(path / f"{stem}{suffix}", audio)
        write_file(path / f"{stem}{TRANSCRIPT}", transcript.encode())
        details.append(
            RecordingDetails(
                file=f"{stem}{suffix}",
                seconds=round(recording.seconds, 3),
                sample_rate=recording.original_rate,
                channels=recording.original_channels,
                sha256=hashlib.sha256(audio).hexdigest(),
            )
        )
    created = datetime.now(UTC).isoformat(timespec="seconds")
    write_file(path / DETAILS, json.dumps(asdict(VoiceDetails(created, tuple(details))), indent=2).encode())
    sync_directory(path)


def stems(count: int) -> list[str]:
    """Return file stems that sort in order; a single recording gets upstream's name."""
    if count == 1:
        return ["sample"]
    return [f"sample-{place:0{len(str(count))}}" for place in range(1, count + 1)]


def audio_suffix(audio: bytes, path: Path | None = None) -> str:
    """Return the suffix of the path, else the one of the magic bytes, else upstream's .wav."""
    if path is not None and path.suffix.lower() in SUFFIXES:
        return path.suffix.lower()
    return next((suffix for offset, start, suffix in MAGIC_BYTES if audio.startswith(start, offset)), ".wav")


def audio_names(files: Iterable[str]) -> list[str]:
    # Hidden files belong to other programs, such as the ._sample.wav of macOS.
    return sorted(file for file in files if Path(file).suffix.lower() in SUFFIXES and not file.startswith("."))


def belongs(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry may be part of a voice, by its name. Hidden files may, hidden directories may not."""
    if entry.name.startswith("."):
        return entry.is_file(follow_symlinks=False)
    return (
        entry.name in (DETAILS, DESCRIPTION)
        or fnmatchcase(entry.name, CODES)
        or Path(entry.name).suffix.lower() in (*SUFFIXES, TRANSCRIPT)
    )


def transcript_name(recording: str) -> str:
    return f"{Path(recording).stem}{TRANSCRIPT}"


def codes_name(fingerprint: str, audio_sha256: str) -> str:
    return f"codes-{fingerprint}-{audio_sha256[:16]}.npy"


def write_codes(path: Path, codes: Codes) -> None:
    with path.open("xb") as file:
        np.save(file, codes.astype("<i4"), allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def read_codes(file: BinaryIO) -> Codes:
    """Return the codes [codebooks, frames] of a .npy file, read-only. Raises ValueError for any other content.

    The file is not memory-mapped: a mapping holds a file descriptor for as long as the voice is cached, and a process
    may often have only 1,024 of them. Codes take a few kilobytes.
    """
    # Not `np.load`: its header parser accepts far more.
    header = CODES_HEADER.fullmatch(file.read(CODES_HEADER_BYTES))
    if header is None:
        raise ValueError("not codes")
    shape = int(header[1]), int(header[2])
    size = shape[0] * shape[1] * 4
    content = file.read(size + 1) if size <= MAX_CODES_BYTES else b""
    if len(content) != size:
        raise ValueError(f"not codes {shape}")
    return np.frombuffer(content, np.dtype("<i4")).reshape(shape)


def write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def reason(error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return "a link or not a directory; links are not followed"
    return error.strerror or str(error)
