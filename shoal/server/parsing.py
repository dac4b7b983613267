"""Bodies of strangers: bounded while they are read, and parsed off the event loop."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from email.message import Message
from io import BytesIO
from typing import Any, TypeVar

import ormsgpack
import pydantic_core
from fastapi import Request
from pydantic import BaseModel, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser

from shoal.api.config import Limits
from shoal.api.exceptions import BodyTimeout, BodyTooLarge, SchemaViolation, UnknownMediaType
from shoal.errors import EngineBusy

JSON, MSGPACK, MULTIPART = "application/json", "application/msgpack", "multipart/form-data"
MSGPACK_NAMES = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")
ALL = (JSON, MSGPACK, MULTIPART)
MOST_PARTS = 128
PIECE_BYTES = 64 << 10

Model = TypeVar("Model", bound=BaseModel)
Form = dict[str, list[str | bytes]]  # texts and files, by name


class BodyBudget:
    """The memory that the bodies of all requests under way may take together."""

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0

    def take(self, size: int) -> None:
        if self.used + size > self.most:
            raise EngineBusy("too many uploads at one time; try again later")
        self.used += size

    def give_back(self, size: int) -> None:
        self.used -= size


class Share:
    """What one body takes of the budget, for as long as somebody holds its bytes or what was read from them."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self._size = budget, 0

    def take(self, size: int) -> None:
        """Raises EngineBusy."""
        self._budget.take(size)
        self._size += size

    def give_back(self) -> None:
        """May be said more than once."""
        self._budget.give_back(self._size)
        self._size = 0


def let_go(request: Request) -> None:
    """Give the share of a body back before its request ends: what was made of it is all that is still held."""
    share = getattr(request.state, "share", None)
    if isinstance(share, Share):
        share.give_back()


def _share_of(request: Request, budget: BodyBudget) -> Share:
    """Given back when the request ends, if not before: in every server a request is a task of its own."""
    share = request.state.share = Share(budget)
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: share.give_back())
    return share


async def read_body(request: Request, limits: Limits, budget: BodyBudget) -> bytes:
    """The whole body. Raises BodyTooLarge before the first byte if the length is announced, else at the limit.

    Its share of the budget is kept until the request ends, or until `let_go`.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limits.body_bytes:
        raise _too_large(limits)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnknownMediaType("compressed bodies are not read: send the body as it is", ALL)
    body, share = bytearray(), _share_of(request, budget)
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                if len(body) + len(piece) > limits.body_bytes:
                    raise _too_large(limits)
                share.take(len(piece))
                body += piece
    except TimeoutError:
        raise BodyTimeout(f"the body did not come within {limits.body_seconds:g} seconds") from None
    return bytes(body)


async def read_model(
    request: Request,
    model: type[Model],
    limits: Limits,
    budget: BodyBudget,
    *,
    from_form: Callable[[Form], dict[str, Any]] | None = None,
) -> Model:
    """The body as a `model`: JSON or MessagePack by its Content-Type, or a form if the route can make one of it."""
    kind, known = media_type(request), ALL if from_form else (JSON, MSGPACK)
    if kind not in known:
        raise UnknownMediaType(f"send one of {', '.join(known)}, not {kind or 'nothing'}", known)
    body = await read_body(request, limits, budget)
    if kind == MULTIPART and from_form:
        form = await asyncio.to_thread(_form_parser(request), body)
        return await asyncio.to_thread(lambda: validated(model, from_form(form), lax=True))
    parse = unpack if kind == MSGPACK else parse_json
    return await asyncio.to_thread(lambda: validated(model, parse(body)))


async def read_form(request: Request, limits: Limits, budget: BodyBudget) -> Form:
    """The parts of a multipart body."""
    kind = media_type(request)
    if kind != MULTIPART:
        raise UnknownMediaType(f"send {MULTIPART}, not {kind or 'nothing'}", (MULTIPART,))
    parse = _form_parser(request)
    return await asyncio.to_thread(parse, await read_body(request, limits, budget))


def media_type(request: Request) -> str:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    return MSGPACK if kind in MSGPACK_NAMES else kind


def validated(model: type[Model], content: Any, *, lax: bool = False) -> Model:
    """Raises SchemaViolation. `lax` reads numbers from texts, which is all that forms and addresses have."""
    try:
        return model.model_validate(content, strict=False if lax else None)
    except ValidationError as error:
        findings = error.errors(include_url=False, include_context=False, include_input=False)
        raise SchemaViolation([_told(model, dict(finding)) for finding in findings]) from None


def _told(model: type[BaseModel], finding: dict[str, Any]) -> dict[str, Any]:
    """Pydantic's finding; whoever sends a field that is not there hears of those that are."""
    where = list(finding["loc"])
    if finding["type"] != "extra_forbidden":
        return {**finding, "loc": where}
    known = f"; there are {', '.join(model.model_fields)}" if len(where) == 1 else ""
    return {**finding, "loc": where, "msg": f"unknown field{known}"}


