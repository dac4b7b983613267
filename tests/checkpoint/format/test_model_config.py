import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.format.model_config import TokenIds, config_document, read_config
from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import SIZES
from shoal.errors import CheckpointError
from shoal.model.config import DualARConfig
from shoal.model.family import NANO, S1, S2

TOKENS = TokenIds(semantic_begin=271, semantic_end=526, stop=260, family=S1)
FLAT = config_document(SIZES["tiny"][0])
NESTED_TOKENS = TokenIds(
    *(getattr(SIZES["tiny-s2"][0], name) for name in ("semantic_begin_id", "semantic_end_id", "stop_id")), family=S2
)
NESTED = config_document(SIZES["tiny-s2"][0])
RELEASED_CONFIG = Path(__file__).parent / "s2-pro-config.json"
S2_PRO_SHA256 = "261b519a2a9576710fc8533a77297fae007f0e7b3aa28a217f8352b7f32fe993"
S2_PRO_TOKENS = TokenIds(151678, 155773, 151645, S2)


def read(stored: dict[str, Any]) -> DualARConfig:
    return read_config(stored, TOKENS)


def without(stored: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in stored.items() if key not in keys}


def test_the_stored_configurations_of_both_families_are_read(golden: Path) -> None:
    stored = json.loads((golden / "s1" / "checkpoint" / "config.json").read_text())
    s1 = read_config(stored, TokenIds(335, 1366, 324, S1))
    assert (s1.family, s1.slow.dim, s1.fast.head_dim, s1.codebook_size) == (S1, 32, 8, 1032)
    assert (s1.tie_word_embeddings, s1.norm_fastlayer_input, s1.fast.attention_qk_norm) == (False, False, False)
    stored = json.loads((golden / "s2" / "checkpoint" / "config.json").read_text())
    s2 = read_config(stored, TokenIds(363, 522, 330, S2))
    assert (s2.family, s2.slow.dim, s2.fast.max_seq_len, s2.codebook_size) == (S2, 48, 10, 160)
    assert (s2.tie_word_embeddings, s2.norm_fastlayer_input, s2.scale_codebook_embeddings) == (True, True, True)


@pytest.mark.parametrize("key", ["dim", "n_head", "n_layer", "max_seq_len", "vocab_size", "codebook_size",
                                 "num_codebooks", "n_fast_layer"])  # fmt: skip
def test_a_missing_required_key_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"missing key '{key}'"):
        read(without(FLAT, key))


@pytest.mark.parametrize("section", ["text_config", "audio_decoder_config"])
def test_the_same_holds_inside_the_sections_of_s2(section: str) -> None:
    with pytest.raises(CheckpointError, match="missing key 'n_layer'"):
        read_config(NESTED | {section: without(NESTED[section], "n_layer")}, NESTED_TOKENS)
    with pytest.raises(CheckpointError, match=rf"unknown keys {section}\.rope_scaling "):
        read_config(NESTED | {section: NESTED[section] | {"rope_scaling": 1}}, NESTED_TOKENS)
    if section == "audio_decoder_config":
        with pytest.raises(CheckpointError, match="missing key 'audio_decoder_config'"):
            read_config(without(NESTED, section), NESTED_TOKENS)


def test_unknown_keys_that_could_change_the_computation_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="unknown keys hidden_act, sliding_window could change"):
        read(FLAT | {"sliding_window": 128, "hidden_act": "relu"})
    with pytest.raises(CheckpointError, match="unknown keys fast_logit_softcap could change"):
        read(FLAT | {"fast_logit_softcap": 30.0})


def test_other_unknown_keys_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert read(FLAT | {"colour": 1, "finetuned_by": "reef", "attention_sink": False, "rope_scaling": None}) == read(
        FLAT
    )
    assert "ignoring unknown keys attention_sink, colour, finetuned_by, rope_scaling" in caplog.text


