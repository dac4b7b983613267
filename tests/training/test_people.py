"""Recordings of people as shards: pauses, texts, vocal tracts, speakers that are held out."""

import json
import random
import wave
from pathlib import Path

import numpy as np
import pytest

from training.data import Corpus, read_lines
from training.people import (
    FIRST_SHARD,
    HELD_OUT_EVERY,
    TRACTS,
    Passage,
    cut_at_pauses,
    digit_strings,
    passages,
    trimmed,
    write_people,
)

RATE = 16_000


def tone(seconds: float, rate: int = RATE) -> np.ndarray:
    return (0.4 * np.sin(0.2 * np.arange(int(seconds * rate)))).astype(np.float32)


def silence(seconds: float, rate: int = RATE) -> np.ndarray:
    return np.zeros(int(seconds * rate), np.float32)


def test_a_recording_is_cut_at_long_pauses_only() -> None:
    recording = np.concatenate([tone(2.5), silence(0.5), tone(1.5), silence(0.1), tone(1.5), silence(0.4), tone(0.5)])
    parts = cut_at_pauses(recording, RATE)
    assert [round(len(part) / RATE, 1) for part in parts] == [2.6, 3.3, 0.6]


def test_a_part_shorter_than_two_seconds_is_joined_to_the_next() -> None:
    parts = cut_at_pauses(np.concatenate([tone(0.5), silence(0.4), tone(2.5), silence(0.4), tone(2.5)]), RATE)
    assert [round(len(part) / RATE, 1) for part in parts] == [3.5, 2.6]


def test_silence_alone_has_no_speech() -> None:
    assert len(trimmed(silence(0), RATE)) == 0
    assert cut_at_pauses(silence(0), RATE) == []


def write_wav(path: Path, samples: np.ndarray, rate: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


@pytest.mark.parametrize(("text", "kept"), [("this is what they said", True), ("two words", False), ("x " * 80, False)])
def test_a_passage_needs_a_text_of_plausible_length(tmp_path: Path, text: str, kept: bool) -> None:
    write_wav(tmp_path / "103-1-2.wav", tone(2.4), RATE)
    found = list(passages([tmp_path / "103-1-2.wav"], lambda samples: text))
    assert [(each.speaker, each.text) for each in found] == ([("103", text)] if kept else [])
    assert all(np.abs(each.samples).max() == pytest.approx(0.5, abs=0.01) for each in found)


def test_digits_are_joined_to_strings_and_every_sixth_speaker_is_left_for_measurements(tmp_path: Path) -> None:
    for speaker in ("05", "06"):
        for digit in range(10):
            for take in range(50):
                path = tmp_path / speaker / f"{digit}_{speaker}_{take}.wav"
                write_wav(path, np.concatenate([silence(0.02, 8000), tone(0.1, 8000)]), 8000)
    found = list(digit_strings(tmp_path, random.Random(0)))
    assert {each.speaker for each in found} == {"digits05"}
    assert all(3 <= each.text.count(",") + 1 <= 6 and each.text.endswith(".") for each in found)
    assert all(each.text[0].isupper() and each.rate == 8000 for each in found)


def test_held_out_speakers_are_in_no_other_shard_and_tracts_make_other_speakers(tmp_path: Path) -> None:
    said = [Passage(f"{number:03d}", "some words here", tone(0.5), RATE) for number in range(2 * HELD_OUT_EVERY)]
    digits = [Passage("digits01", "One, two, three.", tone(0.5), RATE)]
    write_people(said, digits, tmp_path / "train", tmp_path / "held")
    held = {line.voice for line in read_lines(tmp_path / "held" / "shard-00001.jsonl")}
    assert len(held) == 2
    shards = [tmp_path / "train" / f"shard-{FIRST_SHARD + number:05d}.jsonl" for number in range(len(TRACTS) + 1)]
    voices = [[line.voice for line in read_lines(shard)] for shard in shards]
    assert not any(voice.split("*")[0] in held for shard in voices for voice in shard)
    assert voices[1][0] == f"{voices[0][0]}*{TRACTS[1]}"
    assert voices[-1] == ["digits01"]
    lengths = [json.loads(shard.read_text().splitlines()[0])["samples"] for shard in shards[: len(TRACTS)]]
    assert lengths == [pytest.approx(12_000 * tract, abs=2) for tract in TRACTS]
    assert len(list(Corpus(tmp_path / "train"))) == sum(map(len, voices))
