"""Codec hyperparameters. Field names on disk are upstream's, so its configuration files load unchanged."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from math import inf, prod
from typing import Any

from shoal.errors import CheckpointError

KERNEL = 7  # taps of the decoder's and the encoder's convolutions
DILATIONS = (1, 3, 9)  # one per residual unit of a block
# Length of the graph decoders' rotary table in frames: more than an hour and a half of speech per stream.
MAX_POSITIONS = 1 << 17
MAX_SIZE = 1 << 20  # of any number in a configuration: larger ones overflow in the libraries that get them

# Upstream stores class defaults and training options in the same file; none of them affects inference.
TRAINING_ONLY = {"causal", "block_size", "dropout_rate", "attn_dropout_rate", "channels_first", "quantizer_dropout"}


def _require_sizes(name: str, value: object, minimum: int = 1, *, several: bool = False) -> None:
    """Raise CheckpointError unless value is an integer in range, or with `several` a non-empty tuple of them."""
    numbers = value if several and isinstance(value, tuple) else (value,)
    valid = (type(number) is int and minimum <= number <= MAX_SIZE for number in numbers)
    if several != isinstance(value, tuple) or not numbers or not all(valid):
        allowed = f"{'integers' if several else 'an integer'} >= {minimum} and <= {MAX_SIZE:,}"
        raise CheckpointError(f"codec configuration: {name} = {value!r:.40} must be {allowed}")


@dataclass(frozen=True)
class WindowTransformerConfig:
    """Causal transformer with sliding-window attention over the last `window_size` steps."""

    n_layer: int
    n_head: int
    dim: int
    intermediate_size: int
    head_dim: int
    window_size: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "dim", "intermediate_size", "head_dim", "window_size"):
            _require_sizes(name, getattr(self, name))
        for name in ("rope_base", "norm_eps"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < inf:
                raise CheckpointError(f"codec configuration: {name} must be a number greater than 0")


@dataclass(frozen=True)
class CodecConfig:
    """Modified DAC. The defaults are the released Fish codec: 44.1 kHz, 2,048 samples per frame, 10 codebooks."""

    sample_rate: int = 44100
    encoder_dim: int = 64
    encoder_rates: tuple[int, ...] = (2, 4, 8, 8)
    latent_dim: int = 1024
    decoder_dim: int = 1536
    decoder_rates: tuple[int, ...] = (8, 8, 4, 2)
    encoder_transformer_layers: tuple[int, ...] = (0, 0, 0, 4)
    encoder_head_dim: int = 64
    encoder_window: int = 512
    downsample_factor: tuple[int, ...] = (2, 2)
    semantic_codebook_size: int = 4096
    codebook_size: int = 1024
    n_codebooks: int = 9
    codebook_dim: int = 8
    transformer: WindowTransformerConfig = field(
        default=WindowTransformerConfig(
            n_layer=8, n_head=16, dim=1024, intermediate_size=3072, head_dim=64, window_size=128
        )
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            minimum = 0 if entry.name == "encoder_transformer_layers" else 1
            if entry.name != "transformer":
                several = isinstance(entry.default, tuple)
                _require_sizes(entry.name, getattr(self, entry.name), minimum, several=several)
        if prod(self.encoder_rates) != prod(self.decoder_rates):
            raise CheckpointError("codec configuration: encoder_rates and decoder_rates have different products")
        if len(self.encoder_transformer_layers) != len(self.encoder_rates):
            raise CheckpointError("codec configuration: encoder_transformer_layers needs one entry per encoder rate")
        if self.transformer.dim != self.latent_dim:
            raise CheckpointError(f"codec configuration: latent_dim = {self.latent_dim} is not the transformer's dim")

    @property
    def num_codebooks(self) -> int:
        """Return the number of codes per frame: one semantic codebook plus the residual ones."""
        return 1 + self.n_codebooks

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        return (self.semantic_codebook_size, *(self.codebook_size,) * self.n_codebooks)

    @cached_property
    def frame_length(self) -> int:
        """Return the samples per frame."""
        return prod(self.encoder_rates) * prod(self.downsample_factor)

    @cached_property
    def frame_rate(self) -> float:
        return self.sample_rate / self.frame_length

    def encoder_transformer(self, block: int) -> WindowTransformerConfig | None:
        """Return the transformer after encoder block `block`, or None. Heads and width follow upstream's rules."""
        layers, dim = self.encoder_transformer_layers[block], self.encoder_dim * 2 ** (block + 1)
        if layers == 0:
            return None
        return WindowTransformerConfig(layers, dim // 64, dim, 3 * dim, self.encoder_head_dim, self.encoder_window)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "CodecConfig":
        """Read upstream's layout: nested `quantizer`, `window_transformer` and `encoder_transformer` sections.

        Raises CheckpointError for missing, unknown or invalid fields.
        """
        values = _flatten(stored)
        _require_names("the codec", values, {each.name for each in fields(cls)})
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the layout that `from_dict` reads."""
        quantizer = ("n_codebooks", "codebook_size", "codebook_dim", "downsample_factor", "semantic_codebook_size")
        flat = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return {
            **{
                k: v
                for k, v in flat.items()
                if k not in (*quantizer, "transformer", "encoder_head_dim", "encoder_window")
            },
            "encoder_transformer": {"head_dim": self.encoder_head_dim, "window_size": self.encoder_window},
            "quantizer": {key: flat[key] for key in quantizer},
            "window_transformer": flat["transformer"],
        }


def _flatten(stored: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(stored, Mapping):
        raise CheckpointError(f"codec configuration: {stored!r:.40} must be an object")
    sections = {name: _section(stored, name) for name in ("quantizer", "window_transformer", "encoder_transformer")}
    plain = {key: value for key, value in stored.items() if key not in sections}
    # Derived fields, and the decoder transformer, which upstream's file names but which has no weights.
    for known in ("derived", "decoder_transformer_layers", *TRAINING_ONLY):
        plain.pop(known, None)
    quantizer = {k: v for k, v in sections["quantizer"].items() if k not in (*TRAINING_ONLY, "input_dim")}
    encoder = sections["encoder_transformer"]
    _require_names("encoder_transformer", encoder, required=("head_dim", "window_size"))
    merged = {**plain, **quantizer, "transformer": _window_transformer(sections["window_transformer"])}
    merged |= {"encoder_head_dim": encoder["head_dim"], "encoder_window": encoder["window_size"]}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in merged.items()}


def _section(stored: Mapping[str, Any], name: str) -> dict[str, Any]:
    if name not in stored:
        raise CheckpointError(f"codec configuration: '{name}' is missing")
    if not isinstance(stored[name], Mapping):
        raise CheckpointError(f"codec configuration: {name} = {stored[name]!r:.40} must be an object")
    return dict(stored[name])


def _window_transformer(section: Mapping[str, Any]) -> WindowTransformerConfig:
    entries = {
        key: value for key, value in section.items() if key not in (*TRAINING_ONLY, "input_dim", "n_local_heads")
    }
    known = fields(WindowTransformerConfig)
    required = [each.name for each in known if each.default is MISSING]
    _require_names("window_transformer", entries, {each.name for each in known}, required)
    return WindowTransformerConfig(**entries)


def _require_names(
    section: str, values: Mapping[str, Any], known: Container[str] | None = None, required: Iterable[str] = ()
) -> None:
    """Raise CheckpointError for keys that are missing, or not `known` if that is given."""
    if missing := [name for name in required if name not in values]:
        raise CheckpointError(f"codec configuration: keys missing in {section}: {', '.join(missing)}")
    if known is not None and (unknown := [name for name in values if name not in known]):
        raise CheckpointError(f"codec configuration: unknown keys in {section}: {', '.join(sorted(unknown))}")
