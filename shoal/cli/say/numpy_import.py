"""Import numpy without the threads of its BLAS, which take 40 ms to start and which `shoal say` does not use."""

import os

VARIABLE = "OPENBLAS_NUM_THREADS"


def import_numpy() -> None:
    """Import numpy. The variable is removed again: torch has a BLAS of its own on some platforms, and reads it."""
    given = VARIABLE in os.environ
    os.environ.setdefault(VARIABLE, "1")
    try:
        import numpy  # noqa: F401 - imported for its side effect
    finally:
        if not given:
            del os.environ[VARIABLE]
