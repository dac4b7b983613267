"""Plan a text: markup, lexicon, normalization and splitting. The result is what the model reads, turn by turn.

Needs neither a tokenizer nor a model, so the server can show a plan without asking the engine.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from shoal.errors import NothingToSpeak, TextError
from shoal.speech import SpeechRequest
from shoal.text.clean import check_spoken_length, check_text, clean_text, has_words
from shoal.text.foreign import foreign_language
from shoal.text.lexicon import Lexicon
from shoal.text.markdown import plain_text
from shoal.text.markup.pauses import parse_pauses, unescape
from shoal.text.markup.segments import AS_REQUESTED, Delivery, Passage, Pause, Segment, check_segments
from shoal.text.markup.ssml import is_ssml, parse_ssml
from shoal.text.normalize import normalize
from shoal.text.normalize.languages import NORMALIZERS
from shoal.text.normalize.letter_names import name_letters
from shoal.text.phonemes import SPAN, without_spans
from shoal.text.split import split_dialogue, split_sentences, split_text
from shoal.text.style_tags import S1_TAG, S2_TAG, drop_style_tags
from shoal.text.tokenizer import SPEAKER_TAG, refuse_control_tokens, without_speaker_tags

# Letters below which a sentence shares a turn with the next one: alone, a small model slurs "Yes." and "Stop!".
SHORT_SENTENCE = 7
NO_WORDS = Lexicon()
# Tags that a model reads as such, and that normalization must not change.
TAGS = re.compile(f"{SPAN.pattern}|{SPEAKER_TAG.pattern}")
TAGS_AND_STYLES = re.compile(f"{TAGS.pattern}|{S1_TAG.pattern}|{S2_TAG.pattern}", re.IGNORECASE)


@dataclass(frozen=True)
class TextRules:
    """Text rules of a model: the notations that it reads, and how its texts are split."""

    english_words: bool = False  # only English, spelled out in words: numbers and symbols have to be normalized
    phonemes: bool = False  # reads phoneme tags
    directions: bool = False  # follows free-form directions in brackets
    splits_dialogue: bool = False
    sentence_turns: bool = False
    chunk_bytes: int = 600
    max_characters: int = 20_000
    control_tokens: frozenset[str] = frozenset()  # spellings such as `<|im_end|>`, which are refused


@dataclass(frozen=True, slots=True)
class TurnText:
    """Text of one turn as the model reads it, and the silence after it."""

    text: str
    delivery: Delivery = AS_REQUESTED
    pause_after: float = 0.0  # seconds


@dataclass(frozen=True, slots=True)
class TextPlan:
    turns: tuple[TurnText, ...]
    pause_before: float = 0.0  # seconds

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of the voices that the markup uses."""
        return tuple(dict.fromkeys(turn.delivery.voice for turn in self.turns if turn.delivery.voice is not None))

    @property
    def text(self) -> str:
        """Text as the model reads it, pauses in brackets."""
        return " ".join(self.lines())

    def lines(self) -> list[str]:
        """Return the turns, and the pauses between them in brackets, one per line."""
        parts = [_shown_pause(self.pause_before)]
        for turn in self.turns:
            parts += [turn.text, _shown_pause(turn.pause_after)]
        return list(filter(None, parts))


def plan_text(
    request: SpeechRequest,
    rules: TextRules,
    check: Callable[[str], None] | None = None,
    lexicon: Lexicon | None = None,
) -> TextPlan:
    """Return the turns of a request. `check` raises for text that the model must not get, such as control tokens.

    Without `check`, the control tokens of the rules are refused: all but semantic tokens, which only a tokenizer knows.
    Words of the request's lexicon have precedence over those of `lexicon`.
    `normalize=False` passes the text unchanged, except for SSML that `ssml=True` asks for. Raises TextError if the text
    cannot be spoken.
    """
    check = check or partial(refuse_control_tokens, spellings=rules.control_tokens)
    segments = _parse(request, rules)
    check_segments(segments)
    if rules.english_words and request.normalize:
        _check_language(segments, request.language)
    spoken = list(_spoken(segments, request, rules, check, _readings(request, lexicon)))
    check_spoken_length("".join(each.text for each in _passages(spoken)), max_characters=rules.max_characters)
    return _Planner(rules, request.chunk_bytes or rules.chunk_bytes).plan(spoken)


def _parse(request: SpeechRequest, rules: TextRules) -> list[Segment]:
    """Return the segments of the text, after the checks that concern the text as a whole."""
    text = clean_text(request.text)
    check_text(text, max_characters=rules.max_characters)
    if request.ssml or (request.ssml is None and request.normalize and is_ssml(text)):
        return parse_ssml(text, phonemes=rules.phonemes)
    return parse_pauses(text) if request.normalize else [Passage(text)]


