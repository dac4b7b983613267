"""A directory -> a model, a codec and a tokenizer, strictly: what is missing, left over or misshapen is an error."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.checkpoint.empty_weights import init_empty_weights
from shoal.checkpoint.layout import CODEC_FILES, MANIFEST, MODEL_FILES, is_file, read_json, read_manifest
from shoal.checkpoint.names import model_tensors
from shoal.checkpoint.profile import ModelProfile, read_profile
from shoal.checkpoint.tensors import read_shards, read_tensors, read_transformed, shorten
from shoal.checkpoint.weight_norm import codec_tensors
from shoal.codec.config import CodecConfig
from shoal.codec.dac import Codec
from shoal.errors import CheckpointError, ModelNotFound
from shoal.model.config import DualARConfig, TokenIds, read_config
from shoal.model.dual_ar import DualAR
from shoal.model.linear import GROUP_SIZE, Fp8Linear, Int4Linear, Int8Linear, PerChannelLinear, unpack_int4_tiles
from shoal.quantize.apply import prepare_codec, prepare_model
from shoal.quantize.convolution import Int8Conv
from shoal.quantize.modes import WeightModes
from shoal.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything one model needs to speak."""

    name: str
    model: DualAR
    codec: Codec
    tokenizer: Tokenizer
    profile: ModelProfile
    directory: Path | None = None  # where it was read from

    @property
    def builtin_voices(self) -> tuple[Path, ...]:
        """Directories of voices that come with the model."""
        folder = self.directory / "voices" if self.directory is not None else None
        return (folder,) if folder is not None and folder.is_dir() else ()


# What to make of a model's weights, decided when they are mapped and before they are read.
ChooseModes = Callable[[DualAR, Codec], WeightModes]


def load_checkpoint(
    directory: Path,
    *,
    codec: Path | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    encoder: bool = True,
    quantize: ChooseModes | None = None,
) -> Checkpoint:
    """Load all parts. `codec` names another file or directory for those that hold none, as upstream's quantised ones.

    With `quantize` weights become what it says on their way to the device; without it they stay as they are stored.
    """
    require_directory(directory)
    require_complete(directory)
    tokenizer = load_tokenizer(directory)
    # Weights that are to change are only mapped here: they go to the device one by one, as they will stay there.
    model = (
        load_model(directory, tokenizer, dtype=dtype, device=device)
        if quantize is None
        else load_model(directory, tokenizer)
    )
    sound = load_codec(codec or directory, device=device, encoder=encoder)
    if quantize is not None:
        modes = quantize(model, sound)
        prepare_model(model, modes, device=device, dtype=dtype)
        prepare_codec(sound, modes.codec)
    return Checkpoint(
        name=directory.name,
        model=model,
        codec=sound,
        tokenizer=tokenizer,
        profile=read_profile(directory, model.config.family),
        directory=directory,
    )


def require_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise ModelNotFound(
            f"{directory}: no such directory. Give a checkpoint directory, fetch one with "
            "`shoal pull s1-mini`, or use a random model such as random:tiny"
        )


def require_complete(directory: Path) -> None:
    """Raises CheckpointError for a quantised directory that was copied or written in part."""
    if not (directory / MANIFEST).is_file():
        return
    for name, size in read_manifest(directory / MANIFEST).items():
        found = (directory / name).stat().st_size if is_file(directory / name) else 0
        if found != size:
            raise CheckpointError(
                f"{directory}: half written, {name} has {found:,} of {size:,} bytes. Copy it again, or make it again "
                "with `shoal quantize`"
            )


def load_model(
    directory: Path, tokenizer: Tokenizer, *, dtype: torch.dtype | None = None, device: str = "cpu"
) -> DualAR:
    """The DualAR of a directory. Without `dtype` the weights keep the type they are stored in."""
    config = read_model_config(directory, tokenizer)
    stored = read_transformed(partial(read_model_file, find_model_file(directory)), model_tensors)
    return build_model(config, stored, directory, dtype=dtype, device=device)


