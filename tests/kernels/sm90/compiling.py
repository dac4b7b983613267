"""Compile CUDA C++ for Hopper without a GPU: by NVRTC, as the engine does, or by nvcc if that is installed."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from shoal.kernels.sm90.launch import ARCHITECTURE, compile_source


def machine_code(source: str, folder: Path) -> bytes:
    """Return the compiled kernel. Raises the compiler's error; skips the test if there is no compiler."""
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings"):
        return compile_source(source, "kernel.cu")
    if shutil.which("nvcc") is None:
        pytest.skip("needs NVRTC (pip install cuda-bindings) or nvcc")
    (folder / "kernel.cu").write_text(source)
    options = (f"-arch={ARCHITECTURE}", "-std=c++17", "-cubin", "-o", "kernel.cubin", "kernel.cu")
    subprocess.run(["nvcc", *options], cwd=folder, check=True)
    return (folder / "kernel.cubin").read_bytes()
