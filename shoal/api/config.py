"""Configuration of the serving layer, frozen. Built by `shoal/settings`, or directly in tests."""

from dataclasses import dataclass, field
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

SlowReaderPolicy = Literal["end", "pause"]

# Model names that OpenAI's clients send by default; all select the loaded model.
MODEL_ALIASES = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts", "gpt-4o-mini-tts-2025-12-15")


@dataclass(frozen=True)
class Limits:
    """Limits on what a single client or request may consume."""

    header_bytes: int = 32 << 10
    header_seconds: float = 10.0
    body_bytes: int = 32 << 20
    body_seconds: float = 30.0
    all_bodies_bytes: int = 256 << 20  # bodies of all requests and live sessions in flight
    text_characters: int = 10_000
    references: int = 16  # recordings in one request
    reference_seconds: float = 90.0  # length of one recording, or of codes to decode
    request_seconds: float = 60.0  # from admission to the last generated sample; sending the response may take longer
    buffer_bytes: int = 16 << 20  # generated audio that the client has not read yet, per request
    slow_reader: SlowReaderPolicy = "end"  # action when that buffer is full
    stall_seconds: float = 30.0  # a client that reads nothing for this long is disconnected
    live_idle_seconds: float = 600.0  # a live socket without text to speak is closed after this time
    connections: int = 1_024
    kept_speech_bytes: int = 64 << 20  # samples of finished speech that can still be stored as a voice; 0 keeps none
    kept_speech_seconds: float = 600.0  # how long finished speech is kept


@dataclass(frozen=True)
class KeyLimits:
    """Limits of one API key; None means no limit."""

    requests_per_minute: int | None = None
    concurrency: int | None = None
    daily_audio_seconds: float | None = None


@dataclass(frozen=True)
class ServerConfig:
    """Configuration of one server process, or of one frontend of a cluster."""

    host: str = "127.0.0.1"
    port: int = 8080
    model: str = "nano"
    model_aliases: tuple[str, ...] = MODEL_ALIASES
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)  # None: the admin routes do not exist
    keys_file: Path | None = None
    # Key file that does not exist yet. The server needs no key until it is created, and loads it then.
    upcoming_keys_file: Path | None = None
    usage_file: Path | None = None  # daily audio of each key; None: lost when the server restarts
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names in Host headers; see server/middleware/hosts.py
    key_limits: KeyLimits = field(default=KeyLimits())  # defaults for keys without their own
    insecure: bool = False
    limits: Limits = field(default=Limits())
    capacity: int = 272  # maximum requests in flight: the engine's slots plus its queue
    encoding_threads: int = 2
    sleep_seconds: float = 0.0  # time without requests after which the engine process ends; 0: never
    drain_seconds: float = 30.0
    metrics: bool = True
    tracing: bool = False

    ignore_instructions: bool = False  # accept `instructions` of OpenAI clients although the model follows none
    public_voices: bool = False  # list voices and models to clients without a key
    wyoming_port: int | None = None  # None: the Wyoming protocol is not served
    wyoming_host: str = "127.0.0.1"
    wyoming_languages: tuple[str, ...] = ("en",)  # languages of every voice, as listed to Home Assistant

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.host)


@cache
def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
