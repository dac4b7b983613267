import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Shoal
from tests.cli.say.test_say import TINY, write_wav


@pytest.fixture(autouse=True)
def own_voices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_VOICES", str(tmp_path / "voices"))


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    write_wav(tmp_path / "me.wav", 0.1 * np.sin(np.arange(32000) / 20)[:, None])
    return tmp_path / "me.wav"


def own(shoal: Shoal) -> list[str]:
    listed = json.loads(shoal("voices", "list", "--json").out)["voices"]
    return [voice["name"] for voice in listed if not voice["builtin"]]


def test_a_voice_is_described_and_listed_with_its_words(shoal: Shoal, recording: Path) -> None:
    added = shoal("voices", "add", "narrator", recording, "--transcript", "La la.")
    assert "warning: only 2.0 seconds long" in added.err
    assert shoal("voices", "describe", "narrator", "--title", "Anna", "--accent", "Irish").code == 0
    assert shoal("voices", "describe", "narrator", "--gender", "female").code == 0
    (line,) = [line for line in shoal("voices", "list").text.splitlines() if line.startswith("narrator")]
    assert line.split("  ")[-1] == "Anna, female, Irish"
    assert shoal("voices", "describe", "narrator", "--gender", "loud").code == 2
    assert shoal("voices", "describe", "narrator", "--title", "Zo\udcc3\udcab").code == 0
    assert "Zoë" in shoal("voices", "list").text


def test_a_voice_is_added_used_renamed_and_removed(shoal: Shoal, recording: Path, tmp_path: Path) -> None:
    added = shoal("voices", "add", "narrator", recording, "--transcript", "La la.")
    assert (added.code, "--voice narrator" in added.err) == (0, True)
    assert own(shoal) == ["narrator"]
    assert "narrator" in shoal("voices", "list").text
    spoken = shoal("say", "Hello.", "--voice", "narrator", "-o", tmp_path / "a.wav", *TINY)
    assert (spoken.code, spoken.err) == (0, "")
    assert shoal("voices", "rename", "narrator", "other").code == 0
    assert own(shoal) == ["other"]
    assert shoal("voices", "remove", "other").code == 0
    assert own(shoal) == []


def test_a_name_with_a_space_is_quoted_for_the_shell(shoal: Shoal, recording: Path) -> None:
    added = shoal("voices", "add", "my voice", recording, "--transcript", "La la.")
    assert "--voice 'my voice'\n" in added.err
    assert "new one" in shoal("voices", "rename", "my voice", "new one").err


def test_the_suggested_command_needs_no_model_that_is_not_installed(shoal: Shoal, recording: Path) -> None:
    suggestion, note = shoal("voices", "add", "narrator", recording, "--transcript", "La la.").err.splitlines()[-2:]
    assert suggestion.endswith('try it: shoal say "Hello." --voice narrator')
    assert "--model s1-mini follows it closely" in note


def test_cloning_with_nano_prints_a_note(shoal: Shoal, recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.wav"
    ran = shoal("say", "Hi.", "--voice", recording, "--transcript", "La la.", "-o", out, "--max-frames", "4")
    assert "only a part of a recorded voice" in ran.err


def test_without_a_recogniser_a_transcript_is_needed(
    shoal: Shoal, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "moonshine_voice" else find_spec(name, *rest)
    )
    added = shoal("voices", "add", "tone", recording)
    assert (added.code, "send it as --transcript, or: " in added.err, "shoal-tts[asr]" in added.err) == (11, True, True)
    assert own(shoal) == []


def test_invalid_voices_are_rejected(shoal: Shoal, recording: Path, tmp_path: Path) -> None:
    assert shoal("voices", "add", "../x", recording, "--transcript", "La.").code == 2
    assert shoal("voices", "add", "x", tmp_path / "nowhere.wav", "--transcript", "La.").code == 4
    assert shoal("voices", "add", "x", recording, "--transcript", "").code == 3
    assert shoal("voices", "remove", "x").code == 5
    assert own(shoal) == []
