from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.checkpoint.tensors import read_changed, read_tensors, shorten


def test_a_pickle_from_before_the_zip_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "old.pth"
    torch.save({"a": torch.arange(3)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(read_tensors(path)["a"], torch.arange(3))


def test_both_formats_are_views_of_the_file_until_they_are_changed(tmp_path: Path) -> None:
    """A private mapping: writing to a tensor changes this process's copy and not the file."""
    for name, write in (("m.pth", torch.save), ("m.safetensors", save_file)):
        write({"a": torch.zeros(5000)}, tmp_path / name)
        read_tensors(tmp_path / name)["a"].fill_(1.0)
        assert not read_tensors(tmp_path / name)["a"].any()


def test_a_change_is_applied_and_what_it_passes_on_comes_from_a_second_mapping() -> None:
    mappings: list[dict[str, Tensor]] = []

    def read() -> dict[str, Tensor]:
        mappings.append({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)})
        return mappings[-1]

    def join(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"ab": torch.cat((stored["a"], stored["b"])), "new.c": stored["c"]}

    changed = read_changed(read, join)
    assert list(changed) == ["ab", "new.c"]
    assert torch.equal(changed["ab"], torch.ones(4))
    assert changed["new.c"] is mappings[1]["c"]


def test_long_lists_of_names_are_shortened_with_a_count() -> None:
    assert shorten(["a", "b"]) == "a, b"
    assert shorten(list("abcdefg")) == "a, b, c, d, e and 2 more"
