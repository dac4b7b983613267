"""Map errors to HTTP responses: one table of status codes, and one body format per API.

Fish, SageMaker   {"statusCode": 404, "message": "…", "error": "Not Found"}; an array of pydantic errors for a 422
OpenAI            {"error": {"message": "…", "type": "…", "param": null, "code": "voice_not_found"}}
ElevenLabs        {"detail": {"status": "voice_not_found", "message": "…"}}; {"detail": [pydantic errors]} for a 422
"""

import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from shoal import errors
from shoal.api import exceptions
from shoal.api.exceptions import error_code
from shoal.errors import ShoalError
from shoal.voices import voice

STATUS: dict[type[ShoalError], int] = {
    ShoalError: 500,
    errors.InvalidRequest: 400,
    errors.TextError: 400,
    errors.NothingToSpeak: 400,
    errors.AudioError: 400,
    errors.VoiceNotFound: 404,
    errors.CheckpointError: 500,
    errors.UnsafeCheckpoint: 500,
    errors.ModelNotFound: 404,
    errors.GenerationFailed: 500,
    errors.EngineBusy: 429,
    errors.EngineStopped: 503,
    errors.DeviceFailed: 503,
    errors.DeadlineExceeded: 504,
    errors.OutputError: 500,
    errors.MissingExtra: 501,
    errors.VerificationFailed: 500,
    errors.InternalError: 500,
    voice.VoiceExists: 409,
    voice.BrokenVoice: 409,
    exceptions.Unauthorized: 401,
    exceptions.RateLimited: 429,
    exceptions.QuotaExceeded: 429,
    exceptions.BodyTooLarge: 413,
    exceptions.BodyTimeout: 408,
    exceptions.IdleTimeout: 408,
    exceptions.UnknownMediaType: 415,
    exceptions.SchemaViolation: 422,
    exceptions.SpeechNotKept: 404,
    exceptions.ForeignOrigin: 403,
    exceptions.UnknownHost: 403,
    exceptions.ServerFull: 503,
    exceptions.NotReady: 503,
    exceptions.SlowReader: 408,
}
# Statuses after which the connection is closed instead of reading the rest of the request body.
CLOSING = {408, 413}
OPENAI_PATHS = ("/v1/audio/", "/v1/models")
ELEVENLABS_PATHS = ("/v1/text-to-speech/", "/v1/text-to-dialogue", "/v1/voices", "/v2/voices", "/compat/elevenlabs/")
STARTING_SECONDS = 5.0  # Retry-After while no engine is available
CLIENT_CLOSED_REQUEST = 499  # nginx's convention; only the log and the metrics see it


def add_exception_handlers(app: FastAPI, retry_after_seconds: Callable[[], float]) -> None:
    """Register the handlers. `retry_after_seconds` estimates when a rejected client should retry."""

    async def on_shoal_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ShoalError)
        # Fish Audio's client reads `message` of every error body, and fails on an array.
        needs_object = request.headers.get("user-agent", "").startswith("fish-audio/")
        return error_response(request.url.path, error, retry_after_seconds(), arrays=not needs_object)

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _routing_error(request.url.path, error)

    app.add_exception_handler(ShoalError, on_shoal_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    # Starlette has a class of its own for a disconnect while the body is read.
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(exceptions.ClientDisconnected, on_disconnect)


def add_socket_not_found(app: FastAPI) -> None:
    """Answer WebSocket handshakes of unknown paths with 404.

    Starlette closes them, which uvicorn turns into a 403 without a body, the sign of a wrong key.
    """
    default = app.router.default

    async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await _routing_error(scope["path"], HTTPException(404))(scope, receive, send)
        else:
            await default(scope, receive, send)

    app.router.default = not_found


def status_of(error: BaseException) -> int:
    """Return the status code of the closest known base class; 500 for exceptions that are not ShoalErrors."""
    found = [STATUS[kind] for kind in type(error).__mro__ if issubclass(kind, ShoalError) and kind in STATUS]
    return found[0] if found else 500


def error_response(path: str, error: BaseException, retry_after: float = 1.0, *, arrays: bool = True) -> Response:
    """Return the response to a request that failed before its first byte was sent."""
    status = status_of(error)
    headers = _headers(error, status, retry_after)
    if isinstance(error, exceptions.SchemaViolation) and path.startswith(ELEVENLABS_PATHS):
        return JSONResponse({"detail": error.errors}, status, headers)
    if isinstance(error, exceptions.SchemaViolation) and arrays and not path.startswith(OPENAI_PATHS):
        return JSONResponse(error.errors, status, headers)
    if isinstance(error, ShoalError):
        message = str(error)
    else:
        message = "internal server error; the server's log has details under the id of this request"
    return JSONResponse(_body(path, error, status, message), status, headers)


async def send_error(scope: Scope, receive: Receive, send: Send, error: ShoalError, retry_after: float = 1.0) -> None:
    """Reject a request or a WebSocket handshake from a middleware."""
    await error_response(scope["path"], error, retry_after)(scope, receive, send)


def fish_error(status: int, message: str) -> dict[str, Any]:
    return {"statusCode": status, "message": message, "error": HTTPStatus(status).phrase}


def openai_error(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def elevenlabs_error(message: str, code: str) -> dict[str, Any]:
    # ElevenLabs' clients recognise this error by its code.
    code = "invalid_api_key" if code == "unauthorized" else code
    return {"detail": {"status": code, "message": message}}


def _body(path: str, error: BaseException, status: int, message: str) -> dict[str, Any]:
    if path.startswith(ELEVENLABS_PATHS):
        return elevenlabs_error(message, error_code(error))
    if not path.startswith(OPENAI_PATHS):
        return fish_error(status, message)
    param = error.field if isinstance(error, exceptions.SchemaViolation) else None
    return openai_error(status, message, error_code(error), param)


def _headers(error: BaseException, status: int, retry_after: float) -> dict[str, str]:
    headers: dict[str, str] = {}
    # A client rejected because the server is full must not keep one of its connections.
    if status in CLOSING or isinstance(error, exceptions.ServerFull):
        headers["Connection"] = "close"
    if isinstance(error, exceptions.Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, exceptions.UnknownMediaType):
        headers["Accept"] = ", ".join(error.known)
    if status in (429, 503):
        headers["Retry-After"] = str(math.ceil(_retry_after(error, retry_after)))
    return headers


def _retry_after(error: BaseException, queue_seconds: float) -> float:
    if isinstance(error, exceptions.RateLimited):
        return max(1.0, error.retry_after)
    return STARTING_SECONDS if isinstance(error, errors.EngineStopped) else max(1.0, queue_seconds)


def _routing_error(path: str, error: HTTPException) -> Response:
    status, message = error.status_code, error.detail
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    if path.startswith(OPENAI_PATHS):
        body = openai_error(status, message, code)
    elif path.startswith(ELEVENLABS_PATHS):
        body = elevenlabs_error(message, code)
    else:
        body = fish_error(status, message)
    return JSONResponse(body, status, dict(error.headers or {}))
