"""Exception hierarchy: all errors that Shoal raises on purpose.

    ShoalError
    ├── InvalidRequest        the request is invalid: what it asks for is not allowed or not possible
    │   ├── TextError         the text is empty, too long or contains control tokens
    │   │   └── NothingToSpeak  the text has no word
    │   └── AudioError        the recording cannot be decoded or used
    ├── VoiceNotFound         no voice of that name
    ├── CheckpointError       model files are missing, damaged or have the wrong shapes
    │   └── UnsafeCheckpoint  the pickle would run code
    ├── ModelNotFound         the model is not on this machine
    ├── GenerationFailed      the model ran but its output is not speech
    ├── EngineBusy            the queue is full; retry later
    ├── EngineStopped         the engine was closed or failed during the request
    │   └── DeviceFailed      no step succeeds on the device any more; the engine process must be restarted
    ├── DeadlineExceeded      the request did not finish before its deadline
    ├── OutputError           the output could not be written
    ├── MissingExtra          an optional dependency is not installed
    ├── VerificationFailed    a parity comparison exceeded its tolerance
    └── InternalError         a bug; the cause is in the log, not in the message

Each class carries the exit code of the command line; the server maps the classes to status codes in one table.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ShoalError(Exception):
    """Base class. The message says what was wrong, what is allowed and what to do."""

    exit_code = 1


class InvalidRequest(ShoalError):
    exit_code = 2


class TextError(InvalidRequest):
    exit_code = 3


class NothingToSpeak(TextError):
    pass


class AudioError(InvalidRequest):
    exit_code = 4


class VoiceNotFound(ShoalError):
    exit_code = 5


class CheckpointError(ShoalError):
    exit_code = 6


class UnsafeCheckpoint(CheckpointError):
    exit_code = 7


class ModelNotFound(ShoalError):
    exit_code = 8


class GenerationFailed(ShoalError):
    exit_code = 9


class OutputError(ShoalError):
    exit_code = 10


class MissingExtra(ShoalError):
    exit_code = 11


class VerificationFailed(ShoalError):
    exit_code = 12


class EngineBusy(ShoalError):
    exit_code = 13


class EngineStopped(ShoalError):
    exit_code = 14


class DeviceFailed(EngineStopped):
    """`blamed`: ids of the requests whose steps failed since the device last worked."""

    def __init__(self, message: str, blamed: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.blamed = blamed


class DeadlineExceeded(ShoalError):
    exit_code = 15


class InternalError(ShoalError):
    exit_code = 70

    def __init__(self, message: str = "internal error; the log has details under the id of this request") -> None:
        super().__init__(message)


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a count for a message: `1 voice`, `2 voices`; `many` defaults to `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


@contextmanager
def device_errors(handle: Callable[[Exception], object]) -> Iterator[None]:
    """Suppress an exception raised in the block and pass it to `handle`, which may raise it again.

    For code that calls compilers, kernels or drivers: the caller then falls back to another size or backend.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - edge to compilers, kernels and drivers, which raise anything
        handle(error)


def describe_error(error: BaseException) -> str:
    """Return type and first line of an error, for logs and reports."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
