"""The only reader of flags, environment and file, in this order: a flag wins over a variable, that over the file.

Every setting is one field here. It is a flag of `shoal serve`, a variable `SHOAL_…` and a key of the TOML file, all by
the same name. `docs/configuration.md` is made from this file.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, SecretStr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from shoal.api.config import MODEL_ALIASES, KeyLimits, Limits, ServerConfig
from shoal.config import EngineConfig
from shoal.engine.memory.limit import read_memory_limit
from shoal.engine.process.worker import EngineSource
from shoal.errors import InvalidRequest
from shoal.paths import config_directory, state_directory
from shoal.quantize.modes import WeightModes
from shoal.voices.store import voice_directory

PREFIX = "SHOAL_"
FILE_VARIABLE = "SHOAL_CONFIG"
# Names of an older server for the same models.
ALIASES = {
    "device": "S1_MINI_DEVICE",
    "dtype": "S1_MINI_PRECISION",
    "slots": "S1_MINI_BATCH_SIZE",
    "batch_seconds": "S1_MINI_BATCH_TIMEOUT_MS",
    "kv_bytes": "S1_MINI_KV_CACHE_SIZE",
    "cached_voices": "S1_MINI_REFERENCE_CACHE_SIZE",
    "clear_on_oom": "S1_MINI_VRAM_CLEAR_ON_OOM",
    "request_seconds": "S1_MINI_REQUEST_TIMEOUT_S",
    "metrics": "S1_MINI_METRICS_ENABLED",
}
# That server compiled or did not, by a switch and a backend of torch.compile; here both come to a rung of the ladder.
COMPILE, COMPILE_BACKEND = "S1_MINI_COMPILE", "S1_MINI_COMPILE_BACKEND"
BACKEND_RUNGS = {"inductor": "auto", "cudagraphs": "graph", "eager": "eager", "aot_eager": "eager"}
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def _listed(value: Any) -> Any:
    """Variables and flags hold lists with commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _dtype(value: Any) -> Any:
    name = DTYPE_NAMES.get(value, value) if isinstance(value, str) else value
    return None if name in ("auto", "") else name


