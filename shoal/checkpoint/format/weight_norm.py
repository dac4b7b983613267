"""Codec tensors as stored (weight-normed, in two spellings) -> as computed, and back."""

from collections.abc import Mapping

from torch import Tensor

from shoal.checkpoint.format.names import is_buffer, strip_wrappers
from shoal.errors import CheckpointError

# Suffixes of magnitude and direction, in both spellings torch has had.
SPELLINGS = ((".parametrizations.weight.original0", ".parametrizations.weight.original1"), (".weight_g", ".weight_v"))
ENCODE_ONLY = ("encoder.", "quantizer.pre_module.", "quantizer.downsample.")
# Modules and buffers that only training uses.
TRAINING_MODULES = {
    "discriminator",
    "discriminators",
    "ema",
    "ema_model",
    "loss",
    "losses",
    "semantic_predictor_module",
}
TRAINING_BUFFERS = {"cluster_size", "embed_avg", "embed_sum", "inited", "initted", "num_batches_tracked"}


def codec_tensors(stored: Mapping[str, Tensor], *, encoder: bool) -> dict[str, Tensor]:
    """Return the tensors of a codec under our names, weight norm folded; without `encoder` only the decode side."""
    named = {strip_wrappers(name): tensor for name, tensor in stored.items()}
    if any("generator" in name.split(".") for name in named):
        named = {_below_generator(name): t for name, t in named.items() if "generator" in name.split(".")}
    kept = {name: tensor for name, tensor in named.items() if not is_buffer(name) and not _is_training_only(name)}
    if not encoder:
        kept = {name: tensor for name, tensor in kept.items() if not name.startswith(ENCODE_ONLY)}
    return fold_weight_norm(kept)


def fold_weight_norm(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute w = g · v / ‖v‖, the norm taken over all axes but the first."""
    folded: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        magnitude = next((pair for pair in SPELLINGS if name.endswith(pair[0])), None)
        if magnitude is not None:
            module = name.removesuffix(magnitude[0])
            direction = stored.get(module + magnitude[1])
            if direction is None:
                raise CheckpointError(f"codec: {name} is stored without {module + magnitude[1]}")
            folded[f"{module}.weight"] = tensor * direction / _norm(direction)
        elif not name.endswith(tuple(pair[1] for pair in SPELLINGS)):
            folded[name] = tensor
    return folded


def unfold_weight_norm(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Invert `fold_weight_norm` in upstream's spellings, for writing files that upstream reads."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        spelling = _spelling_of(name)
        if spelling is None:
            stored[name] = tensor
            continue
        module = name.removesuffix(".weight")
        stored[module + spelling[0]] = _norm(tensor)
        stored[module + spelling[1]] = tensor
    return stored


def _spelling_of(name: str) -> tuple[str, str] | None:
    if name.endswith(("in_proj.weight", "out_proj.weight")):
        return SPELLINGS[1]
    normed = name.endswith(".conv.weight") and name.startswith(("encoder.", "decoder."))
    return SPELLINGS[0] if normed else None


def _norm(direction: Tensor) -> Tensor:
    return direction.flatten(1).norm(dim=1).view(-1, *[1] * (direction.dim() - 1))


def _below_generator(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[parts.index("generator") + 1 :])


def _is_training_only(name: str) -> bool:
    """Return whether a tensor belongs to training: discriminators, losses, moving averages."""
    *modules, last = name.split(".")
    averaged = last.startswith("ema_") or last.endswith("_ema")
    return not TRAINING_MODULES.isdisjoint(modules) or last in TRAINING_BUFFERS or averaged
