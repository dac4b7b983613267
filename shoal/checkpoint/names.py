"""Stored names -> names of our modules, and the few weights that are stored in pieces and kept as one.

Stored names come in three dialects: upstream's own, that of S2's safetensors, and Lightning's prefix. All become
upstream's first, then ours (`fast_layers.0…` -> `fast.layers.0…`, everything else under `slow.`).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shoal.checkpoint.tensors import shorten
from shoal.errors import CheckpointError

# What is stacked row below row: the pieces in order, and the name of the whole.
STACKED = {
    "attention.wqkv": ("attention.wq", "attention.wk", "attention.wv"),
    "feed_forward.w13": ("feed_forward.w1", "feed_forward.w3"),
}
ROW_DIMENSION = {"weight": 0, "scales": 0, "scales_and_zeros": 1}


def model_tensors(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a DualAR under our names."""
    unmerged = sorted(name for name in stored if "lora_" in name)
    if unmerged:
        raise CheckpointError(f"unmerged LoRA weights ({shorten(unmerged)}): merge them into the model first")
    upstream = {_to_upstream(stored)(name): tensor for name, tensor in stored.items() if not _is_audio_tower(name)}
    return stack({_to_ours(name): tensor for name, tensor in upstream.items()})


def to_upstream(name: str) -> str:
    """Our name -> upstream's: what is written to disk."""
    part, _, rest = name.partition(".")
    return f"fast_{rest}" if part == "fast" else rest


def stack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the pieces of each stacked weight; names without pieces stay as they are."""
    left = dict(tensors)
    for whole, pieces in STACKED.items():
        heads = [name.split(pieces[0] + ".") for name in tensors if f".{pieces[0]}." in name]
        for before, kind in heads:
            names = [f"{before}{piece}.{kind}" for piece in pieces]
            if all(name in left for name in names) and kind in ROW_DIMENSION:
                joined = torch.cat([left.pop(name) for name in names], dim=ROW_DIMENSION[kind])
                left[f"{before}{whole}.{kind}"] = joined
    return left


def unstack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split what upstream stores apart (gate and up), for writing."""
    whole, pieces = "feed_forward.w13", STACKED["feed_forward.w13"]
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if whole not in name:
            apart[name] = tensor
            continue
        dimension = ROW_DIMENSION[name.rpartition(".")[2]]
        for piece, part in zip(pieces, tensor.chunk(2, dim=dimension), strict=True):
            apart[name.replace(whole, piece)] = part
    return apart


def _to_upstream(stored: Mapping[str, Tensor]) -> Callable[[str], str]:
    if any(name.startswith(("text_model.model.", "audio_decoder.")) for name in stored):
        return _from_safetensors
    if next(iter(stored), "").startswith("model."):
        return lambda name: name.replace("model.", "")
    return lambda name: name


def _from_safetensors(name: str) -> str:
    name = name.removeprefix("text_model.model.")
    if name.startswith("audio_decoder."):
        rest = name.removeprefix("audio_decoder.")
        return rest if rest.startswith("codebook_embeddings.") else f"fast_{rest}"
    return name


def _is_audio_tower(name: str) -> bool:
    """Parts of the training-time audio encoder, which speech does not need."""
    return "audio_" in name and not name.startswith("audio_decoder.")


def _to_ours(name: str) -> str:
    return f"fast.{name.removeprefix('fast_')}" if name.startswith("fast_") else f"slow.{name}"
