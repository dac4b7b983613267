import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.text.markdown import plain_text, strip_tags
from tests.cpu_limit import cpu_limit

CASES = [
    ("Plain text. With two sentences.", "Plain text. With two sentences."),
    ("## Heading\n\nSome *emphasised* and **bold** text.", "Heading.\n\nSome emphasised and bold text."),
    ("A [link](https://example.com/x) and `code`.", "A link and code."),
    ("- apples\n- pears\n- plums!", "apples.\n\npears.\n\nplums!"),
    ("* a\n  * b\n  * c\n* d", "a.\n\nb.\n\nc.\n\nd."),
    ("1. Preheat the oven\n2. Mix flour\n\nDone.", "1. Preheat the oven.\n\n2. Mix flour.\n\nDone."),
    ("2024. That was the year.", "2024. That was the year."),
    ("- [x] done\n- [ ] todo", "done.\n\ntodo."),
    ("| Name | Age |\n|---|---|\n| Ann | 5 |\n| Bob | |", "Name: Ann, Age: 5.\n\nName: Bob."),
    ("> quoted text", "quoted text"),
    ("> 5 is more", "> 5 is more"),
    ("```python\nprint('x')\n```\nAfter", "print('x').\n\nAfter"),
    ("Title\n===\nText", "Title.\n\nText"),
    ("One\n\n---\n\nTwo", "One\n\nTwo"),
    ("![a cat](cat.png) sits", "a cat sits"),
    ("~~gone~~ kept", "gone kept"),
    ("use <https://example.com> now", "use https://example.com now"),
    ("A note[^1].\n\n[^1]: The note.", "A note.\n\nThe note."),
    ("[Alice]: Hello there", "[Alice]: Hello there"),
    ("[the site][1]\n\n[1]: https://example.com", "the site"),
    # what only looks like markup
    ("5*3*2 and 2 * 3 * 4", "5*3*2 and 2 * 3 * 4"),
    ("snake_case_name", "snake_case_name"),
    ("a < b and c > d", "a < b and c > d"),
    ("Let's go! #winning", "Let's go! #winning"),
    ("[whisper] be quiet (excited) wow", "[whisper] be quiet (excited) wow"),
    ("<|speaker:0|>Hello *there*\n<|speaker:1|>Hi", "<|speaker:0|>Hello there\n<|speaker:1|>Hi"),
    ("Line one\nLine two", "Line one\nLine two"),
    ("C:\\path\\file", "C:\\path\\file"),
    # HTML
    ("<b>Hi</b> there<br>you &amp; me", "Hi there,\nyou & me"),
    ("<p>One</p><script>alert(1)</script><p>Two</p>", "One\n \nTwo"),
]


@pytest.mark.parametrize(("written", "plain"), CASES)
def test_markup_becomes_text_that_can_be_read_aloud(written: str, plain: str) -> None:
    assert plain_text(written) == plain


WORDS = st.lists(st.text(alphabet="abcdefghij", min_size=1, max_size=6), min_size=1, max_size=12)
MARKS = st.sampled_from(
    ["*", "**", "_", "`", "[", "](x)", "# ", "- ", "> ", "~~", "\n", "\n\n", " ", "| ", "<b>", "&amp;"],
)


@given(WORDS, st.lists(MARKS, min_size=12, max_size=12))
def test_no_word_is_lost(words: list[str], marks: list[str]) -> None:
    text = "".join(f"{mark}{word} " for word, mark in zip(words, marks, strict=False))
    left = plain_text(text)
    places = [left.find(word) for word in words]
    assert all(place >= 0 for place in places), (text, left)


HOSTILE = [
    "[",
    "![[",
    "[a](",
    "*a ",
    "a**b",
    "_a_",
    "`a``b",
    "<",
    "<a ",
    "&",
    "~~a",
    "\\",
    "|a",
    "- ",
    "> ",
    "# a\n",
    "[a]: b\n",
]


@pytest.mark.parametrize("unit", HOSTILE)
def test_hostile_markup_is_parsed_in_bounded_time(unit: str) -> None:
    """Linear time takes a quarter of a second at this length; quadratic time would exceed the limit."""
    with cpu_limit(10):
        assert isinstance(plain_text(unit * (20_000 // len(unit))), str)


@pytest.mark.timeout(120)
def test_elements_that_are_never_closed_are_removed_in_linear_time() -> None:
    """Searching the end of each element from its start would take half an hour at this length."""
    assert strip_tags("<style>" * 200_000 + "Hi.") == "Hi."


def test_the_words_after_a_script_that_is_never_closed_are_read() -> None:
    assert strip_tags("<script> tags <style>p {}</style>run code.") == "tags  run code."
