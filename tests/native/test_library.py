"""Packed products, sampling, and finding or compiling the library."""

import platform
import re
import subprocess
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from shutil import which

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.kernels.sampling.sample import sample_reference
from shoal.model.linear import DynamicInt8Linear, Fp8Linear, Int4Linear, Int8Linear, W8A8Linear, WeightOnlyInt8Linear
from shoal.native import build, choice, library
from shoal.native.build import library_name
from shoal.native.choice import native_library
from shoal.native.library import Arrays, Context, Matrix, NativeUnavailable, find_library, open_library
from shoal.native.modules import layer_arrays

ARM_COMPILER = "aarch64-linux-gnu-g++"


@pytest.fixture(scope="module")
def contexts(instruction_sets: list[str]) -> list[Context]:
    return [Context(isa, threads) for isa in instruction_sets for threads in (1, 2)]


def pack(arrays: Arrays, layer: torch.nn.Module, outputs: int, inputs: int) -> Matrix:
    return arrays.linear(dict(layer_arrays("layer", layer)), "layer", (outputs, inputs))


def product(context: Context, matrix: Matrix, x: Tensor) -> Tensor:
    return torch.from_numpy(context.product(matrix, x.numpy()))


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 8), (40, 24), (129, 33), (640, 384)])
@pytest.mark.parametrize("quantized", [False, True], ids=["floats", "int8"])
def test_products_equal_torch(contexts: list[Context], outputs: int, inputs: int, quantized: bool) -> None:
    torch.manual_seed(0)
    layer: torch.nn.Module = torch.nn.Linear(inputs, outputs)
    layer = Int8Linear.from_linear(layer) if quantized else layer  # type: ignore[arg-type]
    arrays, x = Arrays(), torch.randn(17, inputs)
    packed = pack(arrays, layer, outputs, inputs)
    for context in contexts:
        torch.testing.assert_close(product(context, packed, x), layer(x).detach(), rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_in_every_batch_with_every_tile_and_thread_count(contexts: list[Context]) -> None:
    """A request gets the same codes alone and in a batch; AVX2 and AVX-512 give the same bits as well."""
    torch.manual_seed(0)
    arrays, x = Arrays(), torch.randn(40, 96)
    packed = pack(arrays, torch.nn.Linear(96, 1200), 1200, 96)
    for context in contexts:
        whole = product(context, packed, x)
        for rows in (1, 2, 3, 5, 7, 8, 13):
            assert torch.equal(product(context, packed, x[:rows]), whole[:rows]), (context.isa, rows)
    fused = [product(context, packed, x) for context in contexts if context.isa != "baseline"]
    assert all(torch.equal(each, fused[0]) for each in fused)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(0.7, 0.9, 2**31), (1.0, 0.6, 5), (0.01, 0.99, 30), (1.3, 1.0, 2**31)]
)
def test_samples_equal_the_reference(contexts: list[Context], temperature: float, top_p: float, top_k: int) -> None:
    draw, rows, size = open_library().shoal_sample, 60, 257
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(rows, size, generator=generator)
    logits[::7, 5] = logits[::7, 9]  # ties
    frame, seed = torch.arange(rows), torch.arange(rows) * 7919
    none, ones = torch.zeros(rows, 0, dtype=torch.long), torch.ones(rows)
    settings = (ones * temperature, ones * top_p, torch.full((rows,), top_k))
    expected = sample_reference(logits, none, ones, *settings, seed, frame, lane=3)
    found = [draw(row.data_ptr(), size, temperature, top_p, top_k, 7919 * i, i, 3) for i, row in enumerate(logits)]
    assert found == expected.tolist()
    assert len(set(found)) > 20


def test_logits_that_are_not_numbers_give_a_token_in_range(contexts: list[Context]) -> None:
    logits = torch.full((300,), torch.nan)
    assert 0 <= open_library().shoal_sample(logits.data_ptr(), 300, 0.7, 0.9, 50, 1, 2, 3) < 300


