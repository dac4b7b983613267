import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training import data
from training.data import (
    FRAME,
    SAMPLE_RATE,
    TARGET_RMS,
    VOICES,
    Corpus,
    CorpusMismatch,
    HeldoutPlan,
    Plan,
    Teacher,
    TeacherFailed,
    Teachers,
    Utterance,
    generate,
    level,
    main,
    plausible,
    record,
    scale_formants,
    trim,
    whole_frames,
    write_shard,
)

# Speaks the protocol of training/teachers/protocol.h: a tone whose pitch tells the voice and whose length the text.
# The noise counter runs on from request to request, as the real ones' does.
FAKE_TEACHER = """#!{python}
import array, os, struct, sys
noise = 0
for line in sys.stdin.buffer:
    voice, speed, pitch, volume, text = line.decode().rstrip("\\n").split("\\t")
    if "crash" in text:
        os._exit(1)
    noise += 1
    count = 0 if "silent" in text else round(16000 * 0.06 * len(text) * 100 / int(speed))
    half = 20 + sum(map(ord, voice)) % 20
    loud = 80 * int(volume) + noise % 7
    sound = (([loud] * half + [-loud] * half) * (count // half + 1))[:count]
    quiet = [0] * 4000 if count else []
    samples = array.array("h", quiet + sound + quiet)
    sys.stdout.buffer.write(struct.pack("<I", len(samples)) + samples.tobytes())
    sys.stdout.buffer.flush()
"""

SENTENCES = ["Hello there.", "Good day.", "How are you?", "Fine, thanks.", "See you.", "Not now, please.", "Well done!"]


@pytest.fixture
def teachers(tmp_path: Path) -> Path:
    folder = tmp_path / "teachers"
    folder.mkdir()
    for name in ("pico", "flite"):
        (folder / name).write_text(FAKE_TEACHER.format(python=sys.executable))
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.data.plan.UTTERANCES_PER_SHARD", 8)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}


def make_shards(plan: Plan, teachers: Path, out: Path, shards: range) -> None:
    data.claim(out, plan)
    data.work(plan, teachers, out, shards)


# --- the plan ---


def test_every_stretch_of_the_plan_mixes_the_voices_evenly() -> None:
    plan = Plan(SENTENCES * 8)
    for shard in range(7):
        assert sorted(u.voice.name for u in plan.shard(shard)) == sorted(v.name for v in VOICES)


def test_a_sentence_comes_back_in_another_voice() -> None:
    plan = Plan(SENTENCES)
    laps = [
        [plan.utterance(lap * len(SENTENCES) + place) for place in range(len(SENTENCES))] for lap in range(len(VOICES))
    ]
    for said in zip(*laps, strict=True):
        assert len({u.text for u in said}) == 1
        assert len({u.voice for u in said}) == len(VOICES)


def test_the_seed_decides_the_order() -> None:
    assert Plan(SENTENCES * 9, seed=1).shard(0) == Plan(SENTENCES * 9, seed=1).shard(0)
    assert Plan(SENTENCES * 9, seed=1).shard(0) != Plan(SENTENCES * 9, seed=2).shard(0)


def test_tempo_varies_only_when_asked_and_within_its_range() -> None:
    tempos = [Plan(SENTENCES, vary_tempo=True).utterance(index).tempo for index in range(100)]
    assert len(set(tempos)) > 50
    assert 0.92 <= min(tempos) < 0.95 < 1.05 < max(tempos) <= 1.08
    assert {Plan(SENTENCES).utterance(index).tempo for index in range(100)} == {1.0}


def test_sentences_are_joined_only_when_asked_and_only_short_ones() -> None:
    joined = [Plan(SENTENCES, join=True).utterance(index) for index in range(200)]
    assert 20 < sum(len(u.sentences) == 2 for u in joined) < 80
    assert all(len(Plan(SENTENCES).utterance(index).sentences) == 1 for index in range(50))
    assert data.joinable(("a" * 150, "b" * 150)) == ("a" * 150,)


