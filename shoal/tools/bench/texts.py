"""What is said while time is taken. No two texts are the same, so that no cache answers for the engine."""

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

LONGEST = 5000


def sentence(number: int) -> str:
    """The sentence of that number; the first `SENTENCES` of them differ."""
    # The sizes of the lists have no common divisor, so the four wheels meet again only after all of their teeth.
    who, did, where, when = (words[number % len(words)] for words in (WHO, DID, WHERE, WHEN))
    return f"{when[0].upper()}{when[1:]}, {who} {did} {where}."


def texts(sentences: int = 1, first: int = 0) -> Iterator[str]:
    """Texts of so many sentences, without end, beginning with that sentence."""
    for number in count(first):
        yield " ".join(sentence(number * sentences + each) for each in range(sentences))


def text_of(characters: int) -> str:
    """A text of exactly that many characters, as ordinary as they allow."""
    said = ""
    for number in count():
        said += (" " if said else "") + sentence(number)
        if len(said) >= characters:
            break
    return f"{said[: characters - 1].rstrip(' ,.').ljust(characters - 1, 'm')}."


def edge_cases() -> dict[str, str]:
    """The shortest and the longest thing people ask for."""
    return {"one word": "Hello.", "5,000 characters": text_of(LONGEST)}
