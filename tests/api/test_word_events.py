from shoal.api.word_events import CharacterTimes, FishAlignment
from shoal.speech import Word

WORDS = (
    Word("Hi", 0.0, 0.2, 0, 2),
    Word("你", 0.2, 0.4, 3, 4),
    Word("好，", 0.4, 0.6, 4, 6),
    Word("all", 0.6, 0.8, 7, 10),
)


def test_characters_have_the_spaces_of_the_text() -> None:
    times = CharacterTimes.of(WORDS)
    assert "".join(times.characters) == "Hi 你好， all "
    assert times.starts == [0.0, 0.1, 0.2, 0.2, 0.4, 0.5, 0.6, 0.6, 0.667, 0.733, 0.8]
    assert times.ends == [0.1, 0.2, 0.2, 0.4, 0.5, 0.6, 0.6, 0.667, 0.733, 0.8, 0.8]


def test_a_character_of_chinese_at_the_end_of_a_message_is_not_followed_by_a_space() -> None:
    assert CharacterTimes.of(WORDS[1:2]).characters == ["你"]
    assert CharacterTimes.of(WORDS[3:]).characters == ["a", "l", "l", " "]


def test_content_has_the_spaces_of_the_text() -> None:
    assert FishAlignment().fields(WORDS)["content"] == "Hi 你好， all"
