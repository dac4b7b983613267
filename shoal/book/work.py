"""Work folder of a book: one file per spoken piece, named by a hash of all that its audio depends on.

The folder is the output directory of a batch, whose manifest is written after each file is synced: however a run ends,
the next one speaks only what is missing. A piece with another text, voice, seed or model has another name, so nothing
is ever overwritten, and a sentence that occurs twice is spoken once.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from shoal.batch.lines import InputFile, LineDefaults
from shoal.book.document import Book
from shoal.book.readers.quotes import Span
from shoal.book.sentences import Piece, Sentence, chapter_sentences, spoken_together
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
    english: bool = False  # the model speaks English only, so sentences in other languages are read as English
    words: bool = False  # the model is calibrated: record when each word is spoken
    joins_short: bool = False  # speak a short sentence together with the next one; word times tell where to cut
    seed: int = 0

    def fields(self) -> dict[str, object]:
        """Return the fields that the lines of all pieces have in common."""
        # A book is never SSML, even if it begins with <speak>.
        fields: dict[str, object] = {"format": "wav", "ssml": False}
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
    part: Span | None = None  # span of the piece in `text`; None: all of it, spoken alone


@dataclass(frozen=True, slots=True)
class PlannedSentence:
    sentence: Sentence
    key: str  # identifies the sentence in the book, even after other sentences have changed
    pieces: tuple[PlannedPiece, ...]
    together: tuple[str, ...]  # keys of the sentences that are spoken together with this one, and its own


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
        """Return the state of a work folder, the default without one. Raises InvalidRequest for a foreign file."""
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
        alone = ([sentence] for sentence in found)
        groups = spoken_together(found, english=narration.english) if narration.joins_short else alone
        keyed = [(group, tuple(_key(sentence, seen) for sentence in group)) for group in groups]
        planned = (each for group, keys in keyed for each in _plan_group(group, keys, narration, redone))
        chapters.append(PlannedChapter(number, chapter.title, tuple(planned)))
    return chapters


def _plan_group(
    group: list[Sentence], keys: tuple[str, ...], narration: Narration, redone: dict[str, int]
) -> Iterator[PlannedSentence]:
    """Plan sentences that are spoken together: the first piece of each is a part of one text."""
    seed, at = seed_of(keys, redone, narration.seed), 0
    text = " ".join(sentence.pieces[0].text for sentence in group)
    whole = _plan_piece(replace(group[0].pieces[0], text=text), narration, seed)
    for key, sentence in zip(keys, group, strict=True):
        end = min(len(text), at + len(sentence.pieces[0].text) + 1)
        first = whole if len(group) == 1 else replace(whole, part=(at, end))
        rest = (_plan_piece(each, narration, seed) for each in sentence.pieces[1:])
        yield PlannedSentence(sentence, key, (first, *rest), keys)
        at = end


def seed_of(keys: tuple[str, ...], redone: dict[str, int], default: int) -> int:
    """Return the seed of sentences that are spoken together: that of the last redone one, else `default`.

    Their stored seeds may differ after an edit, or if one was redone alone. The last one counts, because the others are
    short ("No."): they often occur several times, and their keys shift when another one is added before them.
    """
    return next((redone[key] for key in reversed(keys) if key in redone), default)


def _key(sentence: Sentence, seen: Counter[str]) -> str:
    text_hash = _hash(sentence.text)
    seen[text_hash] += 1
    return f"{text_hash}-{seen[text_hash]}"


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
