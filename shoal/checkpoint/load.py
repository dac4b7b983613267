"""Load model, codec and tokenizer from a directory. Missing, unexpected and misshapen tensors are errors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.checkpoint.empty_weights import init_empty_weights
from shoal.checkpoint.format.directory import (
    builtin_voices,
    find_codec,
    find_model_file,
    prompt_seconds,
    read_checked_profile,
    read_model_config,
    read_tokenizer,
    require_complete,
    require_directory,
)
from shoal.checkpoint.format.names import model_tensors
from shoal.checkpoint.format.profile import ModelProfile
from shoal.checkpoint.format.weight_norm import codec_tensors
from shoal.checkpoint.tensors import read_shards, read_tensors, read_transformed, shorten
from shoal.codec.dac import Codec
from shoal.errors import CheckpointError, counted
from shoal.model.config import DualARConfig
from shoal.model.dual_ar import DualAR
from shoal.model.linear import QUANTIZED_LINEARS, QuantizedLinear
from shoal.quantize.apply import prepare_codec, prepare_model
from shoal.quantize.convolution import Int8Conv
from shoal.quantize.modes import WeightModes
from shoal.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded model with its codec, tokenizer and defaults."""

    name: str
    model: DualAR
    codec: Codec
    tokenizer: Tokenizer
    profile: ModelProfile
    directory: Path | None = None  # source; None for random weights

    @property
    def builtin_voices(self) -> tuple[Path, ...]:
        """Directories of the voices that come with the model."""
        return builtin_voices(self.directory)

    @property
    def prompt_seconds(self) -> float:
        """Seconds of recordings that fit into a prompt without text."""
        return prompt_seconds(self.model.config, self.codec.config)


# Rows compared to decide whether a stored output matrix repeats the tied embeddings.
TIED_SAMPLE_ROWS = 64

# Chooses the quantization modes after the weights are mapped and before they are read.
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
    """Load a directory. Raises ModelNotFound and CheckpointError.

    `codec` is a file or directory for models without a codec, as upstream's quantized ones. `quantize` chooses modes
    that are applied while the weights move to the device; without it they keep their stored form.
    """
    require_directory(directory)
    require_complete(directory)
    tokenizer = read_tokenizer(directory)
    # Weights to be quantized are only mapped here; `prepare_model` moves them to the device one at a time.
    model = (
        load_model(directory, tokenizer, dtype=dtype, device=device)
        if quantize is None
        else load_model(directory, tokenizer)
    )
    loaded_codec = load_codec(codec or directory, device=device, encoder=encoder)
    if quantize is not None:
        modes = quantize(model, loaded_codec)
        prepare_model(model, modes, device=device, dtype=dtype)
        prepare_codec(loaded_codec, modes.codec)
    return Checkpoint(
        name=directory.name,
        model=model,
        codec=loaded_codec,
        tokenizer=tokenizer,
        profile=read_checked_profile(directory, model.config),
        directory=directory,
    )


def load_model(
    directory: Path, tokenizer: Tokenizer, *, dtype: torch.dtype | None = None, device: str = "cpu"
) -> DualAR:
    """Load the DualAR of a directory. Without `dtype` the weights keep their stored dtype. Raises CheckpointError."""
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
    """Build a model from tensors under our names; `source` is named in errors."""
    with init_empty_weights():
        model = DualAR(config)
    stored = _without_tied_output(config, stored, source)
    insert_quantized_layers(model, stored)
    layers = dict(model.named_modules())
    stored = dequantize_embeddings(layers, stored)
    stored = {name: _to_layer_layout(layers, name, tensor) for name, tensor in stored.items()}
    assign(model, stored, source, dtype=dtype, device=device)
    return model.to(device).eval().requires_grad_(False)


def load_codec(source: Path, *, device: str = "cpu", encoder: bool = True) -> Codec:
    """Load the codec of a directory or weights file; without `encoder` only its decode side. Raises CheckpointError."""
    weights, config = find_codec(source)
    with init_empty_weights():
        codec = Codec(config, encoder=encoder)
    stored = read_transformed(partial(read_tensors, weights), partial(codec_tensors, encoder=encoder))
    insert_quantized_layers(codec, stored)
    assign(codec, stored, weights, dtype=torch.float32, device=device)
    return codec.to(device).eval().requires_grad_(False)


def read_model_file(path: Path) -> dict[str, Tensor]:
    return read_shards(path) if path.name.endswith(".index.json") else read_tensors(path)


