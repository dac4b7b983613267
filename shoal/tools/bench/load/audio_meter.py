"""Seconds of audio in a body that is still arriving: bare 16-bit PCM, or WAV, which says itself what it is."""

import struct

from shoal.errors import AudioError

LONGEST_HEADER = 4096


class AudioMeter:
    """Fed with bytes, tells how many seconds of audio were in them. Raises AudioError for a WAV that is none."""

    def __init__(self, sample_rate: int) -> None:
        self._bytes_per_second = 2 * sample_rate  # of bare PCM: 16 bits, one channel
        self._held: bytes | None = b""  # what has not shown yet whether it is a WAV header

    def feed(self, content: bytes) -> float:
        if self._held is not None:
            content = self._header(self._held + content)
        return len(content) / self._bytes_per_second

    def end(self) -> float:
        """Of what was held back because it might have been the beginning of a header."""
        held, self._held = self._held or b"", None
        return len(held) / self._bytes_per_second

    def _header(self, content: bytes) -> bytes:
        """The audio in what has come so far; nothing while a header may still be going on."""
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
        if len(content) > LONGEST_HEADER:
            raise AudioError("a WAV file without samples")
        return b""

    def _begin(self, content: bytes, rate: int) -> bytes:
        if not rate:
            raise AudioError("a WAV file that does not say its rate")
        self._held, self._bytes_per_second = None, rate
        return content
