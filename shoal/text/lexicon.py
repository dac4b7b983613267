"""Lexicons: readings of words, as respellings or as phonemes, from a table or a W3C PLS document.

A word in lower case matches in any case; with a capital it matches only as written. A possessive 's after a word is
kept.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from pathlib import Path

from shoal.errors import InvalidRequest, TextError
from shoal.speech import Pronunciation
from shoal.text.markup.xml_reader import read_xml
from shoal.text.phonemes import SPAN, arpabet, possessive, tagged
from shoal.text.tokenizer import SPEAKER_TAG

MAX_BYTES = 8 << 20
MAX_WORD, MAX_READING = 100, 200  # characters
# Scripts without spaces between words: a word may begin and end anywhere.
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
PIECE = re.compile(rf"[{UNSPACED}]|(?:(?![{UNSPACED}])\w)+|[^\w\s]")
ENDS_WITH_LETTER = re.compile(rf"(?![{UNSPACED}])\w$")
LETTER = re.compile(rf"(?![{UNSPACED}])\w")
POSSESSIVE = re.compile(r"['’]s(?!\w)", re.IGNORECASE)
LINE = re.compile(r"(?P<word>[^\t]+?)(?:[ ]*\t\s*|[ ]+=[ ]+)(?P<reading>.+)")
UNTOUCHED = re.compile(f"{SPAN.pattern}|{SPEAKER_TAG.pattern}")
PLS_ELEMENTS = ("lexicon", "lexeme", "grapheme", "phoneme", "alias", "example", "meta", "metadata")


def pronunciation(written: str, reading: str) -> Pronunciation:
    """Return the entry of a word: `/R EH1 D/` are phonemes (Arpabet or IPA), anything else is a respelling.

    Raises TextError for a word or reading that is empty or too long, and for an unknown phoneme.
    """
    written, reading = written.strip(), reading.strip()
    if not 0 < len(written) <= MAX_WORD or not any(map(str.isalnum, written)):
        raise TextError(f"{written[:32]!r} is not a word of at most {MAX_WORD} characters")
    if not 0 < len(reading) <= MAX_READING:
        raise TextError(f"{written[:32]!r} needs a reading of 1 to {MAX_READING} characters")
    if len(reading) > 2 and reading[0] == reading[-1] == "/":
        return Pronunciation(written, phonemes=arpabet(reading[1:-1]))
    return Pronunciation(written, respelling=reading)


class Lexicon:
    """Readings of words, indexed by the first piece of each word so that a text is matched in one pass."""

    def __init__(self, entries: Iterable[Pronunciation] = (), base: "Lexicon | None" = None) -> None:
        """Later entries replace earlier ones for the same word, and those of `base`."""
        self._base = base
        self.entries = {each.written: each for each in entries}
        ordered = sorted(self.entries.values(), key=_precedence)
        by_piece = sorted(ordered, key=_first_piece)
        self._index = {piece: list(group) for piece, group in groupby(by_piece, _first_piece)}

    def __bool__(self) -> bool:
        return bool(self.entries) or bool(self._base)

    def apply(self, text: str, *, phonemes: bool) -> str:
        """Return the text with its words replaced by their readings; `phonemes`: the model reads phoneme tags.

        Raises TextError for a word whose only reading is phonemes when the model has none.
        """
        if not self:
            return text
        parts, last = [], 0
        for start, end, entry in self._matches(text):
            suffix = POSSESSIVE.match(text, end)
            parts += [text[last:start], _reading(entry, "" if suffix is None else suffix[0], phonemes=phonemes)]
            last = end if suffix is None else suffix.end()
        return "".join((*parts, text[last:]))

    def _matches(self, text: str) -> Iterator[tuple[int, int, Pronunciation]]:
        """Yield start, end and entry of the words, from left to right and without overlap."""
        lower = _lower(text)
        # End of each phoneme or speaker tag, by its start: pieces inside a tag are not words and are skipped.
        untouched = {match.start(): match.end() for match in UNTOUCHED.finditer(text)}
        end = 0
        for piece in PIECE.finditer(text):
            start = piece.start()
            end = untouched.get(start, end)
            if start < end:
                continue
            for entry in self._candidates(lower[start : piece.end()]):
                if _matches_at(entry.written, text, lower, start):
                    end = start + len(entry.written)
                    yield start, end, entry
                    break

    def _candidates(self, piece: str) -> Iterator[Pronunciation]:
        yield from self._index.get(piece, ())
        if self._base is not None:
            yield from self._base._candidates(piece)


def read_lexicon(path: Path) -> Lexicon:
    """Read a table (`word = reading` or tab-separated) or a PLS document. Raises InvalidRequest, with the line."""
    entries, problems = parse_lexicon(path)
    if problems:
        raise InvalidRequest(problems[0])
    return Lexicon(entries)


def lexicon_hash(path: Path | None) -> str:
    """Return the hash of a lexicon, or "" for None. Batches and books speak again when it changes.

    Raises InvalidRequest for a file that is no lexicon.
    """
    if path is None:
        return ""
    read_lexicon(path)
    return sha256(path.read_bytes()).hexdigest()


def parse_lexicon(path: Path) -> tuple[list[Pronunciation], list[str]]:
    """Return the entries of a file, in order, and all problems, each with its place. Raises InvalidRequest."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise InvalidRequest(f"{path} has more than {MAX_BYTES >> 20} MiB")
        text = content.decode("utf-8-sig")
    except OSError as problem:
        raise InvalidRequest(f"cannot read the lexicon {path}: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise InvalidRequest(f"{path} is not UTF-8 text: invalid byte at offset {problem.start}") from None
    return _parse_pls(text, path) if text.lstrip().startswith("<") else _parse_table(text, path)


def lexicon_problems(entries: Iterable[Pronunciation], *, phonemes: bool) -> list[str]:
    """Return the problems of valid entries: repeated words, and phonemes for a model that does not read them."""
    problems, seen = [], set[str]()
    for entry in entries:
        if entry.written in seen:
            problems.append(f"{entry.written!r} has more than one reading: the last one is used")
        if entry.respelling is None and not phonemes:
            problems.append(f"{entry.written!r} has only phonemes, and this model reads none: add a respelling")
        seen.add(entry.written)
    return problems


def _parse_table(text: str, path: Path) -> tuple[list[Pronunciation], list[str]]:
    entries, problems = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            match = LINE.fullmatch(line.strip())
            if match is None:
                raise TextError("write `word = reading`, or the word and its reading separated by a tab")
            entries.append(pronunciation(match["word"], match["reading"]))
        except TextError as problem:
            problems.append(f"{path}, line {number}: {problem}")
    return entries, problems


def _parse_pls(text: str, path: Path) -> tuple[list[Pronunciation], list[str]]:
    reader = PlsReader()
    try:
        read_xml(text, reader, f"{path}, PLS")
    except TextError as problem:
        return reader.entries, [str(problem)]
    return reader.entries, []


@dataclass
class PlsReader:
    """Handler of the XML reader: every grapheme of a lexeme gets its alias and its first phoneme."""

    entries: list[Pronunciation] = field(default_factory=list)
    _alphabet: str = "ipa"
    _text: list[str] = field(default_factory=list)
    _graphemes: list[str] = field(default_factory=list)
    _readings: dict[str, str] = field(default_factory=dict)
    _phoneme_alphabet: str = "ipa"

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name not in PLS_ELEMENTS:
            raise TextError(f"<{name[:32]}> is not supported: use {', '.join(PLS_ELEMENTS)}")
        self._text = []
        if name == "lexicon":
            self._alphabet = attributes.get("alphabet", "ipa")
        elif name == "lexeme":
            self._graphemes, self._readings = [], {}
        elif name == "phoneme":
            self._phoneme_alphabet = attributes.get("alphabet", self._alphabet)

    def text(self, text: str) -> None:
        self._text.append(text)

    def end(self, name: str) -> None:
        content = " ".join("".join(self._text).split())
        if name == "grapheme":
            self._graphemes.append(content)
        elif name == "alias":
            self._readings.setdefault("alias", content)
        elif name == "phoneme":
            self._readings.setdefault("phoneme", arpabet(content, self._phoneme_alphabet))
        elif name == "lexeme":
            self.entries += [self._entry(grapheme) for grapheme in self._graphemes]

    def _entry(self, grapheme: str) -> Pronunciation:
        alias, phonemes = self._readings.get("alias"), self._readings.get("phoneme")
        checked = pronunciation(grapheme, alias or phonemes or "")
        return Pronunciation(checked.written, alias, phonemes)


def _reading(entry: Pronunciation, suffix: str, *, phonemes: bool) -> str:
    if entry.phonemes is not None and phonemes:
        return tagged(possessive(entry.phonemes) if suffix else entry.phonemes)
    if entry.respelling is None:
        raise TextError(
            f"the lexicon has only phonemes for {entry.written!r}, and this model reads none: add a respelling"
        )
    return entry.respelling + suffix


def _precedence(entry: Pronunciation) -> tuple[int, bool]:
    """Return a sort key: longer words first, and of equally long ones those with capitals, which are more specific."""
    return -len(entry.written), entry.written == _lower(entry.written)


def _first_piece(entry: Pronunciation) -> str:
    match = PIECE.search(_lower(entry.written))
    return "" if match is None else match[0]


def _matches_at(written: str, text: str, lower: str, start: int) -> bool:
    source = lower if written == _lower(written) else text
    if not source.startswith(written, start):
        return False
    if not LETTER.match(written) and start and LETTER.match(text, start - 1):
        return False  # ".NET" does not match in "ASP.NET"
    following = start + len(written)
    return not (ENDS_WITH_LETTER.search(written) and LETTER.match(text, following))


def _lower(text: str) -> str:
    """Return the text in lower case, character by character: positions stay the same."""
    lower = text.lower()
    return (
        lower if len(lower) == len(text) else "".join(each.lower() if len(each.lower()) == 1 else each for each in text)
    )