def test_the_released_s2_pro_file_is_read_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    content = RELEASED_CONFIG.read_bytes()
    assert hashlib.sha256(content).hexdigest() == S2_PRO_SHA256
    assert read_config(json.loads(content), S2_PRO_TOKENS) == SIZES["s2-pro"][0]
    assert caplog.text == ""


@pytest.mark.parametrize("section", ["text_config", "audio_decoder_config"])
def test_a_mixture_of_experts_is_refused_by_name(section: str) -> None:
    stored = json.loads(RELEASED_CONFIG.read_text())
    stored[section]["use_moe"] = True
    with pytest.raises(CheckpointError, match=rf"{section}\.use_moe = True is not supported"):
        read_config(stored, S2_PRO_TOKENS)


def test_drama_3_and_other_model_types_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"model_type = 'fish_omni' \(Drama 3\) is not supported"):
        read(FLAT | {"model_type": "fish_omni"})
    with pytest.raises(CheckpointError, match="model_type = 'naive' is not supported"):
        read(FLAT | {"model_type": "naive"})


# The family of a flat file


def merged(config: DualARConfig) -> dict[str, Any]:
    """`config.json` as upstream's merge tool saves a fine-tune of S2."""
    flat = config_document(replace(config, family=NANO))
    ids = {"semantic_begin_id": config.semantic_begin_id, "semantic_end_id": config.semantic_end_id}
    return flat | ids | {"audio_embed_dim": config.slow.dim, "dropout": 0.0, "is_reward_model": False}


def test_a_merged_fine_tune_of_s2_is_s2() -> None:
    config = SIZES["tiny-s2"][0]
    assert read_config(merged(config), NESTED_TOKENS) == config
    assert read_config(merged(config), replace(NESTED_TOKENS, family=None)) == config


def test_s2s_vocabulary_is_never_taken_for_s1() -> None:
    stored = merged(SIZES["tiny-s2"][0])
    assert read_config(stored | {"norm_fastlayer_input": False}, NESTED_TOKENS).family is S2
    with pytest.raises(CheckpointError, match="missing key 'norm_fastlayer_input'"):
        read_config(without(stored, "norm_fastlayer_input"), NESTED_TOKENS)


def test_s1s_vocabulary_with_normed_fast_input_is_nano() -> None:
    assert read(FLAT | {"norm_fastlayer_input": True}).family is NANO
    assert read(FLAT | {"norm_fastlayer_input": False}).family is S1


def test_a_vocabulary_of_neither_family_is_assumed_to_be_s1_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert read_config(FLAT, replace(TOKENS, family=None)).family is S1
    assert "neither S1 nor S2" in caplog.text


def test_the_vocabulary_names_the_family(tiny: Checkpoint, tiny_s2: Checkpoint) -> None:
    assert TokenIds.of(tiny.tokenizer) == TOKENS
    assert TokenIds.of(tiny_s2.tokenizer) == NESTED_TOKENS


def test_other_semantic_ids_than_the_tokenizers_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert read(FLAT | {"semantic_begin_id": 0, "semantic_end_id": 0}) == read(FLAT)
    assert caplog.text == ""
    assert read(FLAT | {"semantic_begin_id": 9}) == read(FLAT)
    assert "differ from the tokenizer's 271 to 526" in caplog.text


# What upstream reads

# Fields of upstream's S1 configuration class, which rejects all others.
UPSTREAM_S1_KEYS = {
    "model_type", "vocab_size", "n_layer", "n_head", "dim", "intermediate_size", "n_local_heads", "head_dim",
    "rope_base", "norm_eps", "max_seq_len", "dropout", "tie_word_embeddings", "attention_qkv_bias", "attention_o_bias",
    "attention_qk_norm", "codebook_size", "num_codebooks", "use_gradient_checkpointing", "initializer_range",
    "is_reward_model", "scale_codebook_embeddings", "n_fast_layer", "fast_dim", "fast_n_head", "fast_n_local_heads",
    "fast_head_dim", "fast_intermediate_size", "fast_attention_qkv_bias", "fast_attention_qk_norm",
    "fast_attention_o_bias",
}  # fmt: skip


