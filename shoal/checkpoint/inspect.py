"""Describe a checkpoint without reading its weights.

The loader itself runs on torch's meta device, so names, shapes and dtypes are checked exactly as by a real load: what
`inspect` accepts, `load` accepts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from shoal.checkpoint.find import RANDOM_PREFIX, find_directory
from shoal.checkpoint.format.directory import find_codec, find_model_file, read_model_config, read_tokenizer
from shoal.checkpoint.format.names import model_tensors
from shoal.checkpoint.format.weight_norm import ENCODE_ONLY, codec_tensors
from shoal.checkpoint.load import assign, build_model, insert_quantized_layers, read_model_file
from shoal.checkpoint.random import SIZES
from shoal.checkpoint.tensors import read_tensors
from shoal.codec.config import CodecConfig
from shoal.codec.dac import Codec
from shoal.errors import ModelNotFound, ShoalError
from shoal.model.config import DualARConfig
from shoal.model.dual_ar import DualAR
from shoal.model.linear import QuantizedLinear
from shoal.quantize.apply import modes_of
from shoal.text.tokenizer import Tokenizer

T = TypeVar("T")
META = "meta"


@dataclass(frozen=True, slots=True)
class ComponentInfo:
    """Parameters of a component, and the bytes its weights take in memory as stored."""

    name: str
    parameters: int
    bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LanguageModelInfo:
    """Sizes of the text-to-codes model."""

    family: str
    context: int  # tokens
    max_prompt: int
    codebooks: int
    codebook_size: int
    vocabulary: int
    kv_bytes_per_token: int  # with 16-bit values
    quantization: str | None

    @classmethod
    def of(cls, config: DualARConfig, quantization: str | None = None) -> "LanguageModelInfo":
        return cls(
            family=config.family.name,
            context=config.slow.max_seq_len,
            max_prompt=config.max_prompt,
            codebooks=config.num_codebooks,
            codebook_size=config.codebook_size,
            vocabulary=config.vocab_size,
            kv_bytes_per_token=config.kv_bytes_per_token,
            quantization=quantization,
        )


@dataclass(frozen=True, slots=True)
class CodecInfo:
    """Sizes of the codec."""

    sample_rate: int
    frame_rate: float
    samples_per_frame: int
    codebooks: int

    @classmethod
    def of(cls, config: CodecConfig) -> "CodecInfo":
        return cls(config.sample_rate, config.frame_rate, config.frame_length, config.num_codebooks)


@dataclass(slots=True)
class Inspection:
    """Contents of a checkpoint. A component that could not be read is None, and `problems` says why."""

    name: str
    directory: Path | None = None  # None for random weights
    language: LanguageModelInfo | None = None
    sound: CodecInfo | None = None
    tokenizer_size: int | None = None
    parts: list[ComponentInfo] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)  # size on disk in bytes
    notes: list[str] = field(default_factory=list)
    problems: list[ShoalError] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def inspect(name: str, *, codec: Path | None = None) -> Inspection:
    """Inspect a model by directory or name. Raises ModelNotFound; other errors are collected in `problems`."""
    if name.startswith(RANDOM_PREFIX):
        return _inspect_random(name)
    found = Inspection(name, directory=find_directory(name))
    _inspect_directory(found, found.directory or Path(), codec)
    if found.language and found.sound and found.language.codebooks != found.sound.codebooks:
        found.notes.append("model and codec have different numbers of codebooks: they do not belong together")
    return found


def as_json(found: Inspection) -> dict[str, object]:
    """Return the inspection as a JSON document."""
    from dataclasses import asdict

    document = asdict(found)
    document |= {
        "directory": str(found.directory) if found.directory else None,
        "parameters": found.parameters,
        "bytes": found.bytes,
        "problems": [str(problem) for problem in found.problems],
    }
    return document


def _inspect_directory(found: Inspection, directory: Path, codec: Path | None) -> None:
    found.files = {file.name: file.stat().st_size for file in sorted(directory.iterdir()) if file.is_file()}
    tokenizer = _attempt(found, lambda: read_tokenizer(directory))
    if tokenizer is not None:
        found.tokenizer_size = tokenizer.vocab_size
        _attempt(found, lambda: _inspect_model(found, directory, tokenizer))
    source = codec or directory
    if codec is None and not any(name.startswith("codec.") for name in found.files):
        found.notes.append("no codec: name one with --codec to generate speech")
    else:
        _attempt(found, lambda: _inspect_codec(found, source))


def _inspect_model(found: Inspection, directory: Path, tokenizer: Tokenizer) -> None:
    config = read_model_config(directory, tokenizer)
    file = find_model_file(directory)
    found.language = LanguageModelInfo.of(config)
    shapes = _without_weights(read_model_file(file))
    with torch.device(META):
        stored = model_tensors(shapes)
        model = build_model(config, stored, file, device=META)
    found.language = LanguageModelInfo.of(config, _describe(model))
    found.parts += _model_parts(model)


def _inspect_codec(found: Inspection, source: Path) -> None:
    weights, config = find_codec(source)
    found.sound = CodecInfo.of(config)
    shapes = _without_weights(read_tensors(weights))
    with torch.device(META):
        codec, stored = Codec(config), codec_tensors(shapes, encoder=True)
        insert_quantized_layers(codec, stored)
        assign(codec, stored, weights, dtype=torch.float32, device=META)
    found.parts += _codec_parts(codec.state_dict())


def _inspect_random(name: str) -> Inspection:
    if name.removeprefix(RANDOM_PREFIX) not in SIZES:
        known = ", ".join(RANDOM_PREFIX + size for size in SIZES)
        raise ModelNotFound(f"{name}: unknown size, expected one of {known}")
    model_config, codec_config = SIZES[name.removeprefix(RANDOM_PREFIX)]
    with torch.device(META):
        model, codec = DualAR(model_config).to(torch.bfloat16), Codec(codec_config)
    return Inspection(
        name,
        language=LanguageModelInfo.of(model_config),
        sound=CodecInfo.of(codec_config),
        tokenizer_size=model_config.semantic_end_id + 1,
        parts=_model_parts(model) + _codec_parts(codec.state_dict()),
    )


def _attempt(found: Inspection, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except ShoalError as problem:
        found.problems.append(problem)
        return None


def _without_weights(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(META) for name, tensor in stored.items()}


def _model_parts(model: DualAR) -> list[ComponentInfo]:
    tensors = model.state_dict()
    prefixes_of = {
        "slow transformer": ("slow.layers.", "slow.norm."),
        "text embeddings": ("slow.embeddings.",),
        "codebook embeddings": ("slow.codebook_embeddings.",),
        "head": ("slow.output.",),
        "fast transformer": ("fast.",),
    }
    widths = {name: module.in_features for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    return [
        _part(part, {name: t for name, t in tensors.items() if name.startswith(prefixes)}, widths)
        for part, prefixes in prefixes_of.items()
        if part != "head" or not model.config.tie_word_embeddings
    ]


def _codec_parts(tensors: Mapping[str, Tensor]) -> list[ComponentInfo]:
    encode = {name: tensor for name, tensor in tensors.items() if name.startswith(ENCODE_ONLY)}
    decode = {name: tensor for name, tensor in tensors.items() if name not in encode}
    return [_part("codec, decode side", decode, {}), _part("codec, encode side", encode, {})]


def _part(name: str, tensors: Mapping[str, Tensor], widths: Mapping[str, int]) -> ComponentInfo:
    count = sum(_parameters(key, tensor, widths) for key, tensor in tensors.items())
    return ComponentInfo(name, count, sum(tensor.nbytes for tensor in tensors.values()), _dtypes(tensors.values()))


def _parameters(name: str, tensor: Tensor, widths: Mapping[str, int]) -> int:
    """Return the parameters in a tensor: packed weights count unpacked, scales do not count."""
    owner, _, attribute = name.rpartition(".")
    if attribute in ("scales", "scales_and_zeros"):
        return 0
    return tensor.shape[0] * widths[owner] if widths.get(owner) else prod(tensor.shape)


def _dtypes(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    return tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


def _describe(model: DualAR) -> str | None:
    modes = modes_of(model)
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    groups = {layer.group_size for layer in layers if layer.group_size is not None}
    if not modes:
        return None
    return str(modes) + "".join(f", groups of {size}" for size in sorted(groups))
