"""Stored tensor names -> module names, and weights that are stored in pieces and computed as one.

Stored names come in several forms: upstream's own, those of S2's safetensors, and with the prefixes of Lightning, DDP
or `torch.compile`. All are first mapped to upstream's names, then to ours (`fast_layers.0…` -> `fast.layers.0…`,
everything else below `slow.`).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shoal.checkpoint.format.layout import STACKED, to_module_name
from shoal.checkpoint.tensors import shorten
from shoal.errors import CheckpointError

ROW_DIMENSION = {"weight": 0, "scales": 0, "scales_and_zeros": 1}
# Buffers that upstream versions have stored; they follow from the configuration.
BUFFERS = {"freqs_cis", "fast_freqs_cis", "causal_mask", "codebook_offsets", "k_cache", "v_cache"}
# Scales of other quantization tools, whose weights are packed in ways that are not implemented.
FOREIGN_SCALES = (
    ".weight_scale", ".weight_scale_inv", ".input_scale", ".weight_packed", ".qweight", ".qzeros", ".SCB", ".absmax",
)  # fmt: skip
ROW_SCALES = ".weight.scale"  # community fp8 files: fp32 [out, 1] beside an fp8 weight [out, in]


def model_tensors(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a DualAR under our names, without buffers. Raises CheckpointError."""
    _refuse_unmerged(stored)
    named = {strip_wrappers(name): tensor for name, tensor in stored.items()}
    to_upstream_name = _upstream_names(named)
    upstream = {to_upstream_name(name): tensor for name, tensor in named.items() if not _is_audio_tower(name)}
    kept = {strip_wrappers(name): tensor for name, tensor in upstream.items() if not is_buffer(name)}
    return stack({to_module_name(name): tensor for name, tensor in _with_row_scales(kept).items()})


def strip_wrappers(name: str) -> str:
    """Remove the prefixes of `torch.compile` (`_orig_mod.`) and DistributedDataParallel (`module.`)."""
    name = name.replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def is_buffer(name: str) -> bool:
    return name.rpartition(".")[2] in BUFFERS


def to_upstream(name: str) -> str:
    """Map our name to upstream's, which is written to disk."""
    part, _, rest = name.partition(".")
    return f"fast_{rest}" if part == "fast" else rest


def stack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate the pieces of each stacked weight; other tensors are passed on."""
    left = dict(tensors)
    for whole, pieces in STACKED.items():
        heads = [name.split(pieces[0] + ".") for name in tensors if f".{pieces[0]}." in name]
        for before, attribute in heads:
            names = [f"{before}{piece}.{attribute}" for piece in pieces]
            if all(name in left for name in names) and attribute in ROW_DIMENSION:
                joined = torch.cat([left.pop(name) for name in names], dim=ROW_DIMENSION[attribute])
                left[f"{before}{whole}.{attribute}"] = joined
    return left


def unstack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split the weights that upstream stores separately (gate and up projection), for writing."""
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


def _refuse_unmerged(stored: Mapping[str, Tensor]) -> None:
    unmerged = sorted(name for name in stored if "lora_" in name)
    if unmerged:
        raise CheckpointError(f"unmerged LoRA weights ({shorten(unmerged)}): merge them into the model first")
    foreign = sorted(name for name in stored if name.endswith(FOREIGN_SCALES))
    if foreign:
        raise CheckpointError(
            f"weights quantized by an unsupported tool ({shorten(foreign)}): supported are upstream's int8 and int4, "
            "fp8 with X.weight.scale per row, and `shoal quantize`; otherwise use the original weights with --quantize"
        )


def _with_row_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bring the scales of community fp8 files into our layout: X.weight.scale [out, 1] or scalar -> X.scales [out]."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(ROW_SCALES):
            renamed[name] = tensor
            continue
        layer = name.removesuffix(ROW_SCALES)
        weight = tensors.get(f"{layer}.weight")
        if weight is None or weight.dtype != torch.float8_e4m3fn or tensor.numel() not in (1, len(weight)):
            raise CheckpointError(
                f"{name} {list(tensor.shape)} must be one scale per row of an fp8 (e4m3) weight {layer}.weight"
            )
        # Cloned: a view would keep the mapping of the file alive.
        renamed[f"{layer}.scales"] = tensor.flatten().expand(len(weight)).clone()
    return renamed


def _upstream_names(stored: Mapping[str, Tensor]) -> Callable[[str], str]:
    if any(name.startswith(("text_model.", "audio_decoder.")) for name in stored):
        return _from_safetensors
    if next(iter(stored), "").startswith("model."):
        return lambda name: name.replace("model.", "")
    return lambda name: name


def _from_safetensors(name: str) -> str:
    name = name.removeprefix("text_model.").replace("lm_head.", "output.").removeprefix("model.")
    if name.startswith("audio_decoder."):
        rest = name.removeprefix("audio_decoder.")
        return rest if rest.startswith("codebook_embeddings.") else f"fast_{rest}"
    return name


def _is_audio_tower(name: str) -> bool:
    """Return whether a tensor belongs to the audio encoder used in training, which speech does not need."""
    return "audio_" in name and not name.startswith("audio_decoder.")
