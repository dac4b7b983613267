"""Package dependencies point one way, and the core needs few third-party packages."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shoal"

# From top to bottom: a package may import packages of lower layers.
LAYERS = (
    {"cli", "__main__", "tools"},
    {"server", "cluster", "batch", "book", "deploy", "settings", "ui"},
    {"api"},
    {"engine", "voices", "audio"},
    {"text", "model", "codec", "checkpoint", "kernels", "quantize", "native"},
    {"speech", "config", "errors", "metrics", "paths", "cores", "gc_pause"},
)
# Imports within the layer of text, model and codec are limited to these.
WITHIN_LAYER = {
    "checkpoint": {"model", "codec", "text", "kernels", "quantize"},
    "quantize": {"model", "codec"},
    "model": {"kernels"},
    "codec": {"kernels"},
    "native": {"model", "codec", "kernels"},
    "text": set[str](),
    "kernels": set[str](),
}
PUBLIC_API = "shoal"
CORE = ("model", "codec", "checkpoint", "text", "engine", "kernels", "quantize", "native")
EXTRAS = ("pydantic", "fastapi", "uvicorn", "starlette", "av", "soxr", "soundfile", "torchao", "typer", "rich", "ray",
          "prometheus_client", "ormsgpack", "huggingface_hub", "triton", "scipy")  # fmt: skip


def modules(*packages: str) -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if not packages or package_of(path) in packages)


def package_of(path: Path) -> str:
    """Return the top-level package or module of a file; "" for shoal/__init__.py, which is above all layers."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported(path: Path) -> frozenset[str]:
    """Return the dotted names of shoal that a file imports, at module level and inside functions."""
    return frozenset(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "shoal")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports, so that the imported package is visible"
            if node.module == "shoal":
                yield from (f"shoal.{alias.name}" for alias in node.names)
            elif node.module is not None and node.module.startswith("shoal."):
                yield node.module


def packages_used(path: Path) -> set[str]:
    """Return the packages that a file imports, without its own and without `__version__`."""
    return {package_named(name) for name in imported(path)} - {package_of(path), "__version__"}


def package_named(name: str) -> str:
    """`shoal.engine.thread` -> `engine`; a public name such as `shoal.load` -> PUBLIC_API."""
    first = name.partition(".")[2].partition(".")[0]
    is_package = any(first in packages for packages in LAYERS) or first == "__version__"
    return first if is_package or (PACKAGE / first).with_suffix(".py").exists() else PUBLIC_API


def layer_of(package: str) -> int:
    return next(number for number, packages in enumerate(LAYERS) if package in packages)


def allowed(package: str, used: str) -> bool:
    if used == PUBLIC_API:
        return layer_of(package) == 0
    if layer_of(used) != layer_of(package):
        return layer_of(used) > layer_of(package)
    return used in WITHIN_LAYER.get(package, {used})


def test_every_package_has_a_layer() -> None:
    packages = {package_of(path) for path in modules()} - {""}
    assert packages - set().union(*LAYERS) == set()


@pytest.mark.parametrize("path", modules(), ids=lambda path: module_name(path))
def test_imports_point_to_lower_layers(path: Path) -> None:
    package = package_of(path)
    upwards = sorted(used for used in packages_used(path) if package and not allowed(package, used))
    assert upwards == [], f"{module_name(path)} must not import {', '.join(upwards)}"


def test_there_is_no_cycle_between_packages() -> None:
    """Raises CycleError, which names the packages of the cycle."""
    uses: dict[str, set[str]] = {}
    for path in modules():
        if package_of(path):
            uses.setdefault(package_of(path), set()).update(packages_used(path) - {PUBLIC_API})
    assert set(TopologicalSorter(uses).static_order()) >= uses.keys()


def test_the_api_does_not_import_a_web_framework() -> None:
    for path in modules("api"):
        names = {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        used = {(name or "").partition(".")[0] for name in names} & {"fastapi", "starlette", "uvicorn"}
        assert used == set(), f"{module_name(path)} must not import {', '.join(used)}"


def test_the_rule_rejects_upward_imports() -> None:
    assert not allowed("model", "engine")
    assert not allowed("model", "text")
    assert not allowed("text", "model")
    assert not allowed("codec", "checkpoint")
    assert not allowed("errors", "model")
    assert not allowed("api", "server")
    assert not allowed("engine", package_named("shoal.load"))
    assert allowed("cli", package_named("shoal.load"))
    assert allowed("checkpoint", "codec")
    assert allowed("server", "api")
    assert allowed("server", "errors")
    assert allowed("speech", "errors")


BLOCKED_IMPORT = """
import importlib, importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Block())
for name in sys.argv[2:]:
    importlib.import_module(name)
found = sorted(BLOCKED & {name.partition(".")[0] for name in sys.modules})
assert not found, found
"""


@pytest.mark.slow
def test_the_core_needs_only_torch_and_the_tokenizers() -> None:
    """A GPU host without a web framework, audio codecs or terminal output packages can load and run a model."""
    names = [module_name(path) for path in modules(*CORE)]
    command = [sys.executable, "-c", BLOCKED_IMPORT, ",".join(EXTRAS), *names]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.slow
def test_the_package_imports_without_the_modules_that_windows_lacks() -> None:
    """Third-party packages are imported first, as the platform that they were installed for."""
    program = """
import importlib, pkgutil, sys, types
import shoal
names = [each.name for each in pkgutil.walk_packages(shoal.__path__, "shoal.")]
names = [name for name in names if not name.endswith(("__main__", "triton_backend"))]
for name in names:
    importlib.import_module(name)
for name in [name for name in sys.modules if name.split(".")[0] == "shoal"]:
    del sys.modules[name]
sys.modules |= dict.fromkeys(("fcntl", "resource", "termios", "pwd", "grp", "tty", "triton"))
sys.modules["msvcrt"], sys.platform = types.ModuleType("msvcrt"), "win32"
for name in names:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
