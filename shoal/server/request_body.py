"""Read request bodies within size, time and memory limits, and parse them without blocking the event loop."""

import asyncio
from collections.abc import Callable
from email.message import Message
from typing import Any, TypeVar

from fastapi import Request

from shoal.api.admission import BodyBudget, BodyReservation
from shoal.api.bodies.parsing import (
    ALL,
    JSON,
    MSGPACK,
    MSGPACK_NAMES,
    MULTIPART,
    Form,
    Model,
    parse_form,
    parse_json,
    unpack,
    validated,
)
from shoal.api.bodies.scan import MAX_ELEMENTS
from shoal.api.config import Limits
from shoal.api.exceptions import BodyTimeout, BodyTooLarge, UnknownMediaType

INLINE_BYTES = 64 << 10  # parsing a smaller body takes less time than handing it to a thread

T = TypeVar("T")


async def read_model(
    request: Request,
    model: type[Model],
    limits: Limits,
    budget: BodyBudget,
    *,
    from_form: Callable[[Form], dict[str, Any]] | None = None,
    max_elements: int = MAX_ELEMENTS,
) -> Model:
    """Return the body as a `model`: JSON or MessagePack by Content-Type, or a form if `from_form` converts it.

    `max_elements` bounds the values and keys of the body, before it is parsed.
    """
    kind, known = media_type(request), ALL if from_form else (JSON, MSGPACK)
    if kind not in known:
        raise UnknownMediaType(f"send one of {', '.join(known)}, not {kind or 'nothing'}", known)
    body = await read_body(request, limits, budget)
    if kind == MULTIPART and from_form:
        boundary = _boundary(request)
        return await parse_body(body, lambda: validated(model, from_form(parse_form(body, boundary)), lax=True))
    parse = unpack if kind == MSGPACK else parse_json
    return await parse_body(body, lambda: validated(model, parse(body, max_elements)))


async def read_form(request: Request, limits: Limits, budget: BodyBudget) -> Form:
    """Return the parts of a multipart body."""
    kind = media_type(request)
    if kind != MULTIPART:
        raise UnknownMediaType(f"send {MULTIPART}, not {kind or 'nothing'}", (MULTIPART,))
    boundary, body = _boundary(request), await read_body(request, limits, budget)
    return await parse_body(body, lambda: parse_form(body, boundary))


async def read_body(request: Request, limits: Limits, budget: BodyBudget) -> bytes:
    """Return the body. Raises BodyTooLarge: by the declared length before reading, else once the limit is exceeded.

    The body counts against the budget until the request ends or `release_body` is called.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.body_bytes:
        raise _too_large(limits)
    if request.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise UnknownMediaType("compressed bodies are not supported: send the body uncompressed", ALL)
    body, reservation = bytearray(), _reserve(request, budget)
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                if len(body) + len(piece) > limits.body_bytes:
                    raise _too_large(limits)
                reservation.grow(len(piece))
                body += piece
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {limits.body_seconds:g} seconds") from None
    return bytes(body)


def release_body(request: Request) -> None:
    """Release the body's budget early, once neither its bytes nor the objects parsed from it are needed."""
    reservation = getattr(request.state, "body_reservation", None)
    if isinstance(reservation, BodyReservation):
        reservation.release()


def media_type(request: Request) -> str:
    """Return the normalised Content-Type without parameters."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    return MSGPACK if kind in MSGPACK_NAMES else kind


async def parse_body(body: bytes, parse: Callable[[], T]) -> T:
    """Run `parse` inline for a small body, else in a thread."""
    return parse() if len(body) < INLINE_BYTES else await asyncio.to_thread(parse)


def _reserve(request: Request, budget: BodyBudget) -> BodyReservation:
    """Reserve budget that is released when the request's task ends; ASGI servers run every request in its own task."""
    reservation = request.state.body_reservation = BodyReservation(budget)
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: reservation.release())
    return reservation


def _boundary(request: Request) -> str:
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    return str(header.get_param("boundary") or "")


def _too_large(limits: Limits) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limits.body_bytes:,} bytes")
