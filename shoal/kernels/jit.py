"""Triton set-up: JIT decorators, compile-only mode and programmatic dependent launch (PDL).

Without Triton this module can still be imported; `kernels_unavailable` then says so and no kernel can be launched.
Triton is not imported where no kernel could run: without a GPU its import would take a tenth of a process's start.

On Hopper and later, kernels of a frame are launched with PDL: a kernel starts before its predecessor has finished,
prefetches its weights, and then waits (`grid_dependency_wait`). A kernel launched with PDL must wait before it reads or
writes anything that another kernel of the same frame touches. Host uploads and results of the previous frame are
complete without the wait.
"""

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import torch

from shoal.cores import usable_cores
from shoal.paths import cache_directory

__all__ = [
    "ASSEMBLER",
    "TEMPORARY_CACHE",
    "collect_compiled",
    "compile_only",
    "compiling_only",
    "grid_dependency_wait",
    "interpreted",
    "jit",
    "kernel",
    "kernels_unavailable",
    "launch_dependents",
    "launch_dependents_and_wait",
    "multiprocessor_count",
    "next_power_of_two",
    "shared_memory_limit",
    "supports_pdl",
    "tl",
    "triton",
]

logger = logging.getLogger(__name__)

HOPPER_SHARED_MEMORY = 232_448
H200_MULTIPROCESSORS = 132
# Major compute capabilities where products of 64 rows and more use other instructions than few rows: wgmma on Hopper,
# tcgen05 on B200, B300 (10.x) and Jetson Thor (11.0). RTX 50 and DGX Spark (12.x) have neither.
WGMMA_MAJORS = (9, 10, 11)

# Prefix of the cache of compiled kernels of one process, where the user's is not writable.
TEMPORARY_CACHE = "shoal-triton-"


def triton_wanted() -> bool:
    """Return whether a kernel could run or be compiled here: on a GPU, interpreted, or by a caller of Triton."""
    # Counting devices does not initialize CUDA, which would rule out `fork`.
    return "triton" in sys.modules or "TRITON_INTERPRET" in os.environ or torch.cuda.device_count() > 0


def kernel_cache() -> str:
    """Return the directory of compiled kernels: in the user's cache, or for this process only if that is not writable.

    Triton cannot compile without one, and a container may have a read-only file system or a user without a home.
    """
    try:
        folder = cache_directory() / "triton"
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return str(folder)
    except (OSError, RuntimeError) as error:
        temporary = TemporaryDirectory(prefix=TEMPORARY_CACHE)
        atexit.register(temporary.cleanup)
        logger.warning(
            "compiled kernels are not kept, so every start compiles them again (%s): set XDG_CACHE_HOME or "
            "TRITON_CACHE_DIR to a writable directory",
            error,
        )
        return temporary.name


IMPORT_ATTEMPTED = triton_wanted()  # False: nothing could run Triton. It may be installed.
# Compiled kernels are cached on disk across restarts; Triton's cache key covers source, target and compiler version.
# Must be set before Triton is imported; a TRITON_CACHE_DIR that is set already is kept.
if IMPORT_ATTEMPTED and not os.environ.get("TRITON_CACHE_DIR"):
    os.environ["TRITON_CACHE_DIR"] = kernel_cache()
try:
    if not IMPORT_ATTEMPTED:
        raise ImportError("no GPU")
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

try:
    if triton is None:
        raise ImportError("no Triton")
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton 3.3 and older
    gdc_launch_dependents = gdc_wait = None

# PTX inline assembly; AMD's assembler does not know it.
ASSEMBLER = torch.version.hip is None
# Whether this Triton knows the launch option of PDL. AMD's backend refuses it even when it is off.
PDL_OPTION = gdc_wait is not None and ASSEMBLER


def jit(function: Callable[..., Any]) -> Any:
    """Decorate a device function that kernels call."""
    return function if triton is None else triton.jit(function)


class Kernel:
    """A launchable Triton kernel: kernel[grid](...). In compile-only mode a launch compiles and does not run."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        compiled = _compiled.get()
        if compiled is not None:
            return partial(self._compile, compiled, grid)
        return self.function[grid] if PDL_OPTION else partial(self._launch_without_pdl, grid)

    def _launch_without_pdl(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
        options.pop("launch_pdl", None)
        return self.function[grid](*arguments, **options)

    def _compile(self, compiled: set[Any], grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Compile the variant that this launch would run.

        Most launches repeat an earlier signature; checking our own key first is much cheaper than Triton's lookup.
        """
        if not PDL_OPTION:
            options.pop("launch_pdl", None)
        key = id(self), *map(_signature, arguments), *((name, _signature(value)) for name, value in options.items())
        if key not in compiled:
            compiled.add(key)
            variant = self.function.run(*arguments, grid=grid, warmup=True, **options)
            if (collected := _collected.get()) is not None:
                collected.append((self.function.__name__, variant.metadata.shared))


