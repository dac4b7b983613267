"""Triton's interpreter with less overhead, for kernels that run without a GPU.

Small kernels spend their time in the interpreter's types, not in numpy. In a process that compiles nothing the patches
can stay. The results and the checks of the interpreter remain as they are.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
from triton import language
from triton._utils import validate_block_shape
from triton.language import core
from triton.runtime import interpreter


def speed_up() -> None:
    """Patch the interpreter of this process."""
    keep_patches()
    share_types()
    skip_overflow_checks()
    multiply_in_double()


class KeptPatches:
    """Stands for the patches of one launch, which stay for the next."""

    def restore(self) -> None:
        pass


def keep_patches() -> None:
    """Replace the operators of `triton.language` once.

    The interpreter looks through all of its modules at every launch and at every call of a device function, which is
    most of the time of a small kernel, and restores them after a launch.
    """
    patch: Callable[[Any], Any] = interpreter._patch_lang
    patched = set[tuple[ModuleType, ...]]()
    known = dict[Any, tuple[ModuleType, ...]]()

    def patch_once(function: Any) -> KeptPatches:
        if function not in known:
            visible = [each for each in function.__globals__.values() if inspect.ismodule(each)]
            known[function] = tuple(each for each in visible if each in (language, language.core))
        if known[function] not in patched:
            patch(function)
            patched.add(known[function])
        return KeptPatches()

    interpreter._patch_lang = patch_once


class SharedShape:
    """Everything that types and tensors of one shape have in common."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.of_type = core.tuple(sizes)
        self.text = str(self.of_type)
        self.of_tensor = core.tuple([core.constexpr(size) for size in sizes])
        self.count = core.constexpr(math.prod(sizes))
        self.numel = validate_block_shape(self.of_type) if sizes else 1


def share_types() -> None:
    """Build what a type has per shape once: each intermediate result has a type, and tuples of constants are slow."""
    shapes = dict[tuple[int, ...], SharedShape]()
    numpy_types = dict[str, Any]()
    numpy_type_of: Callable[[Any], Any] = interpreter._get_np_dtype

    def shared(sizes: tuple[int, ...]) -> SharedShape:
        if sizes not in shapes:
            shapes[sizes] = SharedShape(sizes)
        return shapes[sizes]

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        listed = shape.value if isinstance(shape, core.constexpr) else shape
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in listed])
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        found = shared(sizes)
        self.element_ty, self.shape, self.numel = element_ty, found.of_type, found.numel
        self.name = f"<{found.text}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        found = shared(tuple(type.shape.values) if type.is_block() else ())
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found.of_tensor, found.count

    def numpy_type(triton_type: Any) -> Any:
        if triton_type.name not in numpy_types:
            numpy_types[triton_type.name] = numpy_type_of(triton_type)
        return numpy_types[triton_type.name]

    core.block_type.__init__ = init_block_type
    core.tensor.__init__ = init_tensor
    interpreter._get_np_dtype = numpy_type


def skip_overflow_checks() -> None:
    """Leave out the comparisons for an assertion that the interpreter evaluates only in debug mode."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def multiply_in_double() -> None:
    """Multiply float32 matrices in float64 and round the sums.

    numpy's BLAS adds in an order that depends on the shapes and the CPU: tests of equal bits failed with AVX2.
    """
    builder = interpreter.InterpreterBuilder
    create_dot: Callable[..., Any] = builder.create_dot

    def create_rounded_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if not a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
            return create_dot(self, a, b, d, *options)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    builder.create_dot = create_rounded_dot
