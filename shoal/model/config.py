"""The numbers that define a DualAR model, read from either family's `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from shoal.errors import CheckpointError

Family = Literal["s1", "s2"]

# Residual codebooks of the codec have this many entries, whatever the width of the fast head.
RESIDUAL_CODES = 1024


@dataclass(frozen=True)
class BlockConfig:
    """One stack of transformer blocks."""

    n_layer: int
    dim: int
    n_head: int
    n_local_heads: int
    head_dim: int
    intermediate_size: int
    rope_base: float
    norm_eps: float
    attention_qk_norm: bool
    max_seq_len: int

    def __post_init__(self) -> None:
        for name in ("n_layer", "dim", "n_head", "n_local_heads", "head_dim", "intermediate_size", "max_seq_len"):
            _require_size(name, getattr(self, name))
        if self.head_dim % 2:
            raise CheckpointError(f"config.json: head_dim = {self.head_dim} cannot be rotated in pairs")
        if self.n_head % self.n_local_heads:
            raise CheckpointError(
                f"config.json: n_local_heads = {self.n_local_heads} cannot be shared by {self.n_head} heads"
            )

    @property
    def qkv_rows(self) -> int:
        return (self.n_head + 2 * self.n_local_heads) * self.head_dim


@dataclass(frozen=True)
class DualARConfig:
    """A slow transformer over columns and a fast one over the codebooks of a frame.

    The family decides the prompt format and the sampling recipe; the token ids come from the tokenizer.
    """

    family: Family
    slow: BlockConfig
    fast: BlockConfig
    vocab_size: int
    codebook_size: int
    num_codebooks: int
    semantic_begin_id: int
    semantic_end_id: int
    stop_id: int
    tie_word_embeddings: bool
    scale_codebook_embeddings: bool
    norm_fastlayer_input: bool

    def __post_init__(self) -> None:
        for name in ("vocab_size", "codebook_size", "num_codebooks"):
            _require_size(name, getattr(self, name))
        codes, last = self.semantic_end_id + 1 - self.semantic_begin_id, max(self.semantic_end_id, self.stop_id)
        if last >= self.vocab_size:
            raise CheckpointError(f"config.json: vocab_size = {self.vocab_size}, and the tokenizer goes up to {last}")
        if codes > self.codebook_size:
            raise CheckpointError(f"config.json: codebook_size = {self.codebook_size}, the tokenizer has {codes} codes")

    @property
    def residual_size(self) -> int:
        """Legal values of codebooks 1 and up."""
        return min(RESIDUAL_CODES, self.codebook_size)

    @property
    def max_prompt(self) -> int:
        """Longest prompt in columns: upstream keeps 2,048 of the context for what is generated."""
        return max(1, self.slow.max_seq_len - min(2048, self.slow.max_seq_len // 2))

    @property
    def kv_bytes_per_token(self) -> int:
        """At two bytes per value."""
        return 2 * 2 * self.slow.n_layer * self.slow.n_local_heads * self.slow.head_dim


@dataclass(frozen=True)
class TokenIds:
    """What the model has to know of its tokenizer."""

    semantic_begin: int
    semantic_end: int
    stop: int


# Keys that upstream stores and that change nothing at inference.
IGNORED = {
    "model_type", "dropout", "attn_dropout", "initializer_range", "use_gradient_checkpointing", "is_reward_model",
    "audio_embed_dim", "audio_hidden_dim", "use_moe", "dtype", "torch_dtype", "architectures", "transformers_version",
    "eos_token_id", "pad_token_id", "audio_pad_token_id", "bos_token_id", "semantic_start_token_id",
    "semantic_end_token_id", "text_dim", "attention_dropout", "max_length", "share_codebook_embeddings",
}  # fmt: skip

# Values the released models never use; a file that sets them needs code that is not here.
UNSUPPORTED = {"attention_qkv_bias": False, "attention_o_bias": False, "use_moe": False, "is_reward_model": False}

SLOW_KEYS = {entry.name for entry in fields(BlockConfig)}


def read_config(stored: Mapping[str, Any], tokens: TokenIds) -> DualARConfig:
    """Build the configuration from a parsed `config.json`: flat for the S1 family, nested for S2."""
    try:
        if "text_config" in stored:
            return _read_nested(stored, tokens)
        return _read_flat(stored, tokens)
    except KeyError as missing:
        raise CheckpointError(f"config.json: missing key {missing}") from missing


def _read_flat(stored: Mapping[str, Any], tokens: TokenIds) -> DualARConfig:
    own = {key: value for key, value in stored.items() if not key.startswith("fast_") and key != "n_fast_layer"}
    slow = _block(own)
    fast_own = {key.removeprefix("fast_"): value for key, value in stored.items() if key.startswith("fast_")}
    _refuse_unknown(own, SLOW_KEYS | {
        "vocab_size", "codebook_size", "num_codebooks", "tie_word_embeddings", "scale_codebook_embeddings",
        "norm_fastlayer_input",
    })  # fmt: skip
    _refuse_unknown(fast_own, SLOW_KEYS)
    fast = _fast_block(slow, stored["n_fast_layer"], fast_own, stored["num_codebooks"])
    return _assemble("s1", slow, fast, stored, tokens, stored["codebook_size"], stored["num_codebooks"])


def _read_nested(stored: Mapping[str, Any], tokens: TokenIds) -> DualARConfig:
    text, audio = (_section(stored, name) for name in ("text_config", "audio_decoder_config"))
    _refuse_unknown(stored, {"text_config", "audio_decoder_config"})
    _refuse_unknown(text, SLOW_KEYS | {"vocab_size", "tie_word_embeddings"})
    _refuse_unknown(audio, SLOW_KEYS | {"vocab_size", "num_codebooks", "tie_word_embeddings"})
    slow = _block(text)
    fast = _fast_block(
        slow, audio["n_layer"], {k: v for k, v in audio.items() if k in SLOW_KEYS}, audio["num_codebooks"]
    )
    # The loader of this family forces both switches, whatever the file says.
    forced = {**text, "scale_codebook_embeddings": True, "norm_fastlayer_input": True}
    return _assemble("s2", slow, fast, forced, tokens, audio["vocab_size"], audio["num_codebooks"])


def _section(stored: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = stored[name]
    if not isinstance(section, Mapping):
        raise CheckpointError(f"config.json: {name} is not an object")
    return section


def _assemble(
    family: Family,
    slow: BlockConfig,
    fast: BlockConfig,
    stored: Mapping[str, Any],
    tokens: TokenIds,
    codebook_size: int,
    num_codebooks: int,
) -> DualARConfig:
    return DualARConfig(
        family=family,
        slow=slow,
        fast=fast,
        vocab_size=stored["vocab_size"],
        codebook_size=codebook_size,
        num_codebooks=num_codebooks,
        semantic_begin_id=tokens.semantic_begin,
        semantic_end_id=tokens.semantic_end,
        stop_id=tokens.stop,
        tie_word_embeddings=stored.get("tie_word_embeddings", True),
        scale_codebook_embeddings=stored.get("scale_codebook_embeddings", False),
        norm_fastlayer_input=stored.get("norm_fastlayer_input", False),
    )


def _block(stored: Mapping[str, Any]) -> BlockConfig:
    dim, heads = stored["dim"], stored["n_head"]
    kv_heads = stored.get("n_local_heads", -1)
    return BlockConfig(
        n_layer=stored["n_layer"],
        dim=dim,
        n_head=heads,
        n_local_heads=heads if kv_heads in (-1, None) else kv_heads,
        head_dim=stored.get("head_dim") or dim // heads,
        intermediate_size=stored.get("intermediate_size") or _round_up(8 * dim // 3, 256),
        rope_base=float(stored.get("rope_base", 10000.0)),
        norm_eps=float(stored.get("norm_eps", 1e-5)),
        attention_qk_norm=bool(stored.get("attention_qk_norm", False)),
        max_seq_len=stored["max_seq_len"],
    )


def _fast_block(slow: BlockConfig, layers: int, own: Mapping[str, Any], codebooks: int) -> BlockConfig:
    """Sizes the file leaves out are the slow ones; the rotary base always is, and the context is one frame."""

    def pick(key: str) -> Any:
        value = own.get(key)
        return getattr(slow, key) if value is None else value

    return BlockConfig(
        n_layer=layers,
        dim=pick("dim"),
        n_head=pick("n_head"),
        n_local_heads=pick("n_local_heads"),
        head_dim=pick("head_dim"),
        intermediate_size=pick("intermediate_size"),
        rope_base=slow.rope_base,
        norm_eps=slow.norm_eps,
        attention_qk_norm=bool(pick("attention_qk_norm")),
        max_seq_len=codebooks,
    )


def _refuse_unknown(stored: Mapping[str, Any], known: set[str]) -> None:
    for key, harmless in UNSUPPORTED.items():
        if stored.get(key, harmless) not in (harmless, None):
            raise CheckpointError(f"config.json: {key} = {stored[key]!r} is not supported, only {harmless!r}")
    unknown = sorted(set(stored) - known - IGNORED - set(UNSUPPORTED))
    if unknown:
        raise CheckpointError(
            f"config.json: unknown keys {', '.join(unknown)}; a model with other parts cannot be computed exactly"
        )


def _require_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name} = {value!r} is not a whole number above 0")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