def test_a_written_s1_file_has_only_keys_that_upstream_accepts() -> None:
    assert set(FLAT) <= UPSTREAM_S1_KEYS


# Values


@pytest.mark.parametrize("key", ["attention_qkv_bias", "attention_o_bias", "use_moe", "is_reward_model",
                                 "fast_attention_qkv_bias"])  # fmt: skip
def test_unsupported_switches_are_refused_only_when_set(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{key} = True is not supported, only False"):
        read(FLAT | {key: True})
    assert read(FLAT | {key: False}) == read(FLAT | {key: None}) == read(FLAT)


def test_training_keys_are_ignored() -> None:
    noise = {"dropout": 0.1, "initializer_range": 0.02, "use_gradient_checkpointing": True, "model_type": "dual_ar"}
    assert read(FLAT | noise) == read(FLAT)


# What a file may leave out


def test_kv_heads_default_to_the_number_of_heads() -> None:
    assert read(FLAT | {"n_local_heads": -1}).slow.n_local_heads == FLAT["n_head"]
    assert read(without(FLAT, "n_local_heads")).slow.n_local_heads == FLAT["n_head"]


def test_the_head_width_follows_from_the_width() -> None:
    assert read(FLAT | {"head_dim": None}).slow.head_dim == FLAT["dim"] // FLAT["n_head"]


@pytest.mark.parametrize(("dim", "expected"), [(48, 256), (1024, 2816), (96, 256), (97, 512)])
def test_the_inner_width_is_two_thirds_of_four_times_the_width_rounded_up(dim: int, expected: int) -> None:
    stored = without(FLAT, "intermediate_size", "fast_intermediate_size") | {"dim": dim}
    assert read(stored).slow.intermediate_size == expected


@pytest.mark.parametrize(
    "key", ["dim", "n_head", "n_local_heads", "head_dim", "intermediate_size", "attention_qk_norm"]
)
def test_absent_fast_sizes_default_to_the_slow_ones(key: str) -> None:
    for stored in (without(FLAT, f"fast_{key}"), FLAT | {f"fast_{key}": None}):
        config = read(stored)
        assert getattr(config.fast, key) == getattr(config.slow, key)


def test_the_fast_model_rotates_with_the_slow_base_over_one_frame() -> None:
    config = read(FLAT | {"rope_base": 12345, "norm_eps": 1e-4})
    assert (config.fast.rope_base, config.fast.norm_eps, config.fast.max_seq_len) == (12345.0, 1e-4, 10)


def test_absent_switches_have_upstreams_defaults() -> None:
    names = ("tie_word_embeddings", "scale_codebook_embeddings", "norm_fastlayer_input", "attention_qk_norm")
    config = read(without(FLAT, *names, "rope_base", "norm_eps"))
    assert (config.tie_word_embeddings, config.scale_codebook_embeddings) == (True, False)
    assert (config.norm_fastlayer_input, config.slow.attention_qk_norm) == (False, False)
    assert (config.slow.rope_base, config.slow.norm_eps) == (10000.0, 1e-5)


def test_s2_forces_its_switches_whatever_the_file_says() -> None:
    config = read_config(NESTED, NESTED_TOKENS)
    assert config.scale_codebook_embeddings
    assert config.norm_fastlayer_input


def test_token_ids_come_from_the_tokenizer() -> None:
    config = read(FLAT)
    assert (config.semantic_begin_id, config.semantic_end_id, config.stop_id) == (271, 526, 260)


def test_a_tokenizer_that_does_not_match_the_sizes_is_refused() -> None:
    with pytest.raises(CheckpointError, match="vocab_size = 527 is too small for token id 527"):
        read_config(FLAT, TokenIds(272, 527, 260))
    with pytest.raises(CheckpointError, match="codebook_size = 256 is smaller than the tokenizer's 257 codes"):
        read_config(FLAT, TokenIds(270, 526, 260))
