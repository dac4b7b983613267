"""Load a model as numpy arrays, without torch, for the native backend.

Reads what `shoal quantize` and the export of `nano` write: safetensors of one file, int8 or float16 or float32, weight
norm folded. Everything else is refused and needs `load_checkpoint`. The arrays hold the same values as its modules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from shoal.checkpoint.format.directory import (
    builtin_voices,
    find_codec,
    prompt_seconds,
    read_checked_profile,
    read_model_config,
    read_tokenizer,
    require_complete,
    require_directory,
)
from shoal.checkpoint.format.layout import STACKED, to_module_name
from shoal.checkpoint.format.profile import ModelProfile
from shoal.codec.arrays import CodecArrays
from shoal.errors import CheckpointError
from shoal.model.arrays import ModelArrays
from shoal.model.config import DualARConfig
from shoal.text.tokenizer import Tokenizer

Stored = dict[str, NDArray[Any]]
MODEL_FILE = "model.safetensors"
ENCODE_ONLY = ("encoder.", "quantizer.pre_module.", "quantizer.downsample.")
EMBEDDINGS = ("slow.embeddings", "slow.codebook_embeddings", "fast.embeddings")


@dataclass(frozen=True, slots=True)
class ArrayCheckpoint:
    """A loaded model with its codec, tokenizer and defaults, like `Checkpoint`."""

    name: str
    model: ModelArrays
    codec: CodecArrays
    tokenizer: Tokenizer
    profile: ModelProfile
    directory: Path

    @property
    def builtin_voices(self) -> tuple[Path, ...]:
        """Directories of the voices that come with the model."""
        return builtin_voices(self.directory)

    @property
    def prompt_seconds(self) -> float:
        """Seconds of recordings that fit into a prompt without text."""
        return prompt_seconds(self.model.config, self.codec.config)


def load_arrays(directory: Path, name: str) -> ArrayCheckpoint:
    """Load the decode side of a model. Raises CheckpointError, also for files that only `load_checkpoint` reads."""
    require_directory(directory)
    require_complete(directory)
    tokenizer = read_tokenizer(directory)
    config = read_model_config(directory, tokenizer)
    codec_file, codec = find_codec(directory)
    if codec.num_codebooks != config.num_codebooks:
        raise CheckpointError(f"{directory}: the model generates {config.num_codebooks} codebooks, not the codec's")
    stored = read_arrays(directory / MODEL_FILE, lambda each: True)
    return ArrayCheckpoint(
        name,
        ModelArrays(config, model_weights(config, stored)),
        CodecArrays(codec, read_arrays(codec_file, lambda each: not each.startswith(ENCODE_ONLY))),
        tokenizer,
        read_checked_profile(directory, config),
        directory,
    )


def read_arrays(path: Path, wanted: Callable[[str], bool]) -> Stored:
    """Return the wanted arrays of a safetensors file. Raises CheckpointError, also for dtypes that numpy lacks."""
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{path}: cannot be read as numpy arrays: {problem}") from problem


def model_weights(config: DualARConfig, stored: Stored) -> Stored:
    """Return the weights under the names of the modules: stacked, embeddings as floats, output rows as `head`."""
    named = _stack({to_module_name(name): array for name, array in stored.items()})
    for table in EMBEDDINGS:
        named[f"{table}.weight"] = _floats(named, table)
    if config.tie_word_embeddings:
        named["slow.output.weight"] = named["slow.embeddings.weight"]
    ids = [*range(config.semantic_begin_id, config.semantic_end_id + 1), config.stop_id]
    for part in ("weight", "scales"):
        output = named.pop(f"slow.output.{part}", None)
        if output is not None:
            named[f"head.{part}"] = output[ids]
    return named


def _stack(arrays: Stored) -> Stored:
    """Concatenate the pieces of each stacked weight; other arrays are passed on."""
    left = dict(arrays)
    for whole, pieces in STACKED.items():
        for name in [name for name in arrays if f".{pieces[0]}." in name]:
            names = [name.replace(pieces[0], piece) for piece in pieces]
            if all(each in left for each in names):
                left[name.replace(pieces[0], whole)] = np.concatenate([left.pop(each) for each in names])
    return left


def _floats(named: Stored, layer: str) -> NDArray[np.float32]:
    """Return an embedding table in fp32; int8 tables are multiplied by their scales."""
    weight, scales = named.get(f"{layer}.weight"), named.pop(f"{layer}.scales", None)
    if weight is None:
        raise CheckpointError(f"{layer}.weight is missing")
    table = weight.astype(np.float32)
    return table if scales is None else table * scales.astype(np.float32)[:, None]
