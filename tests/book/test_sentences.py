"""Sentences of a chapter, and the pieces that each voice speaks."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.book.document import Block, Book, Chapter
from shoal.book.readers.quotes import quoted_spans
from shoal.book.selection import find_sentence, redo, select_chapters
from shoal.book.sentences import (
    BREAK_PAUSE,
    HEADING_PAUSE,
    PARAGRAPH_PAUSE,
    SENTENCE_PAUSE,
    chapter_sentences,
    spoken_together,
)
from shoal.book.work import Narration, Speaker, WorkState, plan_book, unique_pieces
from shoal.errors import InvalidRequest
from tests.book.prose import novel

NARRATION = Narration("model", "", Speaker("n"), Speaker("q"))


def chapter(*paragraphs: str) -> Chapter:
    return Chapter("T", tuple(Block(text) for text in paragraphs))


def pieces(paragraph: str) -> list[list[tuple[str, bool]]]:
    found = chapter_sentences(chapter(paragraph), quotes=True)
    return [[(piece.text, piece.quoted) for piece in each.pieces] for each in found]


@pytest.mark.parametrize(
    ("paragraph", "quoted"),
    [
        ("“Go,” he said. “Now.”", ["“Go,”", "“Now.”"]),
        ('He said "go" to her 6" dog.', ['"go"']),
        ("«Oui», dit-il.", ["«Oui»"]),
        ("„Ja“, sagte er.", ["„Ja“"]),
        ("“And so on", ["“And so on"]),
        ("‘Don’t go,’ said the boys’ father. ‘Please!’", ["‘Don’t go,’", "‘Please!’"]),
        ("The boys’ room isn’t ‘it’ at all.", []),
        ("“He said ‘no,’” she said.", ["“He said ‘no,’”"]),
    ],
)
def test_quoted_speech_is_found(paragraph: str, quoted: list[str]) -> None:
    assert [paragraph[start:end] for start, end in quoted_spans(paragraph)] == quoted


def test_a_sentence_is_divided_between_the_voices() -> None:
    assert pieces("“Come,” he said, “we must go.” She stayed.") == [
        [("Come,", True), ("he said,", False), ("we must go.", True)],
        [("She stayed.", False)],
    ]
    assert pieces("He said “go” now") == [[("He said,", False), ("go,", True), ("now.", False)]]
    assert pieces("“One. Two,” he said.") == [[("One.", True)], [("Two,", True), ("he said.", False)]]


def test_without_a_second_voice_a_sentence_is_one_piece() -> None:
    found = chapter_sentences(chapter("“Come,” he said, “we must go.” A dash—"), quotes=False)
    assert [[piece.text for piece in each.pieces] for each in found] == [
        ["“Come,” he said, “we must go.”"],
        ["A dash—."],
    ]


def test_pauses_follow_the_structure_of_the_text() -> None:
    verse = Block("A line of verse,", after_break=True)
    blocks = (Block("Title", heading=True), Block("It was. It is."), verse, Block("and its end."), Block("…"))
    found = chapter_sentences(Chapter("T", blocks), quotes=False)
    assert [(each.number, each.text, each.pause) for each in found] == [
        (1, "Title", HEADING_PAUSE),
        (2, "It was.", SENTENCE_PAUSE),
        (3, "It is.", BREAK_PAUSE),
        (4, "A line of verse,", SENTENCE_PAUSE),
        (5, "and its end.", PARAGRAPH_PAUSE),
    ]


def test_no_word_of_a_novel_is_lost_or_repeated() -> None:
    for title, paragraphs in novel(3_000, 2).items():
        for quotes in (False, True):
            found = chapter_sentences(chapter(*paragraphs), quotes=quotes)
            spoken = " ".join(piece.text for each in found for piece in each.pieces)
            assert words(spoken) == words(" ".join(paragraphs)), title
            assert " ".join(each.text for each in found) == " ".join(paragraphs)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=list("ab1 .,!?\n\"'“”‘’«»„—…-"), max_size=80))
def test_no_letter_of_any_text_is_lost_or_moved(text: str) -> None:
    for quotes in (False, True):
        found = chapter_sentences(chapter(text), quotes=quotes)
        spoken = "".join(piece.text for each in found for piece in each.pieces)
        assert [c for c in spoken if c.isalnum()] == [c for c in text if c.isalnum()]
        assert all(any(c.isalnum() for c in piece.text) for each in found for piece in each.pieces)


def words(text: str) -> list[str]:
    return [word for word in text.translate(str.maketrans("", "", "“”.,;—")).split() if word]


def test_what_changes_the_audio_changes_the_id_and_nothing_else_does() -> None:
    book = Book("B", (chapter("One here. “Two,” he said. One here."), chapter("Three.")))
    first = unique_pieces(plan_book(book, NARRATION, {}))
    assert len(first) == 4, "the sentence that occurs twice is spoken once"
    assert unique_pieces(plan_book(book, NARRATION, {})) == first
    longer = Book("B", (chapter("New. One here. “Two,” he said. One here."), chapter("Three.")))
    assert len(unique_pieces(plan_book(longer, NARRATION, {})).keys() - first.keys()) == 1
    for other in (
        Narration("model 2", "", Speaker("n"), Speaker("q")),
        Narration("model", "lexicon", Speaker("n"), Speaker("q")),
        Narration("model", "", Speaker("n"), Speaker("q"), seed=1),
    ):
        assert not unique_pieces(plan_book(book, other, {})).keys() & first.keys()
    recorded_anew = Narration("model", "", Speaker("n"), Speaker("q", "other recording"))
    assert len(unique_pieces(plan_book(book, recorded_anew, {})).keys() & first.keys()) == 3


def together(*paragraphs: str, quotes: bool = True) -> list[list[str]]:
    found = chapter_sentences(chapter(*paragraphs), quotes=quotes)
    return [[sentence.text for sentence in group] for group in spoken_together(found)]


def test_a_short_sentence_is_spoken_with_the_next_one_of_its_paragraph_and_voice() -> None:
    assert together("Stop! Come back here. It was late. No.") == [
        ["Stop!", "Come back here."],
        ["It was late."],
        ["No."],  # the last one of a paragraph
    ]
    assert together("No. Yes. It may be so.") == [["No.", "Yes.", "It may be so."]]
    assert together("Stop!", "Come back here.") == [["Stop!"], ["Come back here."]]
    assert together("“Stop!” It was late. “Oh. Is it?” he said.") == [
        ["“Stop!”"],
        ["It was late."],
        ["“Oh.", "Is it?” he said."],
    ]
    assert together("“Stop!” It was late.", quotes=False) == [["“Stop!”", "It was late."]]


def test_sentences_that_are_spoken_together_are_parts_of_one_text_and_redone_together() -> None:
    joining = replace(NARRATION, joins_short=True)
    book = Book("B", (chapter("It rains here. “Oh. Is it?” he said."),))
    chapters = plan_book(book, joining, {})
    alone, short, following = chapters[0].sentences
    assert (alone.pieces[0].part, alone.together) == (None, (alone.key,))
    assert short.pieces[0].id == following.pieces[0].id
    assert [piece.text for piece in following.pieces] == ["Oh. Is it?", "he said."]
    parts = [each.pieces[0].part for each in (short, following)]
    assert parts == [(0, 4), (4, 10)]
    assert len(unique_pieces(chapters)) == 3
    state = WorkState()
    redo(state, chapters, ["1:3"], None)
    assert state.redone == {short.key: 1, following.key: 1}
    redone = plan_book(book, joining, state.redone)[0].sentences
    assert [each.pieces[0].seed for each in redone] == [0, 1, 1]
    redo(state, chapters, ["1:2", "1:3"], None)
    assert state.redone == {short.key: 2, following.key: 2}, "one seed further for both"


def test_sentences_that_were_redone_are_still_spoken_together_after_an_edit() -> None:
    joining, state = replace(NARRATION, joins_short=True), WorkState()

    def pieces(*paragraphs: str) -> list[tuple[str, int]]:
        planned = plan_book(Book("B", (chapter(*paragraphs),)), joining, state.redone)
        return [(piece.text, piece.seed) for piece in unique_pieces(planned).values()]

    redo(state, plan_book(Book("B", (chapter("No. Come back here."),)), joining, {}), ["1:2"], 7)
    assert pieces("No. Come back now.") == [("No. Come back now.", 7)]
    # The key of the short sentence moves on to the one that was added, that of the long one does not.
    assert pieces("No. Look at it.", "No. Come back here.") == [("No. Look at it.", 7), ("No. Come back here.", 7)]
    edited = plan_book(Book("B", (chapter("No. Come back now."),)), joining, {})
    redo(state, edited, ["1:2"], None)
    assert pieces("No. Come back now.") == [("No. Come back now.", 8)]


def test_a_sentence_in_another_script_is_spoken_alone_by_an_english_model() -> None:
    """The model refuses it, and would refuse the sentences that are spoken with it."""
    book = Book("B", (chapter("No. We go. 日! Oh. It may be so."),))
    for english, expected in (
        (True, ["No. We go.", "日!", "Oh. It may be so."]),
        (False, ["No. We go. 日!", "Oh. It may be so."]),
    ):
        joining = replace(NARRATION, joins_short=True, english=english)
        assert [piece.text for piece in unique_pieces(plan_book(book, joining, {})).values()] == expected


def test_one_sentence_is_redone_also_after_the_text_before_it_has_changed() -> None:
    book = Book("B", (chapter("Same here. Same here."),))
    chapters, state = plan_book(book, NARRATION, {}), WorkState(seed=4)
    redo(state, chapters, ["1:2"], None)
    redo(state, chapters, ["1:2"], None)
    assert list(state.redone.values()) == [6]
    planned = plan_book(Book("B", (chapter("New. Same here. Same here."),)), NARRATION, state.redone)
    assert [each.pieces[0].seed for each in planned[0].sentences] == [0, 0, 6]
    redo(state, chapters, ["1:1"], 9)
    assert sorted(state.redone.values()) == [6, 9]


@pytest.mark.parametrize("only", ["0", "3", "2-1", "x", "", "1,,2"])
def test_chapters_that_do_not_exist_are_refused(only: str) -> None:
    chapters = plan_book(Book("B", (chapter("A."), chapter("B."))), NARRATION, {})
    assert [each.number for each in select_chapters(chapters, "1-2, 2")] == [1, 2]
    with pytest.raises(InvalidRequest, match="--only"):
        select_chapters(chapters, only)


@pytest.mark.parametrize("place", ["0:1", "2:1", "1:2", "1", "a:b"])
def test_sentences_that_do_not_exist_are_refused(place: str) -> None:
    chapters = plan_book(Book("B", (chapter("A."),)), NARRATION, {})
    assert find_sentence(chapters, "1:1").sentence.text == "A."
    with pytest.raises(InvalidRequest, match="--redo"):
        find_sentence(chapters, place)
