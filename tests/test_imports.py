"""Arrows point one way, and the core stands on few legs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shoal"

# From top to bottom: a package may import those on lower levels.
LAYERS = (
    {"cli", "__main__", "tools"},
    {"server", "cluster", "batch", "deploy", "settings", "ui", "api"},
    {"engine", "voices", "audio"},
    {"text", "model", "codec", "checkpoint", "kernels", "quantize"},
    {"speech", "config", "errors", "metrics", "paths"},
)
# On the third floor rooms stand apart, but for these.
ACROSS = {
    "checkpoint": {"model", "codec", "text", "kernels", "quantize"},
    "quantize": {"model", "codec"},
    "model": {"kernels"},
    "codec": {"kernels"},
    "text": set[str](),
    "kernels": set[str](),
}
FRONT_DOOR = "the promised names"
CORE = ("model", "codec", "checkpoint", "text", "engine", "kernels", "quantize")
EXTRAS = ("pydantic", "fastapi", "uvicorn", "starlette", "av", "soxr", "soundfile", "torchao", "typer", "rich", "ray",
          "prometheus_client", "ormsgpack", "huggingface_hub", "triton", "scipy")  # fmt: skip


def modules(*rooms: str) -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if not rooms or room_of(path) in rooms)


def room_of(path: Path) -> str:
    """The room a file belongs to; the promised names of the package itself stand above all rooms."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[str]:
    """Dotted names of ours that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "shoal")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which room is meant"
            if node.module == "shoal":
                yield from (f"shoal.{alias.name}" for alias in node.names)
            elif node.module is not None and node.module.startswith("shoal."):
                yield node.module


def rooms_used(path: Path) -> set[str]:
    """Rooms that a file reaches into, its own left out. The version is no room."""
    return {room_named(name) for name in imported(path)} - {room_of(path), "__version__"}


def room_named(name: str) -> str:
    """`shoal.engine.thread` -> `engine`; what the package itself promises, `shoal.load`, is behind its front door."""
    first = name.partition(".")[2].partition(".")[0]
    is_room = any(first in rooms for rooms in LAYERS) or first == "__version__"
    return first if is_room or (PACKAGE / first).with_suffix(".py").exists() else FRONT_DOOR


def floor_of(room: str) -> int:
    return next(number for number, rooms in enumerate(LAYERS) if room in rooms)


def allowed(room: str, used: str) -> bool:
    if used == FRONT_DOOR:
        return floor_of(room) == 0
    if floor_of(used) != floor_of(room):
        return floor_of(used) > floor_of(room)
    return used in ACROSS.get(room, {used})


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(path) for path in modules()} - {""}
    assert rooms - set().union(*LAYERS) == set()


@pytest.mark.parametrize("path", modules(), ids=lambda path: module_name(path))
def test_arrows_point_one_way(path: Path) -> None:
    room = room_of(path)
    upwards = sorted(used for used in rooms_used(path) if room and not allowed(room, used))
    assert upwards == [], f"{module_name(path)} must not use {', '.join(upwards)}"


def test_the_rule_would_catch_an_arrow_that_points_up() -> None:
    assert not allowed("model", "engine")
    assert not allowed("model", "text")
    assert not allowed("text", "model")
    assert not allowed("codec", "checkpoint")
    assert not allowed("errors", "model")
    assert not allowed("engine", room_named("shoal.load"))
    assert allowed("cli", room_named("shoal.load"))
    assert allowed("checkpoint", "codec")
    assert allowed("server", "errors")
    assert allowed("speech", "errors")


BLOCKED_IMPORT = """
import importlib, importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Refuse())
for name in sys.argv[2:]:
    importlib.import_module(name)
found = sorted(BLOCKED & {name.partition(".")[0] for name in sys.modules})
assert not found, found
"""


def test_the_core_needs_torch_and_the_tokenizers_and_nothing_else() -> None:
    """A GPU host without a web framework, audio codecs or pretty printing can load a model and run it."""
    names = [module_name(path) for path in modules(*CORE)]
    command = [sys.executable, "-c", BLOCKED_IMPORT, ",".join(EXTRAS), *names]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert finished.returncode == 0, finished.stderr