def test_a_joined_sentence_is_closed_before_the_next() -> None:
    assert Utterance(VOICES[0], data.joinable(("an open phrase,", "Go on."))).text == "an open phrase. Go on."
    assert Utterance(VOICES[0], data.joinable(("Really?", "Go on."))).text == "Really? Go on."


def test_the_heldout_plan_says_every_sentence_in_every_voice_once() -> None:
    plan = HeldoutPlan(SENTENCES)
    said = [(u.text, u.voice.name) for shard in range(plan.shards_for(0)) for u in plan.shard(shard)]
    assert sorted(said) == sorted((text, voice.name) for text in SENTENCES for voice in VOICES)


def test_more_hours_mean_more_shards() -> None:
    assert 0 < Plan(SENTENCES).shards_for(0.01) < Plan(SENTENCES).shards_for(0.02)


# --- sound ---


def tone(seconds: float, frequency: float = 440.0, loud: float = 0.3) -> data.Signal:
    return loud * np.sin(2 * np.pi * frequency * np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE)


@given(lead=st.integers(0, 9000), tail=st.integers(0, 9000))
def test_trimming_leaves_the_same_silence_whatever_surrounded_the_speech(lead: int, tail: int) -> None:
    trimmed = trim(np.pad(tone(0.5), (lead, tail)))
    loud = np.flatnonzero(np.abs(trimmed) > 0.01)
    assert abs(loud[0] - 0.060 * SAMPLE_RATE) <= 2
    assert abs(trimmed.size - 1 - loud[-1] - 0.150 * SAMPLE_RATE) <= 2


def test_silence_trims_to_nothing() -> None:
    assert trim(np.zeros(1000)).size == 0
    assert trim(np.zeros(0)).size == 0


@given(loud=st.floats(0.01, 1.0))
def test_levelling_brings_active_samples_to_the_target(loud: float) -> None:
    speech = level(np.pad(tone(0.5, loud=loud), 4000))
    active = speech[np.abs(speech) > 0.02 * np.abs(speech).max()]
    assert np.sqrt(np.mean(active**2)) == pytest.approx(TARGET_RMS, rel=1e-6)


def test_levelling_never_clips() -> None:
    speech = np.pad(0.03 * np.ones(50_000), 10)
    speech[500] = 1.0
    assert np.abs(level(speech)).max() <= 0.97 + 1e-9


@given(size=st.integers(0, 5 * FRAME))
def test_padding_adds_less_than_a_frame_to_make_it_whole(size: int) -> None:
    padded = whole_frames(np.ones(size))
    assert padded.size % FRAME == 0
    assert 0 <= padded.size - size < FRAME


@pytest.mark.parametrize("factor", [0.90, 0.92, 1.08])
def test_scaling_formants_moves_frequencies_and_length_together(factor: float) -> None:
    scaled = scale_formants(tone(1.0, 1000.0), factor)
    spectrum = np.abs(np.fft.rfft(scaled * np.hanning(scaled.size)))
    assert scaled.size == pytest.approx(SAMPLE_RATE / factor, rel=1e-3)
    assert spectrum.argmax() * SAMPLE_RATE / scaled.size == pytest.approx(1000 * factor, rel=0.01)


def test_speech_that_is_far_too_short_or_long_is_not_plausible() -> None:
    assert plausible("How are you today?", round(1.2 * SAMPLE_RATE))
    assert not plausible("How are you today? " * 4, round(0.9 * SAMPLE_RATE))
    assert not plausible("Hi.", 10 * SAMPLE_RATE)


# --- teachers ---


def test_the_teachers_speed_makes_up_for_the_resampling(teachers: Path) -> None:
    lengths = {}
    with Teachers(teachers) as running:
        for voice in VOICES:
            lengths[voice.name] = record(Utterance(voice, ("The same words for everyone.",)), running).size
    assert max(lengths.values()) - min(lengths.values()) <= FRAME


