"""Parse request bodies: JSON, MessagePack and multipart bytes -> validated pydantic models. No I/O."""

import re
from codecs import BOM_UTF8
from collections import defaultdict
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, TypeVar

import ormsgpack
import pydantic_core
from pydantic import BaseModel, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser

from shoal.api.bodies.scan import MAX_ELEMENTS, BodyRejected, scan_json, scan_msgpack
from shoal.api.exceptions import SchemaViolation

JSON, MSGPACK, MULTIPART = "application/json", "application/msgpack", "multipart/form-data"
MSGPACK_NAMES = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")
ALL = (JSON, MSGPACK, MULTIPART)
MAX_PARTS = 128
PIECE_BYTES = 64 << 10
MAX_ERRORS = 8  # reported per body
MAX_NAME_CHARACTERS, MAX_MESSAGE_CHARACTERS = 64, 1_000  # limits of a client's field name and of one error in a message

MAX_REPAIRED_BYTES = 1 << 20  # far above any text; a regular expression holds the GIL
# Escapes of UTF-16 surrogates; the first alternative consumes escaped backslashes.
_SURROGATES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)

Model = TypeVar("Model", bound=BaseModel)
Form = dict[str, list[str | bytes]]  # part name -> texts (str) and files (bytes)


def validated(model: type[Model], content: Any, *, lax: bool = False) -> Model:
    """Validate `content`. Raises SchemaViolation. `lax` converts strings to numbers: forms carry only strings."""
    try:
        return model.model_validate(content, strict=False if lax else None)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise SchemaViolation(_format_errors(model, found)) from None


def _format_errors(model: type[BaseModel], found: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the first errors, and one that counts the rest: the response must not grow with the body."""
    errors = [_format_error(model, each) for each in found[:MAX_ERRORS]]
    if len(found) > MAX_ERRORS:
        more = f"and {len(found) - MAX_ERRORS:,} more errors"
        errors.append({"type": "too_many_errors", "loc": ["body"], "msg": more})
    return errors


def _format_error(model: type[BaseModel], error: Mapping[str, Any]) -> dict[str, Any]:
    """Return pydantic's error; for an unknown top-level field, list the known ones in the message."""
    location = [part[:MAX_NAME_CHARACTERS] if isinstance(part, str) else part for part in error["loc"]]
    message = error["msg"][:MAX_MESSAGE_CHARACTERS]
    if error["type"] == "extra_forbidden":
        known = f"; there are {', '.join(model.model_fields)}" if len(location) == 1 else ""
        message = f"unknown field{known}"
    elif error["type"] == "model_type":  # pydantic names the class
        message = "Input should be an object"
    return {**error, "loc": location, "msg": message}


def parse_json(body: bytes | str, max_elements: int = MAX_ELEMENTS) -> Any:
    """Parse JSON, without a byte order mark, which editors and shells on Windows write.

    Raises SchemaViolation when `body` is not JSON, repeats a key, or has too many elements.
    """
    content = (body.encode(errors="surrogatepass") if isinstance(body, str) else body).removeprefix(BOM_UTF8)
    if len(content) <= MAX_REPAIRED_BYTES and b"\\u" in content:
        content = _SURROGATES.sub(_replace_lone, content)
    try:
        scan_json(content, max_elements)
        return pydantic_core.from_json(content, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise _unreadable("JSON", error) from None


def _replace_lone(escape: re.Match[bytes]) -> bytes:
    """Replace half of a surrogate pair by U+FFFD: clients in JavaScript cut texts, and so emoji, at any code unit."""
    return rb"\ufffd" if escape["lone"] else escape[0]


def unpack(body: bytes, max_elements: int = MAX_ELEMENTS) -> Any:
    """Parse MessagePack. Raises SchemaViolation unless `body` is one value without repeated keys, within the limits."""
    try:
        scan_msgpack(body, max_elements)
        return ormsgpack.unpackb(body)
    except (ValueError, RecursionError) as error:
        raise _unreadable("MessagePack", error) from None


def parse_form(body: bytes, boundary: str) -> Form:
    """Parse a multipart body. Raises SchemaViolation when it is malformed or truncated."""
    parts: Form = defaultdict(list)
    ended = False

    def on_end() -> None:
        nonlocal ended
        ended = True

    def on_part(part: Field | File) -> None:
        if sum(map(len, parts.values())) >= MAX_PARTS:
            raise FormParserError(f"more than {MAX_PARTS} parts")
        name, value = _part(part)
        parts[name].append(value)

    try:
        parser = FormParser(
            MULTIPART, on_part, on_part, on_end, boundary=boundary, config={"MAX_MEMORY_FILE_SIZE": len(body) + 1}
        )
        _feed(parser, body)
    except (FormParserError, ValueError) as error:
        raise _unreadable("a form", error) from None
    if not ended:
        raise _unreadable("a form", ValueError("it is truncated"))
    return dict(parts)


def _feed(parser: FormParser, body: bytes) -> None:
    """Parse the whole body. The parser copies what it is given; feeding it in pieces bounds the size of the copies."""
    try:
        for start in range(0, len(body), PIECE_BYTES):
            parser.write(body[start : start + PIECE_BYTES])
        parser.finalize()
    finally:
        parser.parser = None  # breaks a cycle: otherwise uploads stay in memory until the garbage collector runs


def text_part(form: Form, name: str) -> str:
    """Return the single text part with this name; a file of UTF-8 text is accepted too. Raises SchemaViolation."""
    values = form.get(name, [])
    if len(values) != 1:
        raise _wrong_part(name, "send this field once" if values else "Field required")
    value = values[0]
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        raise _wrong_part(name, "this is not UTF-8 text") from None


def file_part(form: Form, name: str) -> bytes:
    """Return the single file part with this name. Raises SchemaViolation."""
    values = form.get(name, [])
    if len(values) != 1 or not isinstance(values[0], bytes):
        raise _wrong_part(name, "send one file under this name")
    return values[0]


def check_parts(form: Form, *known: str) -> None:
    """Raise SchemaViolation when the form has a part that is not in `known`."""
    for name in form:
        if name not in known:
            raise _part_error("extra_forbidden", name, "unknown field")


def _part(part: Field | File) -> tuple[str, str | bytes]:
    name = (part.field_name or b"").decode("utf-8", "replace")
    if isinstance(part, File):
        assert isinstance(part.file_object, BytesIO), "MAX_MEMORY_FILE_SIZE exceeds the body, so no part spills to disk"
        return name, part.file_object.getvalue()  # shares the buffer; read() would copy it
    try:
        return name, (part.value or b"").decode()
    except UnicodeDecodeError:
        raise FormParserError(f"{name[:MAX_NAME_CHARACTERS]} is not UTF-8 text") from None


def _unreadable(format: str, error: BaseException) -> SchemaViolation:
    rejected = isinstance(error, BodyRejected)
    cause = f"the body is not accepted: {error}" if rejected else f"the body is not {format}: {error}"
    return SchemaViolation([{"type": "unreadable", "loc": ["body"], "msg": cause[:MAX_MESSAGE_CHARACTERS]}])


def _wrong_part(name: str, message: str) -> SchemaViolation:
    return _part_error("missing", name, message)


def _part_error(type: str, name: str, message: str) -> SchemaViolation:
    return SchemaViolation([{"type": type, "loc": [name[:MAX_NAME_CHARACTERS]], "msg": message}])
