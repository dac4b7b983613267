"""Everything Shoal raises on purpose.

    ShoalError
    ├── InvalidRequest        the caller asked for something that cannot be done as asked
    │   ├── TextError         empty, too long, or carrying control tokens
    │   └── AudioError        a recording that cannot be read or used
    ├── VoiceNotFound         no voice by that name
    ├── CheckpointError       files of a model are missing, broken or of another shape
    │   └── UnsafeCheckpoint  a pickle that wants to run code
    ├── ModelNotFound         no such model here
    ├── GenerationFailed      the model ran and what came out is not speech
    ├── EngineBusy            the queue is full; try again later
    ├── EngineStopped         the engine was closed, or failed while the request ran
    ├── DeadlineExceeded      the request did not end in the time it was given
    ├── OutputError           the result could not be written
    ├── MissingExtra          an optional dependency is not installed
    └── VerificationFailed    a parity comparison left its tolerance

Each class carries the exit code of the command line; the server maps the same classes to status codes in one table.
"""


class ShoalError(Exception):
    """Root of the tree. The message is written for the person who has to act on it."""

    exit_code = 1


class InvalidRequest(ShoalError):
    exit_code = 2


class TextError(InvalidRequest):
    exit_code = 3


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


class DeadlineExceeded(ShoalError):
    exit_code = 15
