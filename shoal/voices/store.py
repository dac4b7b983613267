"""Voices on disk, by name.

Nothing is ever changed where it lies. What is new is made in a workspace, a hidden directory beside the voices, and put
in its place by one rename; what goes is renamed into a workspace and removed there. So a crash leaves the old or the
new, and of two processes that add one name the file system lets one win. A workspace left by a crash is removed when a
store is opened while no other process is writing.
"""

import errno
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shoal.errors import InvalidRequest, OutputError, VoiceNotFound
from shoal.paths import data_directory, file_lock, sync_directory
from shoal.text.prompt import Codes, Reference
from shoal.voices.folder import (
    Folder,
    Stamp,
    VoiceDetails,
    audio_suffix,
    codes_name,
    open_folder,
    reason,
    write_codes,
    write_folder,
)
from shoal.voices.voice import (
    DEFAULT_LIMITS,
    BrokenVoice,
    Clip,
    Voice,
    VoiceEncoder,
    VoiceExists,
    VoiceLimits,
    audio_bytes,
    check_name,
    check_new_transcript,
    encode_recording,
    is_name,
    read_recording,
    read_recordings,
)

logger = logging.getLogger(__name__)

WORKSPACE = ".shoal-"  # no voice is named so: names have no dots


def voice_directory() -> Path:
    """Where a person's own voices are kept: SHOAL_VOICES, or the data directory of the desktop standard."""
    chosen = os.environ.get("SHOAL_VOICES")
    if chosen:
        return Path(chosen)
    return data_directory() / "voices"


