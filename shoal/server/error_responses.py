"""Errors on the wire: one table of status codes, and one shape per API.

Fish, SageMaker   {"statusCode": 404, "message": "…", "error": "Not Found"}; an array of findings for a 422
OpenAI            {"error": {"message": "…", "type": "…", "param": null, "code": "voice_not_found"}}
"""

import logging
import math
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal import errors
from shoal.api import exceptions as refusals
from shoal.errors import ShoalError
from shoal.voices import voice

logger = logging.getLogger(__name__)

STATUS: dict[type[ShoalError], int] = {
    ShoalError: 500,
    errors.InvalidRequest: 400,
    errors.TextError: 400,
    errors.AudioError: 400,
    errors.VoiceNotFound: 404,
    errors.CheckpointError: 500,
    errors.UnsafeCheckpoint: 500,
    errors.ModelNotFound: 404,
    errors.GenerationFailed: 500,
    errors.EngineBusy: 429,
    errors.EngineStopped: 503,
    errors.DeadlineExceeded: 504,
    errors.OutputError: 500,
    errors.MissingExtra: 501,
    errors.VerificationFailed: 500,
    voice.VoiceExists: 409,
    voice.BrokenVoice: 409,
    refusals.Unauthorized: 401,
    refusals.RateLimited: 429,
    refusals.QuotaExceeded: 429,
    refusals.BodyTooLarge: 413,
    refusals.BodyTimeout: 408,
    refusals.UnknownMediaType: 415,
    refusals.SchemaViolation: 422,
    refusals.ForeignOrigin: 403,
    refusals.ServerFull: 503,
    refusals.NotReady: 503,
    refusals.SlowReader: 408,
}
# The rest of such a body is not worth waiting for.
CLOSING = {408, 413}
OPENAI_PATHS = ("/v1/audio/", "/v1/models")
STARTING_SECONDS = 5.0
CLIENT_LEFT = 499  # for the log; nobody reads it


def add_to(app: FastAPI, backlog_seconds: Callable[[], float]) -> None:
    """`backlog_seconds` says how long a client should stay away when the queue is full."""

    async def expected(request: Request, error: Exception) -> Response:
        assert isinstance(error, ShoalError)
        # Fish Audio's client looks for `message` in whatever comes, and fails on an array.
        wants_object = request.headers.get("user-agent", "").startswith("fish-audio/")
        return problem(request.url.path, error, backlog_seconds(), arrays=not wants_object)

    async def nobody(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_LEFT)

    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _routing_problem(request.url.path, error)

    app.add_exception_handler(ShoalError, expected)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(ClientDisconnect, nobody)


def status_of(error: BaseException) -> int:
    """A bug is a 500, like everything that nobody foresaw."""
    found = [STATUS[kind] for kind in type(error).__mro__ if issubclass(kind, ShoalError) and kind in STATUS]
    return found[0] if found else 500


def kind_of(error: BaseException) -> str:
    """The name of an error for metrics and clients: `VoiceNotFound` is voice_not_found."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()


def problem(path: str, error: BaseException, backlog_seconds: float = 1.0, *, arrays: bool = True) -> Response:
    """The answer to a request that failed before its first byte was sent."""
    status = status_of(error)
    headers = _headers(error, status, backlog_seconds)
    if isinstance(error, refusals.SchemaViolation) and arrays and not path.startswith(OPENAI_PATHS):
        return JSONResponse(error.errors, status, headers)
    if isinstance(error, ShoalError):
        message = str(error)
    else:
        message = "This is a fault of the server; its log has more under the id of this request."
    return JSONResponse(_shape(path, error, status, message), status, headers)


async def refuse(scope: Scope, receive: Receive, send: Send, error: ShoalError, wait_seconds: float = 1.0) -> None:
    """Answer a request, or the handshake of a socket, that no route will see."""
    await problem(scope["path"], error, wait_seconds)(scope, receive, send)


class LastAnswer:
    """Where a bug ends: the log has it, and the client is told if nothing was sent before."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            logger.exception("a request ended in a bug", exc_info=error)
            await problem(scope["path"], error)(scope, receive, send)


def fish_shape(status: int, message: str) -> dict[str, Any]:
    return {"statusCode": status, "message": message, "error": HTTPStatus(status).phrase}


def _shape(path: str, error: BaseException, status: int, message: str) -> dict[str, Any]:
    if not path.startswith(OPENAI_PATHS):
        return fish_shape(status, message)
    param = error.field if isinstance(error, refusals.SchemaViolation) else None
    return openai_shape(status, message, kind_of(error), param)


def openai_shape(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _headers(error: BaseException, status: int, backlog_seconds: float) -> dict[str, str]:
    headers: dict[str, str] = {}
    # Who finds the server full shall not keep a connection of it.
    if status in CLOSING or isinstance(error, refusals.ServerFull):
        headers["Connection"] = "close"
    if isinstance(error, refusals.Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, refusals.UnknownMediaType):
        headers["Accept"] = ", ".join(error.known)
    if status in (429, 503):
        headers["Retry-After"] = str(math.ceil(_retry_after(error, backlog_seconds)))
    return headers


def _retry_after(error: BaseException, backlog_seconds: float) -> float:
    if isinstance(error, refusals.RateLimited):
        return max(1.0, error.retry_after)
    return STARTING_SECONDS if isinstance(error, errors.EngineStopped) else max(1.0, backlog_seconds)


def _routing_problem(path: str, error: HTTPException) -> Response:
    status, message = error.status_code, error.detail
    if path.startswith(OPENAI_PATHS):
        shape = openai_shape(status, message, HTTPStatus(status).phrase.lower().replace(" ", "_"))
    else:
        shape = fish_shape(status, message)
    return JSONResponse(shape, status, dict(error.headers or {}))
