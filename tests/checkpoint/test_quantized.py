"""Directories that `shoal quantize` writes: whole, smaller, and read back as they were."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from shoal.checkpoint import save
from shoal.checkpoint.inspect import inspect
from shoal.checkpoint.load import Checkpoint, load_checkpoint
from shoal.checkpoint.save import save_quantized
from shoal.errors import CheckpointError, InvalidRequest, OutputError
from shoal.quantize.apply import modes_of, quantize_codec, quantize_model
from shoal.quantize.modes import WeightModes

MODES = ["int8", "fp8", "int4", "slow=int8,fast=fp8,codec=int8", "slow=int4,codec=int8"]


@pytest.mark.parametrize("text", MODES)
@pytest.mark.parametrize("family", ["s1", "s2"])
def test_a_quantized_directory_loads_bit_for_bit(family: str, text: str, saved: Path, tmp_path: Path) -> None:
    modes = WeightModes.parse(text)
    save_quantized(saved / family, tmp_path / "small", modes)
    expected, loaded = load_checkpoint(saved / family), load_checkpoint(tmp_path / "small")
    quantize_model(expected.model, modes)
    quantize_codec(expected.codec, modes.codec)
    assert modes_of(loaded.model, loaded.codec) == modes
    for ours, theirs in ((expected.model, loaded.model), (expected.codec, loaded.codec)):
        found, wanted = theirs.state_dict(), ours.state_dict()
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name].float(), tensor.float()), name
    assert loaded.profile == expected.profile


def test_a_quantized_directory_is_smaller_and_has_all_other_files(s1: Path, tmp_path: Path) -> None:
    (s1 / "voices").mkdir()
    (s1 / "voices" / "someone").write_text("a voice")
    (s1 / "shoal.json").write_text('{"chunk_bytes": 99}')
    save_quantized(s1, tmp_path / "small", WeightModes.parse("int8,codec=int8"))
    names = {path.name for path in (tmp_path / "small").iterdir()}
    assert names == {"config.json", "tokenizer.tiktoken", "special_tokens.json", "shoal.json", "voices", "codec.json",
                     "model.safetensors", "codec.safetensors", "quantized.json"}  # fmt: skip
    assert (tmp_path / "small" / "voices" / "someone").read_text() == "a voice"
    assert (tmp_path / "small" / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert load_checkpoint(tmp_path / "small").profile.chunk_bytes == 99
    assert (tmp_path / "small" / "model.safetensors").stat().st_size < 0.7 * (s1 / "model.pth").stat().st_size


def test_a_codec_that_is_not_quantized_is_copied(s1: Path, tmp_path: Path) -> None:
    save_quantized(s1, tmp_path / "small", WeightModes.parse("int8"))
    assert (tmp_path / "small" / "codec.pth").read_bytes() == (s1 / "codec.pth").read_bytes()


def test_names_are_upstreams(s1: Path, tmp_path: Path) -> None:
    save_quantized(s1, tmp_path / "small", WeightModes.parse("int8"))
    with safe_open(tmp_path / "small" / "model.safetensors", framework="pt") as file:
        assert {"layers.0.feed_forward.w3.scales", "fast_output.weight", "output.scales"} <= set(file.keys())
        assert file.get_tensor("output.weight").dtype == torch.int8


def test_inspect_shows_the_modes_of_a_quantized_directory(s1: Path, tmp_path: Path) -> None:
    save_quantized(s1, tmp_path / "small", WeightModes("int8", "fp8", "int8"))
    found = inspect(str(tmp_path / "small"))
    assert found.problems == []
    assert found.language is not None
    assert found.language.quantization == "slow=int8,fast=fp8"
    assert found.parameters == inspect(str(s1)).parameters
    assert found.bytes < 0.7 * inspect(str(s1)).bytes


def test_loading_can_apply_other_modes(s1: Path, tiny: Checkpoint) -> None:
    seen = []
    loaded = load_checkpoint(s1, quantize=lambda model, codec: seen.append(modes_of(model)) or WeightModes("none"))
    assert seen == [WeightModes()]
    assert torch.equal(loaded.model.fast.output.weight, tiny.model.fast.output.weight)
    assert loaded.model.slow.pruned


# Bad input


@pytest.mark.parametrize("name", ["model.safetensors", "codec.safetensors"])
@pytest.mark.parametrize("damage", ["lost", "cut", "grown"])
def test_an_incomplete_directory_is_detected(name: str, damage: str, s1: Path, tmp_path: Path) -> None:
    save_quantized(s1, tmp_path / "small", WeightModes.parse("int8,codec=int8"))
    file = tmp_path / "small" / name
    content = file.read_bytes()
    file.unlink()
    if damage != "lost":
        file.write_bytes(content[:-100] if damage == "cut" else content + b"0")
    with pytest.raises(CheckpointError, match=rf"incomplete, {name} has [\d,]+ of {len(content):,} bytes.*again"):
        load_checkpoint(tmp_path / "small")


def test_a_failure_leaves_no_files_behind(s1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, "save_model", fail)
    with pytest.raises(OutputError, match="No space left"):
        save_quantized(s1, tmp_path / "new" / "small", WeightModes.parse("int8"))
    assert list((tmp_path / "new").iterdir()) == []


def test_scales_without_a_weight_are_named(s1: Path) -> None:
    stored = torch.load(s1 / "model.pth", weights_only=True)
    stored["output.scales"] = torch.ones(len(stored.pop("output.weight")))
    torch.save(stored, s1 / "model.pth")
    with pytest.raises(CheckpointError, match=r"slow\.output\.scales is stored without"):
        load_checkpoint(s1)


def test_bytes_without_scales_are_named(s1: Path) -> None:
    stored = torch.load(s1 / "model.pth", weights_only=True)
    stored["output.weight"] = stored["output.weight"].to(torch.float8_e4m3fn)
    torch.save(stored, s1 / "model.pth")
    with pytest.raises(CheckpointError, match=r"slow\.output\.weight is stored as torch\.float8_e4m3fn"):
        load_checkpoint(s1)


def test_a_quantized_source_is_not_requantized(s1: Path, tmp_path: Path) -> None:
    save_quantized(s1, tmp_path / "small", WeightModes.parse("int4"))
    with pytest.raises(InvalidRequest, match="slow is stored as int4"):
        save_quantized(tmp_path / "small", tmp_path / "again", WeightModes.parse("int8"))
    assert not (tmp_path / "again").exists()


def test_the_manifest_names_modes_and_files(s1: Path, tmp_path: Path) -> None:
    save_quantized(s1, tmp_path / "small", WeightModes.parse("int8"))
    document = json.loads((tmp_path / "small" / "quantized.json").read_text())
    assert document["weights"] == "int8"
    assert set(document["files"]) == {"model.safetensors", "codec.pth"}
    shutil.copytree(tmp_path / "small", tmp_path / "copied")
    load_checkpoint(tmp_path / "copied")


@pytest.mark.parametrize("files", [["a"], {"a": "12"}, {"a": True}])
def test_an_invalid_manifest_is_named(files: object, s1: Path) -> None:
    (s1 / "quantized.json").write_text(json.dumps({"files": files}))
    with pytest.raises(CheckpointError, match=r"quantized\.json: files must map"):
        load_checkpoint(s1)


def test_the_output_cannot_be_inside_its_source(s1: Path) -> None:
    before = sorted(path.name for path in s1.iterdir())
    for inside in (s1 / "int8", s1 / "new" / ".." / "deep" / "int8"):
        with pytest.raises(OutputError, match="is inside the source model"):
            save_quantized(s1, inside, WeightModes.parse("int8"))
    assert sorted(path.name for path in s1.iterdir()) == before
