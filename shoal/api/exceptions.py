"""What only a server refuses: the request never reaches the engine."""

from collections.abc import Sequence
from typing import Any

from shoal.errors import EngineStopped, InvalidRequest, ShoalError


class Unauthorized(ShoalError):
    """No key, or a wrong one."""


class RateLimited(ShoalError):
    """A key has used what it may for now; `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaExceeded(RateLimited):
    """The audio of the day is used up."""


class BodyTooLarge(InvalidRequest):
    """The body is larger than it may be."""


class BodyTimeout(InvalidRequest):
    """The body did not come in time."""


class UnknownMediaType(InvalidRequest):
    """The body is of a kind that this route does not read."""

    def __init__(self, message: str, known: Sequence[str]) -> None:
        super().__init__(message)
        self.known = tuple(known)


class SchemaViolation(InvalidRequest):
    """The body was read and is not what the route takes; `errors` are pydantic's, without the values."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        first = errors[0]
        super().__init__(f"{field_name(first)}: {first['msg']}")
        self.errors = errors

    @property
    def field(self) -> str:
        return field_name(self.errors[0])


class ForeignOrigin(ShoalError):
    """A web page of an origin that may not use the server."""


class ServerFull(ShoalError):
    """As many requests and sockets are open as may be."""


class NotReady(EngineStopped):
    """The model is still being loaded, or the server is going down."""


class SlowReader(ShoalError):
    """The client does not read what was made for it."""


def field_name(error: dict[str, Any]) -> str:
    return ".".join(str(part) for part in error["loc"]) or "body"


def wrong_field(name: str, message: str) -> SchemaViolation:
    """One field that is well formed and cannot be done here."""
    return SchemaViolation([{"type": "value_error", "loc": [name], "msg": message}])
