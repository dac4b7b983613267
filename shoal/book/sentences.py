"""Divide chapters into numbered sentences, and sentences into pieces that one voice speaks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.book.document import Block, Chapter
from shoal.book.readers.quotes import Span, quoted_spans
from shoal.errors import TextError
from shoal.text.clean import has_words
from shoal.text.normalize.fold import check_script
from shoal.text.plan import SHORT_SENTENCE
from shoal.text.split import letters, split_sentences

MAX_SENTENCE_BYTES = 1_000  # a longer sentence is divided at its clauses
ENDERS = (".", "!", "?", "…", "。", "！", "？")
TERMINAL = (*ENDERS, ":", ";", ",")
QUOTES = "\"“”„«»「」『』‘’' "
CLOSERS = "\"'”’)]»」』"

# Seconds of silence after each kind of text.
PIECE_PAUSE, SENTENCE_PAUSE, PARAGRAPH_PAUSE, HEADING_PAUSE, BREAK_PAUSE = 0.1, 0.35, 0.7, 1.2, 1.8


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one voice speaks without interruption."""

    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Sentence:
    number: int  # within the chapter, from 1
    text: str  # as written
    pieces: tuple[Piece, ...]
    block: int  # index of its block within the chapter
    heading: bool
    pause: float  # seconds of silence after it


def chapter_sentences(chapter: Chapter, *, quotes: bool) -> list[Sentence]:
    """Return the sentences of a chapter in order; with `quotes`, quoted speech is a piece of its own."""
    sentences: list[Sentence] = []
    for index, block in enumerate(chapter.blocks):
        following = chapter.blocks[index + 1] if index + 1 < len(chapter.blocks) else None
        found = list(_block_sentences(block, quotes))
        for place, (text, pieces) in enumerate(found, 1):
            pause = _pause_after(block, following) if place == len(found) else SENTENCE_PAUSE
            sentences.append(Sentence(len(sentences) + 1, text, pieces, index, block.heading, pause))
    return sentences


def spoken_together(sentences: Sequence[Sentence], *, english: bool = False) -> list[list[Sentence]]:
    """Return groups of consecutive sentences: a short one and the next of its paragraph, if one voice speaks both.

    A small model slurs short sentences such as "Stop!" if it speaks them alone. Groups do not cross paragraphs. For an
    `english` model, a sentence in another script stays alone: the model rejects it, and would reject its group.
    """
    groups: list[list[Sentence]] = []
    for sentence in sentences:
        joined = bool(groups) and _joins(groups[-1], sentence)
        if joined and not (english and _in_other_script(groups[-1][-1], sentence)):
            groups[-1].append(sentence)
        else:
            groups.append([sentence])
    return groups


def _joins(group: list[Sentence], following: Sentence) -> bool:
    last = group[-1]
    one_voice = len(last.pieces) == 1 and last.pieces[0].quoted == following.pieces[0].quoted
    length = sum(letters(each.text, (0, len(each.text))) for each in group)
    return one_voice and last.block == following.block and length < SHORT_SENTENCE


def _in_other_script(*sentences: Sentence) -> bool:
    """Return whether an English model refuses the script of one of them."""
    try:
        check_script(" ".join(each.text for each in sentences))
    except TextError:
        return True
    return False


def _pause_after(block: Block, following: Block | None) -> float:
    if following is not None and following.after_break:
        return BREAK_PAUSE
    if block.heading:
        return HEADING_PAUSE
    # A block without a final mark, such as a line of verse or a list entry, continues in the next block.
    return PARAGRAPH_PAUSE if _ends_sentence(block.text) else SENTENCE_PAUSE


def _block_sentences(block: Block, quotes: bool) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    spans = quoted_spans(block.text) if quotes and not block.heading else []
    at = 0
    for text in split_sentences(block.text, MAX_SENTENCE_BYTES):
        if not has_words(text):
            continue
        start = block.text.index(text, at)
        at = start + len(text)
        inside = [(max(0, first - start), min(len(text), last - start)) for first, last in spans]
        pieces = tuple(_pieces(text, [span for span in inside if span[0] < span[1]]))
        yield text, pieces if len(pieces) > 1 or quotes else (Piece(_spoken(text)),)


def _pieces(text: str, quoted: list[Span]) -> Iterator[Piece]:
    """Yield the parts outside and inside the quoted spans; parts without a word are left out."""
    at = 0
    for start, end in [*quoted, (len(text), len(text))]:
        for part, inside in ((text[at:start], False), (text[start:end], True)):
            if has_words(part):
                last = not has_words(text[start:] if not inside else text[end:])
                yield Piece(_spoken(part.strip(QUOTES) if quoted else part, "." if last else ","), inside)
        at = end


def _spoken(text: str, mark: str = ".") -> str:
    """Return the text, with `mark` added if it has no final mark: without one, models do not stop."""
    text = text.strip()
    return text if text.rstrip(CLOSERS).endswith(TERMINAL) else f"{text}{mark}"


def _ends_sentence(text: str) -> bool:
    return text.rstrip(CLOSERS).endswith(ENDERS)
