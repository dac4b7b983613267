"""Bounded reader of a zip archive. Nothing is extracted: entries are read into memory by name, up to a limit."""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from shoal.errors import TextError

MAX_FILE_BYTES = 1 << 30
MAX_ENTRIES = 20_000
MAX_DIRECTORY_BYTES = 8 << 20  # zipfile reads the whole central directory into memory
MAX_DOCUMENT_BYTES = 8 << 20  # one document, decompressed
MAX_TOTAL_BYTES = 96 << 20  # total read from one archive, decompressed
END_RECORD = struct.Struct("<4s4H2LH")  # end of central directory
END_MAGIC, ZIP64_LOCATOR = b"PK\x05\x06", b"PK\x06\x07"
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Archive:
    """Entries of an open archive. All methods raise TextError, which names the entry."""

    def __init__(self, file: zipfile.ZipFile) -> None:
        self._file = file
        self._left = MAX_TOTAL_BYTES
        self._names = {info.filename: info for info in file.infolist()}
        for name in self._names:
            _check_name(name)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, name: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        """Return the content of an entry, whatever size its header states."""
        info = self._names.get(name)
        if info is None:
            raise TextError(f"the book is damaged: {name!r:.200} is missing in it")
        if info.flag_bits & 1 or info.compress_type not in METHODS:
            raise TextError(f"{name!r:.200} is encrypted or compressed in an unknown way: the book cannot be read")
        limit = min(max_bytes, self._left)
        try:
            with self._file.open(info) as stream:
                content = stream.read(limit + 1)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as problem:
            raise TextError(f"the book is damaged: {name!r:.200}: {problem}") from None
        if len(content) > limit:
            raise TextError(f"{name!r:.200} has more than {limit >> 20} MiB when it is decompressed: not a book")
        self._left -= len(content)
        return content


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Open an archive. Raises TextError for a file that is not one, too large, or declares too many entries."""
    try:
        _check_directory(path)
        with zipfile.ZipFile(path) as file:
            yield Archive(file)
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError) as problem:
        raise TextError(f"{path} is not an epub file, or is damaged: {problem}") from None
    except OSError as problem:
        raise TextError(f"cannot read {path}: {problem.strerror or problem}") from None


def _check_directory(path: Path) -> None:
    """Check the size of the central directory before it is read. Raises TextError, OSError."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise TextError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB: not a book")
    with path.open("rb") as file:
        file.seek(max(0, size - (1 << 16) - END_RECORD.size))
        tail = file.read()
    at = tail.rfind(END_MAGIC)
    if at < 0 or len(tail) - at < END_RECORD.size:
        raise TextError(f"{path} is not an epub file, or is damaged: it is not a zip archive")
    _, _, _, _, entries, directory_bytes, _, _ = END_RECORD.unpack_from(tail, at)
    if tail[max(0, at - 20) : at].startswith(ZIP64_LOCATOR):
        raise TextError(f"{path} is a zip64 archive, which epub files of ordinary size are not")
    if entries > MAX_ENTRIES or directory_bytes > MAX_DIRECTORY_BYTES:
        raise TextError(f"{path} has {entries:,} entries or more; at most {MAX_ENTRIES:,} are allowed: not a book")


def _check_name(name: str) -> None:
    parts = PurePosixPath(name).parts
    if name.startswith("/") or "\\" in name or "\0" in name or ".." in parts:
        raise TextError(f"the book has an entry outside of its own directory, {name!r:.200}, and is refused")
