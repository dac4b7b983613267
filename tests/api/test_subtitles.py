import json
from pathlib import Path

import pytest

from shoal.api.subtitles import cues, scaled, subtitle_format, to_json, to_srt, to_vtt
from shoal.errors import InvalidRequest
from shoal.speech import Word

WORDS = (
    Word("Salt", 0.0, 0.3, 0, 4),
    Word("&", 0.4, 0.5, 5, 6),
    Word("water.", 0.55, 1.5, 7, 13),
    Word("你", 3661.6, 3661.8, 14, 15),
    Word("好。", 3661.8, 3662.0, 15, 17),
)


def test_subtitles_end_with_sentences_and_keep_the_spaces_of_the_text() -> None:
    assert to_srt(WORDS) == (
        "1\n00:00:00,000 --> 00:00:01,500\nSalt & water.\n\n2\n01:01:01,600 --> 01:01:02,000\n你好。\n"
    )


def test_webvtt_has_a_time_for_every_word_and_escapes_markup() -> None:
    assert to_vtt(WORDS[:2]) == "WEBVTT\n\n00:00:00.000 --> 00:00:00.500\nSalt <00:00:00.400>&amp;\n"


def test_subtitles_show_neither_marks_of_markdown_nor_entities() -> None:
    texts = ("**A&amp;B**", "`5*3`", "*", "snake_case", "a&copy=b", "**bold.**", "Next")
    words = [Word(text, each, each + 0.5, each * 20, each * 20 + len(text)) for each, text in enumerate(texts)]
    assert to_srt(words).splitlines()[2::4] == ["A&B 5*3 * snake_case a&copy=b bold.", "Next"]
    assert "A&amp;B <00:00:01.000>5*3 <00:00:02.000>* <" in to_vtt(words)


def test_json_has_the_words_as_they_are() -> None:
    words = json.loads(to_json(WORDS))["words"]
    assert words[3] == {"text": "你", "start": 3661.6, "end": 3661.8, "first": 14, "last": 15}
    assert json.loads(to_json(())) == {"words": []}


def test_long_speech_is_cut_into_subtitles_that_can_be_read() -> None:
    words = [Word("harbour", each * 0.5, each * 0.5 + 0.4, each * 8, each * 8 + 7) for each in range(60)]
    found = list(cues(words))
    assert [word for cue in found for word in cue] == words
    assert all(cue[-1].end - cue[0].start <= 7 and len(cue) * 8 <= 85 for cue in found)
    late = [words[0], Word("later", 5.0, 5.2, 8, 13)]
    assert len(list(cues(late))) == 2


def test_faster_audio_has_earlier_words() -> None:
    assert scaled(WORDS[:2], 2.0)[1] == Word("&", 0.2, 0.25, 5, 6)
    assert scaled(WORDS, 1.0) == WORDS


def test_other_formats_are_refused() -> None:
    assert subtitle_format(Path("a.SRT")) is to_srt
    with pytest.raises(InvalidRequest, match=r"a.ass: subtitles are .srt, .vtt, .json, not .ass"):
        subtitle_format(Path("a.ass"))
