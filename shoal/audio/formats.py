"""Output formats: names, media types, file suffixes, and supported sample rates and bitrates."""

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import InvalidRequest

MIN_RATE, MAX_RATE = 8_000, 192_000
MPEG_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)


@dataclass(frozen=True, slots=True)
class Bitrates:
    """Range and default of a format's bitrate, in bits per second."""

    min: int
    default: int
    max: int


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """Output format. Empty `rates` means any rate; no `bitrates` means that the rate alone determines it."""

    name: str
    media_type: str
    suffixes: tuple[str, ...]
    rates: tuple[int, ...] = ()
    bitrates: Bitrates | None = None

    def rate_for(self, sample_rate: int) -> int:
        """Return the lowest supported rate at or above `sample_rate`, or else the highest one."""
        if not self.rates or sample_rate in self.rates:
            return sample_rate
        return self.rates[min(bisect_left(self.rates, sample_rate), len(self.rates) - 1)]

    def check_rate(self, rate: int) -> int:
        if self.rates and rate not in self.rates:
            known = ", ".join(str(known) for known in self.rates)
            raise InvalidRequest(f"{self.name} does not support {rate} Hz; use one of {known} Hz")
        if not MIN_RATE <= rate <= MAX_RATE:
            raise InvalidRequest(f"the sample rate must be {MIN_RATE} to {MAX_RATE} Hz, not {rate}")
        return rate

    def check_bitrate(self, bitrate: int | None) -> int | None:
        """Return the bitrate to use in bits per second; the default for None. Raises InvalidRequest."""
        if self.bitrates is None:
            if bitrate is not None:
                raise InvalidRequest(f"{self.name} has no bitrate to choose; leave the bitrate out")
            return None
        if bitrate is None:
            return self.bitrates.default
        if not self.bitrates.min <= bitrate <= self.bitrates.max:
            bounds = f"{self.bitrates.min} to {self.bitrates.max}"
            raise InvalidRequest(f"{self.name} supports {bounds} bits per second, not {bitrate}")
        return bitrate


# Opus always codes at 48 kHz; webm is Opus in the container that browsers play while it is streamed.
OPUS_RATES = (48_000,)
OPUS_BITRATES = Bitrates(6_000, 48_000, 256_000)
# Telephone networks carry G.711 at 8 kHz, 8 bits per sample; ulaw and alaw are its bytes without a header.
G711_RATES = (8_000,)

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
        AudioFormat("ulaw", "audio/basic", (".ulaw", ".ul"), G711_RATES),
        AudioFormat("alaw", "audio/x-alaw-basic", (".alaw", ".al"), G711_RATES),
    )
}
FORMAT_OF_SUFFIX = {suffix: known.name for known in FORMATS.values() for suffix in known.suffixes}


def audio_format(name: str) -> AudioFormat:
    try:
        return FORMATS[name]
    except KeyError:
        raise InvalidRequest(f"unknown audio format {name!r}; use one of {', '.join(FORMATS)}") from None


def format_of(path: Path) -> str:
    """Return the format of a file name's suffix. Raises InvalidRequest."""
    try:
        return FORMAT_OF_SUFFIX[path.suffix.lower()]
    except KeyError:
        known = ", ".join(FORMAT_OF_SUFFIX)
        raise InvalidRequest(f"{path.name!r} has no known audio suffix; use one of {known}") from None