class VoiceStore:
    """The voices of one directory, and of read-only ones such as a model's built-in voices.

    Other things may lie there as well: a directory that holds anything but the files of a voice is neither renamed nor
    deleted.

    A built-in voice cannot be renamed or deleted, nor its name be taken; a directory that was put beside the voices by
    hand hides it only if it holds a voice itself. Codes of built-in voices are not kept: packages bring them along.

    `sample_rate` is the codec's: a new recording is checked by reading it as it will be read. Names are checked
    everywhere and raise InvalidRequest; what cannot be written raises OutputError. All methods read or write files and
    none keeps anything in memory, so threads and processes may share a directory.
    """

    def __init__(
        self,
        directory: Path,
        builtin: Sequence[Path] = (),
        *,
        sample_rate: int = 44_100,
        limits: VoiceLimits = DEFAULT_LIMITS,
    ) -> None:
        with _as_output_error(f"The directory of voices {directory}"):
            directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory.resolve()
        self._builtin = tuple(root.resolve() for root in builtin)
        self._sample_rate = sample_rate
        self._limits = limits
        self._sweep()

    def names(self) -> list[str]:
        """All directories with at least one recording and its transcript, sorted."""
        names = {name for root in self._roots for name in _names(root)}
        return sorted(name for name in names if self.exists(name))

    def exists(self, name: str) -> bool:
        check_name(name)
        return any(_holds_voice(root, name) for root in self._roots)

    def is_builtin(self, name: str) -> bool:
        """Whether a voice that exists came with the model."""
        return not _holds_voice(self._directory, check_name(name))

    def add(self, name: str, audio: bytes | Path, transcript: str) -> None:
        """Raises VoiceExists, and AudioError or TextError for what cannot be a reference."""
        self.add_recordings(name, [(audio, transcript)])

    def add_recordings(self, name: str, clips: Sequence[Clip]) -> None:
        """One voice of several recordings, in this order."""
        self._check_free(name)
        if not clips:
            raise InvalidRequest("A voice needs at least one recording.")
        checked = [self._checked(clip) for clip in clips]
        recordings = read_recordings([audio for audio, _, _ in checked], self._sample_rate, self._limits)
        with _as_output_error(f"Voice {name!r}"), self._workspace() as workspace:
            write_folder(workspace / "voice", checked, recordings)
            self._publish(workspace / "voice", name)

    def get(self, name: str, encoder: VoiceEncoder) -> Voice:
        """The voice, its codes memory-mapped. What this codec has not encoded yet is encoded now and kept.

        Raises VoiceNotFound, and BrokenVoice naming the file at fault.
        """
        with self._open(name) as folder:
            promised = _promised_hashes(folder)
            references = [
                self._reference(folder, recording, promised.get(recording), encoder)
                for recording in folder.recordings()
            ]
        return Voice(name, tuple(references), encoder.frame_rate)

    def details(self, name: str) -> VoiceDetails | None:
        """When a voice was added and what its recordings were; None for a directory that was not made by a store."""
        with self._open(name) as folder:
            return folder.details()

    def stamp(self, name: str) -> Stamp:
        """Cheap to read; changes when what `get` would return may have changed."""
        with self._open(name) as folder:
            return folder.stamp()

    def rename(self, old: str, new: str) -> None:
        """Raises VoiceNotFound, VoiceExists, or InvalidRequest for a built-in voice or what is more than a voice."""
        path = self._own(old)
        self._check_free(new)
        with _as_output_error(f"Voice {old!r}"):
            try:
                self._publish(path, new)
            except FileNotFoundError:
                raise _not_found(old) from None

    def delete(self, name: str) -> None:
        """Raises VoiceNotFound, or InvalidRequest for a built-in voice or what is more than a voice.

        Voices in use go on: they stay mapped.
        """
        path = self._own(name)
        with _as_output_error(f"Voice {name!r}"), self._workspace() as workspace:
            try:
                path.rename(workspace / "voice")
            except FileNotFoundError:
                raise _not_found(name) from None
            sync_directory(self._directory)

    @property
    def _roots(self) -> tuple[Path, ...]:
        return (self._directory, *self._builtin)

    @contextmanager
    def _open(self, name: str) -> Iterator[Folder]:
        """The first directory of that name that holds a voice; else the first that is not empty, to name its fault."""
        check_name(name)
        with ExitStack() as stack:
            folders: list[Folder] = []
            problem: BrokenVoice | None = None
            for root in self._roots:
                try:
                    folders.append(stack.enter_context(open_folder(root, name)))
                except FileNotFoundError:
                    continue
                except BrokenVoice as broken:
                    problem = problem or broken
            found = [folder for folder in folders if folder.complete] or [f for f in folders if not f.empty]
            if not found:
                raise problem or _not_found(name)
            try:
                yield found[0]
            except BrokenVoice:
                # Perhaps only deleted under our hands, file by file.
                if found[0].moved:
                    raise _not_found(name) from None
                raise

    def _own(self, name: str) -> Path:
        """The directory of a voice, whole or broken. What else people keep beside the voices is not ours to move."""
        path = self._directory / check_name(name)
        if path.is_dir() and not path.is_symlink():
            self._check_own_files(name)
            return path
        if self.exists(name):
            raise InvalidRequest(f"Voice {name!r} is built in: it can be neither renamed nor deleted.")
        raise _not_found(name)

    def _check_own_files(self, name: str) -> None:
        try:
            with open_folder(self._directory, name) as folder:
                foreign = folder.foreign()
        except FileNotFoundError:
            raise _not_found(name) from None
        if foreign:
            raise InvalidRequest(
                f"The directory {name!r} holds {foreign[0]!r}, which is no part of a voice, and is left as it is: "
                "move that elsewhere first."
            )

    def _check_free(self, name: str) -> None:
        if self.exists(name):
            raise _exists(name)

    def _checked(self, clip: Clip) -> tuple[bytes, str, str]:
        audio = audio_bytes(clip[0], self._limits)
        suffix = audio_suffix(audio, clip[0] if isinstance(clip[0], Path) else None)
        return audio, suffix, check_new_transcript(clip[1], self._limits)

    def _reference(self, folder: Folder, recording: str, promised: str | None, encoder: VoiceEncoder) -> Reference:
        transcript = folder.transcript(recording, self._limits)
        audio = folder.audio(recording, self._limits)
        digest = hashlib.sha256(audio).hexdigest()
        if promised not in (None, digest):
            raise folder.broken(recording, "it is not the recording that was added (its SHA-256 differs)")
        file = codes_name(encoder.fingerprint, digest)
        codes = folder.codes(file)
        if codes is None:
            codes = self._encode(folder, recording, audio, encoder)
            codes = self._keep(folder, file, codes)
        return Reference(transcript, codes)

    def _encode(self, folder: Folder, recording: str, audio: bytes, encoder: VoiceEncoder) -> Codes:
        try:
            heard = read_recording(audio, encoder.sample_rate, self._limits)
        except InvalidRequest as problem:
            raise folder.broken(recording, problem) from problem
        return encode_recording(heard, encoder)

    def _keep(self, folder: Folder, file: str, codes: Codes) -> Codes:
        """The codes as stored. A disk that cannot take them costs time at the next start, not this request."""
        if folder.path.parent != self._directory:
            return codes
        try:
            with self._workspace() as workspace:
                write_codes(workspace / "codes", codes)
                # By the open directory: it may have another name by now, or none.
                os.rename(workspace / "codes", file, dst_dir_fd=folder.fd)
        except OSError as problem:
            logger.warning("voice %s: its codes could not be stored: %s", folder.name, problem)
            return codes
        stored = folder.codes(file)
        return codes if stored is None else stored

    def _publish(self, made: Path, name: str) -> None:
        """Rename into place. A directory with something in it is never replaced, not even by a race."""
        try:
            made.rename(self._directory / name)
        except OSError as problem:
            if problem.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _exists(name) from None
            raise
        sync_directory(self._directory)

    @contextmanager
    def _workspace(self) -> Iterator[Path]:
        """A new directory on the same file system, removed at the end. The lock tells others that its owner lives."""
        with file_lock(self._directory, shared=True):
            path = self._directory / f"{WORKSPACE}{secrets.token_hex(8)}"
            path.mkdir()
            try:
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what crashes left. With the exclusive lock nobody is writing, so every workspace is abandoned."""
        try:
            with file_lock(self._directory, wait=False):
                for path in self._directory.glob(f"{WORKSPACE}*"):
                    logger.info("removing %s, left by an interrupted write", path.name)
                    shutil.rmtree(path, ignore_errors=True)
        except OSError:
            return  # somebody is writing, or the file system has no locks: the next start may do it


def _names(root: Path) -> list[str]:
    try:
        return [path.name for path in root.iterdir() if is_name(path.name)]
    except OSError as problem:
        logger.warning("the voices of %s cannot be listed: %s", root, reason(problem))
        return []


def _holds_voice(root: Path, name: str) -> bool:
    try:
        with open_folder(root, name) as folder:
            return folder.complete
    except (OSError, BrokenVoice):
        return False


def _promised_hashes(folder: Folder) -> dict[str, str]:
    details = folder.details()
    return {} if details is None else {recording.file: recording.sha256 for recording in details.recordings}


@contextmanager
def _as_output_error(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise OutputError(f"{what} could not be written: {problem.strerror or problem}.") from problem


def _exists(name: str) -> VoiceExists:
    return VoiceExists(f"There is a voice {name!r} already.")


def _not_found(name: str) -> VoiceNotFound:
    return VoiceNotFound(f"There is no voice {name!r}.")
