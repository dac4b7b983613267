"""Triton where there is one. Without it the kernels cannot be launched, and nothing else changes.

Kernels of a frame run ahead of each other: on cards that can (Hopper and later) a kernel is started before the one it
depends on has ended, loads its weights, and only then waits (`await_previous`). Every kernel that is launched `ahead`
must wait before it reads or writes anything that another one of the same frame touches; what the host has sent and what
the frame before has left is there.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch

from shoal.paths import cache_directory

__all__ = [
    "await_previous",
    "compiling",
    "jit",
    "kernel",
    "next_power_of_two",
    "release_next",
    "runs_ahead",
    "tl",
    "triton",
    "usable",
    "wait_for_previous",
]

# Compiled kernels are kept between starts, beside everything else we keep; Triton's key holds the source, the card and
# the compiler. Set before Triton is imported, and only where nobody has chosen another place.
with suppress(RuntimeError):  # a user without a home directory: Triton's own default
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory() / "triton"))

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    triton = None
    tl = None


def jit(function: Callable[..., Any]) -> Any:
    """A part of kernels."""
    return function if triton is None else triton.jit(function)


class Kernel:
    """What is launched, as kernel[grid](...)."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        compiled = _compiled.get()
        return self.function[grid] if compiled is None else partial(self._compile, compiled, grid)

    def _compile(self, compiled: set[Any], grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Compile what this launch would run. Most are like one before, and Triton is slow to find out."""
        like = id(self), *map(_likeness, arguments), *((name, _likeness(value)) for name, value in options.items())
        if like not in compiled:
            compiled.add(like)
            self.function.run(*arguments, grid=grid, warmup=True, **options)


def kernel(*any_value: str) -> Callable[[Callable[..., Any]], Any]:
    """A kernel; `any_value` names integers that change from launch to launch and are not worth one of their own."""
    return lambda function: (
        function if triton is None else Kernel(triton.jit(function, do_not_specialize=list(any_value)))
    )


_compiled: ContextVar[set[Any] | None] = ContextVar("compiled", default=None)


@contextmanager
def compiling() -> Iterator[bool]:
    """Within, launches compile and do nothing else; all that is asked for at once, on every core.

    False where Triton cannot do that. An error is left to whoever launches the kernel.
    """
    if not hasattr(triton, "AsyncCompileMode"):
        yield False
        return
    with ThreadPoolExecutor(os.cpu_count()) as cores, triton.AsyncCompileMode(cores, ignore_errors=True) as mode:
        token = _compiled.set(set())
        try:
            yield True
            wait(mode.raw_futures)
        except BaseException:  # an interrupt above all: it does not wait for kernels that nobody has begun
            cores.shutdown(wait=False, cancel_futures=True)
            mode.raw_futures = [each for each in mode.raw_futures if not each.cancelled()]
            raise
        finally:
            _compiled.reset(token)


def _likeness(argument: Any) -> Any:
    """What Triton builds kernels for: of a tensor, its type and whether it begins at a round address."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument


@jit
def release_next():
    """Let the next kernel start."""
    gdc_launch_dependents()


@jit
def wait_for_previous():
    """Wait until everything before this kernel is done and visible."""
    gdc_wait()


@jit
def await_previous():
    gdc_launch_dependents()
    gdc_wait()


def usable(device: torch.device) -> bool:
    """Whether kernels run on tensors of this device: on a GPU, or anywhere under Triton's interpreter."""
    if triton is None:
        return False
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


@cache
def runs_ahead(device: torch.device) -> bool:
    """Whether a kernel on this device may be started before the one before it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
