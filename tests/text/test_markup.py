"""Pauses, escapes and SSML: what a plan contains, and what is refused with which message."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import TextError
from shoal.speech import SpeechRequest
from shoal.text.markup.say_as import say_as
from shoal.text.markup.segments import AS_REQUESTED
from shoal.text.markup.ssml import is_ssml
from shoal.text.plan import TextRules, TurnText, plan_text

NANO = TextRules(english_words=True, sentence_turns=True, chunk_bytes=90)
S2 = TextRules(phonemes=True, splits_dialogue=True)


def read(text: str, rules: TextRules = NANO, *, ssml: bool | None = None, normalize: bool = True) -> str:
    """Return the text as the model reads it, pauses in brackets."""
    return plan_text(SpeechRequest(text, ssml=ssml, normalize=normalize), rules).text


PAUSES = [
    ("Hello.[pause:0.8s] There.", "Hello. [pause:0.8s] There."),
    ("Hello. [pause: 800 ms] There.", "Hello. [pause:0.8s] There."),
    ('One<break time="1.5s" />two', "One [pause:1.5s] two"),
    ("One <break time='250ms'></break> two", "One [pause:0.25s] two"),
    ('One <break strength="strong"/> two <break/> three', "One [pause:1s] two [pause:0.5s] three"),
    ("[pause:1s] Late. [pause:2s]", "[pause:1s] Late. [pause:2s]"),
    ("One. [pause:1s] ... [pause:0.5s] Two.", "One. [pause:1.5s] Two."),
]


@pytest.mark.parametrize(("text", "expected"), PAUSES)
@pytest.mark.parametrize("rules", [NANO, S2], ids=["nano", "s2"])
def test_pauses_are_taken_out_of_the_text(text: str, expected: str, rules: TextRules) -> None:
    assert read(text, rules) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pause:soon] Hi.", "[pause:soon]: 'soon' is not a duration: write 0.8s or 800ms"),
        ("[pause:1] Hi.", "[pause:1]: '1' is not a duration: write 0.8s or 800ms"),
        ("[pause:11s] Hi.", "[pause:11s]: a pause of 11 s is too long: the limit is 10 s"),
        ('<break time="x"/> Hi.', "<break time=\"x\"/>: 'x' is not a duration: write 0.8s or 800ms"),
        ('<break strength="huge"/> Hi.', "'huge' is not a strength: use none, x-weak, weak, medium, strong, x-strong"),
        ("<break size='1'/> Hi.", "<break size='1'/>: break takes the attributes time and strength, in quotes"),
        ("[pause:10s]" * 13 + "Hi.", "the pauses of the text take 130 s, the limit is 120 s"),
        ("[pause:1s]", "the text has no letter or digit: there is nothing to speak"),
        ("[whisper] (excited)", "the text has no letter or digit: there is nothing to speak"),
    ],
)
def test_invalid_pauses_are_refused(text: str, message: str) -> None:
    with pytest.raises(TextError) as raised:
        read(text)
    assert message in str(raised.value)


def test_brackets_can_be_escaped() -> None:
    assert read(r"Write \[pause:1s] here.", S2) == "Write pause:1s here."
    assert read(r"The tag \[whisper\] and \(excited).") == "The tag whisper and excited."
    assert read("[whisper] Quiet. (excited) Loud.") == "Quiet. Loud."
    assert read("[whisper] Quiet. (excited) Loud.", S2) == "[whisper] Quiet. (excited) Loud."


@pytest.mark.parametrize("text", ["A [pause:1s] b.", "<speak>A</speak>", "## 5 *b* [c](d) &amp; \\[x]", "A <break/> b"])
@pytest.mark.parametrize("rules", [NANO, S2], ids=["nano", "s2"])
def test_without_normalization_the_text_stays_as_it_is(text: str, rules: TextRules) -> None:
    assert plan_text(SpeechRequest(text, normalize=False), rules).turns == (TurnText(text),)


def test_markdown_is_read_as_plain_text_by_multilingual_models() -> None:
    assert read("# Hallo\n\n**5** [Links](x) <|speaker:1|>*Ja*.", S2).endswith("5 Links\n<|speaker:1|>Ja.")
    assert read("我有 5 个 *苹果*。", S2) == "我有 5 个 苹果。"


SSML = """<speak version="1.1" xmlns="http://www.w3.org/2001/10/synthesis" xml:lang="en-US">
  Hello <break time="1s"/>
  <p><s>One</s><s>Two</s></p>
  <sub alias="World Wide Web">WWW</sub>
  <say-as interpret-as="characters">aB1</say-as>.
  <prosody rate="slow" volume="+3dB">Slowly, <voice name="slt">she</voice></prosody>
  said &amp; left.
