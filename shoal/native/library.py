"""Load the native library and call it: contexts (instruction set and threads) and packed matrices."""

import ctypes
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from shoal.config import CpuIsa
from shoal.errors import CheckpointError
from shoal.native.build import BUNDLED, BuildFailed, compile_library, library_name, require_compiler
from shoal.paths import cache_directory, file_lock

logger = logging.getLogger(__name__)

ABI_VERSION = 5
PANEL = 16  # output columns per packed panel
CACHE_LINE = 64  # bytes
INSTRUCTION_SETS = get_args(CpuIsa)[1:]  # without auto; widest first
# Types of packed weights; mirror WeightType in src/kernels.h.
FLOAT32, INT8, W8A8 = range(3)
W8A8_COLUMNS = 64  # the packed inputs of W8A8 are a multiple of this
# Weights by their names in the modules' state dict. int8 weights have `scales` [out]; `NAME.w8a8` marks a layer whose
# activations are quantized as well.
Weights = Mapping[str, NDArray[Any]]
UNIT = ctypes.CFUNCTYPE(None, ctypes.c_int32, ctypes.c_int32)  # one unit of parallel work: its number and the thread
_OPENED = threading.Lock()


class NativeUnavailable(RuntimeError):
    """The native code cannot run here, or does not support this model; the message says why."""


class Matrix(ctypes.Structure):
    """Packed weight. Mirrors `Matrix` in src/kernels.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class Arrays:
    """Packs weights for the kernels. Owns the arrays that native structures point to, so it must outlive them."""

    def __init__(self) -> None:
        self._kept: list[NDArray[Any]] = []

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._kept)

    def address(self, values: NDArray[Any]) -> int:
        """Return the address of the values as contiguous fp32, converted into a copy if necessary."""
        return self._keep(np.ascontiguousarray(values, np.float32))

    def linear(
        self,
        weights: Weights,
        name: str,
        shape: tuple[int, int],
        *,
        rows: int | None = None,
        scale: NDArray[np.float32] | None = None,
    ) -> Matrix:
        """Pack the layer `name` of shape [out, in], or its first `rows` outputs; `scale` [out] multiplies the outputs.

        Raises CheckpointError for a missing weight or one of another shape.
        """
        weight, bias = find_weight(weights, f"{name}.weight", shape), weights.get(f"{name}.bias")
        if bias is not None:
            bias = bias.astype(np.float32) if scale is None else bias.astype(np.float32) * scale
        if weight.dtype == np.int8:
            scales = find_weight(weights, f"{name}.scales", shape[:1]).astype(np.float32)
            scale = scales if scale is None else scales * scale
        return self.matrix(weight[:rows], bias, scale=scale, w8a8=f"{name}.w8a8" in weights)

    def stacked(self, weights: Weights, names: Sequence[str], shape: tuple[int, int]) -> Matrix:
        """Pack layers of the same shape [out, in], without biases, as one; all of floats or all of int8.

        Raises CheckpointError for a missing weight or one of another shape.
        """
        parts = [find_weight(weights, f"{name}.weight", shape) for name in names]
        if parts[0].dtype != np.int8:
            return self.matrix(np.concatenate(parts))
        scales = [find_weight(weights, f"{name}.scales", shape[:1]) for name in names]
        return self.matrix(np.concatenate(parts), scale=np.concatenate(scales))

    def matrix(
        self,
        weight: NDArray[Any],
        bias: NDArray[Any] | None = None,
        *,
        scale: NDArray[Any] | None = None,
        w8a8: bool = False,
    ) -> Matrix:
        """Pack a weight of floats or int8: y = (x · wᵀ) · scale + bias, with scale and bias [out].

        The weight is [out, in], or [out, taps, in] for inputs that are several rows apart; any strides. With `w8a8`
        the weight is int8 [out, in] with a scale, and x is quantized row by row.
        """
        weight_type = FLOAT32 if weight.dtype != np.int8 else W8A8 if w8a8 else INT8
        weight = weight.astype(np.float32 if weight_type == FLOAT32 else np.int8, copy=False)
        parts = [None if each is None else self._vector(each[: len(weight)]) for each in (scale, bias)]
        sums = self._vector(128 * weight.sum(1, dtype=np.int32), np.int32) if weight_type == W8A8 else None
        return Matrix(self._pack(weight, weight_type), *parts, sums, len(weight), weight[0].size, weight_type, 0)

    def _pack(self, weight: NDArray[Any], weight_type: int) -> int:
        cube = weight if weight.ndim == 3 else weight[:, None]
        inputs = weight[0].size + (-weight[0].size % W8A8_COLUMNS if weight_type == W8A8 else 0)
        packed = aligned_empty((-(-len(cube) // PANEL), inputs, PANEL), cube.dtype)
        steps = (stride // cube.itemsize for stride in cube.strides)
        sizes, strides = (ctypes.c_int64 * 3)(*cube.shape), (ctypes.c_int64 * 3)(*steps)
        open_library().shoal_pack(cube.ctypes.data, weight_type, sizes, strides, packed.ctypes.data)
        return self._keep(packed)

    def _vector(self, values: NDArray[Any], dtype: type[np.generic] = np.float32) -> int:
        """Return the address of values [out], followed by zeros up to a multiple of `PANEL`."""
        return self._keep(np.ascontiguousarray(np.pad(values, (0, -len(values) % PANEL)), dtype))

    def _keep(self, array: NDArray[Any]) -> int:
        self._kept.append(array)
        return array.ctypes.data


def find_weight(weights: Weights, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a weight. Raises CheckpointError if it is missing or has another shape: the kernels read raw memory."""
    found = weights.get(name)
    if found is None or found.shape != shape:
        raise CheckpointError(f"{name} is {'missing' if found is None else list(found.shape)}, expected {list(shape)}")
    return found


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array that starts at a cache line: vector loads that cross a line are slower."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + size].view(dtype).reshape(shape)


