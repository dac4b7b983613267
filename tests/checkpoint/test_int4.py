"""Upstream's int4 directories: values packed in the tiles of the tensor cores, affine in groups of columns."""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.checkpoint.load import insert_quantized_layers, load_model
from shoal.errors import CheckpointError
from shoal.model.cache import NoKVCache
from shoal.model.dual_ar import DualAR
from shoal.model.generate import generate
from shoal.model.linear import Int4Linear, unpack_int4_tiles
from shoal.model.slow import Head
from shoal.speech import SamplingParams
from shoal.text.tokenizer import load_tokenizer

GROUP = 128
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight values lies in each nibble of an int32, lowest first


def pack_tiles(q: Tensor, inner: int) -> Tensor:
    """q [out, in] of 0..15 -> int32 [out / 8, in / (inner * 16), 32, inner / 2], as the layout is described."""
    places = torch.tensor([[place_in_tile(lane, word) for word in range(inner // 2)] for lane in range(32)])
    row, column = places.unbind(-1)  # [32, inner / 2, 8]
    tiles = q.long().unflatten(1, (-1, inner * 16)).unflatten(0, (-1, 8)).transpose(1, 2)
    values = tiles[:, :, row, column]
    packed = sum(values[..., value] << (4 * nibble) for nibble, value in enumerate(NIBBLES))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def place_in_tile(lane: int, word: int) -> list[tuple[int, int]]:
    """Row and column of the eight values in one int32: of each of two k-tiles, a pair and the one eight later."""
    first = word * 32 + 2 * (lane % 4)
    return [(lane // 4, first + tile + half + odd) for tile in (0, 16) for half in (0, 8) for odd in (0, 1)]


def as_bytes(q: Tensor) -> Tensor:
    """Two columns per byte, the even one low."""
    low, high = q.to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def random_values(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=30)
@given(
    row_tiles=st.integers(1, 4), column_tiles=st.integers(1, 3), inner=st.sampled_from((2, 4, 8)), seed=st.integers(0)
)
def test_unpacking_undoes_packing(row_tiles: int, column_tiles: int, inner: int, seed: int) -> None:
    q = random_values(8 * row_tiles, 16 * inner * column_tiles, seed % 2**32)
    assert torch.equal(unpack_int4_tiles(pack_tiles(q, inner), q.shape[1]), as_bytes(q))


def test_padding_columns_are_dropped() -> None:
    q = random_values(8, 1024, seed=1)
    assert torch.equal(unpack_int4_tiles(pack_tiles(q, 8), 96), as_bytes(q[:, :96]))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns", "inner"), [(8, 128, 8), (64, 1024, 8), (24, 256, 4), (16, 96, 2)])
def test_torch_packs_the_same_tiles(rows: int, columns: int, inner: int) -> None:
    q = random_values(rows, columns, seed=rows)
    even, odd = q.to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
    theirs = torch.ops.aten._convert_weight_to_int4pack(((even << 4) | odd).cuda(), inner).cpu()
    assert torch.equal(theirs, pack_tiles(q, inner))
    assert torch.equal(unpack_int4_tiles(theirs, columns), as_bytes(q))


def test_the_packed_layout_is_recognised_with_its_group_size() -> None:
    tiles, affine = torch.zeros(2, 8, 32, 4, dtype=torch.int32), torch.zeros(8, 16, 2, dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(1024, 16, bias=False))
    insert_quantized_layers(model, {"0.weight": tiles, "0.scales_and_zeros": affine})
    assert isinstance(model[0], Int4Linear)
    assert model[0].group_size == GROUP
    with pytest.raises(CheckpointError, match=r"is stored without 0\.weight"):
        insert_quantized_layers(model, {"0.scales_and_zeros": affine})


@pytest.fixture(scope="module")
def int4(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stored int4 weights of the S1 checkpoint in a directory as upstream's tool writes it."""
    directory = tmp_path_factory.mktemp("quantised") / "fs-1.2-int4-g128-20250603_120000"
    shutil.copytree(golden / "s1" / "checkpoint", directory)
    torch.save(packed_tensors(golden, directory), directory / "model.pth")
    return directory


def packed_tensors(golden: Path, directory: Path) -> dict[str, Tensor]:
    stored = load_file(golden / "quant" / "int4_g128_unpacked.safetensors")
    tensors: dict[str, Tensor] = torch.load(directory / "model.pth", weights_only=True)
    for name in [name for name in stored if name.endswith(".q")]:
        layer, q = name.removesuffix(".q"), torch.stack((stored[name] & 15, stored[name] >> 4), dim=-1).flatten(1)
        padding = -q.shape[1] % 1024
        tensors[f"{layer}.weight"] = pack_tiles(nn.functional.pad(q, (0, padding)), inner=8)
        affine = stored[f"{layer}.scales_and_zeros"]
        groups = (q.shape[1] + padding) // GROUP - len(affine)
        tensors[f"{layer}.scales_and_zeros"] = nn.functional.pad(affine, (0, 0, 0, 0, 0, groups))
    return tensors


def test_a_directory_of_tiles_computes_the_stored_logits(int4: Path, golden: Path) -> None:
    model = load(int4)
    assert isinstance(model.get_submodule("slow.layers.0.feed_forward.w13"), Int4Linear)
    stored = load_file(golden / "quant" / "int4_g128_unpacked.safetensors")
    prompts = load_file(golden / "s1" / "prefill.safetensors")
    for name in ("text_only", "one_reference", "cjk"):
        columns = prompts[f"{name}.grid"].T.long()
        hidden = model.slow(columns, torch.arange(len(columns)), NoKVCache(1))[-1:]
        logits = Head(model.slow, full_vocab=True)(model.slow.norm(hidden))[0]
        torch.testing.assert_close(logits, stored[f"{name}.logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("whole", [False, True])
def test_an_int4_directory_generates_with_either_head(whole: bool, int4: Path) -> None:
    model = load(int4)
    prompt = torch.tensor([[65, 66, 67], *[[0, 0, 0]] * 10])
    generation = generate(model, Head(model.slow, full_vocab=whole), prompt, SamplingParams(max_frames=2))
    assert generation.codes.shape[0] == 10


@pytest.mark.parametrize("shape", [(4, 4), (3, 8, 32, 4), (4, 1, 2, 4), (4, 0, 32, 4)])
def test_tiles_of_another_shape_are_refused_by_name(shape: tuple[int, ...], int4: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(int4, tmp_path / "broken"))
    stored = torch.load(broken / "model.pth", weights_only=True)
    torch.save(stored | {"layers.0.attention.wo.weight": torch.zeros(shape, dtype=torch.int32)}, broken / "model.pth")
    with pytest.raises(CheckpointError, match=r"slow\.layers\.0\.attention\.wo\.weight"):
        load(broken)


def load(directory: Path) -> DualAR:
    return load_model(directory, load_tokenizer(directory), dtype=torch.float32)