def kernel(*do_not_specialize: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a kernel. `do_not_specialize` names integer arguments that vary between launches of one variant."""
    return lambda function: (
        function if triton is None else Kernel(triton.jit(function, do_not_specialize=list(do_not_specialize)))
    )


_compiled: ContextVar[set[Any] | None] = ContextVar("compiled", default=None)
_collected: ContextVar[list[tuple[str, int]] | None] = ContextVar("collected", default=None)


def compiling_only() -> bool:
    """Return whether launches of this context compile kernels without running them."""
    return _compiled.get() is not None


@contextmanager
def collect_compiled() -> Iterator[list[tuple[str, int]]]:
    """Turn launches of this context into compilations, one after the other; compile errors are raised.

    Yields a list that receives the name and the shared memory in bytes of every compiled variant.
    """
    token, collected = _compiled.set(set()), list[tuple[str, int]]()
    collecting = _collected.set(collected)
    try:
        yield collected
    finally:
        _collected.reset(collecting)
        _compiled.reset(token)


@contextmanager
def compile_only() -> Iterator[bool]:
    """Turn launches of this context into parallel compilations on the usable cores; nothing is launched.

    Yields False if this Triton has no asynchronous compilation; launches are then real. Compile errors are ignored
    here and raised again by the first real launch of the kernel.
    """
    if not hasattr(triton, "AsyncCompileMode"):
        yield False
        return
    with ThreadPoolExecutor(usable_cores()) as cores, triton.AsyncCompileMode(cores, ignore_errors=True) as mode:
        token = _compiled.set(set())
        try:
            yield True
            wait(mode.raw_futures)
        finally:
            # Ctrl-C must not wait for compilations that have not started; without an error there are none.
            cores.shutdown(wait=False, cancel_futures=True)
            mode.raw_futures = [each for each in mode.raw_futures if not each.cancelled()]
            _compiled.reset(token)


def _signature(argument: Any) -> Any:
    """Return the part of an argument that Triton specializes on: for a tensor, dtype and 16-byte alignment."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument


@jit
def launch_dependents():
    """Allow the next kernel of the stream to start (PDL)."""
    gdc_launch_dependents()


@jit
def grid_dependency_wait():
    """Wait until all preceding kernels have finished and their writes are visible (PDL)."""
    gdc_wait()


@jit
def launch_dependents_and_wait():
    """Allow the next kernel to start, then wait for the preceding ones (PDL)."""
    gdc_launch_dependents()
    gdc_wait()


def kernels_unavailable(device: torch.device) -> str | None:
    """Return why kernels do not run on tensors of this device; None on an NVIDIA GPU and under the interpreter."""
    if triton is None and IMPORT_ATTEMPTED:
        return "Triton is not installed"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"{device.type} is not a GPU that Triton supports"
    if torch.version.hip is not None:
        return "the fused kernels have not been tested on ROCm"
    # Triton has no tensor-core instructions for them: products compile to scalar code that spills.
    old = torch.cuda.get_device_capability(device) < (8, 0)
    return "the fused kernels need compute capability 8.0" if old else None


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter. Triton 3.3 and older have no `knobs`."""
    knobs = getattr(triton, "knobs", None)
    return os.environ.get("TRITON_INTERPRET") == "1" if knobs is None else bool(knobs.runtime.interpret)


@cache
def supports_pdl(device: torch.device) -> bool:
    """Return whether the device has programmatic dependent launch (compute capability 9.0 or later)."""
    return PDL_OPTION and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def has_wgmma(device: torch.device) -> bool:
    """Return whether products of 64 rows and more use other instructions than few rows."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in WGMMA_MAJORS


@cache
def shared_memory_limit(device: torch.device) -> int:
    """Return the opt-in shared memory per block in bytes: 101,376 on sm_86/89/120, 232,448 on sm_90/100."""
    if device.type != "cuda":
        return HOPPER_SHARED_MEMORY  # the interpreter has no limit
    properties = torch.cuda.get_device_properties(device)
    # ROCm builds of torch do not have the opt-in limit.
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


@cache
def multiprocessor_count(device: torch.device) -> int:
    """Return the number of multiprocessors: 28 on an RTX 3060, 58 on an L4, 128 on an RTX 4090, 132 on an H200."""
    if device.type != "cuda":
        return H200_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
