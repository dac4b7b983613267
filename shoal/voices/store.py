"""Directory of stored voices.

Nothing is modified in place. A new voice is written in a workspace (a hidden directory beside the voices) and published
by one rename; a deleted voice is renamed into a workspace and removed there. So a crash leaves the old or the new
state, and of two processes that add the same name one succeeds. Workspaces left by a crash are removed when a store is
opened while no other process writes. The directory is created with its first voice: a server whose home is read-only
runs with the voices it has.
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

from shoal.errors import InvalidRequest, VoiceNotFound
from shoal.paths import data_directory, file_lock, is_local, output_errors, sync_directory
from shoal.text.prompt import Codes, Reference
from shoal.voices.description import NO_DESCRIPTION, VoiceDescription, description_document
from shoal.voices.folder import (
    DESCRIPTION,
    Folder,
    Stamp,
    VoiceDetails,
    audio_suffix,
    codes_name,
    open_folder,
    reason,
    write_codes,
    write_file,
    write_folder,
)
from shoal.voices.recording_check import RecordingReport, check_recording
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

WORKSPACE = ".shoal-"  # never the name of a voice: names have no dots


def voice_directory() -> Path:
    """Return the default directory of voices: $SHOAL_VOICES, else under the XDG data directory."""
    chosen = os.environ.get("SHOAL_VOICES")
    if chosen:
        return Path(chosen)
    return data_directory() / "voices"


class VoiceStore:
    """The voices of one writable directory and of read-only ones, such as a model's built-in voices.

    A directory with files that are not part of a voice is neither renamed nor deleted.

    A built-in voice cannot be renamed, deleted or replaced; a directory added by hand shadows it only if it contains a
    voice. Codes of built-in voices are not stored: packages ship them.

    `sample_rate` is the codec's: a new recording is checked by decoding it at that rate. Invalid names raise
    InvalidRequest, failed writes OutputError. The store keeps no state in memory, so threads and processes may share a
    directory.
    """

    def __init__(
        self,
        directory: Path,
        builtin: Sequence[Path] = (),
        *,
        sample_rate: int = 44_100,
        limits: VoiceLimits = DEFAULT_LIMITS,
    ) -> None:
        self._directory = directory.resolve()
        self._builtin = tuple(root.resolve() for root in builtin)
        self._sample_rate = sample_rate
        self._limits = limits
        # True if all directories of voices are on local file systems: looking up a voice never waits for a network.
        self.local = all(map(is_local, self._roots))
        self._sweep()

    def names(self) -> list[str]:
        """Return the sorted names of all directories with at least one recording and its transcript."""
        roots = self._roots if self._directory.is_dir() else self._builtin
        names = {name for root in roots for name in _names(root)}
        return sorted(name for name in names if self.exists(name))

    def exists(self, name: str) -> bool:
        check_name(name)
        return any(_holds_voice(root, name) for root in self._roots)

    def is_builtin(self, name: str) -> bool:
        """Return whether an existing voice is built in."""
        return not _holds_voice(self._directory, check_name(name))

    def add(self, name: str, audio: bytes | Path, transcript: str) -> None:
        """Add a voice with one recording. Raises VoiceExists, or AudioError or TextError for an unusable reference."""
        self.add_recordings(name, [(audio, transcript)])

    def add_recordings(self, name: str, clips: Sequence[Clip], description: VoiceDescription = NO_DESCRIPTION) -> None:
        """Add a voice with several recordings, in this order."""
        self._check_free(name)
        if not clips:
            raise InvalidRequest("a voice needs at least one recording")
        checked = [self._checked(clip) for clip in clips]
        recordings = read_recordings([audio for audio, _, _ in checked], self._sample_rate, self._limits)
        with output_errors(f"voice {name!r}"), self._workspace() as workspace:
            write_folder(workspace / "voice", checked, recordings)
            if description.filled():
                write_file(workspace / "voice" / DESCRIPTION, description_document(description))
            self._publish(workspace / "voice", name)

    def get(self, name: str, encoder: VoiceEncoder) -> Voice:
        """Return a voice with its codes. Recordings this codec has not encoded yet are encoded and stored.

        Raises VoiceNotFound, or BrokenVoice, which names the file.
        """
        with self._open(name) as folder:
            hashes = _recorded_hashes(folder)
            references = [
                self._reference(folder, recording, hashes.get(recording), encoder) for recording in folder.recordings()
            ]
        return Voice(name, tuple(references), encoder.frame_rate)

    def details(self, name: str) -> VoiceDetails | None:
        """Return creation time and recordings, or None for a directory that was not created by a store."""
        with self._open(name) as folder:
            return folder.details()

    def description(self, name: str) -> VoiceDescription:
        """Return the description of a voice. A broken file is logged and counts as none: the voice can still speak."""
        try:
            with self._open(name) as folder:
                return folder.description()
        except BrokenVoice as error:
            logger.warning("%s; the description is ignored", error)
            return NO_DESCRIPTION

    def describe(self, name: str, description: VoiceDescription) -> None:
        """Replace the description of a voice. Raises VoiceNotFound, or InvalidRequest for a built-in voice."""
        path = self._writable(name)
        with output_errors(f"voice {name!r}"), self._workspace() as workspace:
            write_file(workspace / DESCRIPTION, description_document(description))
            try:
                (workspace / DESCRIPTION).rename(path / DESCRIPTION)
            except FileNotFoundError:
                raise _not_found(name) from None
            sync_directory(path)

    def check(self, audio: bytes | Path, transcript: str | None = None) -> RecordingReport:
        """Measure a recording before it is added. Raises AudioError for one that `add` would refuse."""
        return check_recording(audio_bytes(audio, self._limits), self._limits, transcript)

    def stamp(self, name: str) -> Stamp:
        """Return a value that changes whenever the result of `get` may have changed. Reads file metadata only."""
        with self._open(name) as folder:
            return folder.stamp()

    def rename(self, old: str, new: str) -> None:
        """Rename a voice.

        Raises VoiceNotFound, VoiceExists, or InvalidRequest for a built-in voice or a directory with other files.
        """
        path = self._writable(old)
        self._check_free(new)
        with output_errors(f"voice {old!r}"):
            try:
                self._publish(path, new)
            except FileNotFoundError:
                raise _not_found(old) from None

    def delete(self, name: str) -> None:
        """Delete a voice. Requests that use it continue, because its codes are in memory.

        Raises VoiceNotFound, or InvalidRequest for a built-in voice or a directory with other files.
        """
        path = self._writable(name)
        with output_errors(f"voice {name!r}"), self._workspace() as workspace:
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
        """Open the first complete directory of that name, else the first non-empty one, to report what is missing."""
        check_name(name)
        with ExitStack() as stack:
            folders: list[Folder] = []
            error: BrokenVoice | None = None
            for root in self._roots:
                try:
                    folders.append(stack.enter_context(open_folder(root, name)))
                except FileNotFoundError:
                    continue
                except BrokenVoice as broken:
                    error = error or broken
            found = [folder for folder in folders if folder.complete] or [f for f in folders if not f.empty]
            if not found:
                raise error or _not_found(name)
            try:
                yield found[0]
            except BrokenVoice:
                # It may have been deleted, file by file, while it was read.
                if found[0].moved:
                    raise _not_found(name) from None
                raise

    def _writable(self, name: str) -> Path:
        """Return the path of a voice that may be renamed or deleted: not built in, and without other files."""
        path = self._directory / check_name(name)
        if path.is_dir() and not path.is_symlink():
            self._check_no_other_files(name)
            return path
        if self.exists(name):
            raise InvalidRequest(f"voice {name!r} is built in: it can be neither renamed nor deleted")
        raise _not_found(name)

    def _check_no_other_files(self, name: str) -> None:
        try:
            with open_folder(self._directory, name) as folder:
                foreign = folder.foreign()
        except FileNotFoundError:
            raise _not_found(name) from None
        if foreign:
            raise InvalidRequest(
                f"the directory {name!r} contains {foreign[0]!r}, which is not part of a voice, and is left as it is: "
                "move that file elsewhere first"
            )

    def _check_free(self, name: str) -> None:
        if self.exists(name):
            raise _builtin(name) if self.is_builtin(name) else _exists(name)

    def _checked(self, clip: Clip) -> tuple[bytes, str, str]:
        audio = audio_bytes(clip[0], self._limits)
        suffix = audio_suffix(audio, clip[0] if isinstance(clip[0], Path) else None)
        return audio, suffix, check_new_transcript(clip[1], self._limits)

    def _reference(self, folder: Folder, recording: str, expected_hash: str | None, encoder: VoiceEncoder) -> Reference:
        transcript = folder.transcript(recording, self._limits)
        audio = folder.audio(recording, self._limits)
        digest = hashlib.sha256(audio).hexdigest()
        if expected_hash not in (None, digest):
            raise folder.broken(recording, "not the recording that was added (its SHA-256 differs)")
        file = codes_name(encoder.fingerprint, digest)
        codes = folder.codes(file)
        if codes is None:
            codes = self._encode(folder, recording, audio, encoder)
            codes = self._store_codes(folder, file, codes)
        return Reference(transcript, codes)

    def _encode(self, folder: Folder, recording: str, audio: bytes, encoder: VoiceEncoder) -> Codes:
        try:
            decoded = read_recording(audio, encoder.sample_rate, self._limits)
        except InvalidRequest as error:
            raise folder.broken(recording, error) from error
        return encode_recording(decoded, encoder)

    def _store_codes(self, folder: Folder, file: str, codes: Codes) -> Codes:
        """Store codes and return the stored ones. A failed write is logged; it only costs a later re-encoding."""
        if folder.path.parent != self._directory:
            return codes
        try:
            with self._workspace() as workspace:
                write_codes(workspace / "codes", codes)
                # Relative to the open directory, which may have been renamed or deleted.
                os.rename(workspace / "codes", file, dst_dir_fd=folder.fd)
        except OSError as error:
            logger.warning("voice %s: storing its codes failed: %s", folder.name, error)
            return codes
        stored = folder.codes(file)
        return codes if stored is None else stored

    def _publish(self, made: Path, name: str) -> None:
        """Rename into place. A non-empty directory is never replaced, not even in a race."""
        try:
            made.rename(self._directory / name)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _exists(name) from None
            raise
        sync_directory(self._directory)

    @contextmanager
    def _workspace(self) -> Iterator[Path]:
        """Yield a new directory on the same file system, removed on exit. The shared lock marks it as in use."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with file_lock(self._directory, shared=True):
            path = self._directory / f"{WORKSPACE}{secrets.token_hex(8)}"
            path.mkdir()
            try:
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove workspaces left by crashes. Under the exclusive lock no process writes, so all of them are stale."""
        if not self._directory.is_dir():
            return  # a lock would create a file of this name
        try:
            with file_lock(self._directory, wait=False):
                for path in self._directory.glob(f"{WORKSPACE}*"):
                    logger.info("removing workspace %s of an interrupted write", path.name)
                    shutil.rmtree(path, ignore_errors=True)
        except OSError:
            return  # another process writes, or the file system has no locks: a later start cleans up


def _names(root: Path) -> list[str]:
    try:
        return [path.name for path in root.iterdir() if is_name(path.name)]
    except OSError as error:
        logger.warning("cannot list the voices of %s: %s", root, reason(error))
        return []


def _holds_voice(root: Path, name: str) -> bool:
    try:
        with open_folder(root, name) as folder:
            return folder.complete
    except (OSError, BrokenVoice):
        return False


def _recorded_hashes(folder: Folder) -> dict[str, str]:
    details = folder.details()
    return {} if details is None else {recording.file: recording.sha256 for recording in details.recordings}


def _exists(name: str) -> VoiceExists:
    return VoiceExists(f"voice {name!r} exists already")


def _builtin(name: str) -> VoiceExists:
    return VoiceExists(f"voice {name!r} is built into the model: choose another name")


def _not_found(name: str) -> VoiceNotFound:
    return VoiceNotFound(f"there is no voice {name!r}")
