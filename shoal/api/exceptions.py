"""Errors of the serving layer: reasons to reject a request before it reaches the engine."""

import re
from collections.abc import Sequence
from typing import Any

from shoal.errors import EngineStopped, InvalidRequest, ShoalError


class ClientDisconnected(Exception):
    """The client closed the connection before the response was complete."""


class Interrupted(Exception):
    """The client cancelled the speech and kept the connection."""


class Unauthorized(ShoalError):
    """The API key is missing or wrong."""


class RateLimited(ShoalError):
    """The key exceeded a limit; it may retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaExceeded(RateLimited):
    """The key used its daily quota of audio."""


class BodyTooLarge(InvalidRequest):
    """The body exceeds the size limit."""


class BodyTimeout(InvalidRequest):
    """The body did not arrive within the time limit."""


class UnknownMediaType(InvalidRequest):
    """The route does not accept this media type; `known` lists those it does."""

    def __init__(self, message: str, known: Sequence[str]) -> None:
        super().__init__(message)
        self.known = tuple(known)


class SchemaViolation(InvalidRequest):
    """The body does not match the schema; `errors` are pydantic's, without the input values."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        first = errors[0]
        super().__init__(f"{field_name(first)}: {first['msg']}")
        self.errors = errors

    @property
    def field(self) -> str:
        return field_name(self.errors[0])


class SpeechNotKept(ShoalError):
    """No finished speech is kept under the request id."""


class ForeignOrigin(ShoalError):
    """A web page of another origin called the server without permission."""


class UnknownHost(ShoalError):
    """The Host header names another machine, as in a DNS rebinding attack."""


class IdleTimeout(InvalidRequest):
    """No context of a live socket had text to speak for `live_idle_seconds`."""


class ServerFull(ShoalError):
    """The limit on concurrent requests and WebSockets is reached."""


class NotReady(EngineStopped):
    """The model is still loading, or the server is shutting down."""


class SlowReader(ShoalError):
    """The client reads so slowly that the buffer is full, or has read nothing for `stall_seconds`."""


def error_code(error: BaseException) -> str:
    """Return the snake_case class name, the error code in metrics and responses: VoiceNotFound -> voice_not_found."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()


def field_name(error: dict[str, Any]) -> str:
    return ".".join(str(part) for part in error["loc"]) or "body"


def wrong_field(name: str, message: str) -> SchemaViolation:
    """Return the error for one field that is well formed but not supported here."""
    return SchemaViolation([{"type": "value_error", "loc": [name], "msg": message}])