def test_a_faster_tempo_is_shorter_speech(teachers: Path) -> None:
    with Teachers(teachers) as running:
        sizes = [
            record(Utterance(VOICES[0], ("A sentence of some length.",), t), running).size for t in (0.92, 1.0, 1.08)
        ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[2]


def test_joined_sentences_are_recorded_with_a_pause_between(teachers: Path) -> None:
    with Teachers(teachers) as running:
        apart = [record(Utterance(VOICES[0], (text,)), running).size for text in ("One two three.", "Four five six.")]
        together = record(Utterance(VOICES[0], ("One two three.", "Four five six.")), running).size
    assert together == pytest.approx(sum(apart) + 0.25 * SAMPLE_RATE, abs=2 * FRAME)


@pytest.mark.parametrize("text", ["please crash", "stay silent"])
def test_a_failing_teacher_is_reported_and_the_next_sentence_is_spoken(teachers: Path, text: str) -> None:
    with Teachers(teachers) as running:
        with pytest.raises(TeacherFailed, match=text):
            running.speak(VOICES[0], text, 1.0)
        assert running.speak(VOICES[0], "Hello again.", 1.0).size


def test_a_hanging_teacher_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.data.teachers.TEACHER_TIMEOUT_SECONDS", 0.1)
    (tmp_path / "pico").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "pico").chmod(0o755)
    teacher = Teacher.start(tmp_path, "pico")
    with pytest.raises(TeacherFailed, match="no answer in time"):
        teacher.ask("us\t100\t100\t100\tHello.\n")
    assert not teacher.alive


# --- shards ---


def test_a_shard_reads_back_what_was_planned(teachers: Path, tmp_path: Path) -> None:
    plan = Plan(SENTENCES)
    make_shards(plan, teachers, tmp_path / "out", range(2))
    corpus = Corpus(tmp_path / "out")
    planned = [u for shard in range(2) for u in plan.shard(shard)]
    assert [(text, voice) for _, text, voice in corpus] == [(u.text, u.voice.name) for u in planned]
    for samples, _, _ in corpus:
        assert samples.dtype == np.int16
        assert samples.size % FRAME == 0
        assert np.abs(samples).max() > 1000
    assert corpus.voices == [voice.name for voice in VOICES]
    assert corpus.samples == sum(samples.size for samples, _, _ in corpus)
    assert sorted(index for indices in corpus.by_voice().values() for index in indices) == list(range(len(corpus)))


def test_the_lines_say_where_the_samples_are(teachers: Path, tmp_path: Path) -> None:
    make_shards(Plan(SENTENCES), teachers, tmp_path, range(1))
    lines = [json.loads(line) for line in (tmp_path / "shard-00000.jsonl").read_text().splitlines()]
    assert set(lines[0]) == {"voice", "text", "offset", "samples"}
    ends = [line["offset"] + line["samples"] for line in lines]
    assert [line["offset"] for line in lines] == [0, *ends[:-1]]
    assert (tmp_path / "shard-00000.pcm").stat().st_size == 2 * ends[-1]


def test_a_sentence_that_cannot_be_spoken_is_left_out(teachers: Path, tmp_path: Path) -> None:
    said = [Utterance(VOICES[0], (text,)) for text in ("Hello there.", "please crash", "stay silent", "Good day.")]
    with Teachers(teachers) as running:
        write_shard(tmp_path, 0, said, running)
    assert [text for _, text, _ in Corpus(tmp_path)] == ["Hello there.", "Good day."]


def test_refresh_adds_finished_shards_and_keeps_indices(teachers: Path, tmp_path: Path) -> None:
    plan = Plan(SENTENCES)
    make_shards(plan, teachers, tmp_path, range(1, 2))
    corpus = Corpus(tmp_path)
    before = corpus[0]
    (tmp_path / "shard-00002.pcm").write_bytes(b"torn")
    make_shards(plan, teachers, tmp_path, range(1))
    assert corpus.refresh() == 8
    assert corpus.refresh() == 0
    assert corpus[0][1:] == before[1:]
    assert np.array_equal(corpus[0][0], before[0])