def _device(text: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise InvalidRequest(f"unknown device {text[:64]!r}: auto, cpu, cuda or cuda:N")


def _weights(text: str) -> None:
    if text != EngineConfig.quantize:
        WeightModes.parse(text)


def _checked(check: Callable[[str], object]) -> AfterValidator:
    """A text that means something: what a room refuses is refused here already."""

    def validate(text: str) -> str:
        try:
            check(text)
        except InvalidRequest as problem:
            raise ValueError(str(problem)) from None
        return text

    return AfterValidator(validate)


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_listed)]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"] | None, BeforeValidator(_dtype)]
Device = Annotated[str, _checked(_device)]
Weights = Annotated[str, _checked(_weights)]
Cap = Annotated[str, _checked(read_memory_limit)]
Positive = Annotated[float, Field(gt=0)]
Bytes = Annotated[ByteSize, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Sizes = Annotated[tuple[Count, ...], BeforeValidator(_listed), Field(min_length=1)]


class Settings(BaseSettings):
    """Checked values, before they are cut into the pieces that each room gets."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, title="settings")

    # Model
    model: str = Field("nano", description="A name or a directory, as for `shoal say`.")
    device: Device = Field("auto", description="auto, cpu, cuda or cuda:1.")
    dtype: Dtype = Field(None, description="float32, bfloat16 or float16; without it what suits the device.")
    quantize: Weights = Field(
        EngineConfig.quantize,
        description="Weights: auto, none, int8, int4 or fp8, or by parts: `slow=int8,fast=fp8,codec=int8`.",
    )
    codec: Path | None = Field(None, description="The codec of models that come without one.")
    voices: Path | None = Field(None, description="Directory of stored voices; without it the user's data directory.")

    # Engine
    slots: Count = Field(EngineConfig.slots, description="Voices that are spoken at one time.")
    max_waiting: Annotated[int, Field(ge=0)] = Field(
        EngineConfig.max_waiting, description="Requests that may wait for a slot; more are refused with 429."
    )
    gpu_memory: Cap = Field(
        EngineConfig.gpu_memory, description="What the engine may take of a GPU: a share of it (0.9), or 4GB, 12GiB."
    )
    kv_bytes: Bytes | None = Field(
        None, description="Most memory for keys and values: 1GiB. Without it what the rest leaves; on a CPU 1 GiB."
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto", description="Type of keys and values; auto is the model's. The others hold twice the voices."
    )
    token_budget: Count = Field(EngineConfig.token_budget, description="Columns computed per step.")
    policy: Literal["continuous", "dynamic", "static"] = Field(
        EngineConfig.policy, description="How requests are let in; the other two collect a batch first."
    )
    batch_size: Count = Field(EngineConfig.batch_size, description="Of the policies that collect.")
    # An engine that makes no step for a minute while requests wait is taken for one that hangs.
    batch_seconds: Annotated[float, Field(gt=0, le=10)] = Field(
        EngineConfig.batch_seconds, description="How long they collect, at most 10."
    )
    buckets: Sizes = Field(
        EngineConfig.buckets,
        description="Batch sizes that a GPU has a graph for, up to `slots`, which is always one. Fewer start sooner.",
    )
    guard: bool = Field(EngineConfig.guard, description="Judge whether what comes out is speech.")
    rung: Literal["auto", "graph", "fused", "eager"] = Field(
        "auto", description="How steps are run: `auto` takes the highest rung that works here; others begin there."
    )
    clear_on_oom: bool = Field(
        EngineConfig.clear_on_oom, description="Give unused device memory back before going on after it ran out."
    )
    cached_voices: Count = Field(EngineConfig.cached_voices, description="Encoded voices kept in memory.")

    # Server
    host: str = Field("127.0.0.1", description="Address to listen on. Others than loopback need a key or `insecure`.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8080, description="Port to listen on; 0 takes a free one.")
    insecure: bool = Field(False, description="Let anybody in who can reach the address.")
    api_keys: Secrets = Field((), description="Keys that open the door, besides those of `keys_file`.")
    keys_file: Path | None = Field(None, description="File of `shoal keys`; without it the user's, if there is one.")
    model_aliases: Names = Field(MODEL_ALIASES, description="Names under which OpenAI clients may ask for the model.")
    metrics: bool = Field(True, description="Serve `/metrics`.")
    cors_origins: Names = Field(
        (), description="Web pages of other origins that may use the server: `https://app.example`, or `*` for all."
    )
    tracing: bool = Field(False, description="OpenTelemetry spans, by the OTEL_ variables; needs `shoal[tracing]`.")
    log_format: Literal["json", "text"] = Field("json", description="Of the log.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Of Shoal's own lines.")
    drain_seconds: Positive = Field(30.0, description="Time to finish requests after SIGTERM.")
    encoding_threads: Count = Field(2, description="Threads for audio encoders.")
    models_bytes: Bytes | None = Field(
        None, description="All models of a SageMaker multi-model endpoint: 12GiB. Without it 0.9 of what there is."
    )

    # Limits
    request_seconds: Positive = Field(60.0, description="From a request to its last sample.")
    text_characters: Count = Field(
        Limits.text_characters, description="Longest text of one request. The model has a limit, too, usually 20,000."
    )
    body_bytes: Bytes = Field(ByteSize(Limits.body_bytes), description="Largest body.")
    body_seconds: Positive = Field(Limits.body_seconds, description="Time for a body to arrive.")
    header_seconds: Positive = Field(Limits.header_seconds, description="Time for the headers to arrive.")
    reference_seconds: Positive = Field(
        EngineConfig.reference_seconds, description="Longest recording of a voice, and longest codes to decode."
    )
    buffer_bytes: Bytes = Field(ByteSize(Limits.buffer_bytes), description="Audio that waits for one reader.")
    slow_reader: Literal["end", "pause"] = Field("end", description="What to do when that buffer is full.")
    stall_seconds: Positive = Field(Limits.stall_seconds, description="A reader who takes nothing for so long is gone.")
    connections: Count = Field(
        Limits.connections,
        description="Requests and live sockets at one time; more are refused with 503, but for probes. Past it, "
        "connections that ask for nothing are closed, the longest idle first.",
    )
    requests_per_minute: Count | None = Field(None, description="Per key; keys may have their own.")
    concurrency: Count | None = Field(None, description="Requests under way per key; keys may have their own.")
    daily_audio_seconds: Positive | None = Field(None, description="Per key and day (UTC); keys may have their own.")
    usage_file: Path | None = Field(
        None, description="What keys had of it today; without it in the user's state directory. One per server."
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
        """`read_settings` asks each source itself, to know where a value came from."""
        return (init_settings,)

    def source(self) -> EngineSource:
        """What the engine is made from."""
        config = EngineConfig(
            slots=self.slots,
            max_waiting=self.max_waiting,
            quantize=self.quantize,
            gpu_memory=self.gpu_memory,
            kv_bytes=None if self.kv_bytes is None else int(self.kv_bytes),
            kv_dtype=self.kv_dtype,
            token_budget=self.token_budget,
            policy=self.policy,
            batch_size=self.batch_size,
            batch_seconds=self.batch_seconds,
            buckets=self.buckets,
            guard=self.guard,
            rung=self.rung,
            clear_on_oom=self.clear_on_oom,
            cached_voices=self.cached_voices,
            reference_seconds=self.reference_seconds,
        )
        return EngineSource(self.model, self.device, self.dtype, self.codec, self.voice_directory(), config)

    def voice_directory(self) -> Path:
        return self.voices or voice_directory()

    def server(self) -> ServerConfig:
        return ServerConfig(
            host=self.host,
            port=self.port,
            model=self.model,
            model_aliases=self.model_aliases,
            api_keys=tuple(key.get_secret_value() for key in self.api_keys),
            keys_file=self.keys_file or default_keys_file(),
            usage_file=self.usage_file or state_directory() / "usage.json",
            cors_origins=self.cors_origins,
            key_limits=KeyLimits(self.requests_per_minute, self.concurrency, self.daily_audio_seconds),
            insecure=self.insecure,
            limits=self.limits(),
            capacity=self.slots + self.max_waiting,
            encoding_threads=self.encoding_threads,
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
            connections=self.connections,
        )


class Environment(PydanticBaseSettingsSource):
    """`SHOAL_…`, and the older names where the first is not set."""

    def __init__(self, settings: type[BaseSettings], variables: Mapping[str, str]) -> None:
        super().__init__(settings)
        self._variables = variables
        self.names: dict[str, str] = {}  # the variable that a value came from

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        for name in (PREFIX + field_name.upper(), ALIASES.get(field_name, "")):
            value = self._variables.get(name, "")
            # Kubernetes sets SHOAL_PORT for a service that is called shoal.
            if value and not value.startswith("tcp://"):
                self.names[field_name] = name
                return _in_our_unit(name, value), field_name, False
        if field_name == "rung" and (found := _rung_of(self._variables)):
            value, self.names[field_name] = found
            return value, field_name, False
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        found = {name: self.get_field_value(field, name)[0] for name, field in Settings.model_fields.items()}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class ResolvedSettings:
    """Settings, and where each came from."""

    settings: Settings
    sources: dict[str, str]


def read_settings(
    flags: Mapping[str, Any] | None = None, file: Path | None = None, variables: Mapping[str, str] | None = None
) -> ResolvedSettings:
    """Raises InvalidRequest naming the setting that is wrong and the source it came from."""
    variables = os.environ if variables is None else variables
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    environment = Environment(Settings, variables)
    file = file or _file_of(variables)
    values, sources = dict[str, Any](), dict.fromkeys(Settings.model_fields, "default")
    for found, source in ((_toml(file), str(file)), (environment(), ""), (given, "flag")):
        values |= found
        sources |= {name: source or environment.names[name] for name in found}
    try:
        settings = Settings(**values)
    except ValidationError as problem:
        raise InvalidRequest(_told(problem, sources)) from None
    return ResolvedSettings(settings, sources)


def default_keys_file() -> Path | None:
    file = config_directory() / "keys.json"
    return file if file.exists() else None


def _in_our_unit(name: str, value: str) -> str:
    if not name.endswith("_MS"):
        return value
    try:
        return str(float(value) / 1000)
    except ValueError:
        raise InvalidRequest(f"{name} must be a number of milliseconds, not {value!r}") from None


def _rung_of(variables: Mapping[str, str]) -> tuple[str, str] | None:
    """The rung that the older names ask for, and which of them. Raises InvalidRequest for what means nothing here."""
    compile, backend = variables.get(COMPILE, ""), variables.get(COMPILE_BACKEND, "")
    if compile and not _truth(compile):
        return "eager", COMPILE
    if backend:
        if backend not in BACKEND_RUNGS:
            raise InvalidRequest(f"{COMPILE_BACKEND} is one of {', '.join(BACKEND_RUNGS)}, not {backend[:64]!r}")
        return BACKEND_RUNGS[backend], COMPILE_BACKEND
    return ("auto", COMPILE) if compile else None


def _truth(value: str) -> bool:
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        raise InvalidRequest(f"{COMPILE} is true or false, not {value[:64]!r}") from None


def _file_of(variables: Mapping[str, str]) -> Path | None:
    if variables.get(FILE_VARIABLE):
        return Path(variables[FILE_VARIABLE])
    usual = config_directory() / "shoal.toml"
    return usual if usual.is_file() else None


def _toml(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    if not file.is_file():
        raise InvalidRequest(f"there is no file of settings {file}")
    try:
        return TomlConfigSettingsSource(Settings, toml_file=file)()
    except ValueError as problem:
        raise InvalidRequest(f"{file} is not TOML: {problem}") from None


def _told(problem: ValidationError, sources: Mapping[str, str]) -> str:
    first = problem.errors(include_url=False, include_input=False)[0]
    name = str(first["loc"][0])
    told = first["msg"] if first["type"] != "extra_forbidden" else "no such setting; `shoal config` lists all of them"
    return f"{name} ({sources.get(name, 'unknown')}): {told.removeprefix('Value error, ')}"