</speak>"""


def test_ssml_becomes_turns_with_their_delivery() -> None:
    plan = plan_text(SpeechRequest(SSML), NANO)
    assert plan.text == ("Hello [pause:1s] One. Two. World Wide Web ay-bee one. Slowly, she said and left.")
    delivered = {turn.text: turn.delivery for turn in plan.turns if turn.delivery != AS_REQUESTED}
    assert {text: (each.voice, each.rate, each.decibels) for text, each in delivered.items()} == {
        "Slowly,": (None, 0.75, 3.0),
        "she": ("slt", 0.75, 3.0),
    }
    assert plan.voices == ("slt",)


def test_a_leading_speak_element_or_the_field_switches_ssml_on() -> None:
    assert is_ssml('<?xml version="1.0"?>\n<speak>a</speak>')
    assert not is_ssml("<speaker>a</speaker>")
    assert read("<speak>A<break time='1s'/>b</speak>") == "A [pause:1s] bee"
    assert read("<speak>5 b</speak>", ssml=True, normalize=False) == "5 b"
    assert "speak" not in read("<speak>A</speak>", ssml=False)  # HTML tags are not read
    with pytest.raises(TextError, match=r"^SSML line 1, column 1: "):
        read("Hello.", ssml=True)


def test_phonemes_are_tags_for_models_that_read_them_and_words_for_others() -> None:
    text = '<speak>I like <phoneme alphabet="ipa" ph="təˈmɑːtəʊz">tomatoes</phoneme>.</speak>'
    assert read(text, S2) == "I like <|phoneme_start|>T AH0 M AA1 T OW0 Z<|phoneme_end|>."
    assert read(text) == "I like tomatoes."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<speak>a\n<audio src='x'/></speak>", "line 2, column 1: <audio> is not supported: use speak, p, s"),
        ("<speak>a</speak", "line 1, column 9: unclosed token"),
        ("<speak>a</p></speak>", "line 1, column 11: mismatched tag"),
        ("<speak>AT&T</speak>", "line 1, column 12: not well-formed (invalid token): write &amp; for &"),
        ("<speak>a<s>b</speak>", "mismatched tag: </s> is expected here"),
        ("<speak>a<s>b</s>", "<speak> is not closed: add </speak>"),
        ("<speak>a&nbsp;b</speak>", "undefined entity: write the character itself"),
        ("<speak>&nbsp;a</speak>", "line 1, column 8: undefined entity"),
        ("<speak>\n  <break time='x'/>a</speak>", "line 2, column 3: 'x' is not a duration"),
        (
            "<speak><prosody rate='300%'>a</prosody></speak>",
            "column 8: a rate of 300% is out of range: use 50%",
        ),
        ("<speak><prosody volume='+30dB'>a</prosody></speak>", "a volume of +30 dB is out of range"),
        ("<speak><prosody pitch='high'>a</prosody></speak>", "<prosody> does not support the attribute 'pitch'"),
        ("<speak><voice>a</voice></speak>", "column 8: <voice> needs the attribute name"),
        ("<speak><say-as interpret-as='ordinal'>x</say-as></speak>", "'x' is not a whole number"),
        ("<speak><sub alias='b'><p>a</p></sub></speak>", "<sub> takes text only, not <p>"),
        ("<speak><speak>a</speak></speak>", "a document is one <speak> element"),
        ("<speak><phoneme ph='ʔʘ'>a</phoneme></speak>", "'ʔ' in 'ʔʘ' is not a sound of English"),
        ("<speak>" + "<p>" * 40, "line 1, column 101: elements are nested more than 32 deep"),
    ],
)
def test_malformed_ssml_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(TextError) as raised:
        read(text, ssml=True)
    assert str(raised.value).startswith("SSML line ")
    assert message in str(raised.value)


def test_entities_are_never_expanded() -> None:
    bomb = '<!DOCTYPE s [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><speak>&b;</speak>'
    outside = '<!DOCTYPE s SYSTEM "file:///etc/passwd"><speak>a</speak>'
    for text in (bomb, outside):
        with pytest.raises(TextError, match="document types and entity declarations are not allowed"):
            read(text, ssml=True)


@pytest.mark.parametrize(
    ("text", "interpret_as", "format", "words"),
    [
        ("aB-1", "characters", "", "A B dash one"),
        ("2024", "digits", "", "two zero two four"),
        ("21st", "ordinal", "", "twenty-first"),
        ("1,205", "cardinal", "", "one thousand two hundred five"),
        ("3/5/2024", "date", "mdy", "March 5, 2024"),
        ("5.3.2024", "date", "dmy", "March 5, 2024"),
        ("2024-03-05", "date", "", "March 5, 2024"),
        ("03/2024", "date", "my", "March 2024"),
        ("5", "date", "d", "the fifth"),
        ("+1 (555) 0199", "telephone", "", "plus one, five five five, zero one nine nine"),
    ],
)
def test_say_as_reads_a_text_as_what_it_is(text: str, interpret_as: str, format: str, words: str) -> None:
    assert say_as(text, interpret_as, format) == words


@pytest.mark.parametrize(
    ("text", "interpret_as", "format"),
    [
        ("13/5/2024", "date", "mdy"),
        ("5.3", "date", "dmy"),
        ("x", "digits", ""),
        ("5", "measure", ""),
        ("1" * 300, "digits", ""),
    ],
)
def test_say_as_refuses_what_does_not_fit(text: str, interpret_as: str, format: str) -> None:
    with pytest.raises(TextError):
        say_as(text, interpret_as, format)


MARKS = [
    "[pause:", "[pause:1s]", "]", "<break ", "<break time='1s'/>", "\\[", "\\(", ")", "<speak>", "</speak>", "<p>",
    "'s", "<|speaker:0|>", "<|phoneme_start|>", "<|phoneme_end|>", "&amp;", "**", "[a](b)", "word ", "5 ", "\n\n", "李",
]  # fmt: skip


@settings(max_examples=60)
@given(st.lists(st.sampled_from(MARKS), max_size=12), st.sampled_from([NANO, S2]))
def test_any_markup_is_planned_or_refused_clearly(parts: list[str], rules: TextRules) -> None:
    text = "".join(parts)
    try:
        plan = plan_text(SpeechRequest(text), rules)
    except TextError:
        return
    assert plan.turns
    assert sum(len(turn.text) for turn in plan.turns) <= 40 * (len(text) + 1)


@pytest.mark.parametrize(
    "mark", ["[pause:", "<break ", "\\[a", "(a", "<|phoneme_start|>A", "[pause:1ms]", "<|speaker:0|>"]
)
def test_hostile_repetition_is_planned_in_linear_time(mark: str) -> None:
    """Quadratic time would take minutes for these texts."""
    with contextlib.suppress(TextError):
        plan_text(SpeechRequest("a " + mark * (20_000 // len(mark) - 1)), S2)
