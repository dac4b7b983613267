"""The native library, compiled on first use; its tests are skipped where there is no compiler."""

import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from shoal.native.build import BUNDLED, find_compiler
from shoal.native.choice import supported_sets
from shoal.native.library import NativeUnavailable, find_library

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def instruction_sets() -> list[str]:
    """Return the instruction sets of this CPU, the widest first."""
    try:
        return supported_sets()
    except NativeUnavailable as error:
        if find_compiler() is not None:
            raise
        pytest.skip(f"no native library: {error}")


def place_library(checkout: Path) -> None:
    """Copy the compiled library to where a build of the wheel looks for it: compiling takes half a minute of CPU time.

    Its name is a hash of the sources, so a checkout with other sources compiles its own.
    """
    with suppress(NativeUnavailable), ExitStack() as stack:
        library = find_library(stack)
        folder = checkout / BUNDLED.relative_to(CHECKOUT)
        folder.mkdir(exist_ok=True)
        if not (folder / library.name).exists():
            shutil.copy(library, folder)
