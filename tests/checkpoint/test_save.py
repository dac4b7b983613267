import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from shoal.checkpoint import save
from shoal.checkpoint.format.model_config import TokenIds, config_document, read_config
from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.save import atomic_directory, save_random, upstream_tensors
from shoal.errors import OutputError


def test_s1_is_written_as_pickles_under_upstreams_names(saved: Path) -> None:
    names = {path.name for path in (saved / "s1").iterdir()}
    assert {"config.json", "model.pth", "codec.pth", "tokenizer.tiktoken", "special_tokens.json"} <= names
    stored = torch.load(saved / "s1" / "model.pth", weights_only=True)
    expected = {"embeddings.weight", "codebook_embeddings.weight", "output.weight", "fast_embeddings.weight",
                "layers.0.attention.wqkv.weight", "layers.0.feed_forward.w1.weight", "layers.0.feed_forward.w3.weight",
                "fast_layers.1.attention.wo.weight", "fast_output.weight", "norm.weight"}  # fmt: skip
    assert expected <= set(stored)
    assert not any("w13" in name for name in stored)


def test_s2_is_written_in_shards_under_the_released_prefixes(saved: Path) -> None:
    index = json.loads((saved / "s2" / "model.safetensors.index.json").read_text())
    where = index["weight_map"]
    assert {"text_model.model.embeddings.weight", "audio_decoder.codebook_embeddings.weight",
            "audio_decoder.layers.0.attention.wqkv.weight", "audio_decoder.output.weight"} <= set(where)  # fmt: skip
    assert len(set(where.values())) > 2
    for shard in set(where.values()):
        with safe_open(saved / "s2" / shard, framework="pt") as file:
            assert set(file.keys()) == {name for name, place in where.items() if place == shard}


def test_a_pickle_holds_each_weight_once(saved: Path, tiny: Checkpoint) -> None:
    weights = sum(tensor.nbytes for tensor in upstream_tensors(tiny.model).values())
    assert (saved / "s1" / "model.pth").stat().st_size < 1.1 * weights


def test_the_codec_is_written_with_both_spellings_of_weight_norm(saved: Path) -> None:
    stored = torch.load(saved / "s1" / "codec.pth", weights_only=True)
    assert "decoder.model.0.conv.parametrizations.weight.original0" in stored
    assert "quantizer.semantic_quantizer.quantizers.0.in_proj.weight_g" in stored
    assert "quantizer.upsample.0.0.conv.weight" in stored
    assert stored["decoder.model.1.block.1.conv.parametrizations.weight.original0"].shape == (64, 1, 1)


@pytest.mark.parametrize("family", ["s1", "s2"])
def test_a_configuration_round_trips(family: str, tiny: Checkpoint, tiny_s2: Checkpoint) -> None:
    config = (tiny if family == "s1" else tiny_s2).model.config
    tokens = TokenIds(config.semantic_begin_id, config.semantic_end_id, config.stop_id, config.family)
    assert read_config(config_document(config), tokens) == config


# Whole or not at all


@pytest.mark.parametrize("part", ["save_pickled_model", "save_pickled_codec", "write_synthetic_tokenizer"])
@pytest.mark.parametrize(
    "problem", [OSError(28, "No space left on device"), RuntimeError("broken"), KeyboardInterrupt()]
)
def test_a_failure_leaves_no_files_behind(
    part: str, problem: BaseException, tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise problem

    monkeypatch.setattr(save, part, fail)
    with pytest.raises((OutputError, RuntimeError, KeyboardInterrupt), match=r"No space left|broken|^$"):
        save_random(tmp_path / "new" / "model", tiny)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_full_disk_is_an_output_error_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No space left on device"), atomic_directory(tmp_path / "model"):
        raise OSError(28, "No space left on device")


def test_an_existing_directory_is_never_overwritten(saved: Path, tiny: Checkpoint) -> None:
    before = sorted(path.name for path in (saved / "s1").iterdir())
    with pytest.raises(OutputError, match="already exists"):
        save_random(saved / "s1", tiny)
    assert sorted(path.name for path in (saved / "s1").iterdir()) == before


def test_an_unwritable_directory_is_named(tmp_path: Path, tiny: Checkpoint) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match=r"cannot write to .*file"):
        save_random(tmp_path / "file" / "model", tiny)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path, tiny: Checkpoint) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        save_random(tmp_path / "model", tiny)


def test_the_finished_directory_can_be_read_by_others(saved: Path) -> None:
    assert (saved / "s1").stat().st_mode & 0o777 == 0o755
