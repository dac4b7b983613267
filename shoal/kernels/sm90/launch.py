"""Compile CUDA C++ kernels with NVRTC, cache them on disk, load and launch them.

NVRTC and the driver are called through NVIDIA's cuda-bindings. Where it is missing, or the GPU is no Hopper,
`kernels_unavailable` says so, and callers use Triton kernels.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from shoal.errors import OutputError
from shoal.kernels.jit import compiling_only, interpreted, multiprocessor_count
from shoal.kernels.sm90.source import Variant
from shoal.paths import atomic_write, cache_directory

try:
    from cuda.bindings import driver, nvrtc
except ImportError:  # an optional dependency
    driver = nvrtc = None

ARCHITECTURE = "sm_90a"
ELF = b"\x7fELF"  # first bytes of a valid cubin
OPTIONS = (f"--gpu-architecture={ARCHITECTURE}", "--std=c++17")


TensorMap = Any  # CUtensorMap of cuda-bindings, which has no types


class KernelError(RuntimeError):
    """NVRTC or the driver refused a kernel; the message has their reason."""


def kernels_unavailable(device: torch.device) -> str | None:
    """Return why these kernels do not run on tensors of this device, None if they do."""
    if not is_hopper(device):
        return "they are for GPUs of compute capability 9.0"
    if driver is None:
        return "cuda-bindings is not installed: pip install 'shoal-tts[hopper]'"
    return None


def is_hopper(device: torch.device) -> bool:
    """Return whether the device is a GPU of compute capability 9.0, such as H100 and H200."""
    if device.type != "cuda" or torch.version.hip is not None or interpreted():
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


VariantT = TypeVar("VariantT", bound=Variant)


@dataclass(frozen=True, slots=True)
class Sm90Kernel(Generic[VariantT]):
    """A loaded kernel with at most one block per multiprocessor. The tiles of a convolution have `tile_rows` rows."""

    variant: VariantT
    function: Any
    shared_bytes: int
    threads: int
    tile_rows: int
    multiprocessors: int

    def blocks(self, rows: int) -> int:
        """Return the number of blocks of a convolution over `rows` rows, a multiple of `tile_rows`."""
        assert rows % self.tile_rows == 0
        return min(self.multiprocessors, rows // self.tile_rows)

    def launch(self, blocks: int, *arguments: Tensor | int | float | TensorMap) -> None:
        """Launch on the current stream with programmatic dependent launch. In compile-only mode nothing is launched."""
        if compiling_only():
            return
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX = blocks
        config.gridDimY = config.gridDimZ = 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs, config.numAttrs = [attribute], 1
        values = tuple(each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)
        types = tuple(_argument_type(each) for each in arguments)
        _checked("launching a kernel", driver.cuLaunchKernelEx(config, self.function, (values, types), 0))


def _argument_type(argument: Tensor | int | float | TensorMap) -> Any:
    """Return the ctypes type of an argument, None for structures of cuda-bindings, which are passed by value."""
    types = {Tensor: ctypes.c_void_p, int: ctypes.c_int, float: ctypes.c_float}
    return next((each for kind, each in types.items() if isinstance(argument, kind)), None)


def load_kernels(variants: Collection[VariantT], device: torch.device) -> dict[VariantT, Sm90Kernel[VariantT]]:
    """Compile kernels, all at once, and load them. Raises KernelError, and RuntimeError if a library is missing."""
    with ThreadPoolExecutor(max(1, len(variants))) as compilers:
        list(compilers.map(compiled, variants))
    return {each: load_kernel(each, device) for each in variants}


@cache
def load_kernel(variant: VariantT, device: torch.device) -> Sm90Kernel[VariantT]:
    """Compile the kernel, or read it from the user's cache, and load it. Raises KernelError."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # creates the context that the module is loaded into
        loading = f"loading {variant.name}"
        (module,) = _checked(loading, driver.cuModuleLoadData(compiled(variant)))
        (function,) = _checked(loading, driver.cuModuleGetFunction(module, variant.name.encode()))
        shared_bytes, threads, tile_rows = _launch_sizes(module)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(loading, driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return Sm90Kernel(variant, function, shared_bytes, threads, tile_rows, multiprocessor_count(device))


@cache
def compiled(variant: Variant) -> bytes:
    """Return the machine code of a kernel. Compiling takes about a second; the user's cache directory keeps it."""
    text = variant.source()
    path = _cached_file(variant, text)
    if path is not None:
        with suppress(OSError):
            if (cached := path.read_bytes()).startswith(ELF):
                return cached
    cubin = compile_source(text, f"{variant.name}.cu")
    if path is not None:
        with suppress(OSError, OutputError):  # a read-only home directory or a full disk: compiled again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, cubin)
    return cubin


def _cached_file(variant: Variant, text: str) -> Path | None:
    version = _checked("asking NVRTC for its version", nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((text, OPTIONS, version)).encode()).hexdigest()[:16]
    with suppress(RuntimeError):  # a user without a home directory
        return cache_directory() / ARCHITECTURE / f"{variant.name}-{key}.cubin"
    return None


def compile_source(text: str, name: str) -> bytes:
    """Compile CUDA C++ to machine code. Raises KernelError with the compiler's messages."""
    (program,) = _checked("creating a program", nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    try:
        (failed,) = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), [each.encode() for each in OPTIONS])
        if failed != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelError(f"{name} does not compile for {ARCHITECTURE}: {_log(program)}")
        (size,) = _checked("compiling", nvrtc.nvrtcGetCUBINSize(program))
        cubin = bytes(size)
        _checked("compiling", nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def encode_tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorMap:
    """Return the descriptor with which the copy engine (TMA) reads boxes of bytes, innermost dimension first.

    Strides are in bytes, without that of the innermost dimension. A box is swizzled in lines of 128 bytes; what lies
    beyond the sizes is zero. Pass the descriptor to a kernel by value: those in device memory are cached, and the cache
    does not notice when another one is stored at the same address.
    """
    (tensor_map,) = _checked(
        "describing a tensor",
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(sizes),
            address,
            [driver.cuuint64_t(each) for each in sizes],
            [driver.cuuint64_t(each) for each in strides],
            [driver.cuuint32_t(each) for each in box],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
    )
    return tensor_map


def _log(program: Any) -> str:
    (size,) = _checked("compiling", nvrtc.nvrtcGetProgramLogSize(program))
    log = bytes(size)
    _checked("compiling", nvrtc.nvrtcGetProgramLog(program, log))
    return log.rstrip(b"\0").decode(errors="replace").strip()


def _launch_sizes(module: Any) -> tuple[int, int, int]:
    """Return shared memory in bytes, threads and rows of a tile, which the source defines."""
    pointer, size = _checked("reading launch_sizes", driver.cuModuleGetGlobal(module, b"launch_sizes"))
    sizes = (ctypes.c_int * 3)()
    _checked("reading launch_sizes", driver.cuMemcpyDtoH(ctypes.addressof(sizes), pointer, size))
    return sizes[0], sizes[1], sizes[2]


def _checked(action: str, result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values of a call of cuda-bindings. Raises KernelError if its status is an error."""
    status, *values = result
    if int(status) != 0:
        raise KernelError(f"{action} failed: {status.name}")
    return tuple(values)
