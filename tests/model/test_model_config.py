import json
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.random import SIZES
from shoal.checkpoint.save import config_document
from shoal.errors import CheckpointError
from shoal.model.config import DualARConfig, TokenIds, read_config

TOKENS = TokenIds(semantic_begin=271, semantic_end=526, stop=260)
FLAT = config_document(SIZES["tiny"][0])
NESTED_TOKENS = TokenIds(
    *(getattr(SIZES["tiny-s2"][0], name) for name in ("semantic_begin_id", "semantic_end_id", "stop_id"))
)
NESTED = config_document(SIZES["tiny-s2"][0])


def read(stored: dict[str, Any]) -> DualARConfig:
    return read_config(stored, TOKENS)


def without(stored: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in stored.items() if key not in keys}


def test_the_stored_configurations_of_both_families_are_read(golden: Path) -> None:
    stored = json.loads((golden / "s1" / "checkpoint" / "config.json").read_text())
    s1 = read_config(stored, TokenIds(335, 1366, 324))
    assert (s1.family, s1.slow.dim, s1.fast.head_dim, s1.codebook_size) == ("s1", 32, 8, 1032)
    assert (s1.tie_word_embeddings, s1.norm_fastlayer_input, s1.fast.attention_qk_norm) == (False, False, False)
    stored = json.loads((golden / "s2" / "checkpoint" / "config.json").read_text())
    s2 = read_config(stored, TokenIds(363, 522, 330))
    assert (s2.family, s2.slow.dim, s2.fast.max_seq_len, s2.codebook_size) == ("s2", 48, 10, 160)
    assert (s2.tie_word_embeddings, s2.norm_fastlayer_input, s2.scale_codebook_embeddings) == (True, True, True)


@pytest.mark.parametrize("key", ["dim", "n_head", "n_layer", "max_seq_len", "vocab_size", "codebook_size",
                                 "num_codebooks", "n_fast_layer"])  # fmt: skip
def test_a_key_the_model_cannot_do_without_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"missing key '{key}'"):
        read(without(FLAT, key))


@pytest.mark.parametrize("section", ["text_config", "audio_decoder_config"])
def test_the_same_holds_inside_the_sections_of_s2(section: str) -> None:
    with pytest.raises(CheckpointError, match="missing key 'n_layer'"):
        read_config(NESTED | {section: without(NESTED[section], "n_layer")}, NESTED_TOKENS)
    with pytest.raises(CheckpointError, match="unknown keys colour"):
        read_config(NESTED | {section: NESTED[section] | {"colour": 1}}, NESTED_TOKENS)
    if section == "audio_decoder_config":
        with pytest.raises(CheckpointError, match="missing key 'audio_decoder_config'"):
            read_config(without(NESTED, section), NESTED_TOKENS)


def test_unknown_keys_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="unknown keys another, colour;"):
        read(FLAT | {"colour": 1, "another": 2})
    with pytest.raises(CheckpointError, match="unknown keys colour;"):
        read(FLAT | {"fast_colour": 1})


@pytest.mark.parametrize("key", ["attention_qkv_bias", "attention_o_bias", "use_moe", "is_reward_model",
                                 "fast_attention_qkv_bias"])  # fmt: skip
def test_parts_that_are_not_here_are_refused_and_their_absence_is_not(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{key.removeprefix('fast_')} = True is not supported, only False"):
        read(FLAT | {key: True})
    assert read(FLAT | {key: False}) == read(FLAT | {key: None}) == read(FLAT)


def test_keys_of_training_change_nothing() -> None:
    noise = {"dropout": 0.1, "initializer_range": 0.02, "use_gradient_checkpointing": True, "model_type": "dual_ar"}
    assert read(FLAT | noise) == read(FLAT)


# What a file may leave out


def test_key_and_value_heads_are_as_many_as_heads_unless_said() -> None:
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
def test_fast_sizes_left_out_are_the_slow_ones(key: str) -> None:
    for stored in (without(FLAT, f"fast_{key}"), FLAT | {f"fast_{key}": None}):
        config = read(stored)
        assert getattr(config.fast, key) == getattr(config.slow, key)


def test_the_fast_model_rotates_with_the_slow_base_over_one_frame() -> None:
    config = read(FLAT | {"rope_base": 12345, "norm_eps": 1e-4})
    assert (config.fast.rope_base, config.fast.norm_eps, config.fast.max_seq_len) == (12345.0, 1e-4, 10)


def test_switches_left_out_are_upstreams_defaults() -> None:
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


def test_a_tokenizer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CheckpointError, match="vocab_size = 527, and the tokenizer goes up to 527"):
        read_config(FLAT, TokenIds(272, 527, 260))
    with pytest.raises(CheckpointError, match="codebook_size = 256, the tokenizer has 257 codes"):
        read_config(FLAT, TokenIds(270, 526, 260))
