"""Ways to run the same model, by name: what `shoal bench` compares.

A configuration is a few settings of `shoal.load` and of the engine. Which settings there are is asked of those two, so
that a mode that is added there can be measured here the day it arrives, and one this build lacks is named as missing.
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
    "kv-int8": {"kv_dtype": "int8"},
    "kv-fp8": {"kv_dtype": "fp8"},
    "graph": {"rung": "graph"},
    "fused": {"rung": "fused"},
    "eager": {"rung": "eager"},
    "dynamic": {"policy": "dynamic"},
    "static": {"policy": "static"},
    "no-prefix-cache": {"prefix_cache": False},
}
# Given by the benchmark itself.
RESERVED = {"model", "device", "codec", "voices", "config", "warm", "slots"}


@dataclass(frozen=True, slots=True)
class Configuration:
    name: str
    settings: Settings


def parse_configurations(names: Sequence[str]) -> list[Configuration]:
    """Presets by name, `all` of them, or NAME=VALUE settings joined by commas; each once."""
    found: dict[str, Configuration] = {}
    for name in names or ("default",):
        for each in PRESETS if name == "all" else (name,):
            found[each] = Configuration(each, _settings(each))
    return list(found.values())


def available_settings() -> dict[str, type]:
    """The settings a configuration may have in this build, and what kind of value each takes."""
    from shoal.engine.load import load

    hints = {name: str(each.annotation) for name, each in inspect.signature(load).parameters.items()}
    hints |= {each.name: str(each.type) for each in dataclasses.fields(EngineConfig)}
    return {name: _kind(hint) for name, hint in hints.items() if name not in RESERVED}


def missing_settings(configuration: Configuration) -> str | None:
    """Why a configuration cannot be had in this build; None if its settings are known."""
    missing = sorted(set(configuration.settings) - set(available_settings()))
    return f"this build has no setting {' and '.join(missing)}" if missing else None


def split_settings(settings: Settings) -> tuple[Settings, Settings]:
    """Settings parted into keywords of `shoal.load` and fields of EngineConfig."""
    fields = {each.name for each in dataclasses.fields(EngineConfig)}
    return (
        {name: value for name, value in settings.items() if name not in fields},
        {name: value for name, value in settings.items() if name in fields},
    )


def _settings(name: str) -> Settings:
    if name in PRESETS:
        return PRESETS[name]
    kinds = available_settings()
    if "=" not in name:
        raise InvalidRequest(f"unknown configuration {name!r}: {', '.join(PRESETS)}, all, or NAME=VALUE,NAME=VALUE")
    texts: list[tuple[str, str]] = []
    for part in name.split(","):
        setting, _, value = part.partition("=")
        if setting in kinds:
            texts.append((setting, value))
        elif texts and kinds[texts[-1][0]] in (str, tuple):
            # Values may have commas too, as in quantize=slow=int8,codec=int8 or buckets=1,8.
            texts[-1] = (texts[-1][0], f"{texts[-1][1]},{part}")
        else:
            raise InvalidRequest(f"no setting {setting!r}; there are {', '.join(sorted(kinds))}")
    return {setting: _value(setting, value, kinds[setting]) for setting, value in texts}


def _kind(hint: str) -> type:
    for kind in (tuple, bool, int, float):  # the first is of whole numbers
        if kind.__name__ in hint:
            return kind
    return str


def _value(setting: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text not in ("true", "false"):
            raise InvalidRequest(f"{setting} is true or false, not {text!r}")
        return text == "true"
    try:
        return tuple(map(int, text.split(","))) if kind is tuple else kind(text)
    except ValueError:
        raise InvalidRequest(f"{setting} is a {kind.__name__}, not {text!r}") from None
