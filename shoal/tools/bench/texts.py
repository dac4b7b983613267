"""Texts for benchmarks, all different, so that no cache serves a request."""

from collections.abc import Iterator
from itertools import count

# fmt: off
WHO = (
    "the ferryman", "my sister", "a young painter", "the old teacher", "our neighbour", "the night nurse", "a tall boy",
    "the baker", "her cousin", "the pilot", "a quiet girl", "the gardener", "his uncle",
)
DID = (
    "carried a basket", "found the letter", "waited for rain", "counted the boats", "sang an old song",
    "opened the gate", "wrote three pages", "watched the river", "mended the net", "lost a blue glove",
    "told the story",
)
WHERE = (
    "near the harbour", "behind the station", "under the bridge", "on the hill", "in the market", "beside the mill",
    "along the shore",
)
WHEN = ("on Monday morning", "before the storm", "after supper", "in early spring", "at half past nine")
# fmt: on
SENTENCES = len(WHO) * len(DID) * len(WHERE) * len(WHEN)

LONG_TEXT = 5000  # characters


def sentence(number: int) -> str:
    """Return a sentence by number; the first `SENTENCES` of them differ."""
    # The lengths of the lists are coprime, so all combinations occur before one repeats.
    who, did, where, when = (words[number % len(words)] for words in (WHO, DID, WHERE, WHEN))
    return f"{when[0].upper()}{when[1:]}, {who} {did} {where}."


def texts(sentences: int = 1, first: int = 0) -> Iterator[str]:
    """Yield texts of `sentences` sentences without end, starting at text `first`."""
    for number in count(first):
        yield " ".join(sentence(number * sentences + each) for each in range(sentences))


def text_of(characters: int) -> str:
    """Return a text of exactly that many characters."""
    text = ""
    for number in count():
        text += (" " if text else "") + sentence(number)
        if len(text) >= characters:
            break
    return f"{text[: characters - 1].rstrip(' ,.').ljust(characters - 1, 'm')}."


def edge_cases() -> dict[str, str]:
    """Return the shortest and the longest typical text, by name."""
    return {"one word": "Hello.", "5,000 characters": text_of(LONG_TEXT)}
