import subprocess
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.audio.decode import AudioLimits, read_audio
from shoal.engine.load import voice_cache
from shoal.errors import AudioError, InvalidRequest, TextError
from shoal.text.prompt import Reference
from shoal.voices.encoder import CodecEncoder
from shoal.voices.store import VoiceStore
from shoal.voices.voice import (
    DEFAULT_LIMITS,
    PACE_RANGE,
    Voice,
    VoiceLimits,
    check_name,
    check_new_transcript,
    check_transcript,
    voice_from_recordings,
    voice_limits,
)

SAFE = "abcXYZ019-_ "
HOSTILE = [
    "",
    " ",
    "   ",
    " anna",
    "anna ",
    ".",
    "..",
    "../anna",
    "..\\anna",
    "anna/../../etc",
    "/etc/passwd",
    "a.b",
    ".shoal-0",
    "~",
    "anna\n",
    "anna\x00",
    "anna\t",
    "%2e%2e",
    "ａnna",  # full width
    "аnna",  # Cyrillic
    "ann\u0061\u0301",  # a combining accent
    "anna\u202egpj",  # written from right to left
    "anna\u200b",  # a space of no width
    "anna\u00a0bell",  # a space that does not break
    "․․/anna",  # one-dot leaders
    "..／anna",  # a slash of full width
    "\ud800",
    "١٢٣",  # digits, but not ours
    "a" * 256,
]


@pytest.mark.parametrize("name", HOSTILE)
def test_unsafe_names_are_refused(name):
    with pytest.raises(InvalidRequest):
        check_name(name)


@pytest.mark.parametrize("name", ["anna", "Anna Bell", "a", "-", "speaker_01", "con", "a" * 255])
def test_the_names_of_upstream_are_accepted(name):
    assert check_name(name) == name


@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from(SAFE + "./\\")), max_size=12))
def test_an_accepted_name_is_one_path_component(name):
    try:
        check_name(name)
    except InvalidRequest:
        return
    assert PurePosixPath("/voices", name).parent == PurePosixPath("/voices")
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_ ")
    assert name.strip() == name != ""


@given(st.text(alphabet=SAFE, min_size=1, max_size=255))
def test_any_safe_characters_make_a_name_unless_spaces_surround_it(name):
    if name == name.strip():
        assert check_name(name) == name
    else:
        with pytest.raises(InvalidRequest):
            check_name(name)


def voice(*references: tuple[str, list[list[int]]], name: str | None = None) -> Voice:
    return Voice(name, tuple(Reference(text, np.array(codes, np.int32)) for text, codes in references), 10.0)


def test_voices_of_equal_content_share_a_key_whatever_their_names():
    one, other = voice(("hi", [[1, 2], [3, 4]]), name="anna"), voice(("hi", [[1, 2], [3, 4]]))
    assert one.key == other.key


def test_the_layout_of_codes_in_memory_does_not_change_the_key():
    plain = voice(("hi", [[1, 2, 3], [3, 4, 5]]))
    codes = np.asfortranarray(plain.references[0].codes).astype(">i4")
    assert Voice(None, (Reference("hi", codes),), 10.0).key == plain.key


TEXTS = st.text(alphabet="ab", max_size=3)
FRAMES = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(lambda row: [row, row])
CONTENT = st.lists(st.tuples(TEXTS, FRAMES), min_size=1, max_size=3)


@given(CONTENT, CONTENT)
def test_voices_of_other_content_have_other_keys(one, other):
    assert (voice(*one).key == voice(*other).key) == (one == other)


def test_a_voice_has_a_length_in_frames_and_seconds():
    made = voice(("a", [[1, 2, 3]]), ("b", [[4, 5]]))
    assert made.frames == 5
    assert made.seconds == 0.5


def test_the_pace_of_a_voice_is_its_duration_over_an_ordinary_reading():
    def voice(seconds):
        return Voice("v", (Reference("fifteen letters", np.zeros((1, int(seconds * 25)), np.int32)),), frame_rate=25.0)

    assert voice(0.8).pace == pytest.approx(0.8 / (14 / 15))
    assert (voice(0.2).pace, voice(9.0).pace) == PACE_RANGE


def test_a_voice_without_recordings_is_refused(encoder):
    with pytest.raises(InvalidRequest, match="at least one"):
        voice_from_recordings([], encoder)