def test_int8_layers_of_every_cpu_are_read_as_stored(contexts: list[Context]) -> None:
    """A layer that torch would compute with VNNI must not keep a large model off the native backend."""
    torch.manual_seed(0)
    stored, x = Int8Linear.from_weight(torch.randn(64, 32)), torch.randn(3, 32)
    arrays = Arrays()
    expected = product(contexts[0], pack(arrays, stored, 64, 32), x)
    for kind in (DynamicInt8Linear, WeightOnlyInt8Linear):
        assert torch.equal(product(contexts[0], pack(arrays, kind(stored.weight, stored.scales), 64, 32), x), expected)


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (33, 40), (600, 192)])
def test_int8_activations_have_the_same_bits_in_every_batch_on_every_instruction_set(
    contexts: list[Context], outputs: int, inputs: int
) -> None:
    """Integer sums are exact, so even the baseline agrees; 40 rows are whole and partial tiles of every width."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-128, 128, (outputs, inputs), dtype=np.int8)
    scales, bias = rng.random(outputs, np.float32), rng.random(outputs, np.float32)
    x = rng.standard_normal((40, inputs), np.float32) * rng.exponential(size=(40, 1)).astype(np.float32)
    x[3], weight[:2] = 0, [[-128], [127]]
    arrays = Arrays()
    matrix = arrays.matrix(weight, bias, scale=scales, w8a8=True)
    top = np.abs(x).max(1, keepdims=True)
    q = np.rint(x * np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)).astype(np.int64)
    sums = (q @ weight.T.astype(np.int64)).astype(np.float32)
    expected = sums * (top / np.float32(127)) * scales + bias
    for context in contexts:
        for rows in (40, 1, 5, 8, 17):
            assert np.array_equal(context.product(matrix, x[:rows]), expected[:rows]), (context.isa, rows)


def test_int8_activations_that_are_not_finite_do_not_give_numbers(contexts: list[Context]) -> None:
    weight, x = np.ones((16, 64), np.int8), np.ones((2, 64), np.float32)
    x[1, 5] = np.inf
    arrays = Arrays()
    matrix = arrays.matrix(weight, scale=np.ones(16, np.float32), w8a8=True)
    for context in contexts:
        found = context.product(matrix, x)
        assert np.array_equal(found[0], np.full(16, 64, np.float32))
        assert np.isnan(found[1]).all()


def test_the_layer_with_int8_activations_is_the_fallback_of_the_native_product(contexts: list[Context]) -> None:
    torch.manual_seed(0)
    layer, x = W8A8Linear.from_weight(torch.randn(48, 72), torch.randn(48)), torch.randn(5, 72)
    x[2] = 0
    arrays = Arrays()
    found = product(contexts[0], pack(arrays, layer, 48, 72), x)
    torch.testing.assert_close(found, layer(x), rtol=1e-5, atol=1e-5)
    exact = Int8Linear.from_quantized(layer.weight, layer.scales, layer.bias)(x)
    assert 0 < (found - exact).abs().max() < 0.03 * exact.abs().max()


@pytest.mark.parametrize("kind", [Int4Linear, Fp8Linear])
def test_weights_in_a_layout_of_other_backends_are_refused(kind: type[Int4Linear | Fp8Linear]) -> None:
    with pytest.raises(NativeUnavailable, match=kind.__name__):
        list(layer_arrays("", kind.from_weight(torch.randn(8, 128))))


@pytest.mark.skipif(which(ARM_COMPILER) is None, reason=f"needs {ARM_COMPILER}")
def test_the_sources_compile_for_arm64() -> None:
    """`scripts/arm64` also runs them."""
    jobs = build._jobs(ARM_COMPILER, Path("unused"), "aarch64")
    assert sum("int8_product.cpp" in job[-3] for job in jobs) == len(build.INT8_ARM)
    for job in jobs:
        command = [*job[: job.index("-c")], "-Wall", "-Werror", "-fsyntax-only", job[-3]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_a_library_of_another_architecture_has_another_name() -> None:
    assert library_name("aarch64") != library_name("x86_64")
    assert library_name() == library_name(platform.machine())


def test_the_bundled_library_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "BUNDLED", tmp_path)
    (tmp_path / build.library_name()).touch()
    assert find_library(ExitStack()) == tmp_path / build.library_name()


def test_without_a_compiler_the_reason_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (library, choice):
        monkeypatch.setattr(module, "BUNDLED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeUnavailable, match=re.escape("install g++ or clang++")):
        find_library(ExitStack())
    assert not native_library().available
    assert "compiling" not in caplog.text


def test_a_process_does_not_compile_again_what_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler, runs = tmp_path / "broken", tmp_path / "runs"
    compiler.write_text(f"#!/bin/sh\necho run >> {runs}\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(library, "BUNDLED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(library, "_open", cache(library._open.__wrapped__))
    counts = []
    for _ in range(2):
        with pytest.raises(NativeUnavailable, match="broken failed"):
            library.open_library()
        counts.append(len(runs.read_text().split()))
    assert counts[0] == counts[1] > 0


def test_with_a_read_only_home_the_library_is_compiled_for_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(library, "BUNDLED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no directory can be created there, even by root
    monkeypatch.setattr(library, "compile_library", lambda target: target.write_text("compiled"))
    with ExitStack() as stack:
        found = find_library(stack)
        assert found.read_text() == "compiled"
        assert found.parent.stat().st_mode & 0o077 == 0
    assert not found.parent.exists()
    assert "set XDG_CACHE_HOME" in caplog.text


def test_a_compiler_that_fails_leaves_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.BuildFailed, match="no such header"):
        build.compile_library(tmp_path / "out" / "lib.so")
    assert list((tmp_path / "out").iterdir()) == []
