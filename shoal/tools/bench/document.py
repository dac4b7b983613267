"""Result document of a measurement: one JSON object with machine, settings and figures.

schema      "shoal.bench/1"; readers reject other versions
kind        bench, engine, load, profile, quality or scaling: the structure of `runs`
complete    false after an interrupt; `runs` then holds the finished measurements
machine     hardware and versions; `commit` is that of the checkout, if there is one
settings    settings of the measurement
runs        the figures; `schema.json` in this directory describes every field
"""

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.errors import InvalidRequest, OutputError

SCHEMA = "shoal.bench/1"
KINDS = ("bench", "engine", "load", "profile", "quality", "scaling")
MAX_BYTES = 256 << 20
# Ctrl-C and SIGTERM (which the CLI turns into SystemExit) end a measurement and keep its finished parts.
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
    """Return a document without runs, not yet complete."""
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
    """Read a document. Raises InvalidRequest for a file that is not a document or has another version."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InvalidRequest(f"{path}: larger than {MAX_BYTES >> 20} MiB, so not a benchmark result")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise InvalidRequest(f"{path}: {problem.strerror or problem}") from problem
    except (ValueError, RecursionError) as problem:
        raise InvalidRequest(f"{path}: not JSON: {problem}") from problem
    if not isinstance(found, dict) or not str(found.get("schema", "")).startswith("shoal.bench/"):
        raise InvalidRequest(f"{path}: not a result of `shoal bench`, `shoal load` or `shoal profile`")
    if found["schema"] != SCHEMA:
        raise InvalidRequest(f"{path}: has schema {found['schema']}, this version reads {SCHEMA}")
    violation = _violation(found, _schema(found.get("kind")), "")
    if violation is not None:
        raise InvalidRequest(f"{path}: does not match {SCHEMA}: {violation}")
    return found


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise OutputError(f"{path}: {problem.strerror or problem}") from problem


def write_document(path: Path, document: Document) -> None:
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def git_commit() -> str | None:
    """Return the commit of this checkout, with a + if it has uncommitted changes; None outside a checkout."""
    folder = Path(__file__).parent
    try:
        described = subprocess.run(
            ("git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--match=", "--dirty=+"),
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def _schema(kind: Any) -> dict[str, Any]:
    """Return the schema of a document of that kind, with the schema of its runs merged in."""
    schema: dict[str, Any] = json.loads((Path(__file__).parent / "schema.json").read_text(encoding="utf-8"))
    for choice in schema["oneOf"]:
        if choice["properties"]["kind"]["const"] == kind:
            schema["properties"]["runs"] |= choice["properties"]["runs"]
    return {**schema, "properties": schema["properties"] | {"kind": {"enum": list(KINDS)}}}


def _violation(value: Any, schema: dict[str, Any], at: str, root: dict[str, Any] | None = None) -> str | None:
    """Return the first missing field or wrong type, which would break a report; None if there is none.

    Only the tests check documents against the full schema.
    """
    root = root or schema
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(isinstance(value, TYPES[kind]) for kind in kinds):
        return f"{at or 'the document'} is not {' or '.join(kinds)}"
    if isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                return f"{at or 'the document'} has no {name}"
        parts = [
            (f"{at}.{name}", value[name], part) for name, part in schema.get("properties", {}).items() if name in value
        ]
    else:
        each = schema.get("items", {}) if isinstance(value, list) else {}
        parts = [(f"{at}[{number}]", part, each) for number, part in enumerate(value)] if each else []
    return next(filter(None, (_violation(part, of, where.lstrip("."), root) for where, part, of in parts)), None)
