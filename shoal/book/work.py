"""Work folder of a book: one file per spoken piece, named by a hash of all that its audio depends on.

The folder is the output directory of a batch, whose manifest is written after each file is synced: whatever ends a run,
the next one speaks only what is missing. A piece that is said differently (another text, voice, seed or model) has
another name, so nothing is ever overwritten, and a sentence that occurs twice is spoken once.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from shoal.batch.lines import InputFile, LineDefaults
from shoal.book.document import Book
from shoal.book.sentences import Piece, Sentence, chapter_sentences
from shoal.errors import InvalidRequest, TextError
from shoal.paths import atomic_write
from shoal.text.foreign import foreign_language

SAMPLED_BLOCKS = 500  # paragraphs of a book that its language is detected from
STATE, LINES = "book.json", "pieces.jsonl"


@dataclass(frozen=True, slots=True)
class Speaker:
    """A voice: its name, None for the model's own, and a hash of its recordings."""

    name: str | None
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Narration:
    """Model and voices of a book. `quotes` None: the narrator speaks quoted speech as well."""

    model: str  # hash of the model
    lexicon: str  # hash of the lexicon
    narrator: Speaker
    quotes: Speaker | None = None
    english: bool = False  # the model speaks English only: also a sentence in French is read as English
    words: bool = False  # the model is calibrated: record when each word is spoken
    seed: int = 0

    def fields(self) -> dict[str, object]:
        """Return the fields that the lines of all pieces have in common."""
        fields: dict[str, object] = {"format": "wav", "ssml": False}  # a book is not SSML, also if it begins like it
        fields |= {"normalize": "en"} if self.english else {}
        return fields | ({"subtitles": "json"} if self.words else {})

    def speaker(self, piece: Piece) -> Speaker:
        return self.quotes if self.quotes is not None and piece.quoted else self.narrator


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """A piece and the id of its audio: a file of that name in the work folder."""

    id: str
    text: str
    speaker: Speaker
    seed: int


@dataclass(frozen=True, slots=True)
class PlannedSentence:
    sentence: Sentence
    key: str  # identifies the sentence in the whole book, also after other sentences have changed
    pieces: tuple[PlannedPiece, ...]


@dataclass(frozen=True, slots=True)
class PlannedChapter:
    number: int  # within the book, from 1
    title: str
    sentences: tuple[PlannedSentence, ...]


@dataclass(slots=True)
class WorkState:
    """State stored in a work folder: the seed of the book, and those of sentences that were spoken again."""

    seed: int = 0
    redone: dict[str, int] = field(default_factory=dict)  # seed by sentence key

    @classmethod
    def read(cls, folder: Path) -> "WorkState":
        """Raises InvalidRequest for a file of another program."""
        path = folder / STATE
        if not path.exists():
            return cls()
        try:
            stored = json.loads(path.read_bytes())
            return cls(int(stored["seed"]), {str(key): int(seed) for key, seed in stored["redone"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise InvalidRequest(f"{path} was not written by `shoal book`: choose another --work or -o") from None

    def write(self, folder: Path) -> None:
        content = {"seed": self.seed, "redone": self.redone}
        atomic_write(folder / STATE, json.dumps(content, indent=1).encode() + b"\n")


def check_language(book: Book, narration: Narration) -> None:
    """Raise TextError for a book that the model cannot speak. One foreign sentence in an English book is accepted."""
    blocks = islice((block.text for chapter in book.chapters for block in chapter.blocks), SAMPLED_BLOCKS)
    language = foreign_language("\n".join(blocks)) if narration.english else None
    if language is not None:
        raise TextError(f"the book looks like {language}, and this model speaks English only: choose another --model")


def plan_book(book: Book, narration: Narration, redone: dict[str, int]) -> list[PlannedChapter]:
    """Return all chapters with the ids of their pieces. `redone` has the seeds of sentences by key."""
    seen: Counter[str] = Counter()
    chapters = []
    for number, chapter in enumerate(book.chapters, 1):
        found = chapter_sentences(chapter, quotes=narration.quotes is not None)
        planned = tuple(_plan_sentence(sentence, narration, redone, seen) for sentence in found)
        chapters.append(PlannedChapter(number, chapter.title, planned))
    return chapters


def _plan_sentence(
    sentence: Sentence, narration: Narration, redone: dict[str, int], seen: Counter[str]
) -> PlannedSentence:
    text_hash = _hash(sentence.text)
    seen[text_hash] += 1
    key = f"{text_hash}-{seen[text_hash]}"
    seed = redone.get(key, narration.seed)
    return PlannedSentence(sentence, key, tuple(_plan_piece(piece, narration, seed) for piece in sentence.pieces))


def _plan_piece(piece: Piece, narration: Narration, seed: int) -> PlannedPiece:
    speaker = narration.speaker(piece)
    parts = (narration.model, narration.lexicon, str(speaker.name), speaker.fingerprint, str(seed), piece.text)
    return PlannedPiece(_hash("\0".join(parts)), piece.text, speaker, seed)


def write_lines(folder: Path, chapters: Iterable[PlannedChapter], defaults: LineDefaults) -> InputFile:
    """Write the pieces as the input of a batch, each id once, in reading order."""
    lines = (json.dumps(_line(piece), ensure_ascii=False) for piece in unique_pieces(chapters).values())
    atomic_write(folder / LINES, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
    return InputFile(folder / LINES, defaults)


def unique_pieces(chapters: Iterable[PlannedChapter]) -> dict[str, PlannedPiece]:
    return {piece.id: piece for chapter in chapters for piece in pieces_of(chapter)}


def pieces_of(chapter: PlannedChapter) -> Iterator[PlannedPiece]:
    return (piece for sentence in chapter.sentences for piece in sentence.pieces)


def _line(piece: PlannedPiece) -> dict[str, object]:
    line: dict[str, object] = {"id": piece.id, "text": piece.text, "seed": piece.seed}
    return line if piece.speaker.name is None else line | {"voice": piece.speaker.name}


def _hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
