"""Read and write `config.json`: flat (S1, nano, fine-tunes of upstream's merge tool) or nested (released S2).

Upstream ignores unknown keys. Here a key that could change the computation is refused, because the result would be
wrong without a sign of it; any other unknown key is logged and ignored.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from shoal.errors import CheckpointError
from shoal.model.config import BlockConfig, DualARConfig
from shoal.model.family import NANO, S1, S2, Family
from shoal.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MODEL_TYPES = {"dual_ar", "fish_qwen3_omni"}
REFUSED_MODEL_TYPES = {"fish_omni": "Drama 3"}

# Keys that upstream or Hugging Face tools write and that change nothing at inference.
IGNORED = {
    "model_type", "dropout", "attn_dropout", "attention_dropout", "initializer_range", "use_gradient_checkpointing",
    "is_reward_model", "audio_embed_dim", "audio_hidden_dim", "text_dim", "share_codebook_embeddings", "max_length",
    "use_bfloat16", "dtype", "torch_dtype", "architectures", "transformers_version", "auto_map", "use_cache",
    "_name_or_path", "eos_token_id", "pad_token_id", "bos_token_id", "audio_pad_token_id", "semantic_start_token_id",
    "semantic_end_token_id", "semantic_begin_id", "semantic_end_id", "audio_encoder_config",
}  # fmt: skip
# Mixture-of-experts settings, without effect while `use_moe` is false.
MOE_KEYS = {
    "num_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size", "use_aux_loss_free",
    "router_gamma",
}  # fmt: skip
# Switches whose other value needs code that does not exist here; no released model uses it.
UNSUPPORTED = {"attention_qkv_bias": False, "attention_o_bias": False, "use_moe": False, "is_reward_model": False}
# Words in the name of a key that could change what is computed.
COMPUTATION = {
    "act", "activation", "attention", "attn", "bias", "causal", "codebook", "codebooks", "conv", "depth", "dim",
    "embed", "embedding", "embeddings", "expert", "experts", "factor", "ffn", "gate", "gated", "head", "heads",
    "hidden", "intermediate", "kv", "layer", "layers", "logit", "logits", "mask", "mlp", "moe", "multiplier", "norm",
    "position", "positions", "qk", "qkv", "quant", "quantization", "residual", "rope", "rotary", "router", "scale",
    "scaling", "size", "sliding", "softcap", "softmax", "theta", "tie", "tied", "vocab", "width", "window",
}  # fmt: skip

BLOCK_KEYS = {entry.name for entry in fields(BlockConfig)}
FLAT_KEYS = BLOCK_KEYS | {
    "vocab_size", "codebook_size", "num_codebooks", "tie_word_embeddings", "scale_codebook_embeddings",
    "norm_fastlayer_input",
}  # fmt: skip
# Sizes of the fast transformer that a flat file stores; the others follow from the slow one.
FAST_KEYS = BLOCK_KEYS - {"n_layer", "rope_base", "norm_eps", "max_seq_len"}


@dataclass(frozen=True)
class TokenIds:
    """Token ids of a vocabulary, and the family whose control tokens it has (None: of neither)."""

    semantic_begin: int
    semantic_end: int
    stop: int
    family: Family | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenIds":
        known = [family for family in (S1, S2) if _has_token(tokenizer, f"<|{family.control_tokens[0]}|>")]
        family = known[0] if len(known) == 1 else None
        return cls(tokenizer.semantic_begin, tokenizer.semantic_end, tokenizer.stop_id, family)


def read_config(stored: Mapping[str, Any], tokens: TokenIds) -> DualARConfig:
    """Build the configuration from a parsed `config.json`. Raises CheckpointError."""
    _check_model_type(stored.get("model_type"))
    _compare_token_ids(stored, tokens)
    try:
        return _read_nested(stored, tokens) if "text_config" in stored else _read_flat(stored, tokens)
    except KeyError as missing:
        raise CheckpointError(f"config.json: missing key {missing}") from missing


def config_document(config: DualARConfig) -> dict[str, Any]:
    """Return `config.json` in the layout of the family's release."""
    return _nested_document(config) if config.family.release_layout == "sharded" else _flat_document(config)


def _read_flat(stored: Mapping[str, Any], tokens: TokenIds) -> DualARConfig:
    own = {key: value for key, value in stored.items() if not key.startswith("fast_") and key != "n_fast_layer"}
    fast_own = {key.removeprefix("fast_"): value for key, value in stored.items() if key.startswith("fast_")}
    _check_keys(own, FLAT_KEYS)
    _check_keys(fast_own, BLOCK_KEYS, prefix="fast_")
    slow = _read_block(own)
    fast = _read_fast_block(slow, stored["n_fast_layer"], fast_own, stored["num_codebooks"])
    family = _family_of_flat(stored, tokens)
    return _assemble(family, slow, fast, stored, tokens, stored["codebook_size"], stored["num_codebooks"])


def _family_of_flat(stored: Mapping[str, Any], tokens: TokenIds) -> Family:
    """Decide the family of a flat file, which does not name it: S1, nano, or a fine-tune of S2.

    An S2 model driven with S1's prompts and sampling speaks badly without any error, so doubt is never resolved to S1.
    """
    normed = stored["norm_fastlayer_input"] if tokens.family is S2 else stored.get("norm_fastlayer_input", False)
    if tokens.family is S2:
        return S2
    if normed:
        return S2 if tokens.family is None else NANO
    if tokens.family is None:
        logger.warning("config.json: the vocabulary has the control tokens of neither S1 nor S2, assuming S1")
    return S1