def _check_language(segments: Iterable[Segment], normalize_in: str | None) -> None:
    """Raise TextError for a text that an English model cannot speak; `en` reads any text as English."""
    if normalize_in not in (None, "en"):
        raise TextError(f"this model speaks English only: normalize must be en, not {normalize_in}")
    language = foreign_language("\n".join(each.text for each in _passages(segments))) if normalize_in is None else None
    if language is not None:
        raise TextError(
            f"the text looks like {language}, and this model speaks English only: choose a model that speaks it, or "
            "set normalize to en (or off) to have it read as English"
        )


def _spoken(
    segments: Iterable[Segment],
    request: SpeechRequest,
    rules: TextRules,
    check: Callable[[str], None],
    lexicon: Lexicon,
) -> Iterator[Segment]:
    """Yield the segments with the words that the model reads; passages without a word are left out."""
    for segment in segments:
        if isinstance(segment, Passage):
            if not has_words(_words(segment.text, request, rules)):
                continue
            check(without_spans(segment.text) if rules.phonemes else segment.text)
            segment = Passage(_spoken_text(segment.text, lexicon, request, rules), segment.delivery)
        yield segment


def word_reading(request: SpeechRequest, rules: TextRules, lexicon: Lexicon | None) -> Callable[[str], list[str]]:
    """Return the function that reads one word of a request alone, as words that the model reads."""
    readings = _readings(request, lexicon)

    def read(word: str) -> list[str]:
        try:
            return _spoken_text(word, readings, request, rules).split()
        except TextError:  # punctuation alone, for instance
            return []

    return read


def _readings(request: SpeechRequest, lexicon: Lexicon | None) -> Lexicon:
    """Return the words of the request's lexicon, which have precedence, and those of `lexicon`."""
    return Lexicon(request.lexicon, lexicon) if request.lexicon else lexicon or NO_WORDS


def _words(text: str, request: SpeechRequest, rules: TextRules) -> str:
    """Return the text without speaker tags, and without style tags for a model that does not know them."""
    text = without_speaker_tags(text)
    return drop_style_tags(text) if rules.english_words and request.normalize else text


def _spoken_text(text: str, lexicon: Lexicon, request: SpeechRequest, rules: TextRules) -> str:
    if not request.normalize:
        return text
    text = lexicon.apply(unescape(text), phonemes=rules.phonemes)
    if rules.english_words:
        return name_letters(normalize(text))
    text = _between(TAGS, text, plain_text)
    return text if request.language is None else _between(TAGS_AND_STYLES, text, NORMALIZERS[request.language])


def _between(tags: re.Pattern[str], text: str, change: Callable[[str], str]) -> str:
    """Return the text with `change` applied between the tags. Spaces around the pieces stay as they are."""
    parts, last = [], 0
    for match in tags.finditer(text):
        parts += [_changed(text[last : match.start()], change), match[0]]
        last = match.end()
    return "".join((*parts, _changed(text[last:], change)))


def _changed(text: str, change: Callable[[str], str]) -> str:
    content = text.strip()
    if not has_words(content):
        return text
    start = text.index(content[0])
    return text[:start] + change(content) + text[start + len(content) :]


@dataclass
class _Planner:
    """Collects turns and the pauses between them."""

    rules: TextRules
    chunk_bytes: int
    turns: list[TurnText] = field(default_factory=list)
    pause_before: float = 0.0

    def plan(self, segments: Iterable[Segment]) -> TextPlan:
        for segment in segments:
            if isinstance(segment, Pause):
                self._pause(segment.seconds)
            else:
                self.turns += [TurnText(turn, segment.delivery) for turn in self._split(segment.text)]
        if not self.turns:
            raise NothingToSpeak("the text has no letter or digit: there is nothing to speak")
        return TextPlan(tuple(self.turns), self.pause_before)

    def _pause(self, seconds: float) -> None:
        if self.turns:
            self.turns[-1] = replace(self.turns[-1], pause_after=self.turns[-1].pause_after + seconds)
        else:
            self.pause_before += seconds

    def _split(self, text: str) -> list[str]:
        """Split dialogue by speaker turns, as S2 was trained, and other text by sentences."""
        if self.rules.splits_dialogue and SPEAKER_TAG.search(text):
            return split_dialogue(text, self.chunk_bytes)
        if self.rules.sentence_turns:
            return split_sentences(text, self.chunk_bytes, SHORT_SENTENCE)
        return split_text(text, self.chunk_bytes)


def _passages(segments: Iterable[Segment]) -> Iterator[Passage]:
    return (each for each in segments if isinstance(each, Passage))


def _shown_pause(seconds: float) -> str:
    return f"[pause:{seconds:g}s]" if seconds else ""
