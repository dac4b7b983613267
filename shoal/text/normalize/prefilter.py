"""Patterns with a prefilter: most texts have none of the characters that a rule needs, and are not searched."""

import re
from collections.abc import Callable

DIGITS = "1023456789"


class Prefiltered:
    """Pattern that is searched only in texts with all of `all_of` and at least one of `any_of`.

    Every match, with its look-around, must have these characters. Texts are folded: digits and spaces are ASCII.
    """

    __slots__ = ("all_of", "any_of", "pattern")

    def __init__(self, pattern: str, *, all_of: str = "", any_of: str = "", flags: int = 0) -> None:
        self.pattern = re.compile(pattern, flags)
        self.all_of, self.any_of = all_of, any_of

    def may_match(self, text: str) -> bool:
        """Return whether the text has the characters that a match needs."""
        for character in self.all_of:
            if character not in text:
                return False
        for character in self.any_of:
            if character in text:
                return True
        return not self.any_of

    def sub(self, replacement: str | Callable[[re.Match[str]], str], text: str) -> str:
        return self.pattern.sub(replacement, text) if self.may_match(text) else text