class Context:
    """Kernels of one instruction set and their threads. Calls release the GIL. Not thread-safe: one call at a time."""

    def __init__(self, isa: str, threads: int = 1) -> None:
        """Start the threads. Raises NativeUnavailable without a library, or if it cannot start them with this set."""
        self.library = open_library()
        self.isa, self.threads = isa, threads
        self.handle = self.library.shoal_context_new(self.isa.encode(), self.threads)
        if not self.handle:
            raise NativeUnavailable(f"the native library cannot start {threads} threads with {isa}")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.shoal_context_free(self.handle)

    def product(self, matrix: Matrix, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Multiply x [n, cols] by a packed weight -> [n, rows]; for tests and measurements."""
        x, out = np.ascontiguousarray(x), np.empty((len(x), matrix.rows), np.float32)
        self.library.shoal_product(self.handle, ctypes.byref(matrix), x.ctypes.data, len(x), out.ctypes.data)
        return out


def open_library() -> ctypes.CDLL:
    """Return the library, compiled on first use if the package does not hold it. Raises NativeUnavailable.

    A process tries once: the model and the codec both ask for it, and a compilation can take a minute to fail.
    """
    with _OPENED:
        found = _open()
    if isinstance(found, str):
        raise NativeUnavailable(found)
    return found


@cache
def _open() -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none."""
    try:
        return _load()
    except NativeUnavailable as error:
        return str(error)


def _load() -> ctypes.CDLL:
    if sys.platform == "win32":
        raise NativeUnavailable("the native backend does not support Windows")
    try:
        with ExitStack() as stack:
            library = ctypes.CDLL(str(find_library(stack)))
    except OSError as error:  # such as a C library that is too old for it
        raise NativeUnavailable(f"the native library cannot be loaded: {error}") from error
    if library.shoal_abi_version() != ABI_VERSION:
        raise NativeUnavailable(
            f"the native library has ABI version {library.shoal_abi_version()}, expected {ABI_VERSION}"
        )
    _declare(library)
    return library


def find_library(stack: ExitStack) -> Path:
    """Return the path of the bundled or cached library; compiles it if there is none. Raises NativeUnavailable.

    Where the user's cache directory cannot be written, the library is compiled for this process alone and deleted with
    `stack`, when it has been loaded.
    """
    name = library_name()
    if (BUNDLED / name).exists():
        return BUNDLED / name
    try:
        cached = cache_directory() / "native" / name
        if cached.exists():
            return cached
        require_compiler()
        return _compile(cached)
    except BuildFailed as error:
        raise NativeUnavailable(str(error)) from error
    except (OSError, RuntimeError) as error:  # a read-only home, or a user without one
        return _compile_for_this_process(stack, error)


def _compile_for_this_process(stack: ExitStack, reason: Exception) -> Path:
    logger.warning(
        "the native backend cannot be cached (%s): compiling it at every start; set XDG_CACHE_HOME to a directory that "
        "can be written",
        reason,
    )
    try:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-native-"))  # only for this user
        compile_library(target := Path(folder) / library_name())
    except (BuildFailed, OSError) as error:
        raise NativeUnavailable(str(error)) from error
    return target


def _compile(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with file_lock(target.parent / ".lock", private=True):
        if not target.exists():
            logger.warning("compiling the native backend, which takes about a minute of CPU time, once per version")
            started = time.perf_counter()
            compile_library(target)
            logger.info("compiled %s in %.1f s", target, time.perf_counter() - started)
    return target


def _declare(library: ctypes.CDLL) -> None:
    """Declare the functions of src/api.cpp."""
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p
    real, wide = ctypes.c_float, ctypes.c_int64
    functions: dict[str, tuple[type | None, tuple[type, ...]]] = {
        "shoal_supports": (integer, (text,)),
        "shoal_context_new": (pointer, (text, integer)),
        "shoal_context_free": (None, (pointer,)),
        "shoal_step": (integer, (pointer,) * 4),
        "shoal_decode": (integer, (pointer,) * 3),
        "shoal_pack": (None, (pointer, integer, pointer, pointer, pointer)),
        "shoal_sample": (integer, (pointer, integer, real, real, wide, ctypes.c_uint32, wide, integer)),
        "shoal_product": (None, (pointer, pointer, pointer, integer, pointer)),
        "shoal_parallel": (None, (pointer, integer, UNIT)),
        "shoal_sleeping": (integer, (pointer, pointer)),
        "shoal_govern": (None, (integer, *(pointer,) * 5)),
    }
    for name, (result, arguments) in functions.items():
        function: Callable[..., object] = getattr(library, name)
        function.restype, function.argtypes = result, arguments  # type: ignore[attr-defined]
