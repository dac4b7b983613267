"""Codec weights as stored (weight-normed, two spellings) -> as computed, and back."""

from collections.abc import Mapping

from torch import Tensor

from shoal.errors import CheckpointError

# Magnitude and direction, in both spellings torch has had.
SPELLINGS = ((".parametrizations.weight.original0", ".parametrizations.weight.original1"), (".weight_g", ".weight_v"))
DERIVED = (".freqs_cis", ".causal_mask")
ENCODE_ONLY = ("encoder.", "quantizer.pre_module.", "quantizer.downsample.")


def codec_tensors(stored: Mapping[str, Tensor], *, encoder: bool) -> dict[str, Tensor]:
    """Tensors of a codec under our names, folded; what only encoding needs is left out without `encoder`."""
    if any("generator" in name for name in stored):
        stored = {n.replace("generator.", ""): t for n, t in stored.items() if "generator." in n}
    kept = {name: tensor for name, tensor in stored.items() if not name.endswith(DERIVED)}
    if not encoder:
        kept = {name: tensor for name, tensor in kept.items() if not _only_encodes(name)}
    return fold_weight_norm(kept)


def fold_weight_norm(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """w = g · v / ‖v‖, the norm over all axes but the first."""
    folded: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        magnitude = next((pair for pair in SPELLINGS if name.endswith(pair[0])), None)
        if magnitude is not None:
            module = name.removesuffix(magnitude[0])
            direction = stored.get(module + magnitude[1])
            if direction is None:
                raise CheckpointError(f"codec: {name} has no {module + magnitude[1]} beside it")
            folded[f"{module}.weight"] = tensor * direction / _norm(direction)
        elif not name.endswith(tuple(pair[1] for pair in SPELLINGS)):
            folded[name] = tensor
    return folded


def unfold_weight_norm(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse, in upstream's spellings, for writing files that upstream reads."""
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


def _only_encodes(name: str) -> bool:
    return name.startswith(ENCODE_ONLY)
