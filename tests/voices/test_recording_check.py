from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shoal.audio.encode import encode_file
from shoal.audio.pcm import Samples
from shoal.checkpoint.find import BUNDLED_DIRECTORY
from shoal.errors import AudioError
from shoal.voices.recording_check import RecordingReport, check_recording
from shoal.voices.voice import DEFAULT_LIMITS, VoiceLimits

RATE = 16_000


def voice(seconds: float = 12.0, amplitude: float = 0.3) -> Samples:
    """Syllables with harmonics, a pitch that moves, and pauses."""
    time = np.arange(round(seconds * RATE)) / RATE
    phase = 2 * np.pi * np.cumsum(130 + 25 * np.sin(2 * np.pi * 0.7 * time)) / RATE
    tone = sum(np.sin(n * phase) / n for n in range(1, 8)) / 2
    loudness = np.clip(np.sin(2 * np.pi * 2.3 * time), 0, 1) * (np.sin(2 * np.pi * 0.3 * time) > -0.7)
    return (amplitude * tone * loudness).astype(np.float32)


def noise(seconds: float = 12.0, amplitude: float = 0.1) -> Samples:
    return (amplitude * np.random.default_rng(1).standard_normal(round(seconds * RATE))).astype(np.float32)


def check(samples: Samples, text: str | None = None, limits: VoiceLimits = DEFAULT_LIMITS) -> RecordingReport:
    return check_recording(encode_file(np.clip(samples, -1, 1), "wav", RATE), limits, text)


def codes(samples: Samples, text: str | None = None) -> set[str]:
    return {finding.code for finding in check(samples, text).findings}


def test_a_good_recording_has_no_findings() -> None:
    report = check(voice(), "word " * 30)
    assert report.findings == ()
    assert (report.seconds, report.sample_rate, report.channels) == (12.0, RATE, 1)
    assert report.speech_seconds > 2
    assert -30 < report.level_db < -5
    assert report.noise_db < -60


@pytest.mark.parametrize(
    ("samples", "code"),
    [
        (voice(3.0), "short"),
        (voice(60.0), "long"),
        (voice(amplitude=0.005), "quiet"),
        (voice(amplitude=3.0), "clipped"),
        (voice() + noise(amplitude=0.05), "noisy"),
        (noise(), "no_speech"),
        ((0.3 * np.sin(np.arange(12 * RATE) / 8)).astype(np.float32), "no_speech"),
    ],
    ids=["short", "long", "quiet", "clipped", "noisy", "noise", "hum"],
)
def test_a_fault_is_found(samples: Samples, code: str) -> None:
    assert codes(samples) == {code}


def test_the_length_of_the_transcript_is_compared() -> None:
    assert codes(voice(), "La.") == {"transcript_short"}
    assert codes(voice(), "many words " * 60) == {"transcript_long"}
    assert codes(voice(), "...") == set(), "a transcript without letters says nothing about its length"


def test_what_cannot_become_a_voice_is_an_error() -> None:
    with pytest.raises(AudioError, match="silent"):
        check(np.zeros(RATE, np.float32))
    with pytest.raises(AudioError, match="the prompt of this model holds 5"):
        check(voice(), limits=VoiceLimits(prompt_seconds=5.0))
    with pytest.raises(AudioError, match="text file"):
        check_recording(b"Only words.", DEFAULT_LIMITS)


def test_clipping_is_found_at_the_rate_of_the_file() -> None:
    """Decoding at another rate would round the clipped peaks off."""
    loud = np.clip(voice(amplitude=2.0), -1, 1)
    report = check_recording(encode_file(loud, "wav", 22_050), DEFAULT_LIMITS)
    assert report.clipped > 0.01


def test_the_recordings_of_nano_are_speech() -> None:
    recordings = sorted((BUNDLED_DIRECTORY / "voices").glob("*/*.wav"))
    found = {path.parent.name: speech_findings(path.read_bytes()) for path in recordings}
    assert found
    assert "no_speech" not in set().union(*found.values()), found


def speech_findings(audio: bytes) -> set[str]:
    return {finding.code for finding in check_recording(audio, DEFAULT_LIMITS).findings}


def test_the_store_checks_what_it_would_add(store, tmp_path: Path, wav: Callable[..., bytes]) -> None:
    (tmp_path / "me.wav").write_bytes(wav(8.0))
    assert store.check(tmp_path / "me.wav", "La la.").seconds == 8.0
    assert store.names() == []
