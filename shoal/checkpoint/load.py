"""A directory -> a model, a codec and a tokenizer, strictly: what is missing, left over or misshapen is an error."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.checkpoint.names import model_tensors
from shoal.checkpoint.profile import Profile, read_profile
from shoal.checkpoint.tensors import read_changed, read_json, read_shards, read_tensors, shorten
from shoal.checkpoint.weight_norm import codec_tensors
from shoal.codec.config import CodecConfig
from shoal.codec.dac import Codec
from shoal.errors import CheckpointError, ModelNotFound
from shoal.model.config import DualARConfig, TokenIds, read_config
from shoal.model.dual_ar import DualAR
from shoal.model.linear import Int4Linear, Int8Linear, unpack_int4_tiles
from shoal.text.tokenizer import Tokenizer, load_tokenizer

MODEL_FILES = ("model.safetensors.index.json", "model.safetensors", "model.pth")
CODEC_FILES = ("codec.safetensors", "codec.pth")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything one model needs to speak."""

    name: str
    model: DualAR
    codec: Codec
    tokenizer: Tokenizer
    profile: Profile
    directory: Path | None = None  # where it was read from

    @property
    def builtin_voices(self) -> tuple[Path, ...]:
        """Directories of voices that come with the model."""
        folder = self.directory / "voices" if self.directory is not None else None
        return (folder,) if folder is not None and folder.is_dir() else ()


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the linear layers of a directory are stored."""

    bits: int
    group: int = 0


def load_checkpoint(
    directory: Path,
    *,
    codec: Path | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    encoder: bool = True,
) -> Checkpoint:
    """Load all parts. `codec` names another file or directory for those that hold none, as quantised ones do."""
    require_directory(directory)
    tokenizer = load_tokenizer(directory)
    model = load_model(directory, tokenizer, dtype=dtype, device=device)
    return Checkpoint(
        name=directory.name,
        model=model,
        codec=load_codec(codec or directory, device=device, encoder=encoder),
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


def load_model(
    directory: Path, tokenizer: Tokenizer, *, dtype: torch.dtype | None = None, device: str = "cpu"
) -> DualAR:
    """The DualAR of a directory. Without `dtype` the weights keep the type they are stored in."""
    config = read_model_config(directory, tokenizer)
    stored = read_changed(partial(read_model_file, find_model_file(directory)), model_tensors)
    return build_model(config, stored, find_quantization(stored), directory, dtype=dtype, device=device)


def build_model(
    config: DualARConfig,
    stored: Mapping[str, Tensor],
    quantization: Quantization | None,
    source: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> DualAR:
    """A model from tensors under our names; `source` is named in errors."""
    with torch.device("meta"):
        model = DualAR(config)
    if quantization is not None:
        quantize_skeleton(model, quantization)
        stored = make_tables_whole(model, stored)
    if quantization is not None and quantization.bits == 4:
        stored = {name: _unpacked(model, name, tensor) for name, tensor in stored.items()}
    assign(model, stored, source, dtype=dtype, device=device)
    return model.to(device).eval().requires_grad_(False)


def load_codec(source: Path, *, device: str = "cpu", encoder: bool = True) -> Codec:
    """The codec of a directory or weights file; without `encoder` only what decoding needs is read and kept."""
    weights, config = find_codec(source)
    with torch.device("meta"):
        codec = Codec(config, encoder=encoder)
    stored = read_changed(partial(read_tensors, weights), partial(codec_tensors, encoder=encoder))
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


def find_quantization(stored: Mapping[str, Tensor]) -> Quantization | None:
    """Read off the tensors themselves: upstream tells only by the directory's name, and directories get renamed."""
    for name, tensor in stored.items():
        if name.endswith(".scales"):
            return Quantization(bits=8)
        if name.endswith(".scales_and_zeros"):
            tiles = stored.get(name.replace(".scales_and_zeros", ".weight"))
            if tiles is None or tiles.dim() != 4:
                raise CheckpointError(f"{name} has no packed int4 weight beside it")
            columns = tiles.shape[1] * tiles.shape[3] * 32
            return Quantization(bits=4, group=columns // len(tensor))
    return None


def quantize_skeleton(model: nn.Module, quantization: Quantization) -> None:
    """Put quantised layers, still without storage, in the place of all linear ones that have no bias."""
    for name, child in list(model.named_children()):
        if not isinstance(child, nn.Linear) or child.bias is not None:
            quantize_skeleton(child, quantization)
            continue
        with torch.device("meta"):
            replacement: nn.Module = Int8Linear(child.in_features, child.out_features)
            if quantization.bits == 4:
                replacement = Int4Linear(child.in_features, child.out_features, quantization.group)
        setattr(model, name, replacement)


def make_tables_whole(model: nn.Module, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo int8 where no quantised layer computes: in embeddings, and in the one projection that has a bias."""
    quantised = {name for name, module in model.named_modules() if isinstance(module, Int8Linear | Int4Linear)}
    whole: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        owner, _, attribute = name.rpartition(".")
        scales = None if owner in quantised else stored.get(f"{owner}.scales")
        if scales is None or attribute == "bias":
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
        wanted = dtype if tensor.is_floating_point() else None
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
    if expected.is_floating_point() != tensor.is_floating_point():
        raise CheckpointError(f"{source}: {name} is stored as {tensor.dtype}, expected {expected.dtype}")


def _unpacked(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Bring one int4 tensor into our byte order; padding columns that upstream added are cut off."""
    owner, _, attribute = name.rpartition(".")
    layer = model.get_submodule(owner) if owner else model
    if not isinstance(layer, Int4Linear):
        return tensor
    if attribute == "weight" and _is_tiled(tensor):
        return unpack_int4_tiles(tensor, layer.weight.shape[1] * 2)
    return tensor[: len(layer.scales_and_zeros)] if attribute == "scales_and_zeros" else tensor


def _is_tiled(tensor: Tensor) -> bool:
    return tensor.dtype == torch.int32 and tensor.dim() == 4 and tensor.shape[2] == 32
