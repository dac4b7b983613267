"""The native library, compiled on first use; its tests are skipped where there is no compiler."""

import pytest

from shoal.native.build import find_compiler
from shoal.native.choice import supported_sets
from shoal.native.library import NativeUnavailable


@pytest.fixture(scope="session")
def instruction_sets() -> list[str]:
    """Return the instruction sets of this CPU, the widest first."""
    try:
        return supported_sets()
    except NativeUnavailable as error:
        if find_compiler() is not None:
            raise
        pytest.skip(f"no native library: {error}")
