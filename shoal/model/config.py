"""Sizes and switches of a DualAR model; `checkpoint/format/model_config.py` reads and writes them as `config.json`."""

import math
from dataclasses import dataclass

from shoal.errors import CheckpointError
from shoal.model.family import Family

# Entries of the codec's residual codebooks. The fast head may be wider; the rest of its outputs is never sampled.
RESIDUAL_CODES = 1024
# Context positions that upstream keeps free for generated frames.
RESERVED_POSITIONS = 2048
# Bounds of a plausible model: memory is allocated by these sizes before the weights are compared with them.
MAX_LAYERS = 1_000
MAX_SIZE = 1 << 20


@dataclass(frozen=True)
class BlockConfig:
    """Sizes of one stack of transformer blocks. Raises CheckpointError for sizes that cannot be computed."""

    n_layer: int
    dim: int
    n_head: int
    n_local_heads: int  # key/value heads
    head_dim: int
    intermediate_size: int
    rope_base: float
    norm_eps: float
    attention_qk_norm: bool
    max_seq_len: int

    def __post_init__(self) -> None:
        _require_size("n_layer", self.n_layer, MAX_LAYERS)
        for name in ("dim", "n_head", "n_local_heads", "head_dim", "intermediate_size", "max_seq_len"):
            _require_size(name, getattr(self, name))
        for name in ("rope_base", "norm_eps"):
            _require_positive(name, getattr(self, name))
        if self.head_dim % 2:
            raise CheckpointError(f"config.json: head_dim = {self.head_dim} must be even for rotary embeddings")
        if self.n_head % self.n_local_heads:
            raise CheckpointError(
                f"config.json: n_local_heads = {self.n_local_heads} does not divide n_head = {self.n_head}"
            )

    @property
    def qkv_rows(self) -> int:
        return (self.n_head + 2 * self.n_local_heads) * self.head_dim


@dataclass(frozen=True)
class DualARConfig:
    """A slow transformer over time and a fast transformer over the codebooks of a frame.

    Token ids come from the tokenizer. Raises CheckpointError when sizes and token ids contradict each other.
    """

    family: Family
    slow: BlockConfig
    fast: BlockConfig
    vocab_size: int
    codebook_size: int
    num_codebooks: int
    semantic_begin_id: int
    semantic_end_id: int  # inclusive
    stop_id: int
    tie_word_embeddings: bool
    scale_codebook_embeddings: bool
    norm_fastlayer_input: bool

    def __post_init__(self) -> None:
        for name in ("vocab_size", "codebook_size", "num_codebooks"):
            _require_size(name, getattr(self, name))
        codes, largest = self.semantic_end_id + 1 - self.semantic_begin_id, max(self.semantic_end_id, self.stop_id)
        if largest >= self.vocab_size:
            raise CheckpointError(
                f"config.json: vocab_size = {self.vocab_size} is too small for token id {largest} of the tokenizer"
            )
        if codes > self.codebook_size:
            raise CheckpointError(
                f"config.json: codebook_size = {self.codebook_size} is smaller than the tokenizer's {codes} codes"
            )

    @property
    def residual_size(self) -> int:
        """Number of codes that may be sampled for codebooks 1 and up."""
        return min(RESIDUAL_CODES, self.codebook_size)

    @property
    def max_prompt(self) -> int:
        """Longest accepted prompt in tokens; the rest of the context is reserved for generated frames."""
        return max(1, self.slow.max_seq_len - min(RESERVED_POSITIONS, self.slow.max_seq_len // 2))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token at 16 bits per value."""
        return 2 * 2 * self.slow.n_layer * self.slow.n_local_heads * self.slow.head_dim


def _require_size(name: str, value: object, maximum: int = MAX_SIZE) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
        raise CheckpointError(f"config.json: {name} = {value!r:.40} must be an integer from 1 to {maximum:,}")


def _require_positive(name: str, value: object) -> None:
    if not (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf):
        raise CheckpointError(f"config.json: {name} = {value!r:.40} must be a number greater than 0")
