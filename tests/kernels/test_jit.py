"""Compilation of kernels before their first launch."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event, Thread, Timer
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from triton.runtime import _async_compile

from shoal.kernels import jit
from shoal.kernels.cuda_graph import CaptureContext, GraphSizes, compile_ahead
from shoal.kernels.jit import compile_only, kernels_unavailable
from shoal.kernels.linear.linear import _small_m_kernel, linear
from shoal.paths import cache_directory


def doubled(device: str, columns: int = 32) -> torch.Tensor:
    x = torch.ones(1, columns, device=device)
    return linear(x, 2 * torch.eye(columns, device=device))


def test_a_launch_that_only_compiles_computes_nothing(device: str) -> None:
    out = torch.full((1, 32), 7.0, device=device)
    with compile_only() as possible:
        assert possible
        linear(torch.ones(1, 32, device=device), torch.eye(32, device=device), out=out)
    assert out.tolist() == [[7.0] * 32]
    assert doubled(device).tolist() == [[2.0] * 32]


def test_launches_of_another_thread_run_while_one_thread_only_compiles(device: str) -> None:
    results: list[torch.Tensor] = []
    with compile_only():
        other = Thread(target=lambda: results.append(doubled(device)))
        other.start()
        other.join()
    assert results[0].tolist() == [[2.0] * 32]


def test_an_error_while_compiling_restores_normal_launches(device: str) -> None:
    with pytest.raises(ZeroDivisionError), compile_only():
        raise ZeroDivisionError
    assert doubled(device).tolist() == [[2.0] * 32]


def test_an_interrupt_does_not_wait_for_compilations_that_have_not_started() -> None:
    started: list[int] = []
    release = Event()

    def compile_slowly(number: int) -> None:
        started.append(number)
        release.wait(240)

    def submit_and_interrupt() -> None:
        mode = _async_compile.active_mode.get()
        for number in range(200):
            mode.submit(number, partial(compile_slowly, number), lambda kernel: None)
        Timer(0.1, release.set).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), compile_only():
        submit_and_interrupt()
    assert 0 < len(started) < 200
    assert _async_compile.active_mode.get() is None


class RaisingWorkload:
    inputs = torch.zeros(0)

    def padding(self) -> np.ndarray:
        return self.inputs.numpy()

    def run(self) -> None:
        raise RuntimeError("kernels would be launched")


def test_kernels_are_compiled_by_as_many_threads_as_the_container_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """More would take memory and the quota of the engine thread: a container sees all cores of its host."""
    pool = Mock(wraps=ThreadPoolExecutor)
    monkeypatch.setattr(jit, "usable_cores", lambda: 3)
    monkeypatch.setattr(jit, "ThreadPoolExecutor", pool)
    with compile_only():
        pass
    pool.assert_called_once_with(3)


def test_without_parallel_compilation_compile_ahead_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("triton.AsyncCompileMode")
    compile_ahead([RaisingWorkload()], strict=True)


def test_a_workload_that_raises_while_compiling_ahead_is_skipped() -> None:
    compile_ahead([RaisingWorkload()])
    with pytest.raises(RuntimeError, match="would be launched"):
        compile_ahead([RaisingWorkload()], strict=True)


def test_only_a_size_that_was_withdrawn_counts_as_dropped() -> None:
    """A step that runs out of memory is repeated with fewer sequences; its size stays in use."""
    raising = RaisingWorkload()
    sizes = GraphSizes("graph", {1: raising, 2: RaisingWorkload()})
    with pytest.raises(RuntimeError):
        sizes.run(1, raising.padding())
    assert sizes.dropped == {}
    raising.run = lambda: None  # type: ignore[method-assign]
    sizes.run(1, raising.padding())
    assert not sizes.drop_failed()
    assert list(sizes) == [1, 2]


def test_a_size_that_cannot_be_added_is_left_out() -> None:
    sizes, no_context = GraphSizes("graph", {1: RaisingWorkload()}), Mock(spec=CaptureContext)
    sizes.add(2, Mock(side_effect=torch.OutOfMemoryError("no memory for the inputs")), no_context)
    assert list(sizes) == [1]
    assert "no memory for the inputs" in sizes.dropped[2]


@pytest.mark.gpu
def test_a_launch_reuses_the_variant_that_was_compiled_ahead(device: str) -> None:
    cached = _small_m_kernel.function.device_caches[torch.cuda.current_device()][0]
    before = len(cached)
    with compile_only():
        for _ in range(3):
            doubled(device, 1152)
    assert len(cached) == before + 1
    assert doubled(device, 1152).tolist() == [[2.0] * 1152]
    assert len(cached) == before + 1


def compile_offline(module: str) -> subprocess.CompletedProcess[str]:
    """Run a module that compiles kernels.

    Triton's cache key covers source, options and version: the next run reuses the results, in another clone, too.
    """
    ours = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache_directory() / "tests" / "kernels")}
    ours |= {"TRITON_DISABLE_LINE_INFO": "1"}  # takes a twentieth less time
    ours = {**os.environ, **ours}
    return subprocess.run([sys.executable, "-m", module], env=ours, capture_output=True, text=True)


def test_every_kernel_compiles_for_hopper_without_a_gpu() -> None:
    done = compile_offline("tests.kernels.hopper")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found["variants"]) >= 15
    assert all(found["variants"].values()), found["variants"]
    # Another layout sums in another order: a row would have other bits with split-K than without.
    assert {"1024": 1, "4096": 1}.items() <= found["norm_layouts"].items()
    assert set(found["norm_layouts"].values()) == {1}
    # Nor may attention of one row sum in another order than that of a batch.
    assert len(found["attention_layouts"]) == 6
    assert set(found["attention_layouts"].values()) == {1}
    # Products of few rows over 8-bit weights add in the order of those of many rows.
    assert found["k_groups"]["regrouped"] > 10
    assert found["k_groups"]["wrong"] == 0


def test_the_largest_products_fit_the_shared_memory_of_every_target() -> None:
    done = compile_offline("tests.kernels.offline")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["arch"] for result in results] == [80, 86, 89, 90, 100, 110, 120]
    assert [result["variants"] for result in results] == [6, 6, 12, 12, 6, 12, 6]
    assert all(result["k_groups"]["interleaved"] > 1 for result in results if result["variants"] == 12)
    assert not any(result["k_groups"]["wrong"] for result in results)
    # Products of few rows follow the order of those of many rows, whose instruction the compiler chooses by target.
    assert {result["arch"]: result["wgmma"]["found"] for result in results if result["wgmma"]["expected"]} == {
        90: True,
        100: True,
        110: True,
    }
    for part, targets in (("", 7), ("codec_", 2)):
        known = [result for result in results if f"{part}predicted" in result]
        assert len(known) == targets
        assert all(result[f"{part}predicted"] is None for result in known)
        too_small = [result[f"{part}with_16_kb"] for result in known]
        assert all("bytes of shared memory, this GPU has 16,384" in reason for reason in too_small)


def test_cards_and_builds_without_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "interpreted", lambda: False)
    gpu = torch.device("cuda")
    for capability, reason in {(7, 5): "need compute capability 8.0", (8, 0): None, (12, 0): None}.items():
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device, found=capability: found)
        found = kernels_unavailable(gpu)
        assert found is None if reason is None else reason in (found or "")
    assert "cpu is not a GPU" in (kernels_unavailable(torch.device("cpu")) or "")
    monkeypatch.setattr("torch.version.hip", "6.4")
    assert "ROCm" in (kernels_unavailable(gpu) or "")
    monkeypatch.setattr(jit, "triton", None)
    assert kernels_unavailable(gpu) == "Triton is not installed"


def test_a_triton_without_dependent_launch_runs_the_kernels() -> None:
    program = """
import sys, types
import torch, triton
sys.modules["triton.language.extra.cuda"] = types.ModuleType("cuda")
from shoal.kernels import jit
from shoal.kernels.linear.linear import linear
assert jit.triton is not None and not jit.PDL_OPTION
assert linear(torch.ones(1, 32), torch.eye(32)).tolist() == [[1.0] * 32]
"""
    ours = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=ours, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_kernels_compile_for_a_user_whose_cache_is_not_writable(tmp_path: Path) -> None:
    program = """
import os
import torch, triton
from shoal.kernels.jit import collect_compiled
from shoal.kernels.linear.linear import linear
from tests.kernels.offline import OfflineDriver
triton.runtime.driver.set_active(OfflineDriver(89))
with collect_compiled() as compiled:
    linear(torch.ones(1, 128), torch.eye(128))
assert compiled
print(os.environ["TRITON_CACHE_DIR"])
"""
    (tmp_path / "home").touch()  # nothing can be created below a file, not even by root
    ours = {**os.environ, "TRITON_INTERPRET": "0", "XDG_CACHE_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    ours.pop("TRITON_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", program], env=ours, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "every start compiles them again" in done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert not Path(done.stdout.strip()).exists()  # kept until the process ends
