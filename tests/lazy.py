"""Modules that are imported when a test uses them.

Every worker collects all tests and imports what their files import, but only one worker runs a file.
"""

from importlib import import_module
from typing import Any


class LazyModule:
    """Stands for a module of a large package. Annotations that name it must not be evaluated."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest asks every object of a file whether it is a test or a fixture
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
