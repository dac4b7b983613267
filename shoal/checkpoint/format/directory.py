"""Files of a model's directory except its weights: configuration, tokenizer, profile, and where the weights are."""

from pathlib import Path
from typing import Protocol

from shoal.checkpoint.format.layout import (
    CODEC_FILES,
    DEFAULT_CODES,
    MANIFEST,
    MODEL_FILES,
    has_default_specials,
    is_file,
    read_json,
    read_manifest,
)
from shoal.checkpoint.format.model_config import TokenIds, read_config
from shoal.checkpoint.format.profile import ModelProfile, read_profile
from shoal.codec.config import CodecConfig
from shoal.errors import CheckpointError, ModelNotFound
from shoal.model.config import DualARConfig
from shoal.model.family import S1
from shoal.text.tokenizer import Tokenizer, load_tokenizer


class HasModelConfig(Protocol):
    @property
    def config(self) -> DualARConfig: ...


class HasCodecConfig(Protocol):
    @property
    def config(self) -> CodecConfig: ...


class ModelDescription(Protocol):
    """Everything about a loaded model except its weights, which may be torch modules or arrays."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> HasModelConfig: ...
    @property
    def codec(self) -> HasCodecConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def profile(self) -> ModelProfile: ...


def require_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise ModelNotFound(
            f"{directory}: no such directory; give a checkpoint directory, fetch one with "
            "`shoal pull s1-mini`, or use a random model such as random:tiny"
        )


def require_complete(directory: Path) -> None:
    """Raise CheckpointError for a quantized directory that was copied or written only in part."""
    if not (directory / MANIFEST).is_file():
        return
    for name, size in read_manifest(directory / MANIFEST).items():
        found = (directory / name).stat().st_size if is_file(directory / name) else 0
        if found != size:
            raise CheckpointError(
                f"{directory}: incomplete, {name} has {found:,} of {size:,} bytes; copy it again or write it again "
                "with `shoal quantize`"
            )


def read_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer of a directory. Like upstream, assume S1's special tokens if special_tokens.json is absent."""
    return load_tokenizer(
        directory, default_specials=S1.special_tokens(DEFAULT_CODES) if has_default_specials(directory) else ()
    )


def read_model_config(directory: Path, tokenizer: Tokenizer) -> DualARConfig:
    """Read `config.json` and the token ids of the tokenizer. Raises CheckpointError."""
    try:
        return read_config(read_json(directory / "config.json"), TokenIds.of(tokenizer))
    except (TypeError, ValueError, OverflowError) as problem:
        raise CheckpointError(f"{directory / 'config.json'}: {problem}") from problem


def find_model_file(directory: Path) -> Path:
    for name in MODEL_FILES:
        if (directory / name).is_file():
            return directory / name
    raise CheckpointError(f"{directory}: no model weights, expected one of {', '.join(MODEL_FILES)}")


def find_codec(source: Path) -> tuple[Path, CodecConfig]:
    """Return the weights file and configuration of a codec: from `codec.json` beside the weights, or as released."""
    candidates = [source] if source.is_file() else [source / name for name in CODEC_FILES]
    for weights in candidates:
        if weights.is_file():
            described = weights.with_name("codec.json")
            config = CodecConfig.from_dict(read_json(described)) if described.is_file() else CodecConfig()
            return weights, config
    raise CheckpointError(
        f"{source}: no codec, expected one of {', '.join(CODEC_FILES)}; upstream's quantized directories have none, "
        "name that of the original model with --codec"
    )


def read_checked_profile(directory: Path, config: DualARConfig) -> ModelProfile:
    """Return the defaults of a model. Raises CheckpointError for alignment heads that it does not have."""
    profile = read_profile(directory, config.family)
    layers, heads = config.slow.n_layer, config.slow.n_head
    for layer, head in profile.alignment.heads if profile.alignment is not None else ():
        if layer >= layers or head >= heads:
            raise CheckpointError(
                f"{directory}: alignment head ({layer}, {head}) is out of range for {layers} layers of {heads} heads; "
                "run `shoal align calibrate` again"
            )
    return profile


def builtin_voices(directory: Path | None) -> tuple[Path, ...]:
    """Return the directories of the voices that come with a model; none for random weights."""
    folder = directory / "voices" if directory is not None else None
    return (folder,) if folder is not None and folder.is_dir() else ()


def prompt_seconds(model: DualARConfig, codec: CodecConfig) -> float:
    """Return the seconds of recordings that fit into a prompt without text."""
    return model.max_prompt / codec.frame_rate