def unpack(body: bytes) -> Any:
    """Raises SchemaViolation for what is not MessagePack."""
    try:
        return ormsgpack.unpackb(body)
    except (ValueError, RecursionError) as error:
        raise _unreadable("MessagePack", error) from None


def text_of(form: Form, name: str) -> str:
    """The one text of a form by that name; a file of text will do. Raises SchemaViolation."""
    values = form.get(name, [])
    if len(values) != 1:
        raise _wrong_part(name, "give it once" if values else "Field required")
    value = values[0]
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        raise _wrong_part(name, "this is not UTF-8 text") from None


def file_of(form: Form, name: str) -> bytes:
    """The one file of a form by that name. Raises SchemaViolation."""
    values = form.get(name, [])
    if len(values) != 1 or not isinstance(values[0], bytes):
        raise _wrong_part(name, "send one file under this name")
    return values[0]


def no_other_parts(form: Form, *known: str) -> None:
    for name in form:
        if name not in known:
            raise SchemaViolation([{"type": "extra_forbidden", "loc": [name], "msg": "unknown field"}])


def parse_json(body: bytes | str) -> Any:
    """Raises SchemaViolation for what is not JSON."""
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise _unreadable("JSON", error) from None


def _form_parser(request: Request) -> Callable[[bytes], Form]:
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    boundary = header.get_param("boundary")
    return lambda body: parse_form(body, str(boundary or ""))


def parse_form(body: bytes, boundary: str) -> Form:
    """Texts and files by name. Raises SchemaViolation for a form that is cut short or not one."""
    parts: Form = defaultdict(list)
    ended = False

    def end() -> None:
        nonlocal ended
        ended = True

    def keep(part: Field | File) -> None:
        if sum(map(len, parts.values())) >= MOST_PARTS:
            raise FormParserError(f"more than {MOST_PARTS} parts")
        name, value = _part(part)
        parts[name].append(value)

    try:
        parser = FormParser(
            MULTIPART, keep, keep, end, boundary=boundary, config={"MAX_MEMORY_FILE_SIZE": len(body) + 1}
        )
        # In pieces, of each of which the parser makes copies.
        for start in range(0, len(body), PIECE_BYTES):
            parser.write(body[start : start + PIECE_BYTES])
        parser.finalize()
    except (FormParserError, ValueError) as error:
        raise _unreadable("a form", error) from None
    if not ended:
        raise _unreadable("a form", ValueError("it is cut short"))
    return dict(parts)


def _part(part: Field | File) -> tuple[str, str | bytes]:
    name = (part.field_name or b"").decode("utf-8", "replace")
    if isinstance(part, File):
        assert isinstance(part.file_object, BytesIO), "no part is larger than the body, so none goes to the disk"
        return name, part.file_object.getvalue()  # no copy, as reading it would be
    try:
        return name, (part.value or b"").decode()
    except UnicodeDecodeError:
        raise FormParserError(f"{name} is not UTF-8 text") from None


def _too_large(limits: Limits) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limits.body_bytes:,} bytes")


def _unreadable(kind: str, error: BaseException) -> SchemaViolation:
    return SchemaViolation([{"type": "unreadable", "loc": ["body"], "msg": f"the body is not {kind}: {error}"}])


def _wrong_part(name: str, message: str) -> SchemaViolation:
    return SchemaViolation([{"type": "missing", "loc": [name], "msg": message}])