def _read_nested(stored: Mapping[str, Any], tokens: TokenIds) -> DualARConfig:
    text, audio = (_section(stored, name) for name in ("text_config", "audio_decoder_config"))
    _check_keys(stored, {"text_config", "audio_decoder_config"})
    _check_keys(text, BLOCK_KEYS | {"vocab_size", "tie_word_embeddings"}, prefix="text_config.")
    own = BLOCK_KEYS | {"vocab_size", "num_codebooks", "tie_word_embeddings"}
    _check_keys(audio, own, prefix="audio_decoder_config.")
    slow = _read_block(text)
    sizes = {key: value for key, value in audio.items() if key in BLOCK_KEYS}
    fast = _read_fast_block(slow, audio["n_layer"], sizes, audio["num_codebooks"])
    # Upstream's loader forces both switches for this layout.
    forced = {**text, "scale_codebook_embeddings": True, "norm_fastlayer_input": True}
    return _assemble(S2, slow, fast, forced, tokens, audio["vocab_size"], audio["num_codebooks"])


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


def _read_block(stored: Mapping[str, Any]) -> BlockConfig:
    dim, heads = stored["dim"], stored["n_head"]
    kv_heads = stored.get("n_local_heads", -1)
    return BlockConfig(
        n_layer=stored["n_layer"],
        dim=dim,
        n_head=heads,
        n_local_heads=heads if kv_heads in (-1, None) else kv_heads,
        head_dim=stored.get("head_dim") or dim // heads,
        intermediate_size=stored.get("intermediate_size") or _round_up(8 * dim // 3, 256),
        rope_base=_as_float(stored.get("rope_base", 10000.0)),
        norm_eps=_as_float(stored.get("norm_eps", 1e-5)),
        attention_qk_norm=bool(stored.get("attention_qk_norm", False)),
        max_seq_len=stored["max_seq_len"],
    )


def _as_float(value: Any) -> Any:
    """Return an integer as a float, other values as they are: BlockConfig refuses those that are no numbers."""
    return float(value) if type(value) is int else value


def _read_fast_block(slow: BlockConfig, layers: int, own: Mapping[str, Any], codebooks: int) -> BlockConfig:
    """Build the fast block: absent sizes are those of the slow one, rotary base always; the context is one frame."""

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


def _check_model_type(model_type: object) -> None:
    if model_type is None or model_type in MODEL_TYPES:
        return
    known = REFUSED_MODEL_TYPES.get(str(model_type))
    raise CheckpointError(
        f"config.json: model_type = {model_type!r}{f' ({known})' if known else ''} is not supported, "
        f"only {' and '.join(sorted(MODEL_TYPES))}"
    )


def _compare_token_ids(stored: Mapping[str, Any], tokens: TokenIds) -> None:
    """Warn if the file names other semantic ids than the tokenizer. Upstream uses the tokenizer's; 0 means unset."""
    begin = stored.get("semantic_begin_id") or stored.get("semantic_start_token_id")
    end = stored.get("semantic_end_id") or stored.get("semantic_end_token_id")
    if (begin or tokens.semantic_begin, end or tokens.semantic_end) != (tokens.semantic_begin, tokens.semantic_end):
        logger.warning(
            "config.json: semantic ids %s to %s differ from the tokenizer's %d to %d, using the tokenizer's",
            begin, end, tokens.semantic_begin, tokens.semantic_end,
        )  # fmt: skip


def _check_keys(stored: Mapping[str, Any], known: set[str], prefix: str = "") -> None:
    """Raise CheckpointError for unsupported values and for unknown keys that could change the computation."""
    for key, supported in UNSUPPORTED.items():
        if stored.get(key, supported) not in (supported, None):
            raise CheckpointError(f"config.json: {prefix}{key} = {stored[key]!r} is not supported, only {supported!r}")
    unknown = sorted(set(stored) - known - IGNORED - MOE_KEYS - set(UNSUPPORTED))
    refused = [key for key in unknown if _could_change_computation(key, stored[key])]
    if refused:
        raise CheckpointError(
            f"config.json: unknown keys {', '.join(prefix + key for key in refused)} could change what the model "
            "computes, and this version does not implement them"
        )
    if unknown:
        logger.warning("config.json: ignoring unknown keys %s", ", ".join(prefix + key for key in unknown))


def _could_change_computation(key: str, value: object) -> bool:
    return value is not None and value is not False and not COMPUTATION.isdisjoint(re.split(r"[^a-z]+", key.lower()))


def _has_token(tokenizer: Tokenizer, name: str) -> bool:
    try:
        tokenizer.token_id(name)
    except CheckpointError:
        return False
    return True


def _flat_document(config: DualARConfig) -> dict[str, Any]:
    shared = ("vocab_size", "codebook_size", "num_codebooks", "tie_word_embeddings", "scale_codebook_embeddings")
    return {
        "model_type": "dual_ar",
        **asdict(config.slow),
        **{f"fast_{key}": value for key, value in asdict(config.fast).items() if key in FAST_KEYS},
        "n_fast_layer": config.fast.n_layer,
        **{key: getattr(config, key) for key in shared},
        # Upstream's S1 code rejects the key; S1 does not have the switch.
        **({"norm_fastlayer_input": True} if config.norm_fastlayer_input else {}),
    }


def _nested_document(config: DualARConfig) -> dict[str, Any]:
    text = {**asdict(config.slow), "vocab_size": config.vocab_size, "tie_word_embeddings": config.tie_word_embeddings}
    audio = {
        **asdict(config.fast),
        "vocab_size": config.codebook_size,
        "num_codebooks": config.num_codebooks,
        "tie_word_embeddings": False,
    }
    return {"model_type": "fish_qwen3_omni", "text_config": text, "audio_decoder_config": audio}


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
