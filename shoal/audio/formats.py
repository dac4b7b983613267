"""The formats Shoal writes: their names, media types, file suffixes, and what each can carry."""

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import InvalidRequest

MIN_RATE, MAX_RATE = 8_000, 192_000
MPEG_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)


@dataclass(frozen=True, slots=True)
class Bitrates:
    """Bits per second."""

    min: int
    default: int
    max: int


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """One way to write speech. No `rates` means any; no `bitrates` means lossless."""

    name: str
    media_type: str
    suffixes: tuple[str, ...]
    rates: tuple[int, ...] = ()
    bitrates: Bitrates | None = None

    def rate_for(self, sample_rate: int) -> int:
        """The nearest rate that loses nothing of `sample_rate`, or the highest there is."""
        if not self.rates or sample_rate in self.rates:
            return sample_rate
        return self.rates[min(bisect_left(self.rates, sample_rate), len(self.rates) - 1)]

    def check_rate(self, rate: int) -> int:
        if self.rates and rate not in self.rates:
            known = ", ".join(str(known) for known in self.rates)
            raise InvalidRequest(f"{self.name} cannot carry {rate} Hz; it carries {known} Hz.")
        if not MIN_RATE <= rate <= MAX_RATE:
            raise InvalidRequest(f"A sample rate of {rate} Hz is outside {MIN_RATE} to {MAX_RATE} Hz.")
        return rate

    def check_bitrate(self, bitrate: int | None) -> int | None:
        """The bitrate to use, bits per second; the usual one for None."""
        if self.bitrates is None:
            if bitrate is not None:
                raise InvalidRequest(f"{self.name} is lossless and has no bitrate.")
            return None
        if bitrate is None:
            return self.bitrates.default
        if not self.bitrates.min <= bitrate <= self.bitrates.max:
            bounds = f"{self.bitrates.min} to {self.bitrates.max}"
            raise InvalidRequest(f"{self.name} takes {bounds} bits per second, not {bitrate}.")
        return bitrate


# Opus codes at 48 kHz inside whatever it is told; webm is opus too, in the container browsers play piece by piece.
OPUS_RATES = (48_000,)
OPUS_BITRATES = Bitrates(6_000, 48_000, 256_000)

FORMATS = {
    known.name: known
    for known in (
        AudioFormat("wav", "audio/wav", (".wav", ".wave")),
        AudioFormat("pcm", "audio/pcm", (".pcm", ".raw")),
        AudioFormat("flac", "audio/flac", (".flac",)),
        AudioFormat("mp3", "audio/mpeg", (".mp3",), MPEG_RATES, Bitrates(8_000, 128_000, 320_000)),
        AudioFormat("opus", "audio/ogg", (".opus", ".ogg", ".oga"), OPUS_RATES, OPUS_BITRATES),
        AudioFormat(
            "aac", "audio/aac", (".aac",), (*MPEG_RATES, 64_000, 88_200, 96_000), Bitrates(16_000, 96_000, 256_000)
        ),
        AudioFormat("webm", "audio/webm", (".webm",), OPUS_RATES, OPUS_BITRATES),
    )
}
FORMAT_OF_SUFFIX = {suffix: known.name for known in FORMATS.values() for suffix in known.suffixes}


def audio_format(name: str) -> AudioFormat:
    try:
        return FORMATS[name]
    except KeyError:
        raise InvalidRequest(f"Unknown audio format {name!r}; known: {', '.join(FORMATS)}.") from None


def format_of(path: Path) -> str:
    """The format a file name asks for by its suffix."""
    try:
        return FORMAT_OF_SUFFIX[path.suffix.lower()]
    except KeyError:
        known = ", ".join(FORMAT_OF_SUFFIX)
        raise InvalidRequest(f"The suffix of {path.name!r} names no audio format; known: {known}.") from None
