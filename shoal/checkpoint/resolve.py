"""Load a model by name: a directory, a pulled or bundled model, or random weights."""

from dataclasses import replace
from pathlib import Path

import torch

from shoal.checkpoint.find import RANDOM_PREFIX, find_directory
from shoal.checkpoint.load import Checkpoint, ChooseModes, load_checkpoint, load_codec
from shoal.checkpoint.random import random_checkpoint
from shoal.errors import CheckpointError
from shoal.quantize.apply import prepare_codec, prepare_model


def resolve_model(
    name: str,
    *,
    codec: Path | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    encoder: bool = True,
    quantize: ChooseModes | None = None,
) -> Checkpoint:
    """Load the model of that name. Raises ModelNotFound and CheckpointError.

    `codec` replaces the model's own codec; `quantize` chooses the modes of its weights.
    """
    if name.startswith(RANDOM_PREFIX):
        checkpoint = random_checkpoint(name.removeprefix(RANDOM_PREFIX), dtype=dtype, device=device, encoder=encoder)
        if codec is not None:
            checkpoint = replace(checkpoint, codec=load_codec(codec, device=device, encoder=encoder))
        if quantize is not None:
            modes = quantize(checkpoint.model, checkpoint.codec)
            prepare_model(checkpoint.model, modes)
            prepare_codec(checkpoint.codec, modes.codec)
    else:
        directory = find_directory(name)
        checkpoint = load_checkpoint(
            directory, codec=codec, dtype=dtype, device=device, encoder=encoder, quantize=quantize
        )
        checkpoint = replace(checkpoint, name=name)
    _require_same_codebooks(checkpoint)
    return checkpoint


def _require_same_codebooks(checkpoint: Checkpoint) -> None:
    model, codec = checkpoint.model.config.num_codebooks, checkpoint.codec.config.num_codebooks
    if model != codec:
        raise CheckpointError(
            f"{checkpoint.name} generates {model} codebooks and the codec decodes {codec}: use the codec it was "
            "trained with"
        )
