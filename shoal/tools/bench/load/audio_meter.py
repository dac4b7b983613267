"""Duration of audio in a streamed response body: raw 16-bit PCM, or WAV, recognised by its header."""

import struct

from shoal.errors import AudioError

MAX_HEADER_BYTES = 4096


class AudioMeter:
    """Converts received bytes to seconds of audio. Raises AudioError for an invalid WAV header."""

    def __init__(self, sample_rate: int) -> None:
        self._bytes_per_second = 2 * sample_rate  # raw PCM: 16 bits, one channel
        self._held: bytes | None = b""  # bytes that may be part of a WAV header; None after the header

    def feed(self, content: bytes) -> float:
        if self._held is not None:
            content = self._header(self._held + content)
        return len(content) / self._bytes_per_second

    def end(self) -> float:
        """Return the seconds of audio in bytes that were held back as a possible header."""
        held, self._held = self._held or b"", None
        return len(held) / self._bytes_per_second

    def _header(self, content: bytes) -> bytes:
        """Return the audio after the header; nothing while the header is incomplete."""
        self._held = content
        if len(content) < 12 and b"RIFF".startswith(content[:4]):
            return b""
        if content[:4] != b"RIFF":
            self._held = None
            return content
        at, rate = 12, 0
        while at + 8 <= len(content):
            name, size = struct.unpack_from("<4sI", content, at)
            if name == b"data":
                return self._begin(content[at + 8 :], rate)
            if name == b"fmt " and at + 24 <= len(content):
                rate = struct.unpack_from("<I", content, at + 16)[0]  # bytes per second
            at += 8 + size + size % 2
        if len(content) > MAX_HEADER_BYTES:
            raise AudioError("the WAV file has no data chunk")
        return b""

    def _begin(self, content: bytes, rate: int) -> bytes:
        if not rate:
            raise AudioError("the WAV file has no sample rate")
        self._held, self._bytes_per_second = None, rate
        return content
