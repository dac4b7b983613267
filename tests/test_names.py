"""One meaning per class name, and every broad except says which edge of the program it is."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "shoal"
# Edges of threads, processes and HTTP, and libraries that raise anything. Lower it with every one that goes.
MAX_BROAD_EXCEPTS = 17


@cache
def sources() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path, source in sources().items():
        yield from ((path, node) for node in ast.walk(ast.parse(source)))


def is_broad(node: ast.AST) -> bool:
    """Return whether an except clause, or a call of `suppress`, catches everything."""
    if isinstance(node, ast.ExceptHandler):
        return node.type is None or names_all_errors(node.type)
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress") and names_all_errors(node)


def names_all_errors(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Name) and part.id in ("Exception", "BaseException") for part in ast.walk(node))


def test_a_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for path, node in nodes():
        if isinstance(node, ast.ClassDef):
            places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_every_broad_except_names_its_edge_and_none_is_added_unnoticed() -> None:
    found = [(path, node.lineno) for path, node in nodes() if is_broad(node)]
    assert 0 < len(found) <= MAX_BROAD_EXCEPTS, "use `device_errors`, a narrower class or a context manager"
    lines = {path: source.splitlines() for path, source in sources().items()}
    silent = [f"{path.relative_to(PACKAGE)}:{line}" for path, line in found if "edge" not in lines[path][line - 1]]
    assert silent == []


def test_the_architecture_page_names_every_package_and_only_files_that_exist() -> None:
    page = (PACKAGE.parent / "docs" / "structure.md").read_text(encoding="utf-8")
    layout = page.partition("    shoal/\n")[2].partition("\n\n")[0]
    listed = {line.split()[0].rstrip("/") for line in layout.splitlines() if re.match(r" {6}\w", line)}
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    modules = {path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
    assert listed == packages | modules
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)+(?:\.py)?/?)[:`]", page)
    assert named
    bases = (PACKAGE, PACKAGE / "engine", PACKAGE.parent)
    cache = "shoal/triton"  # directory of compiled kernels below the user's cache directory
    missing = [name for name in named if name != cache and not any((base / name).exists() for base in bases)]
    assert missing == []