def test_recordings_are_encoded_by_the_codec(tiny, wav, tmp_path):
    encoder, audio = CodecEncoder(tiny.codec), wav(0.7, rate=22_050)
    (tmp_path / "b.wav").write_bytes(wav(0.5, 330))
    made = voice_from_recordings([(audio, " one\n"), (tmp_path / "b.wav", "two")], encoder)
    expected = encoder.encode(read_audio(audio, tiny.codec.config.sample_rate).samples)
    assert [reference.text for reference in made.references] == ["one", "two"]
    assert np.array_equal(made.references[0].codes, expected)
    assert made.references[0].codes.dtype == np.int32
    assert made.references[0].codes.shape[0] == tiny.codec.config.num_codebooks
    assert made.seconds == pytest.approx(1.2, abs=0.1)
    assert made.name is None


def test_codes_cannot_be_written_to(encoder, wav):
    codes = voice_from_recordings([(wav(), "hi")], encoder).references[0].codes
    with pytest.raises(ValueError, match="read-only"):
        codes[0, 0] = 1


def test_everything_is_checked_before_anything_is_encoded(encoder, wav):
    with pytest.raises(AudioError):
        voice_from_recordings([(wav(), "good"), (b"not audio", "bad")], encoder)
    with pytest.raises(TextError):
        voice_from_recordings([(wav(), "good"), (wav(), "")], encoder)
    assert encoder.encoded == 0


@pytest.mark.parametrize("transcript", ["", "  \n", "a" * 4001, "half \ud83d"])
def test_empty_and_too_long_transcripts_are_refused(transcript):
    with pytest.raises(TextError):
        check_transcript(transcript, DEFAULT_LIMITS)


def test_a_stored_transcript_may_hold_speaker_tags_and_no_control_token():
    assert check_new_transcript(" <|speaker:1|>Hello. ", DEFAULT_LIMITS) == "<|speaker:1|>Hello."
    with pytest.raises(TextError, match=r"transcript contains the control token <\|im_end\|>.*remove it"):
        check_new_transcript("<|speaker:1|>Hello <|im_end|> there.", DEFAULT_LIMITS)


def test_a_recording_may_last_ninety_seconds(encoder, wav):
    assert voice_from_recordings([(wav(90.0), "long")], encoder).seconds == 90
    with pytest.raises(AudioError, match="longer than 90 seconds"):
        voice_from_recordings([(wav(90.1), "longer")], encoder)


def test_the_total_length_of_recordings_is_limited(encoder, wav):
    limits = replace(DEFAULT_LIMITS, max_total_seconds=2.5)
    assert voice_from_recordings([(wav(), "a"), (wav(), "b")], encoder, limits).frames == 20
    with pytest.raises(AudioError, match=r"together are longer than 2\.5 seconds"):
        voice_from_recordings([(wav(), "a"), (wav(), "b"), (wav(), "c")], encoder, limits)
    assert encoder.encoded == 2


def test_the_size_of_a_recording_is_limited(encoder, wav, tmp_path):
    limits = VoiceLimits(audio=AudioLimits(max_bytes=1000))
    path = tmp_path / "long.wav"
    path.write_bytes(wav())
    for audio in (wav(), path):
        with pytest.raises(AudioError, match="larger than 1000 bytes"):
            voice_from_recordings([(audio, "hi")], encoder, limits)


def test_silence_is_refused(encoder, wav):
    with pytest.raises(AudioError, match="silent"):
        voice_from_recordings([(wav(pitch=0.0), "hi")], encoder)


def test_a_path_that_cannot_be_read_is_named(encoder, tmp_path):
    with pytest.raises(AudioError, match=r"gone\.wav.*No such file"):
        voice_from_recordings([(Path(tmp_path, "gone.wav"), "hi")], encoder)


def test_voices_without_a_codec_need_no_torch():
    code = "import sys, shoal.voices.cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0


def test_recordings_longer_than_the_prompt_are_refused_before_they_are_encoded_or_stored(encoder, wav, tmp_path):
    limits = voice_limits(90.0, prompt_seconds=1.5)
    clips = [(wav(1.0), "One."), (wav(1.0), "Two.")]
    with pytest.raises(AudioError, match=r"last 2\.0 seconds and the prompt of this model holds 1\.5"):
        voice_from_recordings(clips, encoder, limits)
    assert encoder.encoded == 0
    store = VoiceStore(tmp_path, sample_rate=encoder.sample_rate, limits=limits)
    with pytest.raises(AudioError, match="use a shorter recording"):
        store.add("long", wav(2.0), "Long.")
    assert store.names() == []
    assert voice_from_recordings(clips[:1], encoder, limits).frames == 10


def test_the_voices_of_a_model_have_the_limit_of_its_prompt(tiny, tmp_path):
    assert tiny.prompt_seconds == tiny.model.config.max_prompt / tiny.codec.config.frame_rate
    cache = voice_cache(tiny, tmp_path)
    assert cache._limits.prompt_seconds == tiny.prompt_seconds
    cache.close()
