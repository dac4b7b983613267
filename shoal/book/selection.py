"""Parse selections of chapters and sentences: `--only 2-5,7` and `--redo 3:17`."""

import re

from shoal.book.work import PlannedChapter, PlannedSentence, WorkState, seed_of
from shoal.errors import InvalidRequest

RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
PLACE = re.compile(r"(\d{1,6}):(\d{1,6})")


def select_chapters(chapters: list[PlannedChapter], only: str | None) -> list[PlannedChapter]:
    """Return the chapters of `--only`, numbers and ranges with commas; all without it. Raises InvalidRequest."""
    if only is None:
        return chapters
    wanted: set[int] = set()
    for part in only.split(","):
        match = RANGE.fullmatch(part.strip())
        if match is None:
            raise InvalidRequest(f"--only takes chapter numbers and ranges, such as 3 or 2-5,7, not {only!r:.80}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= len(chapters):
            raise InvalidRequest(
                f"--only {part.strip()}: the book has chapters 1 to {len(chapters)}; --list shows them"
            )
        wanted.update(range(first, last + 1))
    return [chapter for chapter in chapters if chapter.number in wanted]


def find_sentence(chapters: list[PlannedChapter], place: str) -> PlannedSentence:
    """Return the sentence at CHAPTER:SENTENCE, both from 1. Raises InvalidRequest."""
    match = PLACE.fullmatch(place.strip())
    if match is None:
        raise InvalidRequest(f"--redo takes CHAPTER:SENTENCE, such as 3:17, not {place!r:.80}")
    chapter, sentence = int(match[1]), int(match[2])
    if not 1 <= chapter <= len(chapters):
        raise InvalidRequest(f"--redo {place}: the book has chapters 1 to {len(chapters)}; --list shows them")
    sentences = chapters[chapter - 1].sentences
    if not 1 <= sentence <= len(sentences):
        raise InvalidRequest(
            f"--redo {place}: chapter {chapter} has sentences 1 to {len(sentences)}; --list --only {chapter} shows them"
        )
    return sentences[sentence - 1]


def redo(state: WorkState, chapters: list[PlannedChapter], places: list[str], seed: int | None) -> None:
    """Give sentences, and those that are spoken together with them, another seed: `seed`, or the one after their last.

    Raises InvalidRequest.
    """
    for keys in dict.fromkeys(find_sentence(chapters, place).together for place in places):
        used = seed_of(keys, state.redone, state.seed)
        state.redone |= dict.fromkeys(keys, used + 1 if seed is None else seed)
