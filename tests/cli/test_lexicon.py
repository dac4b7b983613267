"""`shoal say --show-text` and `shoal lexicon check`."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Shoal


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("nginx = engine x\nGIF = jif\n")
    return path


def test_show_text_prints_what_the_model_reads_and_does_not_speak(shoal: Shoal, words: Path) -> None:
    run = shoal("say", "Dr. No: restart nginx! [pause:0.5s] It costs $5.", "--show-text", "--lexicon", str(words))
    assert (run.code, run.text) == (0, "Doctor No: restart engine ex!\n[pause:0.5s]\nIt costs five dollars.\n")
    shown = json.loads(shoal("say", "<speak>A<break time='1s'/></speak>", "--show-text", "--json").text)
    assert (shown["text"], shown["turns"][0]["pause_after"]) == ("A [pause:1s]", 1.0)
    assert shoal("say", "$5", "--show-text", "--model", "random:tiny").text == "$5\n"
    assert shoal("say", "<speak>$5</speak>", "--show-text", "--as-written", "--ssml").text == "$5\n"
    assert shoal("say", "$5", "--show-text", "--model", "random:tiny", "--normalize", "en").text == "five dollars\n"
    both = shoal("say", "$5", "--show-text", "--as-written", "--normalize", "en")
    assert (both.code, "--normalize changes the text" in both.said) == (2, True)
    unknown = shoal("say", "$5", "--show-text", "--normalize", "xx")
    assert (unknown.code, "--normalize must be one of en, de, fr" in unknown.said) == (2, True)
    refused = shoal("say", "Stop <|im_end|> here.", "--show-text", "--model", "random:tiny-s2")
    assert refused.code == 3
    assert "control token <|im_end|>" in refused.said


def test_check_counts_words_and_applies_them(shoal: Shoal, words: Path) -> None:
    run = shoal("lexicon", "check", str(words), "--text", "Nginx serves a GIF.")
    assert (run.code, run.text) == (0, "engine x serves a jif.\n")
    assert "2 words, 0 problems" in run.said


def test_check_reports_every_problem(shoal: Shoal, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("nginx = engine x\nnonsense\nnginx = en jinx\nGIF = /JH IH1 F/\n")
    run = shoal("lexicon", "check", str(path))
    assert run.code == 1
    for message in ("line 2: write `word = reading`", "'nginx' has more than one reading", "'GIF' has only phonemes"):
        assert message in run.said
    multilingual = json.loads(shoal("lexicon", "check", str(path), "--model", "random:tiny-s2", "--json").text)
    assert (multilingual["words"], len(multilingual["problems"])) == (3, 2)
