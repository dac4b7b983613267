"""Binary messages between the pool and its worker. No pickle: hostile audio may have taken over the worker."""

import struct
from dataclasses import dataclass
from typing import IO

READY = b"shoal decoder ready\n"
READY_UNFILTERED = b"shoal decoder plain\n"  # without the system call filter
_REQUEST = struct.Struct("<IQddIIIQ")
_RESPONSE = struct.Struct("<BIIQ")
OK, AUDIO_ERROR, MISSING_EXTRA = range(3)
MAX_ERROR_BYTES = 4096


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """A recording of `size` bytes, which follow the message, and what it may contain; the fields of AudioLimits."""

    sample_rate: int
    max_bytes: int
    min_seconds: float
    max_seconds: float
    max_channels: int
    min_rate: int
    max_rate: int
    size: int

    def pack(self) -> bytes:
        fields = self.sample_rate, self.max_bytes, self.min_seconds, self.max_seconds, self.max_channels
        return _REQUEST.pack(*fields, self.min_rate, self.max_rate, self.size)

    @classmethod
    def read(cls, file: IO[bytes]) -> "DecodeRequest | None":
        """Return the next request, or None at the end of the file."""
        head = file.read(_REQUEST.size)
        return cls(*_REQUEST.unpack(head)) if len(head) == _REQUEST.size else None

    def max_samples(self) -> int:
        """Return a bound on the samples of the response; resampling adds a few at the end."""
        return int((self.max_seconds + 1.0) * self.sample_rate)


@dataclass(frozen=True, slots=True)
class DecodeResponse:
    """`size` bytes follow: float32 samples, or the text of an error."""

    status: int
    original_rate: int = 0
    original_channels: int = 0
    size: int = 0

    def pack(self) -> bytes:
        return _RESPONSE.pack(self.status, self.original_rate, self.original_channels, self.size)

    @classmethod
    def read(cls, file: IO[bytes]) -> "DecodeResponse":
        """Read a response. Raises EOFError when the worker has ended."""
        head = file.read(_RESPONSE.size)
        if len(head) < _RESPONSE.size:
            raise EOFError
        return cls(*_RESPONSE.unpack(head))
