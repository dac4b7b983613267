"""Write speech to a file atomically, or to standard output, a pipe or a device as a stream."""

import stat
import sys
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self

from shoal.audio.encode import AudioWriter, encoder
from shoal.audio.formats import format_of
from shoal.audio.pcm import Samples
from shoal.paths import AtomicFile, output_errors

STDOUT = Path("-")


class AudioFile:
    """Writes speech while it is generated: `with AudioFile(path, rate) as file: file.write(samples)`.

    Entering opens the output, so that errors occur before any work is done. Leaving without an error commits; leaving
    with one removes the partial file. The default format is that of the suffix; `-` is standard output, by default
    wav. Raises OutputError, InvalidRequest, MissingExtra.
    """

    def __init__(self, path: Path, sample_rate: int, *, format: str | None = None) -> None:
        self.path = path
        self.format = format or ("wav" if path == STDOUT else format_of(path))
        self._sample_rate = sample_rate
        self._output: Output | None = None

    def __enter__(self) -> Self:
        with _output_errors(self.path):
            self._output = self._open()
        return self

    def write(self, samples: Samples) -> None:
        if self._output is None:
            raise RuntimeError("write to an AudioFile inside its `with` block")
        with _output_errors(self.path):
            self._output.write(samples)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        output, self._output = self._output, None
        if output is None:
            return
        if error is not None:
            output.discard()
            return
        with ExitStack() as on_error, _output_errors(self.path):
            on_error.callback(output.discard)
            output.commit()
            on_error.pop_all()

    def _open(self) -> "Output":
        if self.path == STDOUT:
            return StreamedOutput(sys.stdout.buffer, self.format, self._sample_rate)
        if self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode):
            # Renaming over a device or a pipe would replace it. Opening a directory fails by itself.
            return StreamedOutput(self.path.open("wb"), self.format, self._sample_rate)
        return ReplacedOutput(self.path, self.format, self._sample_rate)


class Output(Protocol):
    def write(self, samples: Samples) -> None: ...

    def commit(self) -> None: ...

    def discard(self) -> None:
        """Remove partial output. Never raises."""


class StreamedOutput:
    """Writes encoded bytes to a stream that is not seekable, without delay."""

    def __init__(self, stream: BinaryIO, format: str, sample_rate: int) -> None:
        self._stream = stream
        self._encoder = encoder(format, sample_rate)

    def write(self, samples: Samples) -> None:
        self._send(self._encoder.feed(samples))

    def commit(self) -> None:
        self._send(self._encoder.finish())
        self._close()

    def discard(self) -> None:
        with suppress(OSError):
            self._close()

    def _send(self, encoded: bytes) -> None:
        self._stream.write(encoded)
        self._stream.flush()

    def _close(self) -> None:
        if self._stream is not sys.stdout.buffer:
            self._stream.close()


class ReplacedOutput:
    """Writes a temporary file and renames it to its target when it is complete."""

    def __init__(self, path: Path, format: str, sample_rate: int) -> None:
        # Replace the target of a symbolic link, not the link. Only `stat` raises OSError for a loop of links.
        with suppress(FileNotFoundError):
            path.stat()
        target = path.resolve()
        self._replacement = AtomicFile(target)
        with ExitStack() as on_error:
            on_error.callback(self.discard)
            self._writer = AudioWriter(format, sample_rate, self._replacement.file)
            on_error.pop_all()

    def write(self, samples: Samples) -> None:
        self._writer.write(samples)

    def commit(self) -> None:
        self._writer.close()
        self._replacement.commit()

    def discard(self) -> None:
        # Close the file before the writer is dropped: the writer does not try to finalize a closed file.
        self._replacement.discard()


def _output_errors(path: Path) -> AbstractContextManager[None]:
    return output_errors("standard output" if path == STDOUT else path)
