import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.checkpoint.format.layout import missing_files, read_json
from shoal.checkpoint.tensors import read_shards, read_tensors, read_transformed, shorten
from shoal.errors import CheckpointError


def test_a_pickle_from_before_the_zip_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "old.pth"
    torch.save({"a": torch.arange(3)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(read_tensors(path)["a"], torch.arange(3))


def test_both_formats_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    """A private mapping: writing to a tensor changes this process's copy and not the file."""
    for name, write in (("m.pth", torch.save), ("m.safetensors", save_file)):
        write({"a": torch.zeros(5000)}, tmp_path / name)
        read_tensors(tmp_path / name)["a"].fill_(1.0)
        assert not read_tensors(tmp_path / name)["a"].any()


def test_unchanged_tensors_come_from_a_second_mapping() -> None:
    mappings: list[dict[str, Tensor]] = []

    def read() -> dict[str, Tensor]:
        mappings.append({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)})
        return mappings[-1]

    def join(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"ab": torch.cat((stored["a"], stored["b"])), "new.c": stored["c"]}

    changed = read_transformed(read, join)
    assert list(changed) == ["ab", "new.c"]
    assert torch.equal(changed["ab"], torch.ones(4))
    assert changed["new.c"] is mappings[1]["c"]


def test_long_lists_of_names_are_shortened_with_a_count() -> None:
    assert shorten(["a", "b"]) == "a, b"
    assert shorten(list("abcdefg")) == "a, b, c, d, e and 2 more"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_damaged_anywhere_is_a_checkpoint_error(zipped: bool, tmp_path: Path) -> None:
    path, draw = tmp_path / "broken.pth", random.Random(1)
    torch.save({f"a{number}": torch.ones(4) for number in range(3)}, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    refused = 0
    for _ in range(400):
        broken = bytearray(whole)
        for _ in range(draw.choice([1, 2, 5])):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        path.write_bytes(broken[: draw.choice([len(broken), draw.randrange(len(broken))])])
        try:
            read_tensors(path)
        except CheckpointError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("where", [["a"], None, {"a": 1}, {"a": "../b"}])
def test_an_invalid_weight_map_is_named(where: object, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    for read in (read_shards, lambda path: missing_files(path.parent, codec=False)):
        with pytest.raises(CheckpointError, match="weight_map must map"):
            read(index)


def test_a_shard_that_no_file_can_be_named_is_missing(tmp_path: Path) -> None:
    index, name = tmp_path / "model.safetensors.index.json", "é" * 200
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    assert name in missing_files(tmp_path, codec=False)
    with pytest.raises(CheckpointError, match="no such file"):
        read_shards(index)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a": ' + "9" * 5000 + "}"])
def test_json_that_python_cannot_parse_is_a_checkpoint_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        read_json(tmp_path / "config.json")
