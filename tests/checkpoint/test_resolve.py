import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import find, random
from shoal.checkpoint.find import HubSource, find_directory
from shoal.checkpoint.format.layout import missing_files
from shoal.checkpoint.resolve import resolve_model
from shoal.errors import CheckpointError, ModelNotFound


def test_a_directory_is_a_model(tiny_directory: Path) -> None:
    checkpoint = resolve_model(str(tiny_directory), dtype=torch.float32)
    assert checkpoint.model.config.family.name == "s1"
    assert checkpoint.model.dtype == torch.float32


@pytest.mark.parametrize(("name", "family"), [("random:tiny", "s1"), ("random:tiny-s2", "s2")])
def test_random_models_need_no_files(name: str, family: str) -> None:
    checkpoint = resolve_model(name, encoder=False)
    assert (checkpoint.name, checkpoint.model.config.family.name) == (name, family)
    assert not checkpoint.codec.can_encode


def test_another_codec_can_be_named(tiny_directory: Path) -> None:
    named = resolve_model("random:tiny", codec=tiny_directory).codec.decoder.model[0].conv.weight
    own = resolve_model(str(tiny_directory)).codec.decoder.model[0].conv.weight
    assert torch.equal(named, own)


def test_a_codec_of_another_model_is_refused(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, codec_config = random.SIZES["tiny"]
    fewer = replace(codec_config, n_codebooks=4)
    monkeypatch.setitem(random.SIZES, "tiny", (config, fewer))
    with pytest.raises(CheckpointError, match="10 codebooks and the codec decodes 5"):
        resolve_model("random:tiny")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("s1-mini", "run `shoal pull s1-mini`"),
        ("s2-pro@v1", "run `shoal pull s2-pro@v1`"),
        ("reef/tiny", "run `shoal pull reef/tiny`"),
        ("s3", "s1-mini, s2-pro or a repository"),
        ("./nowhere/at/all", "no such directory"),
        ("random:huge", "random:s1-mini"),
        ("random:", "random:s1-mini"),
        ("", "no such directory"),
        ("~nosuchuser/model", "no such directory"),
        ("a" * 300, "no such directory"),
        ("a\0b", "no such directory"),
    ],
)
def test_an_unknown_name_says_what_to_run(
    name: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match=advice):
        resolve_model(name)


def test_without_its_files_nano_says_what_to_use_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "BUNDLED_DIRECTORY", tmp_path / "nano")
    with pytest.raises(ModelNotFound, match=r"--model random:tiny.*shoal pull s1-mini"):
        find_directory("nano")


def test_a_folder_called_nano_does_not_hide_the_bundled_model(
    tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nano").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(find, "BUNDLED_DIRECTORY", tiny_directory)
    assert find_directory("nano") == tiny_directory


def test_a_file_is_not_a_model(tiny_directory: Path) -> None:
    with pytest.raises(ModelNotFound, match="give the directory"):
        find_directory(str(tiny_directory / "model.pth"))


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.tiktoken", "special_tokens.json", "model.pth", "codec.pth"])
def test_missing_files_are_named(lost: str, tiny_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_directory, tmp_path / "model")
    assert missing_files(tmp_path / "model", codec=True) == []
    (tmp_path / "model" / lost).unlink()
    (lacking,) = missing_files(tmp_path / "model", codec=True)
    assert lost in lacking


def test_a_missing_shard_is_named(tiny_s2_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_s2_directory, tmp_path / "model")
    (tmp_path / "model" / "model-00002-of-00005.safetensors").unlink()
    assert missing_files(tmp_path / "model", codec=True) == ["model-00002-of-00005.safetensors"]


@pytest.mark.parametrize("name", ["", "s3", "a/b/c", "a b/c", "../x", "a/b@", "a/b@..", "a/b@x/../y", "a/b@/etc"])
def test_an_invalid_repository_name_is_not_a_source(name: str) -> None:
    assert HubSource.parse(name) is None


def test_sources_know_short_names_and_revisions() -> None:
    assert HubSource.parse("s1-mini") == HubSource("fishaudio/openaudio-s1-mini", "main")
    assert HubSource.parse("reef/tiny@refs/pr/1") == HubSource("reef/tiny", "refs/pr/1")
