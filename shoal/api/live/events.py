"""Live text input: the events of a live session, and the buffer that cuts incoming text into sentences."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from shoal.api.bodies.parsing import unpack, validated
from shoal.api.bodies.schemas import Body, SpeechBody
from shoal.errors import InvalidRequest
from shoal.text.markup.pauses import PAUSE
from shoal.text.split import ends_at

# A sentence ends only when something follows its end mark: "3." may become "3.5", and "..." may grow.
SENTENCE_END = re.compile(r"[.!?…;:]['\")\]]*(?=\s)|[。！？；]|\n")
DEFAULT_MAX_CHARACTERS = 200
# Markup that must not be cut: phonemes, control tokens, style markers, pauses. The last one may be incomplete.
MAX_MARKUP = 256
MARKUP = re.compile(
    r"<\|phoneme_start\|>[^<]{0,200}(?:<\|phoneme_end\|>)?|<\|[^<|>]{0,32}(?:\|>)?"
    r"|\[[^\[\]\n]{0,64}\]|\([^()\n]{0,64}\)|<break\b[^<>]{0,100}>?"
)
COMPLETE_MARKUP = re.compile(
    r"<\|phoneme_start\|>[^<]*<\|phoneme_end\|>|<\|(?!phoneme_start)[^<|>]*\|>|\[.*\]|\(.*\)|<break[^<>]*>"
)
# Pauses and HTML tags contain letters but are not spoken.
PAUSE_OR_TAG = re.compile(rf"{PAUSE.pattern}|</?[A-Za-z][^<>]{{0,100}}>")
MAX_EVENT_BYTES = 64 << 10  # limit of every event except `start`, which may carry recordings


class LiveBody(SpeechBody):
    """The request in a `start` event. Its text is normally empty; text arrives in later events."""

    text: Annotated[str, Field(description="First text to speak.")] = ""


class Start(Body):
    event: Literal["start"]
    request: dict[str, Any]

    def body(self) -> LiveBody:
        """Return the validated request. Raises SchemaViolation."""
        return validated(LiveBody, self.request)


class Text(Body):
    event: Literal["text"]
    text: str


class Flush(Body):
    event: Literal["flush"]


class Stop(Body):
    event: Literal["stop"]


class Cancel(Body):
    event: Literal["cancel"]


LiveEvent = Start | Text | Flush | Stop | Cancel
EVENTS: dict[str, type[LiveEvent]] = {"start": Start, "text": Text, "flush": Flush, "stop": Stop, "cancel": Cancel}


def parse_event(message: bytes) -> LiveEvent:
    """Parse one MessagePack message. Raises InvalidRequest or a subclass."""
    content = unpack(message)
    name = content.get("event") if isinstance(content, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("an event is a map with its name under the key `event`")
    if name not in EVENTS:
        raise InvalidRequest(f"unknown event {name[:64]!r}: send start, text, flush, stop or cancel")
    if name != "start" and len(message) > MAX_EVENT_BYTES:
        raise InvalidRequest(f"a `{name}` event has at most {MAX_EVENT_BYTES:,} bytes: send a longer text in parts")
    return validated(EVENTS[name], content)


def parse_message(message: bytes) -> LiveBody | Text | Flush | Stop | Cancel:
    """Parse one MessagePack message; a `start` event becomes its request. Raises InvalidRequest or a subclass."""
    event = parse_event(message)
    return event.body() if isinstance(event, Start) else event


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A sentence or a part of one; `end` is the position of its end in the whole text, in characters."""

    text: str
    end: int


class TextBuffer:
    """Collects text and returns it in pieces: whole sentences of `min_characters`, cut at `max_characters` at most."""

    def __init__(self, min_characters: int, max_characters: int | None) -> None:
        self._min = min_characters
        self._max = max(max_characters or DEFAULT_MAX_CHARACTERS, min_characters, 16)
        self._text, self._taken = "", 0
        self._pauses = ""  # markup of pauses that no word follows yet

    @property
    def received(self) -> int:
        """Characters received so far."""
        return self._taken + len(self._text)

    def add(self, text: str) -> list[TextPiece]:
        """Return the pieces that can be spoken now."""
        self._text += text
        ready: list[TextPiece] = []
        while cut := self._cut():
            ready += self._take(cut)
        return ready

    def flush(self) -> list[TextPiece]:
        """Return all buffered text."""
        return self._take(len(self._text))

    def _take(self, characters: int) -> list[TextPiece]:
        piece, self._text = self._text[:characters], self._text[characters:]
        self._taken += len(piece)
        if not has_spoken_words(piece):
            # A pause alone is not a request: it is spoken before the next words.
            self._pauses += "".join(match[0] for match in PAUSE.finditer(piece))
            return []
        pauses, self._pauses = self._pauses, ""
        return [TextPiece(f"{pauses} {piece}" if pauses else piece, self._taken)]

    def _cut(self) -> int:
        """Return where to cut the buffered text, or 0 to wait for more."""
        if len(self._text) < max(self._min, 1):
            return 0
        # Stop at the first end: this runs once per sentence, so finding all ends each time would be quadratic.
        found = SENTENCE_END.finditer(self._text, 0, self._max + 2)
        end = next((each.end() for each in found if each.end() >= self._min and self._ends(each)), None)
        if end is not None and end <= self._max:
            return end
        if len(self._text) <= self._max:
            return 0
        return cut_outside_markup(self._text, self._max)

    def _ends(self, mark: re.Match[str]) -> bool:
        """Return whether a mark ends a sentence. The dots of "Dr. Smith", "5 p.m. on" and "No. 5" do not."""
        return mark[0][0] not in ".…" or bool(ends_at(self._text, mark.end()))


def cut_outside_markup(text: str, longest: int) -> int:
    """Return where to cut a text without a sentence end: at a space outside markup; 0: wait for more."""
    space = text.rfind(" ", 1, longest)
    cut = space if space > 0 else longest
    around = (each for each in MARKUP.finditer(text, 0, longest + MAX_MARKUP) if each.start() < cut < each.end())
    markup = next(around, None)
    if markup is None:
        return cut
    if markup.start():
        return markup.start()
    if COMPLETE_MARKUP.fullmatch(markup.group()):
        return markup.end()
    return cut if len(text) > longest + MAX_MARKUP else 0


def has_spoken_words(text: str) -> bool:
    """Return whether there is a letter or digit outside of pauses and HTML tags."""
    return any(character.isalnum() for character in PAUSE_OR_TAG.sub("", text))
