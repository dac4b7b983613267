"""The server's own settings, frozen. Built by `shoal/settings.py`, or by hand in tests."""

from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

SlowReader = Literal["end", "pause"]

# Names that OpenAI's clients send by habit; the one model that is loaded answers to them.
MODEL_ALIASES = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")


@dataclass(frozen=True)
class Limits:
    """What one client may cost, whoever it is."""

    header_bytes: int = 32 << 10
    header_seconds: float = 10.0
    body_bytes: int = 32 << 20
    body_seconds: float = 30.0
    all_bodies_bytes: int = 256 << 20  # of all requests and live sessions under way
    text_characters: int = 10_000
    references: int = 16  # recordings in one request
    reference_seconds: float = 90.0  # of one recording, or of codes that are to become one
    request_seconds: float = 60.0  # from request to last sample made; reading may take longer
    buffer_bytes: int = 16 << 20  # audio that is made and not read yet, per request
    slow_reader: SlowReader = "end"  # when that buffer is full
    stall_seconds: float = 30.0  # a reader who takes nothing for so long is gone
    connections: int = 1_024


@dataclass(frozen=True)
class KeyLimits:
    """What one key may use; None is no limit."""

    requests_per_minute: int | None = None
    concurrency: int | None = None
    daily_audio_seconds: float | None = None


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8080
    model: str = "nano"
    model_aliases: tuple[str, ...] = MODEL_ALIASES
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    keys_file: Path | None = None
    usage_file: Path | None = None  # of daily quotas; None: a restart begins a new count
    cors_origins: tuple[str, ...] = ()
    key_limits: KeyLimits = field(default=KeyLimits())
    insecure: bool = False
    limits: Limits = field(default=Limits())
    capacity: int = 272  # requests that may be under way: the engine's slots and its queue
    encoding_threads: int = 2
    drain_seconds: float = 30.0
    metrics: bool = True
    tracing: bool = False

    @property
    def on_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False