def build_model(
    config: DualARConfig,
    stored: Mapping[str, Tensor],
    source: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> DualAR:
    """A model from tensors under our names; `source` is named in errors."""
    with init_empty_weights():
        model = DualAR(config)
    insert_quantized_layers(model, stored)
    layers = dict(model.named_modules())
    stored = dequantize_embeddings(layers, stored)
    stored = {name: _unpacked(layers.get(name.rpartition(".")[0]), name, tensor) for name, tensor in stored.items()}
    assign(model, stored, source, dtype=dtype, device=device)
    return model.to(device).eval().requires_grad_(False)


def load_codec(source: Path, *, device: str = "cpu", encoder: bool = True) -> Codec:
    """The codec of a directory or weights file; without `encoder` only what decoding needs is read and kept."""
    weights, config = find_codec(source)
    with init_empty_weights():
        codec = Codec(config, encoder=encoder)
    stored = read_transformed(partial(read_tensors, weights), partial(codec_tensors, encoder=encoder))
    insert_quantized_layers(codec, stored)
    assign(codec, stored, weights, dtype=torch.float32, device=device)
    return codec.to(device).eval().requires_grad_(False)


def read_model_config(directory: Path, tokenizer: Tokenizer) -> DualARConfig:
    tokens = TokenIds(tokenizer.semantic_begin, tokenizer.semantic_end, tokenizer.stop_id)
    try:
        return read_config(read_json(directory / "config.json"), tokens)
    except (TypeError, ValueError) as problem:
        raise CheckpointError(f"{directory / 'config.json'}: {problem}") from problem


def find_model_file(directory: Path) -> Path:
    for name in MODEL_FILES:
        if (directory / name).is_file():
            return directory / name
    raise CheckpointError(f"{directory}: no model here, none of {', '.join(MODEL_FILES)}")


def read_model_file(path: Path) -> dict[str, Tensor]:
    return read_shards(path) if path.name.endswith(".index.json") else read_tensors(path)


def find_codec(source: Path) -> tuple[Path, CodecConfig]:
    """Weights and configuration. A `codec.json` beside the weights describes them; without one it is Fish's codec."""
    candidates = [source] if source.is_file() else [source / name for name in CODEC_FILES]
    for weights in candidates:
        if weights.is_file():
            described = weights.with_name("codec.json")
            config = CodecConfig.from_dict(read_json(described)) if described.is_file() else CodecConfig()
            return weights, config
    raise CheckpointError(
        f"{source}: no codec here, none of {', '.join(CODEC_FILES)}. "
        "Quantised directories have none of their own: name the original's with --codec"
    )


def insert_quantized_layers(module: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Put quantised layers, still without storage, where the tensors say so.

    They are read off the tensors themselves: upstream tells only by the directory's name, and directories get renamed.
    """
    modules = dict(module.named_modules())
    for name, scales in stored.items():
        owner, _, attribute = name.rpartition(".")
        if attribute not in ("scales", "scales_and_zeros") or owner not in modules:
            continue
        weight = stored.get(f"{owner}.weight")
        if weight is None:
            raise CheckpointError(f"{name} has no quantised weight beside it")
        with init_empty_weights():
            layer = _quantised_layer(modules[owner], weight, scales)
        if layer is not None:
            holder, _, attribute = owner.rpartition(".")
            setattr(modules[holder], attribute, layer)


def _quantised_layer(plain: nn.Module, weight: Tensor, scales: Tensor) -> nn.Module | None:
    """The layer that computes with such a weight; None where none does, as in an embedding."""
    if isinstance(plain, nn.Conv1d | nn.ConvTranspose1d):
        return Int8Conv(plain)
    if not isinstance(plain, nn.Linear):
        return None
    if scales.dim() == 3:
        return Int4Linear(plain.in_features, plain.out_features, _group(weight, len(scales)))
    kind = Fp8Linear if weight.dtype == Fp8Linear.DTYPE else Int8Linear
    return kind(plain.in_features, plain.out_features, bias=plain.bias is not None)


def _group(weight: Tensor, groups: int) -> int:
    """Columns per scale of an int4 weight, in upstream's tiles or in our bytes."""
    columns = weight.shape[1] * weight.shape[3] * 32 if weight.dim() == 4 else 2 * weight.shape[-1]
    return GROUP_SIZE if -(-columns // GROUP_SIZE) == groups else max(1, columns // max(1, groups))


def dequantize_embeddings(layers: Mapping[str, nn.Module], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo int8 where no quantised layer computes: in embeddings."""
    quantised = {name for name, module in layers.items() if isinstance(module, PerChannelLinear | Int4Linear)}
    whole: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        owner, _, attribute = name.rpartition(".")
        scales = None if owner in quantised else stored.get(f"{owner}.scales")
        if scales is None:
            whole[name] = tensor
        elif attribute == "weight":
            whole[name] = tensor.float() * scales.float()[:, None]
    return whole


def assign(
    module: nn.Module, stored: Mapping[str, Tensor], source: Path, *, dtype: torch.dtype | None, device: str
) -> None:
    """Give the module its weights, tensor by tensor, so that no second copy of the model ever exists."""
    expected = module.state_dict()
    _compare_names(expected, stored, source)
    for name, tensor in stored.items():
        _compare(name, expected[name], tensor, source)
        # What is quantised has the type it was quantised to.
        wanted = dtype if expected[name].is_floating_point() and expected[name].itemsize > 1 else None
        ready = tensor.to(device=device, dtype=wanted)
        owner, _, attribute = name.rpartition(".")
        holder = module.get_submodule(owner)
        if attribute in holder._parameters:
            holder._parameters[attribute] = nn.Parameter(ready, requires_grad=False)
        else:
            holder._buffers[attribute] = ready


def _compare_names(expected: Mapping[str, Tensor], stored: Mapping[str, Tensor], source: Path) -> None:
    missing, extra = sorted(set(expected) - set(stored)), sorted(set(stored) - set(expected))
    if missing:
        raise CheckpointError(f"{source}: {len(missing)} tensors are missing: {shorten(missing)}")
    if extra:
        raise CheckpointError(f"{source}: {len(extra)} tensors belong to no part of this model: {shorten(extra)}")


def _compare(name: str, expected: Tensor, tensor: Tensor, source: Path) -> None:
    if expected.shape != tensor.shape:
        raise CheckpointError(
            f"{source}: {name} is {list(tensor.shape)}, the configuration says {list(expected.shape)}"
        )
    quantised = expected.itemsize == 1 or tensor.itemsize == 1
    if expected.is_floating_point() != tensor.is_floating_point() or (quantised and expected.dtype != tensor.dtype):
        raise CheckpointError(f"{source}: {name} is stored as {tensor.dtype}, expected {expected.dtype}")


def _unpacked(layer: nn.Module | None, name: str, tensor: Tensor) -> Tensor:
    """Bring one int4 tensor into our byte order; padding columns that upstream added are cut off."""
    if not isinstance(layer, Int4Linear):
        return tensor
    if name.endswith(".weight") and _is_tiled(tensor):
        return unpack_int4_tiles(tensor, layer.weight.shape[1] * 2)
    return tensor[: len(layer.scales_and_zeros)] if name.endswith(".scales_and_zeros") else tensor


def _is_tiled(tensor: Tensor) -> bool:
    return tensor.dtype == torch.int32 and tensor.dim() == 4 and tensor.shape[2] == 32
