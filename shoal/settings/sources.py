"""Read settings from flags, environment variables and a TOML file; flags override variables, variables the file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, TomlConfigSettingsSource

from shoal.errors import InvalidRequest
from shoal.paths import config_directory
from shoal.settings.fields import Settings

PREFIX = "SHOAL_"
FILE_VARIABLE = "SHOAL_CONFIG"
# Variables of an older server for the same models, read when the SHOAL_ variable is not set.
ALIASES = {
    "device": "S1_MINI_DEVICE",
    "dtype": "S1_MINI_PRECISION",
    "slots": "S1_MINI_BATCH_SIZE",
    "batch_size": "S1_MINI_BATCH_SIZE",
    "batch_seconds": "S1_MINI_BATCH_TIMEOUT_MS",
    "prefix_cache": "S1_MINI_KV_CACHE_SIZE",
    "cached_voices": "S1_MINI_REFERENCE_CACHE_SIZE",
    "clear_on_oom": "S1_MINI_VRAM_CLEAR_ON_OOM",
    "request_seconds": "S1_MINI_REQUEST_TIMEOUT_S",
    "metrics": "S1_MINI_METRICS_ENABLED",
}
BATCH_TIMEOUT, KV_ENTRIES = ALIASES["batch_seconds"], ALIASES["prefix_cache"]
# The older server had a switch for torch.compile and a choice of its backend; both map to the `backend` setting.
COMPILE, COMPILE_BACKEND = "S1_MINI_COMPILE", "S1_MINI_COMPILE_BACKEND"
COMPILE_BACKENDS = {"auto": "auto", "inductor": "auto", "cudagraphs": "graph", "eager": "eager", "aot_eager": "eager"}


class Environment(PydanticBaseSettingsSource):
    """Environment variables `SHOAL_…`, and the names in ALIASES where those are not set."""

    def __init__(self, settings: type[BaseSettings], variables: Mapping[str, str]) -> None:
        super().__init__(settings)
        self._variables = variables
        self.names: dict[str, str] = {}  # setting -> variable that its value came from

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        for name in (PREFIX + field_name.upper(), ALIASES.get(field_name, "")):
            value = self._variables.get(name, "")
            # Kubernetes sets SHOAL_PORT=tcp://… for a service named shoal.
            if value and not value.startswith("tcp://"):
                self.names[field_name] = name
                return _convert_alias(name, value), field_name, False
        if field_name == "backend" and (found := _backend_from_aliases(self._variables)):
            value, self.names[field_name] = found
            return value, field_name, False
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        found = {name: self.get_field_value(field, name)[0] for name, field in Settings.model_fields.items()}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class ResolvedSettings:
    """Settings and the source of each value: `default`, `flag`, a variable or the path of the file."""

    settings: Settings
    sources: dict[str, str]

    def notices(self) -> list[str]:
        """Return a warning for each variable of the older server that has no effect here, or less than it had there."""
        notices = []
        if self.sources["batch_seconds"] == BATCH_TIMEOUT and self.settings.policy == "continuous":
            notices.append(
                f"{BATCH_TIMEOUT} has no effect: the policy `continuous` admits requests at every step and waits for "
                "no batch; SHOAL_POLICY=dynamic collects batches"
            )
        if self.sources["prefix_cache"] == KV_ENTRIES and self.settings.prefix_cache:
            notices.append(
                f"{KV_ENTRIES} only switches the prefix cache on: it holds as many prefixes as the KV cache has "
                "memory for and evicts the least recently used; SHOAL_KV_BYTES limits the memory"
            )
        return notices


def read_settings(
    flags: Mapping[str, Any] | None = None, file: Path | None = None, variables: Mapping[str, str] | None = None
) -> ResolvedSettings:
    """Read and validate all settings. Raises InvalidRequest that names the wrong setting and its source."""
    variables = os.environ if variables is None else variables
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    environment = Environment(Settings, variables)
    file = file or _settings_file(variables)
    values, sources = dict[str, Any](), dict.fromkeys(Settings.model_fields, "default")
    for found, source in ((_toml(file), str(file)), (environment(), ""), (given, "flag")):
        values |= found
        sources |= {name: source or environment.names[name] for name in found}
    try:
        settings = Settings(**values)
    except ValidationError as problem:
        raise InvalidRequest(_format_error(problem, sources)) from None
    return ResolvedSettings(settings, sources)


def _convert_alias(name: str, value: str) -> str:
    """Convert milliseconds to seconds, and a number of cache entries to a switch."""
    if name not in (BATCH_TIMEOUT, KV_ENTRIES):
        return value
    try:
        return str(float(value) / 1000) if name == BATCH_TIMEOUT else str(int(value) > 0)
    except ValueError:
        unit = "a number of milliseconds" if name == BATCH_TIMEOUT else "a number of cached prefixes"
        raise InvalidRequest(f"{name} must be {unit}, not {value[:64]!r}") from None


def _backend_from_aliases(variables: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (`backend` value, variable) from the older variables. Raises InvalidRequest for unknown values."""
    compile, compiler = variables.get(COMPILE, ""), variables.get(COMPILE_BACKEND, "")
    if compile not in ("", "auto") and not _parse_bool(compile):
        return "eager", COMPILE
    if compiler:
        if compiler not in COMPILE_BACKENDS:
            raise InvalidRequest(
                f"{COMPILE_BACKEND} must be one of {', '.join(COMPILE_BACKENDS)}, not {compiler[:64]!r}"
            )
        return COMPILE_BACKENDS[compiler], COMPILE_BACKEND
    return ("auto", COMPILE) if compile else None


def _parse_bool(value: str) -> bool:
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        raise InvalidRequest(f"{COMPILE} must be auto, true or false, not {value[:64]!r}") from None


def _settings_file(variables: Mapping[str, str]) -> Path | None:
    if variables.get(FILE_VARIABLE):
        return Path(variables[FILE_VARIABLE])
    default = config_directory() / "shoal.toml"
    return default if default.is_file() else None


def _toml(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    if not file.is_file():
        raise InvalidRequest(f"settings file {file} does not exist")
    try:
        return TomlConfigSettingsSource(Settings, toml_file=file)()
    except ValueError as problem:
        raise InvalidRequest(f"{file} is not valid TOML: {problem}") from None


def _format_error(problem: ValidationError, sources: Mapping[str, str]) -> str:
    first = problem.errors(include_url=False, include_input=False)[0]
    name = str(first["loc"][0])
    message = (
        "no such setting; `shoal config` lists all settings" if first["type"] == "extra_forbidden" else first["msg"]
    )
    return f"{name} ({sources.get(name, 'unknown')}): {message.removeprefix('Value error, ')}"
