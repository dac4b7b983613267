"""Linear layers of few rows in CUDA C++: the GPU tests compare them with the Triton kernels bit by bit."""

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from shoal.kernels.sm90 import few_rows, launch
from shoal.kernels.sm90.few_rows import BitComparison, LinearWeights, linear_variants, pack_linear
from shoal.kernels.sm90.source import LinearVariant
from tests.kernels.sm90.compiling import machine_code

# The layers of S2-Pro: weight [out, in], and whether it follows a norm and has a gate.
LAYERS: dict[str, tuple[tuple[int, int], bool, bool]] = {
    "wqkv": ((6144, 2560), True, False),
    "wo": ((2560, 4096), False, False),
    "w13": ((2 * 9728, 2560), True, True),
    "w2": ((2560, 9728), False, False),
    "output": ((1024, 2560), True, False),  # what is sampled from the fast transformer's output: its first codes
}


def variants(name: str, dtype: torch.dtype = torch.bfloat16) -> list[LinearVariant]:
    shape, norm, gated = LAYERS[name]
    weight = torch.empty(shape, dtype=dtype, device="meta")
    return linear_variants(weight, norm=norm, gated=gated, int8_activations=dtype == torch.int8)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, [1, 2, 4, 8]), (torch.int8, [1, 2, 4])], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_s2_pro_have_kernels_for_few_rows(name: str, dtype: torch.dtype, rows: list[int]) -> None:
    assert [each.rows for each in variants(name, dtype)] == rows


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((4096, 1024), torch.bfloat16, {"norm": True}),
        ((1024, 3072), torch.bfloat16, {"norm": False}),
        ((6144, 2560), torch.float16, {"norm": True}),
        ((6144, 2560), torch.float8_e4m3fn, {"norm": True}),
        ((6144, 2560), torch.int8, {"norm": True}),
        ((6144, 2560), torch.bfloat16, {"norm": True, "int8_activations": True}),
        ((6144, 2624), torch.bfloat16, {"norm": True}),
        ((6144, 4352), torch.bfloat16, {"norm": True}),
        ((6140, 2560), torch.bfloat16, {"norm": True}),
        ((2562, 4096), torch.bfloat16, {"norm": False}),
    ],
    ids=[
        "S1-mini",
        "S1-mini w2",
        "fp16",
        "fp8",
        "int8 weights",
        "int8 rows",
        "blocks",
        "norm",
        "outputs",
        "few outputs",
    ],
)
def test_other_layers_have_none(shape: tuple[int, int], dtype: torch.dtype, options: dict[str, bool]) -> None:
    assert linear_variants(torch.empty(shape, dtype=dtype, device="meta"), **options) == []


@pytest.mark.parametrize("gated", [False, True])
def test_a_tensor_map_has_every_byte_once_and_splits_of_k_in_order(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[tuple[Sequence[int], ...]] = []

    def encode(address: int, *dimensions: Sequence[int]) -> None:
        described.append(dimensions)

    monkeypatch.setattr(few_rows, "encode_tensor_map", encode)
    weight = torch.arange(8 * 512, dtype=torch.int32).view(8, 512)  # rows of 2,048 bytes: four blocks per split
    variant = LinearVariant(1, 1024, 4 if gated else 8, norm=True, gated=gated, int8=False, multiprocessors=132)
    few_rows._tensor_map(weight, variant)
    ((sizes, strides, box),) = described
    view = as_strided(weight.numpy().view(np.uint8).ravel(), sizes[::-1], (*strides[::-1], 1))
    assert sorted(view.copy().view(np.int32).ravel().tolist()) == list(range(8 * 512))
    split, block, part, row = 3, 1, int(gated), 2
    expected = weight[part * 4 + row].view(4, 4, 32)[split, block]
    assert view[split, block, part, row].view(np.int32).tolist() == expected.tolist()
    assert box[1] * box[2] == variant.lines


@pytest.mark.parametrize("multiprocessors", [132, 60], ids=["H200", "part of an H200"])
@pytest.mark.parametrize("name", LAYERS)
def test_kernels_of_the_fewest_and_most_rows_compile(name: str, multiprocessors: int, tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.int8):
        found = variants(name, dtype)
        for variant in (found[0], found[-1]):
            sized = variant._replace(multiprocessors=multiprocessors)
            assert sized.fits
            assert machine_code(sized.source(), tmp_path).startswith(launch.ELF)


def test_a_kernel_that_does_not_fit_is_left_out_and_those_of_fewer_rows_are_not(tmp_path: Path) -> None:
    weight = torch.empty((4096, 14336), dtype=torch.bfloat16, device="meta")
    found = linear_variants(weight, norm=False)
    assert [each.rows for each in found] == [1, 2, 4]
    larger = found[-1]._replace(rows=8)
    assert not larger.fits
    with pytest.raises((launch.KernelError, subprocess.CalledProcessError)):
        machine_code(larger.source(), tmp_path)


def packed(name: str, dtype: torch.dtype) -> LinearWeights:
    """Return random weights on the GPU, as large as those of a trained layer."""
    shape, norm, gated = LAYERS[name]
    scales: Tensor | None = None
    if dtype == torch.int8:
        weight = torch.randint(-127, 128, shape, dtype=dtype, device="cuda")
        scales = torch.rand(shape[0], device="cuda").bfloat16() / 4000
    else:
        weight = torch.randn(shape, dtype=dtype, device="cuda") / 50
    found = linear_variants(weight, norm=norm, gated=gated, int8_activations=dtype == torch.int8)
    kernels = launch.load_kernels(found, weight.device)
    return pack_linear(weight, scales, [kernels[each] for each in found])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_bits_of_triton(name: str, dtype: torch.dtype) -> None:
    comparison = BitComparison(packed(name, dtype))
    comparison.run()
    assert int(comparison.unequal) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["wqkv", "wo"])
def test_the_comparison_finds_a_kernel_that_computes_something_else(name: str) -> None:
    weights = packed(name, torch.bfloat16)
    comparison = BitComparison(replace(weights, weight=weights.weight * 1.01))
    comparison.run()
    assert int(comparison.unequal) > 0


@pytest.mark.gpu
def test_rows_do_not_depend_on_each_other() -> None:
    weights = packed("w13", torch.bfloat16)
    x, norm = torch.randn(8, 2560, device="cuda").bfloat16(), torch.rand(2560, device="cuda").bfloat16()
    both = weights.project(x, norm, 1e-6)
    assert all(torch.equal(both[row], weights.project(x[row : row + 1], norm, 1e-6)[0]) for row in range(8))


@pytest.mark.gpu
def test_products_are_exact_beside_other_kernels_on_the_same_multiprocessors() -> None:
    """Without the fence before a box of weights is released, 200 of these products were wrong on an H200."""
    weights, rounds = packed("wo", torch.bfloat16), 3000
    inner, residual = torch.randn(1, 4096, device="cuda").bfloat16(), torch.randn(1, 2560, device="cuda").bfloat16()
    expected = residual.clone()
    weights.add(expected, inner)
    outputs, matrix = residual.repeat(rounds, 1, 1), torch.randn(4096, 4096, device="cuda").half()
    vector = torch.randn(8 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(400):
            matrix @ matrix
            vector + 1
    with torch.cuda.stream(torch.cuda.Stream()):
        for out in outputs:
            weights.add(out, inner)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outputs)
