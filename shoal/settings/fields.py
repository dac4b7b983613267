"""All settings with their defaults and descriptions, and the configuration of each package made from them.

`docs/configuration.md` is generated from this file.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, SecretStr
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from shoal.api.config import MODEL_ALIASES, KeyLimits, Limits, ServerConfig
from shoal.config import CpuIsa, EngineConfig
from shoal.cores import usable_cores
from shoal.engine.memory.limit import read_memory_limit
from shoal.engine.process.worker import EngineSource
from shoal.errors import InvalidRequest
from shoal.paths import config_directory, state_directory
from shoal.quantize.modes import WeightModes
from shoal.voices.store import voice_directory

KEYS_NAME = "keys.json"
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def _split_list(value: Any) -> Any:
    """Split a comma-separated value of a flag or variable."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _dtype(value: Any) -> Any:
    name = DTYPE_NAMES.get(value, value) if isinstance(value, str) else value
    return None if name in ("auto", "") else name


def _device(text: str) -> None:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text):
        raise InvalidRequest(f"unknown device {text[:64]!r}; use auto, cpu, cuda, cuda:N or mps")


def _weights(text: str) -> None:
    if text != EngineConfig.quantize:
        WeightModes.parse(text)


def _checked(check: Callable[[str], object]) -> AfterValidator:
    """Validate a value with the parser that the engine uses later, so that the error names the setting."""

    def validate(text: str) -> str:
        try:
            check(text)
        except InvalidRequest as problem:
            raise ValueError(str(problem)) from None
        return text

    return AfterValidator(validate)


