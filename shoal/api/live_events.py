"""What clients of the live socket say, event by event. What is not known is refused, as everywhere."""

from typing import Any, Literal

from shoal.api.fields import Body
from shoal.api.live_text import LiveBody
from shoal.errors import InvalidRequest
from shoal.server.parsing import unpack, validated


class Start(Body):
    event: Literal["start"]
    request: dict[str, Any]

    def body(self) -> LiveBody:
        """Raises SchemaViolation."""
        return validated(LiveBody, self.request)


class Text(Body):
    event: Literal["text"]
    text: str


class Flush(Body):
    event: Literal["flush"]


class Stop(Body):
    event: Literal["stop"]


Event = Start | Text | Flush | Stop
EVENTS: dict[str, type[Event]] = {"start": Start, "text": Text, "flush": Flush, "stop": Stop}


def event_of(message: bytes) -> Event:
    """Raises InvalidRequest and its kin."""
    content = unpack(message)
    kind = content.get("event") if isinstance(content, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest("an event is a map with its name under the key `event`")
    if kind not in EVENTS:
        raise InvalidRequest(f"unknown event {kind[:64]!r}: start, text, flush or stop")
    return validated(EVENTS[kind], content)


def start_of(message: bytes) -> LiveBody:
    """The request of the first event. Raises InvalidRequest and its kin."""
    event = event_of(message)
    if not isinstance(event, Start):
        raise InvalidRequest("the first event must be `start`")
    return event.body()
