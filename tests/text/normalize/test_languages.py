import pytest

from shoal.errors import MissingExtra, TextError
from shoal.speech import SpeechRequest
from shoal.text.normalize.languages import normalize_french, normalize_german
from shoal.text.plan import TextRules, plan_text

S2 = TextRules(phonemes=True, splits_dialogue=True)

GERMAN = [
    ("Am 3.5.2024 um 14:30 Uhr.", "Am dritten Mai zweitausendvierundzwanzig um vierzehn Uhr dreißig."),
    ("Der 1. Mai, ab 8 Uhr.", "Der erste Mai, ab acht Uhr."),
    ("Es kostet 5,99 € oder 1 €.", "Es kostet fünf Euro neunundneunzig oder ein Euro."),
    ("1.250 Leute, 3,5 % mehr", "eintausendzweihundertfünfzig Leute, drei Komma fünf Prozent mehr"),
    ("Im Jahr 1989 waren es 20 °C.", "Im Jahr neunzehnhundertneunundachtzig waren es zwanzig Grad Celsius."),
    ("1 Hund, 2 Katzen, 100 km/h", "ein Hund, zwei Katzen, einhundert Kilometer pro Stunde"),
    ("PLZ 01067, Typ B2, v1.2.3", "PLZ null eins null sechs sieben, Typ B2, v1.2.3"),
    ("Kein Wort davon.", "Kein Wort davon."),
]
FRENCH = [
    ("Le 1/05/2024 à 14h30.", "Le premier mai deux mille vingt-quatre à quatorze heures trente."),
    ("Le 1er mai et le 21e siècle", "Le premier mai et le vingt et unième siècle"),
    ("Ça coûte 5,99 € ou 1 €.", "Ça coûte cinq euros quatre-vingt-dix-neuf ou un euro."),
    ("1 250 personnes, 3,5 % de plus", "mille deux cent cinquante personnes, trois virgule cinq pour cent de plus"),
    ("En 1989, à 1 h et 20 km d'ici", "En mille neuf cent quatre-vingt-neuf, à une heure et vingt kilomètres d'ici"),
    ("1 chien, 2 chats", "un chien, deux chats"),
]


@pytest.mark.parametrize(("text", "expected"), GERMAN)
def test_german_numbers_are_read_as_words(text: str, expected: str) -> None:
    assert normalize_german(text) == expected


@pytest.mark.parametrize(("text", "expected"), FRENCH)
def test_french_numbers_are_read_as_words(text: str, expected: str) -> None:
    assert normalize_french(text) == expected


def test_tags_stay_and_nano_speaks_english_only() -> None:
    text = "<|speaker:0|>[whisper] Um 8:00 (excited) <|phoneme_start|>B1<|phoneme_end|>."
    assert plan_text(SpeechRequest(text, language="de"), S2).text == text.replace("8:00", "acht Uhr")
    with pytest.raises(TextError, match="speaks English only: normalize must be en, not de"):
        plan_text(SpeechRequest("8 Uhr", language="de"), TextRules(english_words=True))


@pytest.mark.parametrize("mark", ["1", "1.", "1 ", "1,", "1:", "1/", "€1", "1er ", "0"])
def test_hostile_repetition_is_read_in_linear_time(mark: str) -> None:
    """Quadratic time would take minutes for these texts."""
    for change in (normalize_german, normalize_french):
        assert change(mark * (5_000 // len(mark)))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "num2words", None)
    with pytest.raises(MissingExtra, match=r"shoal-tts\[languages\]"):
        normalize_german("5")
