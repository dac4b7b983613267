"""Named engine configurations that `shoal bench` compares.

A configuration is a set of arguments of `shoal.load` and fields of EngineConfig. The available settings are read from
these two, so that a new setting can be measured without a change here.
"""

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.config import EngineConfig
from shoal.errors import InvalidRequest

Settings = dict[str, Any]

PRESETS: dict[str, Settings] = {
    "default": {},
    "fp32": {"dtype": "float32", "quantize": "none"},
    "bf16": {"dtype": "bfloat16", "quantize": "none"},
    "fp16": {"dtype": "float16", "quantize": "none"},
    "int8": {"quantize": "int8"},
    "int8+codec": {"quantize": "int8,codec=int8"},
    "int4": {"quantize": "int4"},
    "fp8": {"quantize": "fp8"},
    "w8a8": {"quantize": "w8a8"},
    "kv-int8": {"kv_dtype": "int8"},
    "kv-fp8": {"kv_dtype": "fp8"},
    "graph": {"backend": "graph"},
    "fused": {"backend": "fused"},
    "plain-graph": {"backend": "plain-graph"},
    "eager": {"backend": "eager"},
    "dynamic": {"policy": "dynamic"},
    "static": {"policy": "static"},
    "no-prefix-cache": {"prefix_cache": False},
}
# Presets measured on a GPU without `--config`: all types of weights and KV cache that have fast kernels.
RECOMMENDED_ON_GPU = ("bf16", "int8", "int8+codec", "fp8", "int4", "kv-int8", "kv-fp8")
# Settings that the benchmark sets itself.
RESERVED = {"model", "device", "codec", "voices", "config", "warm", "slots"}


@dataclass(frozen=True, slots=True)
class Configuration:
    name: str
    settings: Settings


def parse_configurations(names: Sequence[str]) -> list[Configuration]:
    """Parse preset names, `all`, or NAME=VALUE settings separated by commas; duplicates are dropped.

    Raises InvalidRequest for an unknown preset or setting and for an invalid value.
    """
    found: dict[str, Configuration] = {}
    for name in names or ("default",):
        for each in PRESETS if name == "all" else (name,):
            found[each] = Configuration(each, _settings(each))
    return list(found.values())


def recommended(device: str) -> tuple[str, ...]:
    """Return the presets to measure on a device when none are named."""
    return RECOMMENDED_ON_GPU if device.startswith("cuda") else ("default",)


def available_settings() -> dict[str, type]:
    """Return the settings that a configuration may have in this build, with the type of each."""
    from shoal.engine.load import load

    hints = {name: str(each.annotation) for name, each in inspect.signature(load).parameters.items()}
    hints |= {each.name: str(each.type) for each in dataclasses.fields(EngineConfig)}
    return {name: _type(hint) for name, hint in hints.items() if name not in RESERVED}


def missing_settings(configuration: Configuration) -> str | None:
    """Return why this build cannot run a configuration; None if it has all of its settings."""
    missing = sorted(set(configuration.settings) - set(available_settings()))
    return f"this build has no setting {' and '.join(missing)}" if missing else None


def split_settings(settings: Settings) -> tuple[Settings, Settings]:
    """Split settings into keyword arguments of `shoal.load` and fields of EngineConfig."""
    fields = {each.name for each in dataclasses.fields(EngineConfig)}
    return (
        {name: value for name, value in settings.items() if name not in fields},
        {name: value for name, value in settings.items() if name in fields},
    )


def _settings(name: str) -> Settings:
    if name in PRESETS:
        return PRESETS[name]
    types = available_settings()
    if "=" not in name:
        raise InvalidRequest(f"unknown configuration {name!r}: use {', '.join(PRESETS)}, all, or NAME=VALUE,NAME=VALUE")
    texts: list[tuple[str, str]] = []
    for part in name.split(","):
        setting, _, value = part.partition("=")
        if setting in types:
            texts.append((setting, value))
        elif texts and types[texts[-1][0]] in (str, tuple):
            # Values may contain commas, as in quantize=slow=int8,codec=int8 or buckets=1,8.
            texts[-1] = (texts[-1][0], f"{texts[-1][1]},{part}")
        else:
            raise InvalidRequest(f"no setting {setting!r}; the settings are {', '.join(sorted(types))}")
    return {setting: _value(setting, value, types[setting]) for setting, value in texts}


def _type(hint: str) -> type:
    """Return the type of an annotation; `tuple` stands for a tuple of integers."""
    for each in (tuple, bool, int, float):
        if each.__name__ in hint:
            return each
    return str


def _value(setting: str, text: str, type_: type) -> Any:
    if type_ is bool:
        if text not in ("true", "false"):
            raise InvalidRequest(f"{setting} must be true or false, not {text!r}")
        return text == "true"
    try:
        return tuple(map(int, text.split(","))) if type_ is tuple else type_(text)
    except ValueError:
        raise InvalidRequest(f"{setting} must be of type {type_.__name__}, not {text!r}") from None
