"""Triton's interpreter with less overhead, for kernels that run without a GPU."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from triton import language
from triton.runtime import interpreter


class KeptPatches:
    """Stands for the patches of one launch, which stay for the next."""

    def restore(self) -> None:
        pass


def keep_patches() -> None:
    """Replace the operators of `triton.language` once.

    The interpreter looks through all of its modules at every launch and at every call of a device function, which is
    most of the time of a small kernel, and restores them after a launch. In a process that compiles nothing they can
    stay.
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
