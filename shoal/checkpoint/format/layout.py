"""File names of a model directory, and which of them are missing. Works without torch."""

import json
import os
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError

MODEL_FILES = ("model.safetensors.index.json", "model.safetensors", "model.pth")
CODEC_FILES = ("codec.safetensors", "codec.pth")
# Written by `shoal quantize`: every weight file and its size.
MANIFEST = "quantized.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.tiktoken")
SPECIAL_TOKENS_FILE = "special_tokens.json"
# Codes in the list of special tokens that upstream assumes for a tiktoken file without special_tokens.json.
DEFAULT_CODES = 4096
# Weights that are concatenated along their rows: the name of the whole and the pieces in order.
STACKED = {
    "attention.wqkv": ("attention.wq", "attention.wk", "attention.wv"),
    "feed_forward.w13": ("feed_forward.w1", "feed_forward.w3"),
}


def missing_files(directory: Path, *, codec: bool) -> list[str]:
    """Return the files that a directory lacks to be a model, as after an interrupted download."""
    lacking = [] if (directory / "config.json").is_file() else ["config.json"]
    lacking += _missing_tokenizer(directory) + _missing_weights(directory)
    if codec and not any((directory / name).is_file() for name in CODEC_FILES):
        lacking.append(" or ".join(CODEC_FILES))
    return lacking


def _missing_tokenizer(directory: Path) -> list[str]:
    present = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not present:
        return [" or ".join(TOKENIZER_FILES)]
    complete = present[0] == "tokenizer.json" or (directory / SPECIAL_TOKENS_FILE).is_file()
    return [] if complete or has_default_specials(directory) else [SPECIAL_TOKENS_FILE]


def has_default_specials(directory: Path) -> bool:
    """Return whether special_tokens.json may be absent: the codebook has the size that upstream's default list has."""
    try:
        return bool(read_json(directory / "config.json").get("codebook_size") == DEFAULT_CODES)
    except CheckpointError:
        return False


def _missing_weights(directory: Path) -> list[str]:
    present = [name for name in MODEL_FILES if (directory / name).is_file()]
    if not present:
        return [" or ".join(MODEL_FILES)]
    if not present[0].endswith(".index.json"):
        return []
    shards = set(read_weight_map(directory / present[0]).values())
    return sorted(shard for shard in shards if not is_file(directory / shard))


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the shard, a file beside the index, of each tensor. Raises CheckpointError."""
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(_is_plain_name(shard) for shard in where.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names beside it")
    return where


def read_manifest(path: Path) -> dict[str, int]:
    """Return the weight files of a quantized directory and their sizes. Raises CheckpointError."""
    sizes = read_json(path).get("files", {})
    if not isinstance(sizes, dict) or not all(type(size) is int for size in sizes.values()):
        raise CheckpointError(f"{path}: files must map file names to sizes")
    return sizes


def is_file(path: Path) -> bool:
    """Return whether the file exists; False for invalid names, where `Path.is_file` may raise."""
    return os.path.isfile(path)  # noqa: PTH113


def is_directory(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name


def read_json(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: not readable as JSON: {problem}") from problem
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(stored).__name__}")
    return stored


def to_module_name(name: str) -> str:
    """Map upstream's name of a tensor to ours."""
    return f"fast.{name.removeprefix('fast_')}" if name.startswith("fast_") else f"slow.{name}"
