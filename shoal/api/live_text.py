"""Text that comes in pieces: when is there enough of it to speak?"""

import re
from typing import Annotated

from pydantic import Field

from shoal.api.fish_body import SpeechBody
from shoal.errors import TextError

# A sentence is over when something follows its end: "3." may become "3.5", and "..." may grow.
SENTENCE_END = re.compile(r"[.!?…;:]['\")\]]*(?=\s)|[。！？；]|\n")
USUAL_LENGTH = 200


class LiveBody(SpeechBody):
    """The request of a `start` event, whose text is usually empty."""

    text: Annotated[str, Field()] = ""


class TextBuffer:
    """Gives text away at the ends of sentences once `shortest` characters are there, and at `longest` in any case."""

    def __init__(self, shortest: int, longest: int | None, most: int) -> None:
        self._shortest, self._longest, self._left = shortest, max(longest or USUAL_LENGTH, shortest, 16), most
        self._text = ""

    def add(self, text: str) -> list[str]:
        """What can be spoken now. Raises TextError when a session has had its share."""
        self._left -= len(text)
        if self._left < 0:
            raise TextError("the text of this session is too long; start another")
        self._text += text
        ready: list[str] = []
        while cut := self._cut():
            piece, self._text = self._text[:cut], self._text[cut:]
            ready.append(piece)
        return [piece for piece in ready if speakable(piece)]

    def rest(self) -> list[str]:
        """All that is there."""
        piece, self._text = self._text, ""
        return [piece] if speakable(piece) else []

    def _cut(self) -> int:
        """Where to cut, 0 for not yet."""
        if len(self._text) < max(self._shortest, 1):
            return 0
        ends = [found.end() for found in SENTENCE_END.finditer(self._text) if found.end() >= self._shortest]
        if ends and ends[0] <= self._longest:
            return ends[0]
        if len(self._text) <= self._longest:
            return 0
        space = self._text.rfind(" ", 1, self._longest)
        return space if space > 0 else self._longest


def speakable(text: str) -> bool:
    return any(character.isalnum() for character in text)
