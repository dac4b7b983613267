"""Load the native library and call it: contexts (instruction set and threads) and packed matrices."""

import ctypes
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.model.linear import DequantizedLinear, Int8Linear, WeightOnlyInt8Linear
from shoal.native.build import BUNDLED, BuildFailed, compile_library, find_compiler, library_name
from shoal.paths import cache_directory, file_lock

logger = logging.getLogger(__name__)

ABI_VERSION = 2
PANEL = 16  # output columns per packed panel
INSTRUCTION_SETS = ("avx512", "avx2", "baseline")  # fastest first
_OPENED = threading.Lock()


class NativeUnavailable(RuntimeError):
    """The native code cannot run here, or does not support this model; the message says why."""


class Matrix(ctypes.Structure):
    """Packed weight. Mirrors `Matrix` in src/kernels.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class Tensors:
    """Keeps the tensors alive whose addresses are stored in native structures."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._kept)

    def address(self, tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
        """Return the address of the tensor's contiguous data in `dtype`; converted data is a copy."""
        kept = tensor.detach().to(dtype).contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def linear(self, layer: nn.Module, *, rows: int | None = None, scale: Tensor | None = None) -> Matrix:
        """Pack a linear layer, or its first `rows` outputs; `scale` [out] multiplies the outputs.

        Raises NativeUnavailable for weights in a layout of another backend.
        """
        layer = layer.int8 if isinstance(layer, DequantizedLinear) else layer
        if not isinstance(layer, nn.Linear | Int8Linear | WeightOnlyInt8Linear):
            raise NativeUnavailable(f"{type(layer).__name__} weights are not supported")
        bias = layer.bias if layer.bias is None or scale is None else layer.bias * scale
        if not isinstance(layer, nn.Linear):
            scale = layer.scales.float() if scale is None else layer.scales.float() * scale
        return self.matrix(layer.weight[:rows], bias, scale=scale)

    def matrix(self, weight: Tensor, bias: Tensor | None = None, *, scale: Tensor | None = None) -> Matrix:
        """Pack a weight of floats or int8: y = (x · wᵀ) · scale + bias, with scale and bias [out].

        The weight is [out, in], or [out, taps, in] for inputs that are several rows apart; any strides.
        """
        kind = torch.int8 if weight.dtype == torch.int8 else torch.float32
        weight = weight.detach().to(kind)
        parts = [None if each is None else self._vector(each[: len(weight)]) for each in (scale, bias)]
        inputs = weight[0].numel()
        return Matrix(self._pack(weight, inputs), *parts, len(weight), inputs, int(kind == torch.int8), 0)

    def _pack(self, weight: Tensor, inputs: int) -> int:
        cube = weight if weight.dim() == 3 else weight[:, None]
        packed = torch.empty(-(-len(cube) // PANEL), inputs, PANEL, dtype=cube.dtype)
        sizes, strides = ((ctypes.c_int64 * 3)(*each) for each in (cube.shape, cube.stride()))
        open_library().shoal_pack(cube.data_ptr(), int(cube.dtype == torch.int8), sizes, strides, packed.data_ptr())
        return self.address(packed, cube.dtype)

    def _vector(self, values: Tensor) -> int:
        """Return the address of values [out], followed by zeros up to a multiple of `PANEL`."""
        return self.address(nn.functional.pad(values.detach().float(), (0, -len(values) % PANEL)))


class Context:
    """Kernels of one instruction set and their threads. Calls release the GIL; one call at a time."""

    def __init__(self, isa: str = "auto", threads: int | None = None) -> None:
        """Raises NativeUnavailable without a library, or for an instruction set that this CPU does not have."""
        self.library = open_library()
        self.isa = choose_isa(isa)
        self.threads = threads or torch.get_num_threads()
        self.handle = self.library.shoal_context_new(self.isa.encode(), self.threads)
        if not self.handle:
            raise NativeUnavailable("the native library cannot start its threads")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.shoal_context_free(self.handle)

    def product(self, matrix: Matrix, x: Tensor) -> Tensor:
        """[n, cols] -> [n, rows], for tests and measurements."""
        out = torch.empty(len(x), matrix.rows)
        self.library.shoal_product(self.handle, ctypes.byref(matrix), x.contiguous().data_ptr(), len(x), out.data_ptr())
        return out


def choose_isa(wanted: str) -> str:
    """Return the fastest instruction set of this CPU, at most `wanted`. Raises NativeUnavailable if it lacks it."""
    library = open_library()
    supported = [name for name in INSTRUCTION_SETS if library.shoal_supports(name.encode())]
    if wanted == "auto":
        return supported[0]
    if wanted not in supported:
        raise NativeUnavailable(f"this CPU has no {wanted}: use {', '.join(supported)}")
    return wanted


def open_library() -> ctypes.CDLL:
    """Return the library, compiled on first use if the package does not hold it. Raises NativeUnavailable."""
    with _OPENED:
        return _open()


@cache
def _open() -> ctypes.CDLL:
    if sys.platform == "win32":
        raise NativeUnavailable("the native backend does not support Windows")
    try:
        with ExitStack() as stack:
            library = ctypes.CDLL(str(find_library(stack)))
    except OSError as error:  # such as a C library that is too old for it
        raise NativeUnavailable(f"the native library cannot be loaded: {error}") from error
    if library.shoal_abi_version() != ABI_VERSION:
        raise NativeUnavailable("the native library has another version")
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
        return cached if cached.exists() else _compile(cached)
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


@dataclass(frozen=True, slots=True)
class LibraryStatus:
    """Return whether the native backend can be used, and how or why not."""

    available: bool
    detail: str


def native_library() -> LibraryStatus:
    """Return the state of the library without compiling it."""
    if not any((folder / library_name()).exists() for folder in _folders()):
        compiler = find_compiler()
        missing = "eager: no native library, and no C++ compiler to build it (install g++ or clang++)"
        return LibraryStatus(
            compiler is not None, f"native, compiled on first use by {compiler}" if compiler else missing
        )
    try:
        return LibraryStatus(True, f"native ({choose_isa('auto')})")
    except NativeUnavailable as error:
        return LibraryStatus(False, f"eager: {error}")


def _folders() -> Iterator[Path]:
    yield BUNDLED
    with suppress(RuntimeError):  # a user without a home directory
        yield cache_directory() / "native"


def _compile(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with file_lock(target.parent / ".lock", private=True):
        if not target.exists():
            logger.info("compiling the native backend; this happens once")
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
    }
    for name, (result, arguments) in functions.items():
        function: Callable[..., object] = getattr(library, name)
        function.restype, function.argtypes = result, arguments  # type: ignore[attr-defined]