Names = Annotated[tuple[str, ...], BeforeValidator(_split_list)]
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_split_list)]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"] | None, BeforeValidator(_dtype)]
Device = Annotated[str, _checked(_device)]
Weights = Annotated[str, _checked(_weights)]
Cap = Annotated[str, _checked(read_memory_limit)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[ByteSize, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Sizes = Annotated[tuple[Count, ...], BeforeValidator(_split_list), Field(min_length=1)]


class Settings(BaseSettings):
    """Validated settings, before they are divided into the configuration of each package."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, title="settings")

    # Model
    model: str = Field(
        "nano", description="Model to serve: a name such as `nano` or `s1-mini`, or a checkpoint directory."
    )
    device: Device = Field("auto", description="Device to run on: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.")
    dtype: Dtype = Field(
        None,
        description="Dtype of weights and activations: `float32`, `bfloat16` or `float16`. Unset: chosen "
        "for the device.",
    )
    quantize: Weights = Field(
        EngineConfig.quantize,
        description="Quantization of the weights: `auto`, `none`, `int8`, `int4`, `fp8` or `w8a8`, or "
        "per part, such as `slow=int8,fast=fp8,codec=int8`.",
    )
    codec: Path | None = Field(None, description="Codec file or directory, for models that come without a codec.")
    lexicon: Path | None = Field(
        None, description="Pronunciation lexicon for all requests: a file with a table of words or a W3C PLS document."
    )
    voices: Path | None = Field(
        None, description="Directory of stored voices. Unset: `voices` in the user's data directory."
    )

    # Engine
    slots: Count = Field(
        EngineConfig.slots, description="Maximum number of sequences generated at the same time (batch size)."
    )
    max_waiting: Annotated[int, Field(ge=0)] = Field(
        EngineConfig.max_waiting,
        description="Maximum number of requests waiting for a slot; further ones are rejected with 429.",
    )
    gpu_memory: Cap = Field(
        EngineConfig.gpu_memory,
        description="GPU memory the engine may use: a fraction of the device (`0.9`) or a size (`12GiB`).",
    )
    kv_bytes: Bytes | None = Field(
        None,
        description="Maximum size of the KV cache, such as `1GiB`. Unset: what remains of `gpu_memory`; "
        "on a CPU, 1 GiB.",
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto",
        description="Dtype of the KV cache; `auto` is the model's dtype. `int8` and `fp8` hold twice as many tokens; "
        'on a CPU they need `backend = "eager"`.',
    )
    prefix_cache: bool = Field(
        EngineConfig.prefix_cache,
        description="Reuse KV blocks of a prompt for later prompts with the same prefix, such as those of a voice.",
    )
    host_kv_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(EngineConfig.host_kv_bytes),
        description="Host memory for shared KV blocks that were evicted from the device; 0 disables this tier.",
    )
    token_budget: Count | None = Field(
        None,
        description="Maximum number of prompt tokens computed per step; steps of hundreds of sequences compute more. "
        "Longer prompts are prefilled in chunks. Unset: on a GPU the tokens that it computes in 12 ms, measured at "
        "start, 512 to 4,096, and in bursts those of half a frame of audio; on other devices 512.",
    )
    policy: Literal["continuous", "dynamic", "static"] = Field(
        EngineConfig.policy,
        description="Admission policy: `continuous` admits requests at every step; `dynamic` and `static` collect a "
        "batch first.",
    )
    batch_size: Count = Field(
        EngineConfig.batch_size, description="Maximum batch size of the `dynamic` and `static` policies."
    )
    # Bounded, because the supervisor kills an engine that has requests but runs no step for a minute.
    batch_seconds: Annotated[float, Field(gt=0, le=10)] = Field(
        EngineConfig.batch_seconds,
        description="Maximum time in seconds, up to 10, that the `dynamic` and `static` policies wait to fill a batch.",
    )
    buckets: Sizes | None = Field(
        None,
        description="Batch sizes with a CUDA graph; values above `slots` are ignored, `slots` is always "
        "included. Unset: 1 to 128 in eleven sizes, then steps of 64 or more. Fewer sizes start faster.",
    )
    guard: bool = Field(
        EngineConfig.guard,
        description="Check that the generated audio is speech, and retry or fail the request when it is not.",
    )
    backend: Literal["auto", "graph", "fused", "plain-graph", "native", "eager"] = Field(
        "auto",
        description="Execution backend to start with: `auto` is the fastest that works on this device; "
        "the engine falls back to slower ones.",
    )
    cpu_isa: CpuIsa = Field(
        "auto",
        description="Instruction set of the `native` backend on a CPU: `auto` measures those of the CPU once and uses "
        "the fastest. All but `baseline` give the same audio. The variable also applies to `shoal say`, "
        "`shoal bench` and `shoal.load`.",
    )
    clear_on_oom: bool = Field(
        EngineConfig.clear_on_oom,
        description="Release cached GPU memory after an out-of-memory error, before continuing.",
    )
    cached_voices: Count = Field(
        EngineConfig.cached_voices, description="Maximum number of encoded voices kept in memory."
    )

    # Server
    host: str = Field(
        "127.0.0.1", description="Address to listen on. Any other than loopback requires an API key or `insecure`."
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8080, description="Port to listen on; 0 selects a free port.")
    insecure: bool = Field(False, description="Allow requests without an API key on an address other than loopback.")
    api_keys: Secrets = Field((), description="API keys that are accepted in addition to those of `keys_file`.")
    admin_key: SecretStr | None = Field(
        None,
        min_length=16,
        description="Secret for the operator's routes, `/v1/admin/…`, at least 16 characters; it is not an API key. "
        "Unset: these routes do not exist.",
    )
    keys_file: Path | None = Field(
        None,
        description="File of API keys made by `shoal keys`. Unset: `keys.json` in the user's "
        "configuration directory; a running server loads that file as soon as it is created.",
    )
    ignore_instructions: bool = Field(
        False,
        description="Accept `instructions` of OpenAI clients although the model follows none, and name them in the "
        "X-Ignored-Fields header; otherwise they are refused with 422.",
    )
    public_voices: bool = Field(
        False,
        description="List the voices and the model at `/v1/audio/voices` and `/v1/audio/models` without an API key, "
        "for clients that send none.",
    )
    wyoming_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="Port for Home Assistant's Wyoming protocol (flag `--wyoming`). Unset: not served."
    )
    wyoming_host: str = Field(
        ServerConfig.wyoming_host,
        description="Address to listen on for the Wyoming protocol, which has no API keys: any other than loopback "
        "requires `insecure`.",
    )
    wyoming_languages: Names = Field(
        ServerConfig.wyoming_languages, description="Languages of the voices, as Wyoming clients list them."
    )
    model_aliases: Names = Field(
        MODEL_ALIASES, description="Model names that OpenAI clients may use for the loaded model."
    )
    metrics: bool = Field(True, description="Serve Prometheus metrics at `/metrics`.")
    cors_origins: Names = Field(
        (),
        description="Origins whose web pages may call the server (CORS), such as `https://app.example`; "
        "`*` allows all.",
    )
    allowed_hosts: Names = Field(
        (),
        description="Names of this server that a Host header may have, such as `voice.example` or `*.example`; "
        "addresses and `localhost` are always accepted. Unset: a server without keys on loopback accepts only those, "
        "any other server every name; `*` accepts every name.",
    )
    tracing: bool = Field(
        False, description="Export OpenTelemetry spans, configured by the OTEL_* variables; needs `shoal-tts[tracing]`."
    )
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="Log format: `json` or `text`; `auto` is text on a terminal and JSON otherwise."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of Shoal's own log messages."
    )
    sleep_seconds: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Time in seconds without requests after which the engine process ends and frees its memory; the "
        "next request starts it again and waits for the model to load. 0: never.",
    )
    drain_seconds: Positive = Field(
        30.0, description="Maximum time in seconds to finish requests in flight after SIGTERM or SIGINT."
    )
    encoding_threads: Count | None = Field(
        None, description="Number of threads for audio encoders. Unset: one per usable core, at least 2."
    )
    models_bytes: Bytes | None = Field(
        None,
        description="Memory limit for all models of a SageMaker multi-model endpoint, such as `12GiB`. "
        "Unset: 0.9 of the container's memory.",
    )

    # Limits
    request_seconds: Positive = Field(
        60.0, description="Deadline: maximum time in seconds from the admission of a request to its last sample."
    )
    text_characters: Count = Field(
        Limits.text_characters,
        description="Maximum number of characters in the text of a request. The model's own limit also applies, "
        "by default 20,000.",
    )
    body_bytes: Bytes = Field(ByteSize(Limits.body_bytes), description="Maximum size of a request body.")
    body_seconds: Positive = Field(
        Limits.body_seconds, description="Maximum time in seconds for a request body to arrive."
    )
    header_seconds: Positive = Field(
        Limits.header_seconds, description="Maximum time in seconds for the request headers to arrive."
    )
    # Bounded, because the codec allocates its tables for this duration at start.
    reference_seconds: Annotated[float, Field(gt=0, le=3600)] = Field(
        EngineConfig.reference_seconds,
        description="Maximum duration in seconds, up to 3,600, of a voice recording and of codes to decode.",
    )
    buffer_bytes: Bytes = Field(
        ByteSize(Limits.buffer_bytes), description="Maximum encoded audio buffered for one client that reads slowly."
    )
    slow_reader: Literal["end", "pause"] = Field(
        "end", description="Action when `buffer_bytes` is full: `end` the response, or `pause` until the client reads."
    )
    stall_seconds: Positive = Field(
        Limits.stall_seconds, description="Time in seconds after which a client that reads nothing is disconnected."
    )
    live_idle_seconds: Positive = Field(
        Limits.live_idle_seconds,
        description="Time in seconds after which a live WebSocket without text to speak is closed.",
    )
    kept_speech_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(Limits.kept_speech_bytes),
        description="Memory for finished speech that can still be stored as a voice by its request id; 0 keeps none.",
    )
    kept_speech_seconds: Positive = Field(
        Limits.kept_speech_seconds,
        description="Time in seconds for which finished speech can be stored as a voice by its request id.",
    )
    connections: Count = Field(
        Limits.connections,
        description="Maximum number of concurrent requests and WebSockets; further ones, except health probes, are "
        "rejected with 503, and idle connections are closed, the longest idle first.",
    )
    requests_per_minute: Count | None = Field(
        None, description="Maximum number of requests per minute and API key; a key may have its own limit."
    )
    concurrency: Count | None = Field(
        None, description="Maximum number of requests in flight per API key; a key may have its own limit."
    )
    daily_audio_seconds: Positive | None = Field(
        None, description="Maximum seconds of audio per API key and day (UTC); a key may have its own limit."
    )
    usage_file: Path | None = Field(
        None,
        description="File that keeps the daily audio usage of each key across restarts. Unset: "
        "`usage.json` in the user's "
        "state directory. One file per server.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Disable the built-in sources: `read_settings` reads each source itself to know where a value came from."""
        return (init_settings,)

    def source(self) -> EngineSource:
        """Return the model, device and configuration to load an engine with."""
        config = EngineConfig(
            slots=self.slots,
            max_waiting=self.max_waiting,
            quantize=self.quantize,
            gpu_memory=self.gpu_memory,
            kv_bytes=None if self.kv_bytes is None else int(self.kv_bytes),
            kv_dtype=self.kv_dtype,
            prefix_cache=self.prefix_cache,
            host_kv_bytes=int(self.host_kv_bytes),
            token_budget=self.token_budget,
            policy=self.policy,
            batch_size=self.batch_size,
            batch_seconds=self.batch_seconds,
            buckets=self.buckets or (),
            guard=self.guard,
            backend=self.backend,
            cpu_isa=self.cpu_isa,
            clear_on_oom=self.clear_on_oom,
            cached_voices=self.cached_voices,
            reference_seconds=self.reference_seconds,
        )
        return EngineSource(
            self.model, self.device, self.dtype, self.codec, self.voice_directory(), config, self.lexicon
        )

    def voice_directory(self) -> Path:
        return self.voices or voice_directory()

    def server(self) -> ServerConfig:
        return ServerConfig(
            host=self.host,
            port=self.port,
            model=self.model,
            model_aliases=self.model_aliases,
            ignore_instructions=self.ignore_instructions,
            public_voices=self.public_voices,
            wyoming_port=self.wyoming_port,
            wyoming_host=self.wyoming_host,
            wyoming_languages=self.wyoming_languages,
            api_keys=tuple(key.get_secret_value() for key in self.api_keys),
            admin_key=None if self.admin_key is None else self.admin_key.get_secret_value(),
            keys_file=self.keys_file or default_keys_file(),
            upcoming_keys_file=None if self.insecure else config_directory() / KEYS_NAME,
            usage_file=self.usage_file or state_directory() / "usage.json",
            cors_origins=self.cors_origins,
            allowed_hosts=self.allowed_hosts,
            key_limits=KeyLimits(self.requests_per_minute, self.concurrency, self.daily_audio_seconds),
            insecure=self.insecure,
            limits=self.limits(),
            capacity=self.slots + self.max_waiting,
            encoding_threads=self.encoding_threads or max(2, usable_cores()),
            sleep_seconds=self.sleep_seconds,
            drain_seconds=self.drain_seconds,
            metrics=self.metrics,
            tracing=self.tracing,
        )

    def limits(self) -> Limits:
        return Limits(
            header_seconds=self.header_seconds,
            body_bytes=int(self.body_bytes),
            body_seconds=self.body_seconds,
            all_bodies_bytes=max(Limits.all_bodies_bytes, int(self.body_bytes)),
            text_characters=self.text_characters,
            reference_seconds=self.reference_seconds,
            request_seconds=self.request_seconds,
            buffer_bytes=int(self.buffer_bytes),
            slow_reader=self.slow_reader,
            stall_seconds=self.stall_seconds,
            live_idle_seconds=self.live_idle_seconds,
            connections=self.connections,
            kept_speech_bytes=int(self.kept_speech_bytes),
            kept_speech_seconds=self.kept_speech_seconds,
        )


def default_keys_file() -> Path | None:
    file = config_directory() / KEYS_NAME
    return file if file.exists() else None
