"""The native library, compiled on first use; its tests are skipped where there is no compiler."""

import pytest

from shoal.native.build import find_compiler
from shoal.native.library import INSTRUCTION_SETS, NativeUnavailable, choose_isa, open_library


@pytest.fixture(scope="session")
def instruction_sets() -> list[str]:
    """Return the instruction sets of this CPU, the fastest first."""
    try:
        best = choose_isa("auto")
        library = open_library()
    except NativeUnavailable as error:
        if find_compiler() is not None:
            raise
        pytest.skip(f"no native library: {error}")
    names = INSTRUCTION_SETS[INSTRUCTION_SETS.index(best) :]
    return [name for name in names if library.shoal_supports(name.encode())]