def insert_quantized_layers(module: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Replace layers whose stored tensors are quantized by uninitialized quantized layers. Raises CheckpointError.

    Only the tensors decide. Upstream goes by the directory's name, which users may change.
    """
    modules = dict(module.named_modules())
    for name, scales in stored.items():
        owner, _, attribute = name.rpartition(".")
        if attribute not in ("scales", "scales_and_zeros") or owner not in modules:
            continue
        weight = stored.get(f"{owner}.weight")
        if weight is None:
            raise CheckpointError(f"{name} is stored without {owner}.weight")
        with init_empty_weights():
            layer = _quantized_layer(modules[owner], weight, scales)
        if layer is not None:
            holder, _, attribute = owner.rpartition(".")
            setattr(modules[holder], attribute, layer)


def _quantized_layer(plain: nn.Module, weight: Tensor, scales: Tensor) -> nn.Module | None:
    """Return the quantized layer for a weight; None for modules without one, such as embeddings."""
    if isinstance(plain, nn.Conv1d | nn.ConvTranspose1d):
        return Int8Conv(plain)
    if not isinstance(plain, nn.Linear):
        return None
    layers = (kind.like(plain, weight, scales) for kind in QUANTIZED_LINEARS.values())
    return next((layer for layer in layers if layer is not None), None)


def dequantize_embeddings(layers: Mapping[str, nn.Module], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Dequantize int8 weights of modules that have no quantized layer: the embeddings."""
    quantized = {name for name, module in layers.items() if isinstance(module, QuantizedLinear)}
    floats: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        owner, _, attribute = name.rpartition(".")
        scales = None if owner in quantized else stored.get(f"{owner}.scales")
        if scales is None:
            floats[name] = tensor
        elif attribute == "weight":
            floats[name] = tensor.float() * scales.float()[:, None]
    return floats


def _without_tied_output(config: DualARConfig, stored: Mapping[str, Tensor], source: Path) -> Mapping[str, Tensor]:
    """Drop an output matrix that repeats the tied embeddings. Raises CheckpointError if it differs from them."""
    output, embeddings = stored.get("slow.output.weight"), stored.get("slow.embeddings.weight")
    if not config.tie_word_embeddings or output is None or embeddings is None:
        return stored
    # A sample of rows is enough to tell a copy from a head of its own, and reads little of the file.
    rows = torch.linspace(0, len(embeddings) - 1, TIED_SAMPLE_ROWS).long()
    if output.shape != embeddings.shape or (not output.is_meta and not torch.equal(output[rows], embeddings[rows])):
        raise CheckpointError(
            f"{source}: the output matrix differs from the embeddings, although config.json says "
            "tie_word_embeddings = true"
        )
    return {name: tensor for name, tensor in stored.items() if name != "slow.output.weight"}


def assign(
    module: nn.Module, stored: Mapping[str, Tensor], source: Path, *, dtype: torch.dtype | None, device: str
) -> None:
    """Assign stored tensors to a module one at a time, without a second copy of the model. Raises CheckpointError."""
    expected = module.state_dict()
    _compare_names(expected, stored, source)
    for name, tensor in stored.items():
        _compare(name, expected[name], tensor, source)
        # Quantized weights keep their dtype.
        target = dtype if expected[name].is_floating_point() and expected[name].itemsize > 1 else None
        ready = tensor.to(device=device, dtype=target)
        owner, _, attribute = name.rpartition(".")
        holder = module.get_submodule(owner)
        if attribute in holder._parameters:
            holder._parameters[attribute] = nn.Parameter(ready, requires_grad=False)
        else:
            holder._buffers[attribute] = ready


def _compare_names(expected: Mapping[str, Tensor], stored: Mapping[str, Tensor], source: Path) -> None:
    missing, extra = sorted(set(expected) - set(stored)), sorted(set(stored) - set(expected))
    if missing:
        raise CheckpointError(
            f"{source}: {counted(len(missing), 'tensor is', 'tensors are')} missing: {shorten(missing)}"
        )
    if extra:
        raise CheckpointError(f"{source}: {counted(len(extra), 'unexpected tensor')}: {shorten(extra)}")


def _compare(name: str, expected: Tensor, tensor: Tensor, source: Path) -> None:
    if expected.shape != tensor.shape:
        raise CheckpointError(f"{source}: {name} is {list(tensor.shape)}, expected {list(expected.shape)}")
    quantized = expected.itemsize == 1 or tensor.itemsize == 1
    if expected.is_floating_point() != tensor.is_floating_point() or (quantized and expected.dtype != tensor.dtype):
        raise CheckpointError(f"{source}: {name} is stored as {tensor.dtype}, expected {expected.dtype}")


def _to_layer_layout(layers: Mapping[str, nn.Module], name: str, tensor: Tensor) -> Tensor:
    owner, _, attribute = name.rpartition(".")
    layer = layers.get(owner)
    return layer.from_stored(attribute, tensor) if isinstance(layer, QuantizedLinear) else tensor
