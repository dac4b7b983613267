"""What a measurement leaves behind: one JSON document that says what was measured, on what, and with which settings.

schema      "shoal.bench/1"; a reader that does not know the number refuses the file
kind        bench, engine, load, quality or scaling: what stands in `runs`
complete    false when it was interrupted; what is there was measured to its end
machine     names and versions; `commit` is the checkout's, if there is one
settings    what was asked for
runs        the figures; `schema.json` beside this file describes every field
"""

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.errors import InvalidRequest, OutputError

SCHEMA = "shoal.bench/1"
KINDS = ("bench", "engine", "load", "quality", "scaling")
LARGEST = 256 << 20
# Ctrl-C and SIGTERM, as the command line turns it: both end a measurement and keep what is there.
INTERRUPTS = (KeyboardInterrupt, SystemExit)

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}

Document = dict[str, Any]


def new_document(kind: str, machine: dict[str, Any], settings: dict[str, Any]) -> Document:
    """A document without figures; it becomes `complete` when somebody says so."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "complete": False,
        "machine": machine,
        "commit": git_commit(),
        "settings": settings,
        "runs": [],
    }


def read_document(path: Path) -> Document:
    """Raises InvalidRequest for a file that is none of ours, or of another version."""
    try:
        if path.stat().st_size > LARGEST:
            raise InvalidRequest(f"{path}: more than {LARGEST >> 20} MiB; no benchmark writes that much")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise InvalidRequest(f"{path}: {problem.strerror or problem}") from problem
    except (ValueError, RecursionError) as problem:
        raise InvalidRequest(f"{path}: not JSON: {problem}") from problem
    if not isinstance(found, dict) or not str(found.get("schema", "")).startswith("shoal.bench/"):
        raise InvalidRequest(f"{path}: not a result of `shoal bench`, `shoal load` or `shoal bench quality`")
    if found["schema"] != SCHEMA:
        raise InvalidRequest(f"{path}: written as {found['schema']}, this version reads {SCHEMA}")
    missing_settings = _lacking(found, _schema(found.get("kind")), "")
    if missing_settings is not None:
        raise InvalidRequest(f"{path}: not as {SCHEMA} has it: {missing_settings}")
    return found


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise OutputError(f"{path}: {problem.strerror or problem}") from problem


def write_document(path: Path, document: Document) -> None:
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def git_commit() -> str | None:
    """The commit this code is of, with a + if it was changed since; None outside of a checkout."""
    folder = Path(__file__).parent
    try:
        said = subprocess.run(
            ("git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--match=", "--dirty=+"),
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None


def _schema(kind: Any) -> dict[str, Any]:
    """Of a document of that kind, with what its runs look like in the place it belongs."""
    schema: dict[str, Any] = json.loads((Path(__file__).parent / "schema.json").read_text(encoding="utf-8"))
    for choice in schema["oneOf"]:
        if choice["properties"]["kind"]["const"] == kind:
            schema["properties"]["runs"] |= choice["properties"]["runs"]
    return {**schema, "properties": schema["properties"] | {"kind": {"enum": list(KINDS)}}}


def _lacking(value: Any, schema: dict[str, Any], at: str, root: dict[str, Any] | None = None) -> str | None:
    """What a report would stumble over: a field that is missing or of another kind. A full check is for the tests."""
    root = root or schema
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(isinstance(value, TYPES[kind]) for kind in kinds):
        return f"{at or 'it'} is not {' or '.join(kinds)}"
    if isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                return f"{at or 'it'} has no {name}"
        parts = [
            (f"{at}.{name}", value[name], part) for name, part in schema.get("properties", {}).items() if name in value
        ]
    else:
        each = schema.get("items", {}) if isinstance(value, list) else {}
        parts = [(f"{at}[{number}]", part, each) for number, part in enumerate(value)] if each else []
    return next(filter(None, (_lacking(part, of, where.lstrip("."), root) for where, part, of in parts)), None)
