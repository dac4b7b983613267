"""Which files make a model's directory. Nothing here needs torch."""

import json
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError

MODEL_FILES = ("model.safetensors.index.json", "model.safetensors", "model.pth")
CODEC_FILES = ("codec.safetensors", "codec.pth")
TOKENIZER_FILES = {"tokenizer.json": (), "tokenizer.tiktoken": ("special_tokens.json",)}


def missing_files(directory: Path, *, codec: bool) -> list[str]:
    """What a directory lacks to be a model, in words; downloads that broke off lack something."""
    lacking = [] if (directory / "config.json").is_file() else ["config.json"]
    lacking += _missing_tokenizer(directory) + _missing_weights(directory)
    if codec and not any((directory / name).is_file() for name in CODEC_FILES):
        lacking.append(" or ".join(CODEC_FILES))
    return lacking


def _missing_tokenizer(directory: Path) -> list[str]:
    for name, companions in TOKENIZER_FILES.items():
        if (directory / name).is_file():
            return [other for other in companions if not (directory / other).is_file()]
    return [" or ".join(TOKENIZER_FILES)]


def _missing_weights(directory: Path) -> list[str]:
    present = [name for name in MODEL_FILES if (directory / name).is_file()]
    if not present:
        return [" or ".join(MODEL_FILES)]
    if not present[0].endswith(".index.json"):
        return []
    where = read_json(directory / present[0]).get("weight_map", {})
    return sorted({str(shard) for shard in where.values() if not (directory / str(shard)).is_file()})


def read_json(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise CheckpointError(f"{path}: not readable as JSON: {problem}") from problem
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(stored).__name__}")
    return stored