def test_a_shard_sounds_the_same_whatever_its_worker_made_before(teachers: Path, tmp_path: Path) -> None:
    plan = Plan(SENTENCES, seed=5, vary_tempo=True, join=True)
    make_shards(plan, teachers, tmp_path / "whole", range(3))
    for shard in (2, 0, 1):
        make_shards(plan, teachers, tmp_path / "pieces", range(shard, shard + 1))
    assert contents(tmp_path / "whole") == contents(tmp_path / "pieces")


def test_a_torn_shard_is_made_again_and_whole_ones_are_kept(teachers: Path, tmp_path: Path) -> None:
    plan = HeldoutPlan(SENTENCES[:2])
    data.claim(tmp_path, plan)
    data.work(plan, teachers, tmp_path, [0, 1])
    whole = contents(tmp_path)
    (tmp_path / "shard-00001.jsonl").unlink()
    (tmp_path / "shard-00001.pcm").write_bytes(b"torn")
    (tmp_path / ".shard-00001.jsonl.1.tmp").write_text("half a line")
    kept = (tmp_path / "shard-00000.pcm").stat().st_mtime_ns
    assert len(Corpus(tmp_path)) == 8
    missing = [shard for shard in range(plan.shards_for(0)) if not data.is_complete(tmp_path, shard)]
    data.work(plan, teachers, tmp_path, missing)
    assert contents(tmp_path) == whole
    assert (tmp_path / "shard-00000.pcm").stat().st_mtime_ns == kept


def test_another_plan_may_not_write_into_the_same_folder(tmp_path: Path) -> None:
    data.claim(tmp_path, Plan(SENTENCES))
    data.claim(tmp_path, Plan(SENTENCES))
    with pytest.raises(CorpusMismatch):
        data.claim(tmp_path, Plan(SENTENCES, seed=1))


# --- the command, with real worker processes ---


def test_the_command_resumes_and_does_not_care_how_many_workers(
    teachers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("training.data.plan.UTTERANCES_PER_SHARD", 200)
    text = tmp_path / "sentences.txt"
    text.write_text("\n".join(SENTENCES) + "\n")
    common = ["--text", str(text), "--teachers", str(teachers), "--hours", "0.1", "--voices", "us_f", "awb"]
    main([*common, "--out", str(tmp_path / "two"), "--processes", "2"])
    main([*common, "--out", str(tmp_path / "one"), "--processes", "1"])
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    (tmp_path / "two" / "shard-00001.jsonl").unlink()
    (tmp_path / "two" / ".left.tmp").write_text("")
    capsys.readouterr()
    main([*common, "--out", str(tmp_path / "two"), "--processes", "2"])
    assert "1 shards made" in capsys.readouterr().out
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert not list((tmp_path / "two").glob(".*.tmp"))
    assert json.loads((tmp_path / "two" / "voices.json").read_text()) == ["us_f", "awb"]


def test_the_help_of_the_command_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "up to 8% off tempo" in " ".join(capsys.readouterr().out.split())


def test_a_failed_worker_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="worker failed"):
        generate(Plan(SENTENCES), tmp_path / "nowhere", tmp_path / "out", hours=0.01, processes=1)
    assert not list((tmp_path / "out").glob("shard-*"))


# --- the built teachers, where they are ---

BUILT = Path(__file__).parents[2] / "build" / "teachers"


@pytest.mark.skipif(not (BUILT / "pico").exists(), reason="needs training/teachers/build.sh build/teachers")
@pytest.mark.parametrize("voice", VOICES, ids=lambda voice: voice.name)
def test_every_built_voice_speaks_at_a_natural_pace_without_clipping(voice: data.Voice) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    with Teachers(BUILT) as running:
        raw = running.speak(voice, text, 1.0)
        samples = record(Utterance(voice, (text,)), running)
    assert np.abs(raw).max() < 0.99
    assert 2.0 < samples.size / SAMPLE_RATE < 4.5
